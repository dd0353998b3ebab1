package rpc

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// ID is an attachment id, an attempt token or an adopt token: 16 random bytes.
type ID [16]byte

// Node is what the services call. Its methods are safe for concurrent use; a
// slice in a request is borrowed until the method returns. Errors are the
// sentinels of package paging.
type Node interface {
	// Attach makes the caller an attachment. The rpc layer calls Detach on it
	// exactly once, when the stream has ended.
	Attach(ctx context.Context, c Caller, h *Hello) (Attachment, Welcome, error)
	// Attachment finds an attachment of the caller's tenant whose stream is held.
	Attachment(c Caller, id ID) (Attachment, error)
	// RegisterNamespace makes a namespace known. ns.Tenant is set by the node.
	RegisterNamespace(ctx context.Context, c Caller, r *RegisterRequest) (RegisterResult, error)
	// Lookup tells the usable prefix.
	Lookup(ctx context.Context, c Caller, r *LookupRequest) (LookupResult, error)
	// Locate tells how much of a chain each node of the cluster has.
	Locate(ctx context.Context, c Caller, r *LocateRequest) (LocateResult, error)
	// Keep does one retention verb to each named block.
	Keep(ctx context.Context, c Caller, r *KeepRequest) ([]byte, error)
	// Sessions are those of the node's cluster. paging.ErrIncompatible: it is of none.
	Sessions() (Sessions, error)
	// Pages gives the byte streams of clients that are not co-located.
	Pages
}

// Pages are the byte streams.
type Pages interface {
	// Read pins pages to be streamed; the caller closes what it gets.
	Read(ctx context.Context, c Caller, r *FetchRequest) (Reading, error)
	// Write opens a stream of pages to store; the caller closes what it gets.
	Write(ctx context.Context, c Caller, r *WriteRequest) (Writing, error)
}

// Reading is a pinned set of pages. Not safe for concurrent use.
type Reading interface {
	// Result is the decision; its Slots are empty.
	Result() *FetchResult
	// Next steps to the next page. Its bytes stay valid until Close.
	Next() (Page, bool)
	// Close gives the pages back.
	Close()
}

// Page is one page of a Reading.
type Page struct {
	Block int // index in the request
	Part  int
	Bytes []byte
	Sum   uint64
}

// Writing stores streamed pages, one block after another. Not safe for
// concurrent use.
type Writing interface {
	// Page returns the memory that the page of this part and block is received
	// in, valid until the next call. Blocks come in rising order, parts of one
	// block in any. Nil: the page is not wanted, its bytes are to be dropped.
	Page(ctx context.Context, block, part int, bytes uint64) ([]byte, error)
	// Received says that the last Page is whole; sum is what its sender computed.
	Received(ctx context.Context, sum uint64) error
	// Close stores the last block and returns an outcome per named block.
	Close(ctx context.Context) ([]byte, error)
}

// Attachment is one engine process. Its methods are safe for concurrent use.
type Attachment interface {
	Reader
	Writer
	// Events is signalled when Next has something.
	Events() <-chan struct{}
	// Next fills ev with what the node has to say and reports whether there was
	// anything. Only the stream's handler calls it.
	Next(ev *Event) bool
	// Ended is closed when the node ends the attachment; Err says why.
	Ended() <-chan struct{}
	Err() error
	// Detach says that the stream ended.
	Detach()
	// WatchSession has events tell of a session of the attachment's tenant from now on.
	WatchSession(session string) error
}

// Reader is the reading half of an attachment.
type Reader interface {
	// FetchResident answers a fetch for which nothing has to be brought up, with
	// no I/O; false: it needs Fetch, and nothing was counted or held.
	FetchResident(r *FetchRequest, res *FetchResult) (bool, error)
	// Fetch brings up what it can until ctx or r.Timeout ends.
	Fetch(ctx context.Context, r *FetchRequest, res *FetchResult) error
	// Adopt gives the slots of some parts of a decision.
	Adopt(token ID, parts paging.PartSet, res *FetchResult) error
	// FetchInto copies pages into a region; res has no slots and no lease.
	FetchInto(ctx context.Context, r *FetchIntoRequest, res *FetchResult) error
	// Release ends leases and tokens and appends to lost those whose slots were reused.
	Release(leases []uint64, tokens []ID, lost []uint64) []uint64
	// Renew extends leases and appends to unknown those that are not held.
	Renew(leases []uint64, ttl time.Duration, unknown []uint64) []uint64
	// Revoked says that no view of these leases is left.
	Revoked(leases []uint64)
}

// Writer is the writing half of an attachment, and its prefetches.
type Writer interface {
	// Reserve grants a leading part of the request.
	Reserve(ctx context.Context, r *ReserveRequest, res *ReserveResult) error
	// Commit publishes rows and returns an outcome for each.
	Commit(ctx context.Context, r *CommitRequest) ([]byte, error)
	// Abort ends an attempt.
	Abort(attempt ID) error
	// RegisterRegion makes memory of the engine known and returns its number.
	RegisterRegion(ctx context.Context, r *RegionRequest) (uint32, error)
	// DropRegion ends a region.
	DropRegion(region uint32) error
	// Prefetch starts bringing pages up.
	Prefetch(ctx context.Context, r *PrefetchRequest) (PrefetchResult, error)
	// Cancel stops a prefetch.
	Cancel(ticket uint64)
}

// Hello says who attaches.
type Hello struct {
	Engine, EngineVersion string
	Group                 string
	GroupSecret           []byte
	StagingBytes          uint64
	Previous              *ID
	Ranks                 []uint32
	DevicePool            bool   // wants the memory of the device pool
	WorkingBytes          uint64 // of working pages on the device
}

// Welcome is the answer to Hello.
type Welcome struct {
	Attachment    ID
	Node          ID
	Incarnation   uint64
	HandoffSocket string
	Tenant        string
	Arenas        []Arena
	StagingExtent paging.ExtentID
	StagingBytes  uint64
	WorkingExtent paging.ExtentID // 0: none
	WorkingBytes  uint64
	LeaseTTL      time.Duration
}

// Arena is memory that slots lie in.
type Arena struct {
	ID        uint32
	Tier      uint8 // as on the wire
	Device    string
	SlotAlign uint32 // bytes

	// Of a device pool.
	ExtentBytes uint64
	Places      uint32
	DeviceUUID  []byte
	DeviceName  string
}

// Extent is one mappable piece of an arena.
type Extent struct {
	ID    paging.ExtentID
	Arena uint32
	Bytes uint64
}

// Event is what a node has to tell an attachment; empty fields say nothing.
type Event struct {
	Extents  []Extent
	Revoked  []uint64
	Progress []Progress
	Sessions []*kvtierv1.SessionEvent
	Stopping time.Duration // time until the sockets close
}

// Progress is the progress of one prefetch.
type Progress struct {
	Ticket uint64
	Ready  []uint32
	Done   bool
	Reason uint8 // as on the wire
}

// RegisterRequest describes a namespace.
type RegisterRequest struct {
	Namespace   paging.Namespace
	Attachment  *ID
	PrefillRate float64 // of the engine, tokens a second; 0: not known
}

// RegisterResult names it.
type RegisterResult struct {
	ID            paging.NamespaceID
	StagingExtent paging.ExtentID
	StagingBytes  uint64
}

// LookupRequest asks for the usable prefix.
type LookupRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	Parts     paging.PartSet // 0: all
}

// LookupResult is the usable prefix.
type LookupResult struct {
	Usable int
	Tokens uint64
	Tiers  []byte // one a block
}

// FetchRequest asks for a lease on pages.
type FetchRequest struct {
	Namespace   paging.NamespaceID
	Names       []paging.BlockName
	First       int
	PrefixLease uint64
	Parts       paging.PartSet // 0: all
	Set         bool
	Wanted      uint8 // tier as on the wire; 0: RAM
	Timeout     time.Duration
	TTL         time.Duration // 0: default
	ForGroup    bool
}

// FetchResult is a lease. The caller owns it and may use it for many calls: the
// node truncates the slices and appends.
type FetchResult struct {
	Lease  uint64
	Usable int
	Tokens uint64
	Parts  paging.PartSet
	Slots  []byte // packed, paging.AppendSlot
	Tiers  []byte
	Short  []Shortfall
	Token  *ID
	TTL    time.Duration
}

// Reset empties res and keeps its memory.
func (res *FetchResult) Reset() {
	*res = FetchResult{Slots: res.Slots[:0], Tiers: res.Tiers[:0], Short: res.Short[:0]}
}

// Shortfall says why blocks were not granted.
type Shortfall struct {
	Block, Count int
	Reason       uint8 // as on the wire
	RetryAfter   time.Duration
}

// ReserveRequest asks for room to write blocks.
type ReserveRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	First     int
	Parts     paging.PartSet // 0: the parts of the attachment's ranks
	TTL       time.Duration
	Timeout   time.Duration
	Attempt   *ID      // token that the client chose; nil: the node does
	Tier      uint8    // where the pages are written, as on the wire; 0: RAM
	Region    uint32   // that they lie in already; 0: none
	Blocks    []uint32 // of the region, per name
}

// RegionRequest describes memory of an engine.
type RegionRequest struct {
	Handle    uint32
	Namespace paging.NamespaceID
	Blocks    uint32
	Parts     []RegionPart
}

// RegionPart says where the pages of one part lie in it.
type RegionPart struct {
	Part        uint32
	Offset      uint64
	BlockStride uint64
	Pieces      uint32 // 0: 1
	PieceStride uint64
}

// FetchIntoRequest asks for pages in a region.
type FetchIntoRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	First     int
	Parts     paging.PartSet // 0: those of the region
	Region    uint32
	Blocks    []uint32 // of the region, per name
	Timeout   time.Duration
}

// ReserveResult grants a leading part of it.
type ReserveResult struct {
	Attempt  *ID
	Outcomes []byte // as on the wire, one a block
	Slots    []byte // packed
	InFlight time.Duration
	Parts    paging.PartSet
}

// CommitRequest publishes rows of an attempt.
type CommitRequest struct {
	Attempt   ID
	Rows      []uint32 // empty: all
	Durable   bool
	Retention *Retention
}

// Retention says how long blocks are worth keeping.
type Retention struct {
	Priority     uint8
	TTL          time.Duration
	RefreshOnHit bool
}

// PrefetchRequest names pages to bring up.
type PrefetchRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	First     int
	Parts     paging.PartSet
	Tier      uint8
	Priority  uint8
	Timeout   time.Duration
}

// PrefetchResult is a ticket.
type PrefetchResult struct {
	Ticket            uint64
	Admitted, Refused int
}

// Verb is a retention verb.
type Verb uint8

// Verbs.
const (
	VerbRetain Verb = iota + 1
	VerbDemote
	VerbDrop
	VerbPin
)

// KeepRequest applies a verb to blocks.
type KeepRequest struct {
	Verb      Verb
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	Retention Retention     // VerbRetain
	From      uint8         // VerbDemote
	TTL       time.Duration // VerbPin; 0: unpin
}

// WriteRequest opens a stream of pages to store.
type WriteRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	First     int
	Parts     paging.PartSet
	Durable   bool
	Retention *Retention
}

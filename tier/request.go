package tier

import (
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Mode says which blocks a Fetch wants.
type Mode uint8

// The modes of Fetch. The numbers are those of the wire enum FetchMode less one.
const (
	ModePrefix Mode = iota // the longest usable prefix
	ModeSet                // each named block by itself
)

// Reason says why a block is not served. The numbers are those of the wire enum
// Reason.
type Reason uint8

// Why a block is not served.
const (
	NoReason     Reason = 0
	NotFound     Reason = 1 // not stored
	PartMissing  Reason = 2 // a part of it, or of a block before it, is missing
	NoSpace      Reason = 3 // RAM is full of pages that cannot be evicted
	OverQuota    Reason = 4 // the tenant's quota is full of pages that cannot be evicted
	Timeout      Reason = 5 // not brought up in time
	Corrupt      Reason = 6 // the stored copy failed its checksum and was dropped
	Identity     Reason = 7 // the stored copy was another page's and was dropped
	IOError      Reason = 8 // the disk failed
	InFlight     Reason = 9 // being written
	Stopping     Reason = 10
	Cancelled    Reason = 11
	Unreachable  Reason = 13 // the nodes that have it do not answer
	reasonsCount        = 14
)

// String is the name used in metrics and tables.
func (r Reason) String() string {
	names := [reasonsCount]string{"none", "not_found", "part_missing", "no_space", "over_quota", "timeout",
		"corrupt", "identity_mismatch", "io_error", "in_flight", "stopping", "cancelled", "attachment_ended", "unreachable"}
	if int(r) < len(names) {
		return names[r]
	}
	return "unknown"
}

// FetchRequest asks for pages in an arena.
type FetchRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName // in chain order, 1 to paging.MaxCallBlocks; borrowed until return
	First     int                // position of Names[0] in its chain; blocks before it are taken as present
	Parts     paging.PartSet     // wanted parts; 0: all of the layout
	Mode      Mode
	Wanted    Kind // arena wanted: RAM, or None for the default (RAM)
	Resident  bool // only what is in the arena now: nothing is brought up
	Local     bool // only what this node has: no other node is asked
	NoWait    bool // if something had to be brought up: a nil Hold, and nothing is pinned or counted

	// For ModeSet. At is the position of each block in its chain; nil: from First on.
	// Moved says that the blocks are brought here because they move, and are not read:
	// they count as moved, not as asked for and hit.
	At    []uint32
	Moved bool
}

// Shortfall says why consecutive blocks were not granted.
type Shortfall struct {
	Block  int // index in Names of the first
	Count  int
	Reason Reason
}

// Prefix is the answer of Lookup.
type Prefix struct {
	Usable int    // blocks of the usable prefix, counted from Names[0]
	Tokens uint64 // tokens of them
	Tiers  []Kind // per named block: where it would be served from; None: absent
}

// ReserveRequest asks for room to write blocks.
type ReserveRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName // in chain order, 1 to paging.MaxCallBlocks; borrowed until return
	First     int                // position of Names[0] in its chain
	Parts     paging.PartSet     // parts that the writer brings; 0: all of the layout
	Want      paging.PartSet     // parts without which a block is incomplete and is dropped IncompleteAfter its first; 0: Parts
	Device    bool               // sets room on the device aside too; Commit takes rows that lie there
	MaxRows   int                // most rows to grant, the rest is StagingFull; 0: no bound
	Deadline  time.Time          // when the attempt expires; not zero
}

// Outcome is what happened to one block of a write. The numbers are those of
// the wire enum WriteOutcome.
type Outcome uint8

// What happened to one block of a write.
const (
	NotReached         Outcome = 0 // Reserve: no room was left before it. Commit: the row was not open
	Granted            Outcome = 1 // Reserve: room is set aside
	Exists             Outcome = 2 // Reserve: stored already
	BeingWritten       Outcome = 3 // Reserve: another attempt is writing it
	StagingFull        Outcome = 4 // Reserve: MaxRows were granted before it
	WriteNoSpace       Outcome = 5 // Reserve: RAM is full of pages that cannot be evicted in time
	WriteOverQuota     Outcome = 6 // Reserve: so is the tenant's quota
	Committed          Outcome = 7 // Commit: stored
	Duplicate          Outcome = 8 // Commit: stored before with the same bytes; nothing changed
	DuplicateDivergent Outcome = 9 // Commit: stored before with other bytes; the first stay
	Expired            Outcome = 10
	NotDurable         Outcome = 11 // Commit with Durable: in RAM, but the disk did not take it
	Repeated           Outcome = 13 // Reserve: repeats an earlier name of the call
)

// Retention says how long blocks are worth keeping.
type Retention struct {
	Priority     uint8         // 0 (evict first) to 100
	TTL          time.Duration // after it the priority no longer counts and the block is an ordinary one; 0: never
	RefreshOnHit bool          // a hit starts the time again
}

// CommitOptions applies to all rows of a Commit.
type CommitOptions struct {
	Durable   bool       // return only when the pages are on disk, or the disk refused them
	Retention *Retention // nil: the default, priority 0
}

// CommitRow names the bytes of one row.
type CommitRow struct {
	Row int      // index in Names of the Reserve
	Src [][]byte // one per part of the request's Parts in rising order; nil where Attempt.Parts(Row) has none; borrowed until return
	// Device is, instead of Src, where the pages lie on Config.Device.
	Device [][]Span
}

// ItemOutcome is what a retention verb did to one block. The numbers are those
// of the wire enum ItemOutcome.
type ItemOutcome uint8

// What a retention verb did to one block.
const (
	ItemAccepted ItemOutcome = 1
	ItemClipped  ItemOutcome = 2
	ItemDeferred ItemOutcome = 3
	ItemRejected ItemOutcome = 4
	ItemMissing  ItemOutcome = 5
)

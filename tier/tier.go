package tier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Kind names a medium. The numbers are those of the wire enum Tier.
type Kind uint8

// The media, nearest to the engine first.
const (
	None   Kind = 0
	HBM    Kind = 1
	RAM    Kind = 2
	NVMe   Kind = 3
	Remote Kind = 4
)

// String is the lower-case name used in metrics and tables.
func (k Kind) String() string {
	switch k {
	case None:
		return "none"
	case HBM:
		return "hbm"
	case RAM:
		return "ram"
	case NVMe:
		return "nvme"
	case Remote:
		return "remote"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Page identifies one stored copy of a page.
type Page struct {
	ID    paging.PageID
	Key   paging.Key // paging.StorageKey of ID
	Bytes uint32     // length, 1 to paging.MaxPageBytes
	Sum   uint64     // paging.Checksum of the stored bytes
	Meta  uint64     // the caller's; a durable tier keeps it in the record and Recover brings it back; nobody else reads it
}

// Ref is where a tier keeps one page. Its meaning is private to the tier; it
// is valid from the Store, Alloc or Recover that gave it until Free, in one run
// of the process. 0 is nowhere.
type Ref uint64

// Tier is a medium that stores pages at Refs. The Hierarchy owns the one index
// from keys to Refs; a tier owns bytes and space and knows no keys.
//
// All methods may be called at the same time from many goroutines. After Close,
// Store and Load answer paging.ErrClosed, Free does nothing and Usage reports
// the state Closed.
type Tier interface {
	// Kind names the medium.
	Kind() Kind

	// Store writes pages[i] from src[i] and sets refs[i] to where it lies, for
	// as many pages as it can, in any order; refs[i] stays 0 for the others and
	// the error says why: paging.ErrNoSpace (the budget has no slot of that
	// size now; nothing is ever evicted here), paging.ErrUnavailable (the
	// medium is bypassed, Usage says why), paging.ErrIO, paging.ErrExpired (ctx
	// ended first), paging.ErrUnknownNamespace (durable tiers), paging.ErrInvalid
	// (src[i] does not have pages[i].Bytes bytes, or the lengths of the
	// slices differ; then nothing was stored). A durable tier has made a page
	// durable before its ref is set. owners[i] is the caller's number for the
	// page, for Reclaim; 2^32-1 is none.
	//
	// src is borrowed until Store returns, or, if it gave up while the medium was
	// still reading src, until Unsettled(err) is closed. It is not modified.
	Store(ctx context.Context, pages []Page, src [][]byte, owners []uint32, refs []Ref) error

	// Load fills dst, of p.Bytes bytes, with the page at r and compares its
	// checksum with p.Sum after the last copy. nil means that dst is the page.
	// Otherwise the content of dst is undefined: paging.ErrCorrupt (the copy is
	// damaged; free r), paging.ErrIdentity (also a paging.ErrCorrupt: the bytes
	// are another page's), paging.ErrIO, paging.ErrUnavailable (the medium does
	// not answer at present), paging.ErrExpired (ctx ended first),
	// paging.ErrInvalid.
	//
	// dst is borrowed like src of Store: after Unsettled(err) != nil the medium
	// may write to it until that channel is closed. A ctx that cannot end (its
	// Done is nil) may be cheaper: nothing has to be left behind.
	Load(ctx context.Context, p Page, r Ref, dst []byte) error

	// Free gives the space of refs back. It does not block on the medium. A
	// durable tier removes the record durably before it reuses the slot, and
	// until then counts the slot as dead; a Load that runs at r is not
	// disturbed. A ref that is 0 is skipped. Each ref is freed once.
	Free(refs ...Ref)

	// Usage is a consistent snapshot.
	Usage() Usage

	// Close ends the calls that run, within a bound, and releases everything. A
	// second call does nothing.
	Close() error
}

// Arena is a tier whose pages are read and written in place.
type Arena interface {
	Tier

	// Alloc sets a slot for bytes aside in tenant's extents and answers at
	// once: paging.ErrNoSpace or paging.ErrOverQuota.
	Alloc(tenant string, bytes uint32, owner uint32) (Ref, error)

	// Bytes is the slot's memory, n bytes of it; its capacity ends with the
	// slot. Valid until Free. Its start is aligned to paging.UnitBytes.
	Bytes(r Ref, n uint32) []byte

	// Slot is what an engine needs to read the page in place.
	Slot(r Ref, n uint32, sum uint64) paging.Slot

	// Reclaim is as for Durable, inside what tenant may use.
	Reclaim(tenant string, bytes uint32, movable func(owner uint32) bool) (owners []uint32, ok bool)
}

// Record is a page found by Recover.
type Record struct {
	Page
	Ref Ref
}

// Durable is a tier whose pages survive the process, together with the
// namespaces that give them meaning.
type Durable interface {
	Tier

	// Recover enumerates the pages that an earlier run committed and calls keep
	// for each, from one goroutine: the owner number of the page, or false to
	// drop it. Damaged and foreign records are dropped and counted before. It
	// must be called once, before the first Store and Load, which answer
	// paging.ErrUnavailable until it has ended. progress, if not nil, is told
	// now and then how many records of about how many were read. An error other
	// than that of ctx means that the index cannot be read.
	Recover(ctx context.Context, keep func(Record) (owner uint32, ok bool), progress func(done, about int64)) error

	// PutNamespace makes a namespace durable; Store refuses pages of others. A
	// second call for the same namespace does nothing.
	PutNamespace(ns *paging.Namespace) error

	// DropNamespace forgets a namespace that has no pages any more.
	DropNamespace(id paging.NamespaceID) error

	// Namespaces lists the durable namespaces, in no order.
	Namespaces() []*paging.Namespace

	// Reclaim names a cheap set of owners whose pages, once freed, let a Store
	// of a page of this length succeed by turning space of other sizes over. ok
	// is false if there is none among the movable. It frees nothing; movable
	// must not call the tier.
	Reclaim(bytes uint32, movable func(owner uint32) bool) (owners []uint32, ok bool)
}

// State says whether a tier takes part.
type State uint8

// The states of a tier.
const (
	Loading State = iota // Recover has not ended
	Ready                // stores and loads
	Bypass               // Store answers paging.ErrUnavailable; loads go on; the tier probes and comes back by itself
	Closed               // after Close
)

// String is the lower-case name.
func (s State) String() string {
	switch s {
	case Loading:
		return "loading"
	case Ready:
		return "ready"
	case Bypass:
		return "bypass"
	case Closed:
		return "closed"
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Usage says what a tier holds. These hold at every moment:
//
//	PageBytes + InFlightBytes + DeadBytes <= UsedBytes <= HeldBytes <= BudgetBytes
//
// where the difference of the first two is the slack inside slots.
type Usage struct {
	State  State
	Reason string // why it is not Ready, or a remark for people ("buffered I/O: ...")

	Growing bool // memory of the budget that pages may use is still being taken from the machine

	BudgetBytes   int64 // hard bound
	HeldBytes     int64 // taken from the machine: extents or files
	UsedBytes     int64 // slots that hold something, whole slots
	PageBytes     int64 // lengths of the stored pages
	InFlightBytes int64 // lengths of pages being written, or set aside and not yet published
	DeadBytes     int64 // lengths of freed pages whose slots cannot be reused yet
	Pages         int64 // stored pages
}

// IO is what a tier did on its medium since it was opened, and what it does now.
// The times include waiting for a turn; their sum over their count is the mean.
type IO struct {
	Reads, Writes, Commits      int64
	ReadBytes                   int64 // of pages
	WrittenBytes                int64 // all: pages, index, space that is written ahead
	ReadTime, WriteTime         time.Duration
	CommitTime                  time.Duration // syncs, and the records of what was written
	ReadsRunning, WritesRunning int64
	HungReads, HungWrites       int64 // of these, those that do not answer
	ReadErrors, WriteErrors     int64
	Segments                    int64 // files
}

// unsettledError is an error after which the medium still uses the caller's memory.
type unsettledError struct {
	err  error
	done <-chan struct{}
}

func (e *unsettledError) Error() string { return e.err.Error() }

func (e *unsettledError) Unwrap() error { return e.err }

// NotSettled wraps the error of a Store or Load that returns although the
// medium still uses the caller's memory; done is closed when it no longer does.
func NotSettled(err error, done <-chan struct{}) error {
	return &unsettledError{err: err, done: done}
}

// Unsettled is nil if the call that returned err has let go of the caller's
// memory, as it has in all cases but one: the call gave up, because ctx ended,
// the tier was closed or went into bypass, while the medium worked.
// Then the caller keeps src or dst untouched, and does not reuse it, until the
// channel is closed.
func Unsettled(err error) <-chan struct{} {
	var e *unsettledError
	if errors.As(err, &e) {
		return e.done
	}
	return nil
}

// Device is an arena in the memory of a device, which engines map or read by its
// address. Bytes of a slot is nil where the CPU cannot reach it; Slot and
// generations are as for RAM. Whenever a page comes into the device or leaves it,
// its checksum is computed there and compared.
type Device interface {
	Arena
	Engines

	// Fill copies page i from src[i] to the slot refs[i], of Alloc, and sets
	// errs[i] to what became of it: nil, paging.ErrCorrupt (the bytes in the slot
	// do not have the sum), paging.ErrUnavailable (the device does not answer),
	// paging.ErrClosed. It returns when the device has let go of src, or Unsettled
	// of an error says when it will have.
	Fill(pages []Page, src [][]byte, refs []Ref, errs []error)

	// LoadAll is Load of many pages at once, with an error for each.
	LoadAll(pages []Page, refs []Ref, dst [][]byte, errs []error)
}

// Pool describes the memory of a Device to those who map it.
type Pool struct {
	Driver      string   // "host" or "cuda"
	Name        string   // of the device, for people
	UUID        [16]byte // of the device; 0: none
	ExtentBytes int64    // of every extent
	// Places is the number of extents when grown. The place of an extent is its
	// number modulo 1,024, and below Places.
	Places int
}

// Span is a piece of device memory, by an address that only its Device knows.
type Span struct {
	Addr  uint64
	Bytes int64
}

// Engines is what a Device does with the memory of engines on the same device.
// The spans of a page hold it in order; all have to lie in memory that the device
// knows, else the errors are paging.ErrInvalid. Each call returns when the device
// has let go of everything, or Unsettled of an error says when it will have.
type Engines interface {
	// Gather copies page i from its spans to the slot refs[i], where that is not 0,
	// and to host[i], and sets its Sum to that of the bytes in the slot, or without
	// one of those in host[i].
	Gather(pages []Page, from [][]Span, refs []Ref, host [][]byte, errs []error)

	// Scatter copies page i from the slot refs[i], or where that is 0 from host[i],
	// to its spans. After the copy the bytes in the slot are summed and compared with
	// pages[i].Sum; of a page from the host those at its span are, if it has one of
	// whole 16 bytes. paging.ErrCorrupt: they differ, the spans hold nothing of use.
	Scatter(pages []Page, refs []Ref, host [][]byte, to [][]Span, errs []error)
}

// Shared is memory on a device that an engine maps too: working pages that the
// device made, or a region that the engine brought.
type Shared interface {
	Addr() uint64 // for Span
	Bytes() int64
	FD() int // to hand over; it belongs to the Shared. -1: it is the engine's
	// Close gives it back. No call names it any more.
	Close() error
}

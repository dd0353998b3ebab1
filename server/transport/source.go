package transport

import (
	"context"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Source is what a node serves to others. Its methods may be called from many
// goroutines.
type Source interface {
	// Open pins what is there of the pages that another node asks for. It reads no
	// disk and waits for nothing: the claim that brought the request here is a
	// hint, and this is where it is checked. An error stands for all pages; its
	// sentinel becomes their reason: paging.ErrUnknownNamespace, ErrDenied,
	// ErrUnavailable, ErrClosed. ctx ends with the request.
	Open(ctx context.Context, from placement.NodeID, r *PageRequest) (Pages, error)
	// Have tells, for each block of q, which of its parts are held. It waits for
	// nothing.
	Have(ctx context.Context, from placement.NodeID, q *HaveRequest) ([]Held, error)
	// Doubt tells that a copy of a page was sent from here and failed its
	// checksum where it arrived: the copy may be damaged. It must not block.
	Doubt(from placement.NodeID, p paging.PageID)
}

// Pages are the pages of one request. The methods may be called from several
// goroutines at once, until Close.
type Pages interface {
	// Page tells where page i of the request is. It waits for nothing, and answers
	// the same until Close.
	Page(i int) Content
	// Load fills dst, which begins at a multiple of paging.UnitBytes, with a page
	// whose Content is Stored, and returns its checksum. When it returns, whatever
	// it returns, nothing uses dst any more, but for an error of StillUsed. It waits no
	// longer than ctx. Errors as of tier.Tier's Load.
	Load(ctx context.Context, i int, dst []byte) (sum uint64, err error)
	// Close ends the pins. It is called once, after the last use.
	Close()
}

// Content says where one page is.
type Content struct {
	Bytes  []byte // the page, in memory; it stays as it is until Pages.Close
	Sum    uint64 // its checksum
	Stored bool   // it is on disk: Load brings it
	Reason Reason // why it is not there; the other fields are not read
}

// Sink is where the pages of one Fetch go. Its methods may be called from
// several goroutines at once, and must not block.
type Sink interface {
	// Slot is the memory set aside for page i, as long as the page. It is called at
	// most once for a page, when it is about to be asked for. It fails with
	// paging.ErrNoSpace or ErrOverQuota: then the page is left out.
	Slot(i int) ([]byte, error)
	// Done tells what became of page i, once for each page of the Fetch that
	// returned no error. Nothing of the transport touches its slot from now on.
	Done(i int, r Result)
}

// Result is what became of one page.
type Result struct {
	// Err is nil if the slot holds the page, verified; else a *PageError. Then
	// the content of the slot, if there is one, is undefined.
	Err error
	// Sum is the checksum of the copy.
	Sum uint64
	// From is the node that it came from.
	From placement.NodeID
	// Elsewhere says that another Fetch of this node, which ran at the same time,
	// got the page into its own slot: there was no slot of this call.
	Elsewhere bool
}

// stillUsedError is the error of a Load that gave up while the disk worked.
type stillUsedError struct {
	err  error
	done <-chan struct{}
}

func (e *stillUsedError) Error() string { return e.err.Error() }

func (e *stillUsedError) Unwrap() error { return e.err }

// StillUsed wraps the error of a Load that ended although the disk may still write
// to dst; done is closed when it no longer does.
func StillUsed(err error, done <-chan struct{}) error { return &stillUsedError{err, done} }

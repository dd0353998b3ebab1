package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Lease is the right to read a set of pages, until Release. It is safe for
// concurrent use; its exported fields are not changed after Fetch.
//
// The pages of a streamed lease (Config.Address) are private copies: they stay
// readable until Release whatever happens to the node and the client. For one in
// place the following holds.
//
// A lease is renewed by itself while it is held, up to Config.MaxHold. It can
// end before Release: the node revokes it (it was overdue, or an operator asked),
// the attachment ends (the node restarted, the stream broke) or the client is
// closed. Then Page gives no new view and Err says why; views that exist stay
// readable until they are closed, and their Close still tells whether what was
// read is right. The node's question is answered, and the pages may be reused,
// once the last view of the lease is closed.
type Lease struct {
	ID           uint64         // 0: nothing was granted and nothing is held
	Usable       int            // blocks granted
	UsableTokens int64          // tokens of the usable prefix; 0 with ModeSet
	Rows         int            // rows of pages: the granted blocks, or with ModeSet the named ones
	Parts        paging.PartSet // parts that there are pages of
	Tiers        []Tier         // one a row: where it was served from
	Shortfalls   []Shortfall    // why blocks are missing
	AdoptToken   []byte         // for Adopt by the group; nil unless ForGroup
	TTL          time.Duration

	link  *link
	cols  int
	slots []byte     // packed references: Rows × cols
	maps  []*mapping // the extents they lie in, held
	first [2]*mapping
	own   []private // instead of slots, when the pages were streamed
	bytes int64     // of own

	state atomic.Uint64
	lost  atomic.Bool

	// guarded by link.mu
	renewAt, heldUntil time.Time
}

// private is a page in memory of this process.
type private struct {
	data []byte
	sum  uint64
}

// The state of a lease: the number of open views, and how it ended.
const (
	viewsMask     = 1<<32 - 1
	stateReleased = 1 << 32 // the caller released it
	stateRevoked  = 1 << 33 // the node asked for it back
	stateDead     = 1 << 34 // its attachment is gone
	stateQuiet    = 1 << 35 // finish tells the node nothing: Release does
	stateFinished = 1 << 36 // no view is left, nothing is held
	stateEnded    = stateReleased | stateRevoked | stateDead
)

// View is one page, readable in place until Close. It is not to be copied, and
// used by one goroutine at a time.
type View struct {
	// Sum is the checksum that the page was stored with (paging.Checksum).
	Sum uint64

	lease *Lease
	m     *mapping // nil for a private page
	data  []byte
	slot  uint64 // offset of its generation
	gen   paging.Generation
}

// Page opens a view of the page of one part in one row. It copies nothing and
// does not allocate. false: there is no such page, or the lease has ended (Err).
func (l *Lease) Page(row, part int) (View, bool) {
	if row < 0 || row >= l.Rows || part < 0 || part >= paging.MaxParts || !l.Parts.Has(part) {
		return View{}, false
	}
	if !l.enter() {
		return View{}, false
	}
	at := row*l.cols + (l.Parts & paging.AllParts(part)).Len()
	if l.own != nil {
		if p := l.own[at]; p.data != nil {
			return View{Sum: p.sum, lease: l, data: p.data}, true
		}
	} else if slot, err := paging.DecodeSlot(l.slots[at*paging.SlotBytes:]); err == nil && slot.Bytes != 0 {
		m := l.mapping(slot.Extent)
		return View{Sum: slot.Sum, lease: l, m: m, data: m.page(slot), slot: slot.Offset, gen: slot.Generation}, true
	}
	l.leave()
	return View{}, false
}

// mapping finds a held mapping; resolve has made sure that it is there.
func (l *Lease) mapping(id paging.ExtentID) *mapping {
	for _, m := range l.maps {
		if m.id == id {
			return m
		}
	}
	return nil
}

// Bytes is the page: read-only memory (writing faults), valid until Close. nil
// after Close.
func (v *View) Bytes() []byte { return v.data }

// Check reports whether everything read so far is the page: ErrLost if its slot
// was reused. Call it, or Close, after the last read; before it what was read
// may not be used for anything that cannot be undone.
func (v *View) Check() error {
	if v.m != nil && v.m.gens.Load(v.slot) != v.gen {
		v.lease.link.client.counts.lost.Add(1)
		v.lease.lost.Store(true)
		return fmt.Errorf("page at %d of extent %d: its slot was reused while it was read: %w", v.slot, v.m.id, paging.ErrLost)
	}
	return nil
}

// Close ends the view and answers as Check does. Closing again does nothing.
func (v *View) Close() error {
	if v.lease == nil {
		return nil
	}
	err := v.Check()
	v.lease.leave()
	v.lease, v.m, v.data = nil, nil, nil
	return err
}

// enter counts a view; false: the lease has ended.
func (l *Lease) enter() bool {
	for {
		s := l.state.Load()
		if s&(stateEnded|stateFinished) != 0 {
			return false
		}
		if l.state.CompareAndSwap(s, s+1) {
			return true
		}
	}
}

func (l *Lease) leave() {
	if s := l.state.Add(^uint64(0)); s&viewsMask == 0 && s&stateEnded != 0 {
		l.finish()
	}
}

// end stops new views; without a view the lease is finished now, else by the
// last one.
func (l *Lease) end(how uint64) {
	if old := l.state.Or(how); old&viewsMask == 0 {
		l.finish()
	}
}

// finish gives everything back, once, and tells the node how it ended.
func (l *Lease) finish() {
	s := l.state.Or(stateFinished)
	if s&stateFinished != 0 {
		return
	}
	l.link.finished(l, s)
	l.slots, l.own = nil, nil
}

// Err says why the lease gives no views any more: ErrClosed after Release,
// ErrExpired when it was revoked, ErrUnavailable when its attachment ended. nil:
// it is held.
func (l *Lease) Err() error {
	switch s := l.state.Load(); {
	case s&stateReleased != 0:
		return fmt.Errorf("lease %d was released: %w", l.ID, paging.ErrClosed)
	case s&stateRevoked != 0:
		return fmt.Errorf("lease %d was revoked: %w", l.ID, paging.ErrExpired)
	case s&stateDead != 0:
		return fmt.Errorf("lease %d: its attachment ended: %w", l.ID, paging.ErrUnavailable)
	}
	return nil
}

// Release ends the lease and says whether what was read from it can be trusted:
// ErrLost if a slot was reused meanwhile. It is idempotent. Where the node
// cannot be asked, because it is gone or silent or ctx ends, the answer is what
// the views of this process have seen, and the node is told when it is back.
//
// With views still open the lease ends all the same, the node is told when the
// last one is closed, and the error (ErrInvalid) counts them.
func (l *Lease) Release(ctx context.Context) error {
	for {
		s := l.state.Load()
		if s&(stateReleased|stateFinished) != 0 {
			l.state.Or(stateReleased)
			return l.verdict()
		}
		if n := s & viewsMask; n > 0 {
			if l.state.CompareAndSwap(s, s|stateReleased) {
				return fmt.Errorf("lease %d released with %d views open: %w", l.ID, n, paging.ErrInvalid)
			}
			continue
		}
		if l.state.CompareAndSwap(s, s|stateReleased|stateQuiet) {
			break
		}
	}
	l.finish()
	if l.ID != 0 && l.link.mux != nil {
		l.link.askRelease(ctx, l)
	}
	return l.verdict()
}

// ReleaseAsync ends the lease without asking: the node is told one-way, after
// the last view is closed. For leases whose views were all closed in time.
func (l *Lease) ReleaseAsync() { l.end(stateReleased) }

func (l *Lease) verdict() error {
	if l.lost.Load() {
		return fmt.Errorf("lease %d: a slot was reused while it was read: %w", l.ID, paging.ErrLost)
	}
	return nil
}

// askRelease releases on the stream and notes what the node says was lost.
func (l *link) askRelease(ctx context.Context, lease *Lease) {
	req := &kvtierv1.ReleaseRequest{LeaseIds: []uint64{lease.ID}}
	resp, err := l.release(ctx, req)
	if err != nil {
		l.mux.post(func(o *outbox) { o.releases = append(o.releases, lease.ID) })
		return
	}
	for _, id := range resp.GetLost() {
		if id == lease.ID {
			lease.lost.Store(true)
		}
	}
}

// finished takes a lease that nobody reads any more off the books.
func (l *link) finished(lease *Lease, state uint64) {
	if lease.bytes > 0 {
		l.client.spare.give(lease.own, l.client.private.Add(-lease.bytes))
	}
	if lease.ID == 0 || l.mux == nil {
		return
	}
	l.mu.Lock()
	delete(l.leases, lease.ID)
	l.mu.Unlock()
	if len(lease.maps) > 0 {
		l.extents.drop(lease.maps)
	}
	if state&(stateDead|stateQuiet) != 0 {
		return
	}
	l.mux.post(func(o *outbox) {
		if state&stateReleased != 0 {
			o.releases = append(o.releases, lease.ID)
		} else {
			o.revoked = append(o.revoked, lease.ID)
		}
	})
}

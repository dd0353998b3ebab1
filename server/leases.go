package server

import (
	"time"

	"github.com/kvtier/kvtier/paging"
)

// maxLeases bounds the leases of one attachment: an engine holds one per running
// request, and requests in the thousands.
const maxLeases = 65536

// hold is pinned memory: a *tier.Hold, or a share of one.
type hold interface {
	// Release gives the pages back and reports whether none of their slots was
	// reused while they were held. Called once.
	Release() (intact bool)
}

// lease is an attachment's right to read the slots of a hold. Its deadline is
// for accounting and revocation: it never frees memory.
type lease struct {
	hold      hold
	namespace paging.NamespaceID
	blocks    int // position after the last granted block: where a suffix goes on
	deadline  time.Time
	bytes     int64
	overdue   bool
}

// leases are those of one attachment. Not safe for concurrent use. Pure: the
// time is an argument.
type leases struct {
	held     map[uint64]*lease
	bytes    int64
	overdue  int
	earliest time.Time // no lease that is not overdue has an earlier deadline; zero: none
}

// add takes the lease, which must not be held yet.
func (t *leases) add(id uint64, l *lease) {
	if t.held == nil {
		t.held = map[uint64]*lease{}
	}
	t.held[id] = l
	t.bytes += l.bytes
	t.soon(l.deadline)
}

func (t *leases) soon(deadline time.Time) {
	if t.earliest.IsZero() || deadline.Before(t.earliest) {
		t.earliest = deadline
	}
}

// remove ends a lease and returns what it held: the caller releases it. ok is
// false for a lease that is not held, which is no fault: Release is idempotent.
func (t *leases) remove(id uint64) (h hold, ok bool) {
	l, ok := t.held[id]
	if !ok {
		return nil, false
	}
	delete(t.held, id)
	t.bytes -= l.bytes
	if l.overdue {
		t.overdue--
	}
	return l.hold, true
}

// removeAll ends every lease and returns what they held.
func (t *leases) removeAll() []hold {
	holds := make([]hold, 0, len(t.held))
	for _, l := range t.held {
		holds = append(holds, l.hold)
	}
	*t = leases{}
	return holds
}

// renew sets a new deadline. false: not held.
func (t *leases) renew(id uint64, deadline time.Time) bool {
	l, ok := t.held[id]
	if !ok {
		return false
	}
	if l.overdue {
		l.overdue = false
		t.overdue--
	}
	l.deadline = deadline
	t.soon(deadline)
	return true
}

// sweep marks leases whose deadline has passed and returns the newly overdue.
// It looks at them only when one may be due, so that it is cheap to call often.
func (t *leases) sweep(now time.Time) []uint64 {
	if t.earliest.IsZero() || now.Before(t.earliest) {
		return nil
	}
	t.earliest = time.Time{}
	var due []uint64
	for id, l := range t.held {
		switch {
		case l.overdue:
		case now.Before(l.deadline):
			t.soon(l.deadline)
		default:
			l.overdue = true
			t.overdue++
			due = append(due, id)
		}
	}
	return due
}

package tier

import (
	"context"
	"fmt"
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Attempt is room set aside for blocks that somebody is writing. It ends with
// Abort or at its deadline; what was committed by then stays.
type Attempt struct {
	// Immutable.
	h        *Hierarchy
	ns       *namespace
	first    int
	parts    paging.PartSet
	want     paging.PartSet
	deadline time.Time
	onDevice bool // slots are set aside on the device too

	// Guarded by Hierarchy.mu.
	rows    []attemptRow
	refs    []Ref    // slots set aside, in the order of rows and parts
	sums    []uint64 // what was committed to them
	device  []Ref    // as refs: slots on the device of rows that come from there; nil: none did
	short   bool     // the device had no room for a row
	expired bool
	ended   bool
}

// attemptRow is one named block.
type attemptRow struct {
	id    blockID
	epoch uint32         // of the block, when it was committed
	parts paging.PartSet // set aside for it
	at    int            // where its slots start in refs
	state rowState
}

type rowState uint8

const (
	refused   rowState = iota // nothing was set aside
	open                      // may be committed
	copying                   // a Commit copies it; nobody else frees its slots
	committed                 // published
	freed                     // its slots were given back
)

// Reserve sets RAM aside for blocks, so that Commit cannot fail for room, and
// answers one Outcome per name. Blocks that are stored or being written are
// passed over; the first one without room ends it. It waits for room at most
// until ctx ends, and only where writing dirty blocks down can make some. Room on
// the device, with Device, is not waited for.
//
// retryAfter is how long the blocks that are BeingWritten may take. The Attempt
// is nil if nothing was granted. Errors: paging.ErrUnknownNamespace,
// paging.ErrInvalid, paging.ErrExpired (Deadline has passed), paging.ErrClosed.
func (h *Hierarchy) Reserve(ctx context.Context, req ReserveRequest) (a *Attempt, out []Outcome, retryAfter time.Duration, err error) {
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	a, err = h.newAttempt(req, now)
	if err != nil {
		return nil, nil, 0, err
	}
	out = make([]Outcome, len(req.Names))
	granted := 0
	for i := range req.Names {
		if req.MaxRows > 0 && granted == req.MaxRows {
			out[i] = a.refusal(i, &req.Names[i], StagingFull, now, &retryAfter)
			continue
		}
		for {
			out[i] = a.reserveRow(i, &req.Names[i], now, &retryAfter)
			if out[i] != WriteNoSpace && out[i] != WriteOverQuota || !a.awaitRoom(ctx) {
				break
			}
		}
		if out[i] == Granted {
			granted++
		}
		if out[i] == WriteNoSpace || out[i] == WriteOverQuota {
			break
		}
	}
	m := &h.mu.metrics
	m.Reserves++
	m.ReservedBlocks += int64(granted)
	if granted == 0 {
		return nil, out, retryAfter, nil
	}
	a.sums = make([]uint64, len(a.refs))
	h.mu.attempts[a] = struct{}{}
	return a, out, retryAfter, nil
}

func (h *Hierarchy) newAttempt(req ReserveRequest, now time.Time) (*Attempt, error) {
	n, err := h.namespaceLocked(req.Namespace)
	if err != nil {
		return nil, err
	}
	if req.Device && h.cfg.Device == nil {
		return nil, fmt.Errorf("reserve on the device of a node that has none: %w", paging.ErrInvalid)
	}
	setDefault(&req.Parts, n.all)
	setDefault(&req.Want, req.Parts)
	if err := n.check(len(req.Names), req.First, req.Parts); err != nil {
		return nil, err
	}
	if !n.all.Contains(req.Want) {
		return nil, fmt.Errorf("wanted part set %#x of a layout with %d parts: %w", uint64(req.Want), n.parts, paging.ErrInvalid)
	}
	if !req.Deadline.After(now) {
		return nil, fmt.Errorf("deadline of the attempt: %w", paging.ErrExpired)
	}
	n.used = uint32(now.Unix())
	return &Attempt{h: h, ns: n, first: req.First, parts: req.Parts, want: req.Want | req.Parts,
		deadline: req.Deadline, onDevice: req.Device, rows: make([]attemptRow, len(req.Names))}, nil
}

// refusal is why a row is not reserved whatever room there is, else otherwise.
func (a *Attempt) refusal(i int, name *paging.BlockName, otherwise Outcome, now time.Time, retryAfter *time.Duration) Outcome {
	at := a.ns.pagesAt(a.first+i, a.parts)
	if at == 0 {
		return Exists // no page lies at this position
	}
	id := a.h.mu.index.find(a.ns.num, name)
	if id == 0 {
		return otherwise
	}
	b := a.h.mu.index.at(id)
	missing := at &^ a.h.stored(id, b)
	if missing == 0 {
		return Exists
	}
	f := a.h.mu.inflight[id]
	if f == nil {
		return otherwise
	}
	if f.filling()&missing != 0 { // another node's copy is on its way
		*retryAfter = max(*retryAfter, arrivesWithin)
		return BeingWritten
	}
	if f.reserved&missing == 0 {
		return otherwise
	}
	if f.by == a {
		return Repeated
	}
	if !f.until.After(now) && a.h.expireAttempts(now) {
		return a.refusal(i, name, otherwise, now, retryAfter)
	}
	*retryAfter = max(*retryAfter, f.until.Sub(now))
	return BeingWritten
}

// arrivesWithin is when to ask again for a page that another node is sending.
const arrivesWithin = 20 * time.Millisecond

// reserveRow sets the pages of one row aside that are not stored yet.
func (a *Attempt) reserveRow(i int, name *paging.BlockName, now time.Time, retryAfter *time.Duration) Outcome {
	if out := a.refusal(i, name, Granted, now, retryAfter); out != Granted {
		return out
	}
	h := a.h
	id := h.blockFor(a.ns, name, a.first+i, uint32(now.Unix()))
	b := h.mu.index.at(id)
	parts := a.ns.pagesAt(a.first+i, a.parts) &^ h.stored(id, b)
	row := &a.rows[i]
	*row = attemptRow{id: id, parts: parts, at: len(a.refs), state: open}
	f := h.inflightOf(id, b)
	f.reserved |= parts
	f.by = a
	if f.until.Before(a.deadline) {
		f.until = a.deadline
	}
	for s := parts; s != 0; s &= s - 1 {
		if r := a.setAside(bits.TrailingZeros64(uint64(s)), id); r != NoReason {
			a.free(row)
			a.refs = a.refs[:row.at]
			a.device = a.device[:min(row.at, len(a.device))]
			*row = attemptRow{}
			if r == OverQuota {
				return WriteOverQuota
			}
			return WriteNoSpace
		}
	}
	return Granted
}

// setAside allocates the slots of one page.
func (a *Attempt) setAside(part int, id blockID) Reason {
	ref, r := a.h.allocRAM(a.ns, part, id, nil)
	if r != NoReason {
		return r
	}
	a.refs = append(a.refs, ref)
	if !a.onDevice {
		return NoReason
	}
	ref, _, r = a.h.allocDevice(a.ns, part, id)
	a.short = r != NoReason
	a.device = append(a.device, ref)
	return r
}

// free gives back what a row set aside. Requires Hierarchy.mu.
func (a *Attempt) free(row *attemptRow) {
	h := a.h
	b := h.mu.index.at(row.id)
	refs := a.refs[row.at:]
	for s := row.parts; s != 0 && len(refs) > 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		h.freeAside(a.ns, part, refs[0])
		if a.onDevice {
			at := len(a.refs) - len(refs)
			a.ungather(a.device[at], part)
			a.device[at] = 0
		}
		refs = refs[1:]
	}
	a.unreserve(row, b)
	row.state = freed
}

func (a *Attempt) unreserve(row *attemptRow, b *block) {
	f := a.h.mu.inflight[row.id]
	f.reserved &^= row.parts
	a.h.endInflight(row.id, b, f)
}

// awaitRoom is whether to try again. It unlocks while it waits for RAM; the device
// is not waited for.
func (a *Attempt) awaitRoom(ctx context.Context) bool {
	if a.short {
		a.short = false
		return a.h.expireAttempts(time.Now())
	}
	return a.h.awaitRoom(ctx, a.ns.tenant)
}

// awaitRoom unlocks until blocks became clean; false if none can, or ctx ended.
func (h *Hierarchy) awaitRoom(ctx context.Context, t *tenant) bool {
	if h.expireAttempts(time.Now()) {
		return true
	}
	if !h.cleanable(t) || ctx.Err() != nil {
		return false
	}
	cleaned := h.mu.cleaned
	h.mu.metrics.CleanWaits++
	t.starving++
	began := time.Now()
	h.mu.Unlock()
	h.wakeWriter()
	select {
	case <-cleaned:
	case <-ctx.Done():
	}
	h.mu.Lock()
	h.mu.metrics.CleanWaitTime += time.Since(began)
	t.starving--
	return !h.mu.closed && ctx.Err() == nil
}

// Parts is the set of parts that were set aside for a row: those whose bytes
// Commit takes. 0: the row was not granted.
func (a *Attempt) Parts(row int) paging.PartSet {
	a.h.mu.Lock()
	defer a.h.mu.Unlock()
	return a.rows[row].parts
}

// GiveBack gives up one row that is not being committed.
func (a *Attempt) GiveBack(row int) {
	a.h.mu.Lock()
	defer a.h.mu.Unlock()
	if r := &a.rows[row]; r.state == open {
		a.free(r)
	}
}

// Abort ends the attempt: rows that were not committed are given up. Idempotent.
func (a *Attempt) Abort() {
	a.h.mu.Lock()
	defer a.h.mu.Unlock()
	a.end()
}

// end requires Hierarchy.mu.
func (a *Attempt) end() {
	for i := range a.rows {
		if r := &a.rows[i]; r.state == open {
			a.free(r)
		}
	}
	a.ended = true
	delete(a.h.mu.attempts, a)
}

// expireAttempts ends the attempts whose deadline has passed; false if there
// are none. Requires Hierarchy.mu.
func (h *Hierarchy) expireAttempts(now time.Time) (some bool) {
	for a := range h.mu.attempts {
		if a.deadline.After(now) {
			continue
		}
		a.expired = true
		a.end()
		h.mu.metrics.ExpiredAttempts++
		some = true
	}
	return some
}

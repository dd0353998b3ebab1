package tier

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
)

// Commit copies the bytes of rows into their slots, sums them as it copies, and
// publishes the blocks. It answers one Outcome per row, in the order of rows:
// Committed, Duplicate or DuplicateDivergent (the row was committed before),
// Expired, NotDurable, NotReached (the row is not open). With Durable it waits
// until the disk has the pages, at most until ctx ends. Errors: paging.ErrInvalid
// (a row or a length is wrong; nothing was committed), paging.ErrClosed.
func (a *Attempt) Commit(ctx context.Context, rows []CommitRow, opt CommitOptions) ([]Outcome, error) {
	h := a.h
	out := make([]Outcome, len(rows))
	if err := a.begin(rows, out, time.Now()); err != nil {
		return nil, err
	}
	a.copyRows(rows, out)
	a.gatherRows(rows, out)
	for i, r := range rows {
		switch {
		case out[i] != Duplicate:
		case r.Device != nil:
			out[i] = a.compareDevice(r)
		default:
			out[i] = a.compareRow(r)
		}
	}
	h.mu.Lock()
	w := a.publish(rows, out, opt)
	h.mu.Unlock()
	h.wakeWriter()
	if opt.Durable {
		a.awaitDurable(ctx, w, rows, out)
	}
	return out, nil
}

// checkRows requires Hierarchy.mu.
func (a *Attempt) checkRows(rows []CommitRow) error {
	for _, r := range rows {
		if r.Row < 0 || r.Row >= len(a.rows) {
			return fmt.Errorf("row %d of %d: %w", r.Row, len(a.rows), paging.ErrInvalid)
		}
		if r.Device != nil {
			if err := a.checkDevice(r); err != nil {
				return err
			}
			continue
		}
		if a.onDevice {
			return fmt.Errorf("row %d was reserved on the device and does not lie there: %w", r.Row, paging.ErrInvalid)
		}
		if len(r.Src) != a.parts.Len() {
			return fmt.Errorf("row %d with %d pages, want %d: %w", r.Row, len(r.Src), a.parts.Len(), paging.ErrInvalid)
		}
		parts, col := a.rows[r.Row].parts, 0
		for s := a.parts; s != 0; s &= s - 1 {
			part := bits.TrailingZeros64(uint64(s))
			if parts.Has(part) && len(r.Src[col]) != int(a.ns.bytes[part]) {
				return fmt.Errorf("part %d of row %d has %d bytes, want %d: %w", part, r.Row, len(r.Src[col]), a.ns.bytes[part], paging.ErrInvalid)
			}
			col++
		}
	}
	return nil
}

// begin claims the rows that can be committed: Granted, to be copied; Duplicate,
// to be compared.
func (a *Attempt) begin(rows []CommitRow, out []Outcome, now time.Time) error {
	a.h.mu.Lock()
	defer a.h.mu.Unlock()
	if a.h.mu.closed {
		return paging.ErrClosed
	}
	if err := a.checkRows(rows); err != nil {
		return err
	}
	if !a.ended && !a.deadline.After(now) {
		a.expired = true
		a.end()
		a.h.mu.metrics.ExpiredAttempts++
	}
	for i, r := range rows {
		switch row := &a.rows[r.Row]; {
		case row.state == open:
			row.state = copying
			out[i] = Granted
		case row.state == committed:
			out[i] = Duplicate
		case a.expired && row.state == freed:
			out[i] = Expired
		default:
			out[i] = NotReached
		}
	}
	return nil
}

// spreadBytes is how much a commit must copy for a second processor to be worth
// its wake-up: a few hundred microseconds of copying.
const spreadBytes = 2 << 20

// copyRows copies the rows that are Granted. A long commit is shared by the
// processors that no other commit uses: one cannot fill the memory bus alone.
func (a *Attempt) copyRows(rows []CommitRow, out []Outcome) {
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < int64(len(rows)); i = next.Add(1) - 1 {
			if out[i] == Granted && rows[i].Device == nil {
				a.copyRow(rows[i])
			}
		}
	}
	var helpers sync.WaitGroup
	for left := a.bytesOf(rows, out) / spreadBytes; left > 0; left-- {
		select {
		case a.h.copiers <- struct{}{}:
			helpers.Go(func() { // owner: this call; exits with the last row; bound: copiers of the Hierarchy
				defer func() { <-a.h.copiers }()
				work()
			})
			continue
		default: // all processors copy already
		}
		break
	}
	work()
	helpers.Wait()
}

// bytesOf is how much copyRows copies.
func (a *Attempt) bytesOf(rows []CommitRow, out []Outcome) (n int64) {
	for i, r := range rows {
		if out[i] == Granted {
			n += a.ns.bytesOf(a.rows[r.Row].parts)
		}
	}
	return n
}

// copyRow copies and sums the pages of a row that is claimed.
func (a *Attempt) copyRow(r CommitRow) {
	row := &a.rows[r.Row]
	at, col := row.at, 0
	for s := a.parts; s != 0; s &= s - 1 {
		if part := bits.TrailingZeros64(uint64(s)); row.parts.Has(part) {
			a.sums[at] = paging.CopyChecksum(a.h.cfg.Arena.Bytes(a.refs[at], a.ns.bytes[part]), r.Src[col])
			at++
		}
		col++
	}
}

// compareRow compares the pages of a row that was committed before.
func (a *Attempt) compareRow(r CommitRow) Outcome {
	row := &a.rows[r.Row]
	at, col := row.at, 0
	for s := a.parts; s != 0; s &= s - 1 {
		if part := bits.TrailingZeros64(uint64(s)); row.parts.Has(part) {
			if a.sums[at] != paging.Checksum(r.Src[col]) {
				return DuplicateDivergent
			}
			at++
		}
		col++
	}
	return Duplicate
}

// publish makes the copied rows visible, in the order that the RAM policy wants:
// mostly from the tail, so that the head of the chain is the last to be evicted. Requires Hierarchy.mu. w ends when the disk
// has what is to be durable; nil if nothing is.
func (a *Attempt) publish(rows []CommitRow, out []Outcome, opt CommitOptions) (w *waiter) {
	h := a.h
	order := make([]int, len(rows))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int { return rows[j].Row - rows[i].Row })
	if h.headFirst {
		slices.Reverse(order)
	}
	now := h.nowSeconds()
	if opt.Durable {
		w = newWaiter()
	}
	for _, i := range order {
		switch out[i] {
		case Granted:
			out[i] = Committed
			a.publishRow(&a.rows[rows[i].Row], opt, now, w)
		case Duplicate:
			h.mu.metrics.DuplicateBlocks++
		case DuplicateDivergent:
			h.mu.metrics.DivergentBlocks++
		}
	}
	return w
}

func (a *Attempt) publishRow(row *attemptRow, opt CommitOptions, now uint32, w *waiter) {
	h := a.h
	b := h.mu.index.at(row.id)
	h.pin(b)
	m := &h.mu.metrics
	at := row.at
	for s := row.parts; s != 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		a.ns.tenant.aside -= a.ns.slot[part]
		h.publish(b, part, a.refs[at], a.sums[at])
		if a.device != nil && a.device[at] != 0 {
			h.publishDevice(row.id, b, part, a.device[at])
		}
		m.CommittedPages++
		m.CommittedBytes += int64(a.ns.bytes[part])
		at++
	}
	m.CommittedBlocks++
	check.That(row.state == copying, "published a row that was not copied")
	row.state = committed
	row.epoch = b.epoch
	a.unreserve(row, b)
	b.used = now
	if opt.Retention != nil && !b.flags.has(dropped) {
		h.retain(row.id, b, *opt.Retention, now)
	}
	h.chargePin(row.id, b)
	h.assemble(row.id, b, a.ns.pagesAt(int(b.position), a.want), now)
	h.enterRAMOrder(row.id, b, a.first+len(a.rows))
	h.queueDirty(row.id, b, now)
	if w != nil && h.awaitDisk(row.id, b, w) {
		h.hasten(row.id, b)
	} else if b.priority >= hastenPriority {
		h.hasten(row.id, b)
	}
	h.unpin(row.id, b)
}

// hastenPriority is the retention priority from which on a block is written down at once.
const hastenPriority = 50

// awaitDurable waits for the disk and corrects the outcomes of rows that it did
// not take in time.
func (a *Attempt) awaitDurable(ctx context.Context, w *waiter, rows []CommitRow, out []Outcome) {
	h := a.h
	h.mu.Lock()
	waiting := w.left > 0
	h.mu.Unlock()
	if waiting {
		select {
		case <-w.ch:
		case <-ctx.Done():
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, r := range rows {
		if out[i] != Committed && out[i] != Duplicate {
			continue
		}
		row := &a.rows[r.Row]
		h.forgetWaiter(row.id, w)
		if b := h.mu.index.at(row.id); b.epoch != row.epoch || !b.disk.Contains(row.parts) {
			out[i] = NotDurable
			h.mu.metrics.NotDurableBlocks++
		}
	}
}

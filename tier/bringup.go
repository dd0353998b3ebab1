package tier

import (
	"context"
	"errors"
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// bringUp loads what is missing of the wanted rows, and leaves in usable, pins
// and reasons what can be granted. It unlocks while it waits. Each round waits
// for something or gives something up for good, so it ends, at the latest with
// ctx.
func (f *fetch) bringUp(ctx context.Context) {
	for {
		if f.req.Resident {
			f.giveUp(Timeout)
			return
		}
		if err := ctx.Err(); err != nil {
			f.giveUp(reasonOfContext(err))
			return
		}
		stalled := f.startLoads()
		if len(f.bring) > 0 {
			f.h.bring(ctx, f.ns, f.bring)
			clear(f.bring)
			f.bring = f.bring[:0]
		}
		if len(f.waits) > 0 || stalled {
			f.await(ctx, stalled)
			if f.h.mu.closed {
				f.giveUp(Stopping)
				return
			}
			f.replan()
		}
		if f.resident() {
			return
		}
	}
}

func reasonOfContext(err error) Reason {
	if errors.Is(err, context.Canceled) {
		return Cancelled
	}
	return Timeout
}

// replan decides again after blocks changed or rows were given up.
func (f *fetch) replan() {
	f.findAll()
	f.usable = f.plan()
	f.pinRows()
}

// giveUp keeps what can be granted from what is resident, and gives the reason
// for the rest.
func (f *fetch) giveUp(r Reason) {
	if f.req.Mode == ModeSet {
		for i := range f.usable {
			if f.missing(i) != 0 || f.up && f.absent(i) != 0 {
				f.reasons[i] = r
			}
		}
		f.replan()
		return
	}
	before := f.usable
	f.req.Resident = true
	f.replan()
	for i := f.usable; i < before; i++ {
		if f.reasons[i] == NoReason {
			f.reasons[i] = r
		}
	}
}

// startLoads sees to it that every missing page of the wanted rows is being
// loaded, and notes the loads in waits. It gives up rows for which there is no
// room; stalled says that room may come when dirty blocks have been written.
func (f *fetch) startLoads() (stalled bool) {
	f.waits = f.waits[:0]
	for i := 0; i < f.usable; i++ {
		missing := f.missing(i)
		if missing == 0 {
			continue
		}
		r := f.loadRow(i, missing)
		switch {
		case r == NoReason:
		case r == InFlight:
			f.refuse(i, r)
		case f.req.Mode == ModePrefix && f.shrink(i):
			i--
		case f.h.cleanable(f.ns.tenant):
			return true
		case f.req.Mode == ModePrefix && len(f.waits) > 0:
			return false // first see what those loads bring
		default:
			f.refuse(i, r)
		}
	}
	return false
}

// refuse gives up row i, and with ModePrefix all that follow.
func (f *fetch) refuse(i int, r Reason) {
	if f.req.Mode == ModeSet {
		f.reasons[i] = r
		f.pins[i] = false
		f.h.unpin(f.ids[i], f.h.mu.index.at(f.ids[i]))
		f.pinDevice()
		return
	}
	before := f.usable
	f.limit = i
	f.replan()
	for i := f.usable; i < before; i++ {
		f.reasons[i] = r
	}
}

// maxShrinks bounds how often a fetch gives up rows of its own: each time costs a
// pass over all rows, and should be the last.
const maxShrinks = 32

// shrink gives up rows at the end of a prefix, so that the room of those that
// are resident serves row i and the ones after it: a prefix that is longer than
// RAM is granted from its head. false if that would not help.
func (f *fetch) shrink(i int) bool {
	var need, room int64
	for r := i; r < f.usable; r++ {
		need += f.ns.slotsOf(f.unstarted(r))
	}
	end := f.usable
	for end > i+1 && room < need {
		end--
		if !f.pins[end] {
			continue
		}
		need -= f.ns.slotsOf(f.unstarted(end))
		if b := f.h.mu.index.at(f.ids[end]); b.pins == 1 && (!f.h.needsCopy(b) || f.h.mu.bypass) {
			room += f.ns.slotsOf(b.ram)
		}
	}
	if f.shrinks++; room == 0 || f.shrinks > maxShrinks {
		return false
	}
	f.refuse(end, NoSpace)
	return true
}

// unstarted is the set of missing pages of row i that nobody loads yet.
func (f *fetch) unstarted(i int) paging.PartSet {
	missing := f.missing(i)
	if missing == 0 || !f.h.mu.index.at(f.ids[i]).flags.has(busy) {
		return missing
	}
	return missing &^ f.h.mu.inflight[f.ids[i]].filling()
}

// loadRow starts or joins the loads of some parts of a row; NoReason if that is done.
func (f *fetch) loadRow(i int, parts paging.PartSet) Reason {
	h := f.h
	id := f.ids[i]
	b := h.mu.index.at(id)
	f.from[i] = max(f.from[i], h.nearest(id, b, parts))
	if f.afar(i, b, parts) != 0 {
		f.from[i] = Remote
	}
	if b.flags.has(busy) {
		for _, l := range h.mu.inflight[id].loads {
			if l.open&parts != 0 {
				f.waits = append(f.waits, wait{i, l, true})
				if !l.demanded {
					if h.endForesight(id, b) {
						h.mu.metrics.PrefetchLate++
					}
					h.mu.loads.demand(l)
				}
				parts &^= l.open
			}
		}
	}
	if parts == 0 {
		return NoReason
	}
	l, r := h.startLoad(id, b, parts, f.afar(i, b, parts), nil)
	if r == NoReason {
		f.waits = append(f.waits, wait{i, l, false})
		for _, it := range l.items {
			if it.disk == 0 && it.device == 0 {
				f.bring = append(f.bring, it)
			}
		}
	}
	return r
}

// afar is the subset of parts of a row that come from other nodes.
func (f *fetch) afar(i int, b *block, parts paging.PartSet) paging.PartSet {
	if f.remote[i] {
		return parts
	}
	return parts &^ (b.disk | f.h.deviceParts(f.ids[i], b))
}

// await unlocks until the loads in waits have ended, blocks became clean if
// stalled, or ctx ended.
func (f *fetch) await(ctx context.Context, stalled bool) {
	h := f.h
	w := newWaiter()
	for _, x := range f.waits {
		if x.l.open != 0 {
			x.l.waiters = append(x.l.waiters, w)
			w.left++
		}
	}
	if w.left > 0 || len(f.waits) == 0 { // else all came from other nodes already
		f.wait(ctx, w, stalled)
	}
	for _, x := range f.waits {
		if x.l.reason != NoReason && x.row >= 0 {
			f.reasons[x.row] = x.failed()
		}
		if x.l.open == 0 {
			continue
		}
		x.l.leave(w)
		if ctx.Err() != nil && len(x.l.waiters) == 0 {
			h.cancelLoad(x.l)
		}
	}
	for _, x := range f.waits {
		if x.row >= 0 && x.l.readsDisk() && f.reasons[x.row].ofDisk() && f.retryElsewhere(x.row) {
			f.reasons[x.row] = NoReason
		}
	}
}

// wait unlocks until w is done, blocks became clean if stalled, or ctx ended.
func (f *fetch) wait(ctx context.Context, w *waiter, stalled bool) {
	h := f.h
	loaded, cleaned := w.ch, h.mu.cleaned
	if w.left == 0 {
		loaded = nil
	}
	waits, waited := &h.mu.metrics.LoadWaits, &h.mu.metrics.LoadWaitTime
	if stalled {
		waits, waited = &h.mu.metrics.CleanWaits, &h.mu.metrics.CleanWaitTime
		f.ns.tenant.starving++
		defer func() { f.ns.tenant.starving-- }()
	} else {
		cleaned = nil
	}
	*waits++
	began := time.Now()
	h.mu.Unlock()
	if stalled {
		h.wakeWriter()
	}
	select {
	case <-loaded:
	case <-cleaned:
	case <-ctx.Done():
	case <-h.ctx.Done():
	}
	h.mu.Lock()
	*waited += time.Since(began)
}

// failed is why a load did not bring its row; NoReason if whoever brought it gave
// up: it is worth another try.
func (x wait) failed() Reason {
	if r := x.l.reason; !x.joined || r != Cancelled && r != Timeout {
		return r
	}
	return NoReason
}

// ofDisk reports whether the copy on disk is to blame.
func (r Reason) ofDisk() bool { return r == Corrupt || r == Identity || r == IOError }

// startLoad sets slots aside for parts of a block and queues the loads of those
// that are on disk; afar is the subset that comes from other nodes, which the
// caller brings. by is the prefetch that wants them, nil if a call does.
func (h *Hierarchy) startLoad(id blockID, b *block, parts, afar paging.PartSet, by *Promotion) (*load, Reason) {
	n := h.of(b)
	if b.flags.has(busy) && h.mu.inflight[id].reserved&parts != 0 {
		return nil, InFlight
	}
	l := &load{id: id, parts: parts, open: parts, taken: afar, demanded: by == nil}
	// The block itself must not be what makes room.
	h.pin(b)
	for s := parts; s != 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		ref, r := h.allocRAM(n, part, id, by)
		if r != NoReason {
			for _, it := range l.items {
				h.freeAside(n, it.part, it.ram)
			}
			h.unpin(id, b)
			return nil, r
		}
		l.items = append(l.items, loadItem{l: l, part: part, ram: ref})
	}
	pages := h.pagesOf(b)
	for i := range l.items {
		if part := l.items[i].part; !afar.Has(part) && !h.readDevice(l, &l.items[i]) {
			l.items[i].disk = pages[part].disk
		}
	}
	f := h.inflightOf(id, b)
	f.loads = append(f.loads, l)
	h.mu.loads.push(l, by)
	if l.reads {
		h.pushMoves(l)
	}
	for range l.items {
		h.mu.work.Signal()
	}
	return l, NoReason
}

package tier

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// foreseenShare is the part of a tenant's RAM that blocks brought up ahead and
// not used yet may take.
const foreseenShare = 4

// PromoteRequest names blocks that will be wanted in RAM.
type PromoteRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName // in chain order, 1 to paging.MaxCallBlocks; borrowed until return
	First     int                // position of Names[0] in its chain
	Parts     paging.PartSet     // 0: all of the layout
	Priority  uint8              // 0 to MaxPriority: higher is loaded first, and may take room of blocks up to its own priority
	Deadline  time.Time          // the pages are not wanted after it; not zero
}

// Promotion is a prefetch that runs. It holds what it brought up, so that it is
// still there when it is used, until then or until its deadline.
type Promotion struct {
	Admitted int // blocks that are being brought up
	Refused  int // blocks of the usable prefix that there is no room for
	Resident int // blocks that were there

	h        *Hierarchy
	priority uint8
	signal   chan struct{}

	// Guarded by Hierarchy.mu.
	ready  []int // rows that Next has not told yet
	left   int   // loads that have not ended
	loads  []*load
	reason Reason // why rows did not come
	ended  bool
}

// ahead is a row of a Promotion that waits for a load.
type ahead struct {
	p   *Promotion
	row int
}

// Promote starts to bring the usable prefix into RAM and returns at once. It
// takes free room and room of blocks that are worth less than what is expected:
// of no higher priority and not used for ten seconds; blocks brought up ahead and not
// used yet take a quarter of the tenant's RAM at most. Errors as Lookup, and
// paging.ErrExpired.
func (h *Hierarchy) Promote(req PromoteRequest) (*Promotion, error) {
	if !req.Deadline.After(time.Now()) {
		return nil, paging.ErrExpired
	}
	f := h.getFetch()
	defer h.putFetch(f)
	f.req = FetchRequest{Namespace: req.Namespace, Names: req.Names, First: req.First, Parts: req.Parts}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := f.resolve(); err != nil {
		return nil, err
	}
	f.findAll()
	if f.usable = f.plan(); f.locate() {
		f.usable = f.plan()
	}
	if h.mu.closed {
		return nil, paging.ErrClosed
	}
	f.pinRows()
	p := &Promotion{h: h, priority: min(req.Priority, MaxPriority), signal: make(chan struct{}, 1)}
	until := uint32(req.Deadline.Unix()) + 1
	for i := range f.usable {
		if f.pins[i] {
			p.row(f, i, until)
		}
	}
	h.bringAhead(req.Deadline, f.ns, f.bring)
	f.usable = 0
	f.pinRows()
	h.mu.metrics.Prefetches++
	return p, nil
}

// row admits one row.
func (p *Promotion) row(f *fetch, i int, until uint32) {
	h := p.h
	id := f.ids[i]
	b := h.mu.index.at(id)
	missing := f.unstarted(i)
	afar := missing &^ (b.disk | h.deviceParts(id, b))
	if p.Refused > 0 || afar != 0 && h.mu.loads.afar == maxAfar || !h.foresee(p, f.ns, id, b, b.ram|b.disk|missing, until) {
		if f.missing(i) != 0 {
			p.Refused++
		}
		return
	}
	if missing != 0 {
		l, r := h.startLoad(id, b, missing, afar, p)
		if r != NoReason {
			p.Refused++
			h.wasteForesight(id, b)
			return
		}
		for _, it := range l.items {
			if it.disk == 0 && it.device == 0 {
				f.bring = append(f.bring, it)
			}
		}
		h.countForesight(id)
	}
	if f.missing(i) == 0 {
		p.Resident++
		p.ready = append(p.ready, i)
		return
	}
	p.Admitted++
	for _, l := range h.mu.inflight[id].loads {
		l.ahead = append(l.ahead, ahead{p, i})
		p.loads = append(p.loads, l)
		p.left++
	}
}

// foresee pins a block for a prefetch; false if its share is used up.
func (h *Hierarchy) foresee(p *Promotion, n *namespace, id blockID, b *block, parts paging.PartSet, until uint32) bool {
	if b.flags.has(foreseen) {
		x := h.mu.foreseen.of[id]
		x.until = max(x.until, until)
		h.mu.foreseen.set(id, x)
		return true
	}
	bytes := n.slotsOf(parts)
	if n.tenant.foreseen+bytes > h.ramLimit(n.tenant)/foreseenShare {
		return false
	}
	n.tenant.foreseen += bytes
	b.flags |= foreseen
	h.pin(b)
	h.mu.foreseen.set(id, note{until: until, bytes: bytes, by: p})
	return true
}

// countForesight notes that a block is brought up, and not only held, by a
// prefetch: what becomes of it is counted once.
func (h *Hierarchy) countForesight(id blockID) {
	if x := h.mu.foreseen.of[id]; !x.counted {
		x.counted = true
		h.mu.foreseen.of[id] = x
		h.mu.metrics.PrefetchBlocks++
	}
}

// endForesight ends the pin of a prefetch, and reports whether what became of
// the block is to be counted. The block may be gone afterwards.
func (h *Hierarchy) endForesight(id blockID, b *block) (counted bool) {
	if b.flags.has(foreseen) {
		x := h.mu.foreseen.of[id]
		counted = x.counted
		h.of(b).tenant.foreseen -= x.bytes
		delete(h.mu.foreseen.of, id)
		b.flags &^= foreseen
		h.unpin(id, b)
	}
	return counted
}

func (h *Hierarchy) wasteForesight(id blockID, b *block) {
	if h.endForesight(id, b) {
		h.mu.metrics.PrefetchWasted++
	}
}

// loadEnded tells the prefetches that wait for a load. Requires Hierarchy.mu.
func (l *load) loadEnded() {
	for _, a := range l.ahead {
		a.p.left--
		if l.reason == NoReason {
			a.p.ready = append(a.p.ready, a.row)
		} else {
			a.p.reason = l.reason
		}
		select {
		case a.p.signal <- struct{}{}:
		default:
		}
	}
	l.ahead = nil
}

// Next waits for rows to become ready and returns them, as indexes into Names.
// done says that no more will come; reason then says why some did not, if so.
// One goroutine calls Next at a time. The error is that of ctx.
func (p *Promotion) Next(ctx context.Context) (ready []int, done bool, reason Reason, err error) {
	for {
		p.h.mu.Lock()
		ready, p.ready = p.ready, nil
		done = p.left == 0 || p.ended
		reason = p.reason
		p.h.mu.Unlock()
		if len(ready) > 0 || done {
			return ready, done, reason, nil
		}
		select {
		case <-p.signal:
		case <-ctx.Done():
			return nil, false, NoReason, ctx.Err()
		}
	}
}

// Cancel ends the prefetch: loads that no worker began are given up, and what it
// holds and nobody used may be evicted. Idempotent.
func (p *Promotion) Cancel() {
	h := p.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	if p.left > 0 {
		p.reason = Cancelled
	}
	for _, l := range p.loads {
		l.forget(p)
		if !l.demanded && len(l.waiters) == 0 && len(l.ahead) == 0 {
			h.cancelLoad(l)
		}
	}
	p.loads = nil
	for id, x := range h.mu.foreseen.of {
		if x.by == p {
			h.wasteForesight(id, h.mu.index.at(id))
		}
	}
	select {
	case p.signal <- struct{}{}:
	default:
	}
}

// forget takes a prefetch off those that wait for a load.
func (l *load) forget(p *Promotion) {
	kept := l.ahead[:0]
	for _, a := range l.ahead {
		if a.p != p {
			kept = append(kept, a)
		}
	}
	l.ahead = kept
}

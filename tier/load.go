package tier

import (
	"errors"
	"slices"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
)

// load brings some parts of a block from disk into slots that are set aside.
// Whoever wants them meanwhile waits for the same load. It pins its block. All
// fields are guarded by Hierarchy.mu.
type load struct {
	id       blockID
	parts    paging.PartSet
	items    []loadItem
	open     paging.PartSet // items that have not ended
	demanded bool           // a Fetch wants it, not only a prefetch
	taken    paging.PartSet // items that a worker took
	reason   Reason         // why an item failed
	waiters  []*waiter
	ahead    []ahead // prefetches that wait for it
	fill     bool    // brings parts from RAM to the device instead
	reads    bool    // some items come from the device, whose copy is pinned
}

// loadItem is the load of one page.
type loadItem struct {
	l      *load
	part   int
	ram    Ref
	disk   Ref // 0: it comes from another node, or from the device
	device Ref // source on the device; of a fill: destination. 0: neither
}

// readsDisk reports whether a page of the load comes from this node's disk.
func (l *load) readsDisk() bool {
	return slices.ContainsFunc(l.items, func(it loadItem) bool { return it.disk != 0 })
}

// leave takes a waiter off.
func (l *load) leave(w *waiter) {
	l.waiters = slices.DeleteFunc(l.waiters, func(x *waiter) bool { return x == w })
}

// loadQueue holds the items that no worker took yet. It is bounded by the room
// of the arena: each item has its slot.
type loadQueue struct {
	wanted   fifo[loadItem]                  // by a Fetch
	ahead    [MaxPriority + 1]fifo[loadItem] // by prefetches of each priority
	waiting  int                             // items in all of these
	running  int                             // taken by a worker
	bringing int                             // pages that come from other nodes now
	afar     int                             // prefetches that bring pages from other nodes
}

func (q *loadQueue) push(l *load, by *Promotion) {
	for _, it := range l.items {
		if it.disk == 0 {
			continue // of another node: whoever started the load brings it
		}
		if by == nil {
			q.wanted.push(it)
		} else {
			q.ahead[by.priority].push(it)
		}
		q.waiting++
	}
}

// demand moves the load of a prefetch in front: its items are queued twice, and
// the second time they are found taken.
func (q *loadQueue) demand(l *load) {
	if !l.demanded {
		l.demanded = true
		for _, it := range l.items {
			if !it.begun() && it.disk != 0 {
				q.wanted.push(it)
				q.waiting++
			}
		}
	}
}

func (it loadItem) begun() bool { return it.l.taken.Has(it.part) }

func (q *loadQueue) pop() (loadItem, bool) {
	from := &q.wanted
	for priority := MaxPriority; q.waiting > 0; {
		if from.len() == 0 {
			from = &q.ahead[priority]
			priority--
			continue
		}
		q.waiting--
		if it := from.pop(); !it.begun() {
			it.l.taken = it.l.taken.With(it.part)
			return it, true
		}
	}
	return loadItem{}, false
}

func (q *loadQueue) idle() bool { return q.running == 0 && q.waiting == 0 }

// loadPages is one of the workers that load pages.
func (h *Hierarchy) loadPages() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		it, ok := h.mu.loads.pop()
		switch {
		case ok && h.mu.closed:
			h.endLoad(it, paging.ErrClosed)
		case ok:
			h.loadPage(it)
		case h.mu.closed:
			return
		default:
			h.mu.work.Wait()
		}
	}
}

// loadPage loads one page, unlocked meanwhile.
func (h *Hierarchy) loadPage(it loadItem) {
	b := h.mu.index.at(it.l.id)
	n := h.of(b)
	p := Page{Bytes: n.bytes[it.part], Sum: h.pagesOf(b)[it.part].sum,
		ID: paging.PageID{BlockID: paging.BlockID{Namespace: n.id, Name: b.name}, Part: it.part}}
	h.mu.loads.running++
	h.mu.Unlock()
	p.Key = paging.StorageKey(n.id, p.ID.Name, it.part)
	err := h.cfg.Durable.Load(h.ctx, p, it.disk, h.cfg.Arena.Bytes(it.ram, p.Bytes))
	settled := h.awaitSettled(err)
	h.mu.Lock()
	h.mu.loads.running--
	if !settled {
		it.ram = 0 // the disk may still write to it: nobody gets it again
	}
	h.endLoad(it, err)
}

// awaitSettled waits until a tier has let go of memory; false if it has not when
// the time to stop is up.
func (h *Hierarchy) awaitSettled(err error) bool {
	done := Unsettled(err)
	if done == nil {
		return true
	}
	select {
	case <-done:
		return true
	case <-h.ctx.Done():
		return false
	}
}

// endLoad publishes a page that was loaded, or drops the copy that was not.
func (h *Hierarchy) endLoad(it loadItem, err error) {
	l := it.l
	b := h.mu.index.at(l.id)
	n := h.of(b)
	m := &h.mu.metrics
	if err == nil && !b.flags.has(dropped) {
		n.tenant.aside -= n.slot[it.part]
		h.publish(b, it.part, it.ram, h.pagesOf(b)[it.part].sum)
		h.chargePin(it.l.id, b) // a part that only a device had
		if it.device == 0 {
			m.LoadedPages++
			m.LoadedBytes += int64(n.bytes[it.part])
		}
	} else {
		h.freeAside(n, it.part, it.ram)
		if err != nil {
			l.reason = h.loadFailed(b, it, err)
		} else {
			l.reason = NotFound
		}
	}
	h.endItem(it)
}

// endItem notes that a page of a load is there, or will not be.
func (h *Hierarchy) endItem(it loadItem) {
	l := it.l
	check.That(l.open.Has(it.part), "the load of a page ended twice")
	if l.open = l.open.Without(it.part); l.open == 0 {
		h.finishLoad(l)
	}
}

// finishLoad lets everybody go on who waits for the load.
func (h *Hierarchy) finishLoad(l *load) {
	b := h.mu.index.at(l.id)
	f := h.mu.inflight[l.id]
	f.loads = slices.DeleteFunc(f.loads, func(x *load) bool { return x == l })
	h.endInflight(l.id, b, f)
	for _, w := range l.waiters {
		w.done()
	}
	l.waiters = nil
	l.loadEnded()
	if l.reads {
		h.queueDirty(l.id, b, h.nowSeconds()) // what the device had alone
		h.unpinDevice(l.id)
	}
	h.unpin(l.id, b)
}

// loadFailed counts a failed load and drops the copy unless it may be good.
func (h *Hierarchy) loadFailed(b *block, it loadItem, err error) Reason {
	m := &h.mu.metrics
	r := IOError
	switch {
	case errors.Is(err, paging.ErrIdentity):
		r = Identity
		m.IdentityPages++
	case errors.Is(err, paging.ErrCorrupt):
		r = Corrupt
		m.CorruptPages++
	case errors.Is(err, paging.ErrClosed), errors.Is(err, paging.ErrExpired):
		return Stopping
	case errors.Is(err, paging.ErrUnavailable):
		m.LoadErrors++
		return IOError
	default:
		m.LoadErrors++
	}
	if it.device != 0 {
		h.dropDevice(it.l.id, b, it.part)
		if b.disk.Has(it.part) {
			return NoReason // that copy is tried next
		}
	}
	if it.disk != 0 && h.pagesOf(b)[it.part].disk == it.disk {
		h.dropDisk(it.l.id, b, paging.PartSet(0).With(it.part), false)
		m.DroppedCopies++
	}
	return r
}

// cancelLoad gives a load up that nobody waits for and no worker has begun; one
// that runs goes on and its page becomes cache.
func (h *Hierarchy) cancelLoad(l *load) {
	if l.taken != 0 || l.open == 0 {
		return
	}
	if l.fill {
		h.cancelFill(l)
		return
	}
	n := h.of(h.mu.index.at(l.id))
	l.taken = l.parts
	l.reason = Cancelled
	l.open = 0
	for _, it := range l.items {
		h.freeAside(n, it.part, it.ram)
	}
	h.finishLoad(l)
}

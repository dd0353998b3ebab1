package tier

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Peers is what other nodes hold. Its methods may be called from many
// goroutines, never under a lock of the Hierarchy.
type Peers interface {
	// Locate sets elsewhere[i] to the parts of names[i] that other nodes which can
	// be reached are said to hold. It reads memory only.
	Locate(ns paging.NamespaceID, names []paging.BlockName, elsewhere []paging.PartSet)
	// Bring fills Dst of each page with a copy from another node and calls done once
	// for each, from any goroutine: the checksum of the copy, compared after the last
	// copy, or why it did not come. Nothing touches Dst of a page after its done. It
	// returns when all are done; soon, when ctx ends.
	Bring(ctx context.Context, ns paging.NamespaceID, pages []RemotePage, done func(i int, sum uint64, err error))
}

// RemotePage is one page that is wanted from another node.
type RemotePage struct {
	Name paging.BlockName
	Part int
	Dst  []byte // its slot
}

// locateStep is how many blocks Locate is asked about at once: behind the first
// block of a prefix that nobody has, no more are asked for.
const locateStep = 256

// locate asks who else holds what the rows lack, unlocked. It reports whether
// anything was found.
func (f *fetch) locate() (found bool) {
	h := f.h
	if h.cfg.Peers == nil || f.req.Resident || f.req.Local || f.complete() {
		return false
	}
	f.elsewhere = append(f.elsewhere[:0], make([]paging.PartSet, len(f.req.Names))...)
	stop := f.ns.plain && f.req.Mode == ModePrefix
	at := 0
	if stop {
		at = f.usable // what is before is there
	}
	for end := false; at < len(f.req.Names) && !end; at += locateStep {
		names := f.req.Names[at:min(at+locateStep, len(f.req.Names))]
		local := make([]paging.PartSet, len(names))
		for i := range names {
			local[i] = f.have(at + i)
		}
		there := f.elsewhere[at : at+len(names)]
		h.mu.Unlock()
		h.cfg.Peers.Locate(f.req.Namespace, names, there)
		h.mu.Lock()
		for i := range there {
			found = found || there[i]&f.parts != 0
			end = end || stop && !(there[i]|local[i]).Contains(f.parts)
		}
		f.findAll() // what was found before the lock was let go of may be gone
	}
	return found
}

// complete reports whether the rows can be granted from here.
func (f *fetch) complete() bool {
	if f.req.Mode == ModePrefix {
		return f.usable == f.limit
	}
	for i := range f.req.Names {
		if !f.have(i).Contains(f.ns.pagesAt(f.at(i), f.parts)) {
			return false
		}
	}
	return true
}

// retryElsewhere reports whether a row that could not be loaded from here may come
// from another node, once.
func (f *fetch) retryElsewhere(i int) bool {
	h := f.h
	if h.cfg.Peers == nil || f.req.Resident || f.req.Local || f.remote[i] {
		return false
	}
	f.remote[i] = true
	var there [1]paging.PartSet
	h.mu.Unlock()
	h.cfg.Peers.Locate(f.req.Namespace, f.req.Names[i:i+1], there[:])
	h.mu.Lock()
	if f.elsewhere == nil {
		f.elsewhere = make([]paging.PartSet, len(f.req.Names))
	}
	f.elsewhere[i] = there[0]
	return there[0]&f.parts != 0
}

// bring copies pages from other nodes into their slots. It unlocks meanwhile.
func (h *Hierarchy) bring(ctx context.Context, n *namespace, items []loadItem) {
	pages := make([]RemotePage, len(items))
	for i, it := range items {
		b := h.mu.index.at(it.l.id)
		pages[i] = RemotePage{Name: b.name, Part: it.part, Dst: h.cfg.Arena.Bytes(it.ram, n.bytes[it.part])}
	}
	h.mu.loads.bringing += len(items)
	h.mu.Unlock()
	h.cfg.Peers.Bring(ctx, n.id, pages, func(i int, sum uint64, err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.mu.loads.bringing--
		h.brought(items[i], sum, err)
	})
	h.mu.Lock()
}

// brought enters what became of a page of another node.
func (h *Hierarchy) brought(it loadItem, sum uint64, err error) {
	b := h.mu.index.at(it.l.id)
	n := h.of(b)
	m := &h.mu.metrics
	if err != nil {
		h.freeAside(n, it.part, it.ram)
		it.l.reason = reasonOfRemote(err)
		m.RemoteFailedPages++
		h.endItem(it)
		return
	}
	if b.disk.Has(it.part) && h.pagesOf(b)[it.part].sum != sum {
		// A right copy with other bytes: the record has one checksum, and this is
		// the copy that can be read.
		h.dropDisk(it.l.id, b, paging.PartSet(0).With(it.part), false)
	}
	if b.flags.has(dropped) {
		h.freeAside(n, it.part, it.ram)
		it.l.reason = NotFound
	} else {
		n.tenant.aside -= n.slot[it.part]
		h.publish(b, it.part, it.ram, sum)
		h.chargePin(it.l.id, b)
		h.queueDirty(it.l.id, b, h.nowSeconds())
		m.RemotePages++
		m.RemoteBytes += int64(n.bytes[it.part])
	}
	h.endItem(it)
}

func reasonOfRemote(err error) Reason {
	switch {
	case errors.Is(err, paging.ErrCorrupt):
		return Corrupt
	case errors.Is(err, paging.ErrNotFound):
		return NotFound
	case errors.Is(err, paging.ErrExpired), errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, context.Canceled):
		return Cancelled
	case errors.Is(err, paging.ErrClosed):
		return Stopping
	case errors.Is(err, paging.ErrIO):
		return IOError
	}
	return Unreachable
}

// maxAfar bounds the prefetches that bring pages from other nodes at a time.
const maxAfar = 16

// bringAhead brings the pages of a prefetch in the background. Requires
// Hierarchy.mu.
func (h *Hierarchy) bringAhead(deadline time.Time, n *namespace, items []loadItem) {
	if len(items) == 0 {
		return
	}
	items = slices.Clone(items)
	h.mu.loads.afar++
	// Owner: the Hierarchy. Exit: the deadline, or Close. Bound: maxAfar.
	h.workers.Go(func() {
		ctx, cancel := context.WithDeadline(h.intake, deadline)
		defer cancel()
		h.mu.Lock()
		defer h.mu.Unlock()
		h.bring(ctx, n, items)
		h.mu.loads.afar--
	})
}

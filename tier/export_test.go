package tier

import (
	"fmt"

	"github.com/kvtier/kvtier/paging"
)

// CheckInvariants compares everything the Hierarchy knows with everything else
// it knows, and panics at the first difference.
func (h *Hierarchy) CheckInvariants() {
	h.mu.Lock()
	defer h.mu.Unlock()
	type sums struct {
		ram                                  [classes]int64
		disk, aside                          int64
		ramBlocks, diskBlocks, writingBlocks int
		device, deviceAside                  int64
		deviceBlocks                         int
	}
	by := map[*tenant]*sums{}
	for _, t := range h.mu.tenantList {
		by[t] = new(sums)
	}
	blocks := map[*namespace]int{}
	devicePages := int64(0)
	live, pages, queuedBlocks, hastenedBlocks := 0, int64(0), map[*tenant]int{}, 0
	h.mu.index.each(func(id blockID, b *block) {
		n := h.of(b)
		s := by[n.tenant]
		live++
		blocks[n]++
		must(b.flags.has(dropped) || h.mu.index.find(b.ns, &b.name) == id, "block %d is not found by its name", id)
		must(b.ram|b.disk != 0 || b.pins > 0 || b.flags.has(busy|onDevice), "block %d has no page and no use", id)
		must(b.flags.has(busy) == (h.mu.inflight[id] != nil), "block %d: busy", id)
		must(b.flags.has(timed) == has(h.mu.retained, id), "block %d: timed", id)
		must(b.flags.has(incomplete) == has(h.mu.incomplete, id), "block %d: incomplete", id)
		must(b.flags.has(held) == has(h.mu.pinned.of, id), "block %d: held", id)
		must(!b.flags.has(held) || h.mu.pinned.of[id].bytes >= h.of(b).slotsOf(b.ram), "block %d: parts in RAM that its pin does not count", id)
		must(b.flags.has(foreseen) == has(h.mu.foreseen.of, id), "block %d: foreseen", id)
		must((b.frame != 0) == (b.ram != 0 && b.frame != 0), "block %d: in the RAM order without a page", id)
		must(b.ram == 0 || b.pins > 0 || b.flags.has(dropped) || b.frame != 0, "block %d is resident, unused and in no order", id)
		must(b.frame == 0 || h.mu.frames.blocks[b.frame] == id, "block %d: frame %d", id, b.frame)
		must(b.flags.has(inDiskOrder) == (b.disk != 0), "block %d: in the disk order %v, on disk %x", id, b.flags.has(inDiskOrder), b.disk)
		must(!b.flags.has(writing) || b.pins > 0, "block %d is written and not pinned", id)
		must(!h.needsCopy(b) || b.flags.has(queued|writing|hastened), "block %d needs a copy and is in no queue", id)
		must(b.flags.has(onDevice) == has(h.mu.device.of, id), "block %d: on the device", id)
		if d := h.mu.device.of[id]; d != nil {
			s.device += n.slotsOf(d.parts)
			must(d.parts != 0 || d.pins > 0, "block %d: an empty device copy", id)
			must(d.frame == 0 || h.mu.device.frames.blocks[d.frame] == id && d.parts != 0, "block %d: device frame %d", id, d.frame)
			must(d.frame != 0 || d.pins > 0, "block %d: a device copy that is unused and in no order", id)
			if d.frame != 0 {
				s.deviceBlocks++
			}
			var filling paging.PartSet
			for _, l := range d.fills {
				must(l.open != 0 && l.open&(d.parts|filling) == 0 && d.pins > 0 && b.pins > 0, "block %d: a fill that ended, or twice", id)
				filling |= l.open
			}
			s.deviceAside += n.slotsOf(filling)
			devicePages += int64(d.parts.Len() + filling.Len())
			for part, ref := range d.refs {
				must(d.parts.Has(part) == (ref != 0), "block %d part %d: device ref %d", id, part, ref)
			}
		}
		if b.ram != 0 {
			s.ram[h.classOf(b)] += n.slotsOf(b.ram)
			s.ramBlocks++
		}
		if b.disk != 0 {
			s.disk += n.slotsOf(b.disk)
			s.diskBlocks++
		}
		if b.flags.has(writing) {
			s.writingBlocks++
		}
		if b.flags.has(queued) {
			queuedBlocks[n.tenant]++
		}
		if b.flags.has(hastened) {
			hastenedBlocks++
		}
		for part, p := range h.pagesOf(b) {
			must(b.ram.Has(part) == (p.ram != 0), "block %d part %d: RAM ref %d", id, part, p.ram)
			must(b.disk.Has(part) == (p.disk != 0), "block %d part %d: disk ref %d", id, part, p.disk)
			if p.ram != 0 {
				pages++
			}
		}
		if f := h.mu.inflight[id]; f != nil {
			must(f.reserved&(b.ram|b.disk) == 0, "block %d: reserved what is stored", id)
			must(f.filling()&b.ram == 0 && f.filling()&f.reserved == 0, "block %d: loads what is resident", id)
			s.aside += n.slotsOf(f.reserved)
			pages += int64(f.reserved.Len())
			for _, l := range f.loads {
				must(l.open != 0 && b.pins > 0, "block %d: a load that ended", id)
				s.aside += n.slotsOf(l.open)
				pages += int64(l.open.Len())
			}
		}
	})
	must(live == h.mu.index.live, "index: %d blocks, counted %d", live, h.mu.index.live)
	for _, n := range h.mu.namespaces {
		must(n == nil || n.blocks == blocks[n], "namespace: %d blocks, counted %d", n.blocks, blocks[n])
	}
	for t, s := range by {
		must(t.ram == s.ram, "tenant %s: RAM %v, counted %v", t.name, t.ram, s.ram)
		must(t.disk == s.disk, "tenant %s: disk %d, counted %d", t.name, t.disk, s.disk)
		must(t.device == s.device && t.deviceAside == s.deviceAside, "tenant %s: device %d and %d, counted %d and %d", t.name, t.device, t.deviceAside, s.device, s.deviceAside)
		must(t.deviceOrder.Len() == s.deviceBlocks, "tenant %s: %d blocks in the device order, counted %d", t.name, t.deviceOrder.Len(), s.deviceBlocks)
		must(t.aside == s.aside, "tenant %s: aside %d, counted %d", t.name, t.aside, s.aside)
		must(t.writing == s.writingBlocks, "tenant %s: writes %d, counted %d", t.name, t.writing, s.writingBlocks)
		must(t.diskOrder.Len() == s.diskBlocks, "tenant %s: %d blocks in the disk order, counted %d", t.name, t.diskOrder.Len(), s.diskBlocks)
		must(t.ramOrder.Len() <= s.ramBlocks, "tenant %s: %d blocks in the RAM order, counted %d", t.name, t.ramOrder.Len(), s.ramBlocks)
		must(t.dirtyq.live == queuedBlocks[t], "tenant %s: %d blocks queued, counted %d", t.name, t.dirtyq.live, queuedBlocks[t])
		must(t.dirtyq.len() <= 2*t.dirtyq.live+sweepAt+1, "tenant %s: queue of %d for %d", t.name, t.dirtyq.len(), t.dirtyq.live)
		must(t.quota.DiskBytes == 0 || t.disk <= t.quota.DiskBytes, "tenant %s: over its quota", t.name)
	}
	must(h.mu.urgent.live == hastenedBlocks, "urgent: %d, counted %d", h.mu.urgent.live, hastenedBlocks)
	if u := h.cfg.Arena.Usage(); u.State == Ready {
		must(u.Pages == pages, "the arena has %d pages, the index %d", u.Pages, pages)
	}
	if h.cfg.Device != nil {
		if u := h.cfg.Device.Usage(); u.State == Ready {
			must(u.Pages == devicePages, "the device has %d pages, the index %d", u.Pages, devicePages)
		}
	}
	m := &h.mu.metrics
	must(m.RequestedBlocks == m.DeviceHitBlocks+m.RAMHitBlocks+m.DiskHitBlocks+m.RemoteHitBlocks+m.MissedBlocks, "blocks requested: %+v", *m)
	must(m.RequestedTokens == m.DeviceHitTokens+m.RAMHitTokens+m.DiskHitTokens+m.RemoteHitTokens+m.MissedTokens, "tokens requested: %+v", *m)
	ahead := int64(0)
	for _, x := range h.mu.foreseen.of {
		if x.counted {
			ahead++
		}
	}
	must(m.PrefetchBlocks == m.PrefetchUseful+m.PrefetchLate+m.PrefetchWasted+ahead, "prefetched, and held %d: %+v", ahead, *m)
}

func has[V any](m map[blockID]V, id blockID) bool {
	_, ok := m[id]
	return ok
}

func must(ok bool, format string, args ...any) {
	if !ok {
		panic(fmt.Sprintf(format, args...))
	}
}

// Resident tells which parts of a block are in RAM and on disk.
func (h *Hierarchy) Resident(id paging.BlockID) (ram, disk paging.PartSet) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.mu.byID[id.Namespace]
	if b := h.mu.index.find(n.num, &id.Name); b != 0 {
		return h.mu.index.at(b).ram, h.mu.index.at(b).disk
	}
	return 0, 0
}

// OnDevice tells which parts of a block are on the device.
func (h *Hierarchy) OnDevice(id paging.BlockID) paging.PartSet {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b := h.mu.index.find(h.mu.byID[id.Namespace].num, &id.Name); b != 0 {
		return h.deviceParts(b, h.mu.index.at(b))
	}
	return 0
}

// IndexBytesPerBlock is what the index and the policies hold per block.
func (h *Hierarchy) IndexBytesPerBlock() float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return float64(h.mu.index.bytes()) / float64(h.mu.index.live)
}

package tier

import (
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
	"github.com/kvtier/kvtier/tier/policy"
)

// A block is, part by part, absent, resident in the arena, on disk, or both.
// Beside that a part may be set aside by an attempt or being loaded: then the
// block has an entry in inflight, and the part is invisible until it is
// published. This file holds every change of those states. All of it requires
// Hierarchy.mu.
//
// RAM bytes of a block are counted in exactly one class of its tenant, and a
// block leaves the arena only from the class clean:
//
//	leased   pinned: somebody reads, copies or loads it
//	dirty    not pinned, but some part is nowhere else and has to be written first
//	clean    may be evicted
type class uint8

const (
	leased class = iota
	dirty
	clean
	classes
)

// tenant is what is kept per tenant.
type tenant struct {
	name         string
	quota        Quota
	ramOrder     *policy.Policy
	diskOrder    *policy.Policy
	ram          [classes]int64 // bytes of slots
	disk         int64          // bytes of slots
	aside        int64          // bytes of slots set aside or being loaded
	pinned       int64          // bytes of blocks held by Pin
	foreseen     int64          // bytes of prefetched blocks that nobody used yet
	writing      int            // blocks that the demotion writer copies
	starving     int            // calls that wait for blocks to become clean
	writingBytes int64          // bytes of their slots
	dirtyq       dirtyQueue
	deviceOrder  *policy.Policy
	device       int64 // bytes of slots on the device
	deviceAside  int64 // bytes of slots there that are being filled
}

// inflight is what is going on with a block besides being resident.
type inflight struct {
	reserved paging.PartSet // set aside by attempts
	by       *Attempt       // the last of those
	until    time.Time      // latest deadline of those
	loads    []*load
}

// filling is the set of parts being loaded.
func (f *inflight) filling() (parts paging.PartSet) {
	for _, l := range f.loads {
		parts |= l.open
	}
	return parts
}

func (h *Hierarchy) tenantOf(name string) (*tenant, error) {
	if t := h.mu.tenants[name]; t != nil {
		return t, nil
	}
	t, err := h.newTenant(name)
	if err != nil {
		return nil, err
	}
	h.mu.tenants[name] = t
	h.mu.tenantList = append(h.mu.tenantList, t)
	return t, nil
}

// stored is what this node has of a block, wherever.
func (h *Hierarchy) stored(id blockID, b *block) paging.PartSet {
	return b.ram | b.disk | h.deviceParts(id, b)
}

// of is the namespace of a block.
func (h *Hierarchy) of(b *block) *namespace { return h.mu.namespaces[b.ns] }

func (h *Hierarchy) pagesOf(b *block) []page {
	return h.mu.index.pages(b, h.mu.namespaces[b.ns].parts)
}

// blockFor finds a block, or makes one without pages.
func (h *Hierarchy) blockFor(n *namespace, name *paging.BlockName, position int, now uint32) blockID {
	id := h.mu.index.find(n.num, name)
	if id == 0 {
		id = h.mu.index.insert(n.num, name, n.parts)
		b := h.mu.index.at(id)
		b.position = uint32(position)
		b.used = now
		n.blocks++
	}
	return id
}

// needsCopy reports whether some part of b is in RAM only and has to reach the
// disk before b may leave RAM.
func (h *Hierarchy) needsCopy(b *block) bool {
	return b.ram&^b.disk != 0 && h.cfg.Durable != nil && !b.flags.has(shed|incomplete|dropped)
}

func (h *Hierarchy) classOf(b *block) class {
	switch {
	case b.pins > 0:
		return leased
	case h.needsCopy(b):
		return dirty
	}
	return clean
}

// uncount takes b out of the byte counts before a change, count puts it back.
func (h *Hierarchy) uncount(b *block) {
	if b.ram != 0 {
		n := h.of(b)
		n.tenant.ram[h.classOf(b)] -= n.slotsOf(b.ram)
	}
}

func (h *Hierarchy) count(b *block) {
	if b.ram != 0 {
		n := h.of(b)
		n.tenant.ram[h.classOf(b)] += n.slotsOf(b.ram)
	}
}

// pin keeps the RAM copy of b where it is.
func (h *Hierarchy) pin(b *block) {
	if b.pins == 0 {
		h.uncount(b)
		b.pins = 1
		h.count(b)
		return
	}
	b.pins++
	check.That(b.pins != 0, "pins of a block wrapped")
}

// unpin undoes one pin and settles the block if it was the last.
func (h *Hierarchy) unpin(id blockID, b *block) {
	check.That(b.pins > 0, "unpin of a block that is not pinned")
	if b.pins > 1 {
		b.pins--
		return
	}
	h.uncount(b)
	b.pins = 0
	h.count(b)
	h.settle(id, b)
}

// settle brings a block that lost a use to where it belongs: into the order of
// eviction, out of RAM, or out of the index.
func (h *Hierarchy) settle(id blockID, b *block) {
	if b.pins > 0 {
		return
	}
	if b.flags.has(dropped) {
		if b.flags.has(onDevice) {
			if h.mu.device.of[id].pins == 0 {
				h.evictDevice(id, b, false) // comes back here
			}
		} else if !b.flags.has(busy) {
			h.evictRAM(id, b, false)
			h.remove(id, b)
		}
		return
	}
	if b.ram != 0 {
		if b.flags.has(leaveRAM) && b.ram&^b.disk == 0 {
			h.evictRAM(id, b, false)
		} else {
			h.enterRAMOrder(id, b, 0)
			h.unblock(b)
		}
	}
	if b.ram|b.disk == 0 && !b.flags.has(busy|onDevice) {
		h.mu.index.unlink(id)
		h.remove(id, b)
	}
}

// remove forgets a block that nothing uses and that the index does not find.
func (h *Hierarchy) remove(id blockID, b *block) {
	check.That(b.ram|b.disk == 0 && b.pins == 0 && !b.flags.has(busy|writing|onDevice), "removed a block in use")
	h.forgetNotes(id, b)
	n := h.of(b)
	n.blocks--
	if b.flags.has(queued) {
		n.tenant.dirtyq.live--
	}
	if b.flags.has(hastened) {
		h.mu.urgent.live--
	}
	h.endDurable(id)
	h.mu.index.remove(id, n.parts)
}

// publish makes a part resident that was set aside or loaded.
func (h *Hierarchy) publish(b *block, part int, ref Ref, sum uint64) {
	check.That(!b.ram.Has(part), "published a part twice")
	h.uncount(b)
	p := &h.pagesOf(b)[part]
	p.ram, p.sum = ref, sum
	b.ram = b.ram.With(part)
	h.count(b)
	h.noteChange(h.of(b), &b.name)
}

// published makes a part known that was written to disk.
func (h *Hierarchy) publishDisk(id blockID, b *block, part int, ref Ref) {
	check.That(!b.disk.Has(part), "a part was written to disk twice")
	n := h.of(b)
	h.uncount(b)
	h.pagesOf(b)[part].disk = ref
	b.disk = b.disk.With(part)
	h.count(b)
	h.noteChange(n, &b.name)
	n.tenant.disk += n.slot[part]
	h.enterDiskOrder(id, b, 0)
}

// evictRAM takes all pages of a block out of the arena; evicted says that its
// room was wanted.
func (h *Hierarchy) evictRAM(id blockID, b *block, evicted bool) {
	if b.ram == 0 {
		return
	}
	h.uncount(b)
	pages := h.pagesOf(b)
	for s := b.ram; s != 0; s &= s - 1 {
		p := &pages[bits.TrailingZeros64(uint64(s))]
		h.cfg.Arena.Free(p.ram)
		p.ram = 0
	}
	b.ram = 0
	h.noteChange(h.of(b), &b.name)
	h.remember(b, evicted)
	if b.flags.has(warm) {
		h.hitDisk(id, b, 0, b.used) // the disk's policy sees no hit that RAM served
	}
	h.leaveRAMOrder(b, evicted)
	b.flags &^= leaveRAM | shed
}

// dropDisk takes these parts of a block off the disk; evicted says that their
// room was wanted. The caller settles the block.
func (h *Hierarchy) dropDisk(id blockID, b *block, parts paging.PartSet, evicted bool) {
	parts &= b.disk
	if parts == 0 {
		return
	}
	h.uncount(b)
	n := h.of(b)
	pages := h.pagesOf(b)
	for s := parts; s != 0; s &= s - 1 {
		p := &pages[bits.TrailingZeros64(uint64(s))]
		h.cfg.Durable.Free(p.disk)
		p.disk = 0
	}
	b.disk &^= parts
	h.noteChange(n, &b.name)
	h.remember(b, evicted)
	n.tenant.disk -= n.slotsOf(parts)
	if b.disk == 0 {
		h.leaveDiskOrder(id, b, evicted)
	}
	h.count(b)
}

// shed lets a block leave RAM without a copy on disk, until it is used again.
func (h *Hierarchy) shed(b *block) {
	h.uncount(b)
	b.flags |= shed
	h.count(b)
}

// drop takes a block out of the index and off the disk, and out of RAM as soon
// as nothing uses it; false if that is not now.
func (h *Hierarchy) drop(id blockID, b *block) (now bool) {
	h.pin(b) // it stays while the notes go
	h.endPin(id, b)
	h.wasteForesight(id, b)
	h.mu.index.unlink(id)
	h.noteChange(h.of(b), &b.name)
	h.dropDisk(id, b, b.disk, false)
	h.uncount(b)
	b.flags |= dropped
	h.count(b)
	now = b.pins == 1 && !b.flags.has(busy) && (!b.flags.has(onDevice) || h.mu.device.of[id].pins == 0)
	h.unpin(id, b)
	return now
}

// touch records a use of a block that is resident now.
func (h *Hierarchy) touch(id blockID, b *block, t *tenant, length int, now uint32) {
	b.used = now
	if b.hits != 255 {
		b.hits++
	}
	if b.frame != 0 {
		b.flags |= warm
		t.ramOrder.Hit(policy.ID(b.frame), b.hit(length, now))
	} else {
		h.enterRAMOrder(id, b, length)
	}
	if b.flags.has(special) {
		h.touchSpecial(id, b, now)
	}
}

// special are the flags that make a hit more than a change of order.
const special = timed | shed | foreseen | queued

// touchSpecial does what a hit means beyond the order of eviction.
func (h *Hierarchy) touchSpecial(id blockID, b *block, now uint32) {
	if b.flags.has(timed) {
		h.refresh(id, b, now)
	}
	if b.flags.has(foreseen) && h.endForesight(id, b) {
		h.mu.metrics.PrefetchUseful++
	}
	if b.flags.has(shed) {
		// The disk's policy let it go, but it is wanted again: it needs a copy
		// like any other.
		h.uncount(b)
		b.flags &^= shed
		h.count(b)
		h.queueDirty(id, b, now)
	}
	if b.flags.has(queued) && b.hits >= 2 {
		h.hasten(id, b)
	}
}

// inflightOf is the entry of a block in inflight, made if there is none.
func (h *Hierarchy) inflightOf(id blockID, b *block) *inflight {
	f := h.mu.inflight[id]
	if f == nil {
		f = new(inflight)
		h.mu.inflight[id] = f
		b.flags |= busy
	}
	return f
}

// endInflight forgets the entry if nothing is going on any more.
func (h *Hierarchy) endInflight(id blockID, b *block, f *inflight) {
	if f.reserved == 0 && len(f.loads) == 0 {
		delete(h.mu.inflight, id)
		b.flags &^= busy
		h.settle(id, b)
	}
}

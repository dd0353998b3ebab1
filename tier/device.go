package tier

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
	"github.com/kvtier/kvtier/tier/policy"
)

// A block may have one more copy of its pages on a device. What is kept of that
// lies beside the index, only for blocks that have one or are to get one, so that
// a page that has none costs nothing. A device copy has pins and an order of
// eviction of its own: a lease on it holds no RAM, and the other way round.
//
// A copy comes up from RAM, and the lower copy stays. One that is the last of its
// page is brought down to RAM, if that has room, before it is evicted. All of
// this requires Hierarchy.mu.

// deviceState is what the Hierarchy keeps of the device.
type deviceState struct {
	bytes  int64 // budget
	of     map[blockID]*deviceCopy
	nodes  policy.Blocks // of the policies, by frame
	frames frames
	moves  fifo[loadItem] // fills, and loads whose source is the device, that no mover took
	work   *sync.Cond     // moves has something, or the movers are to end
}

// deviceCopy is what lies on the device of one block.
type deviceCopy struct {
	parts paging.PartSet // resident
	bad   paging.PartSet // of these, found damaged: nobody gets them any more
	refs  []Ref          // by part
	pins  uint32         // leases, fills, and loads that read it
	frame uint32         // its number in its tenant's policy; 0: not in it
	fills []*load        // under way
	warm  bool           // hit while resident
	leave bool           // goes as soon as nobody uses it and there is a lower copy
}

// Bounds of one batch of a mover: enough to keep a bus busy, few enough that who
// waits for its first page waits for milliseconds.
const (
	movePages = 256
	moveBytes = 64 << 20
	movers    = 2 // one waits for the device while the other prepares
)

// deviceParts is what lies on the device of a block.
func (h *Hierarchy) deviceParts(id blockID, b *block) paging.PartSet {
	if !b.flags.has(onDevice) {
		return 0
	}
	d := h.mu.device.of[id]
	return d.parts &^ d.bad
}

// copyOf is the entry of a block, made if there is none. The caller pins it.
func (h *Hierarchy) copyOf(id blockID, b *block) *deviceCopy {
	d := h.mu.device.of[id]
	if d == nil {
		d = &deviceCopy{refs: make([]Ref, h.of(b).parts)}
		h.mu.device.of[id] = d
		b.flags |= onDevice
	}
	return d
}

// unpinDevice undoes one pin of a device copy. The block may be gone afterwards.
func (h *Hierarchy) unpinDevice(id blockID) {
	d := h.mu.device.of[id]
	check.That(d != nil && d.pins > 0, "unpin of a device copy that is not pinned")
	if d.pins--; d.pins > 0 {
		return
	}
	b := h.mu.index.at(id)
	if b.flags.has(dropped) || d.bad != 0 || d.leave && d.parts&^(b.ram|b.disk) == 0 {
		h.evictDevice(id, b, false)
		return
	}
	h.settleDevice(id, b, d)
}

// settleDevice forgets an entry without pages, or lets the policy have the copy.
func (h *Hierarchy) settleDevice(id blockID, b *block, d *deviceCopy) {
	if d.pins > 0 {
		return
	}
	if d.parts != 0 {
		h.enterDeviceOrder(id, b, d, 0)
		return
	}
	delete(h.mu.device.of, id)
	b.flags &^= onDevice
	h.settle(id, b)
}

func (h *Hierarchy) enterDeviceOrder(id blockID, b *block, d *deviceCopy, length int) {
	if d.frame == 0 {
		d.frame = h.mu.device.frames.take(id)
		h.of(b).tenant.deviceOrder.Insert(policy.ID(d.frame), h.access(id, b, length))
	}
}

// evictDevice takes a copy that nobody uses off the device; evicted says that its
// room was wanted. The block may be gone afterwards.
func (h *Hierarchy) evictDevice(id blockID, b *block, evicted bool) {
	d := h.mu.device.of[id]
	check.That(d.pins == 0, "evicted a device copy in use")
	h.freeDevice(b, d, d.parts)
	if d.frame != 0 {
		if o := h.of(b).tenant.deviceOrder; evicted {
			o.Evict(policy.ID(d.frame))
		} else {
			o.Remove(policy.ID(d.frame))
		}
		h.mu.device.frames.give(d.frame)
		d.frame = 0
	}
	if d.warm && b.frame != 0 { // the policy of RAM saw no hit that the device served
		b.flags |= warm
		h.of(b).tenant.ramOrder.Hit(policy.ID(b.frame), b.hit(0, b.used))
	}
	delete(h.mu.device.of, id)
	b.flags &^= onDevice
	h.remember(b, evicted)
	h.settle(id, b)
}

// demoteDevice takes the copy of a block off the device, at once or when its last
// reader is gone. What is nowhere else is brought down first.
func (h *Hierarchy) demoteDevice(id blockID, b *block) ItemOutcome {
	if !b.flags.has(onDevice) {
		return ItemAccepted
	}
	d := h.mu.device.of[id]
	if sole := d.parts &^ d.bad &^ (b.ram | b.disk); sole != 0 {
		if _, r := h.startLoad(id, b, sole, 0, nil); r != NoReason {
			return ItemRejected
		}
	}
	if d.pins > 0 {
		d.leave = true
		return ItemDeferred
	}
	h.evictDevice(id, b, false)
	return ItemAccepted
}

// freeDevice gives slots of a copy back.
func (h *Hierarchy) freeDevice(b *block, d *deviceCopy, parts paging.PartSet) {
	n := h.of(b)
	for s := parts; s != 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		h.cfg.Device.Free(d.refs[part])
		d.refs[part] = 0
		n.tenant.device -= n.slot[part]
	}
	d.parts &^= parts
}

// dropDevice takes a copy with a damaged page off the device. One in use stays
// until it is not: nobody else gets the page.
func (h *Hierarchy) dropDevice(id blockID, b *block, part int) {
	if d := h.mu.device.of[id]; d != nil && d.parts.Has(part) {
		d.bad = d.bad.With(part)
		h.mu.metrics.DroppedCopies++
		if d.pins == 0 {
			h.evictDevice(id, b, false)
		}
	}
}

// allocDevice sets a slot on the device aside, evicting what the policy names. It
// answers at once; lowering are the loads after which there may be more room.
func (h *Hierarchy) allocDevice(n *namespace, part int, id blockID) (ref Ref, lowering []*load, r Reason) {
	for range evictTries {
		ref, err := h.cfg.Device.Alloc(n.tenant.name, n.bytes[part], id)
		if err == nil {
			n.tenant.deviceAside += n.slot[part]
			return ref, nil, NoReason
		}
		if r = NoSpace; errors.Is(err, paging.ErrOverQuota) {
			r = OverQuota
		}
		made, l := h.makeDeviceRoom(n, part)
		if l != nil {
			lowering = append(lowering, l)
		} else if !made {
			break
		}
	}
	return 0, lowering, r
}

// makeDeviceRoom evicts something from the device; false if nothing may go. A copy
// that is the last of its pages goes down first: that is the load.
func (h *Hierarchy) makeDeviceRoom(n *namespace, part int) (made bool, lowering *load) {
	id := h.deviceVictim(n.tenant)
	if id == 0 {
		return h.reclaimDevice(n, part), nil
	}
	b := h.mu.index.at(id)
	d := h.mu.device.of[id]
	if sole := d.parts &^ (b.ram | b.disk); sole != 0 {
		if l, r := h.startLoad(id, b, sole, 0, nil); r == NoReason {
			d.leave = true
			return false, l
		}
		h.mu.metrics.EvictedUncopied++
	}
	m := &h.mu.metrics
	m.DeviceEvictedBlocks++
	m.DeviceEvictedBytes += h.of(b).slotsOf(d.parts)
	if fits := h.of(b).hasSlot(d.parts, n.slot[part]); !fits {
		h.reclaimDevice(n, part) // turns room of other page sizes over, which one block would not make
	}
	if d := h.mu.device.of[id]; d != nil && d.pins == 0 {
		h.evictDevice(id, b, true)
	}
	return true, nil
}

// reclaimDevice evicts copies whose slots together make room for a page of
// another size, or an extent of another tenant.
func (h *Hierarchy) reclaimDevice(n *namespace, part int) bool {
	owners, ok := h.cfg.Device.Reclaim(n.tenant.name, n.bytes[part], func(owner uint32) bool {
		d := h.mu.device.of[owner]
		b := h.mu.index.at(owner)
		return d != nil && d.pins == 0 && d.parts&^(b.ram|b.disk) == 0
	})
	for _, owner := range owners {
		if d := h.mu.device.of[owner]; d != nil && d.pins == 0 {
			b := h.mu.index.at(owner)
			h.mu.metrics.DeviceEvictedBlocks++
			h.mu.metrics.DeviceEvictedBytes += h.of(b).slotsOf(d.parts)
			h.evictDevice(owner, b, true)
		}
	}
	return ok
}

// deviceVictim is the block of a tenant whose copy is to go next; 0 if none is found.
func (h *Hierarchy) deviceVictim(t *tenant) blockID {
	now := time.Now().Unix()
	for range callsFor(t.deviceOrder) {
		frame, ok := t.deviceOrder.Victim(now, func(frame policy.ID) bool {
			return h.mu.device.of[h.mu.device.frames.blocks[frame]].pins > 0
		})
		if ok {
			return h.mu.device.frames.blocks[frame]
		}
	}
	return 0
}

// startFill sets slots on the device aside for parts of a block that are in RAM
// and queues the copies.
func (h *Hierarchy) startFill(id blockID, b *block, parts paging.PartSet) (l *load, lowering []*load, r Reason) {
	n := h.of(b)
	d := h.copyOf(id, b)
	if d.bad&parts != 0 {
		return nil, nil, Corrupt // until the last reader of the damaged copy is gone
	}
	l = &load{id: id, parts: parts, open: parts, demanded: true, fill: true}
	h.pin(b)
	d.pins++
	for s := parts; s != 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		var ref Ref
		if ref, lowering, r = h.allocDevice(n, part, id); r != NoReason {
			for _, it := range l.items {
				h.freeDeviceAside(n, it)
			}
			h.unpinDevice(id)
			h.unpin(id, b)
			return nil, lowering, r
		}
		l.items = append(l.items, loadItem{l: l, part: part, ram: h.pagesOf(b)[part].ram, device: ref})
	}
	d.fills = append(d.fills, l)
	h.pushMoves(l)
	return l, nil, NoReason
}

func (h *Hierarchy) freeDeviceAside(n *namespace, it loadItem) {
	h.cfg.Device.Free(it.device)
	n.tenant.deviceAside -= n.slot[it.part]
}

// pushMoves queues what the movers have to do of a load.
func (h *Hierarchy) pushMoves(l *load) {
	for _, it := range l.items {
		if it.device != 0 {
			h.mu.device.moves.push(it)
		}
	}
	h.mu.device.work.Signal()
}

// moveBatch is pages that go the same way. Owned by its mover.
type moveBatch struct {
	items []loadItem
	pages []Page
	host  [][]byte
	refs  []Ref
	errs  []error
}

// take fills the batch with what waits, as far as it goes one way.
func (b *moveBatch) take(h *Hierarchy) {
	clear(b.items)
	clear(b.host)
	*b = moveBatch{items: b.items[:0], pages: b.pages[:0], host: b.host[:0], refs: b.refs[:0], errs: b.errs[:0]}
	q := &h.mu.device.moves
	var bytes int64
	for q.len() > 0 && len(b.items) < movePages && bytes < moveBytes {
		it := q.items[q.head]
		if it.begun() { // given up
			q.pop()
			continue
		}
		if len(b.items) > 0 && it.l.fill != b.items[0].l.fill {
			break
		}
		q.pop()
		it.l.taken = it.l.taken.With(it.part)
		blk := h.mu.index.at(it.l.id)
		n := h.of(blk)
		p := Page{ID: paging.PageID{BlockID: paging.BlockID{Namespace: n.id, Name: blk.name}, Part: it.part},
			Bytes: n.bytes[it.part], Sum: h.pagesOf(blk)[it.part].sum}
		b.items, b.pages, b.refs, b.errs = append(b.items, it), append(b.pages, p), append(b.refs, it.device), append(b.errs, nil)
		b.host = append(b.host, h.cfg.Arena.Bytes(it.ram, p.Bytes))
		bytes += int64(p.Bytes)
	}
}

// moveDevice is one of the movers: it copies pages to the device and back until
// Close.
func (h *Hierarchy) moveDevice() {
	var b moveBatch
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		b.take(h)
		switch {
		case len(b.items) == 0 && h.mu.closed:
			return
		case len(b.items) == 0:
			h.mu.device.work.Wait()
		case h.mu.closed:
			for i := range b.errs {
				b.errs[i] = paging.ErrClosed
			}
			h.moved(&b)
		default:
			h.mu.Unlock()
			if b.items[0].l.fill {
				h.cfg.Device.Fill(b.pages, b.host, b.refs, b.errs)
			} else {
				h.cfg.Device.LoadAll(b.pages, b.refs, b.host, b.errs)
			}
			for i, err := range b.errs {
				if !h.awaitSettled(err) { // the device may still use both places
					b.items[i].ram, b.items[i].device = 0, 0
				}
			}
			h.mu.Lock()
			h.moved(&b)
		}
	}
}

// moved publishes what came of a batch.
func (h *Hierarchy) moved(b *moveBatch) {
	for i, it := range b.items {
		if it.l.fill {
			h.endFill(it, b.errs[i])
		} else {
			if b.errs[i] == nil {
				h.mu.metrics.LoweredPages++
				h.mu.metrics.LoweredBytes += int64(b.pages[i].Bytes)
			}
			h.endLoad(it, b.errs[i])
		}
	}
}

// endFill publishes a page that was copied to the device, or gives its slot back.
func (h *Hierarchy) endFill(it loadItem, err error) {
	l := it.l
	b := h.mu.index.at(l.id)
	n := h.of(b)
	d := h.mu.device.of[l.id]
	m := &h.mu.metrics
	if err == nil && !b.flags.has(dropped) {
		d.refs[it.part] = it.device
		d.parts = d.parts.With(it.part)
		n.tenant.deviceAside -= n.slot[it.part]
		n.tenant.device += n.slot[it.part]
		m.FilledPages++
		m.FilledBytes += int64(n.bytes[it.part])
	} else {
		h.freeDeviceAside(n, it)
		switch {
		case err == nil:
			l.reason = NotFound
		case errors.Is(err, paging.ErrCorrupt):
			l.reason = Corrupt
			m.CorruptPages++
		case errors.Is(err, paging.ErrClosed):
			l.reason = Stopping
		default:
			l.reason = IOError
			m.LoadErrors++
		}
	}
	if l.open = l.open.Without(it.part); l.open == 0 {
		h.finishFill(l)
	}
}

// finishFill lets those go on who wait for a fill.
func (h *Hierarchy) finishFill(l *load) {
	d := h.mu.device.of[l.id]
	d.fills = slices.DeleteFunc(d.fills, func(x *load) bool { return x == l })
	for _, w := range l.waiters {
		w.done()
	}
	l.waiters = nil
	h.unpinDevice(l.id)
	h.unpin(l.id, h.mu.index.at(l.id))
}

// cancelFill gives a fill up that no mover has begun.
func (h *Hierarchy) cancelFill(l *load) {
	n := h.of(h.mu.index.at(l.id))
	l.taken, l.reason, l.open = l.parts, Cancelled, 0
	for _, it := range l.items {
		h.freeDeviceAside(n, it)
	}
	h.finishFill(l)
}

// openDevice makes what the Hierarchy keeps of a device.
func (h *Hierarchy) openDevice() {
	x := &h.mu.device
	x.work = sync.NewCond(&h.mu)
	x.of = make(map[blockID]*deviceCopy)
	if h.cfg.Device != nil {
		x.bytes = h.cfg.Device.Usage().BudgetBytes
	}
}

// startMovers starts what copies to the device and back.
func (h *Hierarchy) startMovers() {
	if h.cfg.Device == nil {
		return
	}
	for range movers {
		h.workers.Go(h.moveDevice) // owner: the Hierarchy; exits with Close; bound: movers
	}
}

// deviceLimit is the device memory that a tenant can have at most.
func (h *Hierarchy) deviceLimit(t *tenant) int64 {
	return max(1, atMost(h.mu.device.bytes, t.quota.DeviceBytes))
}

// touchDevice records a use of a device copy.
func (h *Hierarchy) touchDevice(id blockID, b *block, d *deviceCopy, length int, now uint32) {
	b.used = now
	if b.hits != 255 {
		b.hits++
	}
	d.leave = false // it is wanted again
	if d.frame != 0 {
		d.warm = true
		h.of(b).tenant.deviceOrder.Hit(policy.ID(d.frame), b.hit(length, now))
	} else {
		h.enterDeviceOrder(id, b, d, length)
	}
	if b.flags.has(special) {
		h.touchSpecial(id, b, now)
	}
}

func (h *Hierarchy) newDeviceOrder(t *tenant) (err error) {
	if t.deviceOrder, err = policy.New(h.cfg.RAMPolicy, h.deviceLimit(t), &h.mu.device.nodes); err != nil {
		return fmt.Errorf("tier: device policy: %w", err)
	}
	return nil
}

// nearest is the tier of this node that parts of a block which are not in RAM come
// from: the device if it has them, its bus is faster than a disk.
func (h *Hierarchy) nearest(id blockID, b *block, parts paging.PartSet) Kind {
	if h.deviceParts(id, b).Contains(parts) {
		return HBM
	}
	return NVMe
}

// readDevice makes the device the source of an item, if it has the page.
func (h *Hierarchy) readDevice(l *load, it *loadItem) bool {
	b := h.mu.index.at(l.id)
	if !h.deviceParts(l.id, b).Has(it.part) {
		return false
	}
	d := h.mu.device.of[l.id]
	if it.device = d.refs[it.part]; !l.reads {
		l.reads = true
		d.pins++
	}
	return true
}

// deviceRef is where a page lies on the device; 0: it does not.
func (h *Hierarchy) deviceRef(id blockID, b *block, part int) Ref {
	if !h.deviceParts(id, b).Has(part) {
		return 0
	}
	return h.mu.device.of[id].refs[part]
}

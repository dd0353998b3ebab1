package tier

import (
	"errors"

	"github.com/kvtier/kvtier/paging"
)

// evictTries bounds the evictions for one page: more than that are needed only
// when space of other page sizes has to be turned over, which Reclaim does at once.
const evictTries = 64

// allocRAM sets a slot aside for one part of a block, evicting what the policy
// names. It answers at once. For a prefetch, by, only room that is worth less is
// taken.
func (h *Hierarchy) allocRAM(n *namespace, part int, id blockID, by *Promotion) (Ref, Reason) {
	var r Reason
	for range evictTries {
		ref, err := h.cfg.Arena.Alloc(n.tenant.name, n.bytes[part], id)
		if err == nil {
			n.tenant.aside += n.slot[part]
			return ref, NoReason
		}
		r = NoSpace
		if errors.Is(err, paging.ErrOverQuota) {
			r = OverQuota
		}
		if !h.makeRoom(n, part, by) {
			break
		}
	}
	return 0, r
}

// freeAside gives back a slot of allocRAM that was not published.
func (h *Hierarchy) freeAside(n *namespace, part int, ref Ref) {
	h.cfg.Arena.Free(ref)
	n.tenant.aside -= n.slot[part]
}

// makeRoom evicts something from RAM, so that it is worth trying again to
// allocate a page of this part; false if nothing may go.
func (h *Hierarchy) makeRoom(n *namespace, part int, by *Promotion) bool {
	t := n.tenant
	id := blockID(0)
	if h.evictable() == 0 {
		return false // at once: looking for what is not there takes a while
	}
	if t.ram[clean] > 0 || h.mu.bypass && t.ram[dirty] > 0 {
		id = h.ramVictim(t)
	}
	if id != 0 && by != nil && !h.worthLess(id, by) {
		return false
	}
	if id != 0 && h.frees(h.mu.index.at(id), n.slot[part]) {
		h.evict(id)
		return true
	}
	if by != nil {
		return false
	}
	// No block of this page size may go: turn room of other sizes over, or take
	// an extent back from a tenant that has more than its share.
	owners, ok := h.cfg.Arena.Reclaim(t.name, n.bytes[part], func(owner uint32) bool {
		return owner != 0 && !h.mayNotLeaveRAM(owner)
	})
	for _, owner := range owners {
		h.evict(owner)
	}
	if !ok && id != 0 {
		h.evict(id)
		return true
	}
	return ok
}

// evictable is the bytes that may leave RAM now, of all tenants.
func (h *Hierarchy) evictable() (bytes int64) {
	for _, t := range h.mu.tenantList {
		bytes += t.ram[clean]
		if h.mu.bypass {
			bytes += t.ram[dirty]
		}
	}
	return bytes
}

// mayNotLeaveRAM reports whether a block must stay: somebody uses it, or its
// only copy is in RAM and the disk will take it.
func (h *Hierarchy) mayNotLeaveRAM(id blockID) bool {
	b := h.mu.index.at(id)
	return b.ram == 0 || b.pins > 0 || b.flags.has(dropped) || h.needsCopy(b) && !h.mu.bypass
}

// frees reports whether evicting b gives back a slot of this size.
func (h *Hierarchy) frees(b *block, slot int64) bool { return h.of(b).hasSlot(b.ram, slot) }

// spareSeconds is the time for which a block that was used counts as more
// valuable than one that is only expected.
const spareSeconds = 10

// worthLess reports whether a block may go for what a prefetch expects.
func (h *Hierarchy) worthLess(id blockID, by *Promotion) bool {
	b := h.mu.index.at(id)
	now := h.nowSeconds()
	return h.priorityOf(id, b, now) <= by.priority && b.used+spareSeconds <= now
}

// evict takes a block out of RAM because its room is wanted.
func (h *Hierarchy) evict(id blockID) {
	b := h.mu.index.at(id)
	n := h.of(b)
	if b.ram == 0 {
		return
	}
	m := &h.mu.metrics
	m.EvictedBlocks++
	m.EvictedBytes += n.slotsOf(b.ram)
	if b.ram&^(b.disk|h.deviceParts(id, b)) != 0 {
		m.EvictedUncopied++
	}
	h.evictRAM(id, b, true)
	h.settle(id, b)
}

// cleanable reports whether waiting for the demotion writer can make room for a tenant.
func (h *Hierarchy) cleanable(t *tenant) bool {
	return h.cfg.Durable != nil && !h.mu.bypass && !h.mu.closed && (t.ram[dirty] > 0 || t.writing > 0)
}

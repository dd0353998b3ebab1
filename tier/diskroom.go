package tier

import "github.com/kvtier/kvtier/paging"

// makeDiskRoom takes blocks off the disk for the pages of the batch that have
// no ref, for bytes of them at most; false if nothing may go.
func (h *Hierarchy) makeDiskRoom(b *batch, bytes int64) (some bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range b.pages {
		if b.refs[i] != 0 || bytes <= 0 {
			continue
		}
		n, part := h.of(h.mu.index.at(b.owners[i])), b.pages[i].ID.Part
		if h.freeDisk(n, part) {
			some = true
			bytes -= n.slot[part]
		}
	}
	return some
}

// freeDisk takes blocks off the disk so that a page of this part finds a slot.
func (h *Hierarchy) freeDisk(n *namespace, part int) bool {
	t := h.diskDonor(n.tenant)
	id := h.diskVictim(t)
	if id != 0 {
		if b := h.mu.index.at(id); h.of(b).hasSlot(b.disk, n.slot[part]) {
			h.leaveDisk(id, b)
			return true
		}
	}
	// Space of other sizes has to be turned over.
	owners, ok := h.cfg.Durable.Reclaim(n.bytes[part], func(owner uint32) bool {
		return owner != 0 && !h.mayNotLeaveDisk(owner)
	})
	for _, owner := range owners {
		h.leaveDisk(owner, h.mu.index.at(owner))
	}
	if !ok && id != 0 {
		h.leaveDisk(id, h.mu.index.at(id))
	}
	return ok || id != 0
}

// fitsDiskQuota makes room in the disk quota of a tenant for these parts; false
// if there is none.
func (h *Hierarchy) fitsDiskQuota(n *namespace, parts paging.PartSet) bool {
	t := n.tenant
	for t.quota.DiskBytes > 0 && t.disk+t.writingBytes+n.slotsOf(parts) > t.quota.DiskBytes {
		id := h.diskVictim(t)
		if id == 0 {
			return false
		}
		h.leaveDisk(id, h.mu.index.at(id))
	}
	return true
}

// diskDonor is the tenant whose blocks make room for a page of t: t itself if it
// is at its quota or has at least an equal share of the disk, else the tenant
// that has most.
func (h *Hierarchy) diskDonor(t *tenant) *tenant {
	if t.quota.DiskBytes > 0 && t.disk >= t.quota.DiskBytes {
		return t
	}
	most := t
	var total, sharers int64
	for _, x := range h.mu.tenantList {
		if x.disk > most.disk {
			most = x
		}
		if total += x.disk; x.disk > 0 || x == t {
			sharers++
		}
	}
	if t.disk >= total/sharers {
		return t
	}
	return most
}

// mayNotLeaveDisk reports whether the disk copy of a block is in use: being
// written or loaded.
func (h *Hierarchy) mayNotLeaveDisk(id blockID) bool {
	b := h.mu.index.at(id)
	return b.disk == 0 || b.flags.has(writing|busy|dropped) || len(h.mu.serving) > 0 && h.mu.serving[id] > 0
}

// leaveDisk evicts a block from the disk. If it is in RAM it stays there, and
// may leave without another copy unless it is used again.
func (h *Hierarchy) leaveDisk(id blockID, b *block) {
	if b.disk == 0 {
		return
	}
	m := &h.mu.metrics
	m.DiskEvictedBlocks++
	m.DiskEvictedBytes += h.of(b).slotsOf(b.disk)
	if b.ram != 0 {
		h.shed(b)
	}
	h.dropDisk(id, b, b.disk, true)
	h.settle(id, b)
}

package tier

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/tier/policy"
)

// The order of eviction is a policy per tenant and tier. A policy names a block
// by a dense number: on disk that is its blockID; in RAM it is a frame, given
// while the block is in the order, so that the policy's memory follows what RAM
// holds and not what the disk holds. All of this file requires Hierarchy.mu.

// frames maps the numbers that RAM policies use to blocks.
type frames struct {
	blocks []blockID // by frame; frame 0 is not used
	free   []uint32
}

func (f *frames) take(id blockID) uint32 {
	if n := len(f.free); n > 0 {
		frame := f.free[n-1]
		f.free = f.free[:n-1]
		f.blocks[frame] = id
		return frame
	}
	if len(f.blocks) == 0 {
		f.blocks = append(f.blocks, 0)
	}
	f.blocks = append(f.blocks, id)
	return uint32(len(f.blocks) - 1)
}

func (f *frames) give(frame uint32) {
	f.blocks[frame] = 0
	f.free = append(f.free, frame)
}

// newTenant makes the orders of a tenant. The names of the policies were
// checked at Open.
func (h *Hierarchy) newTenant(name string) (*tenant, error) {
	t := &tenant{name: name, quota: h.cfg.Quotas[name]}
	var err error
	if t.ramOrder, err = policy.New(h.cfg.RAMPolicy, max(1, h.ramLimit(t)), &h.mu.ramNodes); err != nil {
		return nil, fmt.Errorf("tier: RAM policy: %w", err)
	}
	if t.diskOrder, err = policy.New(h.cfg.DiskPolicy, max(1, h.diskLimit(t)), &h.mu.diskNodes); err != nil {
		return nil, fmt.Errorf("tier: disk policy: %w", err)
	}
	return t, h.newDeviceOrder(t)
}

// ramLimit is the RAM that a tenant can have at most.
func (h *Hierarchy) ramLimit(t *tenant) int64 { return atMost(h.mu.ramBytes, t.quota.RAMBytes) }

// diskLimit is the disk space that a tenant can have at most.
func (h *Hierarchy) diskLimit(t *tenant) int64 { return atMost(h.mu.diskBytes, t.quota.DiskBytes) }

func atMost(budget, quota int64) int64 {
	if quota > 0 {
		return min(budget, quota)
	}
	return budget
}

// access is what a policy is told about a block. length is the number of blocks
// in the chain of the request, 0 if that is not known.
func (h *Hierarchy) access(id blockID, b *block, length int) policy.Access {
	n := h.of(b)
	a := policy.Access{
		Key:      binary.LittleEndian.Uint64(b.name[:]) + uint64(b.ns)*0x9e3779b97f4a7c15,
		Weight:   n.slotsOf(n.pagesAt(int(b.position), n.all)),
		Position: int32(b.position),
		Length:   int32(length),
		Priority: b.priority,
	}
	if b.flags.has(timed) {
		a.Expires = int64(h.mu.retained[id].until)
	}
	return a
}

// enterRAMOrder makes a resident block evictable by policy, as one that was
// just offered.
func (h *Hierarchy) enterRAMOrder(id blockID, b *block, length int) {
	if b.frame == 0 {
		b.frame = h.mu.frames.take(id)
		h.of(b).tenant.ramOrder.Insert(policy.ID(b.frame), h.access(id, b, length))
	}
}

func (h *Hierarchy) leaveRAMOrder(b *block, evicted bool) {
	if b.frame == 0 {
		return
	}
	if o := h.of(b).tenant.ramOrder; evicted {
		o.Evict(policy.ID(b.frame))
	} else {
		o.Remove(policy.ID(b.frame))
	}
	h.mu.frames.give(b.frame)
	b.frame = 0
	b.flags &^= warm | passedOver
}

func (h *Hierarchy) enterDiskOrder(id blockID, b *block, length int) {
	if !b.flags.has(inDiskOrder) {
		b.flags |= inDiskOrder
		h.of(b).tenant.diskOrder.Insert(policy.ID(id), h.access(id, b, length))
	}
}

// hit is what a policy is told about a use at now, Unix seconds, the clock of
// its Victim.
func (b *block) hit(length int, now uint32) policy.Access {
	return policy.Access{Position: int32(b.position), Length: int32(length), Now: int64(now)}
}

// hitDisk tells the disk's policy of a use.
func (h *Hierarchy) hitDisk(id blockID, b *block, length int, now uint32) {
	if b.flags.has(inDiskOrder) {
		h.of(b).tenant.diskOrder.Hit(policy.ID(id), b.hit(length, now))
	}
}

func (h *Hierarchy) leaveDiskOrder(id blockID, b *block, evicted bool) {
	if !b.flags.has(inDiskOrder) {
		return
	}
	if o := h.of(b).tenant.diskOrder; evicted {
		o.Evict(policy.ID(id))
	} else {
		o.Remove(policy.ID(id))
	}
	b.flags &^= inDiskOrder
}

// victimCalls bounds the search for a victim; a call asks about at most 97
// blocks and goes on where the last one ended.
const victimCalls = 64

// callsFor is the number of calls in which a policy finds a victim if there is
// one, as far as victimCalls goes.
func callsFor(o *policy.Policy) int { return min(victimCalls, 2+o.Len()/16) }

// ramVictim is the block of a tenant to evict next from RAM, 0 if none is found.
func (h *Hierarchy) ramVictim(t *tenant) blockID {
	now := time.Now().Unix()
	for range callsFor(t.ramOrder) {
		frame, ok := t.ramOrder.Victim(now, func(frame policy.ID) bool {
			id := h.mu.frames.blocks[frame]
			if h.mayNotLeaveRAM(id) {
				h.mu.index.at(id).flags |= passedOver
				return true
			}
			return false
		})
		if ok {
			return h.mu.frames.blocks[frame]
		}
	}
	return 0
}

// diskVictim is the block of a tenant to evict next from disk, 0 if none is
// found. One that is in RAM too is passed over at first: the disk's policy did
// not see its hits there.
func (h *Hierarchy) diskVictim(t *tenant) blockID {
	now := time.Now().Unix()
	id, ok := t.diskOrder.Victim(now, func(id policy.ID) bool {
		return h.mayNotLeaveDisk(blockID(id)) || h.mu.index.at(blockID(id)).ram != 0
	})
	for range callsFor(t.diskOrder) {
		if ok {
			return blockID(id)
		}
		id, ok = t.diskOrder.Victim(now, func(id policy.ID) bool { return h.mayNotLeaveDisk(blockID(id)) })
	}
	return 0
}

// unblock lets the RAM policy look again at a block that it passed over. Of
// several, the one that is to leave first comes last.
func (h *Hierarchy) unblock(b *block) {
	if b.flags.has(passedOver) && b.frame != 0 && !h.needsCopy(b) {
		b.flags &^= passedOver
		h.of(b).tenant.ramOrder.Unblock(policy.ID(b.frame))
	}
}

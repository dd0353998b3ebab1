package tier

import (
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier/policy"
)

// Bounds of Pin.
const (
	MaxPin   = 24 * time.Hour
	pinShare = 4 // a quarter of the tier, and of the tenant's quota
)

// MaxPriority is the highest retention priority.
const MaxPriority = policy.MaxPriority

// retained is the time to live of a block's priority.
type retained struct {
	until   uint32 // Unix seconds
	ttl     uint32 // seconds
	refresh bool   // a hit starts it again
}

// notes are pins with an end, by block.
type notes struct {
	of   map[blockID]note
	next uint32 // nothing ends before it, Unix seconds
}

type note struct {
	until   uint32
	bytes   int64      // counted against the share
	by      *Promotion // of a prefetch
	counted bool       // the prefetch brought it up: useful, late or wasted in the end
}

func (n *notes) set(id blockID, x note) {
	if len(n.of) == 0 || x.until < n.next {
		n.next = x.until
	}
	n.of[id] = x
}

// due lists what has ended.
func (n *notes) due(now uint32) (ids []blockID) {
	if len(n.of) == 0 || now < n.next {
		return nil
	}
	n.next = ^uint32(0)
	for id, x := range n.of {
		if x.until <= now {
			ids = append(ids, id)
		} else {
			n.next = min(n.next, x.until)
		}
	}
	return ids
}

// secondsOf rounds up, so that a short time does not become none.
func secondsOf(d time.Duration) uint32 {
	return uint32(min((max(d, 0)+time.Second-1)/time.Second, 1<<31))
}

// each calls do for every named block that is in the index, and sets the
// outcome of the others to ItemMissing.
func (h *Hierarchy) each(ns paging.NamespaceID, names []paging.BlockName, do func(n *namespace, id blockID, b *block) ItemOutcome) ([]ItemOutcome, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.namespaceLocked(ns)
	if err != nil {
		return nil, err
	}
	if err := n.check(len(names), 0, 1); err != nil {
		return nil, err
	}
	out := make([]ItemOutcome, len(names))
	for i := range names {
		out[i] = ItemMissing
		if id := h.mu.index.find(n.num, &names[i]); id != 0 {
			if b := h.mu.index.at(id); h.stored(id, b) != 0 {
				out[i] = do(n, id, b)
			}
		}
	}
	return out, nil
}

// Retain sets the priority and time to live of blocks. A priority above
// MaxPriority is clipped. Errors as Lookup.
func (h *Hierarchy) Retain(ns paging.NamespaceID, names []paging.BlockName, r Retention) ([]ItemOutcome, error) {
	now := h.nowSeconds()
	return h.each(ns, names, func(_ *namespace, id blockID, b *block) ItemOutcome {
		h.retain(id, b, r, now)
		if r.Priority > MaxPriority {
			return ItemClipped
		}
		return ItemAccepted
	})
}

// retain requires Hierarchy.mu.
func (h *Hierarchy) retain(id blockID, b *block, r Retention, now uint32) {
	b.priority = min(r.Priority, MaxPriority)
	delete(h.mu.retained, id)
	b.flags &^= timed
	if r.TTL > 0 {
		ttl := secondsOf(r.TTL)
		h.mu.retained[id] = retained{until: now + ttl, ttl: ttl, refresh: r.RefreshOnHit}
		b.flags |= timed
	}
	h.tellRetention(id, b)
	if b.priority >= hastenPriority {
		h.hasten(id, b)
	}
}

func (h *Hierarchy) tellRetention(id blockID, b *block) {
	t := h.of(b).tenant
	expires := int64(h.mu.retained[id].until)
	if b.frame != 0 {
		t.ramOrder.Retain(policy.ID(b.frame), b.priority, expires)
	}
	if b.flags.has(inDiskOrder) {
		t.diskOrder.Retain(policy.ID(id), b.priority, expires)
	}
}

// refresh does to the retention of a block what a hit means: its time starts
// again if it asked for that; one whose time was over ends, so that the block is
// an ordinary one from then on.
func (h *Hierarchy) refresh(id blockID, b *block, now uint32) {
	switch r := h.mu.retained[id]; {
	case r.until <= now:
		h.endRetention(id, b)
		h.tellRetention(id, b)
	case r.refresh && r.until != now+r.ttl:
		r.until = now + r.ttl
		h.mu.retained[id] = r
		h.tellRetention(id, b)
	}
}

// endRetention makes b a block of priority 0.
func (h *Hierarchy) endRetention(id blockID, b *block) {
	delete(h.mu.retained, id)
	b.flags &^= timed
	b.priority = 0
}

// priorityOf is the priority of a block that still counts.
func (h *Hierarchy) priorityOf(id blockID, b *block, now uint32) uint8 {
	if b.flags.has(timed) && h.mu.retained[id].until <= now {
		return 0
	}
	return b.priority
}

// forgetNotes drops what is noted of a block beside its record.
func (h *Hierarchy) forgetNotes(id blockID, b *block) {
	if b.flags.has(timed) {
		delete(h.mu.retained, id)
	}
	if b.flags.has(incomplete) {
		delete(h.mu.incomplete, id)
	}
	b.flags &^= timed | incomplete
}

// Pin keeps blocks in RAM for ttl, at most MaxPin; 0 ends that. A block that is
// only on disk is brought up and ItemDeferred. ItemClipped: the time was cut, or
// the block is not pinned because a quarter of the tier, or of the tenant's
// quota, is pinned already. ItemRejected: there is no room to bring it up. Parts
// that come later are pinned too; where they exceed that quarter the block's pin
// ends. Errors as Lookup.
func (h *Hierarchy) Pin(ns paging.NamespaceID, names []paging.BlockName, ttl time.Duration) ([]ItemOutcome, error) {
	now := h.nowSeconds()
	until := now + secondsOf(min(ttl, MaxPin))
	return h.each(ns, names, func(n *namespace, id blockID, b *block) ItemOutcome {
		if ttl <= 0 {
			h.endPin(id, b)
			return ItemAccepted
		}
		out := h.pinUntil(n, id, b, until)
		if out == ItemAccepted && ttl > MaxPin {
			return ItemClipped
		}
		return out
	})
}

func (h *Hierarchy) pinUntil(n *namespace, id blockID, b *block, until uint32) ItemOutcome {
	if b.flags.has(held) {
		x := h.mu.pinned.of[id]
		x.until = until
		h.mu.pinned.set(id, x)
		return ItemAccepted
	}
	bytes := n.slotsOf(b.ram | b.disk)
	if !h.mayPin(n, bytes) {
		return ItemClipped
	}
	out := ItemAccepted
	if missing := b.disk &^ b.ram; missing != 0 {
		if f := h.mu.inflight[id]; f != nil {
			missing &^= f.filling()
		}
		if missing != 0 {
			if _, r := h.startLoad(id, b, missing, 0, nil); r != NoReason {
				return ItemRejected
			}
		}
		out = ItemDeferred
	}
	h.pin(b)
	b.flags |= held
	n.tenant.pinned += bytes
	h.mu.pinned.set(id, note{until: until, bytes: bytes})
	return out
}

// mayPin reports whether bytes more may be pinned.
func (h *Hierarchy) mayPin(n *namespace, bytes int64) bool {
	var all int64
	for _, t := range h.mu.tenantList {
		all += t.pinned
	}
	return all+bytes <= h.mu.ramBytes/pinShare && n.tenant.pinned+bytes <= h.ramLimit(n.tenant)/pinShare
}

// chargePin counts the parts that came to a pinned block since it was pinned. If
// they do not fit the share any more the pin ends: the share is what everybody
// else relies on. The caller has pinned b itself.
func (h *Hierarchy) chargePin(id blockID, b *block) {
	if !b.flags.has(held) {
		return
	}
	n, x := h.of(b), h.mu.pinned.of[id]
	more := n.slotsOf(b.ram|b.disk) - x.bytes
	switch {
	case more <= 0:
	case h.mayPin(n, more):
		n.tenant.pinned += more
		x.bytes += more
		h.mu.pinned.set(id, x)
	default:
		h.endPin(id, b)
	}
}

// endPin undoes pinUntil. The block may be gone afterwards.
func (h *Hierarchy) endPin(id blockID, b *block) {
	if b.flags.has(held) {
		h.of(b).tenant.pinned -= h.mu.pinned.of[id].bytes
		delete(h.mu.pinned.of, id)
		b.flags &^= held
		h.unpin(id, b)
	}
}

// Demote moves blocks out of a tier, HBM or RAM (also None); they stay in a lower
// one. ItemDeferred: as soon as a lower one has them and no lease holds them.
// ItemRejected: there is no lower tier, or it has no room. Errors as Lookup, and
// paging.ErrInvalid for another tier.
func (h *Hierarchy) Demote(ns paging.NamespaceID, names []paging.BlockName, from Kind) ([]ItemOutcome, error) {
	if from != None && from != RAM && from != HBM {
		return nil, fmt.Errorf("demote from tier %v: only HBM and RAM have one below that a block can be moved to: %w", from, paging.ErrInvalid)
	}
	return h.each(ns, names, func(_ *namespace, id blockID, b *block) ItemOutcome {
		switch {
		case from == HBM:
			return h.demoteDevice(id, b)
		case h.cfg.Durable == nil:
			return ItemRejected
		case b.ram == 0:
			return ItemAccepted
		}
		b.flags |= leaveRAM
		h.hasten(id, b)
		if b.pins > 0 || b.ram&^b.disk != 0 {
			return ItemDeferred
		}
		h.settle(id, b)
		return ItemAccepted
	})
}

// Drop forgets blocks in every tier. ItemDeferred: nobody finds the block any
// more, but a lease still holds its RAM. Errors as Lookup.
func (h *Hierarchy) Drop(ns paging.NamespaceID, names []paging.BlockName) ([]ItemOutcome, error) {
	return h.each(ns, names, func(_ *namespace, id blockID, b *block) ItemOutcome {
		h.mu.metrics.DroppedBlocks++
		if h.drop(id, b) {
			return ItemAccepted
		}
		return ItemDeferred
	})
}

// assembly is a block of which parts are still to come.
type assembly struct {
	want  paging.PartSet
	since uint32 // when its first part came, Unix seconds
}

// assemble notes whether a block that just got pages has all that are wanted.
func (h *Hierarchy) assemble(id blockID, b *block, want paging.PartSet, now uint32) {
	a, was := h.mu.incomplete[id]
	if !was {
		a.since = now
	}
	a.want |= want
	complete := (b.ram | b.disk).Contains(a.want)
	if complete && !was || b.flags.has(dropped) {
		return
	}
	h.uncount(b)
	if complete {
		delete(h.mu.incomplete, id)
		b.flags &^= incomplete
	} else {
		h.mu.incomplete[id] = a
		b.flags |= incomplete
	}
	h.count(b)
}

// dropIncomplete drops blocks whose parts did not come in time.
func (h *Hierarchy) dropIncomplete(now uint32) {
	for id, a := range h.mu.incomplete {
		if a.since+secondsOf(h.cfg.IncompleteAfter) <= now {
			h.mu.metrics.IncompleteBlocks++
			h.drop(id, h.mu.index.at(id))
		}
	}
}

// Tick does what is due: attempts, incomplete blocks, pins and prefetches whose
// time is over, namespaces that nobody uses. The caller calls it a few times a
// second; deadlines of attempts are kept without it too.
func (h *Hierarchy) Tick() {
	t := time.Now()
	now := uint32(t.Unix())
	h.mu.Lock()
	if h.mu.closed {
		h.mu.Unlock()
		return
	}
	h.expireAttempts(t)
	h.dropIncomplete(now)
	for _, id := range h.mu.pinned.due(now) {
		h.endPin(id, h.mu.index.at(id))
	}
	for _, id := range h.mu.foreseen.due(now) {
		h.wasteForesight(id, h.mu.index.at(id))
	}
	gone := h.idleNamespaces(now)
	h.mu.Unlock()
	for _, id := range gone {
		if err := h.cfg.Durable.DropNamespace(id); err != nil {
			h.log.Warn("namespace was not forgotten on disk", "namespace", id.Short(), "error", err)
		}
	}
}

// namespaceIdle is how long a namespace without blocks is kept.
const namespaceIdle = 24 * 60 * 60 // seconds

// idleNamespaces forgets namespaces without blocks that were not named for a
// day; the ids are to be dropped from the disk. Requires Hierarchy.mu.
func (h *Hierarchy) idleNamespaces(now uint32) (gone []paging.NamespaceID) {
	if now < h.mu.nextIdleCheck {
		return nil
	}
	h.mu.nextIdleCheck = now + 60
	for num, n := range h.mu.namespaces {
		if n == nil || n.blocks > 0 || n.used+namespaceIdle > now {
			continue
		}
		h.mu.namespaces[num] = nil
		delete(h.mu.byID, n.id)
		if h.cfg.Durable != nil {
			gone = append(gone, n.id)
		}
	}
	return gone
}

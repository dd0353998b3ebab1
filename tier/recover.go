package tier

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/kvtier/kvtier/paging"
)

// Meta of a page on disk: what a restart needs to find the order of eviction
// again. From the highest bit: last use in Unix seconds (32 bits), position in
// the chain (20, saturating), hits (5, saturating), priority (7).
const (
	metaPositionMax = 1<<20 - 1
	metaHitsMax     = 1<<5 - 1
)

func packMeta(b *block) uint64 {
	priority := b.priority
	if b.flags.has(timed) {
		priority = 0 // its end would be lost
	}
	return uint64(b.used)<<32 | uint64(min(b.position, metaPositionMax))<<12 |
		uint64(min(b.hits, metaHitsMax))<<7 | uint64(priority)
}

func (b *block) unpackMeta(m uint64) {
	b.used = max(b.used, uint32(m>>32))
	b.position = uint32(m>>12) & metaPositionMax
	b.hits = uint8(m>>7) & metaHitsMax
	b.priority = min(uint8(m&0x7f), MaxPriority)
}

// recover fills the index with what the disk holds.
func (h *Hierarchy) recover(ctx context.Context) error {
	for _, ns := range h.cfg.Durable.Namespaces() {
		if _, err := h.addNamespace(ns, ns.ID()); err != nil {
			h.log.Warn("a namespace on disk is not taken", "error", err)
		}
	}
	if err := h.cfg.Durable.Recover(ctx, h.keep, h.cfg.Progress); err != nil {
		return fmt.Errorf("load the index of the disk tier: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.restoreOrder()
	return nil
}

// keep takes one page found on disk, or refuses it.
func (h *Hierarchy) keep(r Record) (owner uint32, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.mu.byID[r.ID.Namespace]
	if n == nil || r.ID.Part < 0 || r.ID.Part >= n.parts || r.Bytes != n.bytes[r.ID.Part] {
		return 0, false
	}
	id := h.blockFor(n, &r.ID.Name, 0, 0)
	b := h.mu.index.at(id)
	if b.disk.Has(r.ID.Part) {
		return 0, false // a second copy: the first stays
	}
	b.unpackMeta(r.Meta)
	p := &h.pagesOf(b)[r.ID.Part]
	p.disk, p.sum = r.Ref, r.Sum
	b.disk = b.disk.With(r.ID.Part)
	n.tenant.disk += n.slot[r.ID.Part]
	return id, true
}

// restoreOrder tells the policies of the disk of the blocks in the order of
// their last use, tails before heads.
func (h *Hierarchy) restoreOrder() {
	type use struct {
		key uint64
		id  blockID
	}
	uses := make([]use, 0, h.mu.index.live)
	h.mu.index.each(func(id blockID, b *block) {
		uses = append(uses, use{uint64(b.used)<<32 | uint64(math.MaxUint32-b.position), id})
	})
	slices.SortFunc(uses, func(a, b use) int { return cmp.Compare(a.key, b.key) })
	for _, u := range uses {
		h.enterDiskOrder(u.id, h.mu.index.at(u.id), 0)
	}
}

// checkPolicies refuses names that are no policy, before anything is loaded.
func (h *Hierarchy) checkPolicies() error {
	_, err := h.newTenant("")
	if err != nil {
		return fmt.Errorf("%w: %w", err, paging.ErrInvalid)
	}
	return nil
}

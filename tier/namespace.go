package tier

import (
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/paging"
)

// namespace is a registered namespace with what the paths below need of its
// layout, worked out once.
type namespace struct {
	// Immutable.

	id       paging.NamespaceID
	ns       *paging.Namespace
	num      uint32
	tenant   *tenant
	parts    int
	all      paging.PartSet
	plain    bool     // every part has one page per block, and every page is needed
	bytes    []uint32 // length of a page, by part
	slot     []int64  // bytes of its slot, by part
	allSlots int64    // sum of slot

	// Guarded by Hierarchy.mu.
	blocks int    // blocks in the index, dropped ones that are still used included
	used   uint32 // last call that named it, Unix seconds
}

func newNamespace(ns *paging.Namespace, id paging.NamespaceID, num uint32, t *tenant) *namespace {
	n := &namespace{id: id, ns: ns, num: num, tenant: t, parts: len(ns.Layout.Parts), all: ns.Layout.AllParts(), plain: true}
	for i := range ns.Layout.Parts {
		p := &ns.Layout.Parts[i]
		n.bytes = append(n.bytes, uint32(p.PageBytes))
		n.slot = append(n.slot, slotBytes(uint32(p.PageBytes)))
		n.allSlots += n.slot[i]
		n.plain = n.plain && p.LastBlocks == 0 && p.BlocksPerPage == 1
	}
	return n
}

// slotBytes is what a page of this length takes in an arena or on disk.
func slotBytes(pageBytes uint32) int64 {
	return (int64(pageBytes) + paging.UnitBytes - 1) &^ (paging.UnitBytes - 1)
}

// slotsOf is the bytes of the slots of these parts.
func (n *namespace) slotsOf(parts paging.PartSet) int64 {
	if parts == n.all {
		return n.allSlots
	}
	var sum int64
	for i, b := range n.slot {
		if parts.Has(i) {
			sum += b
		}
	}
	return sum
}

// bytesOf is the bytes of the pages of these parts.
func (n *namespace) bytesOf(parts paging.PartSet) int64 {
	var sum int64
	for i, b := range n.bytes {
		if parts.Has(i) {
			sum += int64(b)
		}
	}
	return sum
}

// hasSlot reports whether one of these parts takes a slot of this size.
func (n *namespace) hasSlot(parts paging.PartSet, slot int64) bool {
	for part, s := range n.slot {
		if s == slot && parts.Has(part) {
			return true
		}
	}
	return false
}

// pagesAt is the subset of parts that have a page at this position.
func (n *namespace) pagesAt(position int, parts paging.PartSet) paging.PartSet {
	if n.plain {
		return parts
	}
	return n.ns.Layout.PagesAt(position, parts)
}

// needed is the subset of parts whose page at this position a reader of a
// prefix of usable blocks needs.
func (n *namespace) needed(usable, position int, parts paging.PartSet) paging.PartSet {
	if n.plain {
		if position < usable {
			return parts
		}
		return 0
	}
	return n.ns.Layout.Needed(usable, position, parts)
}

// usable is the usable prefix of blocks blocks from position first on, with the
// blocks before first taken as present; have is asked for positions counted
// from first.
func (n *namespace) usable(first, blocks int, parts paging.PartSet, have func(row int) paging.PartSet) int {
	if n.plain {
		for i := range blocks {
			if !have(i).Contains(parts) {
				return i
			}
		}
		return blocks
	}
	if first == 0 {
		return n.ns.Layout.UsablePrefix(blocks, parts, have)
	}
	return max(0, n.ns.Layout.UsablePrefix(first+blocks, parts, func(position int) paging.PartSet {
		if position < first {
			return parts
		}
		return have(position - first)
	})-first)
}

// maxPosition bounds positions in a chain.
const maxPosition = 1 << 30

// check checks the bounds of a call that names blocks blocks from position
// first on.
func (n *namespace) check(blocks, first int, parts paging.PartSet) error {
	switch {
	case blocks == 0 || blocks > paging.MaxCallBlocks:
		return fmt.Errorf("%d block names, want 1 to %d: %w", blocks, paging.MaxCallBlocks, paging.ErrInvalid)
	case !n.all.Contains(parts):
		return fmt.Errorf("part set %#x of a layout with %d parts: %w", uint64(parts), n.parts, paging.ErrInvalid)
	case blocks*parts.Len() > paging.MaxCallPages:
		return fmt.Errorf("%d blocks of %d parts, want at most %d pages: %w", blocks, parts.Len(), paging.MaxCallPages, paging.ErrInvalid)
	case first < 0 || first > maxPosition-blocks:
		return fmt.Errorf("first block %d, want 0 to %d: %w", first, maxPosition-blocks, paging.ErrInvalid)
	}
	return nil
}

// RegisterNamespace makes a namespace known and returns its id. Idempotent. ns
// is kept and must not change. Errors: paging.ErrBadLayout (also for a page that
// no extent can hold), paging.ErrInvalid, paging.ErrNoSpace (Config.MaxNamespaces
// are known), paging.ErrClosed, and what the durable tier answers, for which
// paging.ErrUnavailable only means that the namespace stays in memory.
func (h *Hierarchy) RegisterNamespace(ns *paging.Namespace) (paging.NamespaceID, error) {
	if err := ns.Validate(); err != nil {
		return paging.NamespaceID{}, err
	}
	id := ns.ID()
	beside, err := h.addNamespace(ns, id)
	if err != nil {
		return id, err
	}
	if beside != nil {
		if differs := paging.DiffLayouts(&beside.Layout, &ns.Layout); differs != "" {
			h.log.Info("namespace with another layout of a known model: it shares no page with the one before", "namespace", id.Short(),
				"before", beside.ID().Short(), "model", ns.Layout.Model, "tenant", ns.Tenant, "differs", differs)
		}
	}
	if h.cfg.Durable == nil {
		return id, nil
	}
	if err := h.cfg.Durable.PutNamespace(ns); err != nil {
		h.log.Warn("namespace is not durable", "namespace", id.Short(), "error", err)
	}
	return id, nil
}

// addNamespace makes a namespace known; beside is the one of this tenant and model
// that was named last before, nil if there is none or ns was known.
func (h *Hierarchy) addNamespace(ns *paging.Namespace, id paging.NamespaceID) (beside *paging.Namespace, err error) {
	for i := range ns.Layout.Parts {
		if p := &ns.Layout.Parts[i]; h.cfg.MaxPageBytes > 0 && int64(p.PageBytes) > h.cfg.MaxPageBytes {
			return nil, fmt.Errorf("%w: pages of part %q have %d bytes and extents of this node hold %d: raise the RAM budget or the largest page",
				paging.ErrBadLayout, p.Name, p.PageBytes, h.cfg.MaxPageBytes)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.closed {
		return nil, paging.ErrClosed
	}
	if n, known := h.mu.byID[id]; known {
		n.used = h.nowSeconds()
		return nil, nil
	}
	if len(h.mu.byID) >= h.cfg.MaxNamespaces {
		return nil, fmt.Errorf("%d namespaces are registered, no more are taken: %w", len(h.mu.byID), paging.ErrNoSpace)
	}
	num := slices.Index(h.mu.namespaces, nil)
	if num < 0 {
		num = len(h.mu.namespaces)
		h.mu.namespaces = append(h.mu.namespaces, nil)
	}
	t, err := h.tenantOf(ns.Tenant)
	if err != nil {
		return nil, err
	}
	beside = h.sameModel(t, ns.Layout.Model)
	n := newNamespace(ns, id, uint32(num), t)
	n.used = h.nowSeconds()
	h.mu.namespaces[num] = n
	h.mu.byID[id] = n
	return beside, nil
}

// sameModel is the namespace of a tenant and a model that was named last.
// Requires h.mu.
func (h *Hierarchy) sameModel(t *tenant, model string) *paging.Namespace {
	var last *namespace
	for _, n := range h.mu.namespaces {
		if n != nil && n.tenant == t && n.ns.Layout.Model == model && (last == nil || n.used >= last.used) {
			last = n
		}
	}
	if last == nil {
		return nil
	}
	return last.ns
}

// Namespace is the namespace with this id, if it is known. It must not be changed.
func (h *Hierarchy) Namespace(id paging.NamespaceID) (*paging.Namespace, bool) {
	h.mu.lockForHit()
	defer h.mu.Unlock()
	n, ok := h.mu.byID[id]
	if !ok {
		return nil, false
	}
	return n.ns, true
}

// Namespaces lists those that are known, in no order. They must not be changed.
func (h *Hierarchy) Namespaces() []*paging.Namespace {
	h.mu.lockForHit()
	defer h.mu.Unlock()
	var out []*paging.Namespace
	for _, n := range h.mu.byID {
		out = append(out, n.ns)
	}
	return out
}

// namespaceLocked is the namespace with this id. Requires h.mu.
func (h *Hierarchy) namespaceLocked(id paging.NamespaceID) (*namespace, error) {
	if h.mu.closed {
		return nil, paging.ErrClosed
	}
	n, ok := h.mu.byID[id]
	if !ok {
		return nil, fmt.Errorf("namespace %s: %w", id.Short(), paging.ErrUnknownNamespace)
	}
	return n, nil
}

package tier

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/paging"
)

// BlockParts names some pages of one block.
type BlockParts struct {
	Name  paging.BlockName
	Parts paging.PartSet
}

// Served is a set of pages that is read for another node: they stay where they
// are until Close. Pages on disk are read from there and not brought up, so that
// what is cold here displaces nothing that is hot. Its methods may be called from
// many goroutines.
type Served struct {
	h    *Hierarchy
	ns   *namespace
	rows []servedRow
}

type servedRow struct {
	name  paging.BlockName
	id    blockID // 0: not there
	busy  bool    // somebody writes it, or brings it
	ram   paging.PartSet
	disk  paging.PartSet
	pages []page // copies, by part
}

// Serve pins what is here of some blocks. It waits for nothing and counts no hit
// or miss of this node. The caller must Close. Errors:
// paging.ErrUnknownNamespace, paging.ErrInvalid (more blocks than a call may
// name), paging.ErrClosed.
func (h *Hierarchy) Serve(ns paging.NamespaceID, blocks []BlockParts) (*Served, error) {
	if len(blocks) == 0 || len(blocks) > paging.MaxCallBlocks {
		return nil, fmt.Errorf("%d blocks, want 1 to %d: %w", len(blocks), paging.MaxCallBlocks, paging.ErrInvalid)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.namespaceLocked(ns)
	if err != nil {
		return nil, err
	}
	s := &Served{h: h, ns: n, rows: make([]servedRow, len(blocks))}
	now := h.nowSeconds()
	n.used = now
	for i, want := range blocks {
		row := &s.rows[i]
		row.name = want.Name
		id := h.mu.index.find(n.num, &want.Name)
		if id == 0 {
			h.mu.metrics.ServedAbsentPages += int64(want.Parts.Len())
			continue
		}
		b := h.mu.index.at(id)
		row.busy = b.flags.has(busy)
		row.ram = b.ram & want.Parts
		row.disk = b.disk & want.Parts &^ b.ram
		here := (row.ram | row.disk).Len()
		h.mu.metrics.ServedPages += int64(here)
		h.mu.metrics.ServedAbsentPages += int64(want.Parts.Len() - here)
		if here == 0 {
			continue
		}
		row.id = id
		row.pages = append(row.pages, h.pagesOf(b)...)
		h.pin(b)
		if row.disk != 0 {
			h.mu.serving[id]++
		}
		if b.ram != 0 {
			h.touch(id, b, n.tenant, 0, now)
		} else {
			h.hitDisk(id, b, 0, now)
		}
	}
	h.mu.metrics.Holds++
	return s, nil
}

// Layout is the layout of the pages. It must not be changed.
func (s *Served) Layout() *paging.Layout { return &s.ns.ns.Layout }

// Page is where the page of a part of block i is: its bytes and their checksum,
// or that it is on disk, or why it is not there. The bytes must not be changed and
// stay valid until Close.
func (s *Served) Page(i, part int) (bytes []byte, sum uint64, disk bool, why Reason) {
	row := &s.rows[i]
	switch {
	case row.ram.Has(part):
		p := &row.pages[part]
		return s.h.cfg.Arena.Bytes(p.ram, s.ns.bytes[part]), p.sum, false, NoReason
	case row.disk.Has(part):
		return nil, row.pages[part].sum, true, NoReason
	case row.busy:
		return nil, 0, false, InFlight
	}
	return nil, 0, false, NotFound
}

// Load reads a page that is on disk into dst, which is aligned to
// paging.UnitBytes. Errors as of Tier.Load, Unsettled ones too: then the disk may
// still write to dst. A copy that is found bad is dropped.
func (s *Served) Load(ctx context.Context, i, part int, dst []byte) (sum uint64, err error) {
	h, row := s.h, &s.rows[i]
	if !row.disk.Has(part) {
		return 0, fmt.Errorf("part %d of block %s: %w", part, row.name.Short(), paging.ErrNotFound)
	}
	c := row.pages[part]
	p := Page{Bytes: s.ns.bytes[part], Sum: c.sum, Key: paging.StorageKey(s.ns.id, row.name, part),
		ID: paging.PageID{BlockID: paging.BlockID{Namespace: s.ns.id, Name: row.name}, Part: part}}
	err = h.cfg.Durable.Load(ctx, p, c.disk, dst)
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		h.loadFailed(h.mu.index.at(row.id), loadItem{l: &load{id: row.id}, part: part, disk: c.disk}, err)
		return 0, err
	}
	h.mu.metrics.LoadedPages++
	h.mu.metrics.LoadedBytes += int64(p.Bytes)
	return c.sum, nil
}

// Close gives the pages up. A second call does nothing.
func (s *Served) Close() {
	h := s.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.rows == nil {
		return
	}
	for i := range s.rows {
		if id := s.rows[i].id; id != 0 {
			if s.rows[i].disk != 0 {
				if h.mu.serving[id]--; h.mu.serving[id] == 0 {
					delete(h.mu.serving, id)
				}
			}
			h.unpin(id, h.mu.index.at(id))
		}
	}
	s.rows = nil
	h.mu.metrics.Holds--
}

// Held tells which parts of some blocks are here, and the slowest tier that they
// are in; None: nothing is.
func (h *Hierarchy) Held(ns paging.NamespaceID, names []paging.BlockName, parts paging.PartSet) (held []paging.PartSet, tiers []Kind, err error) {
	h.mu.lockForHit()
	defer h.mu.Unlock()
	n, err := h.namespaceLocked(ns)
	if err != nil {
		return nil, nil, err
	}
	setDefault(&parts, n.all)
	held, tiers = make([]paging.PartSet, len(names)), make([]Kind, len(names))
	for i := range names {
		if id := h.mu.index.find(n.num, &names[i]); id != 0 {
			b := h.mu.index.at(id)
			held[i] = (b.ram | b.disk) & parts
			tiers[i] = h.kindOf(id, held[i])
		}
	}
	return held, tiers, nil
}

// Doubt checks the copy of a page that another node received damaged, and drops
// it if it is bad here. It reads the page.
func (h *Hierarchy) Doubt(ctx context.Context, id paging.PageID) {
	_, copies, err := h.Block(ctx, id.BlockID, true)
	if err != nil {
		return
	}
	for _, c := range copies {
		if c.Part == id.Part && c.Tier == RAM && c.Verdict != "ok" {
			h.log.Error("a page in RAM is damaged; its block is dropped", "block", id.Name.Short(), "part", c.PartName, "verdict", c.Verdict)
			_, _ = h.Drop(id.Namespace, []paging.BlockName{id.Name}) // gone already is as good
		}
	}
}

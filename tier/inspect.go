package tier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// BlockInfo describes a block, for people.
type BlockInfo struct {
	ID       paging.BlockID
	Tenant   string
	Model    string
	RAM      paging.PartSet // parts resident
	Disk     paging.PartSet // parts on disk
	Device   paging.PartSet // parts on the device
	Bytes    int64          // bytes of its pages, each counted once
	Position int
	Hits     int
	Priority int // what counts now
	Leases   int // uses of its RAM copy: leases, pins, loads and writes
	Idle     time.Duration
	Retained time.Duration // time until its retention ends; 0: it has no end
}

// Tiers lists the tiers that hold the whole of what is stored, fastest first.
func (b BlockInfo) Tiers() (kinds []Kind) {
	all := b.RAM | b.Disk | b.Device
	if b.Device == all && all != 0 {
		kinds = append(kinds, HBM)
	}
	if b.RAM == all && all != 0 {
		kinds = append(kinds, RAM)
	}
	if b.Disk == all && all != 0 {
		kinds = append(kinds, NVMe)
	}
	return kinds
}

// PageInfo describes one stored copy of a page, for people.
type PageInfo struct {
	Part     int
	PartName string
	Key      paging.Key
	Bytes    int64
	Sum      uint64
	Tier     Kind
	Place    string
	Verdict  string // with verify: "ok" or what is wrong
}

// BlockQuery selects blocks. Zero fields select all.
type BlockQuery struct {
	Namespace *paging.NamespaceID
	Tenant    string
	Tier      Kind            // blocks with a page in RAM, or on NVMe
	After     *paging.BlockID // only blocks after it, in order of namespace and name
	Prefix    []byte          // only names that begin with these bytes
	Limit     int             // 1 to 10,000
}

// scanStep is the number of blocks that a listing looks at in one go: it holds
// the lock for less than a millisecond.
const scanStep = 4096

// Blocks lists blocks in order of namespace and name. It walks the whole index,
// a step at a time: blocks that come or go meanwhile may be missed. ErrInvalid
// for a wrong limit.
func (h *Hierarchy) Blocks(q BlockQuery) ([]BlockInfo, error) {
	if q.Limit < 1 || q.Limit > 10000 {
		return nil, fmt.Errorf("limit %d, want 1 to 10000: %w", q.Limit, paging.ErrInvalid)
	}
	now := h.nowSeconds()
	var found []BlockInfo
	for at := blockID(1); at != 0; {
		h.mu.Lock()
		at = h.mu.index.walk(at, scanStep, func(id blockID, b *block) {
			if !b.flags.has(dropped) && h.stored(id, b) != 0 && h.matches(&q, id, b) {
				found = append(found, h.info(id, b, now))
			}
		})
		h.mu.Unlock()
		if len(found) > 2*q.Limit {
			found = firstBlocks(found, q.Limit)
		}
	}
	return firstBlocks(found, q.Limit), nil
}

func firstBlocks(found []BlockInfo, limit int) []BlockInfo {
	slices.SortFunc(found, func(a, b BlockInfo) int { return compareIDs(&a.ID, &b.ID) })
	return found[:min(limit, len(found))]
}

func compareIDs(a, b *paging.BlockID) int {
	if c := bytes.Compare(a.Namespace[:], b.Namespace[:]); c != 0 {
		return c
	}
	return bytes.Compare(a.Name[:], b.Name[:])
}

func (h *Hierarchy) matches(q *BlockQuery, number blockID, b *block) bool {
	n := h.of(b)
	id := paging.BlockID{Namespace: n.id, Name: b.name}
	switch {
	case q.Namespace != nil && n.id != *q.Namespace,
		q.Tenant != "" && n.tenant.name != q.Tenant,
		q.Tier == RAM && b.ram == 0,
		q.Tier == NVMe && b.disk == 0,
		q.Tier == HBM && h.deviceParts(number, b) == 0,
		q.Tier > NVMe,
		!bytes.HasPrefix(b.name[:], q.Prefix),
		q.After != nil && compareIDs(&id, q.After) <= 0:
		return false
	}
	return true
}

func (h *Hierarchy) info(id blockID, b *block, now uint32) BlockInfo {
	n := h.of(b)
	i := BlockInfo{
		ID: paging.BlockID{Namespace: n.id, Name: b.name}, Tenant: n.tenant.name, Model: n.ns.Layout.Model,
		RAM: b.ram, Disk: b.disk, Device: h.deviceParts(id, b), Bytes: n.bytesOf(h.stored(id, b)), Position: int(b.position),
		Hits: int(b.hits), Priority: int(h.priorityOf(id, b, now)), Leases: int(b.pins),
		Idle: time.Duration(now-min(now, b.used)) * time.Second,
	}
	if r, ok := h.mu.retained[id]; ok && r.until > now {
		i.Retained = time.Duration(r.until-now) * time.Second
	}
	return i
}

// Block describes one block and its copies. With verify each copy is read and
// its checksum compared; a disk copy that is found bad is dropped. Errors:
// paging.ErrNotFound, paging.ErrUnknownNamespace, paging.ErrClosed.
func (h *Hierarchy) Block(ctx context.Context, id paging.BlockID, verify bool) (BlockInfo, []PageInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.namespaceLocked(id.Namespace)
	if err != nil {
		return BlockInfo{}, nil, err
	}
	bid := h.mu.index.find(n.num, &id.Name)
	if bid == 0 {
		return BlockInfo{}, nil, fmt.Errorf("block %s: %w", id.Name.Short(), paging.ErrNotFound)
	}
	b := h.mu.index.at(bid)
	h.pin(b)
	defer h.unpin(bid, b)
	if b.flags.has(onDevice) {
		h.mu.device.of[bid].pins++
		defer h.unpinDevice(bid)
	}
	info := h.info(bid, b, h.nowSeconds())
	info.Leases--
	var copies []PageInfo
	for part, p := range h.pagesOf(b) {
		c := PageInfo{Part: part, PartName: n.ns.Layout.Parts[part].Name, Bytes: int64(n.bytes[part]), Sum: p.sum}
		if b.ram.Has(part) {
			s := h.cfg.Arena.Slot(p.ram, n.bytes[part], p.sum)
			c.Tier, c.Place = RAM, fmt.Sprintf("extent %d offset %d", s.Extent, s.Offset)
			copies = append(copies, c)
		}
		if ref := h.deviceRef(bid, b, part); ref != 0 {
			s := h.cfg.Device.Slot(ref, n.bytes[part], p.sum)
			c.Tier, c.Place = HBM, fmt.Sprintf("extent %d offset %d", s.Extent, s.Offset)
			copies = append(copies, c)
		}
		if b.disk.Has(part) {
			c.Tier, c.Place = NVMe, fmt.Sprintf("segment %d unit %d", p.disk>>32, uint32(p.disk))
			copies = append(copies, c)
		}
	}
	for i := range copies {
		c := &copies[i]
		c.Key = paging.StorageKey(id.Namespace, id.Name, c.Part)
		if verify {
			c.Verdict = h.verify(ctx, n, bid, b, c)
		}
	}
	return info, copies, nil
}

// verify reads one copy of a pinned block; it unlocks meanwhile.
func (h *Hierarchy) verify(ctx context.Context, n *namespace, id blockID, b *block, c *PageInfo) string {
	p := h.pagesOf(b)[c.Part]
	if c.Tier == RAM {
		h.mu.Unlock()
		sum := paging.Checksum(h.cfg.Arena.Bytes(p.ram, n.bytes[c.Part]))
		h.mu.Lock()
		if sum != p.sum {
			return fmt.Sprintf("checksum %016x, want %016x", sum, p.sum)
		}
		return "ok"
	}
	ref, r := h.allocRAM(n, c.Part, id, nil)
	if r != NoReason {
		return "not read: no room in RAM"
	}
	device := Ref(0)
	if c.Tier == HBM {
		device = h.deviceRef(id, b, c.Part)
	}
	h.mu.Unlock()
	page := Page{ID: paging.PageID{BlockID: paging.BlockID{Namespace: n.id, Name: b.name}, Part: c.Part}, Key: c.Key, Bytes: n.bytes[c.Part], Sum: p.sum}
	var err error
	if device != 0 {
		err = h.cfg.Device.Load(ctx, page, device, h.cfg.Arena.Bytes(ref, page.Bytes))
	} else {
		err = h.cfg.Durable.Load(ctx, page, p.disk, h.cfg.Arena.Bytes(ref, page.Bytes))
	}
	h.mu.Lock()
	if Unsettled(err) == nil {
		h.freeAside(n, c.Part, ref)
	} else {
		// Owner: the Hierarchy. Exit: when the disk answers, or Close. Bound: one per
		// verification that was given up.
		h.workers.Go(func() { h.freeWhenSettled(n, c.Part, ref, err) })
	}
	if err == nil {
		return "ok"
	}
	if device != 0 {
		if errors.Is(err, paging.ErrCorrupt) {
			h.mu.metrics.CorruptPages++
			h.dropDevice(id, b, c.Part)
		}
		return err.Error()
	}
	if errors.Is(err, paging.ErrCorrupt) && h.pagesOf(b)[c.Part].disk == p.disk {
		h.mu.metrics.CorruptPages++
		h.dropDisk(id, b, paging.PartSet(0).With(c.Part), false)
	}
	return err.Error()
}

// freeWhenSettled gives back a slot that the disk may still write to.
func (h *Hierarchy) freeWhenSettled(n *namespace, part int, ref Ref, err error) {
	settled := h.awaitSettled(err)
	h.mu.Lock()
	defer h.mu.Unlock()
	if settled {
		h.freeAside(n, part, ref)
	}
}

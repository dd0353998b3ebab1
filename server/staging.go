package server

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
)

// stagingIDs is the first extent number of staging memory: the numbers of arenas
// lie below.
const stagingIDs = paging.ExtentID(1) << 31

// pagesOfStaging is how many of its largest pages an attachment can have in
// staging at once, so that filling and committing overlap.
const pagesOfStaging = 4

// staging is the memory that an engine writes pages into before they are
// committed. Its slots are used again only after the client has ended the write
// or the attachment is gone: a late write can never reach another attempt.
//
// Guarded by the attachment's mu.
type staging struct {
	extents []stagingExtent
	slots   *paging.Allocator
	bytes   int64
	busy    int  // commits that read from it
	closing bool // nobody uses it any more; it goes when busy is 0
}

type stagingExtent struct {
	id  paging.ExtentID
	mem *shm.Memory
}

// newest is the extent that was added last; 0: there is none.
func (s *staging) newest() paging.ExtentID {
	if len(s.extents) == 0 {
		return 0
	}
	return s.extents[len(s.extents)-1].id
}

// memory is n bytes at a place.
func (s *staging) memory(p paging.Place, n uint64) []byte {
	for _, e := range s.extents {
		if e.id == p.Extent {
			return e.mem.Bytes()[p.Offset : p.Offset+n : p.Offset+n]
		}
	}
	return nil
}

// take closes the memory's list and returns it, unless a commit reads from it:
// that one takes it when it ends.
func (s *staging) take() []stagingExtent {
	s.closing = true
	if s.busy > 0 {
		return nil
	}
	extents := s.extents
	s.extents, s.slots, s.bytes = nil, nil, 0
	return extents
}

// stagingLimit is the most staging of one attachment.
func (n *node) stagingLimit() int64 { return roundUnit(int64(n.cfg.RAMBytes) / stagingShare) }

// stagingSize is what an engine gets that wants so many bytes.
func (n *node) stagingSize(wanted uint64) int64 {
	if wanted == 0 {
		wanted = uint64(n.cfg.StagingBytes)
	}
	return int64(max(paging.UnitBytes, min(roundUnit(wanted), uint64(n.stagingLimit()))))
}

// growth is how much has to be added to s for pages of this length; 0: nothing.
func (n *node) growth(s *staging, page int64) int64 {
	slot := roundUnit(page)
	want := max(slot, min(pagesOfStaging*slot, n.stagingLimit()))
	largest := int64(0)
	for _, e := range s.extents {
		largest = max(largest, e.mem.Size())
	}
	if s.bytes >= want && largest >= slot {
		return 0
	}
	return max(slot, want-s.bytes)
}

func roundUnit[T int64 | uint64](n T) T {
	return (n + paging.UnitBytes - 1) / paging.UnitBytes * paging.UnitBytes
}

// newStaging makes staging memory inside the RAM budget, touched before use.
func (n *node) newStaging(ctx context.Context, bytes int64) (stagingExtent, error) {
	if err := n.ram.SetAside(bytes); err != nil {
		return stagingExtent{}, fmt.Errorf("staging of %v inside the RAM budget: %w", Size(bytes), err)
	}
	id := stagingIDs + paging.ExtentID(n.stagingCount.Add(1))
	mem, err := shm.CreateStaging(fmt.Sprintf("kvtier-staging-%d", id-stagingIDs), bytes)
	if err == nil {
		if err = mem.Populate(ctx); err != nil {
			err = errors.Join(err, mem.Close())
		}
	}
	if err != nil {
		n.ram.GiveBack(bytes)
		return stagingExtent{}, fmt.Errorf("staging of %v: %w", Size(bytes), err)
	}
	return stagingExtent{id: id, mem: mem}, nil
}

// freeStaging unmaps staging that nobody uses any more.
func (n *node) freeStaging(extents []stagingExtent) {
	for _, e := range extents {
		bytes := e.mem.Size()
		if err := e.mem.Close(); err != nil {
			n.log.Error("unmap staging", "extent", e.id, "error", err)
		}
		n.ram.GiveBack(bytes)
	}
}

// add takes an extent into use.
func (s *staging) add(e stagingExtent) error {
	if s.slots == nil {
		s.slots = paging.NewAllocator(paging.AllocatorConfig{})
	}
	if err := s.slots.AddExtent(e.id, 0, uint64(e.mem.Size())); err != nil {
		return err
	}
	s.extents = append(s.extents, e)
	s.bytes += e.mem.Size()
	return nil
}

// grow adds staging memory to an attachment and hands it over.
func (a *attachment) grow(ctx context.Context, bytes int64) error {
	e, err := a.node.newStaging(ctx, bytes)
	if err != nil {
		return err
	}
	a.mu.Lock()
	if a.state == attached {
		err = a.staging.add(e)
	} else {
		err = errDetached
	}
	a.mu.Unlock()
	if err != nil {
		a.node.freeStaging([]stagingExtent{e})
		return err
	}
	a.extentsAdded()
	return nil
}

// growUpTo adds bytes, or the half, the quarter and so on where the RAM budget has
// no room for more, but not less than least.
func (a *attachment) growUpTo(ctx context.Context, bytes, least int64) error {
	for {
		err := a.grow(ctx, bytes)
		if !errors.Is(err, paging.ErrNoSpace) || bytes <= least {
			return err
		}
		bytes = max(least, roundUnit(bytes/2))
	}
}

// ensureStaging makes room for pages of this length. It reports the newest
// extent and the size, or zeros if nothing was added.
func (a *attachment) ensureStaging(ctx context.Context, page int64) (paging.ExtentID, uint64, error) {
	a.growing.Lock() // two namespaces at once would both see too little
	defer a.growing.Unlock()
	a.mu.Lock()
	bytes := a.node.growth(&a.staging, page)
	a.mu.Unlock()
	if bytes == 0 {
		return 0, 0, nil
	}
	if err := a.growUpTo(ctx, bytes, roundUnit(page)); err != nil {
		return 0, 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.staging.newest(), uint64(a.staging.bytes), nil
}

// stagingExtents lists what is to be handed over.
func (a *attachment) stagingExtents() []shm.Extent {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []shm.Extent
	for _, e := range a.staging.extents {
		out = append(out, shm.Extent{ID: e.id, Kind: shm.KindStaging, Bytes: e.mem.Size(), FD: e.mem.FD()})
	}
	return append(out, a.device.extents()...)
}

package paging

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func all(uint32) bool  { return true }
func none(uint32) bool { return false }

// fill allocates pages of one size until there is no room; owners count up.
func fill(a *Allocator, size uint64, owner uint32) []Place {
	var places []Place
	for {
		p, ok := a.Alloc(size, owner)
		if !ok {
			return places
		}
		places = append(places, p)
		owner++
	}
}

func TestReclaimTurnsTheEmptiestSlabOver(t *testing.T) {
	for _, whole := range []bool{false, true} {
		a := extents(t, AllocatorConfig{WholeExtents: whole}, 0, 64*mib, 64*mib, 64*mib)
		places := fill(a, 64<<10, 0)
		if len(places) != 3*64*16 {
			t.Fatalf("%d pages fit", len(places))
		}
		// Leave two pages in the slab or extent of the last page.
		last := places[len(places)-1]
		s, _, _ := a.locate(last)
		var kept []uint32
		for i, p := range places {
			if q, _, _ := a.locate(p); q == s {
				if len(kept) < 2 {
					kept = append(kept, uint32(i))
				} else {
					a.Free(p)
				}
			}
		}
		size := uint64(a.slabs[s].slots)*64<<10 - 4096
		owners, ok := a.Reclaim(size, all)
		if !ok || !slices.Equal(owners, kept) {
			t.Errorf("whole=%v: reclaim %v, %v; want %v", whole, owners, ok, kept)
		}
		owners, ok = a.Reclaim(size, func(o uint32) bool { return o != kept[0] })
		if !ok || slices.Contains(owners, kept[0]) || len(owners) < 2 {
			t.Errorf("whole=%v: around a page that stays: %v, %v", whole, owners, ok)
		}
		if owners, ok := a.Reclaim(size, none); ok {
			t.Errorf("whole=%v: reclaim %v although nothing may move", whole, owners)
		}
	}
}

func TestReclaimOfItsOwnClassIsTheLastResort(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 0, 4*mib)
	fill(a, mib, 10)
	owners, ok := a.Reclaim(mib, all)
	if !ok || len(owners) != 1 {
		t.Errorf("reclaim %v, %v; want one page of the class", owners, ok)
	}
	a = extents(t, AllocatorConfig{}, 0, 4*mib)
	for range 2 {
		a.Alloc(mib, 1)
	}
	small := fill(a, 4096, 100)
	if len(small) != 512 {
		t.Fatalf("%d small pages", len(small))
	}
	owners, ok = a.Reclaim(mib, all)
	if !ok || len(owners) != 256 || owners[0] < 100 {
		t.Errorf("reclaim of %d owners, %v; want the 256 of a megabyte of small pages", len(owners), ok)
	}
}

func TestReclaimWithRoom(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 0, 4*mib)
	p, _ := a.Alloc(4096, 1)
	a.Free(p) // a spare slab of another class is room, too
	if owners, ok := a.Reclaim(4*mib, none); !ok || len(owners) != 0 {
		t.Errorf("reclaim %v, %v; want nobody", owners, ok)
	}
	if _, ok := a.Alloc(4*mib, 1); !ok {
		t.Error("no room")
	}
	for _, size := range []uint64{0, 5 * mib, 1 << 63} {
		if owners, ok := a.Reclaim(size, all); ok {
			t.Errorf("reclaim for %d bytes: %v", size, owners)
		}
	}
	if _, ok := NewAllocator(AllocatorConfig{}).Reclaim(4096, all); ok {
		t.Error("reclaim without extents")
	}
}

// Among few slots the answer is the cheapest there is.
func TestReclaimFindsTheCheapest(t *testing.T) {
	sizes := []uint64{4096, 20_000, 65_536, 69_632, 262_144, mib}
	for _, seed := range seeds(t, 30) {
		r := rand.New(rand.NewPCG(seed, 5))
		a := extents(t, AllocatorConfig{}, 8192, 4*mib, 4*mib-12*UnitBytes, 6*mib)
		places := map[uint32]Place{}
		owner := uint32(0)
		for range 3000 {
			if p, ok := a.Alloc(sizes[r.IntN(len(sizes))], owner); ok {
				places[owner] = p
				owner++
			} else {
				for range 5 {
					o := r.Uint32N(owner)
					if p, ok := places[o]; ok {
						a.Free(p)
						delete(places, o)
					}
				}
			}
		}
		stays := r.Uint32N(20) + 2
		movable := func(o uint32) bool { return o%stays != 0 }
		size := sizes[r.IntN(len(sizes))] * (1 + r.Uint64N(4))
		a.releaseSpares()
		want := cheapest(a, unitsOf(size), movable)
		owners, ok := a.Reclaim(size, movable)
		if want < 0 {
			if ok && len(owners) != 1 {
				t.Errorf("seed %d: reclaim %v, want none or one of the class", seed, owners)
			}
			continue
		}
		got := 0
		for _, o := range owners {
			got += int(a.SlotSize(places[o]) / UnitBytes)
		}
		if !ok || got != want {
			t.Errorf("seed %d: reclaim of %d units for %d bytes, %v; want %d", seed, got, size, ok, want)
		}
	}
}

// cheapest is the least number of used units in any sequence of slabs and runs
// that is long enough and may go, -1 if there is none.
func cheapest(a *Allocator, units uint32, movable func(uint32) bool) int {
	best := -1
	for x := range a.extents {
		e := &a.extents[x]
		for from := uint32(0); from < uint32(len(e.at)); from++ {
			if !a.begins(position{x, from}) {
				continue
			}
			cost := 0
			for g := from; g < uint32(len(e.at)) && cost >= 0; {
				if r, ok := e.at[g].run(); ok {
					g += a.runs.recs[r].grains
				} else {
					s, _ := e.at[g].slab()
					sl := &a.slabs[s]
					for i := range sl.slots {
						if !sl.free(i) && (!movable(sl.owner(i)) || a.classes[sl.class].units == units) {
							cost = -1 << 40
						}
					}
					cost += int(sl.used * a.classes[sl.class].units)
					g += sl.grains
				}
				if cost >= 0 && e.span(from, g-from) >= units && (best < 0 || cost < best) {
					best = cost
				}
			}
		}
	}
	return best
}

// One call looks at a bounded number of slots; the next ones see the rest.
func TestReclaimIsBoundedAndGoesOn(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 0, 256*mib, 256*mib, 256*mib)
	places := fill(a, 4096, 0)
	if len(places) != 3*256*256 {
		t.Fatalf("%d pages", len(places))
	}
	// Only the last page of each slab stays, but for one slab in the last extent.
	turn := uint32(0)
	for i, p := range places {
		if p.Extent == 3 {
			turn = uint32(i)
		}
	}
	s, _, _ := a.locate(places[turn])
	stays := map[uint32]bool{}
	for i := range a.slabs {
		if int32(i) != s {
			stays[a.slabs[i].owner(a.slabs[i].slots-1)] = true
		}
	}
	calls := 0
	for {
		looked := 0
		owners, ok := a.Reclaim(mib, func(o uint32) bool { looked++; return !stays[o] })
		if calls++; looked > reclaimMost+256 {
			t.Fatalf("call %d looked at %d slots", calls, looked)
		}
		if ok {
			if len(owners) != 256 || !slices.Contains(owners, turn) {
				t.Errorf("reclaim of %d owners", len(owners))
			}
			break
		}
		if calls > 5 {
			t.Fatal("the one slab that may go was never seen")
		}
	}
	if calls == 1 {
		t.Error("one call looked at everything: the bound is not tested")
	}
}

// Where a call stopped there may be something else when the next one begins.
func TestReclaimGoesOnAfterAChange(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 0, 512*mib)
	places := fill(a, 4096, 0)
	if _, ok := a.Reclaim(2*mib, func(o uint32) bool { return o%256 != 255 }); ok || a.cursor.grain == 0 {
		t.Fatalf("reclaim %v, stopped at %+v: want in the middle", ok, a.cursor)
	}
	for _, p := range places {
		a.Free(p)
	}
	if owners, ok := a.Reclaim(512*mib, none); !ok || len(owners) > 0 {
		t.Errorf("reclaim of an empty extent from its middle: %v, %v", owners, ok)
	}
	fill(a, 5*mib, 0)
	if owners, ok := a.Reclaim(3*mib, all); !ok || len(owners) != 1 {
		t.Errorf("reclaim %v, %v; want one page", owners, ok)
	}
}

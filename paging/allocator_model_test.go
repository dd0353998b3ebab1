package paging

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// model is what an allocator says it did, and the units that are taken.
type model struct {
	t       *testing.T
	a       *Allocator
	r       *rand.Rand
	start   uint64
	bytes   map[ExtentID]uint64
	taken   map[ExtentID][]bool
	pages   map[Place]modelPage
	order   []Place
	byOwner map[uint32][]Place
}

type modelPage struct {
	size  uint64
	owner uint32
	class uint64
}

func newModel(t *testing.T, c AllocatorConfig, r *rand.Rand, start uint64) *model {
	return &model{t: t, a: NewAllocator(c), r: r, start: start, bytes: map[ExtentID]uint64{}, taken: map[ExtentID][]bool{}, pages: map[Place]modelPage{}, byOwner: map[uint32][]Place{}}
}

func (m *model) addExtent(id ExtentID, bytes uint64) {
	if err := m.a.AddExtent(id, m.start, bytes); err != nil {
		m.t.Fatal(err)
	}
	m.bytes[id], m.taken[id] = bytes, make([]bool, bytes/UnitBytes)
}

func (m *model) alloc(size uint64, owner uint32) bool {
	p, ok := m.a.Alloc(size, owner)
	if !ok {
		m.noRoom(size)
		return false
	}
	m.note(p, size, owner)
	return true
}

// note checks that a place is aligned, inside its extent and free, and takes it.
func (m *model) note(p Place, size uint64, owner uint32) {
	m.t.Helper()
	slot := (size + UnitBytes - 1) / UnitBytes * UnitBytes
	if p.Offset%UnitBytes != 0 || p.Offset < m.start || p.Offset-m.start+slot > m.bytes[p.Extent] {
		m.t.Fatalf("a page of %d bytes at %+v", size, p)
	}
	if got, ok := m.a.Owner(p); !ok || got != owner || m.a.SlotSize(p) != slot {
		m.t.Fatalf("%+v: owner %d, %v, slot of %d bytes; want %d and %d", p, got, ok, m.a.SlotSize(p), owner, slot)
	}
	taken := m.taken[p.Extent][(p.Offset-m.start)/UnitBytes:][:slot/UnitBytes]
	for i, x := range taken {
		if x {
			m.t.Fatalf("a page of %d bytes at %+v overlaps another at unit %d", size, p, i)
		}
		taken[i] = true
	}
	m.pages[p] = modelPage{size: size, owner: owner, class: slot}
	m.order = append(m.order, p)
	m.byOwner[owner] = append(m.byOwner[owner], p)
}

// noRoom checks that a refusal is right: no slot of the class is free and no free
// run is long enough.
func (m *model) noRoom(size uint64) {
	m.t.Helper()
	units := unitsOf(size)
	for i := range m.a.slabs {
		if s := &m.a.slabs[i]; s.extent >= 0 && m.a.classes[s.class].units == units && s.used < s.slots {
			m.t.Fatalf("no room for %d bytes although a slab has %d of %d slots free", size, s.slots-s.used, s.slots)
		}
	}
	for _, r := range m.a.runs.recs {
		if r.extent >= 0 && r.units >= units {
			m.t.Fatalf("no room for %d bytes although %d units are free in a row", size, r.units)
		}
	}
}

func (m *model) free(p Place) {
	page := m.pages[p]
	m.a.Free(p)
	taken := m.taken[p.Extent][(p.Offset-m.start)/UnitBytes:][:page.class/UnitBytes]
	for i := range taken {
		taken[i] = false
	}
	delete(m.pages, p)
	m.byOwner[page.owner] = slices.DeleteFunc(m.byOwner[page.owner], func(q Place) bool { return q == p })
	if len(m.byOwner[page.owner]) == 0 {
		delete(m.byOwner, page.owner)
	}
	m.order = slices.DeleteFunc(m.order, func(q Place) bool { return q == p })
}

func (m *model) freeRandom() {
	if len(m.order) > 0 {
		m.free(m.order[m.r.IntN(len(m.order))])
	}
}

// reclaim asks for room for size, and holds the answer to what it promises.
func (m *model) reclaim(size uint64) {
	movable := map[uint32]bool{}
	for o := range m.byOwner {
		movable[o] = true
	}
	for o := range m.byOwner {
		if m.r.IntN(3) == 0 {
			movable[o] = false
		}
	}
	owners, ok := m.a.Reclaim(size, func(o uint32) bool { return movable[o] })
	if !ok {
		return
	}
	if !slices.IsSorted(owners) || len(slices.Compact(slices.Clone(owners))) != len(owners) {
		m.t.Fatalf("owners %v are not distinct", owners)
	}
	for _, o := range owners {
		if !movable[o] {
			m.t.Fatalf("owner %d is not movable", o)
		}
		for _, p := range slices.Clone(m.byOwner[o]) {
			m.free(p)
		}
	}
	if !m.alloc(size, m.r.Uint32N(400)) {
		m.t.Fatalf("no room for %d bytes after owners %v are gone", size, owners)
	}
}

// check compares all sums and the structure of the allocator with the model.
func (m *model) check() {
	m.t.Helper()
	var want AllocUsage
	classes := map[uint64]*ClassUsage{}
	for _, b := range m.bytes {
		want.CapacityBytes += b
		want.Extents++
	}
	for _, p := range m.pages {
		want.Slots++
		want.PageBytes += p.size
		want.UsedBytes += p.class
		if classes[p.class] == nil {
			classes[p.class] = &ClassUsage{SlotBytes: p.class}
		}
		classes[p.class].UsedSlots++
		classes[p.class].PageBytes += p.size
	}
	want.FreeBytes = want.CapacityBytes - want.UsedBytes
	got := m.a.Usage()
	for _, c := range m.a.UsageByClass() {
		want.SlabBytes += c.SlabBytes
		w := classes[c.SlotBytes]
		if w == nil {
			w = &ClassUsage{SlotBytes: c.SlotBytes}
		}
		w.Slots, w.SlabBytes = c.Slots, c.SlabBytes
		if c != *w || c.Slots*c.SlotBytes > c.SlabBytes || c.UsedSlots > c.Slots {
			m.t.Fatalf("class %+v, want %+v", c, *w)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.t.Fatalf("usage (-want +got):\n%s", diff)
	}
	m.a.verify(m.t)
}

// verify walks all of an allocator.
func (a *Allocator) verify(t *testing.T) {
	t.Helper()
	listed := map[int32]bool{}
	for c := range a.classes {
		prev := int32(-1)
		for s := a.classes[c].partial; s >= 0; prev, s = s, a.slabs[s].next {
			if sl := &a.slabs[s]; listed[s] || sl.prev != prev || int(sl.class) != c || sl.used == 0 || sl.used == sl.slots {
				t.Fatalf("slab %d (%d of %d slots used) is in the wrong list", s, sl.used, sl.slots)
			}
			listed[s] = true
		}
		if s := a.classes[c].spare; s >= 0 {
			listed[s] = true
			if a.slabs[s].used != 0 || int(a.slabs[s].class) != c {
				t.Fatalf("the spare slab of class %d holds pages", c)
			}
		}
	}
	runs, slabs := 0, 0
	for i := range a.extents {
		e := &a.extents[i]
		afterRun, used := false, uint32(0)
		for g := uint32(0); g < uint32(len(e.at)); {
			if r, ok := e.at[g].run(); ok {
				rec := a.runs.recs[r]
				if afterRun || rec.extent != int32(i) || rec.first != g || e.at[g+rec.grains-1] != e.at[g] || rec.units != e.span(g, rec.grains) {
					t.Fatalf("run %+v at grain %d of extent %d", rec, g, e.id)
				}
				for k := uint32(1); k+1 < rec.grains; k++ {
					if e.at[g+k] != noTag {
						t.Fatalf("grain %d inside a free run says %d", g+k, e.at[g+k])
					}
				}
				g, afterRun = g+rec.grains, true
				runs++
				continue
			}
			s, ok := e.at[g].slab()
			if !ok {
				t.Fatalf("nothing at grain %d of extent %d", g, e.id)
			}
			sl := &a.slabs[s]
			if sl.extent != int32(i) || sl.first != g || sl.slots*a.classes[sl.class].units > e.span(g, sl.grains) {
				t.Fatalf("slab %+v at grain %d of extent %d", *sl, g, e.id)
			}
			if listed[s] == (sl.used == sl.slots) {
				t.Fatalf("slab with %d of %d slots used is listed: %v", sl.used, sl.slots, listed[s])
			}
			n := uint32(0)
			for k := range sl.slots {
				if !sl.free(k) {
					n++
				}
			}
			if n != sl.used {
				t.Fatalf("slab has %d slots in use, says %d", n, sl.used)
			}
			used += n
			g, afterRun = g+sl.grains, false
			slabs++
		}
		if used != e.used {
			t.Fatalf("extent %d has %d slots in use, says %d", e.id, used, e.used)
		}
	}
	if runs != len(a.runs.recs)-len(a.runs.unused) || slabs != len(a.slabs)-len(a.unusedSlabs) {
		t.Fatalf("%d runs and %d slabs found, %d and %d kept", runs, slabs, len(a.runs.recs)-len(a.runs.unused), len(a.slabs)-len(a.unusedSlabs))
	}
}

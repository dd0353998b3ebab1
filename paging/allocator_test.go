package paging

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const mib = 1 << 20

func extents(t testing.TB, c AllocatorConfig, start uint64, bytes ...uint64) *Allocator {
	t.Helper()
	a := NewAllocator(c)
	for i, b := range bytes {
		if err := a.AddExtent(ExtentID(i+1), start, b); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// seeds are the seeds of a random test: a fixed slice, or as many as
// KVTIER_TORTURE says from KVTIER_SEED on.
func seeds(t *testing.T, n int) []uint64 {
	t.Helper()
	first, _ := strconv.ParseUint(os.Getenv("KVTIER_SEED"), 10, 64)
	if rounds, _ := strconv.Atoi(os.Getenv("KVTIER_TORTURE")); rounds > 0 {
		n = rounds
	}
	all := make([]uint64, n)
	for i := range all {
		all[i] = first + uint64(i) + 1
	}
	t.Logf("seeds %d to %d", all[0], all[n-1])
	return all
}

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

// mixes are the page sizes of a random history.
var mixes = map[string]func(r *rand.Rand) uint64{
	"one size":    func(*rand.Rand) uint64 { return 64 << 10 },
	"odd size":    func(*rand.Rand) uint64 { return 69_632 },
	"small":       func(r *rand.Rand) uint64 { return 1 + r.Uint64N(128<<10) },
	"few sizes":   func(r *rand.Rand) uint64 { return []uint64{4096, 60_000, 262_144, 300_000, mib, 3 * mib}[r.IntN(6)] },
	"all sizes":   func(r *rand.Rand) uint64 { return 1 + r.Uint64N(1<<(12+r.IntN(12))) },
	"large sizes": func(r *rand.Rand) uint64 { return mib + r.Uint64N(7*mib) },
}

func TestAllocatorAgainstModel(t *testing.T) {
	for _, seed := range seeds(t, 6) {
		for _, whole := range []bool{false, true} {
			for name, size := range mixes {
				t.Run(fmt.Sprintf("%s/whole=%v/seed=%d", name, whole, seed), func(t *testing.T) {
					r := rand.New(rand.NewPCG(seed, 2))
					history(t, newModel(t, AllocatorConfig{WholeExtents: whole}, r, uint64(r.IntN(3))*16384), size)
				})
			}
		}
	}
}

// history fills, churns, turns over and drains an allocator.
func history(t *testing.T, m *model, size func(*rand.Rand) uint64) {
	for id := range ExtentID(4) {
		m.addExtent(id+1, 8*mib+uint64(m.r.IntN(40))*UnitBytes)
	}
	next := ExtentID(5)
	for step := range 1500 {
		switch m.r.IntN(20) {
		case 0:
			if len(m.bytes) < 7 {
				m.addExtent(next, 8*mib+uint64(m.r.IntN(500))*UnitBytes)
				next++
			}
		case 1:
			for _, id := range m.a.EmptyExtents() {
				if len(m.bytes) > 2 {
					m.removeExtent(id)
				}
			}
		case 2, 3:
			m.reclaim(size(m.r))
		case 4, 5, 6, 7, 8:
			m.freeRandom()
		case 9:
			for range m.r.IntN(100) {
				m.freeRandom()
			}
		default:
			m.alloc(size(m.r), m.r.Uint32N(400))
		}
		if step%50 == 0 {
			m.check()
		}
	}
	m.check()
	for len(m.order) > 0 {
		m.freeRandom()
	}
	m.check()
	ids := m.a.EmptyExtents()
	if len(ids) != len(m.bytes) {
		t.Fatalf("%d of %d extents are empty after all pages are gone", len(ids), len(m.bytes))
	}
	for _, id := range ids {
		m.removeExtent(id)
	}
	m.check()
	if u := m.a.Usage(); u != (AllocUsage{}) {
		t.Errorf("usage without extents: %+v", u)
	}
}

func (m *model) removeExtent(id ExtentID) {
	m.t.Helper()
	if err := m.a.RemoveExtent(id); err != nil {
		m.t.Fatal(err)
	}
	delete(m.bytes, id)
	delete(m.taken, id)
}

// Of an extent that one class fills, at most about 6 % is not page bytes,
// rounding to 4 KiB apart.
func TestAllocatorWaste(t *testing.T) {
	sizes := []uint64{4096, 8192, 12288, 61440, 65536, 69632, 73728, 131072, 196608, 200704, 262144, 266240, 524288, 528384, mib, mib + 4096, 2 * mib, 5 * mib, 16*mib + 4096, 100 * mib, 128 * mib}
	for _, bytes := range []uint64{8 * mib, 64 * mib, 1024 * mib} {
		start := bytes / 4096 * 8 // the table of generations
		for _, size := range sizes {
			if size*16 > bytes && size < bytes/2 {
				continue // fewer than 16 pages: the rest of the last one may be more
			}
			if size > bytes-start {
				continue
			}
			a := extents(t, AllocatorConfig{}, start, bytes-start)
			for {
				if _, ok := a.Alloc(size, 0); !ok {
					break
				}
			}
			best := (bytes - start) / size * size
			if got := a.Usage().UsedBytes; float64(got) < .94*float64(best) {
				t.Errorf("pages of %d bytes use %d of an extent of %d, %d would fit", size, got, bytes-start, best)
			}
		}
	}
}

// Room that one class leaves can be used by another, whole and in time.
func TestAllocatorClassesGrowAndShrink(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 0, 64*mib, 64*mib)
	fill := func(size uint64) (places []Place) {
		for {
			p, ok := a.Alloc(size, 1)
			if !ok {
				return places
			}
			places = append(places, p)
		}
	}
	for _, size := range []uint64{4096, 69_632, 2 * mib, 65_536, 40 * mib, 300_000} {
		places := fill(size)
		if got, want := a.Usage().UsedBytes, uint64(128*mib)*9/10; got < want && size < 40*mib {
			t.Errorf("pages of %d bytes fill %d of %d bytes after another class has left", size, got, 128*mib)
		}
		for _, p := range places {
			a.Free(p)
		}
		a.verify(t)
	}
}

func TestAllocatorRefuses(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 8192, mib)
	for _, c := range []struct {
		what         string
		id           ExtentID
		start, bytes uint64
	}{
		{"id 0", 0, 0, mib}, {"the same id", 1, 0, mib}, {"odd start", 2, 100, mib}, {"odd length", 2, 0, mib + 1}, {"no length", 2, 0, 0}, {"far too long", 2, 0, 1 << 60},
	} {
		if err := a.AddExtent(c.id, c.start, c.bytes); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	for _, size := range []uint64{0, mib + 1, 1 << 63} {
		if p, ok := a.Alloc(size, 1); ok {
			t.Errorf("a page of %d bytes at %+v", size, p)
		}
	}
	p, ok := a.Alloc(10_000, 7)
	if !ok {
		t.Fatal("no room")
	}
	for _, q := range []Place{{}, {2, p.Offset}, {1, p.Offset + 4096}, {1, p.Offset + 1}, {1, 0}, {1, mib + 8192}, {1, 1 << 63}} {
		if owner, ok := a.Owner(q); ok || a.SlotSize(q) != 0 {
			t.Errorf("%+v has owner %d and %d bytes", q, owner, a.SlotSize(q))
		}
	}
	if err := a.RemoveExtent(1); !errors.Is(err, ErrInvalid) {
		t.Errorf("remove an extent in use: %v", err)
	}
	if err := a.RemoveExtent(9); !errors.Is(err, ErrNotFound) {
		t.Errorf("remove an unknown extent: %v", err)
	}
	if err := a.Restore(p, 10_000, 1); !errors.Is(err, ErrInvalid) {
		t.Errorf("restore without whole extents: %v", err)
	}
}

func TestAllocatorRestore(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	sizes := []uint64{5000, 65_536, 70_000, mib}
	old := newModel(t, AllocatorConfig{WholeExtents: true}, r, 4096)
	for id := range ExtentID(8) {
		old.addExtent(id+1, 4*mib)
	}
	for range 2000 {
		if !old.alloc(sizes[r.IntN(len(sizes))], r.Uint32()) || r.IntN(3) == 0 {
			old.freeRandom()
		}
	}
	m := newModel(t, AllocatorConfig{WholeExtents: true}, r, 4096)
	for id := range ExtentID(8) {
		m.addExtent(id+1, 4*mib)
	}
	r.Shuffle(len(old.order), func(i, j int) { old.order[i], old.order[j] = old.order[j], old.order[i] })
	for _, p := range old.order {
		if err := m.a.Restore(p, old.pages[p].size, old.pages[p].owner); err != nil {
			t.Fatal(err)
		}
		m.note(p, old.pages[p].size, old.pages[p].owner)
	}
	m.check()
	if old.a.Usage().Slots == 0 {
		t.Fatal("nothing to restore")
	}
	p := m.order[0]
	size := m.pages[p].size
	for what, try := range map[string]func() error{
		"a taken place":      func() error { return m.a.Restore(p, size, 1) },
		"another size":       func() error { return m.a.Restore(Place{p.Extent, 4096}, size+UnitBytes, 1) },
		"an unknown extent":  func() error { return m.a.Restore(Place{99, 4096}, size, 1) },
		"before the extent":  func() error { return m.a.Restore(Place{p.Extent, 0}, size, 1) },
		"beyond the extent":  func() error { return m.a.Restore(Place{p.Extent, 4096 + 4*mib}, size, 1) },
		"an unaligned place": func() error { return m.a.Restore(Place{p.Extent, p.Offset + 1}, size, 1) },
		"no size":            func() error { return m.a.Restore(p, 0, 1) },
	} {
		if err := try(); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	m.check()
	for range 500 {
		m.alloc(sizes[r.IntN(len(sizes))], r.Uint32())
		m.freeRandom()
	}
	m.check()
}

// An extent that ran empty can be restored with another size.
func TestAllocatorRestoreOverSpare(t *testing.T) {
	a := extents(t, AllocatorConfig{WholeExtents: true}, 0, mib)
	p, _ := a.Alloc(8192, 1)
	a.Free(p)
	if err := a.Restore(Place{1, 65536}, 65536, 2); err != nil {
		t.Fatal(err)
	}
	if o, ok := a.Owner(Place{1, 65536}); !ok || o != 2 {
		t.Errorf("owner %d, %v", o, ok)
	}
	a.verify(t)
}

func TestAllocatorSetOwner(t *testing.T) {
	a := extents(t, AllocatorConfig{}, 0, mib)
	p, ok := a.Alloc(5000, 7)
	if !ok {
		t.Fatal("no slot")
	}
	if !a.SetOwner(p, 8) || a.PageSize(p) != 5000 {
		t.Errorf("after SetOwner the page has %d bytes, want 5000", a.PageSize(p))
	}
	if owner, ok := a.Owner(p); owner != 8 || !ok {
		t.Errorf("owner %d, %v, want 8", owner, ok)
	}
	a.Free(p)
	if a.SetOwner(p, 9) || a.PageSize(p) != 0 {
		t.Errorf("a free slot has an owner or a page of %d bytes", a.PageSize(p))
	}
}

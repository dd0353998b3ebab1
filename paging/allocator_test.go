package paging

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
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

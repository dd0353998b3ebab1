package hbm

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/arena"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.ensureSigM")) }

func hostDevice(t *testing.T, strict bool) gpu.Device {
	t.Helper()
	d, err := host.Open(host.Config{MemoryBytes: 1 << 30, PageSum: paging.Checksum, Strict: strict})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeDevice(t, d) })
	return d
}

// closeDevice also finds what a tier left behind.
func closeDevice(t *testing.T, d gpu.Device) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func open(t *testing.T, cfg Config) *Arena {
	t.Helper()
	a, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// grown waits until all extents exist.
func grown(t *testing.T, a *Arena) *Arena {
	t.Helper()
	for range 10_000 {
		if !a.Usage().Growing {
			return a
		}
		wait()
	}
	t.Fatal("the arena did not grow")
	return nil
}

// conformance runs the suite of tiers on devices that open makes.
func conformance(t *testing.T, device func(t *testing.T) gpu.Device) {
	tiertest.Run(t, tiertest.Subject{Open: func(t *testing.T, budget int64, namespaces ...*paging.Namespace) tier.Tier {
		a, err := Open(t.Context(), Config{Device: device(t), BudgetBytes: budget, WorkingBytes: -1, MaxPageBytes: 4 << 20, Tenant: namespaces[0].Tenant})
		if err != nil {
			t.Fatal(err)
		}
		return grown(t, a)
	}})
}

func TestConformanceOnHost(t *testing.T) {
	conformance(t, func(t *testing.T) gpu.Device { return hostDevice(t, false) })
}

func TestConformanceOnStrictHost(t *testing.T) {
	conformance(t, func(t *testing.T) gpu.Device { return hostDevice(t, true) })
}

func TestConfig(t *testing.T) {
	d := hostDevice(t, false)
	for name, bad := range map[string]Config{
		"no device":      {BudgetBytes: 8 << 20},
		"no budget":      {Device: d},
		"long pages":     {Device: d, BudgetBytes: 8 << 20, MaxPageBytes: 8 << 20},
		"short extents":  {Device: d, BudgetBytes: 64 << 20, MaxPageBytes: 4 << 20, ExtentBytes: 2 << 20},
		"many extents":   {Device: d, BudgetBytes: 64 << 20, MaxPageBytes: 4096, ExtentBytes: 4096},
		"working is all": {Device: d, BudgetBytes: 64 << 20, WorkingBytes: 64 << 20},
	} {
		if _, err := Open(t.Context(), bad); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: got %v, want %v", name, err, paging.ErrInvalid)
		}
	}
	if _, err := Open(t.Context(), Config{Device: d, BudgetBytes: 2 << 30, WorkingBytes: -1, ExtentBytes: 2 << 30}); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("an extent that the device has not the memory for: %v", err)
	}
	noSums, err := host.Open(host.Config{MemoryBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), Config{Device: noSums, BudgetBytes: 8 << 20}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a device that cannot sum pages: %v", err)
	}
	closeDevice(t, noSums)
}

// batch is pages with their bytes, in memory that is registered or not.
type batch struct {
	pages []tier.Page
	bytes [][]byte
	refs  []tier.Ref
	errs  []error
}

func newBatch(t *testing.T, a *Arena, memory []byte, sizes ...uint32) *batch {
	t.Helper()
	b := &batch{errs: make([]error, len(sizes))}
	ns := tiertest.Namespace(1).ID()
	for i, size := range sizes {
		p, content := tiertest.Page(ns, uint64(i), size)
		if memory != nil {
			at := memory[:size:size]
			memory = memory[arena.SlotSize(size):]
			copy(at, content)
			content = at
		}
		r, err := a.Alloc("default", size, uint32(i+1))
		if err != nil {
			t.Fatal(err)
		}
		b.pages, b.bytes, b.refs = append(b.pages, p), append(b.bytes, content), append(b.refs, r)
	}
	return b
}

func (b *batch) ok(t *testing.T, what string) {
	t.Helper()
	for i, err := range b.errs {
		if err != nil {
			t.Errorf("%s of page %d (%d bytes): %v", what, i, b.pages[i].Bytes, err)
		}
	}
}

// Pages go in and out in batches, from memory that is registered and from memory
// that is not, and a slot that somebody wrote to is found when its page leaves.
func TestBatches(t *testing.T) {
	a := grown(t, open(t, Config{Device: hostDevice(t, true), BudgetBytes: 64 << 20}))
	ram, err := shm.CreateExtent("kvtier-test", 32<<20, shm.Options{NUMANode: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	release := a.Register(ram.Bytes())
	defer release()
	sizes := []uint32{65536, 65536, 65536, 1, 4097, 16, 65536, 5<<20 + 3, 2 << 20, 2 << 20}
	for name, memory := range map[string][]byte{"registered": ram.Bytes(), "through the detour": nil} {
		b := newBatch(t, a, memory, sizes...)
		a.Fill(b.pages, b.bytes, b.refs, b.errs)
		b.ok(t, name+": fill")
		out := make([][]byte, len(sizes))
		for i, size := range sizes {
			out[i] = make([]byte, size)
			if memory != nil {
				out[i] = b.bytes[i]
				clear(out[i])
			}
			if got := paging.Checksum(a.Bytes(b.refs[i], size)); got != b.pages[i].Sum {
				t.Errorf("%s: page %d is not in its slot", name, i)
			}
		}
		a.Bytes(b.refs[1], 1)[0] ^= 1
		a.Bytes(b.refs[4], 1)[0] ^= 1
		a.LoadAll(b.pages, b.refs, out, b.errs)
		for i := range sizes {
			if i == 1 || i == 4 {
				if !errors.Is(b.errs[i], paging.ErrCorrupt) {
					t.Errorf("%s: page %d was written to in its slot: %v", name, i, b.errs[i])
				}
			} else if b.errs[i] != nil || paging.Checksum(out[i]) != b.pages[i].Sum {
				t.Errorf("%s: load of page %d: %v", name, i, b.errs[i])
			}
		}
		wrong := b.pages[0]
		wrong.Sum++
		a.Fill([]tier.Page{wrong}, b.bytes[:1], b.refs[:1], b.errs[:1])
		if !errors.Is(b.errs[0], paging.ErrCorrupt) {
			t.Errorf("%s: fill with bytes of another sum: %v", name, b.errs[0])
		}
		a.Free(b.refs...)
	}
}

// The numbers of extents name their places, and a table comes before its extent.
func TestHanded(t *testing.T) {
	a := grown(t, open(t, Config{Device: hostDevice(t, false), BudgetBytes: 64 << 20}))
	r, err := a.Alloc("x", 4096, 1)
	if err != nil {
		t.Fatal(err)
	}
	list := a.Extents("x")
	if len(list) != 2 || list[0].Kind != shm.KindPoolTable || list[1].Kind != shm.KindPool || list[0].ID != list[1].ID {
		t.Fatalf("handed over: %+v", list)
	}
	s := a.Slot(r, 4096, 0)
	if s.Extent != list[1].ID || s.Extent < poolIDs || s.Extent >= 2*poolIDs || s.Extent%maxPlaces >= 7 {
		t.Errorf("extent %#x", uint32(s.Extent))
	}
	pool, err := shm.MapReadOnly(list[1].FD, list[1].Bytes)
	if err != nil {
		t.Fatal(err)
	}
	table, err := shm.MapReadOnly(list[0].FD, list[0].Bytes)
	if err != nil {
		t.Fatal(err)
	}
	copy(a.Bytes(r, 4096), "seen in place")
	if got := string(pool.Bytes()[s.Offset:][:13]); got != "seen in place" {
		t.Errorf("an engine reads %q", got)
	}
	if got := shm.TableOf(table.Bytes()).Load(s.Offset); got != s.Generation || got == 0 {
		t.Errorf("generation %d, want %d", got, s.Generation)
	}
	if err := errors.Join(pool.Close(), table.Close()); err != nil {
		t.Error(err)
	}
	if _, err := shm.MapReadWrite(list[1].FD, list[1].Bytes); !errors.Is(err, paging.ErrIO) {
		t.Errorf("a pool can be mapped for writing: %v", err)
	}
}

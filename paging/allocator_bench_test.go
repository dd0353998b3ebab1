package paging

import (
	"math/rand/v2"
	"testing"
)

// The steady state of a full arena: one page goes, one comes.
func BenchmarkAllocFree(b *testing.B) {
	for _, c := range []struct {
		name  string
		sizes []uint64
	}{{"64KiB", []uint64{64 << 10}}, {"mixed", []uint64{4096, 68 << 10, 256 << 10, mib, 2 * mib}}} {
		b.Run(c.name, func(b *testing.B) {
			a := NewAllocator(AllocatorConfig{})
			for id := range ExtentID(16) {
				if err := a.AddExtent(id+1, 2*mib, 1022*mib); err != nil {
					b.Fatal(err)
				}
			}
			r := rand.New(rand.NewPCG(1, 1))
			live := make([]Place, 20_000)
			for i := range live {
				live[i], _ = a.Alloc(c.sizes[i%len(c.sizes)], uint32(i))
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				j := r.IntN(len(live))
				a.Free(live[j])
				live[j], _ = a.Alloc(c.sizes[i%len(c.sizes)], uint32(i))
			}
		})
	}
}

// The worst case of a page that comes and goes at the edge of a slab.
func BenchmarkAllocFreeAtSlabEdge(b *testing.B) {
	a := extents(b, AllocatorConfig{}, 0, 1024*mib)
	b.ReportAllocs()
	for b.Loop() {
		p, _ := a.Alloc(4096, 1)
		a.Free(p)
	}
}

func BenchmarkReclaim(b *testing.B) {
	a := extents(b, AllocatorConfig{}, 0, 1024*mib, 1024*mib)
	fill(a, 64<<10, 0)
	b.Run("any", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			a.Reclaim(256<<10, all)
		}
	})
	b.Run("nothing may go", func(b *testing.B) {
		for b.Loop() {
			a.Reclaim(256<<10, none)
		}
	})
}

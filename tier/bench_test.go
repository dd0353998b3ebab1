package tier_test

import (
	"fmt"
	"testing"

	"github.com/kvtier/kvtier/paging/check"
	"github.com/kvtier/kvtier/tier"
)

// resident opens a Hierarchy with so many resident blocks in chains of 64.
func resident(tb testing.TB, blocks int) *kit {
	k := open(tb, plain(4096), int64(blocks)*4096*9/8+1<<20, tier.Config{})
	for c := range blocks / 64 {
		if out := k.put(chain(c, 0, 64), 0, 0, tier.CommitOptions{}); !all(out, tier.Committed) {
			tb.Fatalf("chain %d: %v", c, out)
		}
	}
	return k
}

func BenchmarkFetch64(b *testing.B) {
	for _, blocks := range []int{1 << 14, 1 << 17} {
		b.Run(fmt.Sprintf("of=%d", blocks), func(b *testing.B) {
			k := resident(b, blocks)
			chains := blocks / 64
			reqs := make([]tier.FetchRequest, chains)
			for c := range reqs {
				reqs[c] = tier.FetchRequest{Namespace: k.id, Names: chain(c, 0, 64)}
			}
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				hold, err := k.Fetch(b.Context(), reqs[i*7919%chains])
				if err != nil || hold.Usable != 64 {
					b.Fatal(err)
				}
				hold.Release()
				i++
			}
		})
	}
}

func BenchmarkLookup64(b *testing.B) {
	k := resident(b, 1<<14)
	names := chain(3, 0, 64)
	b.ReportAllocs()
	for b.Loop() {
		if p, err := k.Lookup(k.id, names, 0); err != nil || p.Usable != 64 {
			b.Fatal(p, err)
		}
	}
}

// A resident prefix is granted with a fixed number of allocations, however long
// it is, and without reading or copying a byte of it.
func TestHitPathAllocations(t *testing.T) {
	if check.Enabled {
		t.Skip("counts only without the race detector")
	}
	k := resident(t, 1024)
	before := k.Metrics()
	allocs := func(n int) float64 {
		req := tier.FetchRequest{Namespace: k.id, Names: chain(1, 0, n)}
		return testing.AllocsPerRun(200, func() {
			hold, err := k.Fetch(t.Context(), req)
			if err != nil || hold.Usable != n {
				t.Fatal(err)
			}
			hold.Release()
		})
	}
	if one, many := allocs(1), allocs(64); many > one || many > 8 {
		t.Errorf("%v allocations for 64 blocks, %v for one", many, one)
	}
	after := k.Metrics()
	if after.LoadedBytes != before.LoadedBytes || after.CommittedBytes != before.CommittedBytes {
		t.Errorf("a hit moved bytes: %+v", after)
	}
}

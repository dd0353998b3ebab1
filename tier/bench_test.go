package tier_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/nvme"
	"github.com/kvtier/kvtier/tier/tiertest"
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

// emptyDisk enumerates records of pages that are nowhere, for the cost of an index.
type emptyDisk struct {
	tiertest.Faulty
	ns    *paging.Namespace
	pages int
}

func (d *emptyDisk) Namespaces() []*paging.Namespace { return []*paging.Namespace{d.ns} }

func (d *emptyDisk) Recover(ctx context.Context, keep func(tier.Record) (uint32, bool), _ func(done, about int64)) error {
	id := d.ns.ID()
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range d.pages {
		r := tier.Record{Ref: tier.Ref(i + 1)}
		r.ID.Namespace = id
		for j := range 4 {
			binary.LittleEndian.PutUint64(r.ID.Name[8*j:], rng.Uint64())
		}
		r.Bytes = uint32(d.ns.Layout.Parts[0].PageBytes)
		r.Meta = rng.Uint64() >> 8
		if _, ok := keep(r); !ok {
			return paging.ErrInvalid
		}
	}
	return nil
}

// BenchmarkIndex measures what a page on disk costs in memory, policies
// included, and how long it takes to load.
func BenchmarkIndex(b *testing.B) {
	const pages = 1 << 20
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		d := &emptyDisk{ns: plain(256 << 10), pages: pages}
		d.Durable = tiertest.NewMap(tier.NVMe, 1<<50)
		began := time.Now()
		k := open(b, d.ns, 1<<20, tier.Config{Durable: d})
		b.ReportMetric(float64(time.Since(began).Nanoseconds())/pages, "ns/page")
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/pages, "B/page")
		k.Close(b.Context())
	}
}

// BenchmarkDisk stores and loads pages through a real disk.
func BenchmarkDisk(b *testing.B) {
	const bytes, blocks = 256 << 10, 2048
	d, err := nvme.Open(nvme.Config{Dir: b.TempDir(), BudgetBytes: 1 << 30})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	k := open(b, plain(bytes), 128<<20, tier.Config{Durable: d})
	page := make([]byte, bytes)
	c := 0
	b.Run("write", func(b *testing.B) {
		b.SetBytes(bytes * blocks)
		for b.Loop() {
			for i := 0; i < blocks; i += 64 {
				names := chain(c, i, 64)
				a, _, _, err := k.Reserve(b.Context(), tier.ReserveRequest{Namespace: k.id, Names: names, First: i, Deadline: time.Now().Add(time.Minute)})
				if err != nil || a == nil {
					b.Fatal(err)
				}
				rows := make([]tier.CommitRow, 64)
				for j := range rows {
					rows[j] = tier.CommitRow{Row: j, Src: [][]byte{page}}
				}
				if out, err := a.Commit(b.Context(), rows, tier.CommitOptions{}); err != nil || !all(out, tier.Committed) {
					b.Fatal(out, err)
				}
				a.Abort()
			}
			c++
		}
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(bytes * 64)
		i := 0
		for b.Loop() {
			hold, err := k.Fetch(b.Context(), tier.FetchRequest{Namespace: k.id, Names: chain(c-1, i*64%blocks, 64), First: i * 64 % blocks})
			if err != nil || hold.Usable != 64 {
				b.Fatal(err, hold.Usable)
			}
			hold.Release()
			i++
		}
	})
}

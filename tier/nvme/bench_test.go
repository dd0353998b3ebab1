package nvme

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// benchDir is where the disk is: KVTIER_BENCH_DIR, or the temporary directory.
func benchDir(b *testing.B) string {
	if dir := os.Getenv("KVTIER_BENCH_DIR"); dir != "" {
		dir, err := os.MkdirTemp(dir, "nvme-bench")
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { os.RemoveAll(dir) })
		return dir
	}
	return b.TempDir()
}

// arena is aligned memory for n pages.
func arena(b testing.TB, n int, bytes uint32) [][]byte {
	slot := roundUp(int(bytes))
	mem, err := unix.Mmap(-1, 0, n*slot, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { unix.Munmap(mem) })
	pages := make([][]byte, n)
	for i := range pages {
		pages[i] = mem[i*slot : i*slot+int(bytes) : (i+1)*slot]
	}
	return pages
}

// BenchmarkAgainstRaw stores and loads a set of pages and, in turn, writes and
// reads a file of the same size with the same number of callers, both with
// direct I/O and to the last sync. Loads are verified.
func BenchmarkAgainstRaw(b *testing.B) {
	for _, bytes := range []uint32{256 << 10, 2 << 20} {
		for _, writers := range []int{2, 4} {
			b.Run(fmt.Sprintf("bytes=%dKiB/writers=%d", bytes>>10, writers), func(b *testing.B) {
				s := newRawBench(b, bytes, writers)
				for b.Loop() {
					s.round(b)
				}
				s.report(b)
			})
		}
	}
}

const benchSet = 512 << 20

type rawBench struct {
	tr      *Tier
	raw     *diskFile
	bytes   uint32
	writers int
	pages   []tier.Page
	mem     [][]byte // the arena: fewer than pages
	refs    []tier.Ref

	times map[string][]time.Duration
}

func newRawBench(b *testing.B, bytes uint32, writers int) *rawBench {
	dir := benchDir(b)
	n := benchSet / int(bytes)
	tr := mustOpen(b, Config{Dir: filepath.Join(dir, "tier"), BudgetBytes: benchSet + benchSet/4, AheadBytes: benchSet + benchSet/4})
	until(b, "segments pre-written", func() bool { return tr.Metrics().PrewrittenBytes >= benchSet+benchSet/8 })
	v := &diskVolume{dir: dir, direct: true, bounces: &bouncePool{}}
	f, err := v.Create("raw", benchSet)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { f.Close() })
	s := &rawBench{tr: tr, raw: f.(*diskFile), bytes: bytes, writers: writers, mem: arena(b, 64<<20/int(bytes), bytes),
		refs: make([]tier.Ref, n), times: map[string][]time.Duration{}}
	for i, page := range s.mem {
		tiertest.FillPage(page, testNS, uint64(i))
	}
	for i := range n {
		p := tiertest.Identity(testNS, uint64(i), s.mem[i%len(s.mem)])
		s.pages = append(s.pages, p)
	}
	s.rawWrite(b)
	clear(s.times)
	return s
}

func (s *rawBench) timed(what string, f func()) {
	began := time.Now()
	f()
	s.times[what] = append(s.times[what], time.Since(began))
}

func (s *rawBench) round(b *testing.B) {
	s.rawWrite(b)
	s.tierWrite(b)
	s.rawRead(b)
	s.tierRead(b)
	s.tr.Free(s.refs...)
	until(b, "slots freed", func() bool { return s.tr.Usage().DeadBytes == 0 })
}

func (s *rawBench) rawWrite(b *testing.B) {
	s.timed("raw-write", func() {
		var next atomic.Int64
		s.parallel(s.writers, func(int) {
			for {
				i := int(next.Add(1) - 1)
				if i >= len(s.refs) {
					return
				}
				if err := s.raw.WriteAt([][]byte{s.mem[i%len(s.mem)]}, int64(i)*int64(s.bytes)); err != nil {
					b.Error(err)
				}
			}
		})
		if err := s.raw.Sync(); err != nil {
			b.Error(err)
		}
	})
}

func (s *rawBench) parallel(n int, f func(int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// tierWrite stores in batches of 8 MiB, as a demotion does.
func (s *rawBench) tierWrite(b *testing.B) {
	batch := 8 << 20 / int(s.bytes)
	s.timed("tier-write", func() {
		var next atomic.Int64
		s.parallel(s.writers, func(int) {
			for {
				i := int(next.Add(int64(batch))) - batch
				if i >= len(s.refs) {
					return
				}
				src := make([][]byte, batch)
				for k := range src {
					src[k] = s.mem[(i+k)%len(s.mem)]
				}
				if err := s.tr.Store(b.Context(), s.pages[i:i+batch], src, make([]uint32, batch), s.refs[i:i+batch]); err != nil {
					b.Error(err)
				}
			}
		})
	})
}

func (s *rawBench) rawRead(b *testing.B) {
	order := rand.Perm(len(s.refs))
	s.timed("raw-read", func() {
		for k, i := range order {
			if err := s.raw.ReadAt(s.mem[k%len(s.mem)], int64(i)*int64(s.bytes)); err != nil {
				b.Error(err)
			}
		}
	})
}

func (s *rawBench) tierRead(b *testing.B) {
	order := rand.Perm(len(s.refs))
	s.timed("tier-read", func() {
		for k, i := range order {
			// A context that cannot end: the read runs in this goroutine.
			if err := s.tr.Load(context.Background(), s.pages[i], s.refs[i], s.mem[k%len(s.mem)]); err != nil {
				b.Error(err)
			}
		}
	})
	for i, page := range s.mem {
		tiertest.FillPage(page, testNS, uint64(i))
	}
}

func (s *rawBench) report(b *testing.B) {
	rate := func(what string) float64 {
		var sum time.Duration
		for _, d := range s.times[what] {
			sum += d
		}
		return float64(benchSet) * float64(len(s.times[what])) / sum.Seconds() / 1e6
	}
	for _, what := range []string{"raw-write", "tier-write", "raw-read", "tier-read"} {
		b.ReportMetric(rate(what), what+"-MB/s")
	}
	b.ReportMetric(rate("tier-write")/rate("raw-write"), "write-ratio")
	b.ReportMetric(rate("tier-read")/rate("raw-read"), "read-ratio")
	m := s.tr.Metrics()
	b.ReportMetric(m.WriteAmplification(), "write-amp")
	b.ReportMetric(float64(m.GroupPages)/float64(m.Groups), "pages/group")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkRecover reads an index of 200,000 pages.
func BenchmarkRecover(b *testing.B) {
	const pages = 200_000
	cfg := Config{Dir: filepath.Join(benchDir(b), "tier"), BudgetBytes: 1 << 30, AheadBytes: 1}
	tr := mustOpen(b, cfg)
	// Records alone: nothing is loaded.
	var put []record
	for n := range uint32(pages) {
		put = append(put, record{ref: refOf(paging.Place{Extent: 1, Offset: uint64(n) * paging.UnitBytes}), namespace: 1, bytes: 4096})
		if len(put) == 4096 {
			if err := tr.manifest.commit(put, nil); err != nil {
				b.Fatal(err)
			}
			put = put[:0]
		}
	}
	if err := tr.Close(); err != nil {
		b.Fatal(err)
	}
	var spent time.Duration
	for b.Loop() {
		b.StopTimer()
		tr := mustOpenOnly(b, cfg)
		b.StartTimer()
		began := time.Now()
		if err := tr.Recover(b.Context(), func(tier.Record) (uint32, bool) { return 1, true }, nil); err != nil {
			b.Fatal(err)
		}
		spent += time.Since(began)
		b.StopTimer()
		tr.Close()
		b.StartTimer()
	}
	b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N)/pages, "ns/record")
}

package transport

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// arena is anonymous memory of a benchmark: pages of one size, one after another.
func arena(b *testing.B, bytes int) []byte {
	m, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}

// rack is a Source of resident pages.
type rack struct {
	mem  []byte
	page int
	sums []uint64
}

func (r *rack) Open(_ context.Context, _ placement.NodeID, q *PageRequest) (Pages, error) {
	return &rackPages{r, q}, nil
}
func (r *rack) Have(context.Context, placement.NodeID, *HaveRequest) ([]Held, error) {
	return nil, paging.ErrUnavailable
}
func (r *rack) Doubt(placement.NodeID, paging.PageID) {}

type rackPages struct {
	r *rack
	q *PageRequest
}

func (p *rackPages) Page(i int) Content {
	row, _, length := p.q.At(i)
	n := numberOf(p.q.Blocks[row].Name)
	return Content{Bytes: p.r.mem[n*p.r.page:][:length], Sum: p.r.sums[n]}
}
func (p *rackPages) Load(context.Context, int, []byte) (uint64, error) { return 0, paging.ErrIO }
func (p *rackPages) Close()                                            {}

func numberOf(n paging.BlockName) int { return int(uint64(n[0])|uint64(n[1])<<8|uint64(n[2])<<16) - 1 }

// desk is a Sink of slots in an arena.
type desk struct {
	mem    []byte
	page   int
	failed int
}

func (d *desk) Slot(i int) ([]byte, error) { return d.mem[i*d.page:][:d.page], nil }
func (d *desk) Done(_ int, r Result) {
	if r.Err != nil {
		d.failed++
	}
}

const benchArena = 256 << 20

// BenchmarkPages fetches pages over loopback, in rounds that alternate with a
// plain TCP copy that checks XXH3 per 64 KiB, both in this process.
func BenchmarkPages(b *testing.B) {
	for _, c := range []struct {
		name string
		page int
		tls  bool
	}{{"256KiB", 256 << 10, false}, {"2MiB", 2 << 20, false}, {"tls/16KiB", 16 << 10, true}, {"tls/256KiB", 256 << 10, true}} {
		page := c.page
		b.Run(c.name, func(b *testing.B) {
			src, dst := arena(b, benchArena), arena(b, benchArena)
			n := benchArena / page
			r := &rack{mem: src, page: page, sums: make([]uint64, n)}
			for i := range n {
				pattern(src[i*page:][:page], 1, nameOf(i), 0)
				r.sums[i] = paging.Checksum(src[i*page:][:page])
			}
			ca := newAuthority(b)
			addrs := map[placement.NodeID]string{}
			var nodes [2]*Transport
			for k := range nodes {
				id := placement.NodeID{byte(k + 1)}
				conf := MuxConfig{ID: id, Cluster: "bench", Listen: "127.0.0.1:0", Resolve: func(id placement.NodeID) (string, bool) { return addrs[id], true }}
				if c.tls {
					conf.TLS = ca.issue(NodeName(id), nil)
				}
				m, err := OpenMux(conf)
				if err != nil {
					b.Fatal(err)
				}
				addrs[id] = m.Addr().String()
				if nodes[k], err = Open(Config{Mux: m, Source: r, StallAfter: 20 * time.Second}); err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { nodes[k].Close(); m.Close() })
			}
			plain := newPlainCopy(b, src, page)
			d := &desk{mem: dst, page: page}
			req := &FetchRequest{Namespace: ns, Sink: d}
			owners := []placement.NodeID{{1}}
			for i := range n {
				req.Pages = append(req.Pages, WantedPage{Name: nameOf(i), Bytes: uint32(page), Owners: owners})
			}
			b.SetBytes(2 * benchArena)
			var mine, theirs, mineCPU, theirsCPU time.Duration
			first := true
			for b.Loop() {
				t0, c0 := time.Now(), cpuTime()
				plain.copy(b, dst)
				t1, c1 := time.Now(), cpuTime()
				if err := nodes[1].Fetch(b.Context(), req); err != nil || d.failed > 0 {
					b.Fatal(err, d.failed)
				}
				t2, c2 := time.Now(), cpuTime()
				if first {
					first = false
					continue
				}
				theirs, mine = theirs+t1.Sub(t0), mine+t2.Sub(t1)
				theirsCPU, mineCPU = theirsCPU+c1-c0, mineCPU+c2-c1
			}
			rounds := float64(b.N-1) * benchArena / 1e9
			b.ReportMetric(rounds/mine.Seconds(), "GB/s")
			b.ReportMetric(rounds/theirs.Seconds(), "plain-GB/s")
			b.ReportMetric(theirs.Seconds()/mine.Seconds(), "ratio")
			b.ReportMetric(mineCPU.Seconds()/theirsCPU.Seconds(), "cpu-ratio")
			b.ReportMetric(mineCPU.Seconds()/rounds, "cpu-s/GB")
		})
	}
}

func cpuTime() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// plainCopy is the bound: four pages a write from an arena, each page read
// straight into another and summed by 64 KiB.
type plainCopy struct {
	page int
	conn net.Conn
	ask  chan struct{}
	sums []uint64
}

func newPlainCopy(b *testing.B, src []byte, page int) *plainCopy {
	p := &plainCopy{page: page, ask: make(chan struct{})}
	for rest := src; len(rest) > 0; rest = rest[paging.ChunkBytes:] {
		p.sums = append(p.sums, xxh3.Hash(rest[:paging.ChunkBytes]))
	}
	var n tcp
	l, err := n.Listen(b.Context(), "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		l.Close()
		if err != nil {
			return
		}
		defer c.Close()
		for range p.ask {
			for rest := src; len(rest) > 0; {
				var out net.Buffers
				for range 4 {
					if len(rest) > 0 {
						out, rest = append(out, rest[:page]), rest[page:]
					}
				}
				if _, err := out.WriteTo(c); err != nil {
					return
				}
			}
		}
	}()
	if p.conn, err = n.Dial(b.Context(), l.Addr().String()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { close(p.ask); p.conn.Close(); <-done })
	return p
}

func (p *plainCopy) copy(b *testing.B, dst []byte) {
	p.ask <- struct{}{}
	for at := 0; at < len(dst); at += paging.ChunkBytes {
		chunk := dst[at:][:paging.ChunkBytes]
		for got := 0; got < len(chunk); {
			n, err := p.conn.Read(chunk[got:])
			if err != nil {
				b.Fatal(err)
			}
			got += n
		}
		if xxh3.Hash(chunk) != p.sums[at/paging.ChunkBytes] {
			b.Fatal("wrong bytes")
		}
	}
}

package transport

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// The source writes page bytes without an allocation.
func TestSendingPagesAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("counts only without the race detector")
	}
	page := make([]byte, 16<<10)
	var b batch
	s := &serving{id: 7}
	var scratch [headerBytes]byte
	if n := testing.AllocsPerRun(100, func() {
		for !b.full() {
			s.current, s.sends = sending{index: 1, bytes: page, sum: 9}, true
			b.page(s)
		}
		copy(scratch[:], b.heads[:])
		if err := b.writeTo(io.Discard, nil); err != nil {
			t.Fatal(err)
		}
		b.reset()
		if h, err := parseHeader(scratch[:]); err != nil || h.kind != framePage {
			t.Fatal(h, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for a batch of %d pages", n, maxBatchFrames)
	}
}

// A fetch allocates by the request and not by the byte: a page that is 64 times
// as long costs nothing more, and a page more costs little, both ends together.
func TestFetchAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("counts only without the race detector")
	}
	const most = 1024
	fetches := func(page int) func(pages int) float64 {
		r := &rack{mem: make([]byte, page*8), page: page}
		for i := range 8 {
			pattern(r.mem[i*page:][:page], 1, nameOf(i), 0)
			r.sums = append(r.sums, paging.Checksum(r.mem[i*page:][:page]))
		}
		c := newCluster(t, nil)
		c.add(1, func(_ *MuxConfig, cfg *Config) { cfg.Source = r })
		me := c.add(2, nil)
		d := &desk{mem: make([]byte, most*page), page: page}
		owners := []placement.NodeID{{1}}
		return func(pages int) float64 {
			req := &FetchRequest{Namespace: ns, Sink: d}
			for i := range pages {
				req.Pages = append(req.Pages, WantedPage{Name: nameOf(i % 8), Part: i / 8 % paging.MaxParts, Bytes: uint32(page), Owners: owners})
			}
			return testing.AllocsPerRun(5, func() {
				if err := me.Fetch(t.Context(), req); err != nil || d.failed > 0 {
					t.Fatal(err, d.failed)
				}
			})
		}
	}
	short, long := fetches(4<<10), fetches(256<<10)
	few, many, bytes := short(64), short(512), long(64)
	t.Logf("%v allocations for 64 pages of 4 KiB, %v for 512, %v for 64 of 256 KiB", few, many, bytes)
	if perPage := (many - few) / (512 - 64); perPage > 4 {
		t.Errorf("%.1f allocations for each page more", perPage)
	}
	if bytes > few+64 {
		t.Errorf("%v allocations for long pages, %v for short ones", bytes, few)
	}
}

// countingConn counts the calls of the kernel that writes would be.
type countingConn struct {
	net.Conn
	writes atomic.Int64
	fail   atomic.Bool
}

var errTorn = errors.New("torn by the test")

func (c *countingConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	if c.fail.Load() {
		return 0, errTorn
	}
	return c.Conn.Write(p)
}

// Under TLS a batch goes out in a few writes, whole and in order, and an error
// below is an error of the batch.
func TestBatchUnderTLS(t *testing.T) {
	ca := newAuthority(t)
	conf := func(id placement.NodeID) *tls.Config {
		c, roots, err := ca.issue(NodeName(id), nil).config()
		if err != nil {
			t.Fatal(err)
		}
		c.RootCAs, c.ServerName = roots, NodeName(id)
		return c
	}
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	raw := &countingConn{Conn: here}
	server := tls.Server(&cork{Conn: raw}, conf(placement.NodeID{1}))
	client := tls.Client(there, conf(placement.NodeID{1}))
	page := make([]byte, 16<<10)
	pattern(page, 1, nameOf(0), 0)
	const pages = maxBatchFrames
	read := make(chan error, 1)
	go func() { // owner: the test; exits with the pages, or the pipe
		got := make([]byte, pages*(headerBytes+len(page)))
		_, err := io.ReadFull(client, got)
		for i := 0; i < pages && err == nil; i++ {
			part := got[i*(headerBytes+len(page)):]
			if h, bad := parseHeader(part); bad != nil || h.index != uint32(i) || paging.Checksum(part[headerBytes:][:len(page)]) != paging.Checksum(page) {
				err = errors.Join(bad, errors.New("wrong frame"))
			}
		}
		read <- err
	}()
	if err := server.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	var b batch
	fill := func() {
		for i := range pages {
			s := &serving{id: 7, current: sending{index: uint32(i), bytes: page, sum: 9}, sends: true}
			b.page(s)
		}
	}
	fill()
	before := raw.writes.Load()
	if err := b.writeTo(server, corkOf(server)); err != nil {
		t.Fatal(err)
	}
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	if n := raw.writes.Load() - before; n > 6 {
		t.Errorf("%d writes for a batch of %d pages", n, pages)
	}
	b.reset()
	fill()
	raw.fail.Store(true)
	if err := b.writeTo(server, corkOf(server)); !errors.Is(err, errTorn) {
		t.Errorf("a batch that could not be written: %v", err)
	}
	if _, err := server.Write(page); !errors.Is(err, errTorn) {
		t.Errorf("a write after it: %v", err)
	}
}

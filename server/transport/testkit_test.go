package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a Network of pipes: what is written is read in the same moment, or
// not at all.
type memory struct {
	mu    sync.Mutex
	at    map[string]*pipeListener
	dials map[string]int
	holes map[string]*atomic.Bool                      // addresses from which nothing comes, and nothing arrives
	seen  func(address string, k *tap, b []byte) error // what came in, after the welcome; may change it, or cut the connection
}

// tap is the dialer's end of a connection, with faults.
type tap struct {
	net.Conn
	address string
	m       *memory
	hole    *atomic.Bool
	kind    Kind  // from the hello
	read    int64 // bytes that came in, the welcome included
	deaf    bool  // nothing more comes in; set by seen
}

func (k *tap) Write(b []byte) (int, error) {
	if k.kind == 0 && len(b) >= helloBytes {
		k.kind = Kind(b[4])
	}
	if k.hole.Load() {
		return len(b), nil
	}
	return k.Conn.Write(b)
}

func (k *tap) Read(b []byte) (int, error) {
	for {
		n, err := k.Conn.Read(b)
		if (k.hole.Load() || k.deaf) && err == nil {
			continue
		}
		k.read += int64(n)
		k.m.mu.Lock()
		seen := k.m.seen
		k.m.mu.Unlock()
		if seen != nil && k.read > welcomeBytes && n > 0 {
			switch cut := seen(k.address, k, b[:n]); {
			case cut != nil:
				hangUp(k.Conn)
				return 0, cut
			case k.deaf:
				continue
			}
		}
		return n, err
	}
}

// onRead sets what is done to bytes that come in.
func (m *memory) onRead(seen func(address string, k *tap, b []byte) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen = seen
}

// hole is the switch that makes an address a black hole.
func (m *memory) hole(address string) *atomic.Bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.holes[address] == nil {
		m.holes[address] = new(atomic.Bool)
	}
	return m.holes[address]
}

func (m *memory) dialed(address string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dials[address]
}

type pipeListener struct {
	m       *memory
	address string
	conns   chan net.Conn
	done    chan struct{}
	once    sync.Once
}

type pipeAddr string

func (a pipeAddr) Network() string { return "pipe" }
func (a pipeAddr) String() string  { return string(a) }

func newMemory() *memory {
	return &memory{at: map[string]*pipeListener{}, dials: map[string]int{}, holes: map[string]*atomic.Bool{}}
}

func (m *memory) Listen(_ context.Context, address string) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &pipeListener{m: m, address: address, conns: make(chan net.Conn), done: make(chan struct{})}
	m.at[address] = l
	return l, nil
}

func (m *memory) Dial(ctx context.Context, address string) (net.Conn, error) {
	hole := m.hole(address)
	m.mu.Lock()
	l := m.at[address]
	m.dials[address]++
	m.mu.Unlock()
	if hole.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if l == nil {
		return nil, errors.New("connection refused")
	}
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return &tap{Conn: here, address: address, m: m, hole: hole}, nil
	case <-l.done:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.m.mu.Lock()
		defer l.m.mu.Unlock()
		if l.m.at[l.address] == l {
			delete(l.m.at, l.address)
		}
	})
	return nil
}

func (l *pipeListener) Addr() net.Addr { return pipeAddr(l.address) }

// cluster is some nodes in one process.
type cluster struct {
	t   *testing.T
	net Network    // nil: TCP
	ca  *authority // nil: no TLS

	mu    sync.Mutex
	addrs map[placement.NodeID]string
}

// on runs a test over pipes in memory, and over TCP on this machine without and
// with TLS.
func on(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Run("memory", func(t *testing.T) { test(t, newCluster(t, newMemory())) })
	t.Run("tcp", func(t *testing.T) { test(t, newCluster(t, nil)) })
	t.Run("tls", func(t *testing.T) {
		c := newCluster(t, nil)
		c.ca = newAuthority(t)
		test(t, c)
	})
}

func newCluster(t *testing.T, network Network) *cluster {
	return &cluster{t: t, net: network, addrs: map[placement.NodeID]string{}}
}

func (c *cluster) resolve(id placement.NodeID) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.addrs[id]
	return a, ok
}

func (c *cluster) place(id placement.NodeID, address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.addrs[id] = address
}

// node is one of them.
type node struct {
	*Transport
	mux *Mux
	id  placement.NodeID
	src *shelf
}

func (c *cluster) muxConfig(id placement.NodeID) MuxConfig {
	cfg := MuxConfig{ID: id, Cluster: "test", Listen: "127.0.0.1:0", Resolve: c.resolve, Network: c.net, HandshakeTimeout: 10 * time.Second}
	if c.ca != nil {
		cfg.TLS = c.ca.issue(NodeName(id), nil)
	}
	if c.net != nil {
		cfg.Listen = fmt.Sprintf("10.0.0.%d:7441", id[0])
	}
	return cfg
}

// add starts a node; change may be nil. It is closed with the test.
func (c *cluster) add(id byte, change func(*MuxConfig, *Config)) *node {
	c.t.Helper()
	n := &node{id: placement.NodeID{id}, src: newShelf(id)}
	mc := c.muxConfig(n.id)
	// Times are long: the machine that runs the tests may be busy.
	cfg := Config{Source: n.src, StallAfter: 20 * time.Second, IOTimeout: 20 * time.Second}
	if change != nil {
		change(&mc, &cfg)
	}
	var err error
	if n.mux, err = OpenMux(mc); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := n.mux.Close(); err != nil {
			c.t.Error(err)
		}
	})
	cfg.Mux = n.mux
	if n.Transport, err = Open(cfg); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := n.Close(); err != nil {
			c.t.Error(err)
		}
		n.src.check(c.t)
	})
	c.place(n.id, n.mux.Addr().String())
	return n
}

// ns is the namespace of the tests.
var ns = paging.NamespaceID{1, 2, 3}

func nameOf(i int) (n paging.BlockName) {
	binary.LittleEndian.PutUint64(n[:], uint64(i)+1)
	return n
}

// pattern fills a page with bytes that no other page, and no other node's copy
// of it, has in any 4 KiB.
func pattern(b []byte, node byte, name paging.BlockName, part int) {
	x := binary.LittleEndian.Uint64(name[:])*0x9e3779b97f4a7c15 + uint64(part)<<32 + uint64(node)<<56
	var unit [4096]byte
	for i := 0; i < len(unit); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(unit[i:], x)
	}
	for n := uint64(0); len(b) > 0; n++ {
		binary.LittleEndian.PutUint64(unit[8:], x+n)
		b = b[copy(b, unit[:]):]
	}
}

type pageKey struct {
	name paging.BlockName
	part int
}

// stored is one page of a shelf.
type stored struct {
	bytes []byte
	sum   uint64
	disk  bool
}

// shelf is a Source: pages in memory, some as if on disk.
type shelf struct {
	node   byte
	pins   atomic.Int64 // Pages that are open
	opened atomic.Int64
	doubts chan paging.PageID

	mu    sync.Mutex
	pages map[pageKey]*stored
	load  func(ctx context.Context, p *stored) error // before a page is read; may block
	open  func() error                               // before Pages are opened
}

func newShelf(node byte) *shelf {
	return &shelf{node: node, pages: map[pageKey]*stored{}, doubts: make(chan paging.PageID, 16)}
}

func (s *shelf) put(name paging.BlockName, part, bytes int, disk bool) *stored {
	p := &stored{bytes: make([]byte, bytes), disk: disk}
	pattern(p.bytes, s.node, name, part)
	p.sum = paging.Checksum(p.bytes)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pages[pageKey{name, part}] = p
	return p
}

func (s *shelf) get(name paging.BlockName, part int) *stored {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pages[pageKey{name, part}]
}

func (s *shelf) check(t *testing.T) {
	t.Helper()
	if n := s.pins.Load(); n != 0 {
		t.Errorf("%d requests are still pinned at node %d", n, s.node)
	}
}

func (s *shelf) Open(_ context.Context, _ placement.NodeID, r *PageRequest) (Pages, error) {
	s.mu.Lock()
	open := s.open
	s.mu.Unlock()
	if open != nil {
		if err := open(); err != nil {
			return nil, err
		}
	}
	if r.Namespace != ns {
		return nil, paging.ErrUnknownNamespace
	}
	s.pins.Add(1)
	s.opened.Add(1)
	return &shelfPages{s: s, r: r}, nil
}

func (s *shelf) Have(_ context.Context, _ placement.NodeID, q *HaveRequest) ([]Held, error) {
	if q.Namespace != ns {
		return nil, paging.ErrUnknownNamespace
	}
	out := make([]Held, len(q.Names))
	for i, name := range q.Names {
		for part := range paging.MaxParts {
			if p := s.get(name, part); p != nil {
				out[i].Parts = out[i].Parts.With(part)
				out[i].Tier = 2
			}
		}
	}
	return out, nil
}

func (s *shelf) Doubt(_ placement.NodeID, p paging.PageID) {
	select {
	case s.doubts <- p:
	default:
	}
}

type shelfPages struct {
	s *shelf
	r *PageRequest
}

func (p *shelfPages) Page(i int) Content {
	row, part, length := p.r.At(i)
	got := p.s.get(p.r.Blocks[row].Name, part)
	switch {
	case got == nil:
		return Content{Reason: NotFound}
	case len(got.bytes) != int(length):
		return Content{Reason: Mismatch}
	case got.disk:
		return Content{Stored: true}
	}
	return Content{Bytes: got.bytes, Sum: got.sum}
}

func (p *shelfPages) Load(ctx context.Context, i int, dst []byte) (uint64, error) {
	row, part, _ := p.r.At(i)
	got := p.s.get(p.r.Blocks[row].Name, part)
	p.s.mu.Lock()
	load := p.s.load
	p.s.mu.Unlock()
	if load != nil {
		if err := load(ctx, got); err != nil {
			return 0, err
		}
	}
	copy(dst, got.bytes)
	return got.sum, nil
}

func (p *shelfPages) Close() { p.s.pins.Add(-1) }

// tray is a Sink.
type tray struct {
	t       testing.TB
	req     *FetchRequest
	refuse  func(i int) error
	arrived func(i int, r Result)

	mu    sync.Mutex
	slots [][]byte
	done  []*Result
}

func newTray(t testing.TB, pages ...WantedPage) *tray {
	tr := &tray{t: t, slots: make([][]byte, len(pages)), done: make([]*Result, len(pages))}
	tr.req = &FetchRequest{Namespace: ns, Pages: pages, Sink: tr}
	return tr
}

func (tr *tray) Slot(i int) ([]byte, error) {
	if tr.refuse != nil {
		if err := tr.refuse(i); err != nil {
			return nil, err
		}
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if tr.slots[i] != nil || tr.done[i] != nil {
		tr.t.Errorf("slot %d asked for twice, or after its page was done", i)
	}
	tr.slots[i] = make([]byte, tr.req.Pages[i].Bytes)
	return tr.slots[i], nil
}

func (tr *tray) Done(i int, r Result) {
	tr.mu.Lock()
	if tr.done[i] != nil {
		tr.t.Errorf("page %d done twice: %+v, %+v", i, *tr.done[i], r)
	}
	tr.done[i] = &r
	tr.mu.Unlock()
	if tr.arrived != nil {
		tr.arrived(i, r)
	}
}

// result is the outcome of page i; it must have one.
func (tr *tray) result(i int) Result {
	tr.t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if tr.done[i] == nil {
		tr.t.Fatalf("page %d has no outcome", i)
	}
	return *tr.done[i]
}

// good checks that page i arrived from a node, and that its bytes are that node's.
func (tr *tray) good(i int) {
	tr.t.Helper()
	r := tr.result(i)
	if r.Err != nil {
		tr.t.Errorf("page %d: %v", i, r.Err)
		return
	}
	if r.Elsewhere {
		return
	}
	if wrong := tr.wrong(i); wrong {
		tr.t.Errorf("page %d of node %s has wrong bytes", i, r.From.Short())
	}
}

// wrong reports whether a page that arrived is not the page of its node.
func (tr *tray) wrong(i int) bool {
	r := tr.result(i)
	w := tr.req.Pages[i]
	want := make([]byte, w.Bytes)
	pattern(want, r.From[0], w.Name, w.Part)
	return string(want) != string(tr.slots[i]) || r.Sum != paging.Checksum(want)
}

func (tr *tray) allGood() {
	tr.t.Helper()
	for i := range tr.req.Pages {
		tr.good(i)
	}
}

// want is a page wanted of some nodes.
func want(name, part, bytes int, owners ...*node) WantedPage {
	w := WantedPage{Name: nameOf(name), Part: part, Bytes: uint32(bytes)}
	for _, n := range owners {
		w.Owners = append(w.Owners, n.id)
	}
	return w
}

// address is where a node listens.
func (n *node) address() string { return n.mux.Addr().String() }

func fetch(t *testing.T, n *node, tr *tray) {
	t.Helper()
	if err := n.Fetch(t.Context(), tr.req); err != nil {
		t.Fatal(err)
	}
}

package clustertest

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/server/transport"
)

// Fabric is a network in memory between the nodes of a test: bytes take time, each
// direction of each pair can be cut and is joined again with nothing lost, as with
// TCP, and connections can be reset.
type Fabric struct {
	mu        sync.Mutex
	listeners map[string]*inlet
	cut       map[[2]int]bool // from, to
	delays    map[[2]int]time.Duration
	flows     map[*flow]struct{}
	changed   chan struct{} // closed and replaced when a cut changes
}

const (
	usualDelay = 200 * time.Microsecond
	flowBytes  = 256 << 10 // on the way in one direction of a connection
)

// NewFabric returns a network in which everything reaches everything.
func NewFabric() *Fabric {
	return &Fabric{
		listeners: map[string]*inlet{}, cut: map[[2]int]bool{}, delays: map[[2]int]time.Duration{},
		flows: map[*flow]struct{}{}, changed: make(chan struct{}),
	}
}

// SetCut cuts or joins what one node sends to another.
func (f *Fabric) SetCut(from, to int, cut bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut[[2]int{from, to}] = cut
	close(f.changed)
	f.changed = make(chan struct{})
	f.wakeLocked()
}

// Isolate cuts or joins all that goes between a node and the others.
func (f *Fabric) Isolate(node, nodes int, cut bool) {
	for i := range nodes {
		if i != node {
			f.SetCut(i, node, cut)
			f.SetCut(node, i, cut)
		}
	}
}

// Heal joins everything and makes it fast.
func (f *Fabric) Heal() {
	f.mu.Lock()
	clear(f.cut)
	clear(f.delays)
	close(f.changed)
	f.changed = make(chan struct{})
	f.wakeLocked()
	f.mu.Unlock()
}

// SetDelay sets how long a byte takes from one node to another.
func (f *Fabric) SetDelay(from, to int, d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.delays[[2]int{from, to}] = d
}

// Reset breaks every connection between two nodes.
func (f *Fabric) Reset(a, b int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for w := range f.flows {
		if w.from == a && w.to == b || w.from == b && w.to == a {
			w.broken = true
		}
	}
	f.wakeLocked()
}

func (f *Fabric) wakeLocked() {
	for w := range f.flows {
		w.changed.Broadcast()
	}
}

// Joined reports whether two nodes hear each other.
func (f *Fabric) Joined(a, b int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.cut[[2]int{a, b}] && !f.cut[[2]int{b, a}]
}

// Port is the network as one node sees it.
func (f *Fabric) Port(node int) transport.Network { return port{f, node} }

type port struct {
	f    *Fabric
	self int
}

// inlet is a listener.
type inlet struct {
	p       port
	address string
	conns   chan net.Conn
	done    chan struct{}
	once    sync.Once
}

type plainAddr string

func (a plainAddr) Network() string { return "memory" }
func (a plainAddr) String() string  { return string(a) }

func (p port) Listen(_ context.Context, address string) (net.Listener, error) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if p.f.listeners[address] != nil {
		return nil, errors.New("address in use")
	}
	l := &inlet{p: p, address: address, conns: make(chan net.Conn, 64), done: make(chan struct{})}
	p.f.listeners[address] = l
	return l, nil
}

// Dial waits while the way there or back is cut, as a handshake that is repeated
// would.
func (p port) Dial(ctx context.Context, address string) (net.Conn, error) {
	f := p.f
	for {
		f.mu.Lock()
		l, changed := f.listeners[address], f.changed
		if l == nil {
			f.mu.Unlock()
			return nil, errors.New("connection refused")
		}
		if !f.cut[[2]int{p.self, l.p.self}] && !f.cut[[2]int{l.p.self, p.self}] {
			here, there := f.connectLocked(p.self, l.p.self, address)
			f.mu.Unlock()
			select {
			case l.conns <- there:
				return here, nil
			default:
				_ = here.Close()
				return nil, errors.New("connection refused: backlog is full")
			}
		}
		f.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (f *Fabric) connectLocked(from, to int, address string) (here, there *wire) {
	out, in := f.flowLocked(from, to), f.flowLocked(to, from)
	return &wire{address: address, in: in, out: out}, &wire{address: address, in: out, out: in}
}

func (l *inlet) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *inlet) Addr() net.Addr { return plainAddr(l.address) }

func (l *inlet) Close() error {
	l.once.Do(func() {
		l.p.f.mu.Lock()
		delete(l.p.f.listeners, l.address)
		l.p.f.mu.Unlock()
		close(l.done)
		for {
			select {
			case c := <-l.conns:
				_ = c.Close()
				continue
			default:
			}
			return
		}
	})
	return nil
}

// flow is one direction of a connection. Guarded by fabric.mu.
type flow struct {
	f        *Fabric
	from, to int
	changed  *sync.Cond
	queue    []parcel
	bytes    int
	last     time.Time // when the last parcel arrives
	closed   bool      // the sender sends no more
	gone     bool      // the receiver reads no more
	broken   bool      // reset
	readBy   time.Time
	writeBy  time.Time
}

type parcel struct {
	at time.Time
	b  []byte
}

func (f *Fabric) flowLocked(from, to int) *flow {
	w := &flow{f: f, from: from, to: to}
	w.changed = sync.NewCond(&f.mu)
	f.flows[w] = struct{}{}
	return w
}

// waitLocked waits for a change, or for the earliest of some times.
func (w *flow) waitLocked(times ...time.Time) {
	var first time.Time
	for _, t := range times {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	if first.IsZero() {
		w.changed.Wait()
		return
	}
	timer := time.AfterFunc(time.Until(first), func() {
		w.f.mu.Lock()
		defer w.f.mu.Unlock()
		w.changed.Broadcast()
	})
	w.changed.Wait()
	timer.Stop()
}

var errReset = errors.New("connection reset by peer")

func (w *flow) read(b []byte) (int, error) {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	for {
		now := time.Now()
		cut := w.f.cut[[2]int{w.from, w.to}]
		var next time.Time
		switch {
		case w.gone:
			return 0, net.ErrClosed
		case w.broken:
			return 0, errReset
		case !w.readBy.IsZero() && !now.Before(w.readBy):
			return 0, os.ErrDeadlineExceeded
		case cut:
		case len(w.queue) > 0 && !now.Before(w.queue[0].at):
			return w.takeLocked(b), nil
		case len(w.queue) > 0:
			next = w.queue[0].at
		case w.closed:
			return 0, io.EOF
		}
		w.waitLocked(w.readBy, next)
	}
}

func (w *flow) takeLocked(b []byte) int {
	n := copy(b, w.queue[0].b)
	if w.queue[0].b = w.queue[0].b[n:]; len(w.queue[0].b) == 0 {
		w.queue = w.queue[1:]
	}
	w.bytes -= n
	w.changed.Broadcast()
	return n
}

func (w *flow) write(b []byte) (n int, err error) {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	for len(b) > 0 {
		now := time.Now()
		switch {
		case w.closed:
			return n, net.ErrClosed
		case w.broken || w.gone && !w.f.cut[[2]int{w.to, w.from}]:
			return n, errReset
		case !w.writeBy.IsZero() && !now.Before(w.writeBy):
			return n, os.ErrDeadlineExceeded
		case w.bytes == flowBytes:
			w.waitLocked(w.writeBy)
			continue
		}
		step := min(len(b), flowBytes-w.bytes)
		delay := max(w.f.delays[[2]int{w.from, w.to}], usualDelay)
		if w.last = now.Add(delay); len(w.queue) > 0 && w.queue[len(w.queue)-1].at.After(w.last) {
			w.last = w.queue[len(w.queue)-1].at
		}
		w.queue = append(w.queue, parcel{w.last, slices.Clone(b[:step])})
		w.bytes += step
		n += step
		b = b[step:]
		w.changed.Broadcast()
	}
	return n, nil
}

// wire is one end of a connection.
type wire struct {
	address string
	in, out *flow
}

func (c *wire) Read(b []byte) (int, error)  { return c.in.read(b) }
func (c *wire) Write(b []byte) (int, error) { return c.out.write(b) }
func (c *wire) LocalAddr() net.Addr         { return plainAddr(c.address) }
func (c *wire) RemoteAddr() net.Addr        { return plainAddr(c.address) }

func (c *wire) Close() error {
	f := c.in.f
	f.mu.Lock()
	defer f.mu.Unlock()
	c.out.closed, c.in.gone = true, true
	c.in.queue, c.in.bytes = nil, 0
	c.in.changed.Broadcast()
	c.out.changed.Broadcast()
	for _, w := range []*flow{c.in, c.out} {
		if w.closed && w.gone {
			delete(f.flows, w)
		}
	}
	return nil
}

func (c *wire) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *wire) SetReadDeadline(t time.Time) error {
	c.in.f.mu.Lock()
	defer c.in.f.mu.Unlock()
	c.in.readBy = t
	c.in.changed.Broadcast()
	return nil
}

func (c *wire) SetWriteDeadline(t time.Time) error {
	c.out.f.mu.Lock()
	defer c.out.f.mu.Unlock()
	c.out.writeBy = t
	c.out.changed.Broadcast()
	return nil
}

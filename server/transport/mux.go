package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Bounds of a Mux.
const (
	maxHandshakes = 64 // at a time; one more connection is closed
	raftBacklog   = 16 // connections that Accept has not taken; one more is closed
	acceptPause   = 50 * time.Millisecond
)

// MuxConfig of a Mux. Zero values mean the documented default.
type MuxConfig struct {
	ID      placement.NodeID
	Cluster string // the cluster's UUID, 1 to 255 bytes: connections of another cluster are refused
	Listen  string // host:port; port 0: any
	// TLS of all connections, in and out. nil: none, and then only addresses of
	// this machine may be listened on and dialed, unless Insecure.
	TLS      *TLS
	Insecure bool
	// Resolve tells where a node's peer port is now. It may be called from many
	// goroutines and must not block.
	Resolve func(placement.NodeID) (address string, known bool)
	// Gossip tells a node that joins where this one gossips. nil: nobody can join
	// here.
	Gossip func() string
	// MaxConns bounds the connections that others made, Raft's included. 0: 1,024.
	MaxConns int
	// HandshakeTimeout bounds the time from a connection to its welcome. 0: 3 s.
	HandshakeTimeout time.Duration
	Network          Network      // nil: TCP
	Logger           *slog.Logger // state changes only; nil: none

	versions versions // for tests
}

func (c MuxConfig) withDefaults() (MuxConfig, error) {
	var problems []error
	if c.ID == (placement.NodeID{}) {
		problems = append(problems, errors.New("ID is zero"))
	}
	if c.Cluster == "" || len(c.Cluster) > maxClusterBytes {
		problems = append(problems, fmt.Errorf("cluster id of %d bytes, want 1 to %d", len(c.Cluster), maxClusterBytes))
	}
	if c.Resolve == nil {
		problems = append(problems, errors.New("no Resolve"))
	}
	if c.TLS != nil && (c.TLS.Certificate == nil || c.TLS.Roots == nil) {
		problems = append(problems, errors.New("TLS without a certificate or without roots"))
	}
	if c.MaxConns < 0 || c.HandshakeTimeout < 0 {
		problems = append(problems, errors.New("a bound or time is negative"))
	}
	if local, err := loopback(c.Listen); err != nil {
		problems = append(problems, err)
	} else if !local && c.TLS == nil && !c.Insecure && c.Network == nil {
		problems = append(problems, fmt.Errorf("peer port %s can be reached from other machines without TLS: configure TLS, listen on 127.0.0.1, or allow it as insecure", c.Listen))
	}
	if len(problems) > 0 {
		return c, fmt.Errorf("peer port: %w: %w", paging.ErrInvalid, errors.Join(problems...))
	}
	if c.MaxConns == 0 {
		c.MaxConns = 1024
	}
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = 3 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.versions == (versions{}) {
		c.versions = versions{oldestVersion, Version}
	}
	return c, nil
}

// loopback reports whether only this machine can reach an address.
func loopback(address string) (bool, error) {
	host, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return false, fmt.Errorf("peer address %q is not host:port", address)
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback(), nil
}

// Mux is a node's peer port: it takes and makes the connections of Raft and of
// the page transport. All methods may be called at the same time from many
// goroutines.
type Mux struct {
	cfg      MuxConfig
	log      *slog.Logger
	listener net.Listener
	tcp      *tcp // nil: Network is the caller's
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup

	shaking chan struct{} // a token per handshake
	raft    chan net.Conn // not yet taken by Accept

	accepted atomic.Int64
	dialed   atomic.Int64
	failed   atomic.Int64 // dials
	refused  [refusals]atomic.Int64

	mu struct {
		sync.Mutex
		closed bool
		conns  map[net.Conn]struct{} // that others made
		serve  map[Kind]func(*link)
	}
}

// link is a connection after its handshake.
type link struct {
	net.Conn
	raw     net.Conn // below TLS; its Close never waits
	peer    placement.NodeID
	version uint16
}

// Close ends the connection at once, whatever runs on it.
func (l *link) Close() error { return l.raw.Close() }

// hangUp closes a connection that is not used any more. Whoever still reads or
// writes sees it; an error of Close has nobody to tell.
func hangUp(c io.Closer) { _ = c.Close() }

// OpenMux listens. Raft connections wait for Accept from now on, the others are
// refused until a Transport is opened. Errors: paging.ErrInvalid for a wrong
// MuxConfig, or that of the listener.
func OpenMux(cfg MuxConfig) (*Mux, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	m := &Mux{cfg: cfg, log: cfg.Logger, shaking: make(chan struct{}, maxHandshakes), raft: make(chan net.Conn, raftBacklog)}
	m.mu.conns = map[net.Conn]struct{}{}
	m.mu.serve = map[Kind]func(*link){}
	if m.cfg.Network == nil {
		m.tcp = &tcp{open: cfg.TLS != nil || cfg.Insecure}
		m.cfg.Network = m.tcp
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if m.listener, err = m.cfg.Network.Listen(m.ctx, cfg.Listen); err != nil {
		m.cancel()
		return nil, fmt.Errorf("peer port on %s: %w", cfg.Listen, err)
	}
	if cfg.Gossip != nil {
		m.mu.serve[discover] = m.introduce
	}
	m.running.Go(m.acceptAll) // owner: Mux; exits when the listener closes
	return m, nil
}

// Addr is where the Mux listens.
func (m *Mux) Addr() net.Addr { return m.listener.Addr() }

// Close stops listening, closes what others made and joins every goroutine.
// Accept and Dial answer paging.ErrClosed from now on. Close what was opened on
// the Mux first. A second call does nothing.
func (m *Mux) Close() error {
	m.mu.Lock()
	first := !m.mu.closed
	m.mu.closed = true
	for c := range m.mu.conns {
		hangUp(c)
	}
	m.mu.Unlock()
	if !first {
		return nil
	}
	m.cancel()
	err := m.listener.Close()
	m.running.Wait()
	return err
}

// Accept returns the next connection of another node's Raft.
func (m *Mux) Accept(ctx context.Context) (net.Conn, error) {
	if m.ctx.Err() != nil { // a connection that waits is closed too
		return nil, fmt.Errorf("peer port: %w", paging.ErrClosed)
	}
	select {
	case c := <-m.raft:
		return c, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-m.ctx.Done():
		return nil, fmt.Errorf("peer port: %w", paging.ErrClosed)
	}
}

// Dial connects to the Raft of another node. Errors: *RefusedError,
// paging.ErrUnavailable (its address is not known, or it does not answer),
// paging.ErrDenied (somebody else answers), paging.ErrClosed.
func (m *Mux) Dial(ctx context.Context, node placement.NodeID) (net.Conn, error) {
	l, err := m.dial(ctx, node, Raft)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// handle says who serves connections of a kind; nil: nobody. The connection is
// closed when serve returns.
func (m *Mux) handle(kind Kind, serve func(*link)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.serve[kind] = serve
}

func (m *Mux) takes(kind Kind) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return kind == Raft && len(m.raft) < raftBacklog || m.mu.serve[kind] != nil
}

// dial connects to a node for one kind of use, within ctx and HandshakeTimeout.
func (m *Mux) dial(ctx context.Context, node placement.NodeID, kind Kind) (*link, error) {
	if m.ctx.Err() != nil {
		return nil, fmt.Errorf("peer port: %w", paging.ErrClosed)
	}
	address, known := m.cfg.Resolve(node)
	if !known {
		return nil, fmt.Errorf("address of node %s: %w", node.Short(), paging.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.HandshakeTimeout)
	defer cancel()
	l, err := m.connect(ctx, address, node, kind)
	if err == nil {
		m.dialed.Add(1)
		return l, nil
	}
	m.failed.Add(1)
	var refused *RefusedError
	if errors.As(err, &refused) || errors.Is(err, paging.ErrDenied) || errors.Is(err, paging.ErrIncompatible) {
		return nil, fmt.Errorf("%s connection to %s: %w", kind, address, err)
	}
	return nil, fmt.Errorf("%s connection to node %s at %s: %w: %w", kind, node.Short(), address, paging.ErrUnavailable, err)
}

func (m *Mux) connect(ctx context.Context, address string, node placement.NodeID, kind Kind) (*link, error) {
	raw, err := m.cfg.Network.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	l := &link{Conn: raw, raw: raw, peer: node}
	stop := context.AfterFunc(ctx, func() { hangUp(raw) })
	if m.cfg.TLS != nil {
		l.Conn, err = m.cfg.TLS.dial(ctx, raw, node)
		if errors.Is(err, errNotNamed) {
			err = fmt.Errorf("%w: %w", err, paging.ErrDenied)
		}
	}
	if err == nil {
		l.version, err = m.greet(l.Conn, kind, node)
	}
	if !stop() && err == nil { // ctx ended, and closed it
		err = ctx.Err()
	}
	if err != nil {
		hangUp(raw)
		return nil, errors.Join(err, ctx.Err())
	}
	return l, nil
}

func (m *Mux) acceptAll() {
	for {
		c, err := m.listener.Accept()
		switch {
		case m.ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			if err == nil {
				hangUp(c)
			}
			return
		case err != nil: // out of descriptors or memory
			m.log.Warn("peer port cannot accept", "err", err)
			pause(m.ctx, acceptPause)
			continue
		}
		if !m.track(c) {
			m.refused[Overloaded].Add(1)
			hangUp(c)
			continue
		}
		m.running.Go(func() { m.take(c) }) // owner: Mux; exits with the connection; bound: MaxConns
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// track notes a connection that came in; false: there are too many.
func (m *Mux) track(c net.Conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.closed || len(m.mu.conns) >= m.cfg.MaxConns {
		return false
	}
	select {
	case m.shaking <- struct{}{}:
	default:
		return false
	}
	m.mu.conns[c] = struct{}{}
	return true
}

func (m *Mux) untrack(c net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.mu.conns, c)
}

// take is the life of a connection that came in.
func (m *Mux) take(raw net.Conn) {
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.HandshakeTimeout)
	l, kind, why := m.shake(ctx, raw)
	cancel()
	<-m.shaking
	if why != NotRefused {
		m.refused[why].Add(1)
		hangUp(raw)
		m.untrack(raw)
		return
	}
	m.accepted.Add(1)
	if kind == Raft {
		m.queue(l)
		return
	}
	m.mu.Lock()
	serve := m.mu.serve[kind]
	m.mu.Unlock()
	if serve != nil {
		serve(l)
	}
	hangUp(raw)
	m.untrack(raw)
}

// queue hands a connection to whoever calls Accept.
func (m *Mux) queue(l *link) {
	select {
	case m.raft <- &tracked{link: l, mux: m}:
	default:
		m.refused[Overloaded].Add(1)
		hangUp(l)
		m.untrack(l.raw)
	}
}

// tracked is a connection that somebody else closes.
type tracked struct {
	*link
	mux *Mux
}

// Close implements net.Conn.
func (t *tracked) Close() error {
	t.mux.untrack(t.raw)
	return t.link.Close()
}

// shake is the listener's half of the handshake.
func (m *Mux) shake(ctx context.Context, raw net.Conn) (*link, Kind, Refusal) {
	stop := context.AfterFunc(ctx, func() { hangUp(raw) })
	defer stop()
	l := &link{Conn: raw, raw: raw}
	named := func(placement.NodeID) bool { return true }
	if m.cfg.TLS != nil {
		var err error
		if l.Conn, named, err = m.cfg.TLS.accept(ctx, raw); err != nil {
			return nil, 0, m.because(ctx, NoTLS)
		}
	}
	h, err := readHello(l.Conn)
	if err != nil {
		return nil, 0, m.because(ctx, Malformed)
	}
	w := m.judge(&h, named)
	if _, err := l.Write(w.encode()); err != nil && w.refusal == NotRefused {
		return nil, 0, m.because(ctx, Malformed)
	}
	if w.refusal != NotRefused {
		return nil, 0, w.refusal
	}
	if !stop() {
		return nil, 0, TooSlow
	}
	l.peer, l.version = h.from, w.version
	return l, h.kind, NotRefused
}

// because is why, unless time ran out.
func (m *Mux) because(ctx context.Context, why Refusal) Refusal {
	if ctx.Err() != nil {
		return TooSlow
	}
	return why
}

// MuxMetrics counts what happened at the peer port.
type MuxMetrics struct {
	Conns       int64            // that others made and are open
	Accepted    int64            // handshakes of others that succeeded
	Refused     map[string]int64 // connections by Refusal; all of them, also those at 0
	Dialed      int64            // connections made
	DialsFailed int64            // connections that could not be made
	// Sockets with the congestion control that the transport asks for, and those
	// where the system does not permit it.
	CongestionSet, CongestionUnset int64
}

// Metrics is a snapshot.
func (m *Mux) Metrics() MuxMetrics {
	out := MuxMetrics{Accepted: m.accepted.Load(), Dialed: m.dialed.Load(), DialsFailed: m.failed.Load(), Refused: map[string]int64{}}
	for r := NotRefused + 1; r < refusals; r++ {
		out.Refused[r.String()] = m.refused[r].Load()
	}
	if m.tcp != nil {
		out.CongestionSet, out.CongestionUnset = m.tcp.set.Load(), m.tcp.unset.Load()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out.Conns = int64(len(m.mu.conns))
	return out
}

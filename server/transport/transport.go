package transport

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Transport fetches pages from other nodes and serves this node's. All methods
// may be called at the same time from many goroutines.
type Transport struct {
	cfg      Config
	log      *slog.Logger
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	running  sync.WaitGroup // calls, connections, the prober
	inflight *budget        // bytes asked of all peers and not arrived
	serving  *budget        // bytes pinned for others
	loads    *loads
	flights  *flights
	calls    chan struct{} // a token per call that is answered
	probes   chan struct{} // a token per probe
	metrics  counters

	mu struct {
		sync.Mutex
		closed bool
		peers  map[placement.NodeID]*peer
		links  map[*link]struct{} // in use
	}
}

// Open starts to serve at the Mux. On error nothing runs.
func Open(cfg Config) (*Transport, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	t := &Transport{
		cfg: cfg, log: cfg.Logger, inflight: newBudget(cfg.TotalBytes), serving: newBudget(cfg.ServeBytes),
		loads: newLoads(cfg.LoadBytes), flights: newFlights(),
		calls: make(chan struct{}, maxCalls), probes: make(chan struct{}, maxProbes),
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.mu.peers = map[placement.NodeID]*peer{}
	t.mu.links = map[*link]struct{}{}
	t.running.Go(t.probe) // owner: Transport; exits at Close
	cfg.Mux.handle(Control, t.serveControl)
	cfg.Mux.handle(Bulk, t.serveBulk)
	return t, nil
}

// Close refuses new work, ends what runs and joins every goroutine: Fetches
// return with paging.ErrClosed for what has not arrived. It waits for reads of
// Pages.Load, so the source is closed after it or ends them when ctx ends. A
// second call does nothing.
func (t *Transport) Close() error {
	t.mu.Lock()
	first := !t.mu.closed
	t.mu.closed = true
	t.cancel() // before the connections end, so that what ends with them knows why
	for l := range t.mu.links {
		hangUp(l)
	}
	t.mu.Unlock()
	if !first {
		return nil
	}
	t.cfg.Mux.handle(Control, nil)
	t.cfg.Mux.handle(Bulk, nil)
	t.running.Wait()
	return t.loads.close()
}

func (t *Transport) self() placement.NodeID { return t.cfg.Mux.cfg.ID }

// charge is what n bytes count in the budgets of what is in flight.
func (t *Transport) charge(n int64) int64 { return min(n, t.cfg.PeerBytes, t.cfg.TotalBytes) }

// lotBytes is the most page bytes of a request for several pages.
func (t *Transport) lotBytes() int64 { return t.charge(maxLotBytes) }

// serveIdle is the time after which a connection that another node made and
// does not use is closed: longer than that node keeps it, so that it does not
// send a request into a connection that is being closed.
func (t *Transport) serveIdle() time.Duration { return 2 * t.cfg.IdleAfter }

// begin notes something that Close must wait for; false: it is closed.
func (t *Transport) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	t.running.Add(1)
	return true
}

// enter notes a connection that another node made; leave ends it.
func (t *Transport) enter(l *link) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	t.running.Add(1)
	t.mu.links[l] = struct{}{}
	return true
}

func (t *Transport) leave(l *link) {
	t.mu.Lock()
	delete(t.mu.links, l)
	t.mu.Unlock()
	t.running.Done()
}

// run starts the writer and the reader of a connection made here. false: the
// Transport is closed, and so is the connection.
func (t *Transport) run(l *link, writer, reader func()) bool {
	if !t.enter(l) {
		hangUp(l)
		return false
	}
	// Owner: the peer. Exit: the end of the connection. Bound: BulkConns and one
	// control connection per peer, maxPeers.
	t.running.Go(writer)
	t.running.Go(func() {
		reader()
		t.leave(l)
	})
	return true
}

// peer is another node, made known if it is not; nil: it is this node, too many
// are known, or the Transport is closed.
func (t *Transport) peer(id placement.NodeID) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.mu.peers[id]
	if p == nil && !t.mu.closed && id != t.self() && len(t.mu.peers) < maxPeers {
		p = newPeer(t, id)
		t.mu.peers[id] = p
	}
	return p
}

// Reachable reports whether a node would be asked for pages: it is false from a
// node's first failure until a probe has reached it. A node that was never used
// is reachable.
func (t *Transport) Reachable(id placement.NodeID) bool {
	t.mu.Lock()
	p := t.mu.peers[id]
	t.mu.Unlock()
	return p == nil || !p.out()
}

// Peers is what is known of the nodes that were used lately, in no order.
func (t *Transport) Peers() []PeerState {
	var out []PeerState
	for _, p := range t.peers() {
		out = append(out, p.state())
	}
	return out
}

func (t *Transport) peers() []*peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*peer, 0, len(t.mu.peers))
	for _, p := range t.mu.peers {
		out = append(out, p)
	}
	return out
}

// probe keeps an eye on the peers until Close: it pings those that answer, looks
// for those that did not, and forgets those that nobody uses.
func (t *Transport) probe() {
	tick := time.NewTicker(t.cfg.lookEvery())
	defer tick.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case now := <-tick.C:
			for _, p := range t.peers() {
				t.look(p, now)
			}
		}
	}
}

func (t *Transport) look(p *peer, now time.Time) {
	p.mu.Lock()
	c, health, idle := p.mu.control, p.mu.health, now.Sub(p.mu.used)
	probe := c == nil && !p.mu.probing && (!health.Out() || health.Due(now))
	if probe {
		select {
		case t.probes <- struct{}{}:
			p.mu.probing = true
		default: // others are being looked for; the next turn
			probe = false
		}
	}
	p.mu.Unlock()
	switch {
	case idle > forgetPeer && !probe && p.inflight.inUse() == 0:
		t.forget(p)
	case probe:
		t.running.Go(func() { t.reach(p) }) // owner: probe; exits in StallAfter; bound: maxProbes
	case c != nil:
		c.ping(now)
	}
}

// reach looks whether a peer can be reached. dialControl notes the outcome.
func (t *Transport) reach(p *peer) {
	_, _ = p.dialControl(t.ctx)
	p.mu.Lock()
	p.mu.probing = false
	p.mu.Unlock()
	<-t.probes
}

func (t *Transport) forget(p *peer) {
	t.mu.Lock()
	delete(t.mu.peers, p.id)
	t.mu.Unlock()
	p.closeAll()
}

// isProtocol reports whether a connection ended because of what came over it.
func isProtocol(err error) bool {
	return errors.Is(err, paging.ErrInvalid) || errors.Is(err, paging.ErrCorrupt)
}

// isTimeout reports whether a deadline ended a connection.
func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// isCut reports whether a connection ended in the middle of a frame.
func isCut(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) }

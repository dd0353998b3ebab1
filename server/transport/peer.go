package transport

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// peer is another node as this one uses it.
type peer struct {
	// Immutable.
	t        *Transport
	id       placement.NodeID
	inflight *budget // bytes asked of it and not arrived

	assigned atomic.Int64  // bytes that calls mean to get from it
	dialing  chan struct{} // a token for whoever dials; capacity 1

	mu struct {
		sync.Mutex
		health  placement.Health
		rtt     time.Duration
		speed   float64 // bytes per second
		others  int64   // bytes that it owes others, as it said last
		control *control
		bulk    []*download
		turn    int
		used    time.Time // last
		probing bool
	}
}

func newPeer(t *Transport, id placement.NodeID) *peer {
	p := &peer{t: t, id: id, inflight: newBudget(min(t.cfg.PeerBytes, t.cfg.TotalBytes)), dialing: make(chan struct{}, 1)}
	p.mu.bulk = make([]*download, t.cfg.BulkConns)
	p.mu.used = time.Now()
	return p
}

// smooth moves an average an eighth of the way, or sets the first value.
func smooth[T time.Duration | float64](average, sample T) T {
	if average == 0 {
		return sample
	}
	return average + (sample-average)/8
}

// copy is the peer as a source to choose.
func (p *peer) copy() placement.Copy {
	p.mu.Lock()
	defer p.mu.Unlock()
	return placement.Copy{
		Node: p.id, Distance: p.mu.rtt, QueuedBytes: p.assigned.Load() + p.mu.others,
		BytesPerSecond: p.mu.speed, Out: p.mu.health.Out(),
	}
}

func (p *peer) out() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.health.Out()
}

// giveBack returns bytes to both budgets.
func (p *peer) giveBack(charge int64) {
	p.inflight.release(charge)
	p.t.inflight.release(charge)
}

// owes notes what the peer says that it owes in all.
func (p *peer) owesLocked(owed int64) { p.mu.others = max(owed-p.assigned.Load(), 0) }

// served notes that the peer answered a request.
func (p *peer) served(bytes int64, took time.Duration, owed int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.health = p.mu.health.Served()
	p.mu.used = time.Now()
	if bytes > 0 && took > 0 {
		p.mu.speed = smooth(p.mu.speed, float64(bytes)/took.Seconds())
	}
	p.owesLocked(owed)
}

// ponged notes the answer to a ping.
func (p *peer) ponged(took time.Duration, owed int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.rtt = smooth(p.mu.rtt, max(took, 1))
	p.owesLocked(owed)
}

// failed leaves the peer out and closes its connections.
func (p *peer) failed(err error) {
	p.mu.Lock()
	was := p.mu.health.Out()
	p.mu.health = p.mu.health.Failed(time.Now())
	control := p.mu.control
	bulk := append([]*download(nil), p.mu.bulk...)
	p.mu.control = nil
	clear(p.mu.bulk)
	p.mu.Unlock()
	p.close(control, bulk)
	p.t.metrics.peerFailures.Add(1)
	if !was {
		p.t.log.Warn("peer is left out", "node", p.id.Short(), "err", err)
	}
}

func (p *peer) close(control *control, bulk []*download) {
	if control != nil {
		hangUp(control.l)
	}
	for _, d := range bulk {
		if d != nil {
			hangUp(d.l)
		}
	}
}

// closeAll closes the connections of a peer that is forgotten.
func (p *peer) closeAll() {
	p.mu.Lock()
	control := p.mu.control
	bulk := append([]*download(nil), p.mu.bulk...)
	p.mu.Unlock()
	p.close(control, bulk)
}

// lost notes that a bulk connection has ended. One that nobody used is not a
// failure: it was idle for long, or the peer started anew.
func (p *peer) lost(d *download, err error, used bool) {
	p.mu.Lock()
	mine := false
	for i := range p.mu.bulk {
		if p.mu.bulk[i] == d {
			p.mu.bulk[i], mine = nil, true
		}
	}
	p.mu.Unlock()
	if used && mine && p.t.ctx.Err() == nil {
		p.t.metrics.ended(err)
		p.failed(err)
	}
}

// download is a bulk connection to the peer, made if there is none.
func (p *peer) download(ctx context.Context) (*download, error) {
	p.mu.Lock()
	p.mu.turn = (p.mu.turn + 1) % len(p.mu.bulk)
	turn := p.mu.turn
	p.mu.Unlock()
	d, err := p.connected(turn)
	if d != nil || err != nil {
		return d, err
	}
	if err := p.token(ctx); err != nil {
		return nil, err
	}
	defer func() { <-p.dialing }()
	if d, err = p.connected(turn); d != nil || err != nil { // meanwhile
		return d, err
	}
	l, err := p.dial(ctx, Bulk)
	if err != nil {
		return nil, err
	}
	d = newDownload(p, l)
	p.mu.Lock()
	p.mu.bulk[turn] = d
	p.mu.Unlock()
	if !p.t.run(l, func() { _ = d.out.run(); hangUp(l) }, d.run) {
		return nil, fmt.Errorf("node %s: %w", p.id.Short(), paging.ErrClosed)
	}
	return d, nil
}

func (p *peer) connected(turn int) (*download, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.health.Out() {
		return nil, fmt.Errorf("node %s failed lately: %w", p.id.Short(), paging.ErrUnavailable)
	}
	p.mu.used = time.Now()
	return p.mu.bulk[turn], nil
}

func (p *peer) token(ctx context.Context) error {
	select {
	case p.dialing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// dial connects to the peer. That it cannot be reached in StallAfter is a
// failure of the peer; that ctx ends before is not.
func (p *peer) dial(ctx context.Context, kind Kind) (*link, error) {
	limited, cancel := context.WithTimeout(ctx, p.t.cfg.StallAfter)
	defer cancel()
	l, err := p.t.cfg.Mux.dial(limited, p.id, kind)
	if err != nil && ctx.Err() == nil && !errors.Is(err, paging.ErrClosed) {
		p.failed(err)
	}
	return l, err
}

// PeerState is what a Transport knows of another node.
type PeerState struct {
	Node           placement.NodeID
	Out            bool          // left out of every choice because it failed
	Failures       int           // since it last did what was asked of it
	Distance       time.Duration // of a round trip; 0: not known
	BytesPerSecond float64       // 0: not known
	InFlightBytes  int64         // asked of it and not arrived
}

func (p *peer) state() PeerState {
	in := p.inflight.inUse()
	p.mu.Lock()
	defer p.mu.Unlock()
	return PeerState{
		Node: p.id, Out: p.mu.health.Out(), Failures: p.mu.health.Failures, Distance: p.mu.rtt,
		BytesPerSecond: p.mu.speed, InFlightBytes: in,
	}
}

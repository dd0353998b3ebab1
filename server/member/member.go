package member

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Times of gossip: a dead node is out of the view in 5 s at 64 nodes.
const (
	probeInterval   = 500 * time.Millisecond
	probeTimeout    = 200 * time.Millisecond
	gossipInterval  = 100 * time.Millisecond
	pushPull        = 10 * time.Second
	suspicionMult   = 3
	suspicionMost   = 2
	reclaimAfter    = 100 * time.Millisecond // a dead node may come back under its name with another address
	forgetAfter     = 24 * time.Hour
	rejoinEvery     = time.Second
	insistFor       = 15 * time.Second // after a start: others may hold the old address until they find it dead
	leaveWithin     = 2 * time.Second
	warnEvery       = time.Minute
	maxAwareness    = 2 // a slow machine may probe this much slower
	streamTimeout   = 3 * time.Second
	maxViewNodes    = 1024
	maxClusterBytes = 255
)

// Config of a Members. Zero values mean the documented default.
type Config struct {
	ID          placement.NodeID
	Incarnation placement.Incarnation
	Name        string // for people
	Cluster     string // the cluster's UUID, 1 to 255 bytes: gossip of another cluster is dropped
	Key         []byte // gossip key, 16, 24 or 32 bytes; nil: not encrypted
	Bind        string // IP literal and port to listen on
	Advertise   string // IP literal and port told to others; "": Bind
	PeerAddress string
	RPCAddress  string
	// Seeds finds the gossip addresses, host:port, of some other nodes that answer; it
	// is called again while this node is alone. nil: there are none.
	Seeds func(ctx context.Context) []string

	Logger *slog.Logger // state changes only; nil: none

	transport memberlist.Transport // for tests
}

// Members is this node's part in gossip. All methods may be called at the same
// time from many goroutines.
type Members struct {
	cfg    Config
	list   *memberlist.Memberlist
	own    *delegate
	events *events
	view   atomic.Pointer[placement.View]
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	loops  sync.WaitGroup
	warned time.Time // owned by rejoin

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each new view
	closed  bool
}

// Open starts gossip. Seeds that do not answer are no error: a node that is
// alone is the first. On error nothing runs.
func Open(cfg Config) (*Members, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	own := meta{id: cfg.ID, incarnation: cfg.Incarnation, name: cfg.Name, peer: cfg.PeerAddress, rpc: cfg.RPCAddress}
	_, metaErr := own.encode()
	conf, err := libraryConfig(&cfg)
	if err := errors.Join(metaErr, err); err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	m := &Members{cfg: cfg, own: &delegate{}, events: newEvents(), changed: make(chan struct{})}
	m.own.meta.Store(&own)
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.view.Store(&placement.View{})
	conf.Delegate = m.own
	conf.Events = m.events
	if m.list, err = memberlist.Create(conf); err != nil {
		m.cancel()
		return nil, fmt.Errorf("gossip on %s: %w", cfg.Bind, err)
	}
	m.loops.Go(m.build)  // owner: Members; exits at Close
	m.loops.Go(m.rejoin) // owner: Members; exits at Close
	return m, nil
}

func libraryConfig(cfg *Config) (*memberlist.Config, error) {
	conf := memberlist.DefaultLANConfig()
	var problems []error
	if cfg.Cluster == "" || len(cfg.Cluster) > maxClusterBytes {
		problems = append(problems, fmt.Errorf("cluster id of %d bytes, want 1 to %d", len(cfg.Cluster), maxClusterBytes))
	}
	if n := len(cfg.Key); n != 0 && n != 16 && n != 24 && n != 32 {
		problems = append(problems, fmt.Errorf("gossip key of %d bytes, want 16, 24 or 32", n))
	}
	var err error
	if conf.BindAddr, conf.BindPort, err = literal(cfg.Bind); err != nil {
		problems = append(problems, err)
	}
	// The library takes the port to advertise from its own field even if the
	// other one is set, so both always are.
	conf.AdvertiseAddr, conf.AdvertisePort = conf.BindAddr, conf.BindPort
	if cfg.Advertise != "" {
		if conf.AdvertiseAddr, conf.AdvertisePort, err = literal(cfg.Advertise); err != nil {
			problems = append(problems, err)
		}
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("%w: %w", paging.ErrInvalid, errors.Join(problems...))
	}
	conf.Name = cfg.ID.String()
	conf.Label = cfg.Cluster
	conf.SecretKey = cfg.Key
	conf.ProbeInterval, conf.ProbeTimeout = probeInterval, probeTimeout
	conf.GossipInterval, conf.PushPullInterval = gossipInterval, pushPull
	conf.SuspicionMult, conf.SuspicionMaxTimeoutMult = suspicionMult, suspicionMost
	conf.AwarenessMaxMultiplier = maxAwareness
	conf.DeadNodeReclaimTime = reclaimAfter
	conf.TCPTimeout = streamTimeout
	conf.Transport = cfg.transport
	conf.Logger = log.New(logWriter{cfg.Logger}, "", 0)
	return conf, nil
}

// literal splits ip:port; the library takes no names.
func literal(addr string) (ip string, port int, err error) {
	host, service, err := net.SplitHostPort(addr)
	if err != nil || net.ParseIP(host) == nil {
		return "", 0, fmt.Errorf("gossip address %q is not ip:port", addr)
	}
	if port, err = strconv.Atoi(service); err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("gossip address %q has no valid port", addr)
	}
	return host, port, nil
}

// logWriter keeps the library's debug lines out of the log.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("[ERR]")) || bytes.Contains(line, []byte("[WARN]")) {
		w.log.Debug("gossip", "line", string(bytes.TrimSpace(line)))
	}
	return len(line), nil
}

// delegate says what this node is and takes no messages.
type delegate struct{ meta atomic.Pointer[meta] }

// NodeMeta implements memberlist.Delegate.
func (d *delegate) NodeMeta(int) []byte {
	b, err := d.meta.Load().encode()
	if err != nil {
		return nil // Open has encoded it; leaving changes no length
	}
	return b
}

// NotifyMsg implements memberlist.Delegate.
func (*delegate) NotifyMsg([]byte) {}

// GetBroadcasts implements memberlist.Delegate.
func (*delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState implements memberlist.Delegate.
func (*delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState implements memberlist.Delegate.
func (*delegate) MergeRemoteState([]byte, bool) {}

// events notes what the library says. Its methods run under the library's lock:
// they copy and return.
type events struct {
	wake chan struct{}

	mu  sync.Mutex
	now map[string]change // by name: only the last counts, so it is bounded by the nodes
}

type change struct {
	meta []byte
	seen bool
}

func newEvents() *events {
	return &events{wake: make(chan struct{}, 1), now: map[string]change{}}
}

func (e *events) note(n *memberlist.Node, seen bool) {
	c := change{meta: slices.Clone(n.Meta), seen: seen}
	e.mu.Lock()
	e.now[n.Name] = c
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// NotifyJoin implements memberlist.EventDelegate.
func (e *events) NotifyJoin(n *memberlist.Node) { e.note(n, true) }

// NotifyUpdate implements memberlist.EventDelegate.
func (e *events) NotifyUpdate(n *memberlist.Node) { e.note(n, true) }

// NotifyLeave implements memberlist.EventDelegate.
func (e *events) NotifyLeave(n *memberlist.Node) { e.note(n, false) }

func (e *events) take() map[string]change {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := e.now
	e.now = map[string]change{}
	return out
}

// build makes a new view of what changed.
func (m *Members) build() {
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-m.events.wake:
		}
		m.publish(nextView(m.view.Load(), m.events.take(), time.Now()))
	}
}

func (m *Members) publish(v *placement.View) {
	m.view.Store(v)
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.changed)
	m.changed = make(chan struct{})
}

// nextView is the view after some changes: a node that is gone stays in it for a
// day, so that others can tell how long it has been.
func nextView(old *placement.View, changes map[string]change, now time.Time) *placement.View {
	nodes := map[placement.NodeID]placement.NodeInfo{}
	for _, n := range old.Nodes {
		if n.Seen || now.Sub(n.Since) < forgetAfter {
			nodes[n.ID] = n
		}
	}
	for name, c := range changes {
		id, err := placement.ParseNodeID(name)
		if err != nil {
			continue // not one of ours: names are ids
		}
		n, known := nodes[id]
		if !known && len(nodes) >= maxViewNodes {
			continue
		}
		left := false
		if said, err := decodeMeta(c.meta); err == nil && said.id == id && said.incarnation >= n.Incarnation {
			n.Incarnation, n.Name, n.PeerAddress, n.RPCAddress = said.incarnation, said.name, said.peer, said.rpc
			left = said.leaving
		}
		if n.ID = id; !known || n.Seen != c.seen || n.Left != left {
			n.Since = now
		}
		n.Seen, n.Left = c.seen, left
		nodes[id] = n
	}
	v := &placement.View{Version: old.Version + 1, Nodes: make([]placement.NodeInfo, 0, len(nodes))}
	for _, n := range nodes {
		v.Nodes = append(v.Nodes, n)
	}
	slices.SortFunc(v.Nodes, func(a, b placement.NodeInfo) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	return v
}

// rejoin contacts seeds for some time after the start, and again whenever this
// node is alone: a cluster that was split, or restarted everywhere, comes
// together by itself.
func (m *Members) rejoin() {
	tick := time.NewTicker(rejoinEvery)
	defer tick.Stop()
	start := time.Now()
	for {
		if m.cfg.Seeds != nil && (time.Since(start) < insistFor || m.alone()) {
			m.join()
		}
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (m *Members) join() {
	seeds := m.cfg.Seeds(m.ctx)
	if len(seeds) == 0 {
		return
	}
	if _, err := m.list.Join(seeds); err != nil {
		if now := time.Now(); now.Sub(m.warned) >= warnEvery {
			m.warned = now
			m.cfg.Logger.Warn("nodes that answer on their peer port cannot be reached by gossip: is the gossip key the same, and are UDP and TCP open?", "seeds", seeds, "err", err)
		}
	}
}

func (m *Members) alone() bool {
	for _, n := range m.view.Load().Nodes {
		if n.Seen && n.ID != m.cfg.ID {
			return false
		}
	}
	return true
}

// View is the cluster as it is seen now. Never nil.
func (m *Members) View() *placement.View { return m.view.Load() }

// Changed is closed at the next new view.
func (m *Members) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// Address is the gossip address that others reach this node at.
func (m *Members) Address() string { return m.list.LocalNode().Address() }

// Leave tells the others that this node goes in good order, waits for that at
// most 2 s, and stops. Without Leave, after Close, the others find out by
// themselves. A second call, and one after Close, does nothing.
func (m *Members) Leave() error { return m.stop(true) }

// Close stops gossip at once and joins what was started. A second call does
// nothing.
func (m *Members) Close() error { return m.stop(false) }

func (m *Members) stop(leave bool) error {
	m.mu.Lock()
	closed := m.closed
	m.closed = true
	m.mu.Unlock()
	if closed {
		return nil
	}
	m.cancel()
	var err error
	if leave { // before Shutdown: afterwards the library panics
		said := *m.own.meta.Load()
		said.leaving = true
		m.own.meta.Store(&said)
		err = errors.Join(m.list.UpdateNode(leaveWithin/2), m.list.Leave(leaveWithin/2))
	}
	err = errors.Join(err, m.list.Shutdown())
	m.loops.Wait()
	return err
}

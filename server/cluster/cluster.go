package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/transport"
	"github.com/kvtier/kvtier/tier"
)

// Members is gossip: hints about who is alive and where.
type Members interface {
	View() *placement.View
	// Changed is closed at the next new view.
	Changed() <-chan struct{}
	// Address is the gossip address that others reach this node at.
	Address() string
	Close() error
}

// Config of a Node. Zero values mean the documented default.
type Config struct {
	ID          placement.NodeID
	Incarnation placement.Incarnation
	Name        string // for people, at most 64 bytes
	Cluster     string // the cluster's UUID
	Dir         string // of the directory's log and snapshots
	Bootstrap   bool   // this node is the first of a new cluster, if Dir is empty

	// Memory and Clock are those of directory.Config, for clusters inside one process.
	Memory *directory.Memory
	Clock  func() time.Time

	PeerListen    string // host:port of the peer port; port 0: any
	PeerAdvertise string // host:port told to others; "": where it listens
	RPCAddress    string // host:port of gRPC, told to others; "": none
	TLS           *transport.TLS
	Insecure      bool
	Network       transport.Network // nil: TCP

	// Gossip starts gossip when the peer port is open. The Node closes what it
	// returns.
	Gossip func(peerAddress string) (Members, error)
	// Capacity is the budget of each tier.
	Capacity []*kvtierv1.TierCapacity

	// Answers are the calls of other nodes that are answered here, by method, from
	// MethodFree on.
	Answers map[uint8]Answer

	MaxClaims int64 // claim budget of the directory; 0: its default
	// DownAfter is how long a node may be out of sight before the leader records it
	// as down. 0: 5 s.
	DownAfter time.Duration
	// GraceTime is how long the claims of a node that is down are kept. 0: 10 min.
	GraceTime time.Duration

	Logger *slog.Logger // state changes only; nil: none
}

func (c Config) withDefaults() Config {
	if c.DownAfter == 0 {
		c.DownAfter = 5 * time.Second
	}
	if c.GraceTime == 0 {
		c.GraceTime = 10 * time.Minute
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Node is a node's part in a cluster. All methods may be called at the same time
// from many goroutines.
type Node struct {
	cfg  Config
	log  *slog.Logger
	tier atomic.Pointer[tier.Hierarchy] // set by Start

	mux       *transport.Mux
	members   Members
	gossip    atomic.Pointer[Members] // members, for those who may ask before it is there
	directory atomic.Pointer[directory.Directory]
	pages     *transport.Transport
	claimer   atomic.Pointer[directory.Claimer] // set by Start; others may ask for pages before
	hints     *hints
	expected  expectations

	opened time.Time
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	loops  sync.WaitGroup
	doubts chan paging.PageID
	names  announcer
	looked time.Time // at all namespaces; owned by tend

	coldest   atomic.Uint64 // warmth below which blocks are not claimed
	unclaimed atomic.Int64
	drained   atomic.Bool // this node was emptied and has left: nothing is claimed
	shared    time.Time   // when shareClaims acted last; owned by tend
}

// Answer answers a call of another node.
type Answer func(ctx context.Context, from placement.NodeID, argument []byte) ([]byte, error)

// New opens the peer port, gossip and this node's replica of the directory. Nothing
// is claimed and no page is served before Start. On error nothing is held.
func New(cfg Config) (_ *Node, err error) {
	cfg = cfg.withDefaults()
	n := &Node{cfg: cfg, log: cfg.Logger, opened: time.Now(), doubts: make(chan paging.PageID, maxDoubts)}
	n.names.fresh = make(chan *paging.Namespace, maxAnnounced)
	n.ctx, n.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	if n.hints, err = newHints(); err != nil {
		return nil, err
	}
	if n.mux, err = transport.OpenMux(transport.MuxConfig{
		ID: cfg.ID, Cluster: cfg.Cluster, Listen: cfg.PeerListen, TLS: cfg.TLS, Insecure: cfg.Insecure,
		Resolve: n.resolve, Gossip: n.gossipAddress, Network: cfg.Network, Logger: cfg.Logger,
	}); err != nil {
		return nil, err
	}
	if n.members, err = cfg.Gossip(n.PeerAddress()); err != nil {
		return nil, err
	}
	n.gossip.Store(&n.members)
	if n.pages, err = transport.Open(transport.Config{Mux: n.mux, Source: (*source)(n), Answer: n.answer, Logger: n.log}); err != nil {
		return nil, err
	}
	d, err := directory.Open(directory.Config{
		ID: cfg.ID, Dir: cfg.Dir, Peers: (*peers)(n), Bootstrap: cfg.Bootstrap, MaxClaims: cfg.MaxClaims, Memory: cfg.Memory, Clock: cfg.Clock, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	n.directory.Store(d)
	return n, nil
}

// replica is this node's replica of the directory; nil while it is opened.
func (n *Node) replica() *directory.Directory { return n.directory.Load() }

// PeerAddress is where other nodes reach this one.
func (n *Node) PeerAddress() string {
	if n.cfg.PeerAdvertise != "" {
		return n.cfg.PeerAdvertise
	}
	return n.mux.Addr().String()
}

// Start begins to serve pages of h, which was opened with this Node as its Peers
// and Observed, and to claim them. It is called once, before any Fetch of h.
func (n *Node) Start(h *tier.Hierarchy) error {
	n.tier.Store(h)
	claimer, err := directory.NewClaimer(directory.ClaimerConfig{
		Directory: n.replica(), Inventory: (*inventory)(n), Logger: n.log,
		Self: &kvtierv1.JoinNode{
			Node: n.cfg.ID[:], Incarnation: uint64(n.cfg.Incarnation), Name: n.cfg.Name,
			PeerAddress: n.PeerAddress(), RpcAddress: n.cfg.RPCAddress, Capacity: n.cfg.Capacity,
		},
	})
	if err != nil {
		return err
	}
	n.claimer.Store(claimer)
	// Owner: the Node. Exit: Close.
	n.loops.Go(n.claim)
	n.loops.Go(n.check)
	n.loops.Go(n.tend)
	return nil
}

// ID is the cluster's UUID.
func (n *Node) ID() string { return n.cfg.Cluster }

// Directory is this node's replica of the directory.
func (n *Node) Directory() *directory.Directory { return n.replica() }

// Pages is the transport of pages.
func (n *Node) Pages() *transport.Transport { return n.pages }

// Port is the peer port.
func (n *Node) Port() *transport.Mux { return n.mux }

// Claims counts what became of this node's claims.
func (n *Node) Claims() directory.ClaimerMetrics { return n.claimer.Load().Metrics() }

// Holders calls f with the nodes that claim each block, as the local replica has it,
// whether they can be reached or not.
func (n *Node) Holders(ns paging.NamespaceID, names []paging.BlockName, f func(i int, holders []directory.Holder)) {
	n.holders(ns, names, func(i int, _ placement.BlockKey, holders []directory.Holder) { f(i, holders) })
}

// Members is gossip, for those who show it.
func (n *Node) Members() Members { return n.members }

// Close takes the node out of the cluster without a word, as a crash would: its
// claims stay for the grace time, so that a restart finds them. The Hierarchy that
// it serves is closed after it. Idempotent.
func (n *Node) Close() error {
	n.cancel()
	n.loops.Wait()
	if c := n.claimer.Load(); c != nil {
		c.Close()
	}
	var errs []error
	if d := n.replica(); d != nil {
		errs = append(errs, d.Close())
	}
	if n.pages != nil {
		errs = append(errs, n.pages.Close())
	}
	if n.members != nil {
		errs = append(errs, n.members.Close())
	}
	if n.mux != nil {
		errs = append(errs, n.mux.Close())
	}
	if n.hints != nil {
		n.hints.close()
	}
	return errors.Join(errs...)
}

// resolve tells where a node's peer port is: as gossip says, else as the directory
// has it.
func (n *Node) resolve(id placement.NodeID) (string, bool) {
	if m := n.gossip.Load(); m != nil {
		if info, ok := (*m).View().Find(id); ok && info.PeerAddress != "" {
			return info.PeerAddress, true
		}
	}
	if n.replica() != nil {
		if rec, ok := n.record(id); ok && rec.PeerAddress != "" {
			return rec.PeerAddress, true
		}
	}
	return "", false
}

func (n *Node) gossipAddress() string {
	if m := n.gossip.Load(); m != nil {
		return (*m).Address()
	}
	return ""
}

func (n *Node) record(id placement.NodeID) (rec directory.Node, ok bool) {
	n.replica().Read(func(s *directory.State) {
		for _, x := range s.Nodes() {
			if x.ID == id {
				rec, ok = x, true
			}
		}
	})
	return rec, ok
}

// Methods of calls between nodes.
const (
	methodPropose uint8 = 1
	methodLacks   uint8 = 2
	methodPull    uint8 = 3
	// MethodFree is the first that Config.Answers may name, MethodSessions the first of
	// those about sessions, MethodPlans of those about plans.
	MethodFree     uint8 = 16
	MethodSessions uint8 = 32
	MethodPlans    uint8 = 48
)

func (n *Node) answer(ctx context.Context, from placement.NodeID, method uint8, argument []byte) ([]byte, error) {
	switch method {
	case methodPropose:
		return n.proposeHere(ctx, argument)
	case methodLacks:
		return n.answerLacks(argument)
	case methodPull:
		return n.answerPull(ctx, from, argument)
	}
	a := n.cfg.Answers[method]
	if a == nil {
		return nil, fmt.Errorf("method %d of another node's call: %w", method, paging.ErrInvalid)
	}
	return a(ctx, from, argument)
}

func (n *Node) proposeHere(ctx context.Context, command []byte) ([]byte, error) {
	d := n.replica()
	if d == nil {
		return nil, fmt.Errorf("this node is starting: %w", paging.ErrUnavailable)
	}
	r, err := d.ProposeHere(ctx, command)
	if err != nil {
		return nil, err
	}
	return []byte{byte(r)}, nil
}

// Call gives an argument to another node's Answers, and returns its answer. Errors as
// of transport.Call.
func (n *Node) Call(ctx context.Context, to placement.NodeID, method uint8, argument []byte) ([]byte, error) {
	return n.pages.Call(ctx, to, method, argument)
}

// peers is what the directory needs of a Node.
type peers Node

// Accept implements directory.Peers.
func (p *peers) Accept(ctx context.Context) (net.Conn, error) { return p.mux.Accept(ctx) }

// Dial implements directory.Peers.
func (p *peers) Dial(ctx context.Context, node placement.NodeID) (net.Conn, error) {
	return p.mux.Dial(ctx, node)
}

// Forward implements directory.Peers.
func (p *peers) Forward(ctx context.Context, leader placement.NodeID, command []byte) (directory.Result, error) {
	b, err := p.pages.Call(ctx, leader, methodPropose, command)
	if err != nil {
		return directory.Invalid, err
	}
	if len(b) != 1 {
		return directory.Invalid, fmt.Errorf("answer of %d bytes to a forwarded command: %w", len(b), paging.ErrIncompatible)
	}
	return directory.Result(b[0]), nil
}

// Members implements directory.Peers.
func (p *peers) Members() []placement.Member { return p.members.View().Members(time.Now()) }

package server

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/member"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/plans"
	"github.com/kvtier/kvtier/server/sessions"
	"github.com/kvtier/kvtier/server/transport"
	"github.com/kvtier/kvtier/server/trust"
	"github.com/kvtier/kvtier/tier"
)

const clusterFormat = 1

// clusterRecord is the content of clusterFile (docs/formats.md): which cluster the
// node is of, and where it last saw others.
type clusterRecord struct {
	Format  int      `json:"format"`
	Cluster string   `json:"cluster"`
	Peers   []string `json:"peers"` // peer addresses
}

// maxKnownPeers bounds the addresses that are kept: any one that answers is enough.
const maxKnownPeers = 16

// readCluster reads which cluster a data directory is of; nil: of none.
func readCluster(dir string) (*clusterRecord, error) {
	if dir == "" {
		return nil, nil
	}
	path := filepath.Join(dir, clusterFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var r clusterRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s does not say which cluster the node is of (%w): restore it, or name an empty directory: %w", path, err, paging.ErrIncompatible)
	}
	if r.Format != clusterFormat || r.Cluster == "" {
		return nil, fmt.Errorf("%s has format %d, this version reads %d: %w", path, r.Format, clusterFormat, paging.ErrIncompatible)
	}
	return &r, nil
}

func (r *clusterRecord) write(dir string) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return writeFileDurably(filepath.Join(dir, clusterFile), append(b, '\n'))
}

// newUUID is a random UUID, version 4.
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// latePeers are the other nodes of the cluster, which is opened after the tiers: a
// node that cannot read its own data directory does not appear to others.
type latePeers struct{ cluster atomic.Pointer[cluster.Node] }

// Locate implements tier.Peers.
func (p *latePeers) Locate(ns paging.NamespaceID, names []paging.BlockName, elsewhere []paging.PartSet) {
	if c := p.cluster.Load(); c != nil {
		c.Locate(ns, names, elsewhere)
	}
}

// Bring implements tier.Peers.
func (p *latePeers) Bring(ctx context.Context, ns paging.NamespaceID, pages []tier.RemotePage, done func(int, uint64, error)) {
	if c := p.cluster.Load(); c != nil {
		c.Bring(ctx, ns, pages, done)
		return
	}
	for i := range pages {
		done(i, 0, paging.ErrUnavailable)
	}
}

// Times of joining.
const (
	joinWithin    = time.Minute
	joinEvery     = 500 * time.Millisecond
	discoverSeeds = 5 // asked at each try
)

// openCluster makes the node one of its cluster, if it is to be of one: the one that
// its data directory names, a new one, or that of the nodes to join.
func (s *Server) openCluster(ctx context.Context, record *clusterRecord) (err error) {
	n := s.node
	if record == nil && !n.cfg.clustered() {
		return nil
	}
	if err := n.namesNode(); err != nil {
		return err
	}
	fresh := record == nil
	first := fresh && n.cfg.Bootstrap
	switch {
	case fresh && s.dir.holds(directoryDir):
		// Its voters and claims are another cluster's: a replica that began with them
		// would never agree with the others again.
		return fmt.Errorf("%s holds a replica of a cluster, and %s, which says of which one, is missing: restore that file, or remove %s/ as well: %w",
			s.dir.sub(directoryDir), clusterFile, directoryDir, paging.ErrIncompatible)
	case first:
		record = &clusterRecord{Format: clusterFormat, Cluster: newUUID()}
	case fresh:
		if record, err = n.discover(ctx); err != nil {
			return err
		}
	}
	if err := record.write(s.dir.path); err != nil {
		return fmt.Errorf("%s: %w", clusterFile, err)
	}
	defer func() {
		if err != nil && fresh && !s.dir.holds(directoryDir) { // of no cluster yet: the next start may be told of another
			err = errors.Join(err, os.Remove(s.dir.sub(clusterFile)))
		}
	}()
	if n.names, err = sessions.OpenStore(s.dir.sub(sessionsDir), nil); err != nil {
		return err
	}
	n.sessions = sessions.New(sessions.Config{
		Self: placement.NodeID(n.identity.node), Store: n.names, MaxPerTenant: n.cfg.MaxSessions, BytesPerSecond: int64(n.cfg.MoveBandwidth), PrefillRate: n.prefill.rate, Logger: n.log,
	})
	n.plans = plans.New(plans.Config{Self: placement.NodeID(n.identity.node), Mover: n.sessions, Tiers: n.tierBytes, Logger: n.log})
	n.cluster, err = n.newCluster(record, s.dir.sub(directoryDir), s.rpcAddress())
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	if err := n.cluster.Start(n.hier); err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	n.sessions.Start(n.cluster, n.hier)
	n.plans.Start(n.cluster, n.hier)
	n.peers.cluster.Store(n.cluster)
	n.workers.Go(func() { n.rememberPeers(record, s.dir.path) }) // owner: the node; exits with its context
	n.log.Info("node is of a cluster", "cluster", record.Cluster, "first", first, "peers", n.cluster.PeerAddress())
	return nil
}

// rpcAddress is where other nodes and tools reach gRPC; "": nowhere.
func (s *Server) rpcAddress() string {
	if s.tcp == nil {
		return ""
	}
	return s.tcp.Addr().String()
}

func (n *node) newCluster(record *clusterRecord, dir, rpcAddress string) (*cluster.Node, error) {
	cfg := &n.cfg
	var key []byte
	if cfg.GossipKey != "" {
		var err error
		if key, err = trust.ReadGossipKey(cfg.GossipKey); err != nil {
			return nil, fmt.Errorf("gossip-key: %w", err)
		}
	}
	capacity := []*kvtierv1.TierCapacity{{Tier: kvtierv1.Tier_TIER_RAM, Bytes: uint64(cfg.RAMBytes)}}
	if n.nvme != nil {
		capacity = append(capacity, &kvtierv1.TierCapacity{Tier: kvtierv1.Tier_TIER_NVME, Bytes: uint64(cfg.NVMeBytes)})
	}
	id := placement.NodeID(n.identity.node)
	name := nodeName(cfg.Name)
	return cluster.New(cluster.Config{
		ID: id, Incarnation: placement.Incarnation(n.identity.incarnation), Name: name, Cluster: record.Cluster, Dir: dir, Bootstrap: cfg.Bootstrap,
		PeerListen: cfg.PeerListen, PeerAdvertise: cfg.PeerAdvertise, RPCAddress: rpcAddress, TLS: n.peerTLS(), Insecure: cfg.Insecure,
		Capacity: capacity, MaxClaims: int64(cfg.MaxClaims), GraceTime: cfg.ClaimsGrace, Answers: n.answers(), Logger: n.log,
		Gossip: func(peerAddress string) (cluster.Members, error) {
			seeds := append(cfg.seeds(), record.Peers...)
			m, err := member.Open(member.Config{
				ID: id, Incarnation: placement.Incarnation(n.identity.incarnation), Name: name, Cluster: record.Cluster, Key: key,
				Bind: cfg.GossipListen, Advertise: cfg.GossipAdvertise, PeerAddress: peerAddress, RPCAddress: rpcAddress, Logger: n.log,
				Seeds: func(ctx context.Context) []string { return n.gossipOf(ctx, record.Cluster, seeds) },
			})
			if err != nil {
				return nil, err
			}
			return m, nil
		},
	})
}

// nodeName is the node's name for people.
func nodeName(name string) string {
	if name == "" {
		name, _ = os.Hostname() // a node may go without
	}
	return name[:min(len(name), maxNodeName)]
}

// peerTLS is what the node shows to other nodes; nil: nothing.
func (n *node) peerTLS() *transport.TLS {
	if n.trust == nil || n.cfg.TLS.CA == "" {
		return nil
	}
	return n.trust.Peers()
}

// namesNode reports whether other nodes will take the certificate for a node's:
// paging.ErrInvalid if not. Without it they would refuse every connection, one by one.
func (n *node) namesNode() error {
	if n.peerTLS() == nil {
		return nil
	}
	if id := n.trust.Identity(); id.Kind != trust.Node {
		return fmt.Errorf("tls.cert %s is of %s: a node of a cluster needs one that names a node (kvtier cert issue --node NAME): %w", n.cfg.TLS.Cert, id, paging.ErrInvalid)
	}
	return nil
}

// discover asks the nodes to join which cluster they are of, until one answers.
func (n *node) discover(ctx context.Context) (*clusterRecord, error) {
	ctx, cancel := context.WithTimeout(ctx, joinWithin)
	defer cancel()
	tick := time.NewTicker(joinEvery)
	defer tick.Stop()
	seeds := n.cfg.seeds()
	for {
		var errs []error
		for _, seed := range seeds {
			intro, err := n.ask(ctx, seed)
			if err == nil {
				return &clusterRecord{Format: clusterFormat, Cluster: intro.Cluster, Peers: []string{seed}}, nil
			}
			errs = append(errs, err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("join: no node answers: start the first one with --bootstrap, and see that its peer port can be reached from here: %w", errors.Join(errs...))
		case <-tick.C:
		}
	}
}

func (n *node) ask(ctx context.Context, seed string) (transport.Introduction, error) {
	return transport.Discover(ctx, transport.DiscoverConfig{
		ID: placement.NodeID(n.identity.node), Address: seed, TLS: n.peerTLS(), Insecure: n.cfg.Insecure,
	})
}

// gossipOf are the gossip addresses of nodes of this cluster, by their peer
// addresses: those that answer.
func (n *node) gossipOf(ctx context.Context, id string, seeds []string) (addresses []string) {
	for _, seed := range seeds[:min(len(seeds), discoverSeeds)] {
		intro, err := n.ask(ctx, seed)
		switch {
		case err != nil:
			n.log.Debug("a node to join does not answer", "address", seed, "err", err)
		case intro.Cluster != id:
			n.log.Warn("a node to join is of another cluster", "address", seed, "its", intro.Cluster, "ours", id)
		default:
			addresses = append(addresses, intro.Gossip)
		}
	}
	return addresses
}

// rememberPeers keeps where others are, for the next start.
func (n *node) rememberPeers(record *clusterRecord, dir string) {
	for {
		changed := n.cluster.Members().Changed()
		var seen []string
		for _, m := range n.cluster.Members().View().Nodes {
			if m.Seen && m.ID != placement.NodeID(n.identity.node) && len(seen) < maxKnownPeers {
				seen = append(seen, m.PeerAddress)
			}
		}
		slices.Sort(seen)
		if len(seen) > 0 && !slices.Equal(seen, record.Peers) {
			next := &clusterRecord{Format: clusterFormat, Cluster: record.Cluster, Peers: seen}
			if err := next.write(dir); err != nil {
				n.log.Warn("the addresses of other nodes are not kept", "err", err)
			} else {
				record = next
			}
		}
		select {
		case <-n.ctx.Done():
			return
		case <-changed:
		}
	}
}

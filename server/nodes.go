package server

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/sessions"
	"github.com/kvtier/kvtier/server/transport"
)

// clusterStatus is how the cluster is, as this node sees it; nil: it is alone.
func (n *node) clusterStatus() *kvtierv1.ClusterStatus {
	if n.cluster == nil {
		return nil
	}
	d := n.cluster.Directory()
	st, claims, self := d.Status(), n.cluster.Claims(), n.self()
	out := &kvtierv1.ClusterStatus{
		Cluster: n.cluster.ID(), Name: self.Name, Role: st.Role, Voter: st.Voter, Voters: uint32(st.Voters), Replicas: uint32(st.Replicas),
		Applied: st.Applied, Behind: st.Behind, Stalled: st.Stalled,
		PendingClaims: uint64(claims.Pending), RefusedClaimBatches: uint64(claims.Full), PeerAddress: n.cluster.PeerAddress(),
		UnclaimedBlocks: uint64(n.cluster.Unclaimed()),
	}
	if st.HasLeader {
		out.Leader = st.Leader[:]
	}
	for _, m := range n.cluster.Members().View().Nodes {
		if m.Seen {
			out.NodesSeen++
		}
	}
	for _, p := range n.cluster.Pages().Peers() {
		if p.Out {
			out.PeersOut++
		}
	}
	d.Read(func(s *directory.State) {
		out.Claims, out.MaxClaims, out.Nodes = uint64(s.Claims()), uint64(s.MaxClaims()), uint32(len(s.Nodes()))
	})
	return out
}

// clusterProblems is what an operator should know of the cluster.
func (n *node) clusterProblems() []string {
	if n.cluster == nil {
		return nil
	}
	var out []string
	d := n.cluster.Directory()
	st := d.Status()
	if err := d.Err(); err != nil {
		out = append(out, "directory: this replica stopped: "+err.Error())
	}
	if st.Stalled != "" {
		out = append(out, "directory: "+st.Stalled)
	}
	if !st.HasLeader {
		out = append(out, "directory: no leader is known: ownership cannot change until most voters can be reached; reads go on")
	}
	if n.cluster.Claims().Refused > 0 {
		out = append(out, "directory: the claims of this node are refused: another process has its identity, or its data directory is older than the cluster's record")
	}
	return out
}

// ListNodes lists the nodes of the cluster, as this node sees them.
func (s *admin) ListNodes(ctx context.Context, _ *kvtierv1.ListNodesRequest) (*kvtierv1.ListNodesResponse, error) {
	n := s.node
	m := n.metrics()
	own := n.tierStatus(&m)
	if n.cluster == nil {
		self := n.self()
		return &kvtierv1.ListNodesResponse{Nodes: []*kvtierv1.NodeStatus{{
			Node: self.ID[:], Name: self.Name, Incarnation: n.identity.incarnation, State: "up", Seen: true, Reachable: true, Self: true, Tiers: own,
		}}}, nil
	}
	nodes := n.knownNodes()
	n.askTiers(ctx, nodes)
	out := &kvtierv1.ListNodesResponse{}
	for _, x := range nodes {
		if x.GetSelf() {
			x.Tiers = own
		}
		out.Nodes = append(out.Nodes, x)
	}
	slices.SortFunc(out.Nodes, func(a, b *kvtierv1.NodeStatus) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), slices.Compare(a.GetNode(), b.GetNode()))
	})
	return out, nil
}

// knownNodes are those of the directory and those that gossip sees.
func (n *node) knownNodes() map[placement.NodeID]*kvtierv1.NodeStatus {
	out := map[placement.NodeID]*kvtierv1.NodeStatus{}
	d := n.cluster.Directory()
	d.Read(func(s *directory.State) {
		for _, x := range s.Nodes() {
			out[x.ID] = &kvtierv1.NodeStatus{
				Node: x.ID[:], Name: x.Name, Incarnation: uint64(x.Incarnation), State: directory.StateName(x.State), Since: timestamppb.New(time.UnixMilli(x.SinceMillis)),
				PeerAddress: x.PeerAddress, RpcAddress: x.RPCAddress, Claims: uint64(x.Claims),
			}
		}
	})
	for _, m := range n.cluster.Members().View().Nodes {
		x := out[m.ID]
		if x == nil {
			x = &kvtierv1.NodeStatus{Node: m.ID[:], Name: m.Name, Incarnation: uint64(m.Incarnation), State: "unknown"}
			out[m.ID] = x
		}
		x.Seen = m.Seen
		if m.Seen {
			x.PeerAddress, x.RpcAddress = m.PeerAddress, m.RPCAddress
		}
	}
	peers := map[placement.NodeID]transport.PeerState{}
	for _, p := range n.cluster.Pages().Peers() {
		peers[p.Node] = p
	}
	leader, led := d.Leader()
	for id, x := range out {
		x.Self = id == placement.NodeID(n.identity.node)
		x.Leader = led && id == leader
		x.Reachable = x.Self || n.cluster.Reachable(id)
		if p, ok := peers[id]; ok {
			x.Distance = durationpb.New(p.Distance)
		}
	}
	return out
}

// askTiers asks the other nodes how their tiers are.
func (n *node) askTiers(ctx context.Context, nodes map[placement.NodeID]*kvtierv1.NodeStatus) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	var asked sync.WaitGroup
	for id, x := range nodes {
		if x.GetSelf() || !x.GetSeen() {
			continue
		}
		asked.Go(func() { // owner: this call; exits with ctx; bound: the nodes of a cluster
			b, err := n.cluster.Call(ctx, id, methodTiers, nil)
			var a kvtierv1.ListTiersResponse
			if err == nil && proto.Unmarshal(b, &a) == nil {
				x.Tiers = a.GetTiers()
			}
		})
	}
	asked.Wait()
}

// ClusterMetrics is what a node counts as one of a cluster. Zero: it is alone.
type ClusterMetrics struct {
	Unclaimed       int64 // blocks that the directory has no room for
	NodesSeen       int   // that answer gossip, this one included
	Leads           bool
	DirectoryClaims int64
	Directory       directory.Status
	Claims          directory.ClaimerMetrics
	Pages           transport.Metrics
	Port            transport.MuxMetrics
	Sessions        sessions.Metrics
}

func (n *node) clusterMetrics() (m ClusterMetrics) {
	if n.cluster == nil {
		return m
	}
	m.Directory, m.Claims = n.cluster.Directory().Status(), n.cluster.Claims()
	m.Pages, m.Port = n.cluster.Pages().Metrics(), n.cluster.Port().Metrics()
	m.Unclaimed, m.Sessions = n.cluster.Unclaimed(), n.sessions.Metrics()
	m.Leads = m.Directory.HasLeader && m.Directory.Leader == placement.NodeID(n.identity.node)
	n.cluster.Directory().Read(func(s *directory.State) { m.DirectoryClaims = s.Claims() })
	for _, x := range n.cluster.Members().View().Nodes {
		if x.Seen {
			m.NodesSeen++
		}
	}
	return m
}

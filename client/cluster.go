package client

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// ClusterStatus is how the cluster is, as one node sees it.
type ClusterStatus struct {
	Cluster             string `json:"cluster"`      // UUID
	Name                string `json:"name"`         // of the node that answers
	PeerAddress         string `json:"peer_address"` // of its port for other nodes
	Leader              string `json:"leader"`       // node id, hex; "": none is known, and ownership cannot change
	Role                string `json:"role"`
	Voter               bool   `json:"voter"`
	Voters              uint32 `json:"voters"`
	Replicas            uint32 `json:"replicas"`
	Applied             uint64 `json:"applied"`
	Behind              uint64 `json:"behind"`  // entries of the log that are here and not applied
	Stalled             string `json:"stalled"` // why this replica is cut off; "": it is not
	NodesSeen           uint32 `json:"nodes_seen"`
	Nodes               uint32 `json:"nodes"`
	PeersOut            uint32 `json:"peers_out"` // left out of reads because they failed lately
	Claims              uint64 `json:"claims"`
	MaxClaims           uint64 `json:"max_claims"`
	PendingClaims       uint64 `json:"pending_claims"`
	RefusedClaimBatches uint64 `json:"refused_claim_batches"`
	UnclaimedBlocks     uint64 `json:"unclaimed_blocks"` // of this node: the directory has no room for them
}

func clusterOf(c *kvtierv1.ClusterStatus) *ClusterStatus {
	if c == nil {
		return nil
	}
	return &ClusterStatus{
		Cluster: c.GetCluster(), Name: c.GetName(), PeerAddress: c.GetPeerAddress(), Leader: hex.EncodeToString(c.GetLeader()), Role: c.GetRole(),
		Voter: c.GetVoter(), Voters: c.GetVoters(), Replicas: c.GetReplicas(), Applied: c.GetApplied(), Behind: c.GetBehind(), Stalled: c.GetStalled(),
		NodesSeen: c.GetNodesSeen(), Nodes: c.GetNodes(), PeersOut: c.GetPeersOut(), Claims: c.GetClaims(), MaxClaims: c.GetMaxClaims(),
		PendingClaims: c.GetPendingClaims(), RefusedClaimBatches: c.GetRefusedClaimBatches(), UnclaimedBlocks: c.GetUnclaimedBlocks(),
	}
}

// NodeStatus is one node of the cluster.
type NodeStatus struct {
	Node        string       `json:"node"` // id, hex
	Name        string       `json:"name"`
	Incarnation uint64       `json:"incarnation"`
	State       string       `json:"state"`     // "up", "down", "draining", "left" or "unknown"
	SinceS      float64      `json:"since_s"`   // time in that state; 0: not known
	Seen        bool         `json:"seen"`      // it answers gossip
	Reachable   bool         `json:"reachable"` // it is not left out of reads
	Self        bool         `json:"self"`      // it is the node that answers
	Leader      bool         `json:"leader"`
	PeerAddress string       `json:"peer_address"`
	RPCAddress  string       `json:"rpc_address"`
	Claims      uint64       `json:"claims"`
	DistanceUS  float64      `json:"distance_us"` // of a round trip; 0: not known
	Tiers       []TierStatus `json:"tiers"`       // none: it did not answer in time
}

// Nodes lists the nodes of the cluster, as the node sees them.
func (a *Admin) Nodes(ctx context.Context) ([]NodeStatus, error) {
	resp, err := ask(ctx, a, "nodes", a.service.ListNodes, &kvtierv1.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	out := make([]NodeStatus, len(resp.GetNodes()))
	for i, n := range resp.GetNodes() {
		out[i] = NodeStatus{
			Node: hex.EncodeToString(n.GetNode()), Name: n.GetName(), Incarnation: n.GetIncarnation(), State: n.GetState(), Seen: n.GetSeen(),
			Reachable: n.GetReachable(), Self: n.GetSelf(), Leader: n.GetLeader(), PeerAddress: n.GetPeerAddress(), RPCAddress: n.GetRpcAddress(),
			Claims: n.GetClaims(), DistanceUS: float64(n.GetDistance().AsDuration()) / float64(time.Microsecond), Tiers: tiersOf(n.GetTiers()),
		}
		if n.GetSince().IsValid() {
			out[i].SinceS = time.Since(n.GetSince().AsTime()).Seconds()
		}
	}
	return out, nil
}

// ExplainRequest names blocks by Names, or by Tokens, of which the names are made by
// the hash algorithm of the namespace.
type ExplainRequest struct {
	Namespace paging.NamespaceID // zero: the one that has the first block
	Names     []paging.BlockName // in chain order
	Tokens    []uint32
}

// Explanation says of blocks why they are hits, or are not.
type Explanation struct {
	Namespace string             `json:"namespace"` // id, hex
	Tenant    string             `json:"tenant"`
	Model     string             `json:"model"`
	Usable    uint32             `json:"usable_blocks"` // of the prefix, over all nodes that can be reached
	Blocks    []BlockExplanation `json:"blocks"`
}

// BlockExplanation is that of one block.
type BlockExplanation struct {
	Name    string   `json:"name"`    // hex
	Verdict string   `json:"verdict"` // such as "hit_here" or "evicted"
	Text    string   `json:"text"`    // the same in a sentence
	Nodes   []string `json:"nodes"`   // that hold a part of it
}

// Explain asks why blocks are hits, or are not.
func (a *Admin) Explain(ctx context.Context, r ExplainRequest) (*Explanation, error) {
	req := &kvtierv1.ExplainRequest{}
	if r.Namespace != (paging.NamespaceID{}) {
		req.NamespaceId = r.Namespace[:]
	}
	for i := range r.Names {
		req.BlockNames = append(req.BlockNames, r.Names[i][:]...)
	}
	for _, t := range r.Tokens {
		req.Tokens = binary.LittleEndian.AppendUint32(req.Tokens, t)
	}
	resp, err := ask(ctx, a, "explain", a.service.Explain, req)
	if err != nil {
		return nil, err
	}
	out := &Explanation{
		Namespace: hex.EncodeToString(resp.GetNamespaceId()), Tenant: resp.GetTenant(), Model: resp.GetModel(), Usable: resp.GetUsableBlocks(),
		Blocks: []BlockExplanation{},
	}
	for _, b := range resp.GetBlocks() {
		out.Blocks = append(out.Blocks, BlockExplanation{
			Name: hex.EncodeToString(b.GetName()), Verdict: kvstatus.Word(b.GetVerdict()), Text: b.GetText(), Nodes: append([]string{}, b.GetNodes()...),
		})
	}
	return out, nil
}

// SaveSnapshot writes the directory of the cluster, as the node has it, to w. The call
// is bounded by ctx.
func (a *Admin) SaveSnapshot(ctx context.Context, w io.Writer) (bytes int64, err error) {
	stream, err := a.service.SaveSnapshot(ctx, &kvtierv1.SaveSnapshotRequest{})
	for err == nil {
		var piece *kvtierv1.SaveSnapshotResponse
		if piece, err = stream.Recv(); err != nil {
			break
		}
		var n int
		n, err = w.Write(piece.GetData())
		bytes += int64(n)
		if err != nil {
			return bytes, fmt.Errorf("save snapshot: %w", err)
		}
	}
	if errors.Is(err, io.EOF) {
		return bytes, nil
	}
	return bytes, fmt.Errorf("save snapshot: %w", kvstatus.Err(err))
}

// snapshotPiece is how much of a snapshot is sent in one message.
const snapshotPiece = 256 << 10

// RestoreSnapshot replaces the directory of the cluster by the one in r, which the
// leader takes. The call is bounded by ctx.
func (a *Admin) RestoreSnapshot(ctx context.Context, r io.Reader) (nodes uint32, claims uint64, err error) {
	stream, err := a.service.RestoreSnapshot(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("restore snapshot: %w", kvstatus.Err(err))
	}
	buf := make([]byte, snapshotPiece)
	for {
		n, err := r.Read(buf)
		if n > 0 && stream.Send(&kvtierv1.RestoreSnapshotRequest{Data: buf[:n]}) != nil {
			break // the answer says why
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, 0, fmt.Errorf("restore snapshot: %w", err)
		}
	}
	resp, err := stream.CloseAndRecv()
	if err != nil {
		return 0, 0, fmt.Errorf("restore snapshot: %w", kvstatus.Err(err))
	}
	return resp.GetNodes(), resp.GetClaims(), nil
}

// NodePrefix is how much of a chain one node has.
type NodePrefix struct {
	Node         string       // id, hex
	Name         string       // for people
	Address      string       // of gRPC; "": it has none
	Usable       int          // blocks of the usable prefix
	UsableTokens int64        // tokens of them
	Tiers        map[Tier]int // blocks by slowest tier; empty: not known
}

// Locate tells how much of a chain each node of the cluster has, the longest first,
// and how long the prefix is that a Fetch could serve: what a router needs to choose
// a node. With claimsOnly nobody is asked. At most 4,096 blocks.
func (c *Client) Locate(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, claimsOnly bool) (nodes []NodePrefix, usable int, err error) {
	packed, err := pack(names)
	if err != nil {
		return nil, 0, fmt.Errorf("locate: %w", err)
	}
	l, err := c.up()
	if err != nil {
		return nil, 0, fmt.Errorf("locate: %w", err)
	}
	var resp *kvtierv1.LocateResponse
	err = l.unary(ctx, "locate", c.cfg.CallTimeout, func(ctx context.Context) (err error) {
		resp, err = kvtierv1.NewClusterServiceClient(l.conn).Locate(ctx, &kvtierv1.LocateRequest{NamespaceId: ns[:], BlockNames: packed, ClaimsOnly: claimsOnly})
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	for _, n := range resp.GetNodes() {
		p := NodePrefix{
			Node: hex.EncodeToString(n.GetNode()), Name: n.GetName(), Address: n.GetRpcAddress(),
			Usable: int(n.GetUsableBlocks()), UsableTokens: int64(n.GetUsableTokens()), Tiers: map[Tier]int{}, //nolint:gosec // tokens of one prompt
		}
		for _, t := range n.GetTiers() {
			p.Tiers[Tier(t.GetTier())] += int(t.GetBlocks())
		}
		nodes = append(nodes, p)
	}
	return nodes, int(resp.GetUsableBlocks()), nil
}

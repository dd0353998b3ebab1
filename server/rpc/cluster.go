package rpc

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// MaxLocateBlocks bounds the blocks of a Locate.
const MaxLocateBlocks = 4096

// LocateRequest asks where a chain is.
type LocateRequest struct {
	Namespace  paging.NamespaceID
	Names      []paging.BlockName
	Parts      paging.PartSet // 0: all
	ClaimsOnly bool
}

// LocateResult tells it.
type LocateResult struct {
	Usable int
	Nodes  []NodePrefix
}

// NodePrefix is how much of a chain one node has.
type NodePrefix struct {
	Node       ID
	Name       string
	RPCAddress string
	Usable     int
	Tokens     uint64
	Tiers      map[uint8]int // blocks by slowest tier, as on the wire; nil: not known
}

// clusterService is the ClusterService.
type clusterService struct {
	kvtierv1.UnimplementedClusterServiceServer
	node     Node
	accounts *Accounts
}

// Locate tells how much of a chain each node has.
func (s *clusterService) Locate(ctx context.Context, m *kvtierv1.LocateRequest) (*kvtierv1.LocateResponse, error) {
	if err := expired(ctx); err != nil {
		return nil, err
	}
	caller, err := s.accounts.caller(ctx)
	if err != nil {
		return nil, err
	}
	if caller.Tenant == "" && !caller.Admin {
		return nil, fmt.Errorf("locate: the caller is of no tenant and no operator: %w", paging.ErrDenied)
	}
	r := LocateRequest{Parts: paging.PartSet(m.GetParts()), ClaimsOnly: m.GetClaimsOnly()}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.Names, err = new(scratch).packed(m.GetBlockNames()); err != nil {
		return nil, err
	}
	if len(r.Names) > MaxLocateBlocks {
		return nil, invalid("%d blocks, at most %d: name the first ones", len(r.Names), MaxLocateBlocks)
	}
	res, err := s.node.Locate(ctx, caller, &r)
	if err != nil {
		return nil, err
	}
	out := &kvtierv1.LocateResponse{UsableBlocks: uint32(res.Usable)}
	for i := range res.Nodes {
		n := &res.Nodes[i]
		p := &kvtierv1.NodePrefix{Node: n.Node[:], Name: n.Name, RpcAddress: n.RPCAddress, UsableBlocks: uint32(n.Usable), UsableTokens: n.Tokens}
		for tier := range uint8(maxTier + 1) {
			if blocks := n.Tiers[tier]; blocks > 0 {
				p.Tiers = append(p.Tiers, &kvtierv1.TierBlocks{Tier: kvtierv1.Tier(tier), Blocks: uint32(blocks)})
			}
		}
		out.Nodes = append(out.Nodes, p)
	}
	return out, nil
}

const maxTier = 4 // the highest number of the wire enum Tier

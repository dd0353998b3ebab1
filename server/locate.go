package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/transport"
)

// askWithin bounds a question to other nodes that an answer to a person or a router
// waits for: who does not answer in time is left out.
const askWithin = 500 * time.Millisecond

// knownNamespace finds a namespace here, or in the directory.
func (n *node) knownNamespace(id paging.NamespaceID) (*paging.Namespace, error) {
	if ns, ok := n.hier.Namespace(id); ok {
		return ns, nil
	}
	if n.cluster != nil {
		var encoded []byte
		n.cluster.Directory().Read(func(s *directory.State) {
			b, _ := s.Namespace(id)
			encoded = slices.Clone(b)
		})
		if encoded != nil {
			return paging.DecodeNamespace(encoded)
		}
	}
	return nil, fmt.Errorf("namespace %s: no node has registered it: %w", id.Short(), paging.ErrUnknownNamespace)
}

// nodeParts is what one node has of each block of a chain.
type nodeParts struct {
	info  placement.NodeInfo
	parts []paging.PartSet
	tiers []uint8 // slowest tier, as on the wire; nil: not known
}

// Locate implements rpc.Node.
func (n *node) Locate(ctx context.Context, c rpc.Caller, r *rpc.LocateRequest) (rpc.LocateResult, error) {
	ns, err := n.knownNamespace(r.Namespace)
	if err == nil && ns.Tenant != c.Tenant && !c.Admin {
		_, err = n.namespace(c.Tenant, r.Namespace) // in the same words as one that is not known
	}
	if err != nil {
		return rpc.LocateResult{}, err
	}
	parts, err := partsOf(&ns.Layout, r.Parts, ns.Layout.AllParts())
	if err != nil {
		return rpc.LocateResult{}, err
	}
	var res rpc.LocateResult
	union := make([]paging.PartSet, len(r.Names))
	for _, x := range n.whoHas(ctx, r.Namespace, r.Names, !r.ClaimsOnly) {
		p := rpc.NodePrefix{Node: rpc.ID(x.info.ID), Name: x.info.Name, RPCAddress: x.info.RPCAddress}
		p.Usable = ns.Layout.UsablePrefix(len(r.Names), parts, func(i int) paging.PartSet { return x.parts[i] })
		p.Tokens = uint64(p.Usable) * uint64(ns.Layout.BlockTokens)
		if x.tiers != nil {
			p.Tiers = map[uint8]int{}
			for _, t := range x.tiers[:p.Usable] {
				p.Tiers[t]++
			}
		}
		for i := range union {
			union[i] |= x.parts[i]
		}
		res.Nodes = append(res.Nodes, p)
	}
	res.Usable = ns.Layout.UsablePrefix(len(r.Names), parts, func(i int) paging.PartSet { return union[i] })
	slices.SortStableFunc(res.Nodes, func(a, b rpc.NodePrefix) int {
		return cmp.Or(cmp.Compare(b.Usable, a.Usable), cmp.Compare(a.Name, b.Name))
	})
	return res, nil
}

// self is what gossip says of this node, or would.
func (n *node) self() placement.NodeInfo {
	id := placement.NodeID(n.identity.node)
	if n.cluster != nil {
		if info, ok := n.cluster.Members().View().Find(id); ok {
			return info
		}
	}
	return placement.NodeInfo{ID: id, Name: nodeName(n.cfg.Name), Seen: true}
}

// whoHas lists the nodes that have some of these blocks and can be reached, this one
// first. With ask they are asked; else claims are believed.
func (n *node) whoHas(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, ask bool) []*nodeParts {
	var out []*nodeParts
	if held, kinds, err := n.hier.Held(ns, names, 0); err == nil {
		x := &nodeParts{info: n.self(), parts: held, tiers: make([]uint8, len(kinds))}
		some := false
		for i, k := range kinds {
			x.tiers[i] = uint8(k)
			some = some || held[i] != 0
		}
		if some {
			out = append(out, x)
		}
	}
	if n.cluster == nil {
		return out
	}
	claimed := n.claimed(ns, names)
	if ask {
		claimed = n.askHolders(ctx, ns, names, claimed)
	}
	return append(out, claimed...)
}

// claimed lists the other nodes that claim some of these blocks and can be reached.
func (n *node) claimed(ns paging.NamespaceID, names []paging.BlockName) []*nodeParts {
	byNode := map[placement.NodeID]*nodeParts{}
	view := n.cluster.Members().View()
	n.cluster.Holders(ns, names, func(i int, holders []directory.Holder) {
		for _, h := range holders {
			x := byNode[h.Node]
			if x == nil {
				if h.Node == placement.NodeID(n.identity.node) || !n.cluster.Reachable(h.Node) {
					continue
				}
				info, _ := view.Find(h.Node)
				x = &nodeParts{info: info, parts: make([]paging.PartSet, len(names))}
				byNode[h.Node] = x
			}
			x.parts[i] = h.Parts
		}
	})
	out := make([]*nodeParts, 0, len(byNode))
	for _, x := range byNode {
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b *nodeParts) int { return slices.Compare(a.info.ID[:], b.info.ID[:]) })
	return out
}

// maxAsked bounds the names of one question to another node.
const maxAsked = 4096

// askHolders replaces what nodes claim by what they say they have.
func (n *node) askHolders(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, claimed []*nodeParts) (answered []*nodeParts) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	names = names[:min(len(names), maxAsked)]
	ok := make([]bool, len(claimed))
	var asked sync.WaitGroup
	for k, x := range claimed {
		asked.Go(func() { // owner: this call; exits with ctx; bound: the nodes of a cluster
			held, err := n.cluster.Pages().Have(ctx, x.info.ID, &transport.HaveRequest{Namespace: ns, Names: names})
			if err != nil {
				return
			}
			x.tiers = make([]uint8, len(x.parts))
			for i, h := range held {
				x.parts[i], x.tiers[i] = h.Parts, h.Tier
			}
			ok[k] = true
		})
	}
	asked.Wait()
	for k, x := range claimed {
		if ok[k] {
			answered = append(answered, x)
		}
	}
	return answered
}

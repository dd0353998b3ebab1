package cluster

import (
	"math"
	"slices"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// inventory is what a Node holds, as its claims are compared with it.
type inventory Node

// Held implements directory.Inventory.
func (v *inventory) Held(buckets *directory.Buckets, f func(placement.BlockKey, paging.PartSet)) {
	n := (*Node)(v)
	if *buckets == allBuckets {
		n.ration()
	}
	v.tier.Load().HeldBlocks(func(b tier.HeldBlock) {
		if !n.worthClaiming(&b) {
			return
		}
		k := ClaimKey(b.ID.Namespace, b.ID.Name)
		if bucket, _ := directory.ClaimDigest(k, b.Parts); buckets[bucket] {
			f(k, b.Parts)
		}
	})
}

// claim tells the claimer what the tiers tell.
func (n *Node) claim() {
	h, claimer := n.tier.Load(), n.claimer.Load()
	var held []tier.HeldBlock
	for {
		var missed bool
		var err error
		held, missed, err = h.Changes(n.ctx, held[:0])
		if err != nil {
			return
		}
		for _, b := range held {
			if !n.worthClaiming(&b) {
				b.Parts = 0
			}
			claimer.Set(ClaimKey(b.ID.Namespace, b.ID.Name), b.Parts)
		}
		if missed {
			claimer.Suspect()
		}
		if cap(held) > 1<<16 {
			held = nil
		}
	}
}

var allBuckets = func() (b directory.Buckets) {
	for i := range b {
		b[i] = true
	}
	return b
}()

// warmth orders blocks by how long ago they were used, and the leaves of a chain
// after its head: what a reader misses least is the coldest.
func warmth(b *tier.HeldBlock) uint64 {
	return uint64(b.Used)<<32 | uint64(math.MaxUint32-b.Position)
}

// ration works out which blocks are claimed: all, or the warmest that fit this node's
// share of the directory's claim budget.
func (n *Node) ration() {
	share := n.claimShare()
	var all []uint64
	n.tier.Load().HeldBlocks(func(b tier.HeldBlock) { all = append(all, warmth(&b)) })
	if int64(len(all)) <= share {
		n.coldest.Store(0)
		n.unclaimed.Store(0)
		return
	}
	slices.Sort(all)
	cut := int64(len(all)) - share
	if n.unclaimed.Swap(cut) == 0 {
		n.log.Warn("the directory has no room for all blocks of this node: the coldest are not claimed", "blocks", len(all), "share", share)
	}
	n.coldest.Store(all[cut])
}

// claimShare is an equal share of the claim budget.
func (n *Node) claimShare() int64 {
	budget, nodes := int64(0), int64(0)
	n.replica().Read(func(s *directory.State) {
		budget = s.MaxClaims()
		for _, x := range s.Nodes() {
			if x.State != kvtierv1.NodeState_NODE_STATE_LEFT {
				nodes++
			}
		}
	})
	return budget / max(1, nodes)
}

func (n *Node) worthClaiming(b *tier.HeldBlock) bool {
	return b.Parts == 0 || !n.drained.Load() && warmth(b) >= n.coldest.Load()
}

// Unclaimed is how many blocks of this node the others do not know of, because the
// directory has no room for them.
func (n *Node) Unclaimed() int64 { return n.unclaimed.Load() }

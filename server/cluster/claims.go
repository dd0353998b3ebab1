package cluster

import (
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// inventory is what a Node holds, as its claims are compared with it.
type inventory Node

// Held implements directory.Inventory.
func (v *inventory) Held(buckets *directory.Buckets, f func(placement.BlockKey, paging.PartSet)) {
	v.tier.Load().HeldBlocks(func(b tier.HeldBlock) {
		k := ClaimKey(b.ID.Namespace, b.ID.Name)
		if bucket, _ := directory.ClaimDigest(k, b.Parts); buckets[bucket] {
			f(k, b.Parts)
		}
	})
}

// claim tells the claimer what the tiers tell.
func (n *Node) claim() {
	h := n.tier.Load()
	var held []tier.HeldBlock
	for {
		var missed bool
		var err error
		held, missed, err = h.Changes(n.ctx, held[:0])
		if err != nil {
			return
		}
		for _, b := range held {
			n.claimer.Set(ClaimKey(b.ID.Namespace, b.ID.Name), b.Parts)
		}
		if missed {
			n.claimer.Suspect()
		}
		if cap(held) > 1<<16 {
			held = nil
		}
	}
}

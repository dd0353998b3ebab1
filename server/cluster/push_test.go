package cluster

import (
	"errors"
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Blocks that were stored a moment ago are copied to another node before the directory
// tells of them, only the parts that it lacks, to the positions that they have; what
// the asker has not is said, and nothing of it counts as read.
func TestPush(t *testing.T) {
	inWorld(t, 2, nil, func(t *testing.T, w *world) {
		names := chain(1, 0, 6)
		for i := range names[:4] {
			w.nodes[0].put(w.tpID, names[i:i+1], i, bothTwo)
		}
		w.nodes[1].put(w.tpID, names[:1], 0, bothTwo)
		w.nodes[1].put(w.tpID, names[1:2], 1, rank0)
		blocks := make([]Block, len(names))
		for i := range blocks {
			blocks[i] = Block{Name: names[i], Parts: bothTwo, Position: uint32(i)}
		}
		source, target := w.nodes[0].n, w.nodes[1]
		lacks := make([]paging.PartSet, len(blocks))
		if err := source.Lacks(t.Context(), target.id, w.tp, blocks, lacks); err != nil {
			t.Fatal(err)
		}
		for i, want := range []paging.PartSet{0, rank1, bothTwo, bothTwo, bothTwo, bothTwo} {
			if lacks[i] != want {
				t.Errorf("block %d: lacks %b, want %b", i, lacks[i], want)
			}
		}
		before := target.h.Metrics()
		bytes, why, err := source.Push(t.Context(), target.id, w.tp, blocks[1:], bothTwo, tier.RAM)
		if err != nil || bytes != 5*pageBytes {
			t.Fatalf("%d bytes, %v", bytes, err)
		}
		for i, want := range []tier.Reason{tier.NoReason, tier.NoReason, tier.NoReason, tier.NotFound, tier.NotFound} {
			if got := why[i]; got != want && (want == tier.NoReason || got == tier.NoReason) {
				t.Errorf("block %d: %v, want %v", i+1, got, want)
			}
		}
		if m := target.h.Metrics(); m.MovedBlocks != 3 || m.RequestedBlocks != before.RequestedBlocks || m.Fetches != before.Fetches || m.Holds != 0 {
			t.Errorf("%+v", m)
		}
		target.h.HeldBlocks(func(b tier.HeldBlock) {
			for i := range names {
				if names[i] == b.ID.Name && b.Position != uint32(i) {
					t.Errorf("block %d has position %d", i, b.Position)
				}
			}
		})
		if len(target.n.expected.holders) != 0 {
			t.Error("blocks are still expected")
		}
		if err := source.Lacks(t.Context(), placement.NodeID{77}, w.tp, blocks, lacks); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("a node that is not known: %v", err)
		}
		w.settle()
	})
}

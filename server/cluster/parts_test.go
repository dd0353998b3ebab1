package cluster

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

func TestHints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := newHints()
		if err != nil {
			t.Fatal(err)
		}
		defer h.close()
		k, other := placement.BlockKey{1}, placement.BlockKey{2}
		a, b := placement.NodeID{1}, placement.NodeID{2}
		h.refuse(k, a)
		h.refused.Wait()
		if !h.refuses(k, a) || h.refuses(k, b) || h.refuses(other, a) {
			t.Error("a refusal is of one block and one node")
		}
		time.Sleep(refusedFor + time.Second)
		if h.refuses(k, a) {
			t.Error("a refusal is remembered for too long")
		}
		if h.absent(k, time.Now()) {
			t.Error("the first question after a block says nothing")
		}
		h.asked.Wait()
		if h.absent(k, time.Now().Add(wrongAfter-time.Millisecond)) || !h.absent(k, time.Now().Add(wrongAfter)) || h.absent(other, time.Now().Add(wrongAfter)) {
			t.Error("a claim is wrong when its block is asked for again after a while")
		}
		h.close() // a call that still runs finds nothing
		h.refuse(k, a)
		if h.refuses(k, a) || h.absent(k, time.Now()) {
			t.Error("closed hints tell something")
		}
	})
}

// A node is asked again and again for what it claims and has not: it compares, and
// the claim goes.
func TestWrongClaimIsFound(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		me, owner := w.nodes[0], w.nodes[1]
		name := chain(1, 0, 1)
		owner.put(w.id, chain(2, 0, 10), 0, onePart)
		w.settle()
		w.sleep(10 * time.Second) // the last comparison is over
		owner.n.claimer.Load().Set(ClaimKey(w.id, name[0]), onePart)
		w.eventually(time.Second, "the claim is seen", func() bool { return me.differs(owner) != "" })
		for start := time.Now(); me.differs(owner) != ""; w.sleep(100 * time.Millisecond) {
			if time.Since(start) > 20*time.Second {
				t.Fatal("the wrong claim is still there")
			}
			if got := me.usable(w.id, name); got != 0 {
				t.Fatalf("%d blocks that nobody has", got)
			}
		}
		if n := owner.h.Metrics().ServedAbsentPages; n == 0 || n > 10 {
			t.Errorf("the owner was asked %d times", n)
		}
	})
}

// A copy that is damaged where it lies never arrives, and its owner drops it.
func TestDamagedCopies(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		me, owner := w.nodes[0], w.nodes[1]
		inRAM, onDisk := chain(1, 0, 3), chain(2, 0, 3)
		owner.put(w.id, inRAM, 0, onePart)
		owner.put(w.id, onDisk, 0, onePart)
		owner.change(func(h *tier.Hierarchy) error { _, err := h.Demote(w.id, onDisk, tier.RAM); return err })
		w.settle()
		hold, err := owner.h.Fetch(context.Background(), tier.FetchRequest{Namespace: w.id, Names: inRAM})
		if err != nil {
			t.Fatal(err)
		}
		hold.Page(1, 0)[100] ^= 1
		hold.Release()
		owner.faulty.SetLoad(func(_ context.Context, p tier.Page) error {
			if p.ID.Name == onDisk[1] {
				return paging.ErrCorrupt
			}
			return nil
		})
		for _, names := range [][]paging.BlockName{inRAM, onDisk} {
			got, _ := me.fetch(tier.FetchRequest{Namespace: w.id, Names: names}, time.Second)
			if got.usable != 1 || len(got.short) == 0 || got.short[0].Reason != tier.Corrupt {
				t.Errorf("%d blocks before a damaged one, %v", got.usable, got.short)
			}
			w.eventually(2*time.Second, "the damaged copy is dropped, and no other", func() bool {
				me.usable(w.id, names) // a doubt finds no connection at first
				held, _, err := owner.h.Held(w.id, names, 0)
				return err == nil && held[0] == onePart && held[1] == 0 && held[2] == onePart
			})
		}
		w.settle()
	})
}

// One part of a block is damaged on this node's disk and the other part is not here
// at all: both come from other nodes.
func TestDamagedPartBesideOneThatIsElsewhere(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		me := w.nodes[0]
		names := chain(1, 0, 4)
		me.put(w.tpID, names, 0, rank0)
		me.change(func(h *tier.Hierarchy) error { _, err := h.Demote(w.tpID, names, tier.RAM); return err })
		w.nodes[1].put(w.tpID, names, 0, rank0)
		w.nodes[2].put(w.tpID, names, 0, rank1)
		w.settle()
		me.faulty.SetLoad(func(context.Context, tier.Page) error { return paging.ErrCorrupt })
		got, _ := me.fetch(tier.FetchRequest{Namespace: w.tpID, Names: names}, time.Second)
		if got.usable != 4 || got.tiers[0] != tier.Remote {
			t.Errorf("%d blocks from %v: %v", got.usable, got.tiers, got.short)
		}
		w.settle()
	})
}

// Calls of the tiers may run while the node leaves the cluster.
func TestCallsWhileClosing(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		me := w.nodes[0]
		names := chain(1, 0, 64)
		w.nodes[1].put(w.id, names, 0, onePart)
		w.settle()
		var calls sync.WaitGroup
		for range 4 {
			calls.Go(func() {
				for range 300 {
					me.n.Locate(w.id, names, make([]paging.PartSet, len(names)))
				}
			})
			calls.Go(func() {
				done := 0
				dst := make([]byte, pageBytes)
				for i := range 50 {
					me.n.Bring(context.Background(), w.id, []tier.RemotePage{{Name: names[i], Dst: dst}}, func(int, uint64, error) { done++ })
				}
				if done != 50 {
					t.Errorf("%d of 50 pages have an outcome", done)
				}
			})
		}
		if err := me.n.Close(); err != nil {
			t.Error(err)
		}
		if err := me.n.Close(); err != nil {
			t.Errorf("a second time: %v", err)
		}
		calls.Wait()
	})
}

// The disk of a node does not answer a read for another node: that one is told in
// time, others are served meanwhile, and the node can be stopped.
func TestDiskHangsUnderARemoteRead(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		me, owner := w.nodes[0], w.nodes[1]
		hung, fine := chain(1, 0, 6), chain(2, 0, 6)
		for _, names := range [][]paging.BlockName{hung, fine} {
			owner.put(w.id, names, 0, onePart)
			owner.change(func(h *tier.Hierarchy) error { _, err := h.Demote(w.id, names, tier.RAM); return err })
		}
		w.settle()
		letGo := make(chan struct{})
		defer close(letGo)
		owner.faulty.SetLoad(func(ctx context.Context, p tier.Page) error {
			if p.ID.Name[4] != 1 {
				return nil
			}
			<-ctx.Done()
			return tier.NotSettled(paging.ErrExpired, letGo)
		})
		for range 3 {
			if got, _ := me.fetch(tier.FetchRequest{Namespace: w.id, Names: hung}, 500*time.Millisecond); got.usable != 0 || got.took > 600*time.Millisecond {
				t.Errorf("%d blocks from a disk that hangs, in %v", got.usable, got.took)
			}
		}
		w.eventually(10*time.Second, "other pages are read", func() bool { return me.usable(w.id, fine) == 6 })
		start := time.Now()
		if err := owner.n.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("Close took %v", took)
		}
	})
}

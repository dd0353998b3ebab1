package cluster

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

const (
	onePart = paging.PartSet(1)
	rank0   = paging.PartSet(1)
	rank1   = paging.PartSet(2)
	bothTwo = rank0 | rank1
)

func TestNodesAreOneCache(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		names := chain(1, 0, 20)
		for i := range names {
			w.nodes[i%3].put(w.id, names[i:i+1], i, onePart)
			w.nodes[i%2].put(w.tpID, names[i:i+1], i, rank0)
			w.nodes[2].put(w.tpID, names[i:i+1], i, rank1)
		}
		w.settle()
		for _, m := range w.nodes {
			if got := m.usable(w.id, names); got != 20 {
				t.Errorf("node %d: %d of a chain on three nodes", m.i, got)
			}
			if got := m.usable(w.tpID, names); got != 20 {
				t.Errorf("node %d: %d of a chain whose parts are on different nodes", m.i, got)
			}
		}
		w.settle()
	})
}

// A leader that reaches nobody is closed in time, and so is whoever waits for what it
// was to commit: Raft itself answers nothing that is queued when it is shut down.
func TestCloseOfALeaderThatReachesNobody(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		leader := w.leader(5 * time.Second)
		w.f.isolate(leader.i, len(w.nodes), true)
		var waiting sync.WaitGroup
		for range 20 {
			waiting.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				if _, err := leader.n.replica().Propose(ctx, joinCommand(9)); !errors.Is(err, paging.ErrUnavailable) && !errors.Is(err, paging.ErrClosed) {
					t.Errorf("proposed to a leader that is closed: %v", err)
				}
			})
		}
		w.sleep(20 * time.Millisecond)
		start := time.Now()
		if err := leader.n.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("Close took %v", took)
		}
		waiting.Wait()
	})
}

func joinCommand(id byte) *kvtierv1.DirectoryCommand {
	node := placement.NodeID{id}
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_JoinNode{JoinNode: &kvtierv1.JoinNode{
		Node: node[:], Incarnation: 1, Name: "n", PeerAddress: "10.0.0.9:1",
	}}}
}

package directory

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A follower that was away while more entries were written than the log keeps
// catches up through a snapshot, and is a full replica again.
func TestFollowerFarBehindCatchesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		leader := w.leader(t, 5*time.Second)
		var away = nodeID(1)
		if away == leader {
			away = nodeID(2)
		}
		w.kill(t, away)
		w.leader(t, 5*time.Second)
		w.propose(t, leader, join(nodeID(50), 1, "before"), 5*time.Second)

		const writers, entries = 64, trailingLogs + 1000
		var done sync.WaitGroup
		for i := range writers {
			done.Go(func() {
				for n := range entries / writers {
					w.propose(t, leader, join(nodeID(100+i), uint64(n+1), "n"), 10*time.Second)
				}
			})
		}
		done.Wait()
		if err := w.node(leader).now.Load().raft.Snapshot().Error(); err != nil {
			t.Fatal(err)
		}
		if first, err := w.disk(leader).FirstIndex(); err != nil || first < 500 {
			t.Fatalf("the leader's log begins at %d (%v): nothing was cut off it", first, err)
		}

		w.start(t, away, false)
		w.agree(t, 10*time.Second)
		snapshots, err := w.disk(away).snapshots.List()
		if err != nil || len(snapshots) == 0 || snapshots[0].Index < 500 {
			t.Fatalf("it caught up without a snapshot: %+v, %v", snapshots, err)
		}
		// It votes: the leader and it are a quorum.
		for _, n := range w.upNodes() {
			if n.id != leader && n.id != away {
				w.kill(t, n.id)
			}
		}
		w.propose(t, away, join(nodeID(51), 1, "after"), 10*time.Second)
		w.agree(t, 10*time.Second)
	})
}

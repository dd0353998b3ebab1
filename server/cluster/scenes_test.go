package cluster

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster/clustertest"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
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
		w.f.Isolate(leader.i, len(w.nodes), true)
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

// A node whose data port is broken while its gossip goes on is left out within two
// seconds, also where no caller waits that long; what others have comes from them.
func TestBrokenDataPort(t *testing.T) {
	for _, way := range []struct {
		name     string
		to, from bool
	}{{"both ways", true, true}, {"what it sends", false, true}, {"what it gets", true, false}} {
		t.Run(way.name, func(t *testing.T) {
			inWorld(t, 3, nil, func(t *testing.T, w *world) {
				me, broken, other := w.nodes[0], w.nodes[1], w.nodes[2]
				alone, both := chain(1, 0, 60), chain(2, 0, 60)
				broken.put(w.id, alone, 0, onePart)
				broken.put(w.id, both, 0, onePart)
				other.put(w.id, both, 0, onePart)
				w.settle()
				me.usable(w.id, alone[:1])
				w.g.Freeze(true)
				w.f.SetCut(me.i, broken.i, way.to)
				w.f.SetCut(broken.i, me.i, way.from)
				start := time.Now()
				for i := 1; me.n.Reachable(broken.id); i++ {
					if time.Since(start) > 2*time.Second {
						t.Fatal("still asked after 2 s")
					}
					me.fetch(tier.FetchRequest{Namespace: w.id, Names: alone[i : i+1], First: i}, 200*time.Millisecond)
				}
				got, _ := me.fetch(tier.FetchRequest{Namespace: w.id, Names: alone}, time.Second)
				if got.took > 50*time.Millisecond {
					t.Errorf("a node that is left out costs %v", got.took)
				}
				if got, _ := me.fetch(tier.FetchRequest{Namespace: w.id, Names: both}, time.Second); got.usable != len(both) || got.took > 50*time.Millisecond {
					t.Errorf("%d of %d blocks that another node has, in %v: %v", got.usable, len(both), got.took, got.short)
				}
				w.f.Heal()
				w.eventually(10*time.Second, "the node is used again", func() bool { return me.usable(w.id, alone) == len(alone) })
			})
		})
	}
}

// Two nodes hold other bytes for the same blocks, all of them right. However often
// a transfer breaks, each page that arrives is one node's whole copy.
func TestDivergentCopies(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		for c := range 30 {
			names := chain(c, 0, 20)
			w.nodes[1].put(w.id, names, 0, onePart)
			w.nodes[2].put(w.id, names, 0, onePart)
			w.settle()
			w.f.SetDelay(1, 0, time.Duration(c)*time.Millisecond)
			time.AfterFunc(time.Duration(c)*time.Millisecond+100*time.Microsecond, func() { w.f.Reset(0, 1+c%2) })
			if got, _ := w.nodes[0].fetch(tier.FetchRequest{Namespace: w.id, Names: names}, 5*time.Second); got.usable != 20 {
				t.Errorf("chain %d: %d blocks, %v", c, got.usable, got.short)
			}
			w.sleep(500 * time.Millisecond) // the node that failed is looked for
		}
	})
}

// The smaller side of a split serves what it has and what it knows of, and refuses
// to change who holds what.
func TestMinority(t *testing.T) {
	inWorld(t, 5, nil, func(t *testing.T, w *world) {
		var side, rest []*machine // one voter and a node without a vote; the others
		for _, m := range w.nodes {
			voter := m.n.replica().Status().Voter
			if have := len(side); have == 0 && voter || have == 1 && !voter {
				side = append(side, m)
			} else {
				rest = append(rest, m)
			}
		}
		own, known, far, fresh := chain(1, 0, 8), chain(2, 0, 8), chain(3, 0, 8), chain(4, 0, 8)
		side[0].put(w.id, own, 0, onePart)
		side[1].put(w.id, known, 0, onePart)
		rest[2].put(w.id, far, 0, onePart)
		w.settle()
		for _, a := range side {
			for _, b := range rest {
				w.f.SetCut(a.i, b.i, true)
				w.f.SetCut(b.i, a.i, true)
			}
		}
		w.sleep(2 * clustertest.LostAfter)
		m := side[0]
		for _, x := range []struct {
			what  string
			names []paging.BlockName
			want  int
		}{{"its own", own, 8}, {"of a node that it reaches", known, 8}, {"of a node that it does not reach", far, 0}} {
			got, _ := m.fetch(tier.FetchRequest{Namespace: w.id, Names: x.names}, time.Second)
			if got.usable != x.want || got.took > 100*time.Millisecond {
				t.Errorf("blocks %s: %d in %v, want %d", x.what, got.usable, got.took, x.want)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := m.n.replica().Propose(ctx, joinCommand(9)); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("a change of ownership on the smaller side: %v", err)
		}
		if err := m.n.replica().ReadLatest(ctx, func(*directory.State) {}); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("a linearizable read on the smaller side: %v", err)
		}
		m.put(w.id, fresh, 0, onePart)
		if got := m.usable(w.id, fresh); got != 8 {
			t.Errorf("%d of 8 blocks that were stored without a quorum", got)
		}
		if got := rest[0].usable(w.id, far); got != 8 {
			t.Errorf("the larger side: %d of 8", got)
		}
		w.f.Heal()
		w.settle()
		w.eventually(10*time.Second, "what was stored there is found after the split", func() bool { return rest[2].usable(w.id, fresh) == 8 })
	})
}

// All nodes are restarted one after another under load: no claim is lost of a page
// that is on disk, or of which there is another copy.
func TestRollingRestart(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		stop := make(chan struct{})
		var load sync.WaitGroup
		defer load.Wait()
		defer close(stop)
		kept := chain(500, 0, 60)
		for i, m := range w.nodes {
			m.put(w.id, kept[20*i:20*i+20], 20*i, onePart)
			m.change(func(h *tier.Hierarchy) error { _, err := h.Demote(w.id, kept[20*i:20*i+20], tier.RAM); return err })
			m.change(func(h *tier.Hierarchy) error { _, err := h.Pin(w.id, kept[20*i:20*i+20], time.Hour); return err })
		}
		w.settle()
		for _, m := range w.nodes {
			rng := rand.New(rand.NewPCG(7, uint64(m.i)))
			load.Go(func() { m.load(rng, stop) })
		}
		for _, m := range w.nodes {
			m.leave()
			w.sleep(time.Second)
			m.start()
			w.leader(20 * time.Second)
			w.eventually(repairPeriod, "the blocks of all nodes are seen by all", func() bool {
				for _, x := range w.nodes {
					if got, ok := x.fetch(tier.FetchRequest{Namespace: w.id, Names: kept}, time.Second); !ok || got.usable != len(kept) {
						return false
					}
				}
				return true
			})
		}
	})
}

// A node that is gone is not asked from the moment that gossip says so, its claims
// are kept for the grace time, and dropped after it. One that is back before then
// compares: its claims are there all the time.
func TestGraceTime(t *testing.T) {
	inWorld(t, 3, func(w *world) { w.grace = time.Minute }, func(t *testing.T, w *world) {
		me, gone := w.nodes[0], w.nodes[2]
		names := chain(1, 0, 50)
		gone.put(w.id, names, 0, onePart)
		w.settle()
		claims := func() (n int64, state kvtierv1.NodeState) {
			me.n.replica().Read(func(s *directory.State) {
				for _, x := range s.Nodes() {
					if x.ID == gone.id {
						n, state = x.Claims, x.State
					}
				}
			})
			return n, state
		}
		never := func(what string, d time.Duration, bad func() bool) {
			t.Helper()
			for end := time.Now().Add(d); time.Now().Before(end); w.sleep(10 * time.Millisecond) {
				if bad() {
					t.Fatal(what)
				}
			}
		}
		gone.leave()
		w.sleep(10 * time.Second)
		gone.start()
		never("claims were dropped of a node that was back in time", 20*time.Second, func() bool { n, _ := claims(); return n != 50 })
		if m := gone.n.claimer.Load().Metrics(); m.Compares == 0 || m.RepairedBuckets > 0 {
			t.Errorf("after a restart: %+v", m)
		}
		gone.crash()
		w.sleep(clustertest.LostAfter + clustertest.GossipEvery)
		if got, _ := me.fetch(tier.FetchRequest{Namespace: w.id, Names: names}, time.Second); got.usable != 0 || got.took > time.Millisecond {
			t.Errorf("%d blocks of a node that is gone, in %v", got.usable, got.took)
		}
		w.eventually(10*time.Second, "the leader says that it is down", func() bool {
			_, state := claims()
			return state == kvtierv1.NodeState_NODE_STATE_DOWN
		})
		never("claims were dropped before the grace time", 55*time.Second, func() bool { n, _ := claims(); return n != 50 })
		w.eventually(15*time.Second, "its claims are dropped", func() bool { n, _ := claims(); return n == 0 })
		gone.start()
		w.settle()
	})
}

// A node that was cut off for so long that its claims were dropped, and its record
// removed, comes back by itself, although it has nothing new to say.
func TestNodeThatWasForgotten(t *testing.T) {
	for _, x := range []struct {
		name string
		jump time.Duration
	}{{"claims dropped", 2 * time.Minute}, {"record removed", 25 * time.Hour}} {
		t.Run(x.name, func(t *testing.T) {
			inWorld(t, 3, func(w *world) { w.grace = time.Minute }, func(t *testing.T, w *world) {
				lost := w.nodes[2]
				lost.put(w.id, chain(1, 0, 50), 0, onePart)
				w.settle()
				w.f.Isolate(lost.i, 3, true)
				w.sleep(15 * time.Second)
				for range 2 { // first the claims go, then the record
					for _, m := range w.nodes {
						m.setSkew(time.Until(m.now()) + x.jump)
					}
					w.sleep(15 * time.Second)
				}
				if x.jump > 24*time.Hour {
					w.nodes[0].n.replica().Read(func(s *directory.State) {
						if n := len(s.Nodes()); n != 2 {
							t.Errorf("%d nodes are known", n)
						}
					})
				}
				w.f.Heal()
				w.leader(20 * time.Second)
				w.settle()
				w.eventually(10*time.Second, "its blocks are found", func() bool { return w.nodes[0].usable(w.id, chain(1, 0, 50)) == 50 })
			})
		})
	}
}

// Namespaces that no node speaks of any more are removed a day after the last did.
// One that could not be announced for want of a quorum is announced when there is one.
func TestNamespacesComeAndGo(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		known := func(ns *paging.Namespace) (ok bool) {
			w.nodes[0].n.replica().Read(func(s *directory.State) { _, ok = s.Namespace(ns.ID()) })
			return ok
		}
		w.eventually(5*time.Second, "namespaces are announced", func() bool { return known(w.ns) && known(w.tp) })
		nobody, late := tiertest.Namespace(8), tiertest.Namespace(9)
		w.nodes[0].n.Announce(nobody)
		w.eventually(5*time.Second, "the third is announced", func() bool { return known(nobody) })

		w.f.Isolate(0, 3, true)
		w.sleep(5 * time.Second)
		if _, err := w.nodes[0].h.RegisterNamespace(late); err != nil {
			t.Fatal(err)
		}
		w.nodes[0].n.Announce(late)
		w.sleep(10 * time.Second)
		w.f.Heal()
		w.eventually(30*time.Second, "what could not be announced is", func() bool { return known(late) })

		for range 13 { // two hours each
			for _, m := range w.nodes {
				m.setSkew(time.Until(m.now()) + 2*time.Hour)
			}
			for _, m := range w.nodes {
				m.n.Announce(w.ns)
			}
			w.sleep(2 * time.Second)
		}
		w.eventually(2*lookEvery, "a namespace that nobody speaks of is removed", func() bool { return !known(nobody) })
		if !known(w.ns) {
			t.Error("a namespace was removed that nodes speak of")
		}
		w.eventually(2*lookEvery, "one that a node still has is announced again", func() bool { return known(w.tp) })
	})
}

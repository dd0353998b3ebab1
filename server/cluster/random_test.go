package cluster

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// seeds are those of the random test: 20, or KVTIER_TORTURE from KVTIER_SEED on.
func seeds(t *testing.T) (first uint64, n int) {
	t.Helper()
	first, n = 1, 20
	if testing.Short() {
		n = 3
	}
	if rounds, err := strconv.Atoi(os.Getenv("KVTIER_TORTURE")); err == nil && rounds > 0 {
		first, n = uint64(time.Now().UnixNano()), rounds
	}
	if s, err := strconv.ParseUint(os.Getenv("KVTIER_SEED"), 10, 64); err == nil && s != 0 {
		if first = s; os.Getenv("KVTIER_TORTURE") == "" {
			n = 1
		}
	}
	return first, n
}

// TestRandomClusters runs clusters of three to five nodes under a random load and
// random faults, in fake time. In the quiet after the faults the directory equals
// what the nodes hold, on every replica, and every node gets exactly the prefix that
// they hold together. No byte is ever wrong, and no Fetch ever fails.
func TestRandomClusters(t *testing.T) {
	first, n := seeds(t)
	for seed := first; seed < first+uint64(n); seed++ {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				t.Cleanup(func() {
					if t.Failed() {
						t.Logf("KVTIER_SEED=%d", seed)
					}
				})
				runRandom(t, seed)
			})
		})
	}
}

const (
	chaosRounds = 2
	chaosTime   = 12 * time.Second
	chains      = 12
	chainBlocks = 24
)

func runRandom(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 0))
	w := newWorld(t, 3+r.IntN(3), func(w *world) {
		w.ramMiB, w.diskMiB = 1+r.Int64N(2), 1+r.Int64N(3)
		w.grace = time.Duration(5+r.IntN(600)) * time.Second
	})
	for range chaosRounds {
		stop := make(chan struct{})
		var load sync.WaitGroup
		for _, m := range w.nodes {
			rng := rand.New(rand.NewPCG(r.Uint64(), 1))
			load.Go(func() { m.load(rng, stop) })
		}
		w.chaos(r)
		w.heal()
		close(stop)
		load.Wait()
		w.leader(20 * time.Second)
		w.settle()
		w.checkUnion(r)
		w.settle()
	}
}

// load uses a node as its engines do, until stop.
func (m *machine) load(r *rand.Rand, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(1+r.IntN(150)) * time.Millisecond):
		}
		ns, parts := m.w.id, onePart
		if r.IntN(2) == 0 {
			ns, parts = m.w.tpID, []paging.PartSet{rank0, rank1, bothTwo}[r.IntN(3)]
		}
		c := r.IntN(chains)
		switch r.IntN(10) {
		case 0, 1, 2:
			n := 1 + r.IntN(chainBlocks)
			from := r.IntN(n)
			m.put(ns, chain(c, from, n-from), from, parts)
		case 3:
			m.change(func(h *tier.Hierarchy) error {
				_, err := h.Demote(ns, chain(c, r.IntN(chainBlocks), 6), tier.RAM)
				return err
			})
		case 4:
			m.change(func(h *tier.Hierarchy) error { _, err := h.Drop(ns, chain(c, r.IntN(chainBlocks), 3)); return err })
		case 5:
			m.change(func(h *tier.Hierarchy) error {
				p, err := h.Promote(tier.PromoteRequest{Namespace: ns, Names: chain(c, 0, chainBlocks), Deadline: time.Now().Add(2 * time.Second)})
				if err == nil {
					defer p.Cancel()
				}
				return err
			})
		default:
			m.load1(r, ns, c)
		}
	}
}

// load1 fetches a chain, or a set of its blocks, within a time that is kept.
func (m *machine) load1(r *rand.Rand, ns paging.NamespaceID, c int) {
	req := tier.FetchRequest{Namespace: ns, Names: chain(c, 0, 1+r.IntN(chainBlocks))}
	if r.IntN(4) == 0 {
		req.Mode = tier.ModeSet
	}
	within := time.Duration(50+r.IntN(3000)) * time.Millisecond
	got, ok := m.fetch(req, within)
	if ok && got.took > within+100*time.Millisecond {
		m.w.t.Errorf("a Fetch at node %d took %v, its deadline was %v", m.i, got.took, within)
	}
}

func (m *machine) change(f func(*tier.Hierarchy) error) {
	h, leave, ok := m.enter()
	if !ok {
		return
	}
	defer leave()
	if err := f(h); err != nil && m.isUp() {
		m.w.t.Errorf("node %d: %v", m.i, err)
	}
}

// chaos makes faults for a while. Each ends by itself or with heal.
func (w *world) chaos(r *rand.Rand) {
	for end := time.Now().Add(chaosTime); time.Now().Before(end); {
		time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
		m := pick(r, w.nodes)
		other := pick(r, w.nodes)
		switch r.IntN(13) {
		case 0, 1:
			m.log.Hang(false)
			m.crash()
		case 2:
			m.log.Hang(false)
			m.leave()
		case 3, 4:
			for _, x := range w.nodes {
				if !x.isUp() {
					x.start()
				}
			}
		case 5:
			w.f.Isolate(m.i, len(w.nodes), true)
		case 6:
			w.f.SetCut(m.i, other.i, true) // one way
		case 7:
			w.f.SetCut(m.i, other.i, true)
			w.f.SetCut(other.i, m.i, true)
		case 8:
			w.f.SetDelay(m.i, other.i, time.Duration(r.IntN(300))*time.Millisecond)
		case 9:
			w.f.Reset(m.i, other.i)
		case 10:
			m.log.Hang(r.IntN(2) == 0)
		case 11:
			m.setSkew(time.Duration(r.Int64N(int64(2*time.Hour))) - time.Hour)
		case 12:
			w.killLeader()
		}
		if r.IntN(4) == 0 {
			w.f.Heal()
		}
	}
}

func (w *world) killLeader() {
	for _, m := range w.up() {
		if id, ok := m.n.replica().Leader(); ok && id == m.id {
			m.log.Hang(false)
			m.crash()
			return
		}
	}
}

// heal ends every fault and starts every node.
func (w *world) heal() {
	w.f.Heal()
	for _, m := range w.nodes {
		m.log.Hang(false)
		m.startIfDown()
	}
}

// startIfDown starts the node if it is down.
func (m *machine) startIfDown() {
	if !m.isUp() {
		m.start()
	}
}

// checkUnion fetches chains at every node and compares with what all hold together.
func (w *world) checkUnion(r *rand.Rand) {
	w.t.Helper()
	w.eventually(10*time.Second, "all see all", func() bool {
		for _, m := range w.nodes {
			for _, other := range w.nodes {
				if m != other && !m.n.Reachable(other.id) {
					return false
				}
			}
		}
		return true
	})
	time.Sleep(refusedFor) // what was refused in the faults is forgotten
	for range 8 {
		m, c := pick(r, w.nodes), r.IntN(chains)
		names := chain(c, 0, chainBlocks)
		for _, x := range []struct {
			ns  paging.NamespaceID
			all paging.PartSet
		}{{w.id, onePart}, {w.tpID, bothTwo}} {
			want := w.union(x.ns, names, x.all)
			got, ok := m.fetch(tier.FetchRequest{Namespace: x.ns, Names: names}, 5*time.Second)
			// Where RAM is full of what is not on disk yet, a Fetch is granted from its head
			// at once: there is room when that was written.
			for start := time.Now(); ok && noRoom(got.short) && time.Since(start) < 20*time.Second; {
				time.Sleep(time.Second)
				got, ok = m.fetch(tier.FetchRequest{Namespace: x.ns, Names: names}, 5*time.Second)
			}
			// What is brought here may be at the cost of what was here.
			after := w.union(x.ns, names, x.all)
			if !ok || got.usable < min(want, after) || got.usable > max(want, after) {
				w.t.Errorf("node %d got %d blocks of chain %d, all hold %d: %v", m.i, got.usable, c, want, got.short)
			}
		}
	}
}

func noRoom(short []tier.Shortfall) bool {
	return slices.ContainsFunc(short, func(s tier.Shortfall) bool { return s.Reason == tier.NoSpace })
}

package directory

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// network joins the replicas of a test cluster: pipes, and links that can be cut.
type network struct {
	mu    sync.Mutex
	nodes map[placement.NodeID]*testNode
	cut   map[[2]placement.NodeID]bool
	conns map[net.Conn][2]placement.NodeID
	lose  func() bool // whether the answer to a forwarded command is lost; nil: never
}

// testNode is one node: its replica, its disk that survives restarts, and what
// it says of the others.
type testNode struct {
	id     placement.NodeID
	net    *network
	accept chan net.Conn
	disk   *testDisk
	dir    *Directory
	up     bool
}

// testDisk is a log store in memory that can hang or refuse.
type testDisk struct {
	*raft.InmemStore
	snapshots raft.SnapshotStore

	mu     sync.Mutex
	hang   chan struct{} // not nil: writes wait for it
	refuse int           // the next appends fail
}

func (s *testDisk) StoreLogs(l []*raft.Log) error {
	s.mu.Lock()
	hang := s.hang
	refuse := s.refuse > 0
	if refuse {
		s.refuse--
	}
	s.mu.Unlock()
	if refuse {
		return errors.New("append refused by the test")
	}
	if hang != nil {
		<-hang
	}
	return s.InmemStore.StoreLogs(l)
}

func (s *testDisk) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

func (s *testDisk) setHang(hang bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case hang:
		s.hang = make(chan struct{})
	case s.hang != nil:
		close(s.hang)
		s.hang = nil
	}
}

func (n *testNode) Accept(ctx context.Context) (net.Conn, error) {
	select {
	case c := <-n.accept:
		return c, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (n *testNode) Dial(ctx context.Context, id placement.NodeID) (net.Conn, error) {
	w := n.net
	w.mu.Lock()
	peer := w.nodes[id]
	reachable := peer != nil && peer.up && n.up && !w.cut[pair(n.id, id)]
	w.mu.Unlock()
	if !reachable {
		return nil, fmt.Errorf("%s cannot reach %s", n.id.Short(), id.Short())
	}
	here, there := net.Pipe()
	select {
	case peer.accept <- there:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	w.mu.Lock()
	w.conns[here], w.conns[there] = pair(n.id, id), pair(n.id, id)
	w.mu.Unlock()
	return here, nil
}

func (n *testNode) Forward(ctx context.Context, leader placement.NodeID, command []byte) (Result, error) {
	n.net.mu.Lock()
	peer := n.net.nodes[leader]
	reachable := peer.up && !n.net.cut[pair(n.id, leader)]
	d, lose := peer.dir, n.net.lose
	n.net.mu.Unlock()
	if !reachable {
		return Invalid, errors.New("unreachable")
	}
	r, err := d.ProposeHere(ctx, command)
	if lose != nil && lose() {
		return Invalid, errors.New("the answer was lost")
	}
	return r, err
}

func (n *testNode) Members() []placement.Member {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	var out []placement.Member
	for id, peer := range n.net.nodes {
		m := placement.Member{ID: id, Seen: peer.up && !n.net.cut[pair(n.id, id)]}
		if !m.Seen {
			m.Gone = time.Hour
		}
		out = append(out, m)
	}
	return out
}

func pair(a, b placement.NodeID) [2]placement.NodeID {
	if string(a[:]) > string(b[:]) {
		a, b = b, a
	}
	return [2]placement.NodeID{a, b}
}

// setCut cuts or joins the link of two nodes.
func (w *network) setCut(a, b placement.NodeID, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[pair(a, b)] = cut
	w.dropLocked(func(p [2]placement.NodeID) bool { return p == pair(a, b) })
}

func (w *network) dropLocked(match func([2]placement.NodeID) bool) {
	for c, p := range w.conns {
		if match(p) {
			c.Close()
			delete(w.conns, c)
		}
	}
}

func newCluster(t *testing.T, n int) *network {
	t.Helper()
	w := &network{nodes: map[placement.NodeID]*testNode{}, cut: map[[2]placement.NodeID]bool{}, conns: map[net.Conn][2]placement.NodeID{}}
	for i := range n {
		id := nodeID(i + 1)
		w.mu.Lock()
		w.nodes[id] = &testNode{
			id: id, net: w, accept: make(chan net.Conn, 16),
			disk: &testDisk{InmemStore: raft.NewInmemStore(), snapshots: raft.NewInmemSnapshotStore()},
		}
		w.mu.Unlock()
		w.start(t, id, i == 0)
		if i == 0 {
			w.waitFor(t, 5*time.Second, "a first leader", func() bool { _, ok := w.node(id).Leader(); return ok })
		}
	}
	t.Cleanup(func() {
		for id := range w.nodes {
			w.kill(t, id)
		}
	})
	return w
}

func (w *network) node(id placement.NodeID) *Directory {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[id].dir
}

func (w *network) start(t *testing.T, id placement.NodeID, bootstrap bool) {
	t.Helper()
	w.mu.Lock()
	n := w.nodes[id]
	w.mu.Unlock()
	d, err := Open(Config{
		ID: id, Dir: t.TempDir(), Peers: n, Bootstrap: bootstrap,
		openStores: func(string) (*stores, error) {
			return &stores{log: n.disk, stable: n.disk.InmemStore, snapshots: n.disk.snapshots, close: func() error { return nil }}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	n.dir, n.up = d, true
	w.mu.Unlock()
}

// kill stops a node at once; its disk stays.
func (w *network) kill(t *testing.T, id placement.NodeID) {
	t.Helper()
	w.mu.Lock()
	n := w.nodes[id]
	wasUp := n.up
	n.up = false
	w.dropLocked(func(p [2]placement.NodeID) bool { return p[0] == id || p[1] == id })
	w.mu.Unlock()
	if !wasUp {
		return
	}
	n.disk.setHang(false)
	if err := n.dir.Close(); err != nil {
		t.Errorf("close node %s: %v", id.Short(), err)
	}
	for {
		select {
		case c := <-n.accept:
			c.Close()
			continue
		default:
		}
		return
	}
}

// waitFor waits in fake time.
func (w *network) waitFor(t *testing.T, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > within {
			t.Fatalf("no %s within %v", what, within)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return time.Since(start)
}

// leader waits until the nodes that are up and not stalled agree on one.
func (w *network) leader(t *testing.T, within time.Duration) placement.NodeID {
	t.Helper()
	var leader placement.NodeID
	w.waitFor(t, within, "leader", func() bool {
		seen := map[placement.NodeID]bool{}
		for _, n := range w.upNodes() {
			if n.dir.Stalled() != "" {
				continue
			}
			l, ok := n.dir.Leader()
			if !ok {
				return false
			}
			seen[l] = true
			leader = l
		}
		return len(seen) == 1 && w.isUp(leader)
	})
	return leader
}

func (w *network) isUp(id placement.NodeID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[id].up
}

func (w *network) upNodes() []*testNode {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*testNode
	for _, n := range w.nodes {
		if n.up {
			out = append(out, n)
		}
	}
	return out
}

func (w *network) voters(t *testing.T, want int) {
	t.Helper()
	w.waitFor(t, 20*time.Second, fmt.Sprintf("%d voters", want), func() bool {
		return w.node(w.leader(t, 10*time.Second)).Status().Voters == want
	})
}

func join(id placement.NodeID, incarnation uint64, name string) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_JoinNode{JoinNode: &kvtierv1.JoinNode{
		Node: id[:], Incarnation: incarnation, Name: name, PeerAddress: "127.0.0.1:1",
	}}}
}

func (w *network) propose(t *testing.T, at placement.NodeID, c *kvtierv1.DirectoryCommand, within time.Duration) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	r, err := w.node(at).Propose(ctx, c)
	if err != nil {
		t.Fatalf("propose at %s: %v", at.Short(), err)
	}
	return r
}

// agree waits until all nodes that are up hold the same state.
func (w *network) agree(t *testing.T, within time.Duration) {
	t.Helper()
	w.waitFor(t, within, "agreement of all replicas", func() bool {
		hashes := map[[32]byte]bool{}
		for _, n := range w.upNodes() {
			n.dir.Read(func(s *State) { hashes[s.hashOfClaimsAndNodes()] = true })
		}
		return len(hashes) == 1
	})
}

// hashOfClaimsAndNodes leaves the clock out, which ticks while a test compares.
func (s *State) hashOfClaimsAndNodes() [32]byte {
	now, applied := s.nowMillis, s.applied
	defer func() { s.nowMillis, s.applied = now, applied }()
	s.nowMillis, s.applied = 0, 0
	return s.Hash()
}

func TestVotersGrowWithTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 2)
		w.waitFor(t, 10*time.Second, "a second replica", func() bool { return w.node(nodeID(1)).Status().Replicas == 2 })
		w.voters(t, 1)
		w.mu.Lock()
		id := nodeID(3)
		w.nodes[id] = &testNode{id: id, net: w, accept: make(chan net.Conn, 16), disk: &testDisk{InmemStore: raft.NewInmemStore(), snapshots: raft.NewInmemSnapshotStore()}}
		w.mu.Unlock()
		w.start(t, id, false)
		w.voters(t, 3)
		if r := w.propose(t, id, join(id, 1, "third"), time.Second); r != OK {
			t.Fatal(r)
		}
		w.agree(t, 5*time.Second)
	})
}

func TestLeaderKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		old := w.leader(t, 5*time.Second)
		w.kill(t, old)
		start := time.Now()
		other := w.upNodes()[0].id
		if r := w.propose(t, other, join(other, 1, "after"), 5*time.Second); r != OK {
			t.Fatal(r)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("ownership writes resumed after %v, more than 2 s", took)
		}
		w.start(t, old, false)
		w.agree(t, 10*time.Second)
	})
}

// A leader whose log disk hangs goes on sending heartbeats; the watchdog makes
// the others elect all the same (hashicorp/raft#503).
func TestLeaderDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		old := w.leader(t, 5*time.Second)
		w.nodes[old].disk.setHang(true)
		start := time.Now()
		var other placement.NodeID
		for _, n := range w.upNodes() {
			if n.id != old {
				other = n.id
			}
		}
		if r := w.propose(t, other, join(other, 1, "after"), 10*time.Second); r != OK {
			t.Fatal(r)
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("another leader committed after %v, more than 5 s", took)
		}
		if w.node(old).Stalled() == "" {
			t.Error("the old leader does not say that its disk is stalled")
		}
		if err := w.node(old).ReadLatest(t.Context(), func(*State) {}); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("a cut-off leader answered a linearizable read: %v", err)
		}
		w.nodes[old].disk.setHang(false)
		w.waitFor(t, 10*time.Second, "return of the old leader", func() bool { return w.node(old).Stalled() == "" })
		w.agree(t, 10*time.Second)
	})
}

// A follower that refuses one append catches up without a restart of the leader
// (hashicorp/raft#612).
func TestFollowerRefusesOneAppend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		leader := w.leader(t, 5*time.Second)
		for round := range 20 {
			for _, n := range w.upNodes() {
				if n.id != leader {
					n.disk.mu.Lock()
					n.disk.refuse = 1
					n.disk.mu.Unlock()
					break
				}
			}
			for i := range 5 {
				w.propose(t, leader, join(nodeID(50+i), uint64(round+1), "n"), 5*time.Second)
			}
			w.agree(t, 5*time.Second)
		}
	})
}

func TestMinorityRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		old := w.leader(t, 5*time.Second)
		for _, n := range w.upNodes() {
			if n.id != old {
				w.setCut(old, n.id, true)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if _, err := w.node(old).Propose(ctx, join(old, 9, "minority")); !errors.Is(err, paging.ErrUnavailable) {
			t.Fatalf("the minority accepted an ownership change: %v", err)
		}
		if err := w.node(old).ReadLatest(t.Context(), func(*State) {}); !errors.Is(err, paging.ErrUnavailable) {
			t.Fatalf("the minority answered a linearizable read: %v", err)
		}
		var other placement.NodeID
		for _, n := range w.upNodes() {
			if n.id != old {
				other = n.id
				w.setCut(old, n.id, false)
			}
		}
		w.propose(t, other, join(other, 9, "majority"), 10*time.Second)
		w.agree(t, 10*time.Second)
	})
}

// Commands retried while leaders are killed take effect exactly once: each
// batch flips a claim, so one applied twice, or never, shows.
func TestRetriedCommandsApplyOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		r := rand.New(rand.NewPCG(testSeed(t), 3))
		id := nodeID(40)
		w.propose(t, nodeID(1), join(id, 1, "claimer"), 10*time.Second)
		o := &owner{id: id, incarnation: 1}
		want := map[placement.BlockKey]paging.PartSet{}
		for i := range 300 {
			if i%60 == 30 {
				victim := w.leader(t, 10*time.Second)
				w.kill(t, victim)
				w.leader(t, 10*time.Second)
				w.start(t, victim, false)
			}
			k := randomKey(r, 50)
			want[k] ^= 1
			up := w.upNodes()
			c := claimBatch(o, o.sequence+1, AppendChange(nil, k, want[k]))
			if res := w.propose(t, up[r.IntN(len(up))].id, c, 20*time.Second); res != OK {
				t.Fatalf("batch %d: %v", i, res)
			}
			o.sequence++
		}
		w.agree(t, 10*time.Second)
		w.upNodes()[0].dir.Read(func(s *State) {
			for k, parts := range want {
				if got := s.claims.get(k, s.nodes[id].number); got != parts {
					t.Errorf("claim %v: %b, want %b", k, got, parts)
				}
			}
		})
	})
}

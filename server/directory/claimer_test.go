package directory

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// shelf is an inventory in memory.
type shelf struct {
	mu   sync.Mutex
	held map[placement.BlockKey]paging.PartSet
}

func (s *shelf) Held(buckets *Buckets, f func(placement.BlockKey, paging.PartSet)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, parts := range s.held {
		if buckets[bucketOf(k)] {
			f(k, parts)
		}
	}
}

func (s *shelf) set(k placement.BlockKey, parts paging.PartSet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if parts == 0 {
		delete(s.held, k)
	} else {
		s.held[k] = parts
	}
}

func (s *shelf) equals(st *State, id placement.NodeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := st.nodes[id]
	if n == nil || n.Claims != int64(len(s.held)) {
		return false
	}
	for k, parts := range s.held {
		if st.claims.get(k, n.number) != parts {
			return false
		}
	}
	return true
}

func claimerFor(t *testing.T, w *network, id placement.NodeID, incarnation uint64, s *shelf) *Claimer {
	t.Helper()
	c, err := NewClaimer(ClaimerConfig{
		Directory: w.node(id), Inventory: s,
		Self: &kvtierv1.JoinNode{Node: id[:], Incarnation: incarnation, Name: "n", PeerAddress: "127.0.0.1:1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// follows waits until every replica has the claims of the shelf.
func (w *network) follows(t *testing.T, id placement.NodeID, s *shelf, within time.Duration) {
	t.Helper()
	w.waitFor(t, within, "directory that equals the inventory", func() bool {
		equal := true
		for _, n := range w.upNodes() {
			n.dir.Read(func(st *State) { equal = equal && s.equals(st, id) })
		}
		return equal
	})
}

// Claims follow the inventory through changes, updates that are lost, a killed
// leader and a new start; what was missed is found by comparing.
func TestClaimsFollowTheInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		r := rand.New(rand.NewPCG(testSeed(t), 5))
		id := nodeID(2)
		s := &shelf{held: map[placement.BlockKey]paging.PartSet{}}
		for range 2000 {
			s.set(randomKey(r, 100_000), 1) // from an earlier run
		}
		c := claimerFor(t, w, id, 1, s)
		w.follows(t, id, s, 10*time.Second)
		lost := 0
		for i := range 3000 {
			k, parts := randomKey(r, 5000), paging.PartSet(r.Uint64N(3))
			s.set(k, parts)
			if r.IntN(20) == 0 {
				lost++ // 5 % of the updates never reach the claimer
			} else {
				c.Set(k, parts)
			}
			if i%100 == 0 {
				time.Sleep(10 * time.Millisecond)
			}
		}
		leader := w.leader(t, 10*time.Second)
		if leader != id {
			w.kill(t, leader)
			w.leader(t, 10*time.Second)
			w.start(t, leader, false)
		}
		c.Suspect() // a peer asked for a block that was claimed and is not held
		w.follows(t, id, s, 20*time.Second)
		if m := c.Metrics(); lost > 0 && m.RepairedBuckets == 0 || m.Pending != 0 {
			t.Errorf("%d updates lost, metrics %+v", lost, m)
		}
		c.Close()
		for range 100 {
			s.set(randomKey(r, 5000), 0) // went while the node was down
		}
		claimerFor(t, w, id, 2, s)
		w.follows(t, id, s, 20*time.Second)
	})
}

// A commit on one node is seen on another within 50 ms.
func TestClaimIsSeenSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		id := nodeID(1)
		s := &shelf{held: map[placement.BlockKey]paging.PartSet{}}
		c := claimerFor(t, w, id, 1, s)
		w.follows(t, id, s, 10*time.Second)
		for i := range 50 {
			k := spreadKey(i)
			s.set(k, 1)
			c.Set(k, 1)
			start := time.Now()
			w.follows(t, id, s, time.Second)
			if took := time.Since(start); took > 60*time.Millisecond {
				t.Errorf("claim %d was seen everywhere after %v", i, took)
			}
		}
	})
}

// Two processes with one identity: the older start is refused and says so.
func TestOlderStartIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		s := &shelf{held: map[placement.BlockKey]paging.PartSet{spreadKey(1): 1}}
		claimerFor(t, w, nodeID(1), 7, s)
		w.follows(t, nodeID(1), s, 10*time.Second)
		old := claimerFor(t, w, nodeID(1), 6, &shelf{held: map[placement.BlockKey]paging.PartSet{}})
		w.waitFor(t, 10*time.Second, "refusal", func() bool { return old.Metrics().Refused > 0 })
		w.follows(t, nodeID(1), s, 10*time.Second)
	})
}

// Claims that were dropped while a batch of the node was on its way are not compared
// with a replica that has not applied that batch: what it brings would be taken for
// absent, and stay. Where the batch never shows, nothing is taken for equal.
func TestComparingWaitsForWhatWasSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 1)
		id, other := nodeID(1), nodeID(9)
		batch := func(sequence uint64, k placement.BlockKey) {
			w.propose(t, id, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ClaimBatch{ClaimBatch: &kvtierv1.ClaimBatch{
				Node: other[:], Incarnation: 1, Sequence: sequence, Changes: AppendChange(nil, k, 1)}}}, 5*time.Second)
		}
		self := &kvtierv1.JoinNode{Node: other[:], Incarnation: 1}
		w.propose(t, id, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_JoinNode{JoinNode: self}}, 5*time.Second)
		r := rand.New(rand.NewPCG(1, 1))
		batch(1, randomKey(r, 1000))
		w.propose(t, id, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{
			Node: other[:], Incarnation: 1, State: kvtierv1.NodeState_NODE_STATE_DOWN}}}, 5*time.Second)
		w.propose(t, id, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_DropClaims{DropClaims: &kvtierv1.DropClaims{
			Node: other[:], Incarnation: 1, ToShard: Shards}}}, 5*time.Second)

		c := &Claimer{cfg: ClaimerConfig{Directory: w.node(id), Self: self}, self: other, ctx: t.Context(), joined: true, sequence: 2, gapped: true}
		late := randomKey(r, 1000)
		var way sync.WaitGroup
		way.Go(func() {
			time.Sleep(gapPatience / 2)
			batch(2, late)
		})
		digests, err := c.catchUp()
		way.Wait()
		_, want := ClaimDigest(late, 1)
		if err != nil || digests == nil || digests[bucketOf(late)] != want {
			t.Errorf("digests without the batch that was on its way: %v", err)
		}
		c.sequence = 7 // of a record that somebody restored to before it
		if digests, err := c.catchUp(); err != nil || digests != nil {
			t.Errorf("digests of a record that never comes to what was sent: %v", err)
		}
	})
}

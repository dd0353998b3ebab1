package directory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

func testSeed(t testing.TB) uint64 {
	seed, err := strconv.ParseUint(os.Getenv("KVTIER_SEED"), 10, 64)
	if err != nil || seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("KVTIER_SEED=%d repeats this run", seed)
	return seed
}

func nodeID(i int) placement.NodeID { return placement.NodeID{0: byte(i), 15: 0xaa} }

func randomKey(r *rand.Rand, space int) (k placement.BlockKey) {
	// A small space, spread like hashes are.
	x := uint64(r.IntN(space)+1) * 0x9e3779b97f4a7c15
	binary.LittleEndian.PutUint64(k[:], x)
	binary.LittleEndian.PutUint64(k[8:], x*0xbf58476d1ce4e5b9)
	return k
}

// owner is a node's own side of the protocol, for tests.
type owner struct {
	id          placement.NodeID
	incarnation uint64
	sequence    uint64
}

type modelKey struct {
	node int
	key  placement.BlockKey
}

// world drives replicas and a model with one history.
type world struct {
	r        *rand.Rand
	owners   []*owner
	model    map[modelKey]paging.PartSet
	replicas []*State
	millis   int64
}

func newWorld(seed uint64, nodes, replicas int) *world {
	w := &world{r: rand.New(rand.NewPCG(seed, 1)), model: map[modelKey]paging.PartSet{}}
	for i := range nodes {
		w.owners = append(w.owners, &owner{id: nodeID(i + 1), incarnation: 1})
	}
	for range replicas {
		w.replicas = append(w.replicas, NewState(1<<40))
	}
	for i := range nodes {
		w.apply(w.join(i))
	}
	return w
}

func (w *world) apply(c *kvtierv1.DirectoryCommand) Result {
	w.millis += int64(w.r.IntN(10)) - 2 // a leader's clock may be behind
	c.NowUnixMs = w.millis
	var first Result
	for i, s := range w.replicas {
		r, err := s.Apply(c)
		if err != nil {
			panic(err)
		}
		if i == 0 {
			first = r
		} else if r != first {
			panic("replicas answer differently")
		}
	}
	return first
}

func (w *world) join(i int) *kvtierv1.DirectoryCommand {
	o := w.owners[i]
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_JoinNode{JoinNode: &kvtierv1.JoinNode{
		Node: o.id[:], Incarnation: o.incarnation, Name: "n", PeerAddress: "127.0.0.1:1",
	}}}
}

func (w *world) batch(i, changes int) (*kvtierv1.DirectoryCommand, func()) {
	o := w.owners[i]
	var b []byte
	seen := map[placement.BlockKey]paging.PartSet{}
	for range changes {
		k := randomKey(w.r, 5000)
		if _, dup := seen[k]; dup {
			continue
		}
		parts := paging.PartSet(w.r.Uint64N(4)) // 0 releases
		seen[k] = parts
		b = AppendChange(b, k, parts)
	}
	commit := func() {
		for k, parts := range seen {
			if parts == 0 {
				delete(w.model, modelKey{i, k})
			} else {
				w.model[modelKey{i, k}] = parts
			}
		}
	}
	return claimBatch(o, o.sequence+1, b), commit
}

func claimBatch(o *owner, sequence uint64, changes []byte) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ClaimBatch{ClaimBatch: &kvtierv1.ClaimBatch{
		Node: o.id[:], Incarnation: o.incarnation, Sequence: sequence, Changes: changes,
	}}}
}

func (w *world) check(t *testing.T) {
	t.Helper()
	hash := w.replicas[0].Hash()
	for i, s := range w.replicas {
		if got := s.Hash(); got != hash {
			t.Fatalf("replica %d has state %x, replica 0 %x", i, got, hash)
		}
		if got := s.Claims(); got != int64(len(w.model)) {
			t.Fatalf("replica %d holds %d claims, model %d", i, got, len(w.model))
		}
	}
	var digests [64][bucketCount]uint64
	for mk, parts := range w.model {
		bucket, c := ClaimDigest(mk.key, parts)
		digests[mk.node][bucket] ^= c
		holders := w.replicas[0].Locate(mk.key, nil)
		found := false
		for _, h := range holders {
			found = found || h.Node == w.owners[mk.node].id && h.Parts == parts
		}
		if !found {
			t.Fatalf("block %v of node %d with parts %b is not among %v", mk.key, mk.node, parts, holders)
		}
	}
	for i, o := range w.owners {
		if got, ok := w.replicas[0].Digests(o.id); !ok || *got != digests[i] {
			t.Fatalf("digests of node %d differ from its inventory", i)
		}
	}
}

// step does one random command and keeps the model.
func (w *world) step(t *testing.T) {
	i := w.r.IntN(len(w.owners))
	o := w.owners[i]
	switch p := w.r.IntN(100); {
	case p < 80:
		c, commit := w.batch(i, 1+w.r.IntN(40))
		if r := w.apply(c); r != OK {
			t.Fatalf("batch %d of node %d: %v", o.sequence+1, i, r)
		}
		o.sequence++
		commit()
		if p < 10 { // its fate was unknown: the same batch again changes nothing
			if r := w.apply(c); r != OK {
				t.Fatalf("retried batch: %v", r)
			}
		}
	case p < 85:
		c, _ := w.batch(i, 5)
		c.GetClaimBatch().Sequence += 1 + uint64(w.r.IntN(3))
		if r := w.apply(c); r != Gap {
			t.Fatalf("batch ahead of its turn: %v", r)
		}
		w.repair(t, i)
	case p < 90:
		c, _ := w.batch(i, 5)
		c.GetClaimBatch().Incarnation--
		if r := w.apply(c); r != Stale && r != Invalid {
			t.Fatalf("batch of an older incarnation: %v", r)
		}
	case p < 94:
		o.incarnation++
		o.sequence = 0
		w.apply(w.join(i))
		w.repair(t, i)
	case p < 97:
		w.apply(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{
			Node: o.id[:], Incarnation: o.incarnation, State: kvtierv1.NodeState_NODE_STATE_DRAINING,
		}}})
	default:
		w.repair(t, i)
	}
}

// repair sends a node's inventory in some buckets, whole.
func (w *world) repair(t *testing.T, i int) {
	o := w.owners[i]
	from := w.r.IntN(bucketCount)
	to := min(bucketCount, from+1+w.r.IntN(200))
	var buckets, claims []byte
	for b := from; b < to; b++ {
		buckets = binary.LittleEndian.AppendUint16(buckets, uint16(b))
	}
	for mk, parts := range w.model {
		if b := bucketOf(mk.key); mk.node == i && from <= b && b < to {
			claims = AppendChange(claims, mk.key, parts)
		}
	}
	c := &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ClaimRepair{ClaimRepair: &kvtierv1.ClaimRepair{
		Node: o.id[:], Incarnation: o.incarnation, Sequence: o.sequence + 1, Buckets: buckets, Claims: claims, ResetsSequence: true,
	}}}
	if r := w.apply(c); r != OK {
		t.Fatalf("repair: %v", r)
	}
	o.sequence++
}

func TestReplicasAgreeThroughSnapshots(t *testing.T) {
	seed := testSeed(t)
	w := newWorld(seed, 5, 3)
	for i := range randomSteps {
		w.step(t)
		if w.r.IntN(randomSteps/40) == 0 { // one replica goes through a snapshot
			victim := w.r.IntN(3)
			w.replicas[victim] = throughSnapshot(t, w.replicas[victim])
		}
		if i%(randomSteps/4) == 0 {
			w.check(t)
		}
	}
	w.check(t)
}

func throughSnapshot(t *testing.T, s *State) *State {
	t.Helper()
	var buf bytes.Buffer
	if err := s.Snapshot().Write(&buf); err != nil {
		t.Fatal(err)
	}
	restored, err := Restore(&buf, s.maxClaims)
	if err != nil {
		t.Fatal(err)
	}
	return restored
}

// A snapshot shows the moment it was taken, whatever is applied while it is
// written.
func TestSnapshotIsOneMoment(t *testing.T) {
	w := newWorld(testSeed(t), 3, 1)
	for range 300 {
		w.step(t)
	}
	hash := w.replicas[0].Hash()
	snap := w.replicas[0].Snapshot()
	for range 300 {
		w.step(t)
	}
	var buf bytes.Buffer
	if err := snap.Write(&buf); err != nil {
		t.Fatal(err)
	}
	restored, err := Restore(&buf, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	if restored.Hash() != hash {
		t.Fatal("the snapshot is not the state at the moment it was taken")
	}
	w.check(t)
}

func TestDamagedSnapshotIsRefused(t *testing.T) {
	w := newWorld(testSeed(t), 3, 1)
	for range 100 {
		w.step(t)
	}
	var buf bytes.Buffer
	if err := w.replicas[0].Snapshot().Write(&buf); err != nil {
		t.Fatal(err)
	}
	whole := buf.Bytes()
	for range 200 {
		b := bytes.Clone(whole)
		if w.r.IntN(2) == 0 {
			b = b[:w.r.IntN(len(b))]
		} else {
			b[w.r.IntN(len(b))] ^= 1 << w.r.IntN(8)
		}
		if _, err := Restore(bytes.NewReader(b), 1<<40); !errors.Is(err, paging.ErrCorrupt) && !errors.Is(err, paging.ErrIncompatible) {
			t.Fatalf("damaged snapshot: %v", err)
		}
	}
}

func FuzzRestore(f *testing.F) {
	w := newWorld(7, 2, 1)
	var buf bytes.Buffer
	if err := w.replicas[0].Snapshot().Write(&buf); err != nil {
		f.Fatal(err)
	}
	f.Add(buf.Bytes())
	f.Add([]byte{0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := Restore(bytes.NewReader(b), 1000); err == nil {
			throughSnapshot(t, s)
		}
	})
}

func TestRequestAppliesOnce(t *testing.T) {
	w := newWorld(testSeed(t), 1, 1)
	c := w.join(0)
	c.GetJoinNode().Incarnation = 2
	c.RequestId = bytes.Repeat([]byte{9}, 16)
	if r := w.apply(c); r != OK {
		t.Fatal(r)
	}
	c.GetJoinNode().Name = "changed by a retry"
	if r := w.apply(c); r != OK {
		t.Fatal(r)
	}
	if got := w.replicas[0].Nodes()[0].Name; got != "n" {
		t.Fatalf("a retry was applied: name %q", got)
	}
	w.replicas[0] = throughSnapshot(t, w.replicas[0])
	w.apply(c)
	if got := w.replicas[0].Nodes()[0].Name; got != "n" {
		t.Fatalf("a retry was applied after a snapshot: name %q", got)
	}
}

func TestClaimBudget(t *testing.T) {
	s := NewState(10)
	o := &owner{id: nodeID(1), incarnation: 1}
	w := &world{owners: []*owner{o}, replicas: []*State{s}, r: rand.New(rand.NewPCG(1, 1))}
	w.apply(w.join(0))
	var b []byte
	for i := range 12 {
		b = AppendChange(b, placement.BlockKey{0: byte(i)}, 1)
	}
	if r := w.apply(claimBatch(o, 1, b)); r != Full || s.Claims() != 10 {
		t.Fatalf("12 claims in a budget of 10: %v, %d held", r, s.Claims())
	}
	// A release makes room in the same batch, and a change of parts needs none.
	b = AppendChange(nil, placement.BlockKey{0: 0}, 0)
	b = AppendChange(b, placement.BlockKey{0: 11}, 1)
	b = AppendChange(b, placement.BlockKey{0: 5}, 3)
	if r := w.apply(claimBatch(o, 2, b)); r != OK || s.Claims() != 10 {
		t.Fatalf("one released, one claimed: %v, %d held", r, s.Claims())
	}
}

func TestDeadNodeIsSkippedThenForgotten(t *testing.T) {
	w := newWorld(testSeed(t), 2, 1)
	s := w.replicas[0]
	k := placement.BlockKey{1}
	for i, o := range w.owners {
		w.apply(claimBatch(o, 1, AppendChange(nil, k, paging.PartSet(i+1))))
	}
	o := w.owners[0]
	down := func(state kvtierv1.NodeState) Result {
		return w.apply(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{
			Node: o.id[:], Incarnation: o.incarnation, State: state,
		}}})
	}
	down(kvtierv1.NodeState_NODE_STATE_DOWN)
	if got := s.Locate(k, nil); len(got) != 1 || got[0].Node != w.owners[1].id {
		t.Fatalf("holders while node 0 is down: %v", got)
	}
	drop := func() Result {
		return w.apply(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_DropClaims{DropClaims: &kvtierv1.DropClaims{
			Node: o.id[:], Incarnation: o.incarnation, ToShard: shardCount,
		}}})
	}
	remove := func() Result {
		return w.apply(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_RemoveNode{RemoveNode: &kvtierv1.RemoveNode{Node: o.id[:]}}})
	}
	if r := remove(); r != Stale {
		t.Fatalf("a node with claims was removed: %v", r)
	}
	down(kvtierv1.NodeState_NODE_STATE_UP)
	if r := drop(); r != Stale {
		t.Fatalf("claims of a node that is up were dropped: %v", r)
	}
	down(kvtierv1.NodeState_NODE_STATE_DOWN)
	if r := drop(); r != OK || s.Claims() != 1 {
		t.Fatalf("drop: %v, %d claims left", r, s.Claims())
	}
	if r := remove(); r != OK || len(s.Nodes()) != 1 {
		t.Fatalf("remove: %v, %d nodes left", r, len(s.Nodes()))
	}
}

func TestUnknownCommandStopsTheReplica(t *testing.T) {
	if _, err := NewState(1).Apply(&kvtierv1.DirectoryCommand{}); !errors.Is(err, paging.ErrIncompatible) {
		t.Fatalf("a command of no kind: %v", err)
	}
}

// TestClaimTable compares the table with a map under random operations.
func TestClaimTable(t *testing.T) {
	r := rand.New(rand.NewPCG(testSeed(t), 2))
	var table claimTable
	model := map[modelKey]paging.PartSet{}
	for range 200_000 {
		mk := modelKey{1 + r.IntN(4), randomKey(r, 3000)}
		parts := paging.PartSet(r.Uint64N(3))
		if r.IntN(1000) == 0 {
			table.freeze()
		}
		if got := table.put(mk.key, uint16(mk.node), parts); got != model[mk] {
			t.Fatalf("put returned %b, want %b", got, model[mk])
		}
		if parts == 0 {
			delete(model, mk)
		} else {
			model[mk] = parts
		}
	}
	for mk, parts := range model {
		if got := table.get(mk.key, uint16(mk.node)); got != parts {
			t.Fatalf("get %v: %b, want %b", mk, got, parts)
		}
	}
	if table.count != int64(len(model)) {
		t.Fatalf("count %d, want %d", table.count, len(model))
	}
}

func filled(n int) *State {
	s := NewState(1 << 40)
	o := &owner{id: nodeID(1), incarnation: 1}
	w := &world{owners: []*owner{o}, replicas: []*State{s}, r: rand.New(rand.NewPCG(1, 1))}
	w.apply(w.join(0))
	var b []byte
	for i := range n {
		b = AppendChange(b, spreadKey(i), 1)
		if len(b) == MaxBatchChanges*changeBytes || i == n-1 {
			o.sequence++
			w.apply(claimBatch(o, o.sequence, b))
			b = b[:0]
		}
	}
	return s
}

func spreadKey(i int) (k placement.BlockKey) {
	x := (uint64(i) + 1) * 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	binary.LittleEndian.PutUint64(k[:], x^x>>27)
	binary.LittleEndian.PutUint64(k[8:], x*0x94d049bb133111eb^x>>31)
	return k
}

// BenchmarkLocate512 looks 512 random present blocks of 1 M up.
func BenchmarkLocate512(b *testing.B) {
	const n = 1_000_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	s := filled(n)
	runtime.GC()
	runtime.ReadMemStats(&after)
	r := rand.New(rand.NewPCG(1, 2))
	keys := make([]placement.BlockKey, 1<<20)
	for i := range keys {
		keys[i] = spreadKey(r.IntN(n))
	}
	var out []Holder
	b.ReportAllocs()
	at := 0
	for b.Loop() {
		for range 512 {
			out = s.Locate(keys[at], out[:0])
			at = (at + 1) % len(keys)
			if len(out) != 1 {
				b.Fatal("a present block was not found")
			}
		}
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "bytes/claim")
}

func BenchmarkApplyBatch4096(b *testing.B) {
	s := filled(1_000_000)
	o := &owner{id: nodeID(1), incarnation: 1, sequence: s.Nodes()[0].Sequence}
	r := rand.New(rand.NewPCG(1, 2))
	var changes []byte
	for range MaxBatchChanges {
		changes = AppendChange(changes, spreadKey(r.IntN(2_000_000)), paging.PartSet(1+r.Uint64N(2)))
	}
	b.ReportAllocs()
	for b.Loop() {
		o.sequence++
		if r, err := s.Apply(claimBatch(o, o.sequence, changes)); r != OK || err != nil {
			b.Fatal(r, err)
		}
	}
}

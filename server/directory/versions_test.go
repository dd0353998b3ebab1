package directory

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

var rewrite = flag.Bool("rewrite", false, "write the fixtures of this version anew: only before it is released")

// Fixtures of a version: commands as they lie in the log, and the snapshot of
// the state that they make. Those of older versions stay as they are.
const fixtures = "testdata/v1"

// everyCommand is a history with each kind of command.
func everyCommand() []*kvtierv1.DirectoryCommand {
	a, b := &owner{id: nodeID(1), incarnation: 3}, &owner{id: nodeID(2), incarnation: 1}
	gone := nodeID(3)
	ns := paging.Namespace{Tenant: "t", Layout: paging.Layout{
		Model: "m", KVDType: "bf16", Attention: "gqa", Layers: 2, KVHeads: 2, HeadDim: 8, DType: "bf16", EngineLayout: "test/v1",
		TP: 1, PP: 1, CP: 1, HashAlgorithm: "test/hash", BlockTokens: 16, Parts: []paging.Part{{Name: "a", PageBytes: 4096, BlocksPerPage: 1}},
	}}
	encoded, id := paging.EncodeNamespace(&ns), ns.ID()
	ns.Salt = []byte("s")
	salted := paging.EncodeNamespace(&ns)
	up, down := kvtierv1.NodeState_NODE_STATE_DRAINING, kvtierv1.NodeState_NODE_STATE_DOWN
	joinA := join(a.id, a.incarnation, "a")
	joinA.RequestId = bytes.Repeat([]byte{7}, 16)
	joinA.GetJoinNode().Capacity = []*kvtierv1.TierCapacity{{Tier: kvtierv1.Tier_TIER_RAM, Bytes: 1 << 30}}
	changes := func(from, to int, parts paging.PartSet) (b []byte) {
		for i := from; i < to; i++ {
			b = AppendChange(b, spreadKey(i), parts)
		}
		return b
	}
	bucket := bucketOf(spreadKey(70))
	commands := []*kvtierv1.DirectoryCommand{
		joinA, join(b.id, 1, "b"), join(gone, 1, "gone"),
		{Command: &kvtierv1.DirectoryCommand_PutNamespace{PutNamespace: &kvtierv1.PutNamespace{Namespace: encoded}}},
		{Command: &kvtierv1.DirectoryCommand_PutNamespace{PutNamespace: &kvtierv1.PutNamespace{Namespace: salted}}},
		{Command: &kvtierv1.DirectoryCommand_RemoveNamespace{RemoveNamespace: &kvtierv1.RemoveNamespace{NamespaceId: id[:]}}},
		claimBatch(a, 1, changes(0, 100, 3)), claimBatch(b, 1, changes(50, 60, 1)), claimBatch(a, 2, changes(90, 95, 0)),
		{Command: &kvtierv1.DirectoryCommand_Tick{Tick: &kvtierv1.Tick{}}},
		{Command: &kvtierv1.DirectoryCommand_ClaimRepair{ClaimRepair: &kvtierv1.ClaimRepair{
			Node: a.id[:], Incarnation: a.incarnation, Sequence: 3, Buckets: []byte{byte(bucket), byte(bucket >> 8)}, Claims: changes(70, 71, 1), ResetsSequence: true,
		}}},
		{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{Node: b.id[:], Incarnation: 1, State: up}}},
		{Command: &kvtierv1.DirectoryCommand_DropClaims{DropClaims: &kvtierv1.DropClaims{Node: b.id[:], Incarnation: 1, FromShard: 0, ToShard: 128}}},
		{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{Node: gone[:], Incarnation: 1, State: down}}},
		{Command: &kvtierv1.DirectoryCommand_RemoveNode{RemoveNode: &kvtierv1.RemoveNode{Node: gone[:]}}},
	}
	commands = append(commands, everyPlanCommand(a, b)...)
	for i, c := range commands {
		c.NowUnixMs = 1_700_000_000_000 + int64(i)
	}
	return commands
}

// fold applies the commands of a log and tells what each did.
func fold(t testing.TB, log []byte) (*State, []Result) {
	t.Helper()
	s, in := NewState(1<<40), bytes.NewReader(log)
	var results []Result
	for in.Len() > 0 {
		c := &kvtierv1.DirectoryCommand{}
		if err := protodelim.UnmarshalFrom(in, c); err != nil {
			t.Fatal(err)
		}
		r, err := s.Apply(c)
		if err != nil {
			t.Fatal(err)
		}
		results = append(results, r)
	}
	return s, results
}

// A log and a snapshot that version 1 wrote mean to this version what they meant
// to version 1.
func TestRecordsOfVersion1(t *testing.T) {
	commands, snapshot, hash := filepath.Join(fixtures, "commands"), filepath.Join(fixtures, "snapshot"), filepath.Join(fixtures, "hash")
	if *rewrite {
		var log, snap bytes.Buffer
		for _, c := range everyCommand() {
			if _, err := protodelim.MarshalTo(&log, c); err != nil {
				t.Fatal(err)
			}
		}
		s, _ := fold(t, log.Bytes())
		if err := s.Snapshot().Write(&snap); err != nil {
			t.Fatal(err)
		}
		sum := s.Hash()
		if err := os.MkdirAll(fixtures, 0o755); err != nil {
			t.Fatal(err)
		}
		for path, b := range map[string][]byte{commands: log.Bytes(), snapshot: snap.Bytes(), hash: []byte(hex.EncodeToString(sum[:]) + "\n")} {
			if err := os.WriteFile(path, b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	read := func(path string) []byte {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	want := strings.TrimSpace(string(read(hash)))
	s, results := fold(t, read(commands))
	for i, r := range results {
		if r != OK {
			t.Errorf("command %d: %v", i, r)
		}
	}
	for what, s := range map[string]*State{"log": s, "snapshot": mustRestore(t, read(snapshot))} {
		if sum := s.Hash(); hex.EncodeToString(sum[:]) != want {
			t.Errorf("the %s gives state %x, version 1 had %s", what, sum, want)
		}
	}
	var again bytes.Buffer
	if err := s.Snapshot().Write(&again); err != nil || !bytes.Equal(again.Bytes(), read(snapshot)) {
		t.Errorf("this version writes another snapshot of that state (%v): raise snapshotVersion", err)
	}
}

func mustRestore(t testing.TB, b []byte) *State {
	t.Helper()
	s, err := Restore(bytes.NewReader(b), 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A snapshot of a later version is refused, however it is whole.
func TestLaterVersionIsRefused(t *testing.T) {
	snap := NewState(1).Snapshot()
	snap.header.Version = snapshotVersion + 1
	var b bytes.Buffer
	if err := snap.Write(&b); err != nil {
		t.Fatal(err)
	}
	if _, err := Restore(&b, 1); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("%v, want %v", err, paging.ErrIncompatible)
	}
	// A record of a kind that is not known, too: field 99.
	var unknown bytes.Buffer
	w := &recordWriter{w: &unknown, hash: sha256.New()}
	header := &kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Header{Header: &kvtierv1.SnapshotHeader{Version: snapshotVersion}}}
	other := &kvtierv1.DirectoryRecord{}
	other.ProtoReflect().SetUnknown([]byte{0x9a, 0x06, 0x01, 0x00})
	for _, r := range []*kvtierv1.DirectoryRecord{header, other} {
		if err := w.write(r); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Restore(&unknown, 1); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("unknown record: %v, want %v", err, paging.ErrIncompatible)
	}
}

// FuzzApply feeds logs to two replicas, one of which goes through a snapshot
// after every command: whatever the log says, they stay equal, their counts are
// those of their tables, and nothing panics. Logs are long: give -fuzzminimizetime
// 10x, or most of the time goes into making them shorter.
func FuzzApply(f *testing.F) {
	var log bytes.Buffer
	for _, c := range everyCommand() {
		if _, err := protodelim.MarshalTo(&log, c); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(log.Bytes(), int64(1<<40))
	f.Add(log.Bytes(), int64(20))
	w := newWorld(3, 3, 1)
	var history bytes.Buffer
	for i := range 12 {
		c, _ := w.batch(i%3, 20)
		w.owners[i%3].sequence++
		if _, err := protodelim.MarshalTo(&history, c); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(history.Bytes(), int64(1000))
	f.Fuzz(func(t *testing.T, log []byte, budget int64) {
		budget = min(max(budget, 0), 1<<40)
		one, two := NewState(budget), NewState(budget)
		in := bytes.NewReader(log)
		for range 64 {
			c := &kvtierv1.DirectoryCommand{}
			if err := (protodelim.UnmarshalOptions{MaxSize: maxCommandBytes}).UnmarshalFrom(in, c); err != nil {
				break
			}
			r1, err1 := one.Apply(proto.CloneOf(c))
			r2, err2 := two.Apply(c)
			if r1 != r2 || (err1 == nil) != (err2 == nil) {
				t.Fatalf("one answers %v, %v, the other %v, %v", r1, err1, r2, err2)
			}
			if err1 != nil {
				return // both stop
			}
			two = throughSnapshot(t, two)
		}
		if one.Hash() != two.Hash() {
			t.Fatal("two replicas of one log differ")
		}
		checkCounts(t, one)
		checkCounts(t, two)
	})
}

// checkCounts compares what a state counts with what it holds.
func checkCounts(t *testing.T, s *State) {
	t.Helper()
	claims := map[uint16]int64{}
	digests := map[uint16]*[bucketCount]uint64{}
	total := int64(0)
	for i := range s.claims.shards {
		for _, c := range s.claims.shards[i].slots {
			if c.node == 0 {
				continue
			}
			total++
			claims[c.node]++
			if digests[c.node] == nil {
				digests[c.node] = new([bucketCount]uint64)
			}
			bucket, part := ClaimDigest(c.key, c.parts)
			digests[c.node][bucket] ^= part
		}
	}
	if total != s.claims.count || total > s.maxClaims && s.maxClaims > 0 {
		t.Fatalf("%d claims, counted %d, budget %d", total, s.claims.count, s.maxClaims)
	}
	for _, n := range s.nodes {
		want := digests[n.number]
		if want == nil {
			want = new([bucketCount]uint64)
		}
		if claims[n.number] != n.Claims || *want != *n.digests {
			t.Fatalf("node %v: %d claims, counted %d; digests equal: %v", n.ID, claims[n.number], n.Claims, *want == *n.digests)
		}
		delete(claims, n.number)
	}
	if len(claims) != 0 {
		t.Fatalf("claims of nodes that are not there: %v", claims)
	}
}

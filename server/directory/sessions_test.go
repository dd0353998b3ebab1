package directory

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// sessionWorld is a state with nodes 1 to 4 and one namespace.
type sessionWorld struct {
	t  *testing.T
	s  *State
	ns paging.NamespaceID
}

func newSessionWorld(t *testing.T) *sessionWorld {
	w := &sessionWorld{t: t, s: NewState(1000)}
	ns := paging.Namespace{Tenant: "t", Layout: paging.Layout{
		Model: "m", DType: "bf16", KVDType: "bf16", Attention: "gqa", Layers: 1, KVHeads: 1, HeadDim: 8, EngineLayout: "l", TP: 1, PP: 1, CP: 1,
		HashAlgorithm: "h", BlockTokens: 16, Parts: []paging.Part{{Name: "kv", PageBytes: 4096, BlocksPerPage: 1}},
	}}
	w.ns = ns.ID()
	w.must(OK, &kvtierv1.DirectoryCommand{NowUnixMs: 1, Command: &kvtierv1.DirectoryCommand_PutNamespace{
		PutNamespace: &kvtierv1.PutNamespace{Namespace: paging.EncodeNamespace(&ns)}}})
	for i := byte(1); i <= 4; i++ {
		w.must(OK, joinNode(i, 1))
	}
	return w
}

func nodeN(i byte) []byte {
	id := placement.NodeID{i}
	return id[:]
}

func joinNode(i byte, incarnation uint64) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_JoinNode{JoinNode: &kvtierv1.JoinNode{Node: nodeN(i), Incarnation: incarnation}}}
}

func nodeState(i byte, state kvtierv1.NodeState) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{Node: nodeN(i), Incarnation: 1, State: state}}}
}

func (w *sessionWorld) must(want Result, c *kvtierv1.DirectoryCommand) {
	w.t.Helper()
	got, err := w.s.Apply(c)
	if err != nil || got != want {
		w.t.Fatalf("%v: %v, %v, want %v", c, got, err, want)
	}
}

// chainOf is a chain of so many blocks; salt makes another one.
func chainOf(blocks uint64, salt byte) *kvtierv1.SessionChain {
	if blocks == 0 {
		return &kvtierv1.SessionChain{}
	}
	c := &kvtierv1.SessionChain{Blocks: blocks, Tokens: blocks * 16, Tip: bytes.Repeat([]byte{byte(blocks), salt}, 16), Hash: bytes.Repeat([]byte{salt, byte(blocks)}, 16)}
	if blocks >= paging.SegmentBlocks {
		c.SegmentHash = bytes.Repeat([]byte{7}, 32)
	}
	return c
}

func change(node byte, epoch uint64, c *kvtierv1.SessionCommand) *kvtierv1.DirectoryCommand {
	c.Node, c.Epoch = nodeN(node), epoch
	if c.Session == "" {
		c.Session = "s"
	}
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_Session{Session: c}}
}

func (w *sessionWorld) open(node byte) *kvtierv1.DirectoryCommand {
	return change(node, 0, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Open{Open: &kvtierv1.OpenSession{
		NamespaceId: w.ns[:], Chain: &kvtierv1.SessionChain{}, Retention: &kvtierv1.RetainSession{Priority: 10}}}})
}

func appendTo(node byte, epoch, sequence, blocks uint64) *kvtierv1.DirectoryCommand {
	return change(node, epoch, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Append{Append: &kvtierv1.AppendSession{Sequence: sequence, Chain: chainOf(blocks, 1)}}})
}

func moveID(i byte) []byte { return bytes.Repeat([]byte{i}, 16) }

func prepare(node byte, epoch uint64, move, target byte) *kvtierv1.DirectoryCommand {
	return change(node, epoch, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Prepare{Prepare: &kvtierv1.PrepareMove{Move: moveID(move), Target: nodeN(target)}}})
}

func freeze(node byte, epoch uint64, move byte) *kvtierv1.DirectoryCommand {
	return change(node, epoch, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Freeze{Freeze: &kvtierv1.FreezeMove{Move: moveID(move)}}})
}

func commitMove(node byte, epoch uint64, move byte) *kvtierv1.DirectoryCommand {
	return change(node, epoch, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Commit{Commit: &kvtierv1.CommitMove{Move: moveID(move)}}})
}

func abort(node byte, epoch uint64, move byte) *kvtierv1.DirectoryCommand {
	return change(node, epoch, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Abort{Abort: &kvtierv1.AbortMove{Move: moveID(move)}}})
}

func takeOver(node byte, epoch, blocks uint64) *kvtierv1.DirectoryCommand {
	return change(node, epoch, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_TakeOver{TakeOver: &kvtierv1.TakeOver{Chain: chainOf(blocks, 1)}}})
}

func TestSessionMoves(t *testing.T) {
	w := newSessionWorld(t)
	w.must(Unknown, appendTo(1, 1, 1, 1))
	w.must(OK, w.open(1))
	w.must(OK, w.open(1))       // again
	w.must(NotOwner, w.open(2)) // another's
	w.must(OK, appendTo(1, 1, 1, 1))
	w.must(OK, appendTo(1, 1, 1, 1)) // again
	w.must(Stale, appendTo(1, 1, 1, 2))
	w.must(Gap, appendTo(1, 1, 3, 3))
	w.must(NotOwner, appendTo(2, 1, 2, 2))
	w.must(NotOwner, appendTo(1, 2, 2, 2))
	w.must(Invalid, appendTo(1, 1, 2, 0)) // shorter

	w.must(Invalid, prepare(1, 1, 1, 1)) // to itself
	w.must(Unknown, prepare(1, 1, 1, 9))
	w.must(OK, nodeState(3, kvtierv1.NodeState_NODE_STATE_DRAINING))
	w.must(Full, prepare(1, 1, 1, 3)) // to a node that drains
	w.must(OK, prepare(1, 1, 1, 2))
	w.must(OK, prepare(1, 1, 1, 2))       // again
	w.must(NotOwner, prepare(1, 1, 2, 4)) // two at once
	w.must(NotOwner, commitMove(1, 1, 1)) // not frozen
	w.must(OK, appendTo(1, 1, 2, 2))
	w.must(OK, freeze(1, 1, 1))
	w.must(Frozen, appendTo(1, 1, 3, 3))
	w.must(OK, appendTo(1, 1, 2, 2)) // what was applied before is still success
	w.must(NotOwner, commitMove(1, 1, 2))
	w.must(OK, commitMove(1, 1, 1))
	w.must(Stale, commitMove(1, 1, 1)) // its fate is in the record: owner and epoch
	w.must(Stale, appendTo(1, 1, 3, 3))
	w.must(Stale, abort(1, 1, 1))
	w.must(OK, appendTo(2, 2, 1, 3))

	w.must(OK, prepare(2, 2, 3, 4))
	w.must(OK, freeze(2, 2, 3))
	w.must(OK, abort(2, 2, 3))
	w.must(OK, abort(2, 2, 3)) // again
	w.must(OK, appendTo(2, 2, 2, 4))

	w.must(OwnerAlive, takeOver(4, 2, 4))
	w.must(OK, nodeState(2, kvtierv1.NodeState_NODE_STATE_DOWN))
	w.must(Invalid, takeOver(4, 2, 5)) // longer than it was
	w.must(OK, takeOver(4, 2, 3))
	w.must(Stale, takeOver(1, 2, 3))
	w.must(Stale, appendTo(2, 2, 3, 5))
	x, _ := w.s.Session("s")
	if x.GetEpoch() != 3 || !bytes.Equal(x.GetOwner(), nodeN(4)) || x.GetChain().GetBlocks() != 3 || x.GetMoves() != 2 || x.GetState() != active {
		t.Errorf("session %v", x)
	}
	w.must(NotOwner, change(1, 3, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Close{Close: &kvtierv1.CloseSession{}}}))
	w.must(OK, change(1, 0, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Close{Close: &kvtierv1.CloseSession{Forced: true}}}))
	if w.s.Sessions() != 0 {
		t.Error("it is still there")
	}
}

func TestForkedSession(t *testing.T) {
	w := newSessionWorld(t)
	w.must(OK, w.open(1))
	w.must(OK, appendTo(1, 1, 1, 5))
	fork := func(blocks uint64, parent string) *kvtierv1.DirectoryCommand {
		return change(2, 0, &kvtierv1.SessionCommand{Session: "fork", Change: &kvtierv1.SessionCommand_Open{Open: &kvtierv1.OpenSession{
			NamespaceId: w.ns[:], Parent: parent, Chain: chainOf(blocks, 1)}}})
	}
	w.must(Unknown, fork(3, "nobody"))
	w.must(Invalid, fork(6, "s")) // longer than its parent
	w.must(Invalid, fork(3, ""))  // a chain out of nothing
	w.must(OK, fork(3, "s"))
	x, _ := w.s.Session("fork")
	if x.GetChain().GetBlocks() != 3 || x.GetParent() != "s" || x.GetEpoch() != 1 {
		t.Errorf("fork %v", x)
	}
}

func TestSessionsExpire(t *testing.T) {
	w := newSessionWorld(t)
	w.must(OK, w.open(1))
	x, _ := w.s.Session("s")
	expire := &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ExpireSessions{
		ExpireSessions: &kvtierv1.ExpireSessions{Sessions: []string{"s", "nobody"}, UsedUnixMs: []int64{x.GetUsedUnixMs(), 0}}}}
	used := appendTo(1, 1, 1, 1)
	used.NowUnixMs = 100
	w.must(OK, used)
	w.must(OK, expire)
	if w.s.Sessions() != 1 {
		t.Fatal("a session that was used meanwhile is gone")
	}
	expire.GetExpireSessions().UsedUnixMs[0] = 100
	w.must(OK, expire)
	if w.s.Sessions() != 0 {
		t.Error("a session whose time is over is there")
	}
}

// A record has at most 400 bytes with the longest name and everything set.
func TestSessionRecordIsSmall(t *testing.T) {
	x := &Session{
		Session: string(bytes.Repeat([]byte{'s'}, MaxSessionBytes)), NamespaceId: make([]byte, 32), Owner: make([]byte, 16), Epoch: 1 << 20, Sequence: 1 << 30,
		State: frozen, Chain: chainOf(1<<20, 1), Retention: &kvtierv1.RetainSession{Priority: 100, TtlMs: 1 << 40, Refresh: true}, UsedUnixMs: 1 << 41,
		Move: make([]byte, 16), Target: make([]byte, 16), Second: make([]byte, 16), OpenedUnixMs: 1 << 41, Moves: 1000,
	}
	if n := proto.Size(x); n > 400 {
		t.Errorf("%d bytes", n)
	}
}

// Random commands of nodes that know little: whatever the order, the epoch rises by
// one with each change of the owner and never otherwise, appends are the owner's, and
// a replica that went through a snapshot is the same.
func TestRandomSessionCommands(t *testing.T) {
	const seed = 1
	r := rand.New(rand.NewPCG(seed, 0))
	w := newSessionWorld(t)
	results := map[Result]int{}
	for i := range 60_000 {
		name := fmt.Sprint("s", r.IntN(5))
		before, had := w.s.Session(name)
		epoch, sequence, blocks := uint64(1), uint64(1), uint64(0)
		node := byte(1 + r.IntN(4))
		if had {
			epoch = max(1, before.GetEpoch()+uint64(r.IntN(3))-1)
			sequence = before.GetSequence() + uint64(r.IntN(3))
			blocks = before.GetChain().GetBlocks() + uint64(r.IntN(3))
			if r.IntN(3) > 0 {
				node = before.GetOwner()[0]
			}
		}
		move := byte(1 + r.IntN(3))
		var c *kvtierv1.DirectoryCommand
		switch r.IntN(12) {
		case 0:
			c = w.open(node)
		case 1, 2, 3:
			c = appendTo(node, epoch, sequence, blocks)
		case 4, 5:
			c = prepare(node, epoch, move, byte(1+r.IntN(4)))
		case 6:
			c = freeze(node, epoch, move)
		case 7, 8:
			c = commitMove(node, epoch, move)
		case 9:
			c = abort(node, epoch, move)
		case 10:
			c = takeOver(node, epoch, blocks-min(blocks, uint64(r.IntN(2))))
		case 11:
			c = nodeState(byte(1+r.IntN(4)), []kvtierv1.NodeState{kvtierv1.NodeState_NODE_STATE_UP, kvtierv1.NodeState_NODE_STATE_DOWN}[r.IntN(2)])
		}
		if x := c.GetSession(); x != nil {
			x.Session = name
		}
		got, err := w.s.Apply(c)
		if err != nil {
			t.Fatal(err)
		}
		results[got]++
		after, has := w.s.Session(name)
		switch {
		case had && !has:
			t.Fatalf("seed %d, step %d: gone by %v", seed, i, c)
		case !had || before == after:
		case got != OK:
			t.Fatalf("seed %d, step %d: changed by %v, which answered %v", seed, i, c, got)
		case bytes.Equal(before.GetOwner(), after.GetOwner()) != (before.GetEpoch() == after.GetEpoch()) || after.GetEpoch() > before.GetEpoch()+1:
			t.Fatalf("seed %d, step %d: %v became %v by %v", seed, i, before, after, c)
		case after.GetSequence() != before.GetSequence() && after.GetEpoch() == before.GetEpoch() &&
			(after.GetSequence() != before.GetSequence()+1 || before.GetState() == frozen || !bytes.Equal(c.GetSession().GetNode(), before.GetOwner())):
			t.Fatalf("seed %d, step %d: %v became %v by %v", seed, i, before, after, c)
		}
		if i%5000 == 0 {
			w.throughSnapshot()
		}
	}
	for _, want := range []Result{OK, Stale, Gap, Unknown, Frozen, NotOwner, OwnerAlive, Full, Invalid} {
		if results[want] == 0 {
			t.Errorf("no command answered %v: %v", want, results)
		}
	}
}

// throughSnapshot replaces the state by one that was written and read.
func (w *sessionWorld) throughSnapshot() {
	w.t.Helper()
	var b bytes.Buffer
	snap := w.s.Snapshot()
	hash := w.s.Hash()
	w.must(OK, appendOrOpen(w)) // the snapshot is of the moment before
	if err := snap.Write(&b); err != nil {
		w.t.Fatal(err)
	}
	s, err := Restore(&b, 1000)
	if err != nil {
		w.t.Fatal(err)
	}
	if s.Hash() != hash {
		w.t.Fatal("a state that went through a snapshot is another")
	}
	w.s = s
}

func appendOrOpen(w *sessionWorld) *kvtierv1.DirectoryCommand {
	c := w.open(1)
	c.GetSession().Session = "while-it-is-written"
	return c
}

// Replicas that were configured with different budgets for claims go by the leader's:
// the same commands make the same state.
func TestClaimBudgetIsTheLeaders(t *testing.T) {
	small, large := NewState(2), NewState(1000)
	for _, s := range []*State{small, large} {
		if r, err := s.Apply(joinNode(1, 1)); r != OK || err != nil {
			t.Fatal(r, err)
		}
		var changes []byte
		for i := range byte(10) {
			changes = AppendChange(changes, placement.BlockKey{i}, 1)
		}
		r, err := s.Apply(&kvtierv1.DirectoryCommand{MaxClaims: 5, Command: &kvtierv1.DirectoryCommand_ClaimBatch{
			ClaimBatch: &kvtierv1.ClaimBatch{Node: nodeN(1), Incarnation: 1, Sequence: 1, Changes: changes}}})
		if r != Full || err != nil || s.Claims() != 5 || s.MaxClaims() != 5 {
			t.Errorf("%v, %v: %d claims of %d", r, err, s.Claims(), s.MaxClaims())
		}
	}
	if small.Hash() != large.Hash() {
		t.Error("the states differ")
	}
	var b bytes.Buffer
	if err := large.Snapshot().Write(&b); err != nil {
		t.Fatal(err)
	}
	if s, err := Restore(&b, 7); err != nil || s.MaxClaims() != 5 {
		t.Errorf("through a snapshot: %v", err)
	}
}

// A session that is opened under a name that was closed is of a higher epoch, so that
// nothing that is late of the former one is taken for its own; after a snapshot too.
func TestEpochsOfANameRise(t *testing.T) {
	w := newSessionWorld(t)
	w.must(OK, w.open(1))
	w.must(OK, prepare(1, 1, 1, 2))
	w.must(OK, freeze(1, 1, 1))
	w.must(OK, commitMove(1, 1, 1))
	w.must(OK, change(1, 0, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Close{Close: &kvtierv1.CloseSession{Forced: true}}}))
	var b bytes.Buffer
	if err := w.s.Snapshot().Write(&b); err != nil {
		t.Fatal(err)
	}
	restored, err := Restore(&b, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*State{w.s, restored} {
		w.s = s
		w.must(OK, w.open(1))
		if x, _ := s.Session("s"); x.GetEpoch() != 3 {
			t.Errorf("epoch %d, want 3", x.GetEpoch())
		}
		w.must(Stale, appendTo(1, 1, 1, 1))
		w.must(OK, appendTo(1, 3, 1, 1))
	}
}

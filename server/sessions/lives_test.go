package sessions

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/migrate"
)

func (m *machine) closeSession(session string) {
	m.w.t.Helper()
	if _, err := m.m.CloseSession(context.Background(), &kvtierv1.CloseSessionRequest{Session: session, Tenant: "t"}); err != nil {
		m.w.t.Fatal(err)
	}
}

// names are those of a session, as a node tells them.
func (m *machine) names(session string) ([]paging.BlockName, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	_, names, err := m.m.Names(ctx, "t", session, 0, 0)
	return names, err
}

// back waits until a node that was started again has what the others have.
func (m *machine) back(session string) {
	m.w.t.Helper()
	m.w.eventually(30*time.Second, "a node is back", func() bool {
		if _, ok := m.n.Directory().Leader(); !ok {
			return false
		}
		for _, o := range m.w.nodes {
			if o.up && (o.m.record("t/"+session).GetEpoch() != m.m.record("t/"+session).GetEpoch() || !o.m.serves(m.id) || !m.m.serves(o.id) || o != m && (!o.n.Reachable(m.id) || !m.n.Reachable(o.id))) {
				return false
			}
		}
		return true
	})
}

// A session that is opened under a name that was closed begins empty, at this node or
// another, after a restart too, and no epoch has two owners.
func TestNameIsUsedAgain(t *testing.T) {
	inWorld(t, 3, func(w *world) { w.ramMiB = 16 }, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		epoch := uint64(0)
		for i, at := range []*machine{a, a, b, a} {
			got := at.mustOpen("s", nil).GetSession()
			if got.GetBlocks() != 0 || got.GetEpoch() <= epoch {
				t.Fatalf("opened for the %d. time: %v", i+1, got)
			}
			if i == 1 {
				at.crash()
				at.start()
				at.back("s")
				if got = at.mustOpen("s", nil).GetSession(); got.GetBlocks() != 0 {
					t.Fatalf("after a restart: %v", got)
				}
			}
			epoch = got.GetEpoch()
			at.grow("s", 1+i, 0, 1100-i)
			if i == 2 {
				b.mustMove("s", a)
				epoch++
				at = a
			}
			at.closeSession("s")
			w.eventually(time.Second, "all know that it was closed", func() bool {
				return !slices.ContainsFunc(w.nodes, func(m *machine) bool { return m.m.record("t/s") != nil })
			})
		}
	})
}

// What an append that was refused would have added is no part of the session later.
func TestRefusedAppendIsNotKept(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 1020)
		x := a.m.record("t/s")
		id := make([]byte, 16)
		command := func(c *kvtierv1.SessionCommand) {
			t.Helper()
			if _, err := a.m.propose(t.Context(), "t/s", a.id, x.GetEpoch(), c); err != nil {
				t.Fatal(err)
			}
		}
		// Frozen where the replica of the owner does not show it yet.
		_, l, release, err := a.m.own(t.Context(), "t/s")
		if err != nil {
			t.Fatal(err)
		}
		l.chain.Append(chain(2, 1020, 10), 160) // a segment becomes full by it
		if err := a.m.keep(t.Context(), l, "t/s", 1020); err != nil {
			t.Fatal(err)
		}
		l.proposes(nil)
		command(&kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Prepare{Prepare: &kvtierv1.PrepareMove{Move: id, Target: b.id[:]}}})
		command(&kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Freeze{Freeze: &kvtierv1.FreezeMove{Move: id}}})
		if err := a.m.settle(t.Context(), "t/s", l); !errors.Is(err, paging.ErrFrozen) {
			t.Fatalf("an append of a frozen session: %v", err)
		}
		release()
		w.owner("s", a) // a move that nobody drives ends
		a.crash()
		a.start()
		a.back("s")
		a.grow("s", 1, 1020, 10)
		if names, err := a.names("s"); err != nil || !slices.Equal(names, chain(1, 0, 1030)) {
			t.Errorf("%d names, %v", len(names), err)
		}
	})
}

// A prepare that comes when its move was given up, or while another one runs, is ended by
// the owner, and does not change what is told of the move that somebody asked for.
func TestLatePrepare(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b, c := w.nodes[0], w.nodes[1], w.nodes[2]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 50)
		late := func(to *machine) {
			t.Helper()
			x := a.m.record("t/s")
			if _, err := a.m.propose(t.Context(), "t/s", a.id, x.GetEpoch(), &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Prepare{
				Prepare: &kvtierv1.PrepareMove{Move: make([]byte, 16), Target: to.id[:]}}}); err != nil {
				t.Fatal(err)
			}
		}
		late(c)
		w.owner("s", a)
		a.grow("s", 1, 50, 1)
		// While a move waits for its turn.
		for range cap(a.m.moves.slots) {
			a.m.moves.slots <- struct{}{}
		}
		if err := a.m.BeginMove(t.Context(), "t/s", b.id, 0, time.Minute); err != nil {
			t.Fatal(err)
		}
		late(c)
		w.sleep(100 * time.Millisecond)
		for range cap(a.m.moves.slots) {
			<-a.m.moves.slots
		}
		w.eventually(10*time.Second, "the move ended", func() bool { p, err := a.m.MoveProgress(t.Context(), "t/s"); return err == nil && p.GetEnded() })
		w.owner("s", a)
		if p, err := a.m.MoveProgress(t.Context(), "t/s"); err != nil || p.GetState() == migrate.Done.String() || p.GetWhy() == "nobody drives it any more" {
			t.Errorf("%v, %v", p, err)
		}
		a.mustMove("s", b)
		b.grow("s", 1, 51, 1)
	})
}

// lose deletes what a node keeps of names; its process does not run.
func (m *machine) lose() { m.fs = vfs.NewMem() }

// Names that one of two keepers lost come from the other; what both lost the engine
// gives, and what nobody has is told.
func TestNamesAreLost(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a := w.nodes[2]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 1500)
		var second *machine
		w.eventually(time.Second, "a second node", func() bool {
			for _, m := range w.nodes {
				if a.get("s").GetSecondName() == "node"+string(rune('0'+m.i)) {
					second = m
				}
			}
			return second != nil
		})
		other := w.nodes[1-second.i]
		restart := func(ms ...*machine) {
			t.Helper()
			for _, m := range ms {
				m.crash()
				m.lose()
			}
			for _, m := range ms {
				m.start()
				m.back("s")
			}
		}
		restart(a)
		if names, err := a.names("s"); err != nil || !slices.Equal(names, chain(1, 0, 1500)) {
			t.Fatalf("lost at the owner: %d, %v", len(names), err)
		}
		restart(second)
		a.grow("s", 1, 1500, 1)
		a.crash()
		a.lose()
		a.start()
		a.back("s")
		if names, err := a.names("s"); err != nil || len(names) != 1501 {
			t.Fatalf("lost at the second, then at the owner: %d, %v", len(names), err)
		}
		restart(a, second)
		if _, err := a.append("s", 1501, chain(1, 1501, 1)); !errors.Is(err, paging.ErrLost) {
			t.Fatalf("lost at both: %v", err)
		}
		if _, err := a.open("s", func(r *kvtierv1.OpenSessionRequest) { r.BlockNames = packNames(chain(2, 0, 1501)) }); !errors.Is(err, paging.ErrLost) {
			t.Fatalf("given another chain: %v", err)
		}
		if got, err := a.open("s", func(r *kvtierv1.OpenSessionRequest) { r.BlockNames = packNames(chain(1, 0, 1501)) }); err != nil || got.GetSession().GetBlocks() != 1501 {
			t.Fatalf("given by the engine: %v, %v", got, err)
		}
		a.grow("s", 1, 1501, 1)
		// The owner is gone for good, and the engine has a part.
		second.crash()
		second.lose()
		second.start()
		second.back("s")
		a.crash()
		w.eventually(30*time.Second, "the owner is down", func() bool { return !other.m.serves(a.id) })
		got := other.mustOpen("s", func(r *kvtierv1.OpenSessionRequest) { r.BlockNames = packNames(chain(1, 0, 1100)) })
		if !got.GetTakenOver() || got.GetLostBlocks() != 1502-1024 || got.GetSession().GetBlocks() != 1024 {
			t.Errorf("%v", got)
		}
		other.grow("s", 3, 1024, 5)
	})
}

// A session that has just moved, and whose new owner dies, is had from the former one.
func TestFormerOwnerKeepsNames(t *testing.T) {
	inWorld(t, 4, nil, func(t *testing.T, w *world) {
		a, b, c := w.nodes[1], w.nodes[3], w.nodes[2]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 700)
		for _, m := range w.nodes {
			if m != a && m.m.cfg.Store.Drop("t/s", ^uint64(0)) != nil {
				t.Fatal("drop")
			}
		}
		a.mustMove("s", b)
		b.crash()
		w.eventually(30*time.Second, "the owner is down", func() bool { return !c.m.serves(b.id) })
		if got := c.mustOpen("s", nil); !got.GetTakenOver() || got.GetLostBlocks() != 0 || got.GetSession().GetBlocks() != 700 {
			t.Errorf("%v", got)
		}
	})
}

// Names that only a node has which is cut off are waited for, not given up.
func TestTakeOverWaitsForNames(t *testing.T) {
	inWorld(t, 4, nil, func(t *testing.T, w *world) {
		a := w.nodes[3]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 100)
		var second, taker *machine
		w.eventually(time.Second, "a second node", func() bool { return a.get("s").GetSecondName() != "" })
		for _, m := range w.nodes[:3] {
			switch n, _ := m.m.cfg.Store.Names("t/s", 1); {
			case len(n) == 100:
				second = m
			default:
				taker = m
			}
		}
		a.crash()
		w.eventually(30*time.Second, "the owner is down", func() bool { return !taker.m.serves(a.id) })
		w.f.SetCut(taker.i, second.i, true)
		if _, err := taker.open("s", nil); !errors.Is(err, paging.ErrUnavailable) && !errors.Is(err, paging.ErrExpired) {
			t.Errorf("while the other keeper is cut off: %v", err)
		}
		w.f.Heal()
		w.eventually(30*time.Second, "joined", func() bool { return taker.n.Reachable(second.id) && taker.m.serves(second.id) })
		if got := taker.mustOpen("s", nil); got.GetLostBlocks() != 0 || got.GetSession().GetBlocks() != 100 {
			t.Errorf("%v", got)
		}
	})
}

// Calls at the same time do not undo one another.
func TestCallsAtTheSameTime(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[2], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 60)
		a.mustOpen("p", nil)
		a.grow("p", 2, 0, 60)
		var calls sync.WaitGroup
		shared := make([]error, 4)
		for i := range shared {
			calls.Go(func() {
				_, shared[i] = a.m.Share(t.Context(), &kvtierv1.ShareSessionRequest{Session: []string{"s", "p"}[i%2], Tenant: "t", Fork: "f", Blocks: uint64(30 + i)})
			})
		}
		calls.Wait()
		won := -1
		for i, err := range shared {
			if err == nil && won >= 0 {
				t.Errorf("two forks of one name: %v", shared)
			} else if err == nil {
				won = i
			}
		}
		a.crash()
		a.start()
		a.back("f")
		if names, err := a.names("f"); err != nil || !slices.Equal(names, chain(1+won%2, 0, 30+won)) {
			t.Errorf("fork %d: %d names, %v", won, len(names), err)
		}
		a.crash()
		w.eventually(30*time.Second, "the owner is down", func() bool { return !b.m.serves(a.id) })
		for range 5 {
			calls.Go(func() {
				if _, err := b.open("s", nil); err != nil {
					t.Error(err)
				}
				if _, err := b.append("s", 60, chain(1, 60, 3)); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		// What the former owner sends late changes nothing.
		q, err := marshal(&kvtierv1.SessionNames{Session: "t/s", Epoch: b.m.record("t/s").GetEpoch(), BlockNames: packNames(chain(9, 0, 2))})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.m.answerKeepNames(t.Context(), a.id, q); err != nil {
			t.Error(err)
		}
		if names, err := b.m.cfg.Store.Names("t/s", b.m.record("t/s").GetEpoch()); err != nil || !slices.Equal(names, chain(1, 0, 63)) {
			t.Errorf("%d names are kept, %v", len(names), err)
		}
	})
}

// What is sent late of names that a node keeps already does not shorten them.
func TestLateNamesShortenNothing(t *testing.T) {
	s, err := OpenStore("names", vfs.NewMem())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	keep := func(first uint64, names []paging.BlockName, want []paging.BlockName) {
		t.Helper()
		if err := s.Keep("s", 1, first, names); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Names("s", 1); err != nil || !slices.Equal(got, want) {
			t.Errorf("%d names from %d: %d are kept, want %d; %v", len(names), first, len(got), len(want), err)
		}
	}
	all := chain(1, 0, 2100)
	keep(0, all[:1000], all[:1000])
	keep(1000, all[1000:2100], all)
	keep(1000, all[1000:1001], all)
	keep(0, all[:1000], all)
	keep(5, chain(2, 5, 1), slices.Concat(all[:5], chain(2, 5, 1)))
}

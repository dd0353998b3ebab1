package sessions

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/server/placement"
)

// states calls a hook with each state that a move of this node enters, before what is due
// in that state is done. It reads the one line that the log has of each.
type states struct {
	slog.Handler
	hook func(session, state string)
}

func (s *states) Enabled(context.Context, slog.Level) bool { return true }
func (s *states) WithAttrs([]slog.Attr) slog.Handler       { return s }
func (s *states) WithGroup(string) slog.Handler            { return s }

func (s *states) Handle(_ context.Context, r slog.Record) error {
	if r.Message != "move of a session" {
		return nil
	}
	var session, state string
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "session":
			_, session = splitName(a.Value.String())
		case "state":
			state = a.Value.String()
		}
		return true
	})
	s.hook(session, state)
	return nil
}

// ended checks that a session has one owner on which all nodes agree, that its chain is
// as it was acknowledged, every byte that its owner has right, and that nothing is left
// of its moves. taker opens it if its owner is gone.
func (w *world) ended(session string, taker *machine, want []paging.BlockName) *machine {
	w.t.Helper()
	var owner *machine
	agreed := func() bool {
		var x *machine
		epoch := uint64(0)
		for _, m := range w.nodes {
			if !m.up {
				continue
			}
			r := m.m.record("t/" + session)
			if r.GetState() != kvtierv1.SessionState_SESSION_STATE_ACTIVE || epoch != 0 && (epoch != r.GetEpoch() || ownerOf(r) != x.id) {
				return false
			}
			epoch = r.GetEpoch()
			for _, o := range w.nodes {
				if o.id == ownerOf(r) {
					x = o
				}
			}
		}
		owner = x
		return x.up || !taker.m.serves(x.id)
	}
	w.eventually(40*time.Second, "one owner of "+session, agreed)
	if !owner.up {
		w.eventually(40*time.Second, session+" is taken over", func() bool {
			a, err := taker.open(session, nil)
			if err == nil && a.GetLostBlocks() != 0 {
				w.t.Errorf("%s: %d blocks are lost", session, a.GetLostBlocks())
			}
			return err == nil
		})
		w.eventually(40*time.Second, "one owner of "+session, agreed)
	}
	w.eventually(40*time.Second, "the chain of "+session, func() bool { n, err := owner.names(session); return err == nil && slices.Equal(n, want) })
	owner.local(want)
	var err error
	for range 20 {
		if _, err = owner.append(session, len(want), chain(77, len(want), 1)); err == nil {
			break
		}
		w.sleep(time.Second)
	}
	if err != nil {
		w.t.Errorf("%s cannot be appended to: %v", session, err)
	}
	w.idle()
	return owner
}

// idle checks that nothing is held for moves any more.
func (w *world) idle() {
	w.t.Helper()
	w.eventually(40*time.Second, "nothing is held", func() bool {
		for _, m := range w.nodes {
			if !m.up {
				continue
			}
			m.m.moves.mu.Lock()
			running := len(m.m.moves.running)
			m.m.moves.mu.Unlock()
			if running != 0 || len(m.m.moves.slots) != 0 || m.h.Metrics().Holds != 0 {
				return false
			}
		}
		return true
	})
}

func (w *world) leader() (leader *machine) {
	w.t.Helper()
	w.eventually(20*time.Second, "a leader", func() bool {
		for _, m := range w.nodes {
			if m.up && m.n.Directory().Status().Role == "leader" {
				leader = m
			}
		}
		return leader != nil && leader.up
	})
	return leader
}

var allStates = []string{"preparing", "asking", "copying", "freezing", "final", "final copy", "committing", "aborting"}

// Whoever is killed, in whichever state of a move, whether it comes back or not: the
// session has one owner within a bound, and its chain is what was acknowledged.
func TestKilledAtEachState(t *testing.T) {
	for v, victim := range []string{"source", "target", "leader", "asking node"} {
		for _, comesBack := range []bool{false, true} {
			if os.Getenv("KVTIER_TORTURE") == "" && comesBack == (v%2 == 0) {
				continue
			}
			t.Run(fmt.Sprintf("%s, comes back: %v", strings.ReplaceAll(victim, " ", "-"), comesBack), func(t *testing.T) { killedAtEachState(t, victim, comesBack) })
		}
	}
}

func killedAtEachState(t *testing.T, victim string, comesBack bool) {
	type hit struct{ session, state string }
	var hits chan hit // of the bubble
	appended := make(map[string]int)
	var w *world
	setup := func(x *world) {
		w, hits = x, make(chan hit, 256)
		x.change = func(c *Config) {
			c.Logger = slog.New(&states{hook: func(session, state string) {
				var source *machine
				for _, m := range w.nodes {
					if m.id == c.Self {
						source = m
					}
				}
				at, _, _ := strings.Cut(strings.TrimPrefix(session, "at-"), ".")
				switch {
				case at == "final-copy" && state == "freezing" && appended[session] == 0:
					appended[session] = 1 // so late that it is left for the freeze
					source.put(chain(6, 80, 1), 80)
					if _, err := source.append(session, 80, chain(6, 80, 1)); err != nil {
						t.Error(err)
					}
				case at == "aborting" && state == "copying":
					source.m.cancelHere("t/" + session)
				}
				select {
				case hits <- hit{session, strings.ReplaceAll(state, " ", "-")}:
				default:
				}
			}})
		}
	}
	inWorld(t, 5, setup, func(t *testing.T, w *world) {
		for i, state := range allStates {
			state = strings.ReplaceAll(state, " ", "-")
			leader := w.leader()
			var free []*machine
			for _, m := range w.nodes {
				if m != leader {
					free = append(free, m)
				}
			}
			source, target, asking, taker := free[i%4], free[(i+1)%4], free[(i+2)%4], free[(i+3)%4]
			session := "at-" + state
			source.mustOpen(session, nil)
			source.grow(session, 1+i, 0, 80) // "final copy" is the sixth
			w.eventually(10*time.Second, "all know it", func() bool {
				return !slices.ContainsFunc(w.nodes, func(m *machine) bool { return m.m.record("t/"+session).GetChain().GetBlocks() != 80 })
			})
			told := make(chan error, 1)
			go func() {
				_, _, err := asking.move(session, target, func(r *kvtierv1.MigrateSessionRequest) { r.MaxBytesPerSecond = 400 * pageBytes })
				told <- err
			}()
			deadline := time.After(20 * time.Second)
			for reached := false; !reached; {
				select {
				case h := <-hits:
					reached = h.session == session && h.state == state
				case <-deadline:
					p, err := source.m.MoveProgress(t.Context(), "t/"+session)
					t.Fatalf("the move is never %s: %v, %v", state, p, err)
				}
			}
			dead := map[string]*machine{"source": source, "target": target, "leader": leader, "asking node": asking}[victim]
			dead.crash()
			if comesBack {
				w.sleep(300 * time.Millisecond)
				dead.start()
				dead.back(session)
			}
			w.ended(session, taker, chain(1+i, 0, 80+appended[session]))
			<-told
			if !comesBack {
				dead.start()
				dead.back(session)
			}
		}
	})
}

// fast has moves time out soon.
func fast(w *world) {
	w.change = func(c *Config) {
		c.Limits = migrate.Limits{AskWithin: time.Second, CopyWithin: 5 * time.Second, Within: 20 * time.Second}
	}
}

// endOfMove waits until a move has ended and tells how.
func (m *machine) endOfMove(session string) (p *kvtierv1.MoveProgress) {
	m.w.t.Helper()
	m.w.eventually(2*time.Minute, "the move of "+session+" ended", func() bool {
		var err error
		p, err = m.m.MoveProgress(context.Background(), "t/"+session)
		return err == nil && p.GetEnded()
	})
	return p
}

// A link that is cut or slow while a session is copied delays or ends the move, and
// nothing else.
func TestLinkDuringCopy(t *testing.T) {
	inWorld(t, 3, fast, func(t *testing.T, w *world) {
		a, b := w.nodes[1], w.nodes[2]
		n := 200
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, n)
		begin := func(from, to *machine) {
			t.Helper()
			if err := from.m.BeginMove(t.Context(), "t/s", to.id, 100*pageBytes, 20*time.Second); err != nil {
				t.Fatal(err)
			}
			w.sleep(300 * time.Millisecond)
		}
		begin(a, b) // cut for longer than it may take
		w.f.SetCut(1, 2, true)
		w.f.SetCut(2, 1, true)
		p := a.endOfMove("s")
		if p.GetState() != migrate.Aborted.String() || p.GetWhy() == "" {
			t.Errorf("%v", p)
		}
		w.f.Heal()
		w.eventually(30*time.Second, "joined", func() bool {
			return a.n.Reachable(b.id) && b.n.Reachable(a.id) && a.m.serves(b.id) && b.m.serves(a.id)
		})
		w.owner("s", a)
		begin(a, b) // slow, and reset
		w.f.SetDelay(1, 2, 30*time.Millisecond)
		w.f.SetDelay(2, 1, 30*time.Millisecond)
		w.f.Reset(1, 2)
		a.endOfMove("s")
		w.f.Heal()
		w.ended("s", a, chain(1, 0, n))
	})
}

// Requests to move that cannot be are refused, and change nothing.
func TestMovesThatAreRefused(t *testing.T) {
	inWorld(t, 4, nil, func(t *testing.T, w *world) {
		a, b, down := w.nodes[0], w.nodes[1], w.nodes[3]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 20)
		down.crash()
		w.eventually(30*time.Second, "one is down", func() bool { return !a.m.serves(down.id) && !b.m.serves(down.id) })
		for _, c := range []struct {
			to   placement.NodeID
			want error
		}{{a.id, paging.ErrInvalid}, {down.id, paging.ErrNoSpace}, {placement.NodeID{9}, paging.ErrNotFound}} {
			for _, asked := range []*machine{a, b} {
				if err := asked.m.BeginMove(t.Context(), "t/s", c.to, 0, time.Minute); !errors.Is(err, c.want) {
					t.Errorf("to %s, asked at node %d: %v, want %v", c.to.Short(), asked.i, err, c.want)
				}
			}
		}
		w.ended("s", b, chain(1, 0, 20))
	})
}

// A target whose RAM is full of what is in use refuses, the session stays, and what it
// holds for the move goes.
func TestTargetIsFull(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 400)
		other := chain(2, 0, 900)
		b.put(other, 0)
		hold := b.hold(other)
		p, _, err := a.move("s", b, nil)
		if err != nil || p.GetState() != migrate.Aborted.String() || p.GetWhy() != "the target has no room" {
			t.Errorf("%v, %v", p, err)
		}
		w.owner("s", a)
		hold()
		w.ended("s", b, chain(1, 0, 400))
	})
}

// A session that is closed while it moves is gone, and so is its move.
func TestClosedWhileItMoves(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		for i, pause := range []time.Duration{0, 500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond, 300 * time.Millisecond} {
			session := fmt.Sprint("s", i)
			a.mustOpen(session, nil)
			a.grow(session, 1+i, 0, 100)
			rate := int64(0)
			if pause > 100*time.Millisecond {
				rate = 100 * pageBytes
			}
			if err := a.m.BeginMove(t.Context(), "t/"+session, b.id, rate, time.Minute); err != nil {
				t.Fatal(err)
			}
			w.sleep(pause)
			w.nodes[2].closeSession(session)
			w.idle()
			w.eventually(5*time.Second, "it is gone everywhere", func() bool {
				return !slices.ContainsFunc(w.nodes, func(m *machine) bool { return m.m.record("t/"+session) != nil })
			})
			if _, err := a.append(session, 100, chain(1+i, 100, 1)); !errors.Is(err, paging.ErrNotFound) {
				t.Errorf("closed after %v: an append: %v", pause, err)
			}
		}
	})
}

// No quorum during an append, a freeze or a commit: appends wait or say so, and what was
// begun ends once there is one.
func TestQuorumIsLost(t *testing.T) {
	for _, state := range []string{"append", "freezing", "committing"} {
		t.Run(state, func(t *testing.T) {
			var reached chan struct{} // of the bubble
			inWorld(t, 3, func(w *world) {
				reached = make(chan struct{}, 1)
				w.change = func(c *Config) {
					c.Logger = slog.New(&states{hook: func(_, s string) {
						if s == state {
							w.f.Isolate(1, 3, true)
							select {
							case reached <- struct{}{}:
							default:
							}
						}
					}})
				}
			}, func(t *testing.T, w *world) {
				a, b := w.nodes[1], w.nodes[2]
				a.mustOpen("s", nil)
				a.grow("s", 1, 0, 50)
				n := 50
				if state == "append" {
					w.f.Isolate(1, 3, true)
					if _, err := a.append("s", 50, chain(1, 50, 2)); !errors.Is(err, paging.ErrUnavailable) {
						t.Errorf("without a quorum: %v", err)
					}
					n = 52 // it was not refused: it comes first of what comes
				} else {
					if err := a.m.BeginMove(t.Context(), "t/s", b.id, 0, time.Minute); err != nil {
						t.Fatal(err)
					}
					<-reached
					w.sleep(2 * time.Second)
				}
				w.f.Heal()
				w.eventually(30*time.Second, "joined", func() bool {
					for _, m := range w.nodes {
						for _, o := range w.nodes {
							if !m.m.serves(o.id) || m != o && !m.n.Reachable(o.id) {
								return false
							}
						}
					}
					return true
				})
				if state == "append" {
					w.eventually(10*time.Second, "the append", func() bool { r, err := a.append("s", 50, chain(1, 50, 2)); return err == nil && r.GetBlocks() == 52 })
				}
				w.ended("s", b, chain(1, 0, n))
			})
		})
	}
}

package plans

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
)

const (
	left      = kvtierv1.NodeState_NODE_STATE_LEFT
	draining  = kvtierv1.NodeState_NODE_STATE_DRAINING
	cancelled = kvtierv1.PlanState_PLAN_STATE_CANCELLED
)

// filled gives a node two sessions, and blocks of no session: chains 1 to 4, of which
// chain 4 is at another node too.
func filled(x, other *machine) {
	x.session("a", 1, 40)
	x.session("b", 2, 30)
	x.put(3, 100)
	x.put(4, 20)
	other.fetch(4, 20)
}

var chains = map[int]int{1: 40, 2: 30, 3: 100, 4: 20}

// mustHave checks that nodes get every block of the chains.
func mustHave(t *testing.T, nodes []*machine) {
	t.Helper()
	for _, m := range nodes {
		for c, n := range chains {
			if got := m.fetch(c, n); got != n {
				t.Errorf("node %d gets %d of %d blocks of chain %d", m.i, got, n, c)
			}
		}
	}
}

// load fetches chains at nodes until stop is called, which tells how many fetches there
// were and how many found less than all.
func load(w *world, nodes []*machine) (stop func() (fetches, failed int)) {
	ended := make(chan struct{})
	var wg sync.WaitGroup
	var fetches, bad int
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-ended:
				return
			case <-time.After(30 * time.Millisecond):
			}
			m := nodes[i%len(nodes)]
			c := 1 + i%len(chains)
			fetches++
			if m.fetch(c, chains[c]) != chains[c] {
				bad++
			}
		}
	})
	return func() (int, int) {
		close(ended)
		wg.Wait()
		return fetches, bad
	}
}

// drained checks all that has to hold after a drain: it has left, no session is there,
// its claims are gone, it serves what it has, and the others have everything without it.
func drained(t *testing.T, w *world, x *machine) {
	t.Helper()
	rest := w.others(x)
	w.eventually(10*time.Second, "the node has left", func() bool { return rest[0].state(x) == left })
	if n := rest[0].r.remaining(x.id); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
	w.eventually(20*time.Second, "the claims of the node are gone", func() bool {
		var claims int64
		rest[0].n.Directory().Read(func(s *directory.State) { n, _ := s.Node(x.id); claims = n.Claims })
		return claims == 0
	})
	x.crash()
	mustHave(t, rest)
}

func TestDrain(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		filled(x, rest[0])
		stop := load(w, rest)
		id := rest[0].drain(x, nil)
		p := rest[1].mustEnd(id, done)
		if fetches, bad := stop(); bad > 0 || fetches == 0 {
			t.Errorf("%d of %d fetches failed", bad, fetches)
		}
		if p.GetLeftBytes() != 0 {
			t.Errorf("%v", p)
		}
		for _, name := range []string{"a", "b"} {
			if o := rest[0].owner(name); o == x || o == nil {
				t.Errorf("session %s is not elsewhere", name)
			}
		}
		mustHave(t, []*machine{x}) // it serves on
		var trail []string
		rest[0].n.Directory().Read(func(s *directory.State) {
			s.Audit(func(r *directory.AuditRecord) { trail = append(trail, r.GetWho()+": "+r.GetWhat()) })
		})
		for _, want := range []string{"operator: drain started", "cluster: session moved", "cluster: drain done", "cluster: node left"} {
			if !slices.Contains(trail, want) {
				t.Errorf("%q is not in the trail %q", want, trail)
			}
		}
		drained(t, w, x)
		x.start()
		w.eventually(20*time.Second, "the node is seen again", func() bool { return rest[0].n.Reachable(x.id) })
		if s := rest[0].state(x); s != left {
			t.Errorf("a node that was emptied is %v when it is back", s)
		}
		if err := rest[0].r.Undrain(context.Background(), x.id, "operator"); err != nil {
			t.Fatal(err)
		}
		w.eventually(20*time.Second, "the node is up and claims", func() bool {
			var n directory.Node
			rest[0].n.Directory().Read(func(s *directory.State) { n, _ = s.Node(x.id) })
			return n.State == nodeUp && n.Claims > 0
		})
	})
}

func TestDrainOfTheLeader(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.leader()
		filled(x, w.others(x)[0])
		w.others(x)[0].mustEnd(x.drain(x, nil), done)
		drained(t, w, x)
	})
}

func TestDrainOfTwoNodes(t *testing.T) {
	inWorld(t, 4, func(t *testing.T, w *world) {
		x := w.follower()
		y := w.others(x, w.leader())[0]
		filled(x, y)
		y.fetch(3, 100) // each holds what the other has
		rest := w.others(x, y)
		one, two := rest[0].drain(x, nil), rest[0].drain(y, nil)
		rest[0].mustEnd(one, done)
		rest[0].mustEnd(two, done)
		y.crash()
		drained(t, w, x)
	})
}

func TestDrainOfTheLastNode(t *testing.T) {
	inWorld(t, 2, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustEnd(a.drain(b, nil), done) // nothing to do
		_, err := a.r.ProposeDrain(t.Context(), a.id, nil)
		if !errors.Is(err, paging.ErrUnavailable) {
			t.Fatalf("drain of the last node: %v", err)
		}
		if s := b.state(a); s != nodeUp {
			t.Errorf("a drain that was refused made the node %v", s)
		}
	})
}

// slow is so slow that a drain is in its middle for seconds.
var slow = &kvtierv1.PlanOptions{NodeBytesPerSecond: 100 << 10}

func TestUndrainInTheMiddle(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		filled(x, rest[0])
		id := rest[0].drain(x, slow)
		w.eventually(10*time.Second, "the drain is under way", func() bool {
			s, err := rest[0].r.Status(context.Background(), id)
			return err == nil && s.GetLive().GetDoneBytes() > 0
		})
		if err := rest[0].r.Undrain(t.Context(), x.id, "operator"); err != nil {
			t.Fatal(err)
		}
		rest[0].mustEnd(id, cancelled)
		w.eventually(10*time.Second, "nothing moves", func() bool {
			still := true
			for _, name := range []string{"t/a", "t/b"} {
				rest[0].n.Directory().Read(func(s *directory.State) {
					rec, _ := s.Session(name)
					still = still && rec.GetState() == kvtierv1.SessionState_SESSION_STATE_ACTIVE
				})
			}
			return still && rest[0].state(x) == nodeUp
		})
		mustHave(t, w.nodes)
	})
}

func TestCancelInTheMiddle(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		filled(x, rest[0])
		id := rest[0].drain(x, slow)
		w.eventually(time.Minute, "blocks of no session are copied", func() bool {
			x.r.mu.Lock()
			job := x.r.mu.job
			x.r.mu.Unlock()
			return job != nil && job.told().GetCopiedBytes() > 0
		})
		if _, err := rest[0].r.Cancel(t.Context(), id, "operator"); err != nil {
			t.Fatal(err)
		}
		if s := rest[0].state(x); s != draining {
			t.Errorf("the node is %v after its drain was cancelled", s)
		}
		x.r.mu.Lock()
		job := x.r.mu.job
		x.r.mu.Unlock()
		w.eventually(10*time.Second, "the copying ends", func() bool {
			select {
			case <-job.ended:
				return true
			default:
				return false
			}
		})
		mustHave(t, w.nodes)
		// It can be drained again.
		rest[0].mustEnd(rest[0].drain(x, nil), done)
		drained(t, w, x)
	})
}

func TestLeaderDiesInTheMiddle(t *testing.T) {
	inWorld(t, 5, func(t *testing.T, w *world) {
		leader := w.leader()
		x := w.follower()
		rest := w.others(x, leader)
		filled(x, rest[0])
		id := rest[0].drain(x, slow)
		w.eventually(time.Minute, "a session has moved", func() bool {
			return rest[0].owner("a") != x || rest[0].owner("b") != x
		})
		leader.crash()
		p := rest[0].ended(id, 10*time.Minute)
		if p.GetState() != done {
			t.Fatalf("%v", p)
		}
		w.eventually(10*time.Second, "the node has left", func() bool { return rest[0].state(x) == left })
		leader.start()
		w.eventually(20*time.Second, "it is back", func() bool { return rest[0].state(leader) == nodeUp })
		drained(t, w, x)
	})
}

func TestTargetDiesInTheMiddle(t *testing.T) {
	inWorld(t, 4, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x, w.leader())
		filled(x, w.leader())
		id := rest[0].drain(x, slow)
		var victim *machine
		for _, s := range rest[0].r.plan(id).GetSteps() {
			if to := w.nodes[s.GetTo()[0]-1]; s.GetKind() == moveKind && to != w.leader() && to != rest[0] {
				victim = to
			}
		}
		if victim == nil {
			victim = rest[1]
		}
		victim.crash()
		stop := load(w, []*machine{rest[0]})
		rest[0].mustEnd(id, done)
		if fetches, bad := stop(); bad > 0 {
			t.Errorf("%d of %d fetches failed", bad, fetches)
		}
		drained(t, w, x)
	})
}

func TestDeadline(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		filled(x, rest[0])
		id := rest[0].drain(x, &kvtierv1.PlanOptions{NodeBytesPerSecond: 20 << 10, DeadlineMs: 6000})
		begun := time.Now()
		p := rest[0].mustEnd(id, failed)
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("a deadline of 6 s took %v", took)
		}
		if p.GetLeftSessions() == 0 && p.GetLeftBytes() == 0 || !strings.Contains(p.GetWhy(), "deadline") {
			t.Errorf("%v", p)
		}
		if s := rest[0].state(x); s != draining {
			t.Errorf("the node is %v", s)
		}
		mustHave(t, w.nodes)
	})
}

func TestDropCold(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		x.put(5, 50)
		w.sleep(10 * time.Second)
		filled(x, rest[0])
		p := rest[0].mustEnd(rest[0].drain(x, &kvtierv1.PlanOptions{DropCold: true, HotWithinMs: 5000}), done)
		if !strings.Contains(p.GetWhy(), "50 cold blocks were given up") {
			t.Errorf("%v", p)
		}
		drained(t, w, x)
		if n := rest[0].fetch(5, 50); n != 0 {
			t.Errorf("%d cold blocks are elsewhere", n)
		}
	})
}

// A limit of bandwidth is kept within 5 %.
func TestBandwidth(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		x.put(3, 500)
		const rate = 200 << 10
		begun := time.Now()
		id := rest[0].drain(x, &kvtierv1.PlanOptions{TotalBytesPerSecond: rate})
		rest[0].mustEnd(id, done)
		x.r.mu.Lock()
		told := x.r.mu.job.told()
		x.r.mu.Unlock()
		if told.GetCopiedBytes() != 500*pageBytes {
			t.Fatalf("%v", told)
		}
		ideal := float64(told.GetCopiedBytes()) / rate
		if took := time.Since(begun).Seconds(); took < ideal/1.05 || took > ideal*1.05+1.5 { // the rest is planning and settling
			t.Errorf("%.1f s, want %.1f s", took, ideal)
		}
	})
}

func TestRebalance(t *testing.T) {
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		for i := range 12 {
			x.session(fmt.Sprint("s", i), 10+i, 20)
		}
		q := &kvtierv1.PlanRebalanceRequest{WeightBytes: 1}
		plan, err := rest[0].r.ProposeRebalance(t.Context(), q)
		if err != nil || len(plan.GetSteps()) < 6 {
			t.Fatalf("%d steps, %v", len(plan.GetSteps()), err)
		}
		var steps []*kvtierv1.PlanStep
		for _, s := range plan.GetSteps() {
			steps = append(steps, s.GetStep())
		}
		// A session that moves meanwhile, and one that is closed, are left alone.
		if err := x.m.BeginMove(t.Context(), steps[0].GetSession(), other(rest, steps[0]).id, 0, time.Minute); err != nil {
			t.Fatal(err)
		}
		_, closed, _ := strings.Cut(steps[1].GetSession(), "/")
		if _, err := x.m.CloseSession(t.Context(), &kvtierv1.CloseSessionRequest{Tenant: "t", Session: closed}); err != nil {
			t.Fatal(err)
		}
		w.eventually(10*time.Second, "it has moved", func() bool { at, _ := rest[0].r.session(steps[0].GetSession()); return at.epoch == 2 })
		id, err := rest[0].r.Apply(t.Context(), steps, nil, "operator")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := rest[0].r.Apply(t.Context(), steps, nil, "operator"); !errors.Is(err, paging.ErrNoSpace) {
			t.Errorf("a second plan: %v", err)
		}
		p := rest[0].mustEnd(id, done)
		for i, s := range p.GetSteps() {
			at, known := rest[0].r.session(s.GetSession())
			want := stepDone
			if i < 2 {
				want = stepSkipped
			}
			if s.GetState() != want || i > 1 && (!known || at.owner != idOf(s.GetTo())) {
				t.Errorf("step %d: %v", i, s)
			}
		}
		if again, err := rest[0].r.ProposeRebalance(t.Context(), q); err != nil || len(again.GetSteps()) > 2 {
			t.Errorf("the next plan, two steps of the first having been skipped: %v, %v", again, err)
		}
		w.eventually(5*time.Second, "another node knows of it", func() bool {
			st, err := rest[1].r.Status(context.Background(), nil)
			return err == nil && st.GetRecord().GetState() == done
		})
	})
}

// other is a node that a step does not name.
func other(nodes []*machine, s *kvtierv1.PlanStep) *machine {
	for _, m := range nodes {
		if m.id != idOf(s.GetTo()) && m.id != idOf(s.GetFrom()) {
			return m
		}
	}
	return nil
}

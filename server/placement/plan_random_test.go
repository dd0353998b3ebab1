package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

// randomUsage is a cluster with sessions that are spread unevenly, some of which share
// what they begin with.
func randomUsage(r *rand.Rand, nodes, sessions int) *Usage {
	u := &Usage{}
	for i := range nodes {
		n := NodeUsage{ID: NodeID{byte(i), byte(i >> 8)}, Status: Up, BytesPerSecond: int64(r.IntN(3)) * 1e9}
		n.Budget = TierBytes{int64(r.IntN(2)) << 20, (1 + int64(r.IntN(4))) << 22, int64(r.IntN(3)) << 24}
		if r.IntN(10) == 0 {
			n.Status = []NodeStatus{Draining, Down, Departed}[r.IntN(3)]
		}
		n.SoleHotBytes, n.SoleColdBytes = r.Int64N(1<<18), r.Int64N(1<<20)
		n.Used[RAM] = n.SoleHotBytes + n.SoleColdBytes
		u.Nodes = append(u.Nodes, n)
	}
	favourite := r.IntN(nodes)
	spread := 1 + r.IntN(nodes)
	for range r.IntN(6) {
		u.Shared = append(u.Shared, SharedRun{Bytes: 1 + r.Int64N(1<<17)})
	}
	for i := range sessions {
		at := (favourite + r.IntN(spread)) % nodes
		s := SessionUsage{ID: SessionID(fmt.Sprint("s", i)), Owner: u.Nodes[at].ID, Epoch: Epoch(1 + r.IntN(5)),
			Bytes: TierBytes{r.Int64N(2) * r.Int64N(1<<12), r.Int64N(1 << (10 + r.IntN(8))), r.Int64N(2) * r.Int64N(1<<16)},
			Idle:  time.Duration(r.IntN(600)) * time.Second, Priority: r.IntN(101), HitBytesPerSecond: r.Int64N(2) * r.Int64N(1e7)}
		if len(u.Shared) > 0 && r.IntN(2) == 0 {
			s.Shared = append(s.Shared, int32(r.IntN(len(u.Shared))))
		}
		n := &u.Nodes[at]
		n.Used = n.Used.plus(s.Bytes)
		n.HitBytesPerSecond += s.HitBytesPerSecond
		for _, run := range s.Shared {
			w := world{u: u}
			if w.runAt(run, n.ID) < 0 {
				b := TierBytes{RAM: u.Shared[run].Bytes}
				u.Shared[run].At = append(u.Shared[run].At, RunAt{n.ID, b})
				n.Used = n.Used.plus(b)
			}
		}
		u.Sessions = append(u.Sessions, s)
	}
	for i := range u.Nodes {
		n := &u.Nodes[i]
		for t := range n.Budget {
			n.Budget[t] = max(n.Budget[t], n.Used[t]*int64(4+r.IntN(8))/4)
			if n.Used[t] < n.Budget[t] && r.IntN(2) == 0 { // full of cache, as caches are
				n.GivesWay[t] = n.Budget[t] - n.Used[t]
				n.Used[t] = n.Budget[t]
			}
		}
	}
	return u
}

func randomOptions(r *rand.Rand) (o Options) {
	switch r.IntN(3) {
	case 0:
		o.Weights = Weights{HotSessions: 1}
	case 1:
		o.Weights = Weights{1, 0.5, 0.5}
	}
	o.Slack = []float64{0, 0.05, 0.3}[r.IntN(3)]
	return o
}

// loads is how far each node that is up is above its share, by the planner's measure.
func loads(t *testing.T, u *Usage, o Options) map[NodeID]float64 {
	l, err := newLedger(u, o)
	if err != nil {
		t.Fatal(err)
	}
	l.newPass()
	out := map[NodeID]float64{}
	for i := range l.nodes {
		if l.nodes[i].target {
			out[l.nodes[i].usage.ID] = l.nodes[i].load
		}
	}
	return out
}

func TestRandomRebalance(t *testing.T) {
	plans, moves := 0, 0
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 1))
		u, o := randomUsage(r, 1+r.IntN(12), r.IntN(200)), randomOptions(r)
		p, err := PlanRebalance(u, o)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		checkPlan(t, u, p, o)
		if again, _ := PlanRebalance(cloneUsage(u), o); !reflect.DeepEqual(p, again) {
			t.Fatalf("seed %d: two plans of the same usage differ", seed)
		}
		worst := func(u *Usage) (x float64) {
			for _, load := range loads(t, u, o) {
				x = max(x, load)
			}
			return x
		}
		after := applyPlan(u, p)
		if before, now := worst(u), worst(after); len(u.Shared) == 0 && now > max(before+1e-9, o.withDefaults().Slack) {
			t.Errorf("seed %d: the most loaded node was %.2f above its share and is %.2f", seed, before, now)
		}
		if p2, _ := PlanRebalance(after, o); !p2.Empty() {
			t.Fatalf("seed %d: after a plan of %d moves another one of %d: %s", seed, len(p.Moves), len(p2.Moves), planText(p2))
		}
		if !p.Empty() {
			plans, moves = plans+1, moves+len(p.Moves)
			noPingPong(t, r, seed, after, p, o)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if plans < 100 || moves < 1000 {
		t.Errorf("only %d plans with %d moves: the usage is too even to test anything", plans, moves)
	}
}

// noPingPong lets usage move a little and expects that nothing that moved goes back.
// Blocks that sessions share are left out: a copy of them changes what there is in all
// by more than that.
func noPingPong(t *testing.T, r *rand.Rand, seed uint64, u *Usage, p *Plan, o Options) {
	t.Helper()
	from := map[SessionID]NodeID{}
	for _, m := range p.Moves {
		from[m.Session] = m.From
	}
	for i := range u.Nodes {
		n := &u.Nodes[i]
		n.GivesWay[RAM] += n.Used.minus(n.GivesWay)[RAM] * int64(r.IntN(2)) / 200
		n.HitBytesPerSecond += n.HitBytesPerSecond * int64(r.IntN(3)-1) / 200
	}
	again, err := PlanRebalance(u, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range again.Moves {
		if a, moved := from[m.Session]; moved && a == m.To && len(u.Shared) == 0 {
			t.Errorf("seed %d: %s goes back to %d: %s", seed, m.Session, m.To[0], m.Why)
		}
	}
}

func TestRandomDrain(t *testing.T) {
	placed, stayed := 0, 0
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 2))
		u, o := randomUsage(r, 2+r.IntN(10), r.IntN(200)), randomOptions(r)
		o.DropCold = r.IntN(2) == 0
		nodes := []NodeID{u.Nodes[r.IntN(len(u.Nodes))].ID}
		if other := u.Nodes[r.IntN(len(u.Nodes))].ID; other != nodes[0] {
			nodes = append(nodes, other)
		}
		p, err := PlanDrain(u, nodes, o)
		if err != nil {
			if !errors.Is(err, ErrNoTarget) {
				t.Fatalf("seed %d: %v", seed, err)
			}
			continue
		}
		checkPlan(t, u, p, o)
		drained := map[NodeID]bool{}
		for _, id := range nodes {
			drained[id] = true
		}
		for _, m := range p.Moves {
			if drained[m.To] || !drained[m.From] {
				t.Errorf("seed %d: move %+v", seed, m)
			}
		}
		after := applyPlan(u, p)
		checkDrained(t, u, after, drained, p)
		if p2, _ := PlanDrain(after, nodes, o); !p2.Empty() {
			t.Fatalf("seed %d: after a plan another one: %s", seed, planText(p2))
		}
		placed, stayed = placed+len(p.Moves), stayed+len(p.Unplaced)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if placed < 1000 || stayed < 100 {
		t.Errorf("%d placed and %d not: one of the two is not tested", placed, stayed)
	}
}

// checkDrained expects that what a drained node still has is what the plan says cannot
// be placed, and that this is true.
func checkDrained(t *testing.T, before, after *Usage, drained map[NodeID]bool, p *Plan) {
	t.Helper()
	stay := map[SessionID]bool{}
	sole := map[NodeID]int64{}
	for _, x := range p.Unplaced {
		if x.Session != "" {
			stay[x.Session] = true
		} else {
			sole[x.Node] += x.Bytes
		}
	}
	for i := range after.Sessions {
		if s := &after.Sessions[i]; drained[s.Owner] != stay[s.ID] {
			t.Errorf("session %s is at %d; it stays: %v", s.ID, s.Owner[0], stay[s.ID])
		}
	}
	for i := range after.Nodes {
		if n := &after.Nodes[i]; drained[n.ID] && n.SoleHotBytes+n.SoleColdBytes != sole[n.ID] {
			t.Errorf("node %d has %d bytes that nobody else holds; the plan says %d", n.ID[0], n.SoleHotBytes+n.SoleColdBytes, sole[n.ID])
		}
	}
}

// bigUsage is a thousand nodes with a million sessions, a tenth of which begin alike;
// a fifth of the nodes have three times as many as the others.
func bigUsage(nodes, sessions int) *Usage {
	u := &Usage{Shared: make([]SharedRun, 100)}
	for i := range u.Shared {
		u.Shared[i].Bytes = 1 << 30
	}
	for i := range nodes {
		u.Nodes = append(u.Nodes, NodeUsage{ID: NodeID{byte(i), byte(i >> 8)}, Status: Up, Budget: TierBytes{0, 512 << 30, 8 << 40}, BytesPerSecond: 5e9})
	}
	r := rand.New(rand.NewPCG(1, 1))
	w := world{u: u}
	for i := range sessions {
		at := r.IntN(nodes)
		if i%10 >= 6 {
			at = r.IntN(nodes / 5)
		}
		n := &u.Nodes[at]
		s := SessionUsage{ID: SessionID(fmt.Sprintf("session-%07d", i)), Owner: n.ID, Epoch: 1, Bytes: TierBytes{0, r.Int64N(256 << 20), r.Int64N(1 << 30)},
			Idle: time.Duration(r.IntN(7200)) * time.Second, Priority: r.IntN(5) * 20, HitBytesPerSecond: r.Int64N(1 << 20)}
		if i%10 == 0 {
			run := int32(r.IntN(100))
			s.Shared = []int32{run}
			if w.runAt(run, n.ID) < 0 {
				u.Shared[run].At = append(u.Shared[run].At, RunAt{n.ID, TierBytes{RAM: 1 << 30}})
				n.Used[RAM] += 1 << 30
			}
		}
		n.Used = n.Used.plus(s.Bytes)
		n.HitBytesPerSecond += s.HitBytesPerSecond
		u.Sessions = append(u.Sessions, s)
	}
	return u
}

func BenchmarkPlan(b *testing.B) {
	u := bigUsage(1000, 1_000_000)
	o := Options{Weights: Weights{1, 0.5, 0.5}}
	b.Run("rebalance", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p, err := PlanRebalance(u, o)
			if err != nil || p.Empty() {
				b.Fatal(err)
			}
			b.ReportMetric(float64(len(p.Moves)), "moves")
		}
	})
	b.Run("drain", func(b *testing.B) {
		b.ReportAllocs()
		var nodes []NodeID
		for i := range 100 {
			nodes = append(nodes, u.Nodes[i].ID)
		}
		for b.Loop() {
			p, err := PlanDrain(u, nodes, o)
			if err != nil || p.Empty() {
				b.Fatal(err)
			}
			b.ReportMetric(float64(len(p.Moves)), "moves")
		}
	})
}

// Ten times as many sessions take about ten times as long; a planner that compares
// sessions with each other would take a hundred times.
func TestPlanGrowsWithSessions(t *testing.T) {
	measure := func(sessions int) time.Duration {
		u := bigUsage(200, sessions)
		best := time.Duration(1 << 62)
		for range 3 {
			start := time.Now()
			if p, err := PlanRebalance(u, Options{}); err != nil || p.Empty() {
				t.Fatal("no plan", err)
			}
			best = min(best, time.Since(start))
		}
		return best
	}
	small, large := measure(20_000), measure(200_000)
	t.Logf("%v for 20,000 sessions, %v for 200,000", small, large)
	if large > 50*small {
		t.Errorf("ten times the sessions took %.0f times as long", float64(large)/float64(small))
	}
}

package directory

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

func planN(i byte) []byte { return bytes.Repeat([]byte{i}, 16) }

func moveStep(session string, from, to byte) *kvtierv1.PlanStep {
	return &kvtierv1.PlanStep{Kind: kvtierv1.StepKind_STEP_KIND_MOVE, Session: session, Epoch: 1, From: nodeN(from), To: nodeN(to), Bytes: 10, Why: "because"}
}

func startDrain(plan, node byte, steps ...*kvtierv1.PlanStep) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_StartPlan{StartPlan: &kvtierv1.StartPlan{Plan: &kvtierv1.PlanRecord{
		Plan: planN(plan), Kind: drainPlan, Node: nodeN(node), Who: "operator", Options: &kvtierv1.PlanOptions{DeadlineMs: 1000}, Steps: steps,
	}}}}
}

func startRebalance(plan byte, steps ...*kvtierv1.PlanStep) *kvtierv1.DirectoryCommand {
	c := startDrain(plan, 0, steps...)
	c.GetStartPlan().Plan.Kind, c.GetStartPlan().Plan.Node = kvtierv1.PlanKind_PLAN_KIND_REBALANCE, nil
	return c
}

func stepResult(plan byte, round, step uint32, state kvtierv1.StepState) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_StepPlan{StepPlan: &kvtierv1.StepPlan{
		Plan: planN(plan), Round: round, Results: []*kvtierv1.StepResult{{Step: step, State: state, Reason: "so", DoneBytes: 7}}}}}
}

func nextRound(plan byte, round uint32, steps ...*kvtierv1.PlanStep) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_RoundPlan{RoundPlan: &kvtierv1.RoundPlan{Plan: planN(plan), Round: round, Steps: steps}}}
}

func turn(plan byte, state kvtierv1.PlanState) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_TurnPlan{TurnPlan: &kvtierv1.TurnPlan{Plan: planN(plan), State: state, Why: "why"}}}
}

func undrain(node byte) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_UndrainNode{UndrainNode: &kvtierv1.UndrainNode{Node: nodeN(node), Who: "operator"}}}
}

func note(what string) *kvtierv1.DirectoryCommand {
	return &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_AppendAudit{AppendAudit: &kvtierv1.AppendAudit{Who: "operator", What: what}}}
}

// everyPlanCommand is the part of the fixtures about sessions, plans and audit.
func everyPlanCommand(a, b *owner) []*kvtierv1.DirectoryCommand {
	step := &kvtierv1.PlanStep{Kind: kvtierv1.StepKind_STEP_KIND_MOVE, Session: "t/s", Epoch: 1, From: a.id[:], To: b.id[:], Bytes: 1}
	drain := startDrain(1, 0, step)
	drain.GetStartPlan().Plan.Node = a.id[:]
	back := undrain(0)
	back.GetUndrainNode().Node = b.id[:]
	return []*kvtierv1.DirectoryCommand{
		back, drain, stepResult(1, 1, 0, stepDone), nextRound(1, 2), turn(1, planDone), startRebalance(2, step), note("looked"),
	}
}

func (w *sessionWorld) node(i byte) Node {
	w.t.Helper()
	n, ok := w.s.Node([16]byte{i})
	if !ok {
		w.t.Fatalf("node %d is not known", i)
	}
	return n
}

func (w *sessionWorld) plan(i byte) *Plan {
	w.t.Helper()
	p, ok := w.s.Plan(planN(i))
	if !ok {
		w.t.Fatalf("plan %d is not known", i)
	}
	return p
}

// trail is the audit trail as text.
func (w *sessionWorld) trail() (out []string) {
	w.s.Audit(func(r *AuditRecord) { out = append(out, r.GetWho()+": "+r.GetWhat()) })
	return out
}

func TestDrainOfANode(t *testing.T) {
	w := newSessionWorld(t)
	up, down, draining, left := kvtierv1.NodeState_NODE_STATE_UP, kvtierv1.NodeState_NODE_STATE_DOWN, kvtierv1.NodeState_NODE_STATE_DRAINING, kvtierv1.NodeState_NODE_STATE_LEFT
	w.must(Unknown, startDrain(1, 9))
	w.must(OK, nodeState(4, down))
	w.must(Stale, startDrain(1, 4)) // what it holds cannot be had
	w.must(OK, startDrain(1, 1, moveStep("t/a", 1, 2), moveStep("t/b", 1, 3)))
	w.must(OK, startDrain(1, 1)) // the same again
	w.must(Full, startDrain(2, 1))
	w.must(OK, startDrain(3, 2)) // another node
	if n := w.node(1); n.State != draining || !n.Withdrawn() {
		t.Fatalf("%+v", n)
	}
	// It takes nothing new, and it stays draining whatever is seen of it.
	w.must(Full, w.open(1))
	w.must(OK, w.open(3))
	w.must(Full, prepare(3, 1, 1, 1))
	for _, seen := range []kvtierv1.NodeState{down, up, left, up} {
		w.must(OK, nodeState(1, seen))
	}
	w.must(OK, joinNode(1, 1))
	w.s = throughSnapshot(t, w.s)
	if n := w.node(1); n.State != draining {
		t.Fatalf("%+v", n)
	}
	w.must(OK, stepResult(1, 1, 0, stepDone))
	w.must(OK, stepResult(1, 1, 0, stepRunning)) // a late word changes nothing
	w.must(Invalid, stepResult(1, 1, 2, stepDone))
	w.must(Stale, nextRound(1, 1))
	w.must(Gap, nextRound(1, 3))
	w.must(Invalid, nextRound(1, 2, moveStep("t/b", 1, 1)))
	w.must(OK, nextRound(1, 2, moveStep("t/b", 1, 4)))
	w.must(Stale, stepResult(1, 1, 1, stepDone))
	w.must(OK, stepResult(1, 2, 0, stepRunning))
	w.must(OK, turn(1, planPaused))
	w.must(OK, turn(1, planDone))
	w.must(Stale, turn(1, planFailed))
	p := w.plan(1)
	if p.GetState() != planDone || p.GetMovedSessions() != 1 || p.GetCopiedBytes() != 7 || p.GetSteps()[0].GetState() != stepSkipped {
		t.Errorf("%v", p)
	}
	if n := w.node(1); n.State != left || !n.Drained() {
		t.Fatalf("%+v", n)
	}
	w.must(OK, nodeState(1, up)) // it runs still
	w.must(OK, joinNode(1, 2))
	if n := w.node(1); n.State != left {
		t.Fatalf("a node that was emptied is %v when it starts", n.State)
	}
	w.must(OK, undrain(1))
	w.must(OK, undrain(1))
	if n := w.node(1); n.State != up || n.Withdrawn() {
		t.Fatalf("%+v", n)
	}
	w.must(OK, undrain(2)) // in the middle
	if n := w.node(2); n.State != up || w.plan(3).GetState() != planCancelled {
		t.Fatalf("%+v, %v", n, w.plan(3))
	}
	w.must(Unknown, undrain(9))
	want := []string{
		"cluster: node up", "cluster: node up", "cluster: node up", "cluster: node up", "cluster: node down",
		"cluster: node draining", "operator: drain started", "cluster: node draining", "operator: drain started",
		"cluster: node down", "cluster: node draining", "cluster: node left", "cluster: node draining",
		"cluster: node left", "cluster: drain done", "cluster: node up", "operator: node undrained",
		"operator: drain cancelled", "cluster: node up", "operator: node undrained",
	}
	if got := w.trail(); !slices.Equal(got, want) {
		t.Errorf("trail %s\nwant %s", strings.Join(got, "; "), strings.Join(want, "; "))
	}
}

func TestRebalanceIsOne(t *testing.T) {
	w := newSessionWorld(t)
	w.must(Invalid, startRebalance(1, moveStep("t/a", 1, 2), moveStep("t/a", 1, 3))) // twice
	w.must(Invalid, startRebalance(1, &kvtierv1.PlanStep{Kind: kvtierv1.StepKind_STEP_KIND_COPY, From: nodeN(1), To: nodeN(2)}))
	w.must(Invalid, startRebalance(1, make([]*kvtierv1.PlanStep, MaxPlanSteps+1)...))
	w.must(OK, startRebalance(1, moveStep("t/a", 1, 2)))
	w.must(Full, startRebalance(2))
	w.must(Unknown, turn(2, planDone))
	w.must(OK, turn(1, planCancelled))
	for i := range byte(2 * maxEndedPlans) { // only the last ones are remembered
		w.must(OK, startRebalance(10+i))
		w.must(OK, turn(10+i, planDone))
	}
	if n := len(w.s.Plans()); n != maxEndedPlans {
		t.Errorf("%d plans are remembered, want %d", n, maxEndedPlans)
	}
	w.s = throughSnapshot(t, w.s)
}

func TestAuditIsBounded(t *testing.T) {
	w := newSessionWorld(t)
	long := strings.Repeat("é", 400)
	w.must(OK, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_AppendAudit{AppendAudit: &kvtierv1.AppendAudit{Who: "x" + long, What: "x" + long, Subject: long, Outcome: "x" + long}}})
	w.must(Invalid, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_AppendAudit{AppendAudit: &kvtierv1.AppendAudit{What: "no name"}}})
	w.s = throughSnapshot(t, w.s)
	for i := range maxAudit + 10 {
		w.must(OK, note(fmt.Sprint(i)))
	}
	w.s = throughSnapshot(t, w.s)
	n, first, last := 0, uint64(0), ""
	w.s.Audit(func(r *AuditRecord) {
		if n++; n == 1 {
			first = r.GetNumber()
		}
		last = r.GetWhat()
	})
	if n != maxAudit || first != 16 || last != fmt.Sprint(maxAudit+9) {
		t.Errorf("%d records from number %d to %q", n, first, last)
	}
}

// Random commands of leaders that know little: the replicas agree through snapshots, at
// most one plan of a kind runs for a node, a step that ended stays so, and who is
// withdrawn is up only after somebody said so.
func TestRandomPlanCommands(t *testing.T) {
	seed := testSeed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	w := newSessionWorld(t)
	other := newSessionWorld(t)
	results := map[Result]int{}
	for i := range 6000 {
		plan, node, round := byte(1+i/60+r.IntN(6)), byte(1+r.IntN(4)), uint32(1+r.IntN(3))
		var c *kvtierv1.DirectoryCommand
		switch r.IntN(9) {
		case 0, 1:
			c = startDrain(plan, node, moveStep("t/a", node, 1+node%4), moveStep("t/b", node, 1+node%4))
		case 2:
			c = startRebalance(plan, moveStep("t/a", 1, 2))
		case 3, 4:
			c = stepResult(plan, round, uint32(r.IntN(3)), kvtierv1.StepState(1+r.IntN(5)))
		case 5:
			c = nextRound(plan, round, moveStep("t/c", 1, 2))
		case 6:
			c = turn(plan, kvtierv1.PlanState(1+r.IntN(6)*r.IntN(2)))
		case 7:
			c = undrain(node)
		case 8:
			c = nodeState(node, []kvtierv1.NodeState{kvtierv1.NodeState_NODE_STATE_UP, kvtierv1.NodeState_NODE_STATE_DOWN}[r.IntN(2)])
		}
		c.NowUnixMs = int64(i)
		before, had := w.s.Plan(planN(plan))
		was := w.node(node)
		got, err := w.s.Apply(c)
		also, otherErr := other.s.Apply(c)
		if err != nil || otherErr != nil || got != also {
			t.Fatalf("step %d: %v, %v and %v, %v", i, got, err, also, otherErr)
		}
		results[got]++
		if after, has := w.s.Plan(planN(plan)); had && has && after.GetRound() == before.GetRound() {
			for k, x := range before.GetSteps() {
				if y := after.GetSteps()[k]; StepEnded(x) && y.GetState() != x.GetState() {
					t.Fatalf("step %d: %v became %v by %v", i, x, y, c)
				}
			}
		}
		if now := w.node(node); was.Withdrawn() && now.State == kvtierv1.NodeState_NODE_STATE_UP && c.GetUndrainNode() == nil {
			t.Fatalf("step %d: node %d is up by %v", i, node, c)
		}
		running := map[string]bool{}
		for _, p := range w.s.Plans() {
			key := p.GetKind().String() + string(p.GetNode())
			if !PlanEnded(p) && running[key] {
				t.Fatalf("step %d: two plans of %s", i, key)
			}
			running[key] = running[key] || !PlanEnded(p)
		}
		if i%500 == 0 {
			w.s = throughSnapshot(t, w.s)
			if w.s.Hash() != other.s.Hash() {
				t.Fatalf("step %d: the replicas differ", i)
			}
		}
	}
	for _, want := range []Result{OK, Stale, Gap, Unknown, Full, Invalid} {
		if results[want] == 0 {
			t.Errorf("no command answered %v: %v", want, results)
		}
	}
}

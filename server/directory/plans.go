package directory

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// Bounds of plans.
const (
	MaxPlanSteps  = 2048      // of one round
	maxPlanBytes  = 384 << 10 // of the record of one, so that a command with it is short enough
	maxPlans      = 64        // running: a drain for each node that is emptied, and one rebalance
	maxEndedPlans = 32        // remembered; the one that ended first is forgotten
	maxPlanText   = 256       // bytes of a reason; what is longer is cut off
)

// Plan is a plan as the directory has it: an immutable record. A change makes another.
type Plan = kvtierv1.PlanRecord

const (
	planRunning   = kvtierv1.PlanState_PLAN_STATE_RUNNING
	planPaused    = kvtierv1.PlanState_PLAN_STATE_PAUSED
	planDone      = kvtierv1.PlanState_PLAN_STATE_DONE
	planFailed    = kvtierv1.PlanState_PLAN_STATE_FAILED
	planCancelled = kvtierv1.PlanState_PLAN_STATE_CANCELLED

	drainPlan = kvtierv1.PlanKind_PLAN_KIND_DRAIN

	stepPending = kvtierv1.StepState_STEP_STATE_PENDING
	stepRunning = kvtierv1.StepState_STEP_STATE_RUNNING
	stepDone    = kvtierv1.StepState_STEP_STATE_DONE
	stepSkipped = kvtierv1.StepState_STEP_STATE_SKIPPED
)

type planID [16]byte

func toPlanID(b []byte) (id planID, ok bool) {
	return id, copy(id[:], b) == len(id) && len(b) == len(id)
}

// PlanEnded reports whether a plan has ended.
func PlanEnded(p *Plan) bool { return p.GetState() != planRunning && p.GetState() != planPaused }

// StepEnded reports whether a step has ended.
func StepEnded(x *kvtierv1.PlanStep) bool {
	return x.GetState() != stepPending && x.GetState() != stepRunning
}

// Plan is a plan, if it is remembered. It must not be changed.
func (s *State) Plan(id []byte) (*Plan, bool) {
	key, ok := toPlanID(id)
	p := s.plans[key]
	return p, ok && p != nil
}

// Plans are the plans that run and the last ones that ended, in order of their start.
// They must not be changed.
func (s *State) Plans() []*Plan {
	return slices.SortedFunc(maps.Values(s.plans), func(a, b *Plan) int {
		if a.GetStartedUnixMs() != b.GetStartedUnixMs() {
			return int(min(1, max(-1, a.GetStartedUnixMs()-b.GetStartedUnixMs())))
		}
		return bytes.Compare(a.GetPlan(), b.GetPlan())
	})
}

// validSteps reports whether a plan may have these steps.
func validSteps(kind kvtierv1.PlanKind, steps []*kvtierv1.PlanStep) bool {
	sessions := make(map[string]bool, len(steps))
	for _, x := range steps {
		_, from := toNodeID(x.GetFrom())
		_, to := toNodeID(x.GetTo())
		switch x.GetKind() {
		case kvtierv1.StepKind_STEP_KIND_MOVE:
			if x.GetSession() == "" || len(x.GetSession()) > MaxSessionBytes || sessions[x.GetSession()] || !to || bytes.Equal(x.GetFrom(), x.GetTo()) {
				return false
			}
			sessions[x.GetSession()] = true
		case kvtierv1.StepKind_STEP_KIND_COPY:
			if kind != drainPlan || !to || bytes.Equal(x.GetFrom(), x.GetTo()) {
				return false
			}
		case kvtierv1.StepKind_STEP_KIND_DROP:
			if kind != drainPlan {
				return false
			}
		default:
			return false
		}
		if !from || len(x.GetWhy()) > maxPlanText {
			return false
		}
	}
	return len(steps) <= MaxPlanSteps
}

// freshSteps are steps that were not begun.
func freshSteps(steps []*kvtierv1.PlanStep) []*kvtierv1.PlanStep {
	out := make([]*kvtierv1.PlanStep, len(steps))
	for i, x := range steps {
		out[i] = proto.CloneOf(x)
		out[i].State, out[i].Reason, out[i].DoneBytes = stepPending, "", 0
	}
	return out
}

func (s *State) startPlan(c *kvtierv1.StartPlan) Result {
	p := c.GetPlan()
	id, ok := toPlanID(p.GetPlan())
	if !ok || proto.Size(p) > maxPlanBytes || p.GetWho() == "" || !validSteps(p.GetKind(), p.GetSteps()) {
		return Invalid
	}
	if s.plans[id] != nil {
		return OK // the same again
	}
	running := 0
	for _, x := range s.plans {
		if PlanEnded(x) {
			continue
		}
		running++
		if x.GetKind() == p.GetKind() && bytes.Equal(x.GetNode(), p.GetNode()) {
			return Full
		}
	}
	if running >= maxPlans {
		return Full
	}
	subject := "rebalance"
	switch p.GetKind() {
	case drainPlan:
		node, ok := toNodeID(p.GetNode())
		n := s.nodes[node]
		switch {
		case !ok:
			return Invalid
		case n == nil:
			return Unknown
		case n.State != kvtierv1.NodeState_NODE_STATE_UP && n.State != kvtierv1.NodeState_NODE_STATE_DRAINING:
			return Stale // what it holds cannot be had now
		}
		subject = s.nameOf(p.GetNode())
		n.Withdrawal = kvtierv1.Withdrawal_WITHDRAWAL_DRAINING
		s.enter(n, kvtierv1.NodeState_NODE_STATE_DRAINING)
	case kvtierv1.PlanKind_PLAN_KIND_REBALANCE:
		if len(p.GetNode()) != 0 {
			return Invalid
		}
	default:
		return Invalid
	}
	s.plans[id] = &Plan{
		Plan: slices.Clone(id[:]), Kind: p.GetKind(), Node: slices.Clone(p.GetNode()), Options: proto.CloneOf(p.GetOptions()), Who: cut(p.GetWho(), maxAuditWho),
		Steps: freshSteps(p.GetSteps()), State: planRunning, Round: 1, StartedUnixMs: s.nowMillis,
	}
	s.audit(p.GetWho(), planWord(p.GetKind())+" started", subject, fmt.Sprintf("%d steps", len(p.GetSteps())))
	return OK
}

func planWord(k kvtierv1.PlanKind) string {
	if k == drainPlan {
		return "drain"
	}
	return "rebalance"
}

// running finds a plan that has not ended.
func (s *State) runningPlan(b []byte) (planID, *Plan, Result) {
	id, ok := toPlanID(b)
	switch p := s.plans[id]; {
	case !ok:
		return id, nil, Invalid
	case p == nil:
		return id, nil, Unknown
	case PlanEnded(p):
		return id, nil, Stale
	default:
		return id, p, OK
	}
}

// copyPlan is another record of the same plan, whose steps may be replaced.
func copyPlan(p *Plan) *Plan {
	return &Plan{
		Plan: p.Plan, Kind: p.Kind, Node: p.Node, Options: p.Options, Who: p.Who, Steps: slices.Clone(p.Steps), State: p.State, Why: p.Why,
		Round: p.Round, StartedUnixMs: p.StartedUnixMs, EndedUnixMs: p.EndedUnixMs, MovedSessions: p.MovedSessions, CopiedBytes: p.CopiedBytes,
		LeftBytes: p.LeftBytes, LeftSessions: p.LeftSessions,
	}
}

func (s *State) stepPlan(c *kvtierv1.StepPlan) Result {
	id, p, r := s.runningPlan(c.GetPlan())
	if p == nil {
		return r
	}
	if c.GetRound() != p.GetRound() {
		return Stale
	}
	next := copyPlan(p)
	for _, x := range c.GetResults() {
		if int(x.GetStep()) >= len(next.Steps) || x.GetState() < stepPending || x.GetState() > stepSkipped {
			return Invalid
		}
		old := next.Steps[x.GetStep()]
		if StepEnded(old) {
			continue // a late word of a leader that is none any more
		}
		step := proto.CloneOf(old)
		step.State, step.Reason, step.DoneBytes = x.GetState(), cut(x.GetReason(), maxPlanText), x.GetDoneBytes()
		next.Steps[x.GetStep()] = step
	}
	s.plans[id] = next
	return OK
}

func (s *State) roundPlan(c *kvtierv1.RoundPlan) Result {
	id, p, r := s.runningPlan(c.GetPlan())
	if p == nil {
		return r
	}
	switch {
	case c.GetRound() <= p.GetRound():
		return Stale
	case c.GetRound() > p.GetRound()+1:
		return Gap
	case proto.Size(c) > maxPlanBytes || !validSteps(p.GetKind(), c.GetSteps()):
		return Invalid
	}
	next := copyPlan(p)
	for _, x := range p.GetSteps() {
		if x.GetState() == stepDone && x.GetKind() == kvtierv1.StepKind_STEP_KIND_MOVE {
			next.MovedSessions++
		}
		if x.GetKind() != kvtierv1.StepKind_STEP_KIND_DROP {
			next.CopiedBytes += x.GetDoneBytes()
		}
	}
	next.Round, next.Steps = c.GetRound(), freshSteps(c.GetSteps())
	s.plans[id] = next
	return OK
}

func (s *State) turnPlan(c *kvtierv1.TurnPlan) Result {
	id, p, r := s.runningPlan(c.GetPlan())
	if p == nil {
		return r
	}
	if c.GetState() < planRunning || c.GetState() > planCancelled {
		return Invalid
	}
	next := copyPlan(p)
	next.State, next.Why, next.LeftBytes, next.LeftSessions = c.GetState(), cut(c.GetWhy(), maxPlanText), c.GetLeftBytes(), c.GetLeftSessions()
	who := c.GetWho()
	if who == "" {
		who = byCluster
	}
	if PlanEnded(next) {
		s.endPlan(next, who)
	}
	s.plans[id] = next
	s.forgetPlans()
	return OK
}

// endPlan ends a plan: what was not done stays so.
func (s *State) endPlan(p *Plan, who string) {
	p.EndedUnixMs = s.nowMillis
	for i, x := range p.Steps {
		if !StepEnded(x) {
			p.Steps[i] = proto.CloneOf(x)
			p.Steps[i].State, p.Steps[i].Reason = stepSkipped, "the plan ended before"
		}
	}
	subject := "rebalance"
	if p.GetKind() == drainPlan {
		subject = s.nameOf(p.GetNode())
		id, _ := toNodeID(p.GetNode())
		if n := s.nodes[id]; n != nil && p.State == planDone && n.State == kvtierv1.NodeState_NODE_STATE_DRAINING {
			n.Withdrawal = kvtierv1.Withdrawal_WITHDRAWAL_DRAINED
			s.enter(n, kvtierv1.NodeState_NODE_STATE_LEFT)
		}
	}
	words := map[kvtierv1.PlanState]string{planDone: " done", planFailed: " stopped", planCancelled: " cancelled"}
	s.audit(who, planWord(p.GetKind())+words[p.State], subject, p.GetWhy())
}

// forgetPlans forgets the plans that ended first.
func (s *State) forgetPlans() {
	var ended []*Plan
	for _, p := range s.plans {
		if PlanEnded(p) {
			ended = append(ended, p)
		}
	}
	if len(ended) <= maxEndedPlans {
		return
	}
	first := slices.MinFunc(ended, func(a, b *Plan) int {
		if a.GetEndedUnixMs() != b.GetEndedUnixMs() {
			return int(min(1, max(-1, a.GetEndedUnixMs()-b.GetEndedUnixMs())))
		}
		return bytes.Compare(a.GetPlan(), b.GetPlan())
	})
	delete(s.plans, planID(first.GetPlan()))
}

func (s *State) undrainNode(c *kvtierv1.UndrainNode) Result {
	id, ok := toNodeID(c.GetNode())
	if !ok || c.GetWho() == "" {
		return Invalid
	}
	n := s.nodes[id]
	if n == nil {
		return Unknown
	}
	for key, p := range s.plans {
		if !PlanEnded(p) && p.GetKind() == drainPlan && bytes.Equal(p.GetNode(), id[:]) { // at most one
			next := copyPlan(p)
			next.State, next.Why = planCancelled, "the node is to take part again"
			s.endPlan(next, c.GetWho())
			s.plans[key] = next
		}
	}
	s.forgetPlans()
	if n.Withdrawal == kvtierv1.Withdrawal_WITHDRAWAL_UNSPECIFIED {
		return OK
	}
	n.Withdrawal = kvtierv1.Withdrawal_WITHDRAWAL_UNSPECIFIED
	if n.State == kvtierv1.NodeState_NODE_STATE_DRAINING || n.State == kvtierv1.NodeState_NODE_STATE_LEFT {
		s.enter(n, kvtierv1.NodeState_NODE_STATE_UP)
	}
	s.audit(c.GetWho(), "node undrained", s.nameOf(id[:]), "")
	return OK
}

func (s *State) restorePlan(p *Plan) bool {
	id, ok := toPlanID(p.GetPlan())
	if !ok || s.plans[id] != nil || len(s.plans) >= maxPlans+maxEndedPlans || p.GetRound() == 0 || !validSteps(p.GetKind(), p.GetSteps()) {
		return false
	}
	s.plans[id] = p
	return true
}

// Withdrawn reports whether an operator takes a node out.
func (n *Node) Withdrawn() bool { return n.Withdrawal != kvtierv1.Withdrawal_WITHDRAWAL_UNSPECIFIED }

// Drained reports whether a node was emptied by an operator and has left.
func (n *Node) Drained() bool { return n.Withdrawal == kvtierv1.Withdrawal_WITHDRAWAL_DRAINED }

// enterSeen is the state of a node that is seen.
func (s *State) enterSeen(n *Node) {
	switch n.Withdrawal {
	case kvtierv1.Withdrawal_WITHDRAWAL_DRAINING:
		s.enter(n, kvtierv1.NodeState_NODE_STATE_DRAINING)
	case kvtierv1.Withdrawal_WITHDRAWAL_DRAINED:
		s.enter(n, kvtierv1.NodeState_NODE_STATE_LEFT)
	default:
		s.enter(n, kvtierv1.NodeState_NODE_STATE_UP)
	}
}

// takes reports whether new things may be placed on a node.
func takes(n *Node) bool {
	return n.State != kvtierv1.NodeState_NODE_STATE_DRAINING && n.Withdrawal == kvtierv1.Withdrawal_WITHDRAWAL_UNSPECIFIED
}

// NodeWithdrawn reports whether an operator takes a node out, and whether it has left
// by that.
func (s *State) NodeWithdrawn(id placement.NodeID) (withdrawn, drained bool) {
	n := s.nodes[id]
	return n != nil && n.Withdrawn(), n != nil && n.Drained()
}

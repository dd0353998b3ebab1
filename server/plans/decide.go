package plans

import (
	"fmt"
	"time"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// Bounds of carrying a plan out.
const (
	movesPerNode = 2                // at a time, without a limit of bandwidth; else one
	movesAtOnce  = 8                // of a plan
	downPatience = 30 * time.Second // for a target that is down, before its steps fail
	maxStalls    = 3                // rounds of a drain, or tries to copy, that got nowhere
)

// Where a session is, as the directory has it.
type place struct {
	owner placement.NodeID
	epoch uint64
}

// seen is what a decision about a plan is made from, beside its record.
type seen struct {
	millis int64 // clock of the state machine
	// node tells the state of a node, its name and for how long it has been so.
	node func(placement.NodeID) (state kvtierv1.NodeState, name string, since time.Duration)
	// session tells where a session is; false: there is none.
	session func(string) (place, bool)
	// moves are the moves of steps, as far as somebody tells; by position.
	moves map[int]*kvtierv1.MoveProgress
	// remaining is how many sessions the node of a drain owns, or is to own.
	remaining int
	// evacuated is how the last try to copy is; nil: none was begun, or nobody tells.
	evacuated *kvtierv1.EvacuateAnswer
	stalls    int // rounds and tries that got nowhere
}

// decision is what is to be done about a plan now.
type decision struct {
	results   []*kvtierv1.StepResult
	begin     []int              // moves to begin
	rate      int64              // bytes a second of each; 0: no limit
	turn      kvtierv1.PlanState // state to enter; 0: none
	why       string             // of turn
	again     bool               // plan the next round
	evacuate  bool               // have the node copy, or go on with it
	leftBytes uint64             // of turn
	doing     string             // in one line
}

const (
	running   = kvtierv1.PlanState_PLAN_STATE_RUNNING
	paused    = kvtierv1.PlanState_PLAN_STATE_PAUSED
	done      = kvtierv1.PlanState_PLAN_STATE_DONE
	failed    = kvtierv1.PlanState_PLAN_STATE_FAILED
	drainKind = kvtierv1.PlanKind_PLAN_KIND_DRAIN
	moveKind  = kvtierv1.StepKind_STEP_KIND_MOVE
	copyKind  = kvtierv1.StepKind_STEP_KIND_COPY

	stepPending = kvtierv1.StepState_STEP_STATE_PENDING
	stepRunning = kvtierv1.StepState_STEP_STATE_RUNNING
	stepDone    = kvtierv1.StepState_STEP_STATE_DONE
	stepFailed  = kvtierv1.StepState_STEP_STATE_FAILED
	stepSkipped = kvtierv1.StepState_STEP_STATE_SKIPPED

	nodeUp   = kvtierv1.NodeState_NODE_STATE_UP
	nodeDown = kvtierv1.NodeState_NODE_STATE_DOWN
)

// decide is a pure function of a plan that runs or pauses.
func decide(p *directory.Plan, v *seen) decision {
	d := decision{}
	if ms := p.GetOptions().GetDeadlineMs(); ms > 0 && v.millis >= p.GetStartedUnixMs()+int64(ms) {
		d.turn, d.why = failed, "the deadline has passed"
		return d
	}
	busy := map[placement.NodeID]int{}
	active, open, wait := 0, 0, ""
	var startable []int
	for i, x := range p.GetSteps() {
		if x.GetKind() != moveKind || directory.StepEnded(x) {
			continue
		}
		state, reason, w := judge(p, x, v.moves[i], v)
		if state != x.GetState() {
			d.results = append(d.results, &kvtierv1.StepResult{Step: uint32(i), State: state, Reason: reason, DoneBytes: v.moves[i].GetSentBytes()})
		}
		switch {
		case w != "":
			wait = w
			open++
		case state == stepRunning:
			active++
			open++
			busy[idOf(x.GetFrom())]++
			busy[idOf(x.GetTo())]++
		case state == stepPending:
			open++
			startable = append(startable, i)
		}
	}
	if wait == "" && p.GetKind() == drainKind {
		if state, name, _ := v.node(idOf(p.GetNode())); state == nodeDown {
			wait = name + ", which is drained, is down"
		}
	}
	switch {
	case wait != "":
		d.doing = wait
		if p.GetState() == running {
			d.turn, d.why = paused, wait
		}
		return d
	case p.GetState() == paused:
		d.turn = running
		return d
	case open > 0:
		d.beginMoves(p, startable, active, busy)
		d.doing = fmt.Sprintf("moving sessions, %d left in this round", open)
		return d
	}
	if p.GetKind() == drainKind {
		d.finishDrain(p, v)
	} else {
		d.finishRebalance(p)
	}
	return d
}

// judge says how a move is, why, and what it waits for.
func judge(p *directory.Plan, x *kvtierv1.PlanStep, m *kvtierv1.MoveProgress, v *seen) (state kvtierv1.StepState, reason, wait string) {
	at, known := v.session(x.GetSession())
	from, to := idOf(x.GetFrom()), idOf(x.GetTo())
	_, ownerName, _ := v.node(at.owner)
	target, targetName, since := v.node(to)
	switch {
	case !known:
		return stepSkipped, "it was closed, or its time is over", ""
	case at.owner == to:
		return stepDone, "", ""
	case at.owner != from:
		return stepSkipped, "it is at " + ownerName + " by now", ""
	case x.GetState() == stepPending && p.GetKind() != drainKind && x.GetEpoch() != at.epoch:
		return stepSkipped, "it moved meanwhile", ""
	case m.GetEnded():
		return stepFailed, "the move ended: " + m.GetWhy(), ""
	case target == nodeDown && since < downPatience:
		return x.GetState(), "", targetName + ", which sessions move to, is down"
	case target != nodeUp:
		return stepFailed, targetName + " takes nothing: it is down, or taken out", ""
	}
	if source, name, long := v.node(from); source == nodeDown && p.GetKind() != drainKind {
		if long < downPatience {
			return x.GetState(), "", name + ", which sessions move from, is down"
		}
		return stepFailed, name + " is down", ""
	}
	return x.GetState(), "", ""
}

// beginMoves chooses what begins now. With a limit a node has one move at a time, which
// has all of its rate.
func (d *decision) beginMoves(p *directory.Plan, startable []int, active int, busy map[placement.NodeID]int) {
	o := p.GetOptions()
	node, total := int64(o.GetNodeBytesPerSecond()), int64(o.GetTotalBytesPerSecond())
	each, most := movesPerNode, movesAtOnce
	if node > 0 || total > 0 {
		each = 1
	}
	d.rate = node
	if total > 0 {
		if node == 0 || node >= total {
			most, d.rate = 1, total
		} else {
			most = min(most, int(total/node))
		}
	}
	for _, i := range startable {
		x := p.GetSteps()[i]
		from, to := idOf(x.GetFrom()), idOf(x.GetTo())
		if active >= most || busy[from] >= each || busy[to] >= each {
			continue
		}
		active++
		busy[from]++
		busy[to]++
		d.begin = append(d.begin, i)
	}
}

func (d *decision) finishRebalance(p *directory.Plan) {
	bad, why := 0, ""
	for _, x := range p.GetSteps() {
		if x.GetState() == stepFailed {
			bad++
			why = x.GetSession() + ": " + x.GetReason()
		}
	}
	d.turn = done
	if bad > 0 {
		d.turn, d.why = failed, fmt.Sprintf("%d of %d sessions stayed: %s", bad, len(p.GetSteps()), why)
	}
}

// finishDrain goes on when no move of the round is left.
func (d *decision) finishDrain(p *directory.Plan, v *seen) {
	if v.remaining > 0 {
		if v.stalls >= maxStalls {
			d.turn, d.why = failed, fmt.Sprintf("%d sessions could not be moved: %s", v.remaining, lastReason(p))
			return
		}
		d.again, d.doing = true, fmt.Sprintf("planning where %d sessions go", v.remaining)
		return
	}
	e := v.evacuated
	switch {
	case e == nil || !e.GetEnded():
		d.evacuate = true
		d.doing = "copying what no other node holds"
	case e.GetLeftBlocks() == 0:
		d.turn = done
		if e.GetDroppedBlocks() > 0 {
			d.why = fmt.Sprintf("%d cold blocks were given up, as was asked", e.GetDroppedBlocks())
		}
		d.settleCopies(p, e)
	case v.stalls >= maxStalls:
		d.turn, d.why = failed, fmt.Sprintf("%d blocks could not be copied: %s", e.GetLeftBlocks(), e.GetWhy())
		d.settleCopies(p, e)
	default:
		d.again, d.doing = true, fmt.Sprintf("%d blocks are left: planning where they go", e.GetLeftBlocks())
	}
	d.leftBytes = e.GetLeftBytes()
}

// settleCopies says what became of the copies and drops of a round.
func (d *decision) settleCopies(p *directory.Plan, e *kvtierv1.EvacuateAnswer) {
	took := map[placement.NodeID]uint64{}
	for _, t := range e.GetTargets() {
		took[idOf(t.GetNode())] += t.GetBytes()
	}
	dropped := e.GetDroppedBytes()
	for i, x := range p.GetSteps() {
		if x.GetKind() == moveKind || directory.StepEnded(x) {
			continue
		}
		r := &kvtierv1.StepResult{Step: uint32(i), State: stepDone}
		if x.GetKind() == copyKind {
			to := idOf(x.GetTo())
			r.DoneBytes, took[to] = took[to], 0
		} else {
			r.DoneBytes, dropped = dropped, 0
		}
		if e.GetLeftBlocks() > 0 {
			r.State, r.Reason = stepFailed, e.GetWhy()
		}
		d.results = append(d.results, r)
	}
}

func lastReason(p *directory.Plan) string {
	why := "no node that is up has room"
	for _, x := range p.GetSteps() {
		if x.GetState() == stepFailed {
			why = x.GetReason()
		}
	}
	return why
}

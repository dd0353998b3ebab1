package plans

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// Bounds of driving.
const (
	moveWithin   = 30 * time.Minute // one session
	stallPause   = 2 * time.Second  // before a round or a try that got nowhere is repeated
	rateOver     = 5 * time.Second  // bandwidth is measured
	maxRateMarks = 64
)

// driver carries out one plan while this node leads.
type driver struct {
	r    *Runner
	plan []byte

	// Owned by run.
	attempt  uint32 // to copy
	stalls   int
	progress int64 // sessions moved and bytes copied, when a round began last
	copied   int64 // by earlier tries
	last     *kvtierv1.EvacuateAnswer
	marks    []mark

	mu   sync.Mutex
	live *kvtierv1.PlanLive
}

// mark is how many bytes had been copied at a time.
type mark struct {
	at    time.Time
	bytes int64
}

func (d *driver) run() {
	d.attempt = 1
	tick := time.NewTicker(driveEvery)
	defer tick.Stop()
	for {
		p := d.r.plan(d.plan)
		switch {
		case p == nil:
			return
		case directory.PlanEnded(p):
			d.stop(p)
			return
		case !d.r.leads():
			return
		}
		d.step(p)
		select {
		case <-d.r.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// stop ends the moves of a plan that has ended: who ended it may not have known of them.
func (d *driver) stop(p *directory.Plan) {
	if p.GetState() == done {
		return
	}
	for _, x := range p.GetSteps() {
		if x.GetKind() != moveKind || x.GetState() != stepSkipped {
			continue
		}
		ctx, cancel := context.WithTimeout(d.r.ctx, askWithin)
		if at, known := d.r.session(x.GetSession()); known && at.owner == idOf(x.GetFrom()) {
			if m, err := d.r.cfg.Mover.MoveProgress(ctx, x.GetSession()); err == nil && !m.GetEnded() {
				if err := d.r.cfg.Mover.CancelMove(ctx, x.GetSession()); err != nil && !errors.Is(err, paging.ErrNotFound) {
					d.r.log.Warn("the move of a session goes on although its plan has ended", "session", x.GetSession(), "err", err)
				}
			}
		}
		cancel()
	}
}

// step looks at the plan once, and does what is to be done.
func (d *driver) step(p *directory.Plan) {
	ctx := d.r.ctx
	v := d.see(ctx, p)
	what := decide(p, v)
	if len(what.results) > 0 {
		if _, err := d.r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_StepPlan{
			StepPlan: &kvtierv1.StepPlan{Plan: d.plan, Round: p.GetRound(), Results: what.results}}}); err != nil {
			return // without a quorum nothing goes on
		}
	}
	switch {
	case what.turn != 0:
		d.turn(ctx, p, &what)
	case what.again:
		d.nextRound(ctx, p)
	case what.evacuate:
		d.evacuate(ctx, p)
	}
	d.begin(ctx, p, &what)
	d.publish(p, v, &what)
}

func (d *driver) turn(ctx context.Context, p *directory.Plan, what *decision) {
	c := &kvtierv1.TurnPlan{Plan: d.plan, State: what.turn, Why: what.why, LeftBytes: what.leftBytes}
	if what.turn == failed {
		if p.GetKind() == drainKind {
			c.LeftSessions, c.LeftBytes = d.r.left(ctx, p)
			c.Why = fmt.Sprintf("%s; %d sessions and %d bytes that no other node holds are left", what.why, c.GetLeftSessions(), c.GetLeftBytes())
		}
	}
	if _, err := d.r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_TurnPlan{TurnPlan: c}}); err == nil {
		d.r.log.Info("plan changed", "plan", fmt.Sprintf("%x", d.plan[:4]), "state", what.turn.String(), "why", c.GetWhy())
	}
}

// left is what a drain has not done: sessions, and bytes that no other node holds.
func (r *Runner) left(ctx context.Context, p *directory.Plan) (sessions, bytes uint64) {
	node := idOf(p.GetNode())
	var a kvtierv1.NodeUsageAnswer
	if err := r.ask(ctx, node, methodUsage, &kvtierv1.NodeUsageQuery{HotWithinMs: p.GetOptions().GetHotWithinMs()}, &a); err == nil {
		bytes = a.GetSoleHotBytes()
		if !p.GetOptions().GetDropCold() {
			bytes += a.GetSoleColdBytes()
		}
	}
	return uint64(r.remaining(node)), bytes
}

// session is where a session is, as the replica has it.
func (r *Runner) session(name string) (at place, known bool) {
	r.directory().Read(func(s *directory.State) {
		if x, ok := s.Session(name); ok {
			at, known = place{idOf(x.GetOwner()), x.GetEpoch()}, true
		}
	})
	return at, known
}

// see gathers what a decision is made from.
func (d *driver) see(ctx context.Context, p *directory.Plan) *seen {
	r := d.r
	v := &seen{moves: map[int]*kvtierv1.MoveProgress{}, session: r.session, stalls: d.stalls, evacuated: d.last}
	nodes := map[placement.NodeID]directory.Node{}
	r.directory().Read(func(s *directory.State) {
		v.millis = s.NowMillis()
		for _, n := range s.Nodes() {
			nodes[n.ID] = n
		}
	})
	v.node = func(id placement.NodeID) (kvtierv1.NodeState, string, time.Duration) {
		n, ok := nodes[id]
		if !ok {
			return 0, id.Short(), 0
		}
		return n.State, n.Name, time.Duration(v.millis-n.SinceMillis) * time.Millisecond
	}
	open := false
	for i, x := range p.GetSteps() {
		if x.GetKind() != moveKind || directory.StepEnded(x) {
			continue
		}
		open = true
		if x.GetState() != stepRunning {
			continue
		}
		ask, cancel := context.WithTimeout(ctx, askWithin)
		if m, err := r.cfg.Mover.MoveProgress(ask, x.GetSession()); err == nil {
			v.moves[i] = m
		} else if errors.Is(err, paging.ErrNotFound) { // its owner has started anew: so is the move
			v.moves[i] = &kvtierv1.MoveProgress{Ended: true, Why: "its node does not remember it"}
		}
		cancel()
	}
	if p.GetKind() == drainKind && !open {
		v.remaining = r.remaining(idOf(p.GetNode()))
	}
	return v
}

// remaining counts the sessions that a node owns, or that move to it.
func (r *Runner) remaining(node placement.NodeID) (n int) {
	r.eachSession(func(x *directory.Session, _ int64) {
		if idOf(x.GetOwner()) == node || len(x.GetTarget()) > 0 && idOf(x.GetTarget()) == node {
			n++
		}
	})
	return n
}

// begin begins moves, and says so first: a leader that dies in between leaves a step
// that the next one finds without a move, and that fails and is planned again.
func (d *driver) begin(ctx context.Context, p *directory.Plan, what *decision) {
	if len(what.begin) == 0 {
		return
	}
	var begun []*kvtierv1.StepResult
	for _, i := range what.begin {
		x := p.GetSteps()[i]
		ask, cancel := context.WithTimeout(ctx, askWithin)
		err := d.r.cfg.Mover.BeginMove(ask, x.GetSession(), idOf(x.GetTo()), what.rate, d.within(p))
		if err != nil {
			if m, already := d.r.cfg.Mover.MoveProgress(ask, x.GetSession()); already == nil && !m.GetEnded() {
				err = nil // it moves: by a leader before this one, or somebody else
			}
		}
		cancel()
		result := &kvtierv1.StepResult{Step: uint32(i), State: stepRunning}
		switch {
		case errors.Is(err, paging.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), ctx.Err() != nil:
			continue // it is tried again
		case err != nil:
			result.State, result.Reason = stepFailed, err.Error()
		}
		begun = append(begun, result)
	}
	if len(begun) == 0 {
		return
	}
	if _, err := d.r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_StepPlan{
		StepPlan: &kvtierv1.StepPlan{Plan: d.plan, Round: p.GetRound(), Results: begun}}}); err != nil {
		d.r.log.Warn("plan does not go on", "err", err)
	}
}

// within is how long a move may take: no longer than its plan.
func (d *driver) within(p *directory.Plan) time.Duration {
	within := moveWithin
	if ms := p.GetOptions().GetDeadlineMs(); ms > 0 {
		var now int64
		d.r.directory().Read(func(s *directory.State) { now = s.NowMillis() })
		within = min(within, time.Duration(p.GetStartedUnixMs()+int64(ms)-now)*time.Millisecond)
	}
	return max(within, time.Second)
}

// got is what a drain has got to.
func (d *driver) got(p *directory.Plan) (n int64) {
	for _, x := range p.GetSteps() {
		if x.GetKind() == moveKind && x.GetState() == stepDone {
			n++
		}
	}
	return n + int64(p.GetMovedSessions()) + d.copied + int64(d.last.GetCopiedBytes())
}

// nextRound plans anew where the rest goes.
func (d *driver) nextRound(ctx context.Context, p *directory.Plan) {
	if n := d.got(p); n > d.progress {
		d.progress, d.stalls = n, 0
	} else if d.stalls++; !pause(ctx, stallPause) {
		return
	}
	u, err := d.r.gather(ctx, p.GetOptions(), idOf(p.GetNode()))
	if err != nil {
		d.r.log.Warn("a drain is not planned anew", "err", err)
		return
	}
	plan, err := placement.PlanDrain(u, []placement.NodeID{idOf(p.GetNode())}, toOptions(p.GetOptions()))
	if err != nil {
		d.r.log.Warn("a drain is not planned anew", "err", err)
		return
	}
	d.copied += int64(d.last.GetCopiedBytes())
	if d.last.GetEnded() {
		d.attempt++
	}
	d.last = nil
	if _, err := d.r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_RoundPlan{
		RoundPlan: &kvtierv1.RoundPlan{Plan: d.plan, Round: p.GetRound() + 1, Steps: stepsOf(plan)}}}); err != nil {
		d.r.log.Warn("a drain is not planned anew", "err", err)
	}
}

// evacuate has the node copy, and asks how far it is.
func (d *driver) evacuate(ctx context.Context, p *directory.Plan) {
	o := p.GetOptions()
	q := &kvtierv1.EvacuateQuery{Plan: d.plan, Attempt: d.attempt, BytesPerSecond: o.GetNodeBytesPerSecond(), DropCold: o.GetDropCold(), HotWithinMs: o.GetHotWithinMs()}
	if total := o.GetTotalBytesPerSecond(); total > 0 && (q.BytesPerSecond == 0 || total < q.BytesPerSecond) {
		q.BytesPerSecond = total
	}
	for _, x := range p.GetSteps() {
		if x.GetKind() == copyKind {
			q.Targets = append(q.Targets, &kvtierv1.EvacuateTarget{Node: x.GetTo(), Bytes: x.GetBytes()})
		}
	}
	a := &kvtierv1.EvacuateAnswer{}
	if err := d.r.ask(ctx, idOf(p.GetNode()), methodEvacuate, q, a); err == nil {
		d.last = a
	}
}

// publish has those who ask know how far the plan is.
func (d *driver) publish(p *directory.Plan, v *seen, what *decision) {
	live := &kvtierv1.PlanLive{DoneBytes: p.GetCopiedBytes() + uint64(d.copied), Doing: what.doing}
	for i, x := range p.GetSteps() {
		if x.GetKind() != moveKind {
			continue
		}
		live.Bytes += x.GetBytes()
		if directory.StepEnded(x) {
			live.DoneBytes += x.GetDoneBytes()
		} else {
			live.DoneBytes += v.moves[i].GetSentBytes()
		}
	}
	live.DoneBytes += d.last.GetCopiedBytes()
	if d.last != nil {
		live.Bytes += d.last.GetCopiedBytes() + d.last.GetLeftBytes()
	} else {
		for _, x := range p.GetSteps() {
			if x.GetKind() == copyKind {
				live.Bytes += x.GetBytes()
			}
		}
	}
	now := time.Now()
	d.marks = append(d.marks, mark{now, int64(live.GetDoneBytes())})
	for len(d.marks) > maxRateMarks || len(d.marks) > 2 && now.Sub(d.marks[0].at) > rateOver {
		d.marks = d.marks[1:]
	}
	if took := now.Sub(d.marks[0].at).Seconds(); took > 0 {
		live.BytesPerSecond = uint64(max(0, float64(int64(live.GetDoneBytes())-d.marks[0].bytes)/took))
	}
	if rest := int64(live.GetBytes()) - int64(live.GetDoneBytes()-p.GetCopiedBytes()-uint64(d.copied)); rest > 0 && live.GetBytesPerSecond() > 0 {
		live.Left = durationpb.New(time.Duration(float64(rest) / float64(live.GetBytesPerSecond()) * float64(time.Second)))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live = live
}

// answerLive tells how a plan that this node drives is going.
func (r *Runner) answerLive(_ context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	var q kvtierv1.PlanLiveQuery
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	r.mu.Lock()
	d := r.mu.drivers[string(q.GetPlan())]
	r.mu.Unlock()
	if d == nil {
		return nil, fmt.Errorf("this node does not drive that plan: %w", paging.ErrNotFound)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return proto.Marshal(d.live)
}

package plans

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// maxOption bounds times among the options.
const maxOption = 30 * 24 * time.Hour

func checkOptions(o *kvtierv1.PlanOptions) error {
	if most := uint64(maxOption.Milliseconds()); o.GetDeadlineMs() > most || o.GetHotWithinMs() > most {
		return fmt.Errorf("a deadline or a time that is hot is at most %v: %w", maxOption, paging.ErrInvalid)
	}
	if o.GetNodeBytesPerSecond() > 1<<50 || o.GetTotalBytesPerSecond() > 1<<50 {
		return fmt.Errorf("a limit of bandwidth is at most 1 PiB/s: %w", paging.ErrInvalid)
	}
	return nil
}

func toOptions(o *kvtierv1.PlanOptions) placement.Options {
	return placement.Options{
		DropCold: o.GetDropCold(), HotWithin: hotWithin(o.GetHotWithinMs()), BytesPerSecond: int64(o.GetNodeBytesPerSecond()), //nolint:gosec // checked
		MaxMoves: directory.MaxPlanSteps / 2, // the other half is for copies
	}
}

// stepsOf are the steps of a plan, at most as many as the directory takes.
func stepsOf(p *placement.Plan) (out []*kvtierv1.PlanStep) {
	for _, x := range proposal(p).GetSteps() {
		if len(out) < directory.MaxPlanSteps {
			out = append(out, x.GetStep())
		}
	}
	return out
}

// proposal is a plan for those who look at it.
func proposal(p *placement.Plan) *kvtierv1.PlanProposal {
	out := &kvtierv1.PlanProposal{More: p.More, Bytes: uint64(p.Bytes)}
	if p.Expected > 0 {
		out.Expected = durationpb.New(p.Expected)
	}
	add := func(x *kvtierv1.PlanStep, lands placement.TierBytes) {
		out.Steps = append(out.Steps, &kvtierv1.PlannedStep{Step: x, HbmBytes: uint64(lands[placement.HBM]), RamBytes: uint64(lands[placement.RAM]), NvmeBytes: uint64(lands[placement.NVMe])})
	}
	for i := range p.Moves {
		m := &p.Moves[i]
		add(&kvtierv1.PlanStep{Kind: moveKind, Session: string(m.Session), Epoch: uint64(m.Epoch), From: bytes.Clone(m.From[:]), To: bytes.Clone(m.To[:]), Bytes: uint64(m.Bytes), Why: m.Why}, m.Lands)
	}
	for i := range p.Copies {
		c := &p.Copies[i]
		add(&kvtierv1.PlanStep{Kind: copyKind, From: bytes.Clone(c.From[:]), To: bytes.Clone(c.To[:]), Bytes: uint64(c.Bytes), Hot: c.Hot, Why: c.Why}, c.Lands)
	}
	for i := range p.Drops {
		x := &p.Drops[i]
		add(&kvtierv1.PlanStep{Kind: kvtierv1.StepKind_STEP_KIND_DROP, From: bytes.Clone(x.Node[:]), Bytes: uint64(x.Bytes), Why: x.Why}, placement.TierBytes{})
	}
	for i := range p.Unplaced {
		u := &p.Unplaced[i]
		out.Unplaced = append(out.Unplaced, &kvtierv1.PlanUnplaced{Session: string(u.Session), Node: bytes.Clone(u.Node[:]), Bytes: uint64(u.Bytes), Why: u.Why})
	}
	return out
}

// ProposeDrain plans how a node would be emptied, and changes nothing. Errors:
// paging.ErrInvalid; paging.ErrUnavailable: no other node is up, or a node does not answer.
func (r *Runner) ProposeDrain(ctx context.Context, node placement.NodeID, o *kvtierv1.PlanOptions) (*kvtierv1.PlanProposal, error) {
	if err := errors.Join(r.ready(), checkOptions(o)); err != nil {
		return nil, err
	}
	u, err := r.gather(ctx, o, node)
	if err != nil {
		return nil, err
	}
	p, err := placement.PlanDrain(u, []placement.NodeID{node}, toOptions(o))
	if errors.Is(err, placement.ErrNoTarget) || errors.Is(err, placement.ErrUnknownNode) {
		return nil, fmt.Errorf("%w: %w", err, paging.ErrUnavailable)
	} else if err != nil {
		return nil, err
	}
	return proposal(p), nil
}

// Drain begins to empty a node as proposed, and returns the id of the plan; of the one
// that runs, if one does. who is remembered. Errors as of ProposeDrain; paging.ErrUnavailable
// without a quorum, or if the node is down.
func (r *Runner) Drain(ctx context.Context, node placement.NodeID, p *kvtierv1.PlanProposal, o *kvtierv1.PlanOptions, who string) ([]byte, error) {
	if id := r.running(drainKind, node); id != nil {
		return id, nil
	}
	steps := make([]*kvtierv1.PlanStep, 0, len(p.GetSteps()))
	for _, x := range p.GetSteps()[:min(len(p.GetSteps()), directory.MaxPlanSteps)] {
		steps = append(steps, x.GetStep())
	}
	id, err := r.start(ctx, &kvtierv1.PlanRecord{Kind: drainKind, Node: node[:], Options: o, Who: who, Steps: steps})
	if errors.Is(err, paging.ErrNoSpace) {
		if other := r.running(drainKind, node); other != nil {
			return other, nil // somebody was faster
		}
	}
	return id, err
}

// running is the id of the plan of a kind that runs, of a drain that of a node; nil:
// none does.
func (r *Runner) running(kind kvtierv1.PlanKind, node placement.NodeID) (id []byte) {
	r.directory().Read(func(s *directory.State) {
		for _, p := range s.Plans() {
			if !directory.PlanEnded(p) && p.GetKind() == kind && (kind != drainKind || idOf(p.GetNode()) == node) {
				id = p.GetPlan()
			}
		}
	})
	return id
}

func (r *Runner) start(ctx context.Context, p *kvtierv1.PlanRecord) ([]byte, error) {
	p.Plan = make([]byte, 16)
	_, _ = rand.Read(p.Plan) // never fails
	result, err := r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_StartPlan{StartPlan: &kvtierv1.StartPlan{Plan: p}}})
	if err != nil {
		return nil, err
	}
	switch result {
	case directory.OK:
		return p.GetPlan(), r.await(ctx, p.GetPlan())
	case directory.Full:
		return nil, fmt.Errorf("a plan of that kind runs already: see kvtier rebalance status, kvtier nodes: %w", paging.ErrNoSpace)
	case directory.Stale:
		return nil, fmt.Errorf("the node is down, or has left: what it holds cannot be had: %w", paging.ErrUnavailable)
	case directory.Unknown:
		return nil, fmt.Errorf("the node is not in the cluster: %w", paging.ErrNotFound)
	}
	return nil, fmt.Errorf("the directory does not take the plan (%v): it has at most %d steps, each session once: %w", result, directory.MaxPlanSteps, paging.ErrInvalid)
}

// await waits until this node's replica knows a plan.
func (r *Runner) await(ctx context.Context, id []byte) error {
	for r.plan(id) == nil {
		if !pause(ctx, driveEvery/10) {
			return fmt.Errorf("this node's replica of the directory is behind: %w: %w", paging.ErrUnavailable, ctx.Err())
		}
	}
	return nil
}

// Undrain has a node take part again. Idempotent. Errors: paging.ErrNotFound,
// paging.ErrUnavailable.
func (r *Runner) Undrain(ctx context.Context, node placement.NodeID, who string) error {
	if err := r.ready(); err != nil {
		return err
	}
	result, err := r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_UndrainNode{UndrainNode: &kvtierv1.UndrainNode{Node: node[:], Who: who}}})
	switch {
	case err != nil:
		return err
	case result != directory.OK:
		return fmt.Errorf("node %s is not in the cluster: %w", node.Short(), paging.ErrNotFound)
	}
	return nil
}

// ProposeRebalance plans which sessions move, and changes nothing. Errors as of
// ProposeDrain.
func (r *Runner) ProposeRebalance(ctx context.Context, q *kvtierv1.PlanRebalanceRequest) (*kvtierv1.PlanProposal, error) {
	o := q.GetOptions()
	if err := errors.Join(r.ready(), checkOptions(o)); err != nil {
		return nil, err
	}
	for _, x := range []float64{q.GetWeightBytes(), q.GetWeightHotSessions(), q.GetWeightHitTraffic(), q.GetSlack()} {
		if !(x >= 0 && x <= 1e6) {
			return nil, fmt.Errorf("a weight or slack of %v: want 0 to 1,000,000: %w", x, paging.ErrInvalid)
		}
	}
	u, err := r.gather(ctx, o)
	if err != nil {
		return nil, err
	}
	options := toOptions(o)
	options.Weights = placement.Weights{Bytes: q.GetWeightBytes(), HotSessions: q.GetWeightHotSessions(), HitTraffic: q.GetWeightHitTraffic()}
	options.Slack, options.MaxMoves = q.GetSlack(), directory.MaxPlanSteps
	if n := q.GetMaxMoves(); n > 0 {
		options.MaxMoves = min(int(n), directory.MaxPlanSteps)
	}
	options.MaxBytes = int64(min(q.GetMaxBytes(), 1<<62)) //nolint:gosec // bounded
	p, err := placement.PlanRebalance(u, options)
	if err != nil {
		return nil, err
	}
	return proposal(p), nil
}

// Apply begins to carry a plan of moves out, and returns its id. Errors:
// paging.ErrInvalid, paging.ErrNoSpace if one runs, paging.ErrUnavailable.
func (r *Runner) Apply(ctx context.Context, steps []*kvtierv1.PlanStep, o *kvtierv1.PlanOptions, who string) ([]byte, error) {
	if err := errors.Join(r.ready(), checkOptions(o)); err != nil {
		return nil, err
	}
	return r.start(ctx, &kvtierv1.PlanRecord{Kind: kvtierv1.PlanKind_PLAN_KIND_REBALANCE, Options: o, Who: who, Steps: steps})
}

// Status tells how a plan is; without an id the rebalance that runs, or the last one.
// Errors: paging.ErrNotFound.
func (r *Runner) Status(ctx context.Context, id []byte) (*kvtierv1.PlanStatus, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	var p *directory.Plan
	out := &kvtierv1.PlanStatus{}
	r.directory().Read(func(s *directory.State) {
		if len(id) > 0 {
			p, _ = s.Plan(id)
		} else {
			for _, x := range s.Plans() {
				if x.GetKind() != drainKind && (p == nil || directory.PlanEnded(p) || !directory.PlanEnded(x)) {
					p = x
				}
			}
		}
		if n, ok := s.Node(idOf(p.GetNode())); ok {
			out.NodeName = n.Name
		}
	})
	if p == nil {
		return nil, fmt.Errorf("no such plan is known: %w", paging.ErrNotFound)
	}
	out.Record = p
	if directory.PlanEnded(p) {
		return out, nil
	}
	if leader, ok := r.directory().Leader(); ok {
		live := &kvtierv1.PlanLive{}
		if err := r.ask(ctx, leader, methodLive, &kvtierv1.PlanLiveQuery{Plan: p.GetPlan()}, live); err == nil {
			out.Live = live
		}
	}
	return out, nil
}

// Cancel ends a plan, without an id the rebalance that runs. Idempotent. Errors:
// paging.ErrNotFound, paging.ErrUnavailable.
func (r *Runner) Cancel(ctx context.Context, id []byte, who string) (*kvtierv1.PlanStatus, error) {
	st, err := r.Status(ctx, id)
	if err != nil {
		return nil, err
	}
	result, err := r.propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_TurnPlan{TurnPlan: &kvtierv1.TurnPlan{
		Plan: st.GetRecord().GetPlan(), State: kvtierv1.PlanState_PLAN_STATE_CANCELLED, Why: "cancelled", Who: who}}})
	if err != nil {
		return nil, err
	}
	if result == directory.OK {
		for {
			if p := r.plan(st.GetRecord().GetPlan()); p == nil || directory.PlanEnded(p) {
				break
			}
			if !pause(ctx, driveEvery/10) {
				return nil, fmt.Errorf("this node's replica of the directory is behind: %w: %w", paging.ErrUnavailable, ctx.Err())
			}
		}
	}
	return r.Status(ctx, st.GetRecord().GetPlan())
}

// Audit are the records of the audit trail since a time, at most so many of the latest,
// oldest first.
func (r *Runner) Audit(since time.Time, limit int) ([]*directory.AuditRecord, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	var out []*directory.AuditRecord
	r.directory().Read(func(s *directory.State) {
		s.Audit(func(x *directory.AuditRecord) {
			if since.IsZero() || x.GetUnixMs() >= since.UnixMilli() {
				out = append(out, x)
			}
		})
	})
	return out[max(0, len(out)-limit):], nil
}

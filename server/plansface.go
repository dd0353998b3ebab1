package server

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/plans"
)

// Times of those who look at a plan.
const (
	planPollEvery = 200 * time.Millisecond
	planTellEvery = time.Second
)

// operates returns who carries plans out.
func (s *admin) operates() (*plans.Runner, error) {
	if s.node.plans == nil {
		return nil, errAlone
	}
	return s.node.plans, nil
}

// tierBytes is budget and use of each tier, for planners.
func (n *node) tierBytes() (budget, used placement.TierBytes) {
	m := n.metrics()
	budget[placement.RAM], used[placement.RAM] = m.RAM.BudgetBytes, m.RAM.PageBytes
	if m.NVMe != nil {
		budget[placement.NVMe], used[placement.NVMe] = m.NVMe.BudgetBytes, m.NVMe.PageBytes
	}
	if m.HBM != nil {
		budget[placement.HBM], used[placement.HBM] = m.HBM.BudgetBytes, m.HBM.PageBytes
	}
	return budget, used
}

// DrainNode empties a node and tells how far that is.
func (s *admin) DrainNode(m *kvtierv1.DrainNodeRequest, stream grpc.ServerStreamingServer[kvtierv1.DrainNodeResponse]) error {
	r, err := s.operates()
	if err != nil {
		return err
	}
	ctx, cancel := sessionFace{s.node.sessions, s.node.intake}.untilStop(stream.Context())
	defer cancel()
	node, err := s.node.sessions.FindNode(m.GetNode())
	if err != nil {
		return err
	}
	p, err := r.ProposeDrain(ctx, node, m.GetOptions())
	if err != nil {
		return stopped(ctx, err)
	}
	if err := stream.Send(&kvtierv1.DrainNodeResponse{Message: &kvtierv1.DrainNodeResponse_Proposal{Proposal: p}}); err != nil || m.GetDryRun() {
		return err
	}
	id, err := r.Drain(ctx, node, p, m.GetOptions(), s.node.accounts.Who(ctx))
	if err != nil {
		return stopped(ctx, err)
	}
	return stopped(ctx, tellPlan(ctx, r, id, stream))
}

// tellPlan sends how a plan is until it has ended.
func tellPlan(ctx context.Context, r *plans.Runner, id []byte, stream grpc.ServerStreamingServer[kvtierv1.DrainNodeResponse]) error {
	tick := time.NewTicker(planPollEvery)
	defer tick.Stop()
	var last time.Time
	var before *kvtierv1.PlanStatus
	for {
		st, err := r.Status(ctx, id)
		if err != nil {
			return err
		}
		ended := directory.PlanEnded(st.GetRecord())
		if ended || time.Since(last) >= planTellEvery || !proto.Equal(st, before) {
			last, before = time.Now(), st
			if err := stream.Send(&kvtierv1.DrainNodeResponse{Message: &kvtierv1.DrainNodeResponse_Status{Status: st}}); err != nil || ended {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// UndrainNode has a node take part again.
func (s *admin) UndrainNode(ctx context.Context, m *kvtierv1.UndrainNodeRequest) (*kvtierv1.UndrainNodeResponse, error) {
	r, err := s.operates()
	if err != nil {
		return nil, err
	}
	node, err := s.node.sessions.FindNode(m.GetNode())
	if err != nil {
		return nil, err
	}
	out := &kvtierv1.UndrainNodeResponse{Node: node[:], Name: node.Short()}
	s.node.cluster.Directory().Read(func(st *directory.State) {
		if n, ok := st.Node(node); ok && n.Name != "" {
			out.Name = n.Name
		}
	})
	return out, r.Undrain(ctx, node, s.node.accounts.Who(ctx))
}

// PlanRebalance plans which sessions move.
func (s *admin) PlanRebalance(ctx context.Context, m *kvtierv1.PlanRebalanceRequest) (*kvtierv1.PlanRebalanceResponse, error) {
	r, err := s.operates()
	if err != nil {
		return nil, err
	}
	p, err := r.ProposeRebalance(ctx, m)
	return &kvtierv1.PlanRebalanceResponse{Proposal: p}, err
}

// ApplyPlan begins to carry a plan out.
func (s *admin) ApplyPlan(ctx context.Context, m *kvtierv1.ApplyPlanRequest) (*kvtierv1.ApplyPlanResponse, error) {
	r, err := s.operates()
	if err != nil {
		return nil, err
	}
	id, err := r.Apply(ctx, m.GetSteps(), m.GetOptions(), s.node.accounts.Who(ctx))
	return &kvtierv1.ApplyPlanResponse{Plan: id}, err
}

// GetPlan tells how a plan is.
func (s *admin) GetPlan(ctx context.Context, m *kvtierv1.GetPlanRequest) (*kvtierv1.GetPlanResponse, error) {
	r, err := s.operates()
	if err != nil {
		return nil, err
	}
	st, err := r.Status(ctx, m.GetPlan())
	return &kvtierv1.GetPlanResponse{Status: st}, err
}

// CancelPlan ends a plan.
func (s *admin) CancelPlan(ctx context.Context, m *kvtierv1.CancelPlanRequest) (*kvtierv1.CancelPlanResponse, error) {
	r, err := s.operates()
	if err != nil {
		return nil, err
	}
	st, err := r.Cancel(ctx, m.GetPlan(), s.node.accounts.Who(ctx))
	return &kvtierv1.CancelPlanResponse{Status: st}, err
}

// Bounds of ListAudit.
const (
	defaultAudit = 100
	maxAuditPage = 10_000
)

// ListAudit lists what was done.
func (s *admin) ListAudit(_ context.Context, m *kvtierv1.ListAuditRequest) (*kvtierv1.ListAuditResponse, error) {
	r, err := s.operates()
	if err != nil {
		return nil, err
	}
	limit := int(m.GetLimit())
	if limit == 0 {
		limit = defaultAudit
	}
	if limit > maxAuditPage {
		return nil, fmt.Errorf("limit is %d, at most %d: %w", limit, maxAuditPage, paging.ErrInvalid)
	}
	var since time.Time
	if m.GetSince() != nil {
		since = m.GetSince().AsTime()
	}
	records, err := r.Audit(since, limit)
	return &kvtierv1.ListAuditResponse{Records: records}, err
}

package client

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// PlanOptions bound how a plan is carried out. Zero fields do not bound.
type PlanOptions struct {
	NodeBytesPerSecond  int64         // that a node sends or receives
	TotalBytesPerSecond int64         // of all nodes together
	Deadline            time.Duration // after which it stops; what is left is told
	DropCold            bool          // of a drain: what was not used lately is given up
	HotWithin           time.Duration // after its last use something is hot; 0: a minute
}

func (o PlanOptions) encode() *kvtierv1.PlanOptions {
	return &kvtierv1.PlanOptions{
		NodeBytesPerSecond: uint64(max(0, o.NodeBytesPerSecond)), TotalBytesPerSecond: uint64(max(0, o.TotalBytesPerSecond)),
		DeadlineMs: uint64(max(0, o.Deadline.Milliseconds())), DropCold: o.DropCold, HotWithinMs: uint64(max(0, o.HotWithin.Milliseconds())),
	}
}

// PlanStep is one step of a plan.
type PlanStep struct {
	Kind      string `json:"kind"`    // "move", "copy" or "drop"
	Session   string `json:"session"` // "tenant/name" of a move
	Epoch     uint64 `json:"epoch"`   // that the session had
	From      string `json:"from"`    // node id, hex
	To        string `json:"to"`      // likewise; "": none
	Bytes     uint64 `json:"bytes"`   // expected
	Hot       bool   `json:"hot"`     // of a copy: used lately
	Why       string `json:"why"`
	State     string `json:"state"`  // "pending", "running", "done", "failed" or "skipped"; "": of a proposal
	Reason    string `json:"reason"` // why it was not done
	DoneBytes uint64 `json:"done_bytes"`

	HBMBytes  uint64 `json:"hbm_bytes"` // of a proposal: where they go
	RAMBytes  uint64 `json:"ram_bytes"`
	NVMeBytes uint64 `json:"nvme_bytes"`
}

// PlanUnplaced is what a plan cannot move.
type PlanUnplaced struct {
	Session string `json:"session"` // "": blocks of no session
	Node    string `json:"node"`    // id, hex
	Bytes   uint64 `json:"bytes"`
	Why     string `json:"why"`
}

// Proposal is a plan that nobody carries out yet.
type Proposal struct {
	Steps     []PlanStep     `json:"steps"`
	Unplaced  []PlanUnplaced `json:"unplaced"`
	More      bool           `json:"more"` // a bound ended it: another plan goes on after it
	Bytes     uint64         `json:"bytes"`
	ExpectedS float64        `json:"expected_s"` // 0: not known
}

// PlanStatus is a plan, and how far it is.
type PlanStatus struct {
	Plan         string     `json:"plan"`  // id, hex
	Kind         string     `json:"kind"`  // "drain" or "rebalance"
	Node         string     `json:"node"`  // of a drain: name
	State        string     `json:"state"` // "running", "paused", "done", "failed" or "cancelled"
	Why          string     `json:"why"`
	Who          string     `json:"who"` // started it
	Round        uint32     `json:"round"`
	Started      time.Time  `json:"started"`
	TookS        float64    `json:"took_s"`         // so far
	Sessions     int        `json:"sessions"`       // to be moved in this round
	Moved        uint64     `json:"moved_sessions"` // in all rounds
	Bytes        uint64     `json:"bytes"`          // to be copied in this round, as far as is known
	CopiedBytes  uint64     `json:"copied_bytes"`   // in all rounds
	Rate         uint64     `json:"bytes_per_second"`
	LeftS        float64    `json:"left_s"`        // expected; 0: not known
	LeftSessions uint64     `json:"left_sessions"` // when it ended
	LeftBytes    uint64     `json:"left_bytes"`    // likewise
	Doing        string     `json:"doing"`
	Steps        []PlanStep `json:"steps"` // of this round
}

// Ended reports whether the plan has ended.
func (p *PlanStatus) Ended() bool { return p.State != "running" && p.State != "paused" }

func lastWord(enum, prefix string) string { return strings.ToLower(strings.TrimPrefix(enum, prefix)) }

func stepOf(s *kvtierv1.PlanStep) PlanStep {
	out := PlanStep{
		Kind: lastWord(s.GetKind().String(), "STEP_KIND_"), Session: s.GetSession(), Epoch: s.GetEpoch(), From: hex.EncodeToString(s.GetFrom()),
		To: hex.EncodeToString(s.GetTo()), Bytes: s.GetBytes(), Hot: s.GetHot(), Why: s.GetWhy(), Reason: s.GetReason(), DoneBytes: s.GetDoneBytes(),
	}
	if s.GetState() != 0 {
		out.State = lastWord(s.GetState().String(), "STEP_STATE_")
	}
	return out
}

func proposalOf(p *kvtierv1.PlanProposal) *Proposal {
	out := &Proposal{Steps: []PlanStep{}, Unplaced: []PlanUnplaced{}, More: p.GetMore(), Bytes: p.GetBytes(), ExpectedS: p.GetExpected().AsDuration().Seconds()}
	for _, x := range p.GetSteps() {
		s := stepOf(x.GetStep())
		s.HBMBytes, s.RAMBytes, s.NVMeBytes = x.GetHbmBytes(), x.GetRamBytes(), x.GetNvmeBytes()
		out.Steps = append(out.Steps, s)
	}
	for _, u := range p.GetUnplaced() {
		out.Unplaced = append(out.Unplaced, PlanUnplaced{Session: u.GetSession(), Node: hex.EncodeToString(u.GetNode()), Bytes: u.GetBytes(), Why: u.GetWhy()})
	}
	return out
}

func planOf(st *kvtierv1.PlanStatus) *PlanStatus {
	p, live := st.GetRecord(), st.GetLive()
	out := &PlanStatus{
		Plan: hex.EncodeToString(p.GetPlan()), Kind: lastWord(p.GetKind().String(), "PLAN_KIND_"), Node: st.GetNodeName(), State: lastWord(p.GetState().String(), "PLAN_STATE_"),
		Why: p.GetWhy(), Who: p.GetWho(), Round: p.GetRound(), Started: time.UnixMilli(p.GetStartedUnixMs()).UTC(), Moved: p.GetMovedSessions(),
		CopiedBytes: p.GetCopiedBytes(), LeftSessions: p.GetLeftSessions(), LeftBytes: p.GetLeftBytes(), Doing: live.GetDoing(), Steps: []PlanStep{},
	}
	out.TookS = time.Since(out.Started).Seconds()
	if ms := p.GetEndedUnixMs(); ms > 0 {
		out.TookS = float64(ms-p.GetStartedUnixMs()) / 1e3
	}
	for _, x := range p.GetSteps() {
		s := stepOf(x)
		out.Bytes += s.Bytes
		if s.Kind != "drop" {
			out.CopiedBytes += s.DoneBytes
		}
		if s.Kind == "move" {
			out.Sessions++
			if s.State == "done" {
				out.Moved++
			}
		}
		out.Steps = append(out.Steps, s)
	}
	if live != nil {
		out.Bytes, out.CopiedBytes, out.Rate, out.LeftS = live.GetBytes(), live.GetDoneBytes(), live.GetBytesPerSecond(), live.GetLeft().AsDuration().Seconds()
	}
	return out
}

// Drain empties a node: its sessions move, what no other node holds is copied, and it
// leaves. tell is called with the proposal first, and then with how far it is; with dryRun
// the proposal is all, and nothing changes. It returns how the drain ended. It goes on if
// ctx ends. The call is bounded by ctx alone.
func (a *Admin) Drain(ctx context.Context, node string, o PlanOptions, dryRun bool, tell func(*Proposal, *PlanStatus)) (last *PlanStatus, err error) {
	stream, err := a.service.DrainNode(ctx, &kvtierv1.DrainNodeRequest{Node: node, DryRun: dryRun, Options: o.encode()})
	for err == nil {
		var m *kvtierv1.DrainNodeResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		if p := m.GetProposal(); p != nil {
			tell(proposalOf(p), nil)
			continue
		}
		last = planOf(m.GetStatus())
		tell(nil, last)
	}
	if errors.Is(err, io.EOF) {
		return last, nil
	}
	return last, fmt.Errorf("drain %s: %w", node, kvstatus.Err(err))
}

// Undrain has a node take part again, and returns its name. Idempotent.
func (a *Admin) Undrain(ctx context.Context, node string) (name string, err error) {
	resp, err := ask(ctx, a, "undrain "+node, a.service.UndrainNode, &kvtierv1.UndrainNodeRequest{Node: node})
	return resp.GetName(), err
}

// RebalanceRequest says what a balance is about. Weights of 0 for all: bytes alone.
type RebalanceRequest struct {
	Bytes, HotSessions, HitTraffic float64 // weights
	Slack                          float64 // how far above its share a node may be; 0: 0.1
	MaxMoves                       int     // 0: 2,048, the most
	MaxBytes                       int64   // 0: no limit
	Options                        PlanOptions
}

// PlanRebalance plans which sessions move, and changes nothing.
func (a *Admin) PlanRebalance(ctx context.Context, r RebalanceRequest) (*Proposal, error) {
	resp, err := ask(ctx, a, "plan a rebalance", a.service.PlanRebalance, &kvtierv1.PlanRebalanceRequest{
		WeightBytes: r.Bytes, WeightHotSessions: r.HotSessions, WeightHitTraffic: r.HitTraffic, Slack: r.Slack,
		MaxMoves: uint32(max(0, r.MaxMoves)), MaxBytes: uint64(max(0, r.MaxBytes)), Options: r.Options.encode(), //nolint:gosec // the node checks
	})
	if err != nil {
		return nil, err
	}
	return proposalOf(resp.GetProposal()), nil
}

// ApplyPlan begins to carry moves out, in their order, and returns the id of the plan.
// ErrNoSpace: one runs already.
func (a *Admin) ApplyPlan(ctx context.Context, steps []PlanStep, o PlanOptions) (id string, err error) {
	req := &kvtierv1.ApplyPlanRequest{Options: o.encode()}
	for i := range steps {
		s := &steps[i]
		from, fromErr := hex.DecodeString(s.From)
		to, toErr := hex.DecodeString(s.To)
		if s.Kind != "move" || fromErr != nil || toErr != nil {
			return "", fmt.Errorf("step %d is no move from a node to another: %w", i, paging.ErrInvalid)
		}
		req.Steps = append(req.Steps, &kvtierv1.PlanStep{Kind: kvtierv1.StepKind_STEP_KIND_MOVE, Session: s.Session, Epoch: s.Epoch, From: from, To: to, Bytes: s.Bytes, Why: s.Why})
	}
	resp, err := ask(ctx, a, "apply a plan", a.service.ApplyPlan, req)
	return hex.EncodeToString(resp.GetPlan()), err
}

// Plan tells how a plan is; without an id the rebalance that runs, or the last one.
func (a *Admin) Plan(ctx context.Context, id string) (*PlanStatus, error) {
	b, err := hex.DecodeString(id)
	if err != nil {
		return nil, fmt.Errorf("plan %q is not hex: %w", id, paging.ErrInvalid)
	}
	resp, err := ask(ctx, a, "plan", a.service.GetPlan, &kvtierv1.GetPlanRequest{Plan: b})
	if err != nil {
		return nil, err
	}
	return planOf(resp.GetStatus()), nil
}

// CancelPlan ends a plan; without an id the rebalance that runs. Idempotent.
func (a *Admin) CancelPlan(ctx context.Context, id string) (*PlanStatus, error) {
	b, err := hex.DecodeString(id)
	if err != nil {
		return nil, fmt.Errorf("plan %q is not hex: %w", id, paging.ErrInvalid)
	}
	resp, err := ask(ctx, a, "cancel a plan", a.service.CancelPlan, &kvtierv1.CancelPlanRequest{Plan: b})
	if err != nil {
		return nil, err
	}
	return planOf(resp.GetStatus()), nil
}

// AuditRecord is one record of the audit trail.
type AuditRecord struct {
	Number  uint64    `json:"number"`
	Time    time.Time `json:"time"`
	Who     string    `json:"who"` // "cluster": the nodes among themselves
	What    string    `json:"what"`
	Subject string    `json:"subject"`
	Outcome string    `json:"outcome"`
}

// Audit lists what was done since a time, at most so many of the latest, oldest first.
// Zero time: all that is kept. limit 0: 100.
func (a *Admin) Audit(ctx context.Context, since time.Time, limit int) ([]AuditRecord, error) {
	req := &kvtierv1.ListAuditRequest{Limit: uint32(max(0, limit))} //nolint:gosec // the node checks
	if !since.IsZero() {
		req.Since = timestamppb.New(since)
	}
	resp, err := ask(ctx, a, "audit", a.service.ListAudit, req)
	if err != nil {
		return nil, err
	}
	out := []AuditRecord{}
	for _, x := range resp.GetRecords() {
		out = append(out, AuditRecord{Number: x.GetNumber(), Time: time.UnixMilli(x.GetUnixMs()).UTC(), Who: x.GetWho(), What: x.GetWhat(), Subject: x.GetSubject(), Outcome: x.GetOutcome()})
	}
	return out, nil
}

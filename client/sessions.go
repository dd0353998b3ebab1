package client

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// SessionInfo is a session as it is now.
type SessionInfo struct {
	Session      string       `json:"session"`
	Tenant       string       `json:"tenant"`
	Namespace    string       `json:"namespace"` // id, hex
	Model        string       `json:"model"`     // "": the node does not know the namespace
	Owner        string       `json:"owner"`     // node id, hex
	OwnerName    string       `json:"owner_name"`
	OwnerAddress string       `json:"owner_address"` // of its gRPC port; "": it has none
	OwnerUp      bool         `json:"owner_up"`      // as the directory has it; draining nodes are up
	Epoch        uint64       `json:"epoch"`
	State        string       `json:"state"` // "active", "migrating" or "frozen"
	Target       string       `json:"target"`
	TargetName   string       `json:"target_name"` // while it moves
	SecondName   string       `json:"second_name"` // keeps the chain beside the owner; "": nobody does
	Blocks       uint64       `json:"blocks"`
	Tokens       uint64       `json:"tokens"`
	Priority     uint32       `json:"priority"`
	TTLS         float64      `json:"ttl_s"` // after its last use; 0: no end
	IdleS        float64      `json:"idle_s"`
	Opened       time.Time    `json:"opened"`
	Parent       string       `json:"parent"` // that it goes on from; "": none
	Moves        uint32       `json:"moves"`
	AtOwner      []TierAmount `json:"at_owner"`      // its blocks at the owner, by fastest tier; none: not asked, or no answer
	AbsentBlocks uint64       `json:"absent_blocks"` // that the owner does not have; valid with at_owner
}

// TierAmount is what a tier has of something.
type TierAmount struct {
	Tier   string `json:"tier"`
	Blocks uint64 `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
}

func sessionOf(s *kvtierv1.SessionInfo) SessionInfo {
	out := SessionInfo{
		Session: s.GetSession(), Tenant: s.GetTenant(), Namespace: hex.EncodeToString(s.GetNamespaceId()), Model: s.GetModel(),
		Owner: hex.EncodeToString(s.GetOwner()), OwnerName: s.GetOwnerName(), OwnerAddress: s.GetOwnerAddress(), OwnerUp: s.GetOwnerUp(), Epoch: s.GetEpoch(),
		State: sessionState(s.GetState()), Target: hex.EncodeToString(s.GetTarget()), TargetName: s.GetTargetName(), SecondName: s.GetSecondName(),
		Blocks: s.GetBlocks(), Tokens: s.GetTokens(), Priority: s.GetRetention().GetPriority(), TTLS: s.GetRetention().GetTtl().AsDuration().Seconds(),
		IdleS: s.GetIdle().AsDuration().Seconds(), Opened: s.GetOpened().AsTime(), Parent: s.GetParent(), Moves: s.GetMoves(),
		AtOwner: []TierAmount{}, AbsentBlocks: s.GetAbsentBlocks(),
	}
	for _, t := range s.GetAtOwner() {
		out.AtOwner = append(out.AtOwner, TierAmount{Tier: Tier(t.GetTier()).String(), Blocks: t.GetBlocks(), Bytes: t.GetBytes()})
	}
	return out
}

func sessionState(s kvtierv1.SessionState) string { return word(s.String(), "SESSION_STATE_") }

// SessionCalls are the calls about sessions, for engines (Client) and operators (Admin)
// alike: engines mean the sessions of their tenant, whatever Tenant says, operators those
// of Tenant. Safe for concurrent use. Errors are the sentinels of package paging:
// ErrNotFound, ErrDenied, ErrIncompatible (the node is of no cluster), ErrUnavailable.
type SessionCalls struct {
	unary  func(ctx context.Context, verb string, do func(context.Context, kvtierv1.SessionsServiceClient) error) error
	stream func(ctx context.Context) (context.Context, kvtierv1.SessionsServiceClient, context.CancelFunc, error)
}

// sessionCalls are those of an Admin.
func (a *Admin) sessionCalls() SessionCalls {
	service := kvtierv1.NewSessionsServiceClient(a.conn)
	return SessionCalls{
		unary: func(ctx context.Context, verb string, do func(context.Context, kvtierv1.SessionsServiceClient) error) error {
			ctx, cancel := within(ctx, a.timeout)
			defer cancel()
			if err := do(ctx, service); err != nil {
				return fmt.Errorf("%s: %w", verb, kvstatus.Err(err))
			}
			return nil
		},
		stream: func(ctx context.Context) (context.Context, kvtierv1.SessionsServiceClient, context.CancelFunc, error) {
			ctx, cancel := context.WithCancel(ctx)
			return ctx, service, cancel, nil
		},
	}
}

// sessionCalls are those of a Client, over whatever connection it has.
func (c *Client) sessionCalls() SessionCalls {
	return SessionCalls{
		unary: func(ctx context.Context, verb string, do func(context.Context, kvtierv1.SessionsServiceClient) error) error {
			l, err := c.up()
			if err != nil {
				return fmt.Errorf("%s: %w", verb, err)
			}
			return l.unary(ctx, verb, c.cfg.CallTimeout, func(ctx context.Context) error { return do(ctx, kvtierv1.NewSessionsServiceClient(l.conn)) })
		},
		stream: func(ctx context.Context) (context.Context, kvtierv1.SessionsServiceClient, context.CancelFunc, error) {
			l, err := c.up()
			if err != nil {
				return nil, nil, nil, err
			}
			ctx, cancel := context.WithCancel(ctx)
			stop := context.AfterFunc(l.ctx, cancel)
			return ctx, kvtierv1.NewSessionsServiceClient(l.conn), func() { stop(); cancel() }, nil
		},
	}
}

// askSessions makes one call.
func askSessions[Req, Resp any](ctx context.Context, a SessionCalls, verb string,
	call func(kvtierv1.SessionsServiceClient, context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req) (resp *Resp, err error) {
	err = a.unary(ctx, verb, func(ctx context.Context, service kvtierv1.SessionsServiceClient) (err error) {
		resp, err = call(service, ctx, req)
		return err
	})
	return resp, err
}

// SessionFilter says which sessions are meant.
type SessionFilter struct {
	Tenant string // "": the caller's; all for operators
	Node   string // that owns them: name, or hex of at least 4 digits of its id
	State  string // "active", "migrating" or "frozen"; "": any
	Idle   time.Duration
	Limit  int  // 0: all
	Usage  bool // ask the owners where the blocks are
}

// listPage is how many sessions are asked for in one call.
const listPage = 500

// Sessions lists sessions in order of tenant and name. more: there are more than Limit.
func (a SessionCalls) Sessions(ctx context.Context, f SessionFilter) (out []SessionInfo, more bool, err error) {
	req := &kvtierv1.ListSessionsRequest{Tenant: f.Tenant, Node: f.Node, Usage: f.Usage, PageSize: listPage}
	if f.State != "" {
		s, ok := kvtierv1.SessionState_value["SESSION_STATE_"+strings.ToUpper(f.State)]
		if !ok {
			return nil, false, fmt.Errorf("state %q: want active, migrating or frozen: %w", f.State, paging.ErrInvalid)
		}
		req.State = kvtierv1.SessionState(s)
	}
	if f.Idle > 0 {
		req.Idle = durationpb.New(f.Idle)
	}
	out = []SessionInfo{}
	for {
		if f.Limit > 0 {
			req.PageSize = uint32(min(listPage, f.Limit-len(out)))
		}
		resp, err := askSessions(ctx, a, "sessions", kvtierv1.SessionsServiceClient.ListSessions, req)
		if err != nil {
			return nil, false, err
		}
		for _, s := range resp.GetSessions() {
			out = append(out, sessionOf(s))
		}
		req.PageToken = resp.GetNextPageToken()
		if req.GetPageToken() == "" || f.Limit > 0 && len(out) >= f.Limit {
			return out, req.GetPageToken() != "", nil
		}
	}
}

// SessionRun is consecutive blocks of a session that are at the same places.
type SessionRun struct {
	First  uint64   `json:"first_block"`
	Blocks uint64   `json:"blocks"`
	Places []string `json:"places"` // none: nowhere
}

// SessionDetail is a session and where its blocks are.
type SessionDetail struct {
	SessionInfo
	Runs []SessionRun `json:"runs"`
}

// Session tells of one session and where its blocks are.
func (a SessionCalls) Session(ctx context.Context, tenant, session string) (*SessionDetail, error) {
	resp, err := askSessions(ctx, a, "session", kvtierv1.SessionsServiceClient.GetSession, &kvtierv1.GetSessionRequest{Session: session, Tenant: tenant, Usage: true, Placement: true})
	if err != nil {
		return nil, err
	}
	out := &SessionDetail{SessionInfo: sessionOf(resp.GetSession()), Runs: []SessionRun{}}
	for _, r := range resp.GetRuns() {
		out.Runs = append(out.Runs, SessionRun{First: r.GetFirstBlock(), Blocks: r.GetBlocks(), Places: append([]string{}, r.GetPlaces()...)})
	}
	return out, nil
}

// CloseSession ends a session. One that is not known is success.
func (a SessionCalls) CloseSession(ctx context.Context, tenant, session string) error {
	_, err := askSessions(ctx, a, "close session", kvtierv1.SessionsServiceClient.CloseSession, &kvtierv1.CloseSessionRequest{Session: session, Tenant: tenant})
	return err
}

// ShareSession opens a session that goes on from another after so many blocks (0: all).
func (a SessionCalls) ShareSession(ctx context.Context, tenant, session, fork string, blocks uint64) (*SessionInfo, error) {
	resp, err := askSessions(ctx, a, "share session", kvtierv1.SessionsServiceClient.ShareSession, &kvtierv1.ShareSessionRequest{Session: session, Tenant: tenant, Fork: fork, Blocks: blocks})
	if err != nil {
		return nil, err
	}
	info := sessionOf(resp.GetSession())
	return &info, nil
}

// RetainSession changes how long a session's blocks are worth keeping, those that it has
// included.
func (a SessionCalls) RetainSession(ctx context.Context, tenant, session string, r Retention) error {
	retention, err := r.wire()
	if err != nil {
		return fmt.Errorf("retain session: %w", err)
	}
	_, err = askSessions(ctx, a, "retain session", kvtierv1.SessionsServiceClient.RetainSession, &kvtierv1.RetainSessionRequest{Session: session, Tenant: tenant, Retention: retention})
	return err
}

// WatchSessions calls told with how sessions are (none named: all of the tenant, for
// operators without one all there are, at most 1,024 names), and then with each change,
// until ctx ends or the node goes away (paging.ErrUnavailable): watch again then. It
// returns why it ended, never nil.
func (a SessionCalls) WatchSessions(ctx context.Context, tenant string, sessions []string, told func(SessionEvent)) error {
	ctx, service, cancel, err := a.stream(ctx)
	if err != nil {
		return fmt.Errorf("watch sessions: %w", err)
	}
	defer cancel()
	stream, err := service.WatchSessions(ctx, &kvtierv1.WatchSessionsRequest{Sessions: sessions, Tenant: tenant})
	for err == nil {
		var m *kvtierv1.WatchSessionsResponse
		if m, err = stream.Recv(); err == nil {
			told(eventOf(m.GetEvent()))
		}
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("watch sessions: the node ended it: %w", paging.ErrUnavailable)
	}
	return fmt.Errorf("watch sessions: %w", kvstatus.Err(err))
}

// CancelMigration ends the move of a session, if there is one.
func (a SessionCalls) CancelMigration(ctx context.Context, tenant, session string) error {
	_, err := askSessions(ctx, a, "cancel migration", kvtierv1.SessionsServiceClient.CancelMigration, &kvtierv1.CancelMigrationRequest{Session: session, Tenant: tenant})
	return err
}

// MigrateRequest moves a session.
type MigrateRequest struct {
	Session, Tenant   string
	To                string // node: name, or hex of at least 4 digits of its id
	DryRun            bool
	MaxBytesPerSecond int64         // 0: no limit but the node's
	Deadline          time.Duration // of all of it; 0: 10 min
	Tier              Tier          // that pages go to; TierNone: RAM
}

// MovePlan is what a move would take.
type MovePlan struct {
	Session            SessionInfo `json:"session"`
	TargetName         string      `json:"target_name"`
	LackingBlocks      uint64      `json:"lacking_blocks"`
	LackingBytes       uint64      `json:"lacking_bytes"`
	LackingTokens      uint64      `json:"lacking_tokens"`
	NowhereBlocks      uint64      `json:"nowhere_blocks"`       // that nobody has any more
	CopyS              float64     `json:"copy_s"`               // 0: not known
	RecomputeS         float64     `json:"recompute_s"`          // 0: not known
	RecomputeIsCheaper bool        `json:"recompute_is_cheaper"` // expected
}

// MoveProgress is how far a move is.
type MoveProgress struct {
	State          string  `json:"state"`
	Ended          bool    `json:"ended"`
	Round          uint32  `json:"round"`
	LackedBytes    uint64  `json:"lacked_bytes"`
	SentBytes      uint64  `json:"sent_bytes"`
	LeftBytes      uint64  `json:"left_bytes"`
	BytesPerSecond uint64  `json:"bytes_per_s"`
	LeftS          float64 `json:"left_s"`
	PauseMS        float64 `json:"pause_ms"` // that appends were refused
	NowhereBlocks  uint64  `json:"nowhere_blocks"`
	Why            string  `json:"why"`   // it did not end well; "": it did, or has not ended
	Owner          string  `json:"owner"` // node id, hex
	Epoch          uint64  `json:"epoch"`
}

// Moved reports whether the session is at its target.
func (p *MoveProgress) Moved() bool { return p.State == "done" }

// MigrateSession moves a session and calls told with what it takes first, then with how
// far it is, until it has ended, which it returns. If ctx ends before that the move goes
// on. A dry run ends after the first call, with nil.
func (a SessionCalls) MigrateSession(ctx context.Context, r MigrateRequest, told func(*MovePlan, *MoveProgress)) (*MoveProgress, error) {
	req := &kvtierv1.MigrateSessionRequest{
		Session: r.Session, Tenant: r.Tenant, To: r.To, DryRun: r.DryRun, MaxBytesPerSecond: uint64(max(0, r.MaxBytesPerSecond)), Tier: kvtierv1.Tier(r.Tier),
	}
	if r.Deadline > 0 {
		req.Deadline = durationpb.New(r.Deadline)
	}
	ctx, service, cancel, err := a.stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	defer cancel()
	stream, err := service.MigrateSession(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", kvstatus.Err(err))
	}
	var last *MoveProgress
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return last, nil
		case err != nil:
			return last, fmt.Errorf("migrate: %w", kvstatus.Err(err))
		}
		if p := m.GetPlan(); p != nil {
			told(&MovePlan{
				Session: sessionOf(p.GetSession()), TargetName: p.GetTargetName(), LackingBlocks: p.GetLackingBlocks(), LackingBytes: p.GetLackingBytes(),
				LackingTokens: p.GetLackingTokens(), NowhereBlocks: p.GetNowhereBlocks(), CopyS: p.GetCopyTime().AsDuration().Seconds(),
				RecomputeS: p.GetRecomputeTime().AsDuration().Seconds(), RecomputeIsCheaper: p.GetRecomputeIsCheaper(),
			}, nil)
			continue
		}
		last = moveOf(m.GetProgress())
		told(nil, last)
	}
}

func moveOf(p *kvtierv1.MoveProgress) *MoveProgress {
	return &MoveProgress{
		State: p.GetState(), Ended: p.GetEnded(), Round: p.GetRound(), LackedBytes: p.GetLackedBytes(), SentBytes: p.GetSentBytes(), LeftBytes: p.GetLeftBytes(),
		BytesPerSecond: p.GetBytesPerSecond(), LeftS: p.GetLeft().AsDuration().Seconds(), PauseMS: float64(p.GetPause().AsDuration()) / float64(time.Millisecond),
		NowhereBlocks: p.GetNowhereBlocks(), Why: p.GetWhy(), Owner: hex.EncodeToString(p.GetOwner()), Epoch: p.GetEpoch(),
	}
}

package sessions

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Bounds of moves.
const (
	maxRunning  = 1024 // moves that run or wait for their turn
	maxEnded    = 1024 // moves of which the end is remembered
	defaultMove = 10 * time.Minute
	maxMove     = 24 * time.Hour
	pollEvery   = 100 * time.Millisecond

	// maxFailedPolls of the source in a row: after them the record alone tells.
	maxFailedPolls = 20
)

// moves are the moves of the sessions that this node owns.
type moves struct {
	slots chan struct{} // of those that run at a time
	pace  *cluster.Pace // of all together
	wg    sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	running map[string]*move
	ended   map[string]*kvtierv1.MoveProgress
	order   []string                     // keys of ended, oldest first
	speeds  map[placement.NodeID]float64 // bytes a second, by target, as measured last
	endings endings
}

func (v *moves) init(most int, bytesPerSecond int64) {
	v.slots, v.pace = make(chan struct{}, most), cluster.NewPace(bytesPerSecond)
	v.running, v.ended, v.speeds = map[string]*move{}, map[string]*kvtierv1.MoveProgress{}, map[placement.NodeID]float64{}
}

// close lets no more moves begin and waits for those that run, which end with the
// Manager's context.
func (v *moves) close() {
	v.mu.Lock()
	v.closed = true
	v.mu.Unlock()
	v.wg.Wait()
}

// recorded tells the move of a session, if there is one, that its record changed.
func (v *moves) recorded(full string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	x := v.running[full]
	if x != nil {
		x.wake()
	}
	return x != nil
}

// drives reports whether a session is being moved by this node.
func (v *moves) drives(full string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.running[full] != nil
}

func (v *moves) recordedAll() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.running {
		x.wake()
	}
}

// speed is what was measured last to a target; 0: nothing.
func (v *moves) speed(to placement.NodeID) float64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.speeds[to]
}

// finish remembers how a move ended.
func (v *moves) finish(x *move, p *kvtierv1.MoveProgress) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.running[x.full] == x {
		delete(v.running, x.full)
	}
	v.endings.count(p)
	if _, again := v.ended[x.full]; !again {
		v.order = append(v.order, x.full)
	}
	if x.stray && v.ended[x.full] != nil {
		return // that is how the move ended which somebody asked for
	}
	v.ended[x.full] = p
	if len(v.order) > maxEnded {
		delete(v.ended, v.order[0])
		v.order = v.order[1:]
	}
}

// options of one move.
type moveOptions struct {
	rate   int64 // bytes a second; 0: no limit of its own
	within time.Duration
	wanted tier.Kind // of the target
}

// BeginMove starts to move a session, which is named "tenant/name", to a node, from
// whichever node owns it, and returns once it is begun: it goes on by itself and ends
// within a time. rate 0: no limit of its own. Errors: paging.ErrNotFound,
// paging.ErrInvalid (it is there already, or moves already), paging.ErrNoSpace (the node
// takes nothing), paging.ErrUnavailable.
func (m *Manager) BeginMove(ctx context.Context, full string, to placement.NodeID, rate int64, within time.Duration) error {
	if err := m.ready(); err != nil {
		return err
	}
	q := &kvtierv1.MigrateSessionRequest{To: to.String(), MaxBytesPerSecond: uint64(max(0, rate)), Deadline: durationpb.New(within)}
	x := m.lookup(ctx, full)
	switch {
	case x == nil:
		return m.absent(full)
	case ownerOf(x) == m.cfg.Self:
		_, err := m.migrateHere(ctx, full, q)
		return err
	}
	return m.ask(ctx, ownerOf(x), full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Migrate{Migrate: q}}, &kvtierv1.MigrateSessionResponse{})
}

// MoveProgress tells how the last move of a session is. paging.ErrNotFound: none is
// remembered.
func (m *Manager) MoveProgress(ctx context.Context, full string) (*kvtierv1.MoveProgress, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	if p, err := m.moveHere(full); err == nil {
		return p, nil
	}
	x := m.lookup(ctx, full)
	switch {
	case x == nil:
		return nil, m.absent(full)
	case ownerOf(x) == m.cfg.Self:
		return m.moveHere(full)
	}
	return m.moveAt(ctx, ownerOf(x), full)
}

// moveAt asks a node how the last move of a session is that it ran.
func (m *Manager) moveAt(ctx context.Context, at placement.NodeID, full string) (*kvtierv1.MoveProgress, error) {
	if at == m.cfg.Self {
		return m.moveHere(full)
	}
	a := &kvtierv1.MigrateSessionResponse{}
	if err := m.ask(ctx, at, full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Move{Move: &kvtierv1.SessionMoveQuery{}}}, a); err != nil {
		return nil, err
	}
	return a.GetProgress(), nil
}

// CancelMove ends the move of a session, if there is one.
func (m *Manager) CancelMove(ctx context.Context, full string) error {
	if err := m.ready(); err != nil {
		return err
	}
	x := m.lookup(ctx, full)
	switch {
	case x == nil:
		return m.absent(full)
	case ownerOf(x) == m.cfg.Self:
		m.cancelHere(full)
		return nil
	}
	return m.ask(ctx, ownerOf(x), full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Cancel{Cancel: &kvtierv1.CancelMigrationRequest{}}}, &kvtierv1.CancelMigrationResponse{})
}

// CancelMigration is CancelMove for callers of the service.
func (m *Manager) CancelMigration(ctx context.Context, r *kvtierv1.CancelMigrationRequest) (*kvtierv1.CancelMigrationResponse, error) {
	full, _, err := m.named(r.GetTenant(), r.GetSession(), nil)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.CancelMigrationResponse{}, m.CancelMove(ctx, full)
}

func (m *Manager) cancelHere(full string) {
	m.moves.mu.Lock()
	x := m.moves.running[full]
	m.moves.mu.Unlock()
	if x != nil {
		x.giveUp("cancelled")
	}
}

// moveHere tells how the last move of a session is that this node ran.
func (m *Manager) moveHere(full string) (*kvtierv1.MoveProgress, error) {
	m.moves.mu.Lock()
	defer m.moves.mu.Unlock()
	if x := m.moves.running[full]; x != nil {
		return x.progress, nil
	}
	if p := m.moves.ended[full]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("no move of session %q is remembered here: %w", full, paging.ErrNotFound)
}

// Migrate moves a session and sends how far it is, at least once a second, until it has
// ended, or ctx has, or send fails: the move goes on then.
func (m *Manager) Migrate(ctx context.Context, r *kvtierv1.MigrateSessionRequest, send func(*kvtierv1.MigrateSessionResponse) error) error {
	full, _, err := m.named(r.GetTenant(), r.GetSession(), nil)
	if err != nil {
		return err
	}
	to, err := m.FindNode(r.GetTo())
	if err != nil {
		return err
	}
	q := proto.CloneOf(r)
	q.To = to.String()
	source, plan, err := m.migrateAt(ctx, full, q)
	if err != nil {
		return err
	}
	if err := send(plan); err != nil || r.GetDryRun() {
		return err
	}
	last, failed := time.Time{}, 0
	var before *kvtierv1.MoveProgress
	for {
		p, err := m.moveAt(ctx, source, full)
		if failed++; err == nil {
			failed = 0
		}
		if err != nil && failed >= maxFailedPolls {
			if x := m.record(full); x != nil && ownerOf(x) == to {
				p, err = &kvtierv1.MoveProgress{State: migrate.Done.String(), Ended: true, Owner: x.GetOwner(), Epoch: x.GetEpoch()}, nil
			}
		}
		if err != nil && failed >= maxFailedPolls {
			return fmt.Errorf("how the move of session %q is cannot be told (it ends by itself; kvtier sessions show tells who owns it): %w", r.GetSession(), err)
		}
		if err == nil && (p.GetEnded() || !proto.Equal(p, before) || time.Since(last) >= time.Second) {
			last, before = time.Now(), p
			if err := send(&kvtierv1.MigrateSessionResponse{Message: &kvtierv1.MigrateSessionResponse_Progress{Progress: p}}); err != nil || p.GetEnded() {
				return err
			}
		}
		select {
		case <-time.After(pollEvery):
		case <-ctx.Done():
			return ctx.Err()
		case <-m.ctx.Done():
			return fmt.Errorf("this node stops: %w", paging.ErrClosed)
		}
	}
}

// migrateAt has the owner begin a move, or tell what it would take, and says who that is.
func (m *Manager) migrateAt(ctx context.Context, full string, q *kvtierv1.MigrateSessionRequest) (placement.NodeID, *kvtierv1.MigrateSessionResponse, error) {
	x := m.lookup(ctx, full)
	if x == nil {
		return placement.NodeID{}, nil, m.absent(full)
	}
	owner := ownerOf(x)
	if owner == m.cfg.Self {
		a, err := m.migrateHere(ctx, full, q)
		return owner, a, err
	}
	a := &kvtierv1.MigrateSessionResponse{}
	return owner, a, m.ask(ctx, owner, full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Migrate{Migrate: q}}, a)
}

// bring moves a session to this node.
func (m *Manager) bring(ctx context.Context, x *directory.Session) error {
	full := x.GetSession()
	owner := ownerOf(x)
	q := &kvtierv1.MigrateSessionRequest{To: m.cfg.Self.String()}
	if deadline, ok := ctx.Deadline(); ok {
		q.Deadline = durationpb.New(max(time.Second, time.Until(deadline)))
	}
	if err := m.ask(ctx, owner, full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Migrate{Migrate: q}}, &kvtierv1.MigrateSessionResponse{}); err != nil && targetOf(x) != m.cfg.Self {
		return err
	}
	for {
		wait, cancel := context.WithTimeout(ctx, pollEvery)
		y, err := m.await(wait, full, func(y *directory.Session) bool { return y == nil || y.GetEpoch() > x.GetEpoch() })
		cancel()
		if err == nil {
			if y == nil {
				return notFound(full)
			}
			return nil
		}
		if ctx.Err() != nil || m.ctx.Err() != nil {
			return err
		}
		if !m.serves(owner) {
			return nil // it is taken over instead
		}
		p, err := m.moveAt(ctx, owner, full)
		if err == nil && p.GetEnded() && p.GetState() != migrate.Done.String() {
			return fmt.Errorf("session %q stays at its node: %s: %w", full, p.GetWhy(), paging.ErrUnavailable)
		}
	}
}

// migrateHere begins a move of a session that this node owns, or tells what it would
// take. The answer is the plan.
func (m *Manager) migrateHere(ctx context.Context, full string, q *kvtierv1.MigrateSessionRequest) (*kvtierv1.MigrateSessionResponse, error) {
	var to placement.NodeID
	if b, err := hex.DecodeString(q.GetTo()); err != nil || copy(to[:], b) != len(to) {
		return nil, fmt.Errorf("node %q to move session %q to: %w", q.GetTo(), full, paging.ErrInvalid)
	}
	o := moveOptions{rate: int64(q.GetMaxBytesPerSecond()), within: q.GetDeadline().AsDuration(), wanted: tier.Kind(q.GetTier())}
	if o.within == 0 {
		o.within = defaultMove
	}
	if o.within < 0 || o.within > maxMove || o.rate < 0 || o.wanted != tier.None && o.wanted != tier.RAM && o.wanted != tier.HBM {
		return nil, fmt.Errorf("a move within %v to tier %v: it may take up to %v and goes to RAM or HBM: %w", o.within, o.wanted, maxMove, paging.ErrInvalid)
	}
	rec, ok := m.node(to)
	_, name := splitName(full)
	switch {
	case !ok:
		return nil, fmt.Errorf("node %s is not in the cluster: %w", to.Short(), paging.ErrNotFound)
	case to == m.cfg.Self:
		return nil, fmt.Errorf("session %q is at node %s already: %w", name, rec.Name, paging.ErrInvalid)
	case rec.State != kvtierv1.NodeState_NODE_STATE_UP:
		return nil, fmt.Errorf("node %s takes no sessions: it is recorded as %s: %w", rec.Name, directory.StateName(rec.State), paging.ErrNoSpace)
	}
	x := m.record(full)
	if x == nil {
		return nil, notFound(full)
	}
	plan, err := m.planMove(ctx, x, to)
	if err != nil {
		return nil, err
	}
	plan.TargetName = rec.Name
	if !q.GetDryRun() {
		if err := m.beginMove(x, to, o); err != nil { //nolint:contextcheck // the move outlives the call
			return nil, err
		}
	}
	return &kvtierv1.MigrateSessionResponse{Message: &kvtierv1.MigrateSessionResponse_Plan{Plan: plan}}, nil
}

// planMove tells what a move would take.
func (m *Manager) planMove(ctx context.Context, x *directory.Session, to placement.NodeID) (*kvtierv1.MovePlan, error) {
	names, err := m.namesOf(ctx, x)
	if err != nil {
		return nil, err
	}
	ns, err := m.layout(namespaceOf(x))
	if err != nil {
		return nil, err
	}
	lack, err := m.lacking(ctx, ns, names, to)
	if err != nil {
		return nil, err
	}
	tokens := int64(len(lack.rows)) * int64(ns.Layout.BlockTokens)
	a := migrate.Advise(lack.bytes, tokens, migrate.Rates{PrefillTokensPerSecond: m.cfg.PrefillRate(namespaceOf(x)), BytesPerSecond: m.moves.speed(to)})
	return &kvtierv1.MovePlan{
		Session: m.info(x), LackingBlocks: uint64(len(lack.rows)), LackingBytes: uint64(lack.bytes), LackingTokens: uint64(tokens), NowhereBlocks: uint64(lack.nowhere),
		CopyTime: durationpb.New(a.Copy), RecomputeTime: durationpb.New(a.Recompute), RecomputeIsCheaper: a.Cheaper,
	}, nil
}

// beginMove starts the move of a session that this node owns.
func (m *Manager) beginMove(x *directory.Session, to placement.NodeID, o moveOptions) error {
	v := newMove(m, x.GetSession(), to, o)
	if err := m.add(v); err != nil {
		return err
	}
	limits := m.cfg.Limits
	limits.Within = o.within
	go func() { // owner: the Manager; exits with the move; bound: maxRunning
		defer m.moves.wg.Done()
		if !v.turn() {
			return
		}
		defer func() { <-m.moves.slots }()
		machine, actions := migrate.Start(v.id, toRecord(x), to, limits, time.Now())
		v.run(machine, actions)
	}()
	return nil
}

// add enters a move, unless the session moves already. Its goroutine is counted.
func (m *Manager) add(v *move) error {
	m.moves.mu.Lock()
	defer m.moves.mu.Unlock()
	if other := m.moves.running[v.full]; other != nil {
		_, name := splitName(v.full)
		return fmt.Errorf("session %q is being moved to node %s already: cancel that first: %w", name, other.to.Short(), paging.ErrInvalid)
	}
	if len(m.moves.running) >= maxRunning || m.moves.closed {
		return fmt.Errorf("%d moves run or wait here already: %w", len(m.moves.running), paging.ErrUnavailable)
	}
	m.moves.running[v.full] = v
	m.moves.wg.Add(1)
	if !v.stray {
		delete(m.moves.ended, v.full)
	}
	return nil
}

// resume goes on with a move that the directory tells of and that no one drives: of a
// run of this process that ended, or (not at a start) of a command that came so late
// that its move was given up; that one is ended.
func (m *Manager) resume(x *directory.Session, start bool) {
	limits := m.cfg.Limits
	machine, actions, ok := migrate.Resume(toRecord(x), m.cfg.Self, limits, time.Now())
	if !ok {
		return
	}
	v := newMove(m, x.GetSession(), targetOf(x), moveOptions{within: defaultMove})
	v.id, v.seen, v.stray = machine.Move(), true, !start
	if err := m.add(v); err != nil {
		if !errors.Is(err, paging.ErrInvalid) {
			m.log.Warn("a move is not taken up again yet", "session", x.GetSession(), "err", err)
		}
		return
	}
	m.log.Info("move of a session is taken up again", "session", x.GetSession(), "to", v.to.Short(), "to be ended", !start)
	if !start {
		v.giveUp("nobody drives it any more")
	}
	go func() { // owner: the Manager; exits with the move; bound: maxRunning
		defer m.moves.wg.Done()
		v.run(machine, actions)
	}()
}

// toRecord is what the machine wants to know of a session.
func toRecord(x *directory.Session) (r migrate.Record) {
	if x == nil {
		return r
	}
	r.Owner, r.Target, r.Epoch = ownerOf(x), targetOf(x), placement.Epoch(x.GetEpoch())
	copy(r.Move[:], x.GetMove())
	switch x.GetState() {
	case kvtierv1.SessionState_SESSION_STATE_MIGRATING:
		r.Phase = migrate.Moving
	case kvtierv1.SessionState_SESSION_STATE_FROZEN:
		r.Phase = migrate.Frozen
	default:
		r.Phase = migrate.Active
	}
	return r
}

package sessions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Copies of a move.
const (
	pushBytes   = 16 << 20 // of one call, at most
	pushBlocks  = 4096     // likewise
	pushWithin  = 30 * time.Second
	pushesAhead = 2 // calls under way: one is answered while the next is read
	moveTick    = 50 * time.Millisecond
)

// move is one move of a session, and what carries out what its machine decides.
type move struct {
	m     *Manager
	full  string
	id    placement.MoveID
	to    placement.NodeID
	opts  moveOptions
	pace  *cluster.Pace
	stray bool // of an earlier run or a late command: it is to be ended, and nobody asks how

	changed chan struct{} // has a token after the record changed
	events  chan migrate.Event
	cancel  chan string   // why it is to be given up; room for one
	over    chan struct{} // closed when nobody takes events any more

	// Owned by run.
	machine migrate.Machine
	work    context.CancelFunc // ends the Ask or Copy under way; nil: none
	workers sync.WaitGroup
	seen    bool   // the replica has shown this move
	made    bool   // a proposal of it was applied
	sent    uint64 // names that the target keeps
	lack    lack   // by the last Ask that was answered
	end     paging.SessionEnd

	progress *kvtierv1.MoveProgress // never changed in place; guarded by moves.mu
}

func newMove(m *Manager, full string, to placement.NodeID, o moveOptions) *move {
	v := &move{
		m: m, full: full, to: to, opts: o, pace: cluster.NewPace(o.rate), changed: make(chan struct{}, 1), events: make(chan migrate.Event, 16), cancel: make(chan string, 1), over: make(chan struct{}),
		progress: &kvtierv1.MoveProgress{State: "waiting"},
	}
	_, _ = rand.Read(v.id[:]) // never fails
	return v
}

func (v *move) wake() {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

// giveUp has the move end.
func (v *move) giveUp(why string) {
	select {
	case v.cancel <- why:
	default: // it is to end already
	}
}

// turn waits for the move's turn; false: it ended before that.
func (v *move) turn() bool {
	wait := time.NewTimer(v.opts.within)
	defer wait.Stop()
	why := "it had to wait for other moves for longer than it may take"
	select {
	case v.m.moves.slots <- struct{}{}:
		return true
	case why = <-v.cancel:
	case <-wait.C:
	case <-v.m.ctx.Done():
		why = "the node stops"
	}
	v.m.moves.finish(v, &kvtierv1.MoveProgress{State: migrate.Aborted.String(), Ended: true, Why: why})
	return false
}

// run drives the machine until the move has ended, or the node stops.
func (v *move) run(machine migrate.Machine, actions []migrate.Action) {
	v.machine = machine
	defer func() {
		v.stop()
		close(v.over)
		v.workers.Wait()
		p := v.told()
		p.Ended = true
		v.m.moves.finish(v, p)
	}()
	tick := time.NewTicker(moveTick)
	defer tick.Stop()
	for v.do(actions); !v.machine.Progress().State.Ended(); {
		e := migrate.Event{Kind: migrate.Tick}
		select {
		case e = <-v.events:
			v.made = v.made || e.Kind == migrate.Recorded
		case <-v.changed:
			e = v.recorded(e)
		case why := <-v.cancel:
			e = migrate.Event{Kind: migrate.Cancel, Text: why}
		case <-tick.C:
			e = v.clock(e)
		case <-v.m.ctx.Done():
			return
		}
		e.Now = time.Now()
		v.do(v.machine.Step(e))
		v.publish()
	}
}

// clock is a tick, or that the target cannot be one any more.
func (v *move) clock(tick migrate.Event) migrate.Event {
	if rec, ok := v.m.node(v.to); !ok || rec.State != kvtierv1.NodeState_NODE_STATE_UP {
		return migrate.Event{Kind: migrate.TargetUnfit, Text: "is recorded as " + directory.StateName(rec.State)}
	}
	return tick
}

// recorded is the record as the replica has it; a tick if that is older than what this
// move is known to have changed.
func (v *move) recorded(tick migrate.Event) migrate.Event {
	var x *directory.Session
	v.m.directory().Read(func(s *directory.State) { x, _ = s.Session(v.full) })
	r := toRecord(x)
	v.seen = v.seen || r.Move == v.id
	if v.made && !v.seen && r.Phase == migrate.Active && r.Owner == v.m.cfg.Self {
		return tick
	}
	return migrate.Event{Kind: migrate.Recorded, Record: r}
}

func (v *move) do(actions []migrate.Action) {
	for _, a := range actions {
		switch a.Kind {
		case migrate.Prepare, migrate.Freeze, migrate.Commit, migrate.Abort:
			v.workers.Go(func() { v.propose(a) }) // owner: run; exits within askWithin; bound: a proposal every RetryAfter
		case migrate.Ask, migrate.Copy:
			ctx := v.begin()
			v.workers.Go(func() { // owner: run; exits with ctx; bound: one that counts
				if a.Kind == migrate.Ask {
					v.ask(ctx, a)
				} else {
					v.copy(ctx, a)
				}
			})
		case migrate.Stop, migrate.Release:
			v.stop()
		case migrate.Notify:
			v.m.log.Info("move of a session", "session", v.full, "to", v.to.Short(), "state", a.State.String(), "why", a.Text)
			v.publish()
		}
	}
}

// begin is the context of an Ask or a Copy. What ran before is ended first and has let
// go of the fields that it uses.
func (v *move) begin() context.Context {
	v.stop()
	ctx, cancel := context.WithCancel(v.m.ctx)
	v.work = cancel
	return ctx
}

func (v *move) stop() {
	if v.work != nil {
		v.work()
		v.work = nil
	}
}

// tell hands an event to run.
func (v *move) tell(e migrate.Event) {
	select {
	case v.events <- e:
	case <-v.over:
	}
}

// propose has the directory take a step of the move.
func (v *move) propose(a migrate.Action) {
	ctx, cancel := context.WithTimeout(v.m.ctx, askWithin)
	defer cancel()
	self := v.m.cfg.Self
	c := &kvtierv1.SessionCommand{}
	r := migrate.Record{Owner: self, Epoch: a.Epoch, Move: v.id, Target: v.to}
	switch a.Kind {
	case migrate.Prepare:
		r.Phase = migrate.Moving
		c.Change = &kvtierv1.SessionCommand_Prepare{Prepare: &kvtierv1.PrepareMove{Move: v.id[:], Target: v.to[:]}}
	case migrate.Freeze:
		r.Phase = migrate.Frozen
		c.Change = &kvtierv1.SessionCommand_Freeze{Freeze: &kvtierv1.FreezeMove{Move: v.id[:]}}
	case migrate.Commit:
		r = migrate.Record{Phase: migrate.Active, Owner: v.to, Epoch: a.Epoch + 1}
		c.Change = &kvtierv1.SessionCommand_Commit{Commit: &kvtierv1.CommitMove{Move: v.id[:]}}
	default:
		r = migrate.Record{Phase: migrate.Active, Owner: self, Epoch: a.Epoch}
		c.Change = &kvtierv1.SessionCommand_Abort{Abort: &kvtierv1.AbortMove{Move: v.id[:]}}
	}
	e := migrate.Event{Kind: migrate.Recorded, Record: r, Proposal: a.Kind}
	result, err := v.m.propose(ctx, v.full, self, uint64(a.Epoch), c)
	switch {
	case err == nil && a.Kind == migrate.Commit:
		v.handOver(uint64(a.Epoch) + 1)
	case err == nil:
	case result == directory.Invalid && !errors.Is(err, paging.ErrInvalid):
		e = migrate.Event{Kind: migrate.Unsure, Proposal: a.Kind}
	default:
		e = migrate.Event{Kind: migrate.Refused, Proposal: a.Kind, Text: err.Error()}
	}
	v.tell(e)
}

// handOver tells both ends who owns the session now, before their replicas do.
func (v *move) handOver(epoch uint64) {
	x := v.m.record(v.full)
	if x == nil || x.GetEpoch() >= epoch {
		return
	}
	y := proto.CloneOf(x)
	y.Owner, y.Epoch, y.Sequence, y.Moves = v.to[:], epoch, 0, x.GetMoves()+1
	y.State, y.Move, y.Target, y.Second = kvtierv1.SessionState_SESSION_STATE_ACTIVE, nil, nil, nil
	v.m.moves.mu.Lock()
	y.Chain = chainOf(v.end)
	v.m.moves.mu.Unlock()
	ctx, cancel := context.WithTimeout(v.m.ctx, time.Second)
	defer cancel()
	_ = v.m.call(ctx, v.to, methodOwned, &kvtierv1.SessionOwned{Record: y}, nil) // else it hears from its replica
	v.m.foresee(y)
	v.m.forget(v.full)
}

// lack is what a target lacks of a session.
type lack struct {
	blocks  []cluster.Block // all
	rows    []int           // of blocks, rising: those that it lacks and somebody has
	parts   []paging.PartSet
	bytes   int64
	nowhere int
}

// lacking asks a node what it lacks of blocks that are one chain.
func (m *Manager) lacking(ctx context.Context, ns *paging.Namespace, names []paging.BlockName, to placement.NodeID) (l lack, err error) {
	id := ns.ID()
	l.blocks = make([]cluster.Block, len(names))
	l.parts = make([]paging.PartSet, len(names))
	all := ns.Layout.AllParts()
	here := make([]paging.PartSet, len(names))
	m.held(id, names, func(i int, parts paging.PartSet, _ tier.Kind) {
		here[i] = parts
		if parts == 0 { // perhaps another node has it
			parts = ns.Layout.PagesAt(i, all)
		}
		l.blocks[i] = cluster.Block{Name: names[i], Parts: parts, Position: uint32(i)}
	})
	if err := m.cluster.Lacks(ctx, to, ns, l.blocks, l.parts); err != nil {
		return l, err
	}
	var absent []int
	for i := range l.blocks {
		switch {
		case l.parts[i] == 0:
		case here[i] == 0:
			absent = append(absent, i)
		default:
			l.rows = append(l.rows, i)
		}
	}
	for _, i := range absent {
		var elsewhere paging.PartSet
		m.cluster.Holders(id, names[i:i+1], func(_ int, holders []directory.Holder) {
			for _, h := range holders {
				if h.Node != to && m.cluster.Reachable(h.Node) {
					elsewhere |= h.Parts
				}
			}
		})
		if l.parts[i] &= elsewhere; l.parts[i] == 0 {
			l.nowhere++
		} else {
			l.rows = append(l.rows, i)
		}
	}
	if len(absent) > 0 {
		slices.Sort(l.rows)
	}
	for _, i := range l.rows {
		l.bytes += int64(ns.Layout.BytesOf(l.parts[i])) //nolint:gosec // a page fits memory
	}
	return l, nil
}

// ask sends the target the names that it does not keep yet, and asks what it lacks.
func (v *move) ask(ctx context.Context, a migrate.Action) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	e := migrate.Event{Kind: migrate.Answered, Number: a.Number}
	l, end, err := v.askTarget(ctx, uint64(a.Epoch)+1)
	switch {
	case err != nil && ctx.Err() != nil && ctx.Err() != context.DeadlineExceeded:
		return
	case err != nil:
		v.m.log.Warn("the target of a move does not say what it lacks", "session", v.full, "to", v.to.Short(), "err", err)
		e.Kind, e.Failure = migrate.Failed, failureOf(err)
	default:
		v.m.moves.mu.Lock()
		v.lack, v.end = l, end
		v.m.moves.mu.Unlock()
		e.Blocks, e.Bytes, e.Nowhere = len(l.rows), l.bytes, l.nowhere
	}
	v.tell(e)
}

func (v *move) askTarget(ctx context.Context, epoch uint64) (l lack, end paging.SessionEnd, err error) {
	m := v.m
	names, end, err := v.committed(ctx)
	if err != nil {
		return l, end, err
	}
	m.moves.mu.Lock()
	sent := v.sent
	m.moves.mu.Unlock()
	if sent < end.Blocks {
		err := m.sendNames(ctx, v.to, v.full, epoch, sent, names[sent:])
		if errors.Is(err, paging.ErrNotFound) && sent > 0 {
			err = m.sendNames(ctx, v.to, v.full, epoch, 0, names)
		}
		if err != nil {
			return l, end, err
		}
		m.moves.mu.Lock()
		v.sent = end.Blocks
		m.moves.mu.Unlock()
	}
	x := m.record(v.full)
	if x == nil {
		return l, end, notFound(v.full)
	}
	ns, err := m.layout(namespaceOf(x))
	if err != nil {
		return l, end, err
	}
	if sabotage.On("skip-target-check") {
		return l, end, nil
	}
	l, err = m.lacking(ctx, ns, names, v.to)
	return l, end, err
}

// committed is the chain of the session as far as a quorum has it.
func (v *move) committed(ctx context.Context) (names []paging.BlockName, end paging.SessionEnd, err error) {
	for range 2 { // what a freeze refused is no part of it
		_, l, release, err := v.m.own(ctx, v.full)
		if err != nil {
			return nil, end, err
		}
		if err = v.m.settle(ctx, v.full, l); err == nil {
			end = l.chain.End()
			names, err = l.chain.Names(0, end.Blocks)
		}
		release()
		if !errors.Is(err, paging.ErrFrozen) {
			return names, end, err
		}
	}
	return nil, end, fmt.Errorf("session %q: %w", v.full, paging.ErrFrozen)
}

// failureOf is what the machine makes of an error.
func failureOf(err error) migrate.Failure {
	switch {
	case errors.Is(err, paging.ErrNoSpace), errors.Is(err, paging.ErrOverQuota):
		return migrate.NoRoom
	case errors.Is(err, paging.ErrInvalid), errors.Is(err, paging.ErrIncompatible), errors.Is(err, paging.ErrDenied), errors.Is(err, paging.ErrUnknownNamespace):
		return migrate.Incompatible
	}
	return migrate.Unreachable
}

// told is the progress for those who ask.
func (v *move) told() *kvtierv1.MoveProgress {
	p := v.machine.Progress()
	out := &kvtierv1.MoveProgress{
		State: p.State.String(), Round: uint32(p.Round), LackedBytes: uint64(p.Lacked), SentBytes: uint64(p.Sent), LeftBytes: uint64(p.Left),
		BytesPerSecond: uint64(p.Speed), Pause: durationpb.New(p.Pause), NowhereBlocks: uint64(p.Nowhere), Why: p.Why,
	}
	if p.Speed > 0 {
		out.Left = durationpb.New(time.Duration(float64(p.Left) / p.Speed * float64(time.Second)))
	}
	if x := v.m.record(v.full); x != nil {
		out.Owner, out.Epoch = x.GetOwner(), x.GetEpoch()
	}
	return out
}

func (v *move) publish() {
	p := v.told()
	v.m.moves.mu.Lock()
	defer v.m.moves.mu.Unlock()
	if !v.machine.Progress().State.Ended() {
		v.progress = p
	}
}

package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// announceWithin is how long a namespace that was registered a moment ago may take to be
// in the directory.
const announceWithin = 5 * time.Second

// Open opens a session at this node, or opens it again. It takes it over if its owner is
// down, and has it brought here first if r says so. Errors: paging.ErrMoved,
// paging.ErrUnknownNamespace, paging.ErrOverQuota (the tenant has too many),
// paging.ErrUnavailable, paging.ErrLost (the names are nowhere, and r does not give
// them), paging.ErrInvalid.
func (m *Manager) Open(ctx context.Context, r *kvtierv1.OpenSessionRequest) (*kvtierv1.OpenSessionResponse, error) {
	full, given, err := m.named(r.GetTenant(), r.GetSession(), r.GetBlockNames())
	if err != nil {
		return nil, err
	}
	ns, err := namespaceID(r.GetNamespaceId())
	if err != nil {
		return nil, err
	}
	out := &kvtierv1.OpenSessionResponse{}
	for {
		x := m.record(full)
		switch {
		case x == nil:
			if err := m.create(ctx, full, ns, r); err != nil {
				return nil, err
			}
			continue
		case namespaceOf(x) != ns:
			return nil, fmt.Errorf("session %q has pages of another layout or model (namespace %s): close it first, or use another name: %w", r.GetSession(), namespaceOf(x).Short(), paging.ErrInvalid)
		case ownerOf(x) == m.cfg.Self:
			return m.openHere(ctx, x, given, r, out)
		case !m.serves(ownerOf(x)):
			lost, err := m.takeOver(ctx, x, given)
			if errors.Is(err, paging.ErrMoved) || errors.Is(err, paging.ErrNotFound) {
				if _, err := m.await(ctx, full, func(y *directory.Session) bool { return y == nil || y.GetEpoch() > x.GetEpoch() }); err != nil {
					return nil, err
				}
				continue // somebody was faster
			} else if err != nil {
				return nil, err
			}
			out.TakenOver, out.LostBlocks = true, lost
		case r.GetElsewhere() == kvtierv1.Elsewhere_ELSEWHERE_BRING:
			if err := m.bring(ctx, x); err != nil {
				return nil, err
			}
		case targetOf(x) == m.cfg.Self && m.arrives(ctx, x):
			// Its engine heard of the move before this node's replica did.
		default:
			return nil, m.moved(x)
		}
	}
}

// arrives waits a moment for a session that moves here, and reports whether it came.
func (m *Manager) arrives(ctx context.Context, x *directory.Session) bool {
	ctx, cancel := context.WithTimeout(ctx, hearWithin)
	defer cancel()
	_, err := m.await(ctx, x.GetSession(), func(y *directory.Session) bool { return y == nil || y.GetEpoch() > x.GetEpoch() })
	return err == nil
}

func namespaceID(b []byte) (id paging.NamespaceID, err error) {
	if len(b) != len(id) {
		return id, fmt.Errorf("namespace id of %d bytes: %w", len(b), paging.ErrInvalid)
	}
	copy(id[:], b)
	return id, nil
}

// create opens a session that is not known.
func (m *Manager) create(ctx context.Context, full string, ns paging.NamespaceID, r *kvtierv1.OpenSessionRequest) error {
	retention, err := toRetain(r.GetRetention())
	if err != nil {
		return err
	}
	known, ok := m.tier.Namespace(ns)
	if !ok {
		return fmt.Errorf("session %q: namespace %s is not registered at this node: %w", r.GetSession(), ns.Short(), paging.ErrUnknownNamespace)
	}
	ctx, cancel := context.WithTimeout(ctx, announceWithin)
	defer cancel()
	open := &kvtierv1.OpenSession{NamespaceId: ns[:], Retention: retention, MaxSessions: uint32(m.cfg.MaxPerTenant)}
	for told := false; ; told = true {
		result, err := m.propose(ctx, full, m.cfg.Self, 0, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Open{Open: open}})
		switch result {
		case directory.OK:
			_, err = m.await(ctx, full, func(x *directory.Session) bool { return x != nil })
			return err
		case directory.NotOwner: // another node opened it just now
			_, err = m.await(ctx, full, func(x *directory.Session) bool { return x != nil })
			return err
		case directory.Full:
			return m.noMore(r.GetSession())
		case directory.Unknown: // the namespace, or this node, is not in the directory yet
			if !told {
				m.cluster.Announce(known)
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
				return fmt.Errorf("session %q: the directory does not know the namespace, or this node, yet: %w", r.GetSession(), paging.ErrUnavailable)
			}
		default:
			return err
		}
	}
}

// noMore says why the directory takes no further session of this node.
func (m *Manager) noMore(session string) error {
	if rec, ok := m.node(m.cfg.Self); ok && rec.Withdrawn() {
		return fmt.Errorf("session %q: node %s is being drained and takes no sessions: open it at another node (kvtier nodes), or kvtier undrain %s: %w", session, rec.Name, rec.Name, paging.ErrUnavailable)
	}
	return fmt.Errorf("session %q: the tenant has %d sessions, the most that it may: close some, or let them end by their time: %w", session, m.cfg.MaxPerTenant, paging.ErrOverQuota)
}

// openHere opens a session again that this node owns.
func (m *Manager) openHere(ctx context.Context, x *directory.Session, given []paging.BlockName, r *kvtierv1.OpenSessionRequest, out *kvtierv1.OpenSessionResponse) (*kvtierv1.OpenSessionResponse, error) {
	full := x.GetSession()
	x, l, release, err := m.own(ctx, full)
	if errors.Is(err, paging.ErrLost) {
		// The names were lost here and at the second node: the engine may have them.
		if err = m.giveNames(ctx, full, given, err); err == nil {
			x, l, release, err = m.own(ctx, full)
		}
	}
	if err != nil {
		return nil, err
	}
	defer release()
	if err := m.settle(ctx, full, l); err != nil && !errors.Is(err, paging.ErrFrozen) && !errors.Is(err, paging.ErrUnavailable) {
		return nil, err
	}
	if r.GetRetention() != nil {
		if err := m.retainRecord(ctx, x, r.GetRetention()); err != nil {
			return nil, err
		}
	}
	out.Session = m.info(x)
	if l.chain != nil {
		end := l.chain.End()
		out.Session.Blocks, out.Session.Tokens = end.Blocks, end.Tokens
	}
	return out, nil
}

// giveNames keeps the names of a session of this node as its engine has them, if they
// are all of it; else it returns why.
func (m *Manager) giveNames(ctx context.Context, full string, given []paging.BlockName, why error) error {
	_, release, err := m.hold(ctx, full)
	if err != nil {
		return err
	}
	defer release()
	x := m.record(full)
	end := endOf(x.GetChain())
	if x == nil || ownerOf(x) != m.cfg.Self || end.Blocks == 0 || paging.ProveSession(given, end) != end.Blocks {
		return why
	}
	return m.cfg.Store.Put(full, x.GetEpoch(), 0, given[:end.Blocks])
}

// takeOver makes this node the owner of a session whose owner is down, as far as its
// names can be had, and returns how many blocks are lost. It does not take less than a
// node may have that serves and did not answer.
func (m *Manager) takeOver(ctx context.Context, x *directory.Session, given []paging.BlockName) (lost uint64, err error) {
	full, end := x.GetSession(), endOf(x.GetChain())
	l, release, err := m.hold(ctx, full)
	if err != nil {
		return 0, err
	}
	defer release()
	switch y := m.record(full); {
	case y == nil:
		return 0, notFound(full)
	case y.GetEpoch() != x.GetEpoch(): // another call was faster: what it wrote stays
		return 0, m.moved(y)
	}
	l.chain = nil
	found, silent, err := m.find(ctx, x)
	if err != nil {
		return 0, err
	}
	if n := paging.ProveSession(given, end); n > uint64(len(found)) {
		found = given[:n]
	}
	if uint64(len(found)) < end.Blocks && silent != (placement.NodeID{}) {
		return 0, m.mayHave(x, silent)
	}
	tokens, err := m.tokensOf(x, len(found))
	if err != nil {
		return 0, err
	}
	epoch := x.GetEpoch() + 1
	c := paging.NewSessionChain()
	at := c.Append(found, tokens)
	if uint64(len(found)) == end.Blocks {
		at.Tokens = end.Tokens
	}
	if err := m.cfg.Store.Put(full, epoch, 0, found); err != nil {
		return 0, err
	}
	if _, err := m.propose(ctx, full, m.cfg.Self, x.GetEpoch(), &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_TakeOver{
		TakeOver: &kvtierv1.TakeOver{Chain: chainOf(at)}}}); err != nil {
		return 0, err
	}
	lost = end.Blocks - uint64(len(found))
	m.counts.takenOver.Add(1)
	m.counts.lostBlocks.Add(int64(lost))
	y := proto.CloneOf(x)
	y.Owner, y.Epoch, y.Sequence, y.Moves, y.Chain = m.cfg.Self[:], epoch, 0, x.GetMoves()+1, chainOf(at)
	y.State, y.Move, y.Target, y.Second = kvtierv1.SessionState_SESSION_STATE_ACTIVE, nil, nil, nil
	m.foresee(y)
	m.log.Info("session taken over from an owner that is down", "session", full, "epoch", epoch, "blocks", at.Blocks, "lost", lost)
	x, err = m.await(ctx, full, func(y *directory.Session) bool { return y == nil || y.GetEpoch() >= epoch })
	if err == nil && x != nil {
		m.retain(x, found)
	}
	return lost, err
}

// retainRecord changes the retention of a session that this node owns.
func (m *Manager) retainRecord(ctx context.Context, x *directory.Session, r *kvtierv1.Retention) error {
	retention, err := toRetain(r)
	if err != nil {
		return err
	}
	_, err = m.propose(ctx, x.GetSession(), m.cfg.Self, x.GetEpoch(), &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Retain{Retain: retention}})
	return err
}

const maxPriority = 100

func toRetain(r *kvtierv1.Retention) (*kvtierv1.RetainSession, error) {
	ttl := r.GetTtl().AsDuration()
	if r.GetPriority() > maxPriority || ttl < 0 || ttl > 0 && ttl < time.Millisecond {
		return nil, fmt.Errorf("priority %d and time %v, want 0 to %d and none or at least 1 ms: %w", r.GetPriority(), ttl, maxPriority, paging.ErrInvalid)
	}
	return &kvtierv1.RetainSession{Priority: r.GetPriority(), TtlMs: uint64(ttl.Milliseconds()), Refresh: r.GetRefreshOnHit()}, nil
}

// millis is a time in milliseconds, as long as a Duration can say.
func millis(ms uint64) time.Duration {
	return time.Duration(min(ms, uint64(1<<63-1)/uint64(time.Millisecond))) * time.Millisecond
}

func fromRetain(r *kvtierv1.RetainSession) *kvtierv1.Retention {
	out := &kvtierv1.Retention{Priority: r.GetPriority(), RefreshOnHit: r.GetRefresh()}
	if r.GetTtlMs() > 0 {
		out.Ttl = durationpb.New(millis(r.GetTtlMs()))
	}
	return out
}

// Share opens a session that goes on from another, at its owner: both use the same
// blocks. Errors as of Open; paging.ErrNotFound.
func (m *Manager) Share(ctx context.Context, r *kvtierv1.ShareSessionRequest) (*kvtierv1.ShareSessionResponse, error) {
	full, _, err := m.named(r.GetTenant(), r.GetSession(), nil)
	if err != nil {
		return nil, err
	}
	if _, err := fullName(r.GetTenant(), r.GetFork()); err != nil {
		return nil, err
	}
	a := &kvtierv1.ShareSessionResponse{}
	here, err := m.atOwner(ctx, full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Share{Share: r}}, a)
	if !here {
		return a, err
	}
	x, l, release, err := m.own(ctx, full)
	if err != nil {
		return nil, err
	}
	names, c, err := m.forked(x, l, r)
	release()
	if err != nil {
		return nil, err
	}
	a.Session, err = m.openFork(ctx, x, r, names, c)
	return a, err
}

// forked is the chain with which a fork begins, and its names. Requires l.lock.
func (m *Manager) forked(x *directory.Session, l *live, r *kvtierv1.ShareSessionRequest) ([]paging.BlockName, *paging.SessionChain, error) {
	end := endOf(x.GetChain()) // what a quorum has
	blocks := r.GetBlocks()
	if blocks == 0 {
		blocks = end.Blocks
	}
	if blocks > end.Blocks {
		return nil, nil, fmt.Errorf("session %q has %d blocks, a fork cannot begin with %d: %w", r.GetSession(), end.Blocks, blocks, paging.ErrInvalid)
	}
	tokens, err := m.tokensOf(x, int(blocks))
	if err != nil {
		return nil, nil, err
	}
	c, err := l.chain.Fork(blocks, tokens)
	if err != nil {
		return nil, nil, err
	}
	names, err := c.Names(0, blocks)
	return names, c, err
}

// openFork opens a fork of x.
func (m *Manager) openFork(ctx context.Context, x *directory.Session, r *kvtierv1.ShareSessionRequest, names []paging.BlockName, c *paging.SessionChain) (*kvtierv1.SessionInfo, error) {
	fork, _ := fullName(r.GetTenant(), r.GetFork())
	exists := fmt.Errorf("session %q exists: %w", r.GetFork(), paging.ErrInvalid)
	l, release, err := m.hold(ctx, fork)
	if err != nil {
		return nil, err
	}
	defer release()
	if y := m.record(fork); y != nil {
		return nil, exists
	}
	retention := x.GetRetention()
	if r.GetRetention() != nil {
		if retention, err = toRetain(r.GetRetention()); err != nil {
			return nil, err
		}
	}
	// Its epoch is not known yet: of any epoch, they are found by their hash.
	if err := m.cfg.Store.Put(fork, 0, 0, names); err != nil {
		return nil, err
	}
	m.wrote(fork)
	result, err := m.propose(ctx, fork, m.cfg.Self, 0, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Open{Open: &kvtierv1.OpenSession{
		NamespaceId: x.GetNamespaceId(), Retention: retention, Parent: x.GetSession(), Chain: chainOf(c.End()), MaxSessions: uint32(m.cfg.MaxPerTenant)}}})
	if result == directory.Full {
		return nil, m.noMore(r.GetFork())
	} else if err != nil {
		return nil, err
	}
	y, err := m.await(ctx, fork, func(y *directory.Session) bool { return y != nil })
	if err != nil {
		return nil, err
	}
	if ownerOf(y) != m.cfg.Self || endOf(y.GetChain()) != c.End() {
		return nil, exists // another call opened it meanwhile
	}
	l.chain = nil
	return m.info(y), m.load(ctx, l, y)
}

// Retain changes how long a session's blocks are worth keeping, those that it has
// included.
func (m *Manager) Retain(ctx context.Context, r *kvtierv1.RetainSessionRequest) (*kvtierv1.RetainSessionResponse, error) {
	full, _, err := m.named(r.GetTenant(), r.GetSession(), nil)
	if err != nil {
		return nil, err
	}
	a := &kvtierv1.RetainSessionResponse{}
	here, err := m.atOwner(ctx, full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Retain{Retain: r}}, a)
	if !here {
		return a, err
	}
	x, l, release, err := m.own(ctx, full)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := m.retainRecord(ctx, x, r.GetRetention()); err != nil {
		return nil, err
	}
	retention, err := toRetain(r.GetRetention())
	if err != nil {
		return nil, err
	}
	names, err := l.chain.Names(0, l.chain.End().Blocks)
	if err == nil {
		m.retain(&directory.Session{NamespaceId: x.GetNamespaceId(), Retention: retention}, names)
	}
	return a, err
}

// CloseSession ends a session. One that is not known is success.
func (m *Manager) CloseSession(ctx context.Context, r *kvtierv1.CloseSessionRequest) (*kvtierv1.CloseSessionResponse, error) {
	full, _, err := m.named(r.GetTenant(), r.GetSession(), nil)
	if err != nil {
		return nil, err
	}
	a := &kvtierv1.CloseSessionResponse{}
	x := m.lookup(ctx, full)
	if x == nil {
		return a, nil
	}
	// Whoever may close it may do so whatever the owner is doing: a move of it ends.
	_, err = m.propose(ctx, full, m.cfg.Self, x.GetEpoch(), &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Close{Close: &kvtierv1.CloseSession{Forced: true}}})
	if err != nil && !errors.Is(err, paging.ErrNotFound) {
		return nil, err
	}
	_, err = m.await(ctx, full, func(x *directory.Session) bool { return x == nil })
	return a, err
}

// atOwner has the owner of a session answer a call: here says that this node is it.
func (m *Manager) atOwner(ctx context.Context, full string, q *kvtierv1.SessionCall, a answer) (here bool, err error) {
	x := m.lookup(ctx, full)
	switch {
	case x == nil:
		return false, m.absent(full)
	case ownerOf(x) == m.cfg.Self:
		return true, nil
	}
	return false, m.ask(ctx, ownerOf(x), full, q, a)
}

func (m *Manager) ask(ctx context.Context, owner placement.NodeID, full string, q *kvtierv1.SessionCall, a answer) error {
	q.Session = full
	var reply kvtierv1.SessionReply
	if err := m.call(ctx, owner, methodCall, q, &reply); err != nil {
		rec, _ := m.node(owner)
		return fmt.Errorf("the owner of session %q, node %s, does not answer: %w", full, rec.Name, err)
	}
	return readReply(&reply, a)
}

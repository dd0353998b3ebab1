package sessions

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// Methods of calls between nodes.
const (
	methodKeepNames = cluster.MethodSessions + iota
	methodNames
	methodCall
	methodUsage
	methodOwned
)

// Answers are this node's answers to the calls of others about sessions.
func (m *Manager) Answers() map[uint8]cluster.Answer {
	return map[uint8]cluster.Answer{
		methodKeepNames: m.answerKeepNames, methodNames: m.answerNames, methodCall: m.answerCall, methodUsage: m.answerUsage, methodOwned: m.answerOwned,
	}
}

// answer is what a call is answered with.
type answer = proto.Message

func readReply(r *kvtierv1.SessionReply, a answer) error {
	if r.GetError() != nil {
		return kvstatus.FromDetail(r.GetError())
	}
	if err := proto.Unmarshal(r.GetAnswer(), a); err != nil {
		return fmt.Errorf("answer of the owner: %w: %w", paging.ErrIncompatible, err)
	}
	return nil
}

func marshal(a proto.Message) ([]byte, error) { return proto.Marshal(a) }

func unmarshal(argument []byte, q proto.Message) error {
	if err := proto.Unmarshal(argument, q); err != nil {
		return fmt.Errorf("call of another node: %w: %w", paging.ErrInvalid, err)
	}
	return nil
}

func (m *Manager) answerKeepNames(ctx context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	var q kvtierv1.SessionNames
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	names, err := unpackNames(q.GetBlockNames())
	if err != nil {
		return nil, err
	}
	// One at a time, and none while this node takes the session over.
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	_, release, err := m.hold(ctx, q.GetSession())
	if err != nil {
		return nil, err
	}
	x := m.record(q.GetSession())
	defer func() {
		release()
		if x == nil || ownerOf(x) != m.cfg.Self {
			m.forget(q.GetSession())
		}
	}()
	if len(names) == 0 || x != nil && (x.GetEpoch() > q.GetEpoch() || x.GetEpoch() == q.GetEpoch() && ownerOf(x) == m.cfg.Self) {
		return nil, nil // of an epoch that is over, or of which this node is the owner: nobody needs them
	}
	m.wrote(q.GetSession())
	return nil, m.cfg.Store.Keep(q.GetSession(), q.GetEpoch(), q.GetFirstBlock(), names)
}

func (m *Manager) answerNames(_ context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	var q kvtierv1.SessionNamesQuery
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	x := m.record(q.GetSession())
	if x == nil {
		return nil, m.absent(q.GetSession())
	}
	names, proven, err := m.cfg.Store.best(q.GetSession(), endOf(x.GetChain()))
	if err != nil {
		return nil, err
	}
	from, to := min(q.GetFromBlock(), proven), min(q.GetToBlock(), proven)
	if to < from || to-from > namesStep {
		return nil, fmt.Errorf("names %d to %d: %w", from, to, paging.ErrInvalid)
	}
	return proto.Marshal(&kvtierv1.SessionNames{Session: q.GetSession(), FirstBlock: from, BlockNames: packNames(names[from:to])})
}

// answerOwned is told by the former owner that this node owns a session now.
func (m *Manager) answerOwned(_ context.Context, from placement.NodeID, argument []byte) ([]byte, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	var q kvtierv1.SessionOwned
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	x := q.GetRecord()
	if ownerOf(x) != m.cfg.Self || x.GetSession() == "" {
		return nil, fmt.Errorf("node %s hands over a session that is not for this node: %w", from.Short(), paging.ErrInvalid)
	}
	m.foresee(x)
	m.arrived(x)
	return nil, nil
}

// foresee notes what the replica of this node will show of a session.
func (m *Manager) foresee(x *directory.Session) {
	m.mu.Lock()
	if len(m.mu.ahead) < maxAhead {
		m.mu.ahead[x.GetSession()] = aheadRecord{x, time.Now()}
	}
	m.mu.Unlock()
	m.noteChanged([]string{x.GetSession()}, false)
}

// Bounds of what is noted ahead of the replica.
const (
	maxAhead    = 4096
	aheadAtMost = 30 * time.Second
)

// answerCall does what another node asks this one as the owner of a session.
func (m *Manager) answerCall(ctx context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	var q kvtierv1.SessionCall
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	a, err := m.doCall(ctx, &q)
	if err != nil {
		return proto.Marshal(&kvtierv1.SessionReply{Error: kvstatus.Detail(err)})
	}
	b, err := proto.Marshal(a)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&kvtierv1.SessionReply{Answer: b})
}

func (m *Manager) doCall(ctx context.Context, q *kvtierv1.SessionCall) (answer, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	full := q.GetSession()
	if _, ok := q.GetCall().(*kvtierv1.SessionCall_Move); ok { // also once it has moved
		p, err := m.moveHere(full)
		return &kvtierv1.MigrateSessionResponse{Message: &kvtierv1.MigrateSessionResponse_Progress{Progress: p}}, err
	}
	x := m.record(full)
	switch {
	case x == nil:
		return nil, m.absent(full)
	case ownerOf(x) != m.cfg.Self: // it moved meanwhile: whoever asks finds out where
		return nil, m.moved(x)
	}
	tenant, name := splitName(full)
	switch c := q.GetCall().(type) {
	case *kvtierv1.SessionCall_Get:
		c.Get.Session, c.Get.Tenant = name, tenant
		return m.Get(ctx, c.Get)
	case *kvtierv1.SessionCall_Retain:
		c.Retain.Session, c.Retain.Tenant = name, tenant
		return m.Retain(ctx, c.Retain)
	case *kvtierv1.SessionCall_Share:
		c.Share.Session, c.Share.Tenant = name, tenant
		return m.Share(ctx, c.Share)
	case *kvtierv1.SessionCall_Migrate:
		return m.migrateHere(ctx, full, c.Migrate)
	case *kvtierv1.SessionCall_Cancel:
		m.cancelHere(full)
		return &kvtierv1.CancelMigrationResponse{}, nil
	}
	return nil, fmt.Errorf("a call about session %q that this version does not know: upgrade this node: %w", full, paging.ErrIncompatible)
}

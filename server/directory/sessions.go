package directory

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// Results of commands on sessions, see the wire format for their meaning.
const (
	Frozen     = kvtierv1.DirectoryResult_DIRECTORY_RESULT_FROZEN
	NotOwner   = kvtierv1.DirectoryResult_DIRECTORY_RESULT_NOT_OWNER
	OwnerAlive = kvtierv1.DirectoryResult_DIRECTORY_RESULT_OWNER_ALIVE
)

// Bounds of sessions.
const (
	maxSessions     = 4 << 20
	MaxSessionBytes = 96 // of a name
	maxPriority     = 100
)

// Session is a session as the directory has it: an immutable record. A change makes
// another, so that readers and snapshots may share it.
type Session = kvtierv1.SessionRecord

const (
	active    = kvtierv1.SessionState_SESSION_STATE_ACTIVE
	migrating = kvtierv1.SessionState_SESSION_STATE_MIGRATING
	frozen    = kvtierv1.SessionState_SESSION_STATE_FROZEN
)

// sessionTable holds sessions by name, in shards that are copied before they are
// written while a snapshot shares them.
type sessionTable struct {
	shards  [shardCount]map[string]*Session
	shared  [shardCount]bool
	count   int
	tenants map[string]int // sessions of each
	closed  uint64         // highest epoch of those that were removed
	touched []string       // that changed since takeTouched; no part of the state
}

func sessionShard(name string) int {
	h := uint32(2166136261) // FNV-1a: the same on every replica
	for i := range len(name) {
		h = (h ^ uint32(name[i])) * 16777619
	}
	return int(h % shardCount)
}

func (t *sessionTable) get(name string) *Session { return t.shards[sessionShard(name)][name] }

func (t *sessionTable) writable(shard int) map[string]*Session {
	switch {
	case t.shards[shard] == nil:
		t.shards[shard] = map[string]*Session{}
	case t.shared[shard]:
		t.shards[shard] = maps.Clone(t.shards[shard])
	}
	t.shared[shard] = false
	return t.shards[shard]
}

func (t *sessionTable) put(s *Session) {
	m := t.writable(sessionShard(s.Session))
	if m[s.Session] == nil {
		t.count++
		if t.tenants == nil {
			t.tenants = map[string]int{}
		}
		t.tenants[TenantOf(s.Session)]++
	}
	m[s.Session] = s
	t.touched = append(t.touched, s.Session)
}

func (t *sessionTable) remove(name string) {
	x := t.get(name)
	if x == nil {
		return
	}
	t.closed = max(t.closed, x.Epoch)
	delete(t.writable(sessionShard(name)), name)
	t.count--
	tenant := TenantOf(name)
	if t.tenants[tenant]--; t.tenants[tenant] == 0 {
		delete(t.tenants, tenant)
	}
	t.touched = append(t.touched, name)
}

// TenantOf is the tenant of a session, which is named "tenant/name".
func TenantOf(session string) string {
	tenant, _, _ := strings.Cut(session, "/")
	return tenant
}

// takeTouched returns the sessions that changed since the last call.
func (s *State) takeTouched() []string {
	out := s.sessions.touched
	s.sessions.touched = nil
	return out
}

// freeze shares all shards with a snapshot.
func (t *sessionTable) freeze() *[shardCount]map[string]*Session {
	shards := t.shards
	for i := range t.shared {
		t.shared[i] = true
	}
	return &shards
}

// Session is a session, if it is known. It must not be changed.
func (s *State) Session(name string) (*Session, bool) {
	x := s.sessions.get(name)
	return x, x != nil
}

// Sessions is how many there are.
func (s *State) Sessions() int { return s.sessions.count }

// EachSession calls f with every session, in no order, until it returns false.
func (s *State) EachSession(f func(*Session) bool) {
	for i := range Shards {
		if !s.SessionShard(i, f) {
			return
		}
	}
}

// SessionShard calls f with the sessions of one of Shards shards, in no order, until
// it returns false. There may be millions: who looks at all of them does so a shard at
// a time, so that Apply gets in between.
func (s *State) SessionShard(shard int, f func(*Session) bool) bool {
	for _, x := range s.sessions.shards[shard] {
		if !f(x) {
			return false
		}
	}
	return true
}

// session applies a change of a session.
func (s *State) session(c *kvtierv1.SessionCommand) Result {
	node, ok := toNodeID(c.GetNode())
	if !ok || c.GetSession() == "" || len(c.GetSession()) > MaxSessionBytes {
		return Invalid
	}
	x := s.sessions.get(c.GetSession())
	switch change := c.GetChange().(type) {
	case *kvtierv1.SessionCommand_Open:
		return s.openSession(c.GetSession(), node, x, change.Open)
	case *kvtierv1.SessionCommand_Close:
		if x != nil && !change.Close.GetForced() {
			if r := owns(x, c, node); r != OK {
				return r
			}
		}
		if x != nil && change.Close.GetForced() {
			s.audit(byCluster, sessionClosed, c.GetSession(), fmt.Sprintf("owner %s, epoch %d", s.nameOf(x.GetOwner()), x.GetEpoch()))
		}
		s.sessions.remove(c.GetSession())
		return OK
	case *kvtierv1.SessionCommand_TakeOver:
		return s.takeOver(c, node, x, change.TakeOver)
	case *kvtierv1.SessionCommand_Commit:
		return s.commitMove(c, node, x, change.Commit)
	}
	if x == nil {
		return Unknown
	}
	if r := owns(x, c, node); r != OK {
		return r
	}
	next := clone(x)
	var r Result
	switch change := c.GetChange().(type) {
	case *kvtierv1.SessionCommand_Append:
		r = s.appendSession(x, next, change.Append)
	case *kvtierv1.SessionCommand_Retain:
		r = retainSession(next, change.Retain)
	case *kvtierv1.SessionCommand_Prepare:
		r = s.prepareMove(x, next, change.Prepare)
	case *kvtierv1.SessionCommand_Freeze:
		r = freezeMove(x, next, change.Freeze)
	case *kvtierv1.SessionCommand_Abort:
		r = abortMove(x, next, change.Abort)
	default:
		return Invalid
	}
	if r == OK {
		s.sessions.put(next)
	}
	return r
}

func clone(x *Session) *Session { return proto.CloneOf(x) }

// owns checks that a node acts as the owner that it is.
func owns(x *Session, c *kvtierv1.SessionCommand, node placement.NodeID) Result {
	switch {
	case c.GetEpoch() < x.GetEpoch():
		return Stale
	case c.GetEpoch() > x.GetEpoch() || !bytes.Equal(x.GetOwner(), node[:]):
		return NotOwner
	}
	return OK
}

func validRetention(r *kvtierv1.RetainSession) bool { return r.GetPriority() <= maxPriority }

func validChain(c *kvtierv1.SessionChain) bool {
	if c.GetBlocks() == 0 {
		return c.GetTokens() == 0 && len(c.GetTip()) == 0 && len(c.GetHash()) == 0 && len(c.GetSegmentHash()) == 0
	}
	full := c.GetBlocks() >= paging.SegmentBlocks
	return len(c.GetTip()) == 32 && len(c.GetHash()) == 32 && full == (len(c.GetSegmentHash()) == 32) && (full || len(c.GetSegmentHash()) == 0)
}

func (s *State) openSession(name string, node placement.NodeID, x *Session, c *kvtierv1.OpenSession) Result {
	var ns paging.NamespaceID
	if len(c.GetNamespaceId()) != len(ns) || !validRetention(c.GetRetention()) || !validChain(c.GetChain()) || len(c.GetParent()) > MaxSessionBytes {
		return Invalid
	}
	copy(ns[:], c.GetNamespaceId())
	owner := s.nodes[node]
	if owner == nil {
		return Unknown
	}
	if x != nil {
		if !bytes.Equal(x.GetOwner(), node[:]) || !bytes.Equal(x.GetNamespaceId(), ns[:]) {
			return NotOwner
		}
		return OK // opened again: what it was stays
	}
	if !takes(owner) {
		return Full // it is emptied: nothing new is placed there
	}
	if _, known := s.namespaces[ns]; !known {
		return Unknown
	}
	if most := c.GetMaxSessions(); s.sessions.count >= maxSessions || most > 0 && s.sessions.tenants[TenantOf(name)] >= int(most) {
		return Full
	}
	if c.GetParent() != "" {
		parent := s.sessions.get(c.GetParent())
		switch {
		case parent == nil:
			return Unknown
		case !bytes.Equal(parent.GetNamespaceId(), ns[:]) || c.GetChain().GetBlocks() > parent.GetChain().GetBlocks():
			return Invalid
		}
	} else if c.GetChain().GetBlocks() != 0 {
		return Invalid
	}
	// Above every epoch of a session that had this name before: what is late of that one, a
	// command or names on a disk, is of another epoch.
	s.sessions.put(&Session{
		Session: name, NamespaceId: slices.Clone(ns[:]), Owner: slices.Clone(node[:]), Epoch: s.sessions.closed + 1, State: active,
		Chain: proto.CloneOf(c.GetChain()), Retention: proto.CloneOf(c.GetRetention()), Parent: c.GetParent(),
		UsedUnixMs: s.nowMillis, OpenedUnixMs: s.nowMillis,
	})
	return OK
}

func (s *State) appendSession(x, next *Session, c *kvtierv1.AppendSession) Result {
	if !validChain(c.GetChain()) || len(c.GetSecond()) != 0 && len(c.GetSecond()) != len(placement.NodeID{}) {
		return Invalid
	}
	switch {
	case c.GetSequence() == x.GetSequence() && proto.Equal(c.GetChain(), x.GetChain()):
		return OK // the same again
	case c.GetSequence() <= x.GetSequence():
		return Stale
	case c.GetSequence() > x.GetSequence()+1:
		return Gap
	case x.GetState() == frozen:
		return Frozen
	case c.GetChain().GetBlocks() < x.GetChain().GetBlocks() || c.GetChain().GetTokens() < x.GetChain().GetTokens():
		return Invalid
	}
	next.Sequence, next.Chain, next.Second = c.GetSequence(), proto.CloneOf(c.GetChain()), slices.Clone(c.GetSecond())
	next.UsedUnixMs = s.nowMillis
	return OK
}

func retainSession(next *Session, c *kvtierv1.RetainSession) Result {
	if !validRetention(c) {
		return Invalid
	}
	next.Retention = proto.CloneOf(c)
	return OK
}

func (s *State) prepareMove(x, next *Session, c *kvtierv1.PrepareMove) Result {
	target, ok := toNodeID(c.GetTarget())
	if !ok || len(c.GetMove()) != len(requestID{}) || bytes.Equal(x.GetOwner(), target[:]) {
		return Invalid
	}
	if x.GetState() != active {
		if bytes.Equal(x.GetMove(), c.GetMove()) && bytes.Equal(x.GetTarget(), target[:]) {
			return OK // the same again
		}
		return NotOwner // it moves already
	}
	n := s.nodes[target]
	switch {
	case n == nil:
		return Unknown
	case n.State != kvtierv1.NodeState_NODE_STATE_UP:
		return Full // nothing new is placed there
	}
	next.State, next.Move, next.Target = migrating, slices.Clone(c.GetMove()), slices.Clone(target[:])
	return OK
}

func freezeMove(x, next *Session, c *kvtierv1.FreezeMove) Result {
	if x.GetState() == active || !bytes.Equal(x.GetMove(), c.GetMove()) {
		return NotOwner
	}
	next.State = frozen
	return OK
}

func abortMove(x, next *Session, c *kvtierv1.AbortMove) Result {
	if x.GetState() == active {
		return OK // it ended so, or never began
	}
	if !bytes.Equal(x.GetMove(), c.GetMove()) {
		return NotOwner
	}
	next.State, next.Move, next.Target = active, nil, nil
	return OK
}

// commitMove makes the target the owner. The source says so, under its own epoch: a
// late commit of an older move changes nothing.
func (s *State) commitMove(c *kvtierv1.SessionCommand, node placement.NodeID, x *Session, m *kvtierv1.CommitMove) Result {
	if x == nil {
		return Unknown
	}
	if r := owns(x, c, node); r != OK {
		return r
	}
	if x.GetState() != frozen || !bytes.Equal(x.GetMove(), m.GetMove()) {
		return NotOwner
	}
	target, _ := toNodeID(x.GetTarget())
	if n := s.nodes[target]; n == nil || n.State == kvtierv1.NodeState_NODE_STATE_LEFT {
		return Unknown
	}
	next := clone(x)
	next.Owner, next.Epoch, next.Sequence, next.Moves = x.GetTarget(), x.GetEpoch()+1, 0, x.GetMoves()+1
	next.State, next.Move, next.Target, next.Second = active, nil, nil, nil
	s.sessions.put(next)
	s.auditOwner(sessionMoved, x, next)
	return OK
}

// takeOver makes another node the owner of a session whose owner is down.
func (s *State) takeOver(c *kvtierv1.SessionCommand, node placement.NodeID, x *Session, t *kvtierv1.TakeOver) Result {
	if x == nil || s.nodes[node] == nil {
		return Unknown
	}
	if !validChain(t.GetChain()) || t.GetChain().GetBlocks() > x.GetChain().GetBlocks() {
		return Invalid
	}
	switch {
	case c.GetEpoch() < x.GetEpoch():
		return Stale // somebody was faster
	case c.GetEpoch() > x.GetEpoch():
		return NotOwner
	}
	owner, _ := toNodeID(x.GetOwner())
	if n := s.nodes[owner]; owner == node || n != nil && n.State != kvtierv1.NodeState_NODE_STATE_DOWN && n.State != kvtierv1.NodeState_NODE_STATE_LEFT {
		return OwnerAlive
	}
	if !takes(s.nodes[node]) {
		return Full
	}
	next := clone(x)
	next.Owner, next.Epoch, next.Sequence, next.Moves = slices.Clone(node[:]), x.GetEpoch()+1, 0, x.GetMoves()+1
	next.State, next.Move, next.Target, next.Second = active, nil, nil, nil
	next.Chain, next.UsedUnixMs = proto.CloneOf(t.GetChain()), s.nowMillis
	s.sessions.put(next)
	s.auditOwner(sessionTakenOver, x, next)
	return OK
}

// expireSessions forgets sessions that were not used since the leader looked.
func (s *State) expireSessions(c *kvtierv1.ExpireSessions) Result {
	if len(c.GetSessions()) != len(c.GetUsedUnixMs()) {
		return Invalid
	}
	for i, name := range c.GetSessions() {
		if x := s.sessions.get(name); x != nil && x.GetState() == active && x.GetUsedUnixMs() == c.GetUsedUnixMs()[i] {
			s.sessions.remove(name)
		}
	}
	return OK
}

func (s *State) restoreSession(x *Session) bool {
	if x.GetSession() == "" || len(x.GetSession()) > MaxSessionBytes || s.sessions.get(x.GetSession()) != nil || x.GetEpoch() == 0 {
		return false
	}
	s.sessions.put(x)
	return true
}

// sortedSessions lists the sessions of a shard by name.
func sortedSessions(shard map[string]*Session) []*Session {
	return slices.SortedFunc(maps.Values(shard), func(a, b *Session) int {
		return bytes.Compare([]byte(a.GetSession()), []byte(b.GetSession()))
	})
}

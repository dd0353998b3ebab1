package sessions

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Bounds of sessions.
const (
	maxNameBytes = 64      // of a name without its tenant
	maxCallNames = 65536   // names in one call of an engine
	maxLiveNames = 4 << 20 // of sessions that are kept in memory; the longest unused go first
	askWithin    = 5 * time.Second
	hearWithin   = 200 * time.Millisecond // for what was committed a moment ago
	secondWithin = time.Second            // for the node that keeps names beside the owner
	DefaultLimit = 100_000                // sessions of a tenant
)

// Config of a Manager. Zero values mean the documented default.
type Config struct {
	Self  placement.NodeID
	Store *Store // names; the Manager does not close it

	MaxPerTenant int // sessions; 0: DefaultLimit

	// Moves of sessions that this node owns. MaxMoves at a time, the others wait; 0: 4.
	// BytesPerSecond is for all of them together; 0: no limit.
	MaxMoves       int
	BytesPerSecond int64
	Limits         migrate.Limits

	// PrefillRate is what engines stated for a namespace, in tokens a second; 0: not
	// known. nil: never known.
	PrefillRate func(paging.NamespaceID) float64

	Logger *slog.Logger // changes of state only; nil: none
}

// Manager is a node's part in the sessions of its cluster. All methods may be called at
// the same time from many goroutines, those that need the cluster from Start on:
// before, they answer paging.ErrUnavailable.
type Manager struct {
	cfg Config
	log *slog.Logger

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	loops  sync.WaitGroup

	started chan struct{} // closed by Start, after cluster and tier are set
	cluster *cluster.Node
	tier    *tier.Hierarchy

	readTo  uint64      // last entry of the replica's log at Start
	caught  atomic.Bool // the replica has applied that one, with a leader
	moves   moves
	counts  counts
	touches chan struct{} // bounds touch

	mu struct {
		sync.Mutex
		changed  chan struct{} // closed at the next change of any session
		live     map[string]*live
		ahead    map[string]aheadRecord // what the replica does not show yet
		watchers map[*Watch]struct{}
		incoming map[string]struct{}  // sessions that move here
		outgoing map[string]time.Time // sessions of this node that move, and since when nobody is known to drive that
		written  map[string]time.Time
	}
}

// aheadRecord is a session as a commit made it that this node proposed, or heard of from
// the node that did. It is no more than a hint: the directory checks every change.
type aheadRecord struct {
	record *directory.Session
	at     time.Time
}

// live is what is kept in memory of a session that this node owns. Whoever holds lock,
// which has room for one, may use the fields below it.
type live struct {
	lock chan struct{}

	chain    *paging.SessionChain // nil: not loaded
	epoch    uint64
	sequence uint64                  // of the last append that is known to be applied
	applied  paging.SessionEnd       // where the chain ended after that one
	unsure   *kvtierv1.AppendSession // was proposed, and may have been applied or not; chain has it
	request  []byte                  // its name: proposed again, it is applied once
	second   placement.NodeID
	kept     uint64 // names that second keeps

	used time.Time // guarded by Manager.mu
	size int       // names, likewise
}

// New returns a Manager whose Answers can be given to a cluster.
func New(cfg Config) *Manager {
	if cfg.MaxPerTenant == 0 {
		cfg.MaxPerTenant = DefaultLimit
	}
	if cfg.MaxMoves == 0 {
		cfg.MaxMoves = 4
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.PrefillRate == nil {
		cfg.PrefillRate = func(paging.NamespaceID) float64 { return 0 }
	}
	m := &Manager{cfg: cfg, log: cfg.Logger, started: make(chan struct{}), touches: make(chan struct{}, maxTouches)}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.mu.changed = make(chan struct{})
	m.mu.live = map[string]*live{}
	m.mu.ahead = map[string]aheadRecord{}
	m.mu.watchers = map[*Watch]struct{}{}
	m.mu.incoming = map[string]struct{}{}
	m.mu.outgoing = map[string]time.Time{}
	m.mu.written = map[string]time.Time{}
	m.moves.init(cfg.MaxMoves, cfg.BytesPerSecond)
	return m
}

// Start begins to serve, over a cluster whose Answers have this Manager's, and the
// tiers of the node. It is called once.
func (m *Manager) Start(c *cluster.Node, h *tier.Hierarchy) {
	m.cluster, m.tier = c, h
	st := m.directory().Status()
	m.readTo = st.Applied + st.Behind
	close(m.started)
	// Owner: the Manager. Exit: Close.
	m.loops.Go(m.follow)
	m.loops.Go(m.look)
}

// Close ends what runs: moves stop where they are, and go on with the next start. The
// cluster, the tiers and the store are closed after it. Idempotent.
func (m *Manager) Close() {
	m.mu.Lock() // touch looks at ctx under it
	m.cancel()
	m.mu.Unlock()
	m.loops.Wait()
	m.moves.close()
}

func (m *Manager) ready() error {
	select {
	case <-m.started:
	default:
		return fmt.Errorf("this node is starting: %w", paging.ErrUnavailable)
	}
	if m.ctx.Err() != nil {
		return fmt.Errorf("this node stops: %w", paging.ErrClosed)
	}
	return nil
}

func (m *Manager) directory() *directory.Directory { return m.cluster.Directory() }

// fullName is the name of a session in the directory.
func fullName(tenant, name string) (string, error) {
	switch {
	case name == "" || len(name) > maxNameBytes:
		return "", fmt.Errorf("session name of %d bytes, want 1 to %d: %w", len(name), maxNameBytes, paging.ErrInvalid)
	case len(tenant)+1+len(name) > directory.MaxSessionBytes:
		return "", fmt.Errorf("session %q: its name and that of tenant %q have more than %d bytes together: %w", name, tenant, directory.MaxSessionBytes-1, paging.ErrInvalid)
	}
	for _, r := range name {
		if r <= ' ' || r == '/' || r == 0x7f || r == '�' {
			return "", fmt.Errorf("session name %q: it is printable text without spaces and \"/\": %w", name, paging.ErrInvalid)
		}
	}
	return tenant + "/" + name, nil
}

// splitName is the inverse of fullName.
func splitName(full string) (tenant, name string) {
	tenant, name, _ = strings.Cut(full, "/")
	return tenant, name
}

// record is a session as it is known here: as the replica has it, or newer.
func (m *Manager) record(full string) (x *directory.Session) {
	m.directory().Read(func(s *directory.State) { x, _ = s.Session(full) })
	m.mu.Lock()
	defer m.mu.Unlock()
	if a := m.mu.ahead[full].record; a != nil && x != nil && x.GetEpoch() < a.GetEpoch() {
		return a
	}
	return x
}

// lookup is record for a session that another node may have opened a moment ago: the
// replica gets the time that it takes to hear of it. nil: it is not known.
func (m *Manager) lookup(ctx context.Context, full string) *directory.Session {
	if x := m.record(full); x != nil {
		return x
	}
	ctx, cancel := context.WithTimeout(ctx, hearWithin)
	defer cancel()
	x, _ := m.await(ctx, full, func(x *directory.Session) bool { return x != nil })
	return x
}

func ownerOf(x *directory.Session) (id placement.NodeID) {
	copy(id[:], x.GetOwner())
	return id
}

func namespaceOf(x *directory.Session) (id paging.NamespaceID) {
	copy(id[:], x.GetNamespaceId())
	return id
}

// layout is a namespace as this node, or else the directory, knows it.
func (m *Manager) layout(id paging.NamespaceID) (*paging.Namespace, error) {
	if ns, ok := m.tier.Namespace(id); ok {
		return ns, nil
	}
	var encoded []byte
	m.directory().Read(func(s *directory.State) { encoded, _ = s.Namespace(id) })
	if encoded == nil {
		return nil, fmt.Errorf("namespace %s: %w", id.Short(), paging.ErrUnknownNamespace)
	}
	return paging.DecodeNamespace(encoded)
}

// nodeState is how the directory has a node, and its name.
func (m *Manager) node(id placement.NodeID) (rec directory.Node, ok bool) {
	m.directory().Read(func(s *directory.State) { rec, ok = s.Node(id) })
	return rec, ok
}

func (m *Manager) serves(id placement.NodeID) bool {
	rec, ok := m.node(id)
	return ok && (rec.State == kvtierv1.NodeState_NODE_STATE_UP || rec.State == kvtierv1.NodeState_NODE_STATE_DRAINING)
}

// absent is why a session is not known here: it is not, or this node's replica of the
// directory has not read its log again since the start.
func (m *Manager) absent(full string) error {
	if !m.caughtUp() {
		_, name := splitName(full)
		return fmt.Errorf("session %q: this node's replica of the directory is behind: %w", name, paging.ErrUnavailable)
	}
	return notFound(full)
}

// caughtUp reports whether the replica has applied all of the log that it had at Start.
func (m *Manager) caughtUp() bool {
	if m.caught.Load() {
		return true
	}
	st := m.directory().Status()
	if st.HasLeader && st.Applied >= m.readTo {
		m.caught.Store(true)
	}
	return m.caught.Load()
}

// notFound names a session that is not there.
func notFound(full string) error {
	_, name := splitName(full)
	return fmt.Errorf("session %q is not known, or its time is over: %w", name, paging.ErrNotFound)
}

// moved says who owns a session instead.
func (m *Manager) moved(x *directory.Session) error {
	rec, _ := m.node(ownerOf(x))
	_, name := splitName(x.GetSession())
	where := rec.Name
	if where == "" {
		where = ownerOf(x).Short()
	}
	if rec.RPCAddress != "" {
		where += " (" + rec.RPCAddress + ")"
	}
	return fmt.Errorf("session %q is owned by node %s, since epoch %d: %w", name, where, x.GetEpoch(), paging.ErrMoved)
}

// propose has the directory change a session. The error says why it did not; the result
// is what the directory answered, if it did.
func (m *Manager) propose(ctx context.Context, full string, node placement.NodeID, epoch uint64, c *kvtierv1.SessionCommand) (directory.Result, error) {
	return m.proposeAs(ctx, full, node, epoch, nil, c)
}

// proposeAs is propose under a name: of all proposals of one name one is applied.
func (m *Manager) proposeAs(ctx context.Context, full string, node placement.NodeID, epoch uint64, request []byte, c *kvtierv1.SessionCommand) (directory.Result, error) {
	c.Session, c.Node, c.Epoch = full, node[:], epoch
	r, err := m.directory().Propose(ctx, &kvtierv1.DirectoryCommand{RequestId: request, Command: &kvtierv1.DirectoryCommand_Session{Session: c}})
	if err != nil {
		return r, err
	}
	_, name := splitName(full)
	switch r {
	case directory.OK:
		return r, nil
	case directory.Unknown:
		return r, notFound(full)
	case directory.Frozen:
		return r, fmt.Errorf("session %q is being handed over: %w", name, paging.ErrFrozen)
	case directory.Full:
		return r, fmt.Errorf("session %q: %w", name, paging.ErrNoSpace)
	case directory.NotOwner, directory.Stale:
		if x := m.record(full); x != nil && (ownerOf(x) != m.cfg.Self || x.GetEpoch() > epoch) {
			return r, m.moved(x)
		}
		return r, fmt.Errorf("session %q is owned by another node, or is in another state: %w", name, paging.ErrMoved)
	case directory.OwnerAlive:
		return r, fmt.Errorf("session %q: its owner is not recorded as down: %w", name, paging.ErrUnavailable)
	}
	return r, fmt.Errorf("session %q: the directory answers %v: %w", name, r, paging.ErrInvalid)
}

// await waits until the session as it is known here is as wanted.
func (m *Manager) await(ctx context.Context, full string, wanted func(*directory.Session) bool) (*directory.Session, error) {
	for {
		m.mu.Lock()
		changed := m.mu.changed
		m.mu.Unlock()
		x := m.record(full)
		if wanted(x) {
			return x, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return x, fmt.Errorf("this node's replica of the directory is behind: %w: %w", paging.ErrUnavailable, ctx.Err())
		case <-m.ctx.Done():
			return x, fmt.Errorf("this node stops: %w", paging.ErrClosed)
		}
	}
}

// call asks another node, and itself without the network.
func (m *Manager) call(ctx context.Context, to placement.NodeID, method uint8, q, a proto.Message) error {
	b, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	if b, err = m.cluster.Call(ctx, to, method, b); err != nil {
		return err
	}
	if a == nil {
		return nil
	}
	if err := proto.Unmarshal(b, a); err != nil {
		return fmt.Errorf("answer of node %s: %w: %w", to.Short(), paging.ErrIncompatible, err)
	}
	return nil
}

func packNames(names []paging.BlockName) []byte {
	b := make([]byte, 0, 32*len(names))
	for i := range names {
		b = append(b, names[i][:]...)
	}
	return b
}

func unpackNames(b []byte) ([]paging.BlockName, error) {
	if len(b)%32 != 0 || len(b) > 32*maxCallNames {
		return nil, fmt.Errorf("block names of %d bytes, want a multiple of 32 up to %d names: %w", len(b), maxCallNames, paging.ErrInvalid)
	}
	names := make([]paging.BlockName, len(b)/32)
	for i := range names {
		copy(names[i][:], b[32*i:])
	}
	return names, nil
}

// endOf is where the chain of a record ends.
func endOf(c *kvtierv1.SessionChain) (e paging.SessionEnd) {
	e.Blocks, e.Tokens = c.GetBlocks(), c.GetTokens()
	copy(e.Tip[:], c.GetTip())
	copy(e.Hash[:], c.GetHash())
	copy(e.SegmentHash[:], c.GetSegmentHash())
	return e
}

// chainOf is the inverse of endOf.
func chainOf(e paging.SessionEnd) *kvtierv1.SessionChain {
	c := &kvtierv1.SessionChain{Blocks: e.Blocks, Tokens: e.Tokens}
	if e.Blocks > 0 {
		c.Tip, c.Hash = e.Tip[:], e.Hash[:]
	}
	if e.Blocks >= paging.SegmentBlocks {
		c.SegmentHash = e.SegmentHash[:]
	}
	return c
}

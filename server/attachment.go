package server

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/sessions"
	"github.com/kvtier/kvtier/tier"
)

// attachState is where an attachment is in its life.
type attachState uint8

const (
	attached    attachState = iota // its stream is held
	quarantined                    // its stream ended; its tether is open: its slots may be read still
	gone                           // nobody can read its slots any more; they were given back
)

func (s attachState) String() string {
	return [...]string{"attached", "quarantined", "gone"}[s]
}

// errDetached is what calls get after the stream has ended.
var errDetached = fmt.Errorf("its stream has ended: attach again: %w", paging.ErrUnknownAttachment)

// attachment is one engine process. Its life: attached while its stream is held;
// then quarantined while its tether is open, its leases kept; then gone. It
// implements rpc.Attachment.
type attachment struct {
	node    *node
	id      rpc.ID
	caller  rpc.Caller
	engine  string
	version string
	ranks   []uint32
	group   *group // nil: none
	pool    bool   // gets the memory of the device pool
	since   time.Time

	signal  chan struct{}   // outbox has something
	ended   chan struct{}   // closed when the node ends the stream
	life    context.Context // ends when the attachment is gone, or the node
	endLife context.CancelFunc

	lastNamespace atomic.Pointer[namespaceEntry] // the one that the last call named: most engines have one

	growing sync.Mutex // held while staging memory is added; taken before mu
	handing sync.Mutex // held while descriptors are sent; taken before mu

	mu          sync.Mutex
	state       attachState
	err         error // why ended was closed
	streamEnded time.Time
	tethers     int
	forgotten   bool          // the client said that no view is left: the tether does not matter any more
	deliver     chan struct{} // signals the tether that extents were added; nil: no tether
	leases      leases
	attempts    map[rpc.ID]*attempt
	staging     staging
	device      deviceMemory
	prefetches  map[uint64]*prefetch
	outbox      outbox
	watched     *sessions.Watch // of those opened with this attachment; nil: none was
}

type namespaceEntry struct {
	id     paging.NamespaceID
	layout *paging.Layout
}

// outbox is what the node has to say; bounded by the leases, the extents and the
// prefetches there are.
type outbox struct {
	extents  []rpc.Extent
	revoked  []uint64
	stopping time.Duration
	progress bool // some prefetch has news
}

// Events implements rpc.Attachment.
func (a *attachment) Events() <-chan struct{} { return a.signal }

// Ended implements rpc.Attachment.
func (a *attachment) Ended() <-chan struct{} { return a.ended }

// Err implements rpc.Attachment.
func (a *attachment) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// Next implements rpc.Attachment.
func (a *attachment) Next(ev *rpc.Event) bool {
	a.mu.Lock()
	ev.Extents, ev.Revoked, ev.Stopping = a.outbox.extents, a.outbox.revoked, a.outbox.stopping
	ev.Progress, ev.Sessions = a.progressLocked(nil), nil
	a.outbox = outbox{}
	watched := a.watched
	a.mu.Unlock()
	if watched != nil { // it signals as the outbox does
		ev.Sessions = watched.Take()
	}
	return len(ev.Sessions) > 0 || len(ev.Extents) > 0 || len(ev.Revoked) > 0 || ev.Stopping > 0 || len(ev.Progress) > 0
}

// notifyLocked wakes whoever drains the outbox.
func (a *attachment) notifyLocked() {
	select {
	case a.signal <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// end ends the stream for this reason; Detach follows. A stream that has ended
// is left alone.
func (a *attachment) end(why error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == attached && a.err == nil {
		a.err = why
		close(a.ended)
	}
}

// Detach implements rpc.Attachment: no new use, no new grant. What the engine was
// writing is given up; what it reads stays until its tether ends.
func (a *attachment) Detach() {
	a.mu.Lock()
	a.state = quarantined
	a.streamEnded = time.Now()
	if a.err == nil {
		a.err = errDetached
	}
	attempts, prefetches := a.attempts, a.prefetches
	a.attempts, a.prefetches = nil, nil
	watched := a.watched
	a.watched = nil
	for _, t := range attempts {
		a.leaveRegionLocked(t)
	}
	a.mu.Unlock()
	if watched != nil {
		watched.Close()
	}

	for _, t := range attempts {
		t.tier.Abort()
	}
	for _, p := range prefetches {
		p.end()
	}
	if a.group != nil {
		a.node.groups.leave(a.group, a.ranks)
	}
	a.node.log.Info("engine detached", "attachment", shortID(a.id), "engine", a.engine, "tenant", a.caller.Tenant)
	a.free()
}

// free ends the quarantine when nobody can read the slots any more: the stream
// ended, and so did the tether or the client said that it holds no view.
func (a *attachment) free() {
	a.mu.Lock()
	if a.state != quarantined || (a.tethers > 0 && !a.forgotten) {
		a.mu.Unlock()
		return
	}
	a.state = gone
	holds := a.leases.removeAll()
	over, device := a.takeMemoryLocked()
	a.mu.Unlock()
	for _, h := range holds {
		h.Release()
	}
	a.endLife()
	a.handing.Lock() // descriptors of the staging may be on their way
	a.node.freeStaging(over)
	a.node.freeDevice(device)
	a.handing.Unlock()
	a.node.attachments.remove(a)
}

// takeMemoryLocked closes the lists of the engine's memory and returns what is to
// be given back, unless a commit reads from it: that one does when it ends.
// Requires mu.
func (a *attachment) takeMemoryLocked() ([]stagingExtent, []tier.Shared) {
	over := a.staging.take()
	if a.staging.busy > 0 {
		return nil, nil
	}
	for id, r := range a.device.regions {
		if r.busy > 0 { // a FetchInto: it gives the region back
			r.dropped = true
			delete(a.device.regions, id)
		}
	}
	return over, a.device.take()
}

// discard gives everything back at the end of the node.
func (a *attachment) discard() {
	a.mu.Lock()
	a.forgotten = true
	a.mu.Unlock()
	a.free()
}

// orphanFor is how long a tether has been open without a stream; 0: it is not.
func (a *attachment) orphanFor(now time.Time) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != quarantined || a.tethers == 0 {
		return 0
	}
	return now.Sub(a.streamEnded)
}

// tethered counts a hand-off connection of this process; it returns the channel
// that says when extents were added. At most one is open at a time.
func (a *attachment) tethered() (<-chan struct{}, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state != attached:
		return nil, errDetached
	case a.tethers > 0:
		return nil, fmt.Errorf("the attachment has its tether already: %w", paging.ErrInvalid)
	}
	a.tethers++
	a.countTether(1)
	a.deliver = make(chan struct{}, 1)
	a.deliver <- struct{}{}
	return a.deliver, nil
}

// untethered says that the hand-off connection ended: the process is gone, or has
// let go of everything it had mapped.
func (a *attachment) untethered() {
	a.mu.Lock()
	a.tethers--
	a.deliver = nil
	a.mu.Unlock()
	a.countTether(-1)
	a.end(fmt.Errorf("the hand-off socket was closed: %w", paging.ErrUnknownAttachment))
	a.free()
}

// extentsAdded tells the tether that there is more to hand over.
func (a *attachment) extentsAdded() {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case a.deliver <- struct{}{}: // a nil channel takes nothing
	default:
	}
}

// announce tells the engine of extents whose descriptors were handed over.
func (a *attachment) announce(extents []rpc.Extent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.outbox.extents = append(a.outbox.extents, extents...)
	a.notifyLocked()
}

// stopping tells the engine that the node stops.
func (a *attachment) stopping(within time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.outbox.stopping = within
	a.notifyLocked()
}

// sweep revokes what is overdue and expires attempts.
func (a *attachment) sweep(now time.Time) {
	a.mu.Lock()
	due := a.leases.sweep(now)
	if len(due) > 0 && a.state == attached {
		a.outbox.revoked = append(a.outbox.revoked, due...)
		a.notifyLocked()
	}
	var late []*attempt
	for _, t := range a.attempts {
		if !t.expired && !now.Before(t.deadline) {
			t.expired = true
			late = append(late, t)
		}
	}
	a.sweepPrefetchesLocked(now)
	a.mu.Unlock()
	a.node.counters.leasesOverdue.Add(uint64(len(due)))
	for _, t := range late {
		t.tier.Abort()
		a.node.counters.attemptsExpired.Add(1)
	}
}

// namespace finds a namespace of the attachment's tenant. Those of others are
// unknown to it, in the same words.
func (a *attachment) namespace(id paging.NamespaceID) (*paging.Layout, error) {
	if e := a.lastNamespace.Load(); e != nil && e.id == id {
		return e.layout, nil
	}
	layout, err := a.node.namespace(a.caller.Tenant, id)
	if err == nil {
		a.lastNamespace.Store(&namespaceEntry{id, layout})
	}
	return layout, err
}

func shortID(id rpc.ID) string { return fmt.Sprintf("%x", id[:4]) }

// attachments are those of a node.
type attachments struct {
	max int

	mu     sync.RWMutex
	byID   map[rpc.ID]*attachment
	closed bool
}

// add takes a, unless there are too many.
func (as *attachments) add(a *attachment) error {
	as.mu.Lock()
	defer as.mu.Unlock()
	switch {
	case as.closed:
		return errStopping
	case len(as.byID) >= as.max:
		return fmt.Errorf("%d engines are attached or in quarantine, the most at once (max-attachments): %w", as.max, paging.ErrUnavailable)
	}
	if as.byID == nil {
		as.byID = map[rpc.ID]*attachment{}
	}
	as.byID[a.id] = a
	return nil
}

func (as *attachments) remove(a *attachment) {
	as.mu.Lock()
	defer as.mu.Unlock()
	delete(as.byID, a.id)
}

// find is an attachment of this caller. An id is a secret of its process, and
// good only in the hands of its user.
func (as *attachments) find(c rpc.Caller, id rpc.ID) (*attachment, error) {
	as.mu.RLock()
	a, ok := as.byID[id]
	as.mu.RUnlock()
	if !ok || a.caller.Tenant != c.Tenant || a.caller.UID != c.UID || !c.Local {
		return nil, fmt.Errorf("attachment %s: %w", shortID(id), paging.ErrUnknownAttachment)
	}
	return a, nil
}

// ofUser is the attachment of this id if it is a process of this user.
func (as *attachments) ofUser(id rpc.ID, uid uint32) (*attachment, error) {
	as.mu.RLock()
	a, ok := as.byID[id]
	as.mu.RUnlock()
	if !ok || a.caller.UID != uid {
		return nil, fmt.Errorf("attachment %s: %w", shortID(id), paging.ErrUnknownAttachment)
	}
	return a, nil
}

// all lists the attachments, in no order.
func (as *attachments) all() []*attachment {
	as.mu.RLock()
	defer as.mu.RUnlock()
	out := make([]*attachment, 0, len(as.byID))
	for _, a := range as.byID {
		out = append(out, a)
	}
	return out
}

// close refuses new ones from now on.
func (as *attachments) close() {
	as.mu.Lock()
	defer as.mu.Unlock()
	as.closed = true
}

// Attach implements rpc.Node.
func (n *node) Attach(ctx context.Context, c rpc.Caller, h *rpc.Hello) (rpc.Attachment, rpc.Welcome, error) {
	if n.stopping.Load() {
		return nil, rpc.Welcome{}, errStopping
	}
	n.endPrevious(c, h.Previous)
	a := &attachment{
		node: n, id: randomID(), caller: c, engine: h.Engine, version: h.EngineVersion, ranks: h.Ranks, pool: h.DevicePool && n.hbm != nil,
		since: time.Now(), signal: make(chan struct{}, 1), ended: make(chan struct{}),
		attempts: map[rpc.ID]*attempt{}, prefetches: map[uint64]*prefetch{},
	}
	a.life, a.endLife = context.WithCancel(n.ctx)
	if h.Group != "" {
		g, err := n.groups.join(groupKey{c.Tenant, h.Group}, h.GroupSecret, h.Ranks)
		if err != nil {
			return nil, rpc.Welcome{}, err
		}
		a.group = g
	}
	err := a.growUpTo(ctx, n.stagingSize(h.StagingBytes), paging.UnitBytes)
	if err == nil {
		err = a.addWorking(h.WorkingBytes)
	}
	if err == nil {
		err = n.attachments.add(a)
	}
	if err != nil {
		n.freeStaging(a.staging.take())
		n.freeDevice(a.device.take())
		if a.group != nil {
			n.groups.leave(a.group, a.ranks)
		}
		return nil, rpc.Welcome{}, err
	}
	n.log.Info("engine attached", "attachment", shortID(a.id), "engine", a.engine, "version", a.version, "tenant", c.Tenant, "pid", c.PID)
	var workingBytes uint64
	if a.device.working != nil {
		workingBytes = uint64(a.device.working.Bytes())
	}
	return a, rpc.Welcome{
		WorkingExtent: a.device.id, WorkingBytes: workingBytes,
		Attachment: a.id, Node: n.identity.node, Incarnation: n.identity.incarnation, HandoffSocket: n.cfg.HandoffSocket,
		Tenant: c.Tenant, Arenas: n.arenas(), StagingExtent: a.staging.newest(), StagingBytes: uint64(a.staging.bytes),
		LeaseTTL: n.cfg.LeaseTTL,
	}, nil
}

// endPrevious ends the quarantine of an attachment whose client says that no view
// of it is left. One that is not known is of an earlier run of the node.
func (n *node) endPrevious(c rpc.Caller, id *rpc.ID) {
	if id == nil {
		return
	}
	a, err := n.attachments.find(c, *id)
	if err != nil {
		return
	}
	a.end(fmt.Errorf("its client attached anew: %w", paging.ErrUnknownAttachment))
	a.mu.Lock()
	a.forgotten = true
	a.mu.Unlock()
	a.free()
}

// Attachment implements rpc.Node.
func (n *node) Attachment(c rpc.Caller, id rpc.ID) (rpc.Attachment, error) {
	a, err := n.attachments.find(c, id)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != attached || a.err != nil {
		return nil, errDetached
	}
	return a, nil
}

var errStopping = fmt.Errorf("the node stops: %w", paging.ErrUnavailable)

package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Times and bounds of a Session.
const (
	maxWaiting   = 65_536 // blocks that wait to be appended
	flushAtMost  = 4096   // blocks in one call
	frozenLeast  = 2 * time.Millisecond
	frozenMost   = 50 * time.Millisecond
	retryLeast   = 10 * time.Millisecond
	retryMost    = time.Second
	bringAtMost  = 10 * time.Minute
	sessionQueue = 16 // events that wait for their reader; older ones are dropped

	// catchUp is the time that a node which was started may take to know the sessions
	// that there are: until then one that is not known there is asked for again.
	catchUp = 5 * time.Second
)

// SessionOptions opens a session.
type SessionOptions struct {
	Name      string // 1 to 64 bytes of printable text without spaces and "/"
	Namespace paging.NamespaceID
	Retention *Retention // nil: priority 0 without an end; unchanged for a session that exists
	// Names is the chain as the engine has it: what a session whose owner is down is
	// taken over with where the nodes have lost it. nil: not known. Borrowed until return.
	Names []paging.BlockName
	// Bring has the session moved here first if another node owns it. Without it that is
	// paging.ErrMoved.
	Bring bool
}

// SessionEvent says how a session is now. Of several changes in a row only the last may
// be told.
type SessionEvent struct {
	Session      string
	Tenant       string
	Gone         bool   // it was closed, or its time was over; the fields below are empty
	State        string // "active", "migrating" or "frozen"
	Owner        string // node id, hex
	OwnerAddress string // of its gRPC port; "": it has none
	Epoch        uint64
	Target       string // while it moves: node id, hex
	Blocks       uint64
}

// Session is a session that this client's engine appends to. Appending never waits: what
// the node does not take at present (the session is being handed over, there is no
// quorum, the node restarts) is kept, in order, and sent as soon as it does. After the
// client attached anew the session is opened there again by itself. All methods are safe
// for concurrent use.
type Session struct {
	c      *Client
	opts   SessionOptions
	ctx    context.Context // ends with Close, or the client's
	cancel context.CancelFunc
	nudge  chan struct{} // has a token when trying again at once may help
	loops  sync.WaitGroup

	mu      sync.Mutex
	info    SessionInfo
	taken   bool // over, from an owner that is down
	lost    uint64
	blocks  uint64 // that a quorum has
	waiting []paging.BlockName
	opened  *link         // where it was opened last
	running bool          // work does
	doubt   bool          // an event says that it is gone
	moved   chan struct{} // closed and replaced when blocks, or err, change
	err     error         // why nothing more is appended
	closed  bool
	events  chan SessionEvent
}

// OpenSession opens a session at the client's node, or opens it again, and takes it over
// if its owner is down. The caller closes the Session; the session itself goes on. Errors:
// paging.ErrMoved (the text names the owner), ErrUnavailable, ErrUnknownNamespace,
// ErrOverQuota, ErrLost (its chain is nowhere: give Names), ErrIncompatible (the node is
// of no cluster), ErrInvalid (this client has it open already, for one).
func (c *Client) OpenSession(ctx context.Context, o SessionOptions) (*Session, error) {
	s := &Session{c: c, opts: o, nudge: make(chan struct{}, 1), moved: make(chan struct{}), events: make(chan SessionEvent, sessionQueue)}
	s.opts.Names = nil
	s.ctx, s.cancel = context.WithCancel(c.ctx)
	if err := c.book.add(s, c.cfg.Address != ""); err != nil { // before it is opened: events may come before the answer
		s.cancel()
		return nil, err
	}
	l, err := c.up()
	if err == nil {
		err = s.open(ctx, l, o.Names)
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("session %q: %w", o.Name, err)
	}
	if c.link.Load() != l { // the client attached anew meanwhile
		s.attached()
	}
	return s, nil
}

// open opens the session at the node, as after each attachment.
func (s *Session) open(ctx context.Context, l *link, names []paging.BlockName) error {
	req := &kvtierv1.OpenSessionRequest{Session: s.opts.Name, NamespaceId: s.opts.Namespace[:]}
	if l.mux != nil {
		req.Attachment = l.id // gets the events
	}
	s.mu.Lock()
	first := s.opened == nil
	s.mu.Unlock()
	budget := s.c.cfg.CallTimeout
	if first {
		retention, err := s.opts.Retention.wire()
		if err != nil {
			return err
		}
		req.Retention = retention
		for i := range names {
			req.BlockNames = append(req.BlockNames, names[i][:]...)
		}
		if s.opts.Bring {
			req.Elsewhere, budget = kvtierv1.Elsewhere_ELSEWHERE_BRING, bringAtMost
		}
	}
	var resp *kvtierv1.OpenSessionResponse
	err := l.unary(ctx, "open session", budget, func(ctx context.Context) (err error) {
		resp, err = kvtierv1.NewSessionsServiceClient(l.conn).OpenSession(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info, s.opened = sessionOf(resp.GetSession()), l
	s.taken, s.lost = s.taken || resp.GetTakenOver(), s.lost+resp.GetLostBlocks()
	switch {
	case first:
		s.blocks = s.info.Blocks
	case s.info.Blocks < s.blocks:
		return fmt.Errorf("%d blocks at its end were lost with a node: open it again and append from block %d: %w", s.blocks-s.info.Blocks, s.info.Blocks, paging.ErrLost)
	}
	return nil
}

// reopen opens the session where the client is attached now.
func (s *Session) reopen(l *link) error {
	// Open would make a session anew that was closed meanwhile.
	if err := s.exists(l); err != nil {
		return err
	}
	return s.open(s.ctx, l, nil)
}

// exists asks whether the session is there: paging.ErrNotFound if not.
func (s *Session) exists(l *link) error {
	return l.unary(s.ctx, "session", s.c.cfg.CallTimeout, func(ctx context.Context) error {
		_, err := kvtierv1.NewSessionsServiceClient(l.conn).GetSession(ctx, &kvtierv1.GetSessionRequest{Session: s.opts.Name})
		return err
	})
}

// Info is the session as it was when it was opened last.
func (s *Session) Info() SessionInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

// TakenOver reports whether it was taken over from an owner that is down, and how many
// blocks at its end were lost with that.
func (s *Session) TakenOver() (taken bool, lostBlocks uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken, s.lost
}

// Blocks is how many blocks a quorum has of the session, and how many more wait.
func (s *Session) Blocks() (appended, waiting uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blocks, uint64(len(s.waiting))
}

// Append says which blocks come next, from position first on: at most where the chain
// ends. It returns at once. Errors: paging.ErrNoSpace if 65,536 blocks wait already;
// paging.ErrInvalid for a gap; why nothing more is appended (Err).
func (s *Session) Append(first uint64, names []paging.BlockName) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := s.blocks + uint64(len(s.waiting))
	switch {
	case s.err != nil:
		return s.err
	case first > end:
		return fmt.Errorf("session %q: blocks from %d on, it ends at %d: %w", s.opts.Name, first, end, paging.ErrInvalid)
	case first+uint64(len(names)) <= end:
		return nil
	}
	fresh := names[end-first:]
	if len(s.waiting)+len(fresh) > maxWaiting {
		return fmt.Errorf("session %q: %d blocks wait to be appended: %w", s.opts.Name, len(s.waiting), paging.ErrNoSpace)
	}
	s.waiting = append(s.waiting, fresh...)
	s.workLocked(false)
	return nil
}

// Wait waits until nothing waits to be appended. The error is why nothing more is
// appended, or that of ctx.
func (s *Session) Wait(ctx context.Context) error {
	for {
		s.mu.Lock()
		left, err, moved := len(s.waiting), s.err, s.moved
		s.mu.Unlock()
		if err != nil || left == 0 {
			return err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("session %q: %d blocks wait to be appended: %w", s.opts.Name, left, contextError(ctx))
		}
	}
}

// Err is why nothing more is appended: paging.ErrMoved (the text names the new owner),
// ErrNotFound (it was closed), ErrInvalid (it is another conversation than the engine's),
// ErrLost (blocks were lost with a node: open it again), ErrClosed. nil: appends go on.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Rest is the blocks that were not appended, and the position of the first: what an
// engine at the new owner appends after it has opened the session there.
func (s *Session) Rest() (first uint64, names []paging.BlockName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blocks, slices.Clone(s.waiting)
}

// Events tells what becomes of the session. Of several changes the last is told; a
// reader that is slow misses older ones. It is closed by Close, and the client's.
func (s *Session) Events() <-chan SessionEvent { return s.events }

// Close ends the appending. The session goes on; CloseSession ends it. What waits is not
// appended: see Wait. Idempotent.
func (s *Session) Close() {
	s.c.book.remove(s)
	s.end(fmt.Errorf("session %q: %w", s.opts.Name, paging.ErrClosed))
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.loops.Wait()
	if first {
		close(s.events)
	}
}

func (s *Session) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked(err)
}

func (s *Session) endLocked(err error) {
	if s.err == nil {
		s.err = err
		s.changedLocked()
	}
}

func (s *Session) changedLocked() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// attached says that the client is attached anew.
func (s *Session) attached() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.opened != nil { // else OpenSession has yet to return
		s.workLocked(true)
	}
}

// workLocked sees to it that what is to be done is. now: at once, also where work waits.
func (s *Session) workLocked(now bool) {
	if s.err != nil || s.closed {
		return
	}
	if now {
		select {
		case s.nudge <- struct{}{}:
		default:
		}
	}
	if !s.running {
		s.running = true
		s.loops.Go(s.work) // owner: Session; exits when nothing is left to do, or with Close; bound: one
	}
}

// work opens the session again where that is to be done, and appends what waits.
func (s *Session) work() {
	wait, frozen := retryLeast, frozenLeast
	for {
		err := s.step()
		switch {
		case errors.Is(err, errNothing):
			return
		case err == nil:
			wait, frozen = retryLeast, frozenLeast
			continue
		case errors.Is(err, paging.ErrFrozen): // an event tells when that is over, if it is not lost
			s.pause(frozen)
			frozen = min(2*frozen, frozenMost)
			continue
		case errors.Is(err, paging.ErrNotFound) && s.mayCatchUp(): // the node has yet to learn of it
		case errors.Is(err, paging.ErrMoved), errors.Is(err, paging.ErrNotFound), errors.Is(err, paging.ErrInvalid), errors.Is(err, paging.ErrDenied),
			errors.Is(err, paging.ErrLost), errors.Is(err, paging.ErrUnknownNamespace), errors.Is(err, paging.ErrIncompatible), s.ctx.Err() != nil:
			s.mu.Lock()
			s.running = false
			s.endLocked(fmt.Errorf("session %q: %w", s.opts.Name, err))
			s.mu.Unlock()
			return
		}
		// The node, or the quorum, is away for a while.
		s.pause(wait)
		wait = min(2*wait, retryMost)
	}
}

// errNothing says that nothing is to be done; work ends with it.
var errNothing = errors.New("nothing waits")

// pause waits for d, or until the session is nudged, or its end.
func (s *Session) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.nudge:
	case <-s.ctx.Done():
	}
}

// mayCatchUp reports whether the node may not know of a session that is there: it has
// not opened it since the client attached, which was a moment ago.
func (s *Session) mayCatchUp() bool {
	l := s.c.link.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	return l == nil || s.opened != l && time.Since(l.since) < catchUp
}

// step makes one call. errNothing: there was nothing to do.
func (s *Session) step() error {
	l, err := s.c.up()
	if err != nil {
		return err
	}
	s.mu.Lock()
	again, doubt := s.opened != l, s.doubt
	if s.err != nil || !again && !doubt && len(s.waiting) == 0 {
		s.running = false
		s.mu.Unlock()
		return errNothing
	}
	s.doubt = false
	n := min(len(s.waiting), flushAtMost)
	req := &kvtierv1.AppendSessionRequest{Session: s.opts.Name, FirstBlock: s.blocks, Epoch: s.info.Epoch, BlockNames: make([]byte, 0, 32*n)}
	for i := range s.waiting[:n] {
		req.BlockNames = append(req.BlockNames, s.waiting[i][:]...)
	}
	s.mu.Unlock()
	switch {
	case again:
		return s.reopen(l)
	case doubt:
		return s.exists(l)
	}
	err = l.unary(s.ctx, "append", s.c.cfg.CallTimeout, func(ctx context.Context) error {
		_, err := kvtierv1.NewSessionsServiceClient(l.conn).AppendSession(ctx, req)
		return err
	})
	if errors.Is(err, paging.ErrMoved) {
		return s.reopen(l) // it may have come back, at another epoch
	} else if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocks += uint64(n)
	if s.waiting = s.waiting[n:]; len(s.waiting) == 0 {
		s.waiting = nil
	}
	s.changedLocked()
	return nil
}

// tell takes what the node says of the session. It does not block.
func (s *Session) tell(event SessionEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	for sent := false; !sent; {
		select {
		case s.events <- event:
			sent = true
		default:
			select {
			case <-s.events: // the oldest
			default:
			}
		}
	}
	switch {
	case s.opened == nil:
	case event.Gone: // or it was not there yet when a watch began
		s.doubt = true
		s.workLocked(true)
	case event.Epoch > s.info.Epoch && event.Owner != s.info.Owner:
		where := event.Owner[:min(8, len(event.Owner))]
		if event.OwnerAddress != "" {
			where += " (" + event.OwnerAddress + ")"
		}
		s.endLocked(fmt.Errorf("session %q: it is owned by node %s, since epoch %d: %w", s.opts.Name, where, event.Epoch, paging.ErrMoved))
	case event.State != "frozen" && len(s.waiting) > 0:
		s.workLocked(true)
	}
}

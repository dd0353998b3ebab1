package client

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Times and bounds of a Session.
const (
	maxWaiting   = 65_536 // blocks that wait to be appended
	flushAtMost  = 4096   // blocks in one call
	retryFrozen  = 2 * time.Millisecond
	retryLeast   = 10 * time.Millisecond
	retryMost    = time.Second
	bringAtMost  = 10 * time.Minute
	sessionQueue = 16 // events that wait for their reader; older ones are dropped
)

// SessionOptions opens a session.
type SessionOptions struct {
	Name      string // 1 to 64 bytes of printable text without spaces and "/"
	Namespace paging.NamespaceID
	Retention *Retention // nil: priority 0 without an end; unchanged for a session that exists
	// Names is the chain as the engine has it: what a session whose owner is down is
	// taken over with where the nodes have lost it. nil: not known.
	Names []paging.BlockName
	// Bring has the session moved here first if another node owns it. Without it that is
	// paging.ErrMoved.
	Bring bool
}

// SessionEvent says how a session is now. Of several changes in a row only the last may
// be told.
type SessionEvent struct {
	Gone         bool // it was closed, or its time was over
	State        string
	Owner        string // node id, hex
	OwnerAddress string // of its gRPC port; "": it has none
	Epoch        uint64
	Blocks       uint64
}

// Session is a session that this client's engine appends to. Appending never waits: what
// the node does not take at present (the session is being handed over, there is no
// quorum, the node restarts) is kept, in order, and sent as soon as it does. All methods
// are safe for concurrent use.
type Session struct {
	c      *Client
	opts   SessionOptions
	events chan SessionEvent
	cancel context.CancelFunc
	loops  sync.WaitGroup

	mu      sync.Mutex
	info    SessionInfo
	taken   bool // over, from an owner that is down
	lost    uint64
	blocks  uint64 // that a quorum has
	waiting []paging.BlockName
	wake    chan struct{} // has a token when something waits
	moved   chan struct{} // closed and replaced when blocks, or err, change
	err     error         // why nothing more is appended
}

// OpenSession opens a session at the client's node, or opens it again, and takes it over
// if its owner is down. The caller closes the Session; the session itself goes on. Errors:
// paging.ErrMoved (the text names the owner), ErrUnavailable, ErrUnknownNamespace,
// ErrOverQuota, ErrLost (its chain is nowhere: give Names), ErrIncompatible (the node is
// of no cluster).
func (c *Client) OpenSession(ctx context.Context, o SessionOptions) (*Session, error) { //nolint:contextcheck // what runs outlives the call, bounded by the client
	s := &Session{c: c, opts: o, events: make(chan SessionEvent, sessionQueue), wake: make(chan struct{}, 1), moved: make(chan struct{})}
	if err := s.open(ctx, o.Bring); err != nil {
		return nil, fmt.Errorf("session %q: %w", o.Name, err)
	}
	var flushing context.Context
	flushing, s.cancel = context.WithCancel(c.ctx)
	s.loops.Go(func() { s.flush(flushing) }) // owner: Session; exits with Close, or the client's
	s.loops.Go(func() { s.watch(flushing) }) // likewise
	return s, nil
}

// open opens the session at the node, as after each attachment.
func (s *Session) open(ctx context.Context, bring bool) error {
	l, err := s.c.up()
	if err != nil {
		return err
	}
	req := &kvtierv1.OpenSessionRequest{Session: s.opts.Name, NamespaceId: s.opts.Namespace[:]}
	if req.Retention, err = s.opts.Retention.wire(); err != nil {
		return err
	}
	for i := range s.opts.Names {
		req.BlockNames = append(req.BlockNames, s.opts.Names[i][:]...)
	}
	budget := s.c.cfg.CallTimeout
	if bring {
		req.Elsewhere, budget = kvtierv1.Elsewhere_ELSEWHERE_BRING, bringAtMost
	}
	var resp *kvtierv1.OpenSessionResponse
	err = l.unary(ctx, "open session", budget, func(ctx context.Context) (err error) {
		resp, err = kvtierv1.NewSessionsServiceClient(l.conn).OpenSession(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info, s.taken, s.lost = sessionOf(resp.GetSession()), resp.GetTakenOver(), resp.GetLostBlocks()
	s.blocks = max(s.blocks, s.info.Blocks)
	return nil
}

// Info is the session as it was when it was opened.
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
	select {
	case s.wake <- struct{}{}:
	default:
	}
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
// paging.ErrNotFound (it was closed), paging.ErrInvalid (it is another conversation than
// the engine's), paging.ErrClosed. nil: appends go on.
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
	return s.blocks, append([]paging.BlockName(nil), s.waiting...)
}

// Events tells what becomes of the session. Of several changes the last is told; a
// reader that is slow misses older ones. It is closed by Close.
func (s *Session) Events() <-chan SessionEvent { return s.events }

// Close ends the appending. The session goes on; CloseSession of an Admin ends it.
// What waits is not appended: see Wait.
func (s *Session) Close() {
	s.end(fmt.Errorf("session %q: %w", s.opts.Name, paging.ErrClosed))
	s.cancel()
	s.loops.Wait()
}

func (s *Session) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		s.changedLocked()
	}
}

func (s *Session) changedLocked() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// flush appends what waits.
func (s *Session) flush(ctx context.Context) {
	for {
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
		wait := retryLeast
		for {
			err := s.flushSome(ctx)
			switch {
			case errors.Is(err, errFlushed):
			case err == nil:
				wait = retryLeast
				continue
			case errors.Is(err, paging.ErrFrozen):
				if !pause(ctx, retryFrozen) {
					return
				}
				continue
			case errors.Is(err, paging.ErrMoved), errors.Is(err, paging.ErrNotFound), errors.Is(err, paging.ErrInvalid), errors.Is(err, paging.ErrDenied), errors.Is(err, paging.ErrLost):
				s.end(fmt.Errorf("session %q: %w", s.opts.Name, err))
				return
			default: // the node, or the quorum, is away for a while
				if !pause(ctx, wait) {
					return
				}
				wait = min(2*wait, retryMost)
				continue
			}
			break
		}
	}
}

var errFlushed = errors.New("nothing waits")

func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// flushSome makes one call. errFlushed: nothing waits.
func (s *Session) flushSome(ctx context.Context) error {
	s.mu.Lock()
	n := min(len(s.waiting), flushAtMost)
	req := &kvtierv1.AppendSessionRequest{Session: s.opts.Name, FirstBlock: s.blocks}
	for i := range s.waiting[:n] {
		req.BlockNames = append(req.BlockNames, s.waiting[i][:]...)
	}
	s.mu.Unlock()
	if n == 0 {
		return errFlushed
	}
	l, err := s.c.up()
	if err != nil {
		return err
	}
	err = l.unary(ctx, "append", s.c.cfg.CallTimeout, func(ctx context.Context) error {
		_, err := kvtierv1.NewSessionsServiceClient(l.conn).AppendSession(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocks += uint64(n)
	s.waiting = s.waiting[n:]
	if len(s.waiting) == 0 {
		s.waiting = nil
	}
	s.changedLocked()
	return nil
}

// watch hands on what the node tells of the session, over all attachments.
func (s *Session) watch(ctx context.Context) {
	defer close(s.events)
	wait := retryLeast
	for {
		l, err := s.c.up()
		if err == nil {
			began := time.Now()
			s.watchAt(ctx, l)
			if time.Since(began) > retryMost {
				wait = retryLeast
			}
		}
		if !pause(ctx, wait) {
			return
		}
		wait = min(2*wait, retryMost)
	}
}

// watchAt hands on what one connection tells, until it ends.
func (s *Session) watchAt(ctx context.Context, l *link) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)() //nolint:contextcheck // the attachment bounds it too
	stream, err := kvtierv1.NewSessionsServiceClient(l.conn).WatchSessions(ctx, &kvtierv1.WatchSessionsRequest{Sessions: []string{s.opts.Name}})
	for err == nil {
		var m *kvtierv1.WatchSessionsResponse
		if m, err = stream.Recv(); err == nil {
			s.tell(m.GetEvent())
		}
	}
}

func (s *Session) tell(e *kvtierv1.SessionEvent) {
	event := SessionEvent{
		Gone: e.GetGone(), Owner: hex.EncodeToString(e.GetOwner()), OwnerAddress: e.GetOwnerAddress(), Epoch: e.GetEpoch(), Blocks: e.GetBlocks(),
	}
	if !event.Gone {
		event.State = sessionState(e.GetState())
	}
	for {
		select {
		case s.events <- event:
			return
		default:
		}
		select {
		case <-s.events: // the oldest
		default:
		}
	}
}

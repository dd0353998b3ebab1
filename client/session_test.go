package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// testSessions are the sessions of a cluster that a testNode is of: they outlive its runs.
type testSessions struct {
	kvtierv1.UnimplementedSessionsServiceServer
	node *testNode

	mu       sync.Mutex
	byName   map[string]*testSession
	refuse   error         // the answer to appends
	changed  chan struct{} // closed and replaced at each change
	opens    int
	appends  int
	watches  int
	attached map[string][]byte // attachment that a session was opened with last
}

type testSession struct {
	names []byte
	event *kvtierv1.SessionEvent
}

var (
	testOwner  = bytes.Repeat([]byte{1}, 16)
	otherOwner = bytes.Repeat([]byte{2}, 16)
)

// withSessions gives a node sessions; before it starts.
func withSessions(n *testNode) *testSessions {
	s := &testSessions{node: n, byName: map[string]*testSession{}, attached: map[string][]byte{}, changed: make(chan struct{})}
	n.sessions = s
	return s
}

func (s *testSessions) find(name string) (*testSession, error) {
	x := s.byName[name]
	switch {
	case x == nil:
		return nil, kvstatus.Status(fmt.Errorf("session: %w", paging.ErrNotFound))
	case !bytes.Equal(x.event.GetOwner(), testOwner):
		return nil, kvstatus.Status(fmt.Errorf("session: %w", paging.ErrMoved))
	}
	return x, nil
}

func (s *testSessions) OpenSession(_ context.Context, r *kvtierv1.OpenSessionRequest) (*kvtierv1.OpenSessionResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opens++
	if s.byName[r.GetSession()] == nil {
		s.byName[r.GetSession()] = &testSession{event: &kvtierv1.SessionEvent{
			Session: r.GetSession(), Tenant: testTenant, State: kvtierv1.SessionState_SESSION_STATE_ACTIVE, Owner: testOwner, Epoch: 1}}
	}
	x, err := s.find(r.GetSession())
	if err != nil {
		return nil, err
	}
	s.attached[r.GetSession()] = r.GetAttachment()
	return &kvtierv1.OpenSessionResponse{Session: &kvtierv1.SessionInfo{
		Session: r.GetSession(), Owner: x.event.GetOwner(), Epoch: x.event.GetEpoch(), State: x.event.GetState(), Blocks: uint64(len(x.names) / 32)}}, nil
}

func (s *testSessions) GetSession(_ context.Context, r *kvtierv1.GetSessionRequest) (*kvtierv1.GetSessionResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.find(r.GetSession())
	if errors.Is(kvstatus.Err(err), paging.ErrMoved) {
		err = nil
	}
	return &kvtierv1.GetSessionResponse{}, err
}

func (s *testSessions) AppendSession(_ context.Context, r *kvtierv1.AppendSessionRequest) (*kvtierv1.AppendSessionResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.appends++
	if s.refuse != nil {
		return nil, kvstatus.Status(s.refuse)
	}
	x, err := s.find(r.GetSession())
	if err != nil {
		return nil, err
	}
	at := 32 * int(r.GetFirstBlock())
	switch {
	case r.GetEpoch() != x.event.GetEpoch():
		return nil, kvstatus.Status(fmt.Errorf("epoch %d: %w", r.GetEpoch(), paging.ErrMoved))
	case at > len(x.names):
		return nil, kvstatus.Status(fmt.Errorf("gap: %w", paging.ErrInvalid))
	}
	x.names = append(x.names[:at], r.GetBlockNames()...)
	return &kvtierv1.AppendSessionResponse{Blocks: uint64(len(x.names) / 32)}, nil
}

func (s *testSessions) WatchSessions(r *kvtierv1.WatchSessionsRequest, stream grpc.ServerStreamingServer[kvtierv1.WatchSessionsResponse]) error {
	s.mu.Lock()
	s.watches++
	s.mu.Unlock()
	for {
		s.mu.Lock()
		var events []*kvtierv1.SessionEvent
		for _, name := range r.GetSessions() {
			events = append(events, s.eventLocked(name))
		}
		changed := s.changed
		s.mu.Unlock()
		for _, e := range events {
			if err := stream.Send(&kvtierv1.WatchSessionsResponse{Event: e}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (s *testSessions) eventLocked(name string) *kvtierv1.SessionEvent {
	if x := s.byName[name]; x != nil {
		return x.event
	}
	return &kvtierv1.SessionEvent{Session: name, Gone: true}
}

// become changes a session and tells those who opened or watch it.
func (s *testSessions) become(t *testing.T, name string, e *kvtierv1.SessionEvent) {
	t.Helper()
	s.mu.Lock()
	if e == nil {
		delete(s.byName, name)
	} else {
		e.Session = name
		s.byName[name].event = e
	}
	close(s.changed)
	s.changed = make(chan struct{})
	e = s.eventLocked(name)
	id := s.attached[name]
	s.mu.Unlock()
	if len(id) == 0 {
		return
	}
	s.node.mu.Lock()
	a := s.node.attachments[shm.AttachmentID(id)]
	s.node.mu.Unlock()
	a.sendMu.Lock()
	defer a.sendMu.Unlock()
	if err := a.stream.Send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Session{Session: e}}); err != nil {
		t.Fatal(err)
	}
}

func (s *testSessions) refuseAppends(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = why
}

func (s *testSessions) has(name string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.byName[name].names)
}

func pack(names []paging.BlockName) (b []byte) {
	for i := range names {
		b = append(b, names[i][:]...)
	}
	return b
}

// openTestSession opens a session of a node that is not closed before the test ends.
func openTestSession(t *testing.T, c *client.Client, name string) *client.Session {
	t.Helper()
	s, err := c.OpenSession(t.Context(), client.SessionOptions{Name: name, Namespace: paging.NamespaceID{1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func flushed(t *testing.T, s *client.Session) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	return s.Wait(ctx)
}

// near and far are the two ways of a client to its node.
func nearAndFar(t *testing.T, test func(t *testing.T, n *testNode, s *testSessions, c *client.Client)) {
	for _, far := range []bool{false, true} {
		t.Run(map[bool]string{false: "attached", true: "streamed"}[far], func(t *testing.T) {
			n := newTestNode(t)
			s := withSessions(n)
			n.start(t)
			cfg := patient(n)
			if far {
				cfg.Socket, cfg.Address = "", n.address
			}
			test(t, n, s, open(t, cfg))
		})
	}
}

// What a node does not take at present is kept in order and sent when it does, and the
// engine does not wait for any of it.
func TestAppendsAreKept(t *testing.T) {
	nearAndFar(t, func(t *testing.T, _ *testNode, at *testSessions, c *client.Client) {
		s := openTestSession(t, c, "s")
		names := chain(1, 100)
		for _, why := range []error{paging.ErrFrozen, paging.ErrUnavailable, paging.ErrNoSpace} {
			at.refuseAppends(why)
			had, _ := s.Blocks()
			for i := had; i < had+10; i++ { // one at a time, each twice
				for range 2 {
					if err := s.Append(i, names[i:i+1]); err != nil {
						t.Fatal(err)
					}
				}
			}
			if has, waiting := s.Blocks(); has != had || waiting != 10 {
				t.Errorf("%v: %d blocks and %d wait, want %d and 10", why, has, waiting, had)
			}
			at.refuseAppends(nil)
			if err := flushed(t, s); err != nil {
				t.Fatalf("%v: %v", why, err)
			}
			if got := at.has("s"); !bytes.Equal(got, pack(names[:had+10])) {
				t.Errorf("%v: the session has %d bytes of names, not the first %d blocks", why, len(got), had+10)
			}
		}
		if err := s.Append(31, names[31:]); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a gap: %v", err)
		}
	})
}

func TestBufferOfAppendsIsBounded(t *testing.T) {
	n := newTestNode(t)
	at := withSessions(n)
	n.start(t)
	s := openTestSession(t, open(t, patient(n)), "s")
	at.refuseAppends(paging.ErrUnavailable)
	names := chain(1, 65_536)
	if err := s.Append(0, names); err != nil {
		t.Fatal(err)
	}
	if err := s.Append(65_536, chain(2, 1)); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("one more than the most: %v", err)
	}
	at.refuseAppends(nil)
	if err := flushed(t, s); err != nil {
		t.Fatal(err)
	}
	if got := at.has("s"); !bytes.Equal(got, pack(names)) {
		t.Errorf("the session has %d bytes of names", len(got))
	}
}

// A node that goes away and comes back costs the engine nothing: the session is opened
// again, its events go on, and what was kept is appended.
func TestSessionAfterTheNodeRestarts(t *testing.T) {
	nearAndFar(t, func(t *testing.T, n *testNode, at *testSessions, c *client.Client) {
		s := openTestSession(t, c, "s")
		names := chain(1, 20)
		if err := errors.Join(s.Append(0, names[:10]), flushed(t, s)); err != nil {
			t.Fatal(err)
		}
		n.stop()
		if err := s.Append(10, names[10:]); err != nil {
			t.Errorf("while the node is away: %v", err)
		}
		n.start(t)
		if err := flushed(t, s); err != nil {
			t.Fatal(err)
		}
		if got := at.has("s"); !bytes.Equal(got, pack(names)) {
			t.Errorf("the session has %d bytes of names", len(got))
		}
		at.mu.Lock()
		opens, attached := at.opens, len(at.attached["s"]) > 0
		at.mu.Unlock()
		if opens < 2 && attached {
			t.Errorf("opened %d times, want again after the restart", opens)
		}
		at.become(t, "s", &kvtierv1.SessionEvent{State: kvtierv1.SessionState_SESSION_STATE_MIGRATING, Owner: testOwner, Epoch: 1, Target: otherOwner})
		awaitEvent(t, s, func(e client.SessionEvent) bool { return e.State == "migrating" })
	})
}

func awaitEvent(t *testing.T, s *client.Session, wanted func(client.SessionEvent) bool) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case e := <-s.Events():
			if wanted(e) {
				return
			}
		case <-timeout:
			t.Fatal("the event does not come")
		}
	}
}

// An engine learns on its stream that the session is owned elsewhere, and what it has not
// appended; one that comes back at another epoch is opened again by itself.
func TestSessionMoves(t *testing.T) {
	nearAndFar(t, func(t *testing.T, _ *testNode, at *testSessions, c *client.Client) {
		s := openTestSession(t, c, "s")
		names := chain(1, 30)
		if err := errors.Join(s.Append(0, names[:10]), flushed(t, s)); err != nil {
			t.Fatal(err)
		}
		at.become(t, "s", &kvtierv1.SessionEvent{State: kvtierv1.SessionState_SESSION_STATE_ACTIVE, Owner: testOwner, Epoch: 3})
		if err := errors.Join(s.Append(10, names[10:20]), flushed(t, s)); err != nil {
			t.Errorf("after it came back: %v", err)
		}
		at.refuseAppends(paging.ErrFrozen)
		if err := s.Append(20, names[20:]); err != nil {
			t.Fatal(err)
		}
		at.become(t, "s", &kvtierv1.SessionEvent{State: kvtierv1.SessionState_SESSION_STATE_ACTIVE, Owner: otherOwner, OwnerAddress: "10.0.0.2:7440", Epoch: 4})
		if err := flushed(t, s); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("owned by another node: %v", err)
		}
		awaitEvent(t, s, func(e client.SessionEvent) bool { return e.Epoch == 4 && e.OwnerAddress == "10.0.0.2:7440" })
		if first, rest := s.Rest(); first != 20 || !slices.Equal(rest, names[20:]) {
			t.Errorf("%d blocks are left from %d on", len(rest), first)
		}
		if err := s.Append(30, chain(1, 31)[30:]); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("an append after that: %v", err)
		}
		s.Close()
		if _, err := c.OpenSession(t.Context(), client.SessionOptions{Name: "s"}); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("open: %v", err)
		}
	})
}

// A session that lost blocks with a node, or was closed, is at its end; nothing opens it
// anew by accident.
func TestSessionEnds(t *testing.T) {
	nearAndFar(t, func(t *testing.T, n *testNode, at *testSessions, c *client.Client) {
		short, gone, away := openTestSession(t, c, "short"), openTestSession(t, c, "gone"), openTestSession(t, c, "away")
		for _, s := range []*client.Session{short, gone, away} {
			if err := errors.Join(s.Append(0, chain(1, 10)), flushed(t, s)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.OpenSession(t.Context(), client.SessionOptions{Name: "short"}); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("opened twice: %v", err)
		}
		at.become(t, "gone", nil)
		awaitEvent(t, gone, func(e client.SessionEvent) bool { return e.Gone })
		eventually(t, "it is at its end", func() bool { return gone.Err() != nil })
		if err := gone.Append(10, chain(1, 11)[10:]); !errors.Is(err, paging.ErrNotFound) {
			t.Errorf("closed: %v", err)
		}
		n.stop()
		at.mu.Lock()
		at.byName["short"].names = at.byName["short"].names[:32*4]
		at.byName["away"].event = &kvtierv1.SessionEvent{Session: "away", Owner: otherOwner, Epoch: 2}
		at.mu.Unlock()
		n.start(t)
		for s, want := range map[*client.Session]error{short: paging.ErrLost, away: paging.ErrMoved} {
			if err := s.Append(10, chain(1, 11)[10:]); err != nil && !errors.Is(err, want) {
				t.Error(err)
			}
			if err := flushed(t, s); !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
		}
		short.Close()
		again := openTestSession(t, c, "short")
		if has, _ := again.Blocks(); has != 4 {
			t.Errorf("opened again it has %d blocks, want 4", has)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := again.Append(4, chain(1, 5)[4:]); !errors.Is(err, paging.ErrClosed) {
			t.Errorf("after the client was closed: %v", err)
		}
		for range short.Events() { // ends: it was closed
		}
	})
}

// However many sessions a streamed client has, they are watched together.
func TestOneWatchForAllSessions(t *testing.T) {
	n := newTestNode(t)
	at := withSessions(n)
	n.start(t)
	cfg := patient(n)
	cfg.Socket, cfg.Address = "", n.address
	c := open(t, cfg)
	for i := range 50 {
		openTestSession(t, c, fmt.Sprint(i))
	}
	last := openTestSession(t, c, "last")
	awaitEvent(t, last, func(client.SessionEvent) bool { return true })
	at.mu.Lock()
	defer at.mu.Unlock()
	if at.watches >= 50 {
		t.Errorf("%d watches for 51 sessions", at.watches)
	}
}

package client

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// maxStreamedSessions bounds the sessions that a client without an attachment has open:
// as many as it may watch in one call.
const maxStreamedSessions = 1024

// sessionBook is the sessions that a client has open. The zero value is ready for use.
type sessionBook struct {
	mu      sync.Mutex
	byName  map[string]*Session
	same    context.Context // ends when byName changes; nil: nobody asked
	changed context.CancelFunc
	closed  bool
}

func (b *sessionBook) add(s *Session, streamed bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	name := s.opts.Name
	switch {
	case b.closed:
		return fmt.Errorf("session %q: client: %w", name, paging.ErrClosed)
	case b.byName[name] != nil:
		return fmt.Errorf("session %q is open already in this client: close that Session first: %w", name, paging.ErrInvalid)
	case streamed && len(b.byName) >= maxStreamedSessions:
		return fmt.Errorf("session %q: this client has %d sessions open, the most without an attachment: close some: %w", name, len(b.byName), paging.ErrNoSpace)
	}
	if b.byName == nil {
		b.byName = map[string]*Session{}
	}
	b.byName[name] = s
	b.changeLocked()
	return nil
}

func (b *sessionBook) remove(s *Session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byName[s.opts.Name] == s {
		delete(b.byName, s.opts.Name)
		b.changeLocked()
	}
}

func (b *sessionBook) changeLocked() {
	if b.changed != nil {
		b.changed()
		b.same, b.changed = nil, nil
	}
}

// all returns the sessions.
func (b *sessionBook) all() []*Session {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]*Session, 0, len(b.byName))
	for _, s := range b.byName {
		out = append(out, s)
	}
	return out
}

// names returns the names of the sessions, and a context that ends when there are others.
func (b *sessionBook) names() ([]string, context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.same == nil {
		b.same, b.changed = context.WithCancel(context.Background())
	}
	out := make([]string, 0, len(b.byName))
	for name := range b.byName {
		out = append(out, name)
	}
	slices.Sort(out)
	return out, b.same
}

// attached says that the client is attached anew.
func (b *sessionBook) attached() {
	for _, s := range b.all() {
		s.attached()
	}
}

// tell hands an event to its session.
func (b *sessionBook) tell(e *kvtierv1.SessionEvent) {
	b.mu.Lock()
	s := b.byName[e.GetSession()]
	b.mu.Unlock()
	if s != nil {
		s.tell(eventOf(e))
	}
}

// close closes all sessions, and takes no more.
func (b *sessionBook) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	for _, s := range b.all() {
		s.Close()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changeLocked()
}

func eventOf(e *kvtierv1.SessionEvent) SessionEvent {
	out := SessionEvent{
		Session: e.GetSession(), Tenant: e.GetTenant(), Gone: e.GetGone(), Owner: hex.EncodeToString(e.GetOwner()), OwnerAddress: e.GetOwnerAddress(),
		Epoch: e.GetEpoch(), Target: hex.EncodeToString(e.GetTarget()), Blocks: e.GetBlocks(),
	}
	if !out.Gone {
		out.State = sessionState(e.GetState())
	}
	return out
}

// watchSessions tells the sessions of a client that has no attachment stream what becomes
// of them, by one watch of them all.
func (l *link) watchSessions() {
	wait := retryLeast
	for l.ctx.Err() == nil {
		names, same := l.client.book.names()
		began := time.Now()
		if len(names) == 0 {
			select {
			case <-same.Done():
			case <-l.ctx.Done():
			}
			continue
		}
		l.watchSome(same, names)
		if wait = min(2*wait, retryMost); same.Err() != nil || time.Since(began) > retryMost {
			wait = retryLeast // also lets a few more sessions come together
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-l.ctx.Done():
		}
		timer.Stop()
	}
}

// watchSome watches sessions as long as they are the same, or until the watch ends.
func (l *link) watchSome(same context.Context, names []string) {
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	defer context.AfterFunc(same, cancel)()
	stream, err := kvtierv1.NewSessionsServiceClient(l.conn).WatchSessions(ctx, &kvtierv1.WatchSessionsRequest{Sessions: names}) //nolint:contextcheck // bounded by the link
	for err == nil {
		var m *kvtierv1.WatchSessionsResponse
		if m, err = stream.Recv(); err == nil {
			l.heard.Add(1)
			l.client.book.tell(m.GetEvent())
		}
	}
}

package sessions

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
)

// Bounds of watching.
const (
	maxWatched  = 1024  // sessions that a Watch names
	maxFollowed = 65536 // sessions that are added to one of Follow
	maxWatchers = 4096
	maxPending  = 4096 // changed sessions that wait to be told; beyond it all are told anew
)

// Watch tells what becomes of sessions. Each says how a session is now, so of several
// changes in a row only the last may be told.
type Watch struct {
	m       *Manager
	names   map[string]struct{} // full; nil: all of the tenant
	most    int                 // of names
	follows bool                // sessions that are gone are not watched any more
	tenant  string              // "": all
	signal  chan struct{}
	pending map[string]struct{} // guarded by Manager.mu
	all     bool                // likewise: any may have changed
}

// Watch watches sessions of a tenant by name, none: all of it; an empty tenant: all of
// the cluster. First it tells how each is. The caller closes it.
func (m *Manager) Watch(tenant string, sessions []string) (*Watch, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	w := &Watch{m: m, tenant: tenant, signal: make(chan struct{}, 1), most: maxWatched, all: true, pending: map[string]struct{}{}}
	w.signal <- struct{}{}
	return w, m.enter(w, sessions)
}

// Follow is Watch of the sessions that are added later, up to 65,536, each until it is
// gone. signal, which has room for one, is signalled when Take has something; others may
// signal it too.
func (m *Manager) Follow(tenant string, signal chan struct{}) (*Watch, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	w := &Watch{m: m, tenant: tenant, signal: signal, most: maxFollowed, follows: true, names: map[string]struct{}{}, pending: map[string]struct{}{}}
	return w, m.enter(w, nil)
}

// enter puts a new watch of sessions on the books.
func (m *Manager) enter(w *Watch, sessions []string) error {
	if len(sessions) > maxWatched {
		return fmt.Errorf("%d sessions to watch, want at most %d: %w", len(sessions), maxWatched, paging.ErrInvalid)
	}
	for _, name := range sessions {
		if err := w.Add(name); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.mu.watchers) >= maxWatchers {
		return fmt.Errorf("%d watch sessions here already: %w", maxWatchers, paging.ErrUnavailable)
	}
	m.mu.watchers[w] = struct{}{}
	return nil
}

// Add has one more session watched, of the tenant of the Watch, which has one.
func (w *Watch) Add(session string) error {
	full, err := fullName(w.tenant, session)
	if err != nil {
		return err
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.names == nil {
		w.names = map[string]struct{}{}
	}
	if _, again := w.names[full]; !again && len(w.names) >= w.most {
		return fmt.Errorf("%d sessions are watched already: %w", w.most, paging.ErrInvalid)
	}
	w.names[full] = struct{}{}
	w.pending[full] = struct{}{}
	w.wake()
	return nil
}

// Close ends it.
func (w *Watch) Close() {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	delete(w.m.mu.watchers, w)
}

func (w *Watch) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

// Ready is signalled when Take has something.
func (w *Watch) Ready() <-chan struct{} { return w.signal }

// Take returns how the sessions are that have changed since the last call, without
// waiting.
func (w *Watch) Take() (events []*kvtierv1.SessionEvent) {
	m := w.m
	var names []string
	m.mu.Lock()
	all := w.all
	w.all = false
	for name := range w.pending {
		names = append(names, name)
	}
	clear(w.pending)
	if all && w.names != nil {
		names = names[:0]
		for name := range w.names {
			names = append(names, name)
		}
		all = false
	}
	m.mu.Unlock()
	if all {
		for shard := range directory.Shards {
			m.directory().Read(func(s *directory.State) {
				s.SessionShard(shard, func(x *directory.Session) bool {
					if w.tenant == "" || directory.TenantOf(x.GetSession()) == w.tenant {
						names = append(names, x.GetSession())
					}
					return true
				})
			})
		}
	}
	var over []string
	for _, full := range names {
		e := m.event(full)
		events = append(events, e)
		if e.GetGone() && w.follows {
			over = append(over, full)
		}
	}
	w.forget(over)
	return events
}

// forget ends the watch of sessions that are gone, unless they were added again meanwhile.
func (w *Watch) forget(names []string) {
	if len(names) == 0 {
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	for _, full := range names {
		if _, again := w.pending[full]; !again {
			delete(w.names, full)
		}
	}
}

// event is how a session is now.
func (m *Manager) event(full string) *kvtierv1.SessionEvent {
	tenant, name := splitName(full)
	e := &kvtierv1.SessionEvent{Session: name, Tenant: tenant}
	x := m.record(full)
	if x == nil {
		e.Gone = true
		return e
	}
	e.State, e.Owner, e.Epoch, e.Target, e.Blocks = x.GetState(), x.GetOwner(), x.GetEpoch(), x.GetTarget(), x.GetChain().GetBlocks()
	rec, _ := m.node(ownerOf(x))
	e.OwnerAddress = rec.RPCAddress
	return e
}

// Next waits for Take to have something. The error is that of ctx, or
// paging.ErrClosed when the node stops.
func (w *Watch) Next(ctx context.Context) ([]*kvtierv1.SessionEvent, error) {
	for {
		select {
		case <-w.signal:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-w.m.ctx.Done():
			return nil, fmt.Errorf("this node stops: %w", paging.ErrClosed)
		}
		if events := w.Take(); len(events) > 0 {
			return events, nil
		}
	}
}

// matches requires Manager.mu.
func (w *Watch) matches(full string) bool {
	if w.names != nil {
		_, ok := w.names[full]
		return ok
	}
	return w.tenant == "" || strings.HasPrefix(full, w.tenant+"/")
}

// noteChanged tells all who wait for changes that there are some.
func (m *Manager) noteChanged(names []string, all bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.mu.changed)
	m.mu.changed = make(chan struct{})
	for w := range m.mu.watchers {
		some := all
		w.all = w.all || all
		for _, full := range names {
			if !w.matches(full) {
				continue
			}
			some = true
			if len(w.pending) >= maxPending {
				w.all = true
				clear(w.pending)
			} else {
				w.pending[full] = struct{}{}
			}
		}
		if some {
			w.wake()
		}
	}
}

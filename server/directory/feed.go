package directory

import (
	"context"
	"sync"
)

// maxFeed bounds the sessions of which a feed notes that they changed: beyond it, it
// says that any may have.
const maxFeed = 1 << 16

// SessionFeed tells which sessions have changed in this replica.
type SessionFeed struct {
	signal chan struct{} // has a token while something waits
	mu     struct {
		sync.Mutex
		names map[string]struct{}
		all   bool
	}
}

func newSessionFeed() *SessionFeed {
	f := &SessionFeed{signal: make(chan struct{}, 1)}
	f.mu.names = map[string]struct{}{}
	return f
}

// SessionFeed is the feed of this replica. It has one reader.
func (d *Directory) SessionFeed() *SessionFeed { return d.feed }

func (f *SessionFeed) add(names []string) {
	f.mu.Lock()
	for _, name := range names {
		if f.mu.all = f.mu.all || len(f.mu.names) >= maxFeed; f.mu.all {
			clear(f.mu.names)
			break
		}
		f.mu.names[name] = struct{}{}
	}
	f.mu.Unlock()
	f.wake()
}

// addAll notes that any session may have changed: the state is another.
func (f *SessionFeed) addAll() {
	f.mu.Lock()
	f.mu.all = true
	clear(f.mu.names)
	f.mu.Unlock()
	f.wake()
}

func (f *SessionFeed) wake() {
	select {
	case f.signal <- struct{}{}:
	default:
	}
}

// Next waits until sessions have changed, opened and closed ones included, and returns
// their names, in no order; all: any may have. The state holds those changes, or later
// ones, by then. The error is that of ctx.
func (f *SessionFeed) Next(ctx context.Context) (names []string, all bool, err error) {
	select {
	case <-f.signal:
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	names, all = make([]string, 0, len(f.mu.names)), f.mu.all
	for name := range f.mu.names {
		names = append(names, name)
	}
	clear(f.mu.names)
	f.mu.all = false
	return names, all, nil
}

package transport

import (
	"context"
	"sync"
)

// budget bounds bytes in flight. Who waits is served in order, so that a large
// claim is not starved by small ones. All methods may be called from many
// goroutines.
type budget struct {
	limit int64

	mu      sync.Mutex
	used    int64
	waiting []*claim
	poked   map[chan<- struct{}]struct{} // to be told of the next release
}

// claim is somebody who waits.
type claim struct {
	bytes   int64
	granted chan struct{} // closed when it is
}

func newBudget(limit int64) *budget {
	return &budget{limit: limit, poked: map[chan<- struct{}]struct{}{}}
}

// charge is what n bytes count: what is larger than the whole budget takes all of it.
func (b *budget) charge(n int64) int64 { return min(n, b.limit) }

// acquire takes n bytes, at most limit, or fails with the error of ctx.
func (b *budget) acquire(ctx context.Context, n int64) error {
	b.mu.Lock()
	if len(b.waiting) == 0 && b.used+n <= b.limit {
		b.used += n
		b.mu.Unlock()
		return nil
	}
	c := &claim{n, make(chan struct{})}
	b.waiting = append(b.waiting, c)
	b.mu.Unlock()
	select {
	case <-c.granted:
		return nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-c.granted: // in the same moment: given back to the next
		b.used -= n
	default:
		for i := range b.waiting {
			if b.waiting[i] == c {
				b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
				break
			}
		}
	}
	b.grantLocked()
	return ctx.Err()
}

// tryAcquire takes n bytes now, or sends to poke, without waiting, when bytes
// come back.
func (b *budget) tryAcquire(n int64, poke chan<- struct{}) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n <= b.limit {
		b.used += n
		return true
	}
	b.poked[poke] = struct{}{}
	return false
}

// release gives n bytes back.
func (b *budget) release(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	b.grantLocked()
	for poke := range b.poked {
		wake(poke)
	}
	clear(b.poked)
}

func (b *budget) grantLocked() {
	for len(b.waiting) > 0 && b.used+b.waiting[0].bytes <= b.limit {
		b.used += b.waiting[0].bytes
		close(b.waiting[0].granted)
		b.waiting[0] = nil
		b.waiting = b.waiting[1:]
	}
}

// inUse is the number of bytes taken.
func (b *budget) inUse() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// wake sends to a channel of capacity 1 that nobody may have read yet.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

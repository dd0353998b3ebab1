package transport

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// loads reads the pages of requests that lie on disk, into buffers of a bounded
// size that are no part of the arena, with a fixed number of workers. The
// buffers go round among the connections, and none may hold more than its share,
// so that a slow one does not starve the others.
type loads struct {
	limit int64 // of all buffers
	share int64 // of the buffers of one connection
	work  sync.WaitGroup

	mu     sync.Mutex
	ready  *sync.Cond // there is work, or room, or the end
	closed bool
	ring   []*upload // with something to load
	turn   int
	held   int64            // bytes of all buffers
	stuck  int64            // of these, bytes that a disk which hangs may still write to
	end    chan struct{}    // closed at close
	free   map[int][][]byte // unused, by length
}

// loadItem is one page to load.
type loadItem struct {
	s     *serving
	index int
}

// loadedPage is what became of it.
type loadedPage struct {
	index int
	buf   []byte // whole buffer; nil with err
	sum   uint64
	err   error
}

func newLoads(limit int64) *loads {
	l := &loads{limit: limit, share: max(limit/4, 1), free: map[int][][]byte{}, end: make(chan struct{})}
	l.ready = sync.NewCond(&l.mu)
	for range loadWorkers {
		l.work.Go(l.run) // owner: loads; exits at close; bound: loadWorkers
	}
	return l
}

// add queues loads of a connection.
func (l *loads) add(u *upload, items []loadItem) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(u.loads.queue) == 0 {
		l.ring = append(l.ring, u)
	}
	u.loads.queue = append(u.loads.queue, items...)
	l.ready.Broadcast()
}

// release takes a buffer of a connection back.
func (l *loads) release(u *upload, buf []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u.loads.bytes -= int64(len(buf))
	l.free[len(buf)] = append(l.free[len(buf)], buf)
	l.ready.Broadcast()
}

// leave keeps a buffer that the disk may still write to out of use until it no longer
// does: it counts against the limit, but not as its connection's.
func (l *loads) leave(u *upload, buf []byte, done <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u.loads.bytes -= int64(len(buf))
	l.stuck += int64(len(buf))
	l.ready.Broadcast()
	l.work.Go(func() { // owner: loads; exits when the disk lets go, or at close; bound: the buffers
		select {
		case <-done:
		case <-l.end:
			return // the memory stays mapped: the disk may write to it until the process ends
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.stuck -= int64(len(buf))
		l.free[len(buf)] = append(l.free[len(buf)], buf)
		l.ready.Broadcast()
	})
}

// poke makes the workers look again: a request has ended.
func (l *loads) poke() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ready.Broadcast()
}

// close ends the workers, after the loads that run, and frees the buffers. All
// connections have ended before.
func (l *loads) close() error {
	l.mu.Lock()
	l.closed = true
	close(l.end)
	l.ready.Broadcast()
	l.mu.Unlock()
	l.work.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.trimLocked(0); err != nil {
		return err
	}
	if l.held != l.stuck {
		return fmt.Errorf("transport: %d bytes of buffers were not given back", l.held-l.stuck)
	}
	return nil
}

func (l *loads) run() {
	for {
		u, it, buf, err := l.take()
		if u == nil {
			return
		}
		_, _, length := it.s.req.At(it.index)
		p := loadedPage{index: it.index, buf: buf, err: err}
		if err == nil {
			p.sum, p.err = it.s.pages.Load(it.s.ctx, it.index, buf[:length])
			if used := (*stillUsedError)(nil); errors.As(p.err, &used) {
				p.buf = nil
				l.leave(u, buf, used.done)
			}
			u.t.metrics.loaded(int64(length), p.err)
		}
		u.landed(it.s, p)
	}
}

// take waits for a page to load and a buffer for it; no upload: the end. The
// error is that of a buffer that could not be made, or of a request that ended.
func (l *loads) take() (*upload, loadItem, []byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for range l.ring {
			l.turn = (l.turn + 1) % len(l.ring)
			u := l.ring[l.turn]
			it := u.loads.queue[0]
			_, _, length := it.s.req.At(it.index)
			size := int64(length+paging.UnitBytes-1) &^ (paging.UnitBytes - 1)
			err := it.s.ctx.Err()
			if err == nil && u.loads.bytes > 0 && u.loads.bytes+size > l.share {
				continue
			}
			var buf []byte
			if err == nil {
				if buf, err = l.bufferLocked(size); buf == nil && err == nil {
					continue
				}
			}
			if err == nil {
				u.loads.bytes += size
			}
			l.popLocked(u)
			return u, it, buf, err
		}
		if l.closed && len(l.ring) == 0 {
			return nil, loadItem{}, nil, nil
		}
		l.ready.Wait()
	}
}

func (l *loads) popLocked(u *upload) {
	u.loads.queue[0] = loadItem{}
	if u.loads.queue = u.loads.queue[1:]; len(u.loads.queue) == 0 {
		u.loads.queue = nil
		l.ring = slices.Delete(l.ring, l.turn, l.turn+1)
		l.turn = max(l.turn-1, 0)
	}
}

// bufferLocked is a buffer of size bytes at a multiple of paging.UnitBytes; nil
// without an error: there is no room now. A page longer than limit gets one when
// it is alone.
func (l *loads) bufferLocked(size int64) ([]byte, error) {
	if free := l.free[int(size)]; len(free) > 0 {
		l.free[int(size)] = free[:len(free)-1]
		return free[len(free)-1], nil
	}
	if err := l.trimLocked(max(l.limit-size, 0)); err != nil {
		return nil, err
	}
	if l.held > 0 && l.held+size > l.limit {
		return nil, nil
	}
	buf, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("buffer of %d bytes: %w: %w", size, paging.ErrNoSpace, err)
	}
	l.held += size
	return buf, nil
}

// trimLocked gives unused buffers back to the system until no more than most
// bytes are held.
func (l *loads) trimLocked(most int64) error {
	for size, free := range l.free {
		for l.held > most && len(free) > 0 {
			if err := unix.Munmap(free[len(free)-1]); err != nil {
				return fmt.Errorf("buffer of %d bytes: %w", size, err)
			}
			free = free[:len(free)-1]
			l.held -= int64(size)
		}
		if l.free[size] = free; len(free) == 0 {
			delete(l.free, size)
		}
	}
	return nil
}

// heldBytes is the memory of all buffers.
func (l *loads) heldBytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held
}

package nvme

import (
	"sync"
	"time"
)

// Bounds of the writes that run at once. Eight writes of 256 KiB or two of 2 MiB keep
// a drive busy; more only lengthens the queue that a read waits in.
const (
	writeDepth      = 8
	writeDepthBytes = 4 << 20
	// maxRest bounds the rest after a write beside reads.
	maxRest = 5 * time.Millisecond
	// writeChunkBytes is the longest single write: a longer page lets reads in
	// between.
	writeChunkBytes = 2 << 20
)

// pacer decides when a write may start. Reads start at once; while any read
// waits or runs, writes go one at a time, and a cap on bytes per second holds
// them back further (a Raft log may share the disk).
type pacer struct {
	perSecond int64 // 0: no cap

	mu     sync.Mutex
	cond   sync.Cond // L is mu
	reads  int
	hung   int // of the reads: do not answer, and hold nothing back
	writes int
	bytes  int64
	next   time.Time // when the cap lets the next write start
	held   int64     // writes that had to wait for reads, for Metrics
	closed bool
	done   chan struct{} // closed by close: ends the waits for time
}

func newPacer(perSecond int64) *pacer {
	p := &pacer{perSecond: perSecond, done: make(chan struct{})}
	p.cond.L = &p.mu
	return p
}

func (p *pacer) readBegins() {
	p.mu.Lock()
	p.reads++
	p.mu.Unlock()
}

func (p *pacer) readEnds() {
	p.mu.Lock()
	p.reads--
	if p.reads <= p.hung {
		p.cond.Broadcast()
	}
	p.mu.Unlock()
}

// setHung tells how many reads do not answer.
func (p *pacer) setHung(reads int) {
	p.mu.Lock()
	if p.hung != reads {
		p.hung = reads
		p.cond.Broadcast()
	}
	p.mu.Unlock()
}

// writeBegins waits until a write of n bytes may start; false: closed.
func (p *pacer) writeBegins(n int64) bool {
	p.mu.Lock()
	counted := false
	for !p.closed && !p.roomLocked(n) {
		if p.reads > p.hung && !counted {
			counted = true
			p.held++
		}
		p.cond.Wait()
	}
	if p.closed {
		p.mu.Unlock()
		return false
	}
	p.writes++
	p.bytes += n
	wait := p.capLocked(n)
	p.mu.Unlock()
	if p.rest(wait) {
		return true
	}
	p.mu.Lock()
	p.endLocked(n)
	p.mu.Unlock()
	return false
}

// rest waits for d; false: closed meanwhile.
func (p *pacer) rest(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.done:
		return false
	}
}

func (p *pacer) roomLocked(n int64) bool {
	if p.writes == 0 {
		return true
	}
	return p.reads <= p.hung && p.writes < writeDepth && p.bytes+n <= writeDepthBytes
}

// capLocked takes n bytes from the allowance and says how long to wait for them.
func (p *pacer) capLocked(n int64) time.Duration {
	if p.perSecond <= 0 {
		return 0
	}
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	wait := p.next.Sub(now)
	p.next = p.next.Add(time.Duration(float64(n) / float64(p.perSecond) * float64(time.Second)))
	return wait
}

// writeEnds gives the turn on. Beside reads the disk rests from writes for as
// long as the last one took, so that at least half of its time is for reads.
func (p *pacer) writeEnds(n int64, took time.Duration) {
	p.mu.Lock()
	if p.reads > p.hung {
		p.mu.Unlock()
		p.rest(min(took, maxRest))
		p.mu.Lock()
	}
	p.endLocked(n)
	p.mu.Unlock()
}

func (p *pacer) endLocked(n int64) {
	p.writes--
	p.bytes -= n
	p.cond.Broadcast()
}

// close lets waiting writes go, with false. Once.
func (p *pacer) close() {
	p.mu.Lock()
	p.closed = true
	close(p.done)
	p.cond.Broadcast()
	p.mu.Unlock()
}

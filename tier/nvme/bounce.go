package nvme

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// bounceBytes is how much of an unaligned page is moved at a time.
const bounceBytes = 1 << 20

// bouncePool keeps aligned buffers: for the last, partial unit of a page and
// for pages in memory that is not aligned. As many exist as I/O runs at once;
// at most keptBounces are kept.
type bouncePool struct {
	reads, writes atomic.Int64 // pages that went through a buffer whole

	mu     sync.Mutex
	free   [][]byte
	closed bool
}

const keptBounces = 16

func (p *bouncePool) get() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		b := p.free[n-1]
		p.free = p.free[:n-1]
		return b
	}
	b, err := unix.Mmap(-1, 0, bounceBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		// Large heap objects start at a page too; Munmap refuses them later,
		// and the collector takes them.
		return make([]byte, bounceBytes)
	}
	return b
}

func (p *bouncePool) put(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < keptBounces && !p.closed {
		p.free = append(p.free, b)
		return
	}
	_ = unix.Munmap(b)
}

// close gives the buffers back that are not in use.
func (p *bouncePool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.free {
		_ = unix.Munmap(b)
	}
	p.free, p.closed = nil, true
}

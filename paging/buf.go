package paging

import (
	"math"
	"sync/atomic"

	"github.com/kvtier/kvtier/paging/check"
)

// Buf is memory with a count of those who use it; the last one to release it
// gives it back. The reference that NewBuf returns belongs to its caller. Ref and
// Release may be called from any goroutine; whoever holds a reference may read
// the bytes, and write them only while it is the only one.
type Buf struct {
	data []byte
	free func([]byte)
	refs atomic.Int64
}

// dead is a count that no misuse after a recovered panic brings back to life.
const dead = math.MinInt64 / 2

// NewBuf makes a buffer of data with one reference. free is called once, with
// data, by the Release that ends the last one; nil: nothing is to be done.
func NewBuf(data []byte, free func([]byte)) *Buf {
	b := &Buf{data: data, free: free}
	b.refs.Store(1)
	return b
}

// Bytes is the memory, valid while the caller holds a reference.
func (b *Buf) Bytes() []byte {
	if check.Enabled {
		check.That(b.refs.Load() > 0, "bytes of a buffer without references")
	}
	return b.data
}

// Ref adds a reference, which the caller must release, and returns b.
func (b *Buf) Ref() *Buf {
	if b.refs.Add(1) <= 1 {
		b.refs.Store(dead)
		panic("paging: reference to a buffer that was given back")
	}
	return b
}

// Release ends a reference of the caller. One Release too many panics: its
// memory may be somebody else's by now.
func (b *Buf) Release() {
	switch n := b.refs.Add(-1); {
	case n > 0:
		return
	case n < 0:
		b.refs.Store(dead)
		panic("paging: buffer released more often than referenced")
	}
	data := b.data
	if check.Enabled {
		// Whoever reads on without a reference sees that at once.
		for i := range data {
			data[i] = 0xdb
		}
		b.data = nil
	}
	if b.free != nil {
		b.free(data)
	}
}

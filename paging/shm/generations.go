package shm

import (
	"sync/atomic"
	"unsafe"

	"github.com/kvtier/kvtier/paging"
)

// Generations is the table of slot generations at the start of an extent. Any
// goroutine of any process may load while the daemon raises.
type Generations struct{ table []uint64 }

// GenTableBytes is the length of the table of an extent of so many bytes, a
// multiple of 4096: the first slot lies behind it.
func GenTableBytes(extentBytes int64) int64 {
	return (extentBytes/paging.UnitBytes*8 + paging.UnitBytes - 1) / paging.UnitBytes * paging.UnitBytes
}

// Of is the table of the mapped extent m, which must have 4096 bytes or more.
// It is not to be used after the extent was unmapped.
func Of(m []byte) Generations {
	return Generations{unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(m))), len(m)/paging.UnitBytes)}
}

// TableOf is the table that fills the mapped memory m, of an extent that lies
// elsewhere. It is not to be used after m was unmapped.
func TableOf(m []byte) Generations {
	return Generations{unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(m))), len(m)/8)}
}

// Load is the generation of the slot at a byte offset of the extent.
func (g Generations) Load(offset uint64) paging.Generation {
	return paging.Generation(atomic.LoadUint64(&g.table[offset/paging.UnitBytes]))
}

// Raise makes all references to the slot stale and returns its new generation.
// Only the process that created the extent can: elsewhere it is a memory fault.
func (g Generations) Raise(offset uint64) paging.Generation {
	return paging.Generation(atomic.AddUint64(&g.table[offset/paging.UnitBytes], 1))
}

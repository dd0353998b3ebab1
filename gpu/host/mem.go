package host

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging/shm"
)

// mem implements gpu.Mem.
type mem struct {
	// Constant.
	dev        *Device
	b          []byte
	memory     *shm.Memory // nil if registered
	use        gpu.Use
	charged    int64 // bytes of the budget
	imported   bool
	registered bool
	readOnly   bool

	// Guarded by dev.mu.
	holds int // queued work that names it
	freed bool
}

// Addr is the address in this process.
func (m *mem) Addr() gpu.Addr { return gpu.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(m.b)))) }

func (m *mem) end() gpu.Addr { return m.Addr() + gpu.Addr(len(m.b)) }

func (m *mem) Size() int64 { return int64(len(m.b)) }

func (m *mem) Bytes() []byte { return m.b }

func (m *mem) Export() (*os.File, error) {
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	switch {
	case m.freed:
		return nil, gpu.ErrClosed
	case m.registered || m.imported || m.use == gpu.Private:
		return nil, fmt.Errorf("%w: export of memory that is not a pool", gpu.ErrUnsupported)
	}
	return dup(m.memory.FD())
}

func (m *mem) Free() error {
	d := m.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.freed {
		return gpu.ErrClosed
	}
	if m.holds > 0 {
		return fmt.Errorf("%w: %d operations", gpu.ErrBusy, m.holds)
	}
	m.freed = true
	d.mems.Delete(m.Addr())
	d.used -= m.charged
	return m.unmap()
}

func (m *mem) unmap() error {
	if m.memory == nil {
		return nil
	}
	if err := m.memory.Close(); err != nil {
		return errors.Join(errors.New("gpu/host: unmap"), err)
	}
	return nil
}

// slice is the memory at a, which lies inside m.
func (m *mem) slice(a gpu.Addr, n int64) []byte { return m.b[a-m.Addr():][:n:n] }

// reach is n bytes of address space from a on, which may begin before m: the pages that are used were checked one by one.
func (m *mem) reach(a gpu.Addr, n int64) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(m.b)), int(int64(a)-int64(m.Addr())))), n)
}

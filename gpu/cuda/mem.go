//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// mem implements gpu.Mem: memory of cuMemAlloc, a mapped handle (own or imported), or registered host memory.
type mem struct {
	// Constant.
	dev      *Device
	at       gpu.Addr
	size     int64
	mapped   bool   // by the virtual memory calls
	shared   bool   // not private to this process
	handle   uint64 // of mapped memory that may be exported
	readOnly bool
	imported bool
	host     []byte // registered

	// Guarded by dev.mu.
	freed bool
	last  map[*stream]int64 // the last entry of each stream that names it
}

func (m *mem) Addr() gpu.Addr   { return m.at }
func (m *mem) Size() int64      { return m.size }
func (m *mem) Bytes() []byte    { return m.host }
func (m *mem) registered() bool { return m.host != nil }

// The driver's structs.
type (
	location   struct{ kind, id int32 }
	allocation struct {
		kind, handles int32
		location      location
		_             uintptr
		_             [8]byte
	}
	access struct {
		location location
		flags    int32
	}
)

func (d *Device) location() location { return location{locationDevice, d.device} }

func (d *Device) property() allocation {
	return allocation{kind: allocationPinned, handles: handlePosixFD, location: d.location()}
}

// Alloc implements gpu.Device.
func (d *Device) Alloc(size int64, use gpu.Use) (gpu.Mem, error) {
	if size <= 0 {
		return nil, &gpu.ArgError{Op: "alloc", Arg: "size", Got: size, Want: "a positive size"}
	}
	if size > d.info.TotalBytes {
		return nil, fmt.Errorf("%w: %d bytes wanted of %d", gpu.ErrNoMemory, size, d.info.TotalBytes)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &mem{dev: d, size: size}
	make := m.plain
	if use != gpu.Private {
		g := d.info.GranuleBytes
		m.size = (min(size, math.MaxInt64-g) + g - 1) / g * g
		if m.shared = true; d.vmm {
			make = m.pool
		}
	}
	if err := d.try(make); err != nil {
		return nil, fmt.Errorf("gpu/cuda: allocate %d bytes: %w", m.size, err)
	}
	return d.add(m)
}

// add makes m known. d.mu is held.
func (d *Device) add(m *mem) (gpu.Mem, error) {
	m.last = map[*stream]int64{}
	if !d.mems.Insert(m) {
		err := &gpu.ArgError{Op: "register", Arg: "b", Got: m.size, Want: "memory that is not registered already"}
		return nil, errors.Join(err, d.do(m.release))
	}
	return m, nil
}

func (m *mem) plain() error {
	return m.dev.lib.call(memAlloc, uintptr(unsafe.Pointer(&m.at)), uintptr(m.size))
}

// pool makes memory that can be exported and maps it; on an error every step is undone.
func (m *mem) pool() error {
	prop := m.dev.property()
	if err := m.dev.lib.call(memCreate, uintptr(unsafe.Pointer(&m.handle)), uintptr(m.size), uintptr(unsafe.Pointer(&prop)), 0); err != nil {
		return err
	}
	if err := m.attach(); err != nil {
		return errors.Join(err, m.dev.lib.call(memRelease, uintptr(m.handle)))
	}
	return nil
}

// attach maps m.handle into the address space of the device.
func (m *mem) attach() error {
	lib := m.dev.lib
	if err := lib.call(memAddressReserve, uintptr(unsafe.Pointer(&m.at)), uintptr(m.size), 0, 0, 0); err != nil {
		return err
	}
	if err := lib.call(memMap, uintptr(m.at), uintptr(m.size), 0, uintptr(m.handle), 0); err != nil {
		return errors.Join(err, lib.call(memAddressFree, uintptr(m.at), uintptr(m.size)))
	}
	want := access{m.dev.location(), accessReadWrite}
	if m.readOnly {
		want.flags = accessRead
	}
	if err := lib.call(memSetAccess, uintptr(m.at), uintptr(m.size), uintptr(unsafe.Pointer(&want)), 1); err != nil {
		return errors.Join(err, lib.call(memUnmap, uintptr(m.at), uintptr(m.size)), lib.call(memAddressFree, uintptr(m.at), uintptr(m.size)))
	}
	m.mapped = true
	return nil
}

// Import implements gpu.Device.
func (d *Device) Import(f *os.File, size int64, want gpu.Access) (gpu.Mem, error) {
	if size <= 0 || size%d.info.GranuleBytes != 0 {
		return nil, &gpu.ArgError{Op: "import", Arg: "size", Got: size, Want: "the exporter's Mem.Size"}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &mem{dev: d, size: size, imported: true, readOnly: want == gpu.ReadOnly}
	err := d.try(func() error {
		if !d.vmm {
			return m.openLegacy(f)
		}
		if err := d.lib.call(memImport, uintptr(unsafe.Pointer(&m.handle)), f.Fd(), handlePosixFD); err != nil {
			return err
		}
		if err := m.attach(); err != nil {
			return errors.Join(err, d.lib.call(memRelease, uintptr(m.handle)))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("gpu/cuda: import %d bytes: %w", size, err)
	}
	return d.add(m)
}

// Register implements gpu.Device.
func (d *Device) Register(b []byte) (gpu.Mem, error) {
	page := os.Getpagesize()
	if len(b) == 0 || len(b)%page != 0 || int(uintptr(unsafe.Pointer(&b[0])))%page != 0 {
		return nil, &gpu.ArgError{Op: "register", Arg: "b", Got: int64(len(b)), Want: "whole pages"}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &mem{dev: d, size: int64(len(b)), host: b}
	err := d.try(func() error {
		if err := d.lib.call(memHostRegister, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), registerPortable|registerDeviceMap); err != nil {
			return err
		}
		if err := d.lib.call(memHostGetDevicePointer, uintptr(unsafe.Pointer(&m.at)), uintptr(unsafe.Pointer(&b[0])), 0); err != nil {
			return errors.Join(err, d.lib.call(memHostUnregister, uintptr(unsafe.Pointer(&b[0]))))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("gpu/cuda: register %d bytes: %w", len(b), err)
	}
	return d.add(m)
}

// Export implements gpu.Mem.
func (m *mem) Export() (*os.File, error) {
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	if m.freed {
		return nil, gpu.ErrClosed
	}
	if m.shared && !m.mapped {
		return m.exportLegacy()
	}
	if !m.mapped || m.imported {
		return nil, fmt.Errorf("%w: export of memory that is not a pool", gpu.ErrUnsupported)
	}
	var fd int32
	err := m.dev.try(func() error {
		return m.dev.lib.call(memExport, uintptr(unsafe.Pointer(&fd)), uintptr(m.handle), handlePosixFD, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("gpu/cuda: export: %w", err)
	}
	return os.NewFile(uintptr(fd), "kvtier-pool"), nil
}

// Free implements gpu.Mem.
func (m *mem) Free() error {
	d := m.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.freed {
		return gpu.ErrClosed
	}
	for s, at := range m.last {
		if s.done < at && d.lost == nil {
			s.settle()
		}
		if s.done < at && d.lost == nil {
			return fmt.Errorf("%w: %d operations", gpu.ErrBusy, s.queued-s.done)
		}
	}
	m.freed = true
	d.mems.Delete(m.at)
	if err := d.do(m.release); err != nil && d.lost == nil {
		return fmt.Errorf("gpu/cuda: free: %w", err)
	}
	return nil
}

// release gives the memory back to the driver. The context is current.
func (m *mem) release() error {
	lib := m.dev.lib
	switch {
	case m.registered():
		return lib.call(memHostUnregister, uintptr(unsafe.Pointer(&m.host[0])))
	case !m.mapped && m.imported:
		return lib.call(ipcCloseMemHandle, uintptr(m.at))
	case !m.mapped:
		return lib.call(memFree, uintptr(m.at))
	}
	return errors.Join(lib.call(memUnmap, uintptr(m.at), uintptr(m.size)), lib.call(memAddressFree, uintptr(m.at), uintptr(m.size)),
		lib.call(memRelease, uintptr(m.handle)))
}

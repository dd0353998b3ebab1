//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// Devices whose memory cannot be exported as a descriptor (no virtual memory
// calls, or no POSIX handles) export pools by the driver's older handles of 64
// bytes. What is handed over is then a file with such a handle in it:
//
//	0   magic "KVTIPC1\x00"
//	8   u64 bytes of the memory
//	16  the driver's handle, 64 bytes
//
// An importer must let go before its exporter frees the memory: the driver leaves
// undefined what it reads after that. The driver refuses such a handle in the
// process that made it, and under MIG.
const (
	ipcMagic      = "KVTIPC1\x00"
	ipcHandle     = 64
	ipcFileBytes  = len(ipcMagic) + 8 + ipcHandle
	ipcLazyPeer   = 1
	legacyGranule = 2 << 20 // smaller allocations share a block, which a handle names as a whole
)

// exportLegacy makes the file with the handle of plain memory.
func (m *mem) exportLegacy() (*os.File, error) {
	b := make([]byte, ipcFileBytes)
	copy(b, ipcMagic)
	binary.LittleEndian.PutUint64(b[8:], uint64(m.size))
	err := m.dev.try(func() error {
		return m.dev.lib.call(ipcGetMemHandle, uintptr(unsafe.Pointer(&b[16])), uintptr(m.at))
	})
	if err != nil {
		return nil, fmt.Errorf("gpu/cuda: export: %w", err)
	}
	f, err := os.CreateTemp("", "kvtier-ipc")
	if err != nil {
		return nil, fmt.Errorf("gpu/cuda: export: %w", err)
	}
	_, err = f.Write(b)
	if err = errors.Join(err, os.Remove(f.Name())); err != nil {
		return nil, errors.Join(fmt.Errorf("gpu/cuda: export: %w", err), f.Close())
	}
	return f, nil
}

// openLegacy maps the memory whose handle a file holds. d.mu is held, the context
// is current.
func (m *mem) openLegacy(f *os.File) error {
	b := make([]byte, ipcFileBytes)
	if n, err := f.ReadAt(b, 0); n != len(b) || string(b[:8]) != ipcMagic {
		return fmt.Errorf("%w: no memory handle in the file: %w", gpu.ErrArgument, err)
	}
	if got := int64(binary.LittleEndian.Uint64(b[8:])); got != m.size {
		return fmt.Errorf("%w: the memory has %d bytes, not %d", gpu.ErrArgument, got, m.size)
	}
	lib, at := m.dev.lib, uintptr(unsafe.Pointer(&m.at))
	if runtime.GOARCH != "amd64" { // a struct of 64 bytes goes by its address
		return lib.call(ipcOpenMemHandle, at, uintptr(unsafe.Pointer(&b[16])), ipcLazyPeer)
	}
	// It lies on the stack, behind the registers: both scalars, four that are not used.
	args := [14]uintptr{0: at, 1: ipcLazyPeer}
	for i := range ipcHandle / 8 {
		args[6+i] = uintptr(binary.LittleEndian.Uint64(b[16+8*i:]))
	}
	return lib.call(ipcOpenMemHandle, args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10], args[11], args[12], args[13])
}

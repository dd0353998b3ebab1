//go:build linux

package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

const (
	hugeBytes = 2 << 20
	// populateStep is how much is populated between two looks at the context: a
	// few milliseconds of work, or some ten if the host has not backed it yet.
	populateStep = 16 << 20

	extentSeals  = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
	stagingSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
)

// Backing is the kind of kernel pages behind a Memory.
type Backing uint8

// Kinds of backing.
const (
	BackingSmall       Backing = iota // pages of 4 KiB
	BackingTransparent                // 2 MiB where the kernel finds them
	BackingHuge                       // 2 MiB from the hugetlb pool
)

// String names the backing.
func (b Backing) String() string {
	switch b {
	case BackingTransparent:
		return "transparent"
	case BackingHuge:
		return "hugetlb"
	}
	return "small"
}

// Memory is a mapping of shared memory. Its fields never change before Close, so
// that any goroutine may use it.
type Memory struct {
	data    []byte
	fd      int // -1 if another process created it
	backing Backing
	within  *Range // the address range that it lies in; nil: none
	closed  atomic.Bool
}

// Options of an extent. The zero value binds to NUMA node 0: say -1 for none.
type Options struct {
	// HugePages asks for pages of 2 MiB: from the hugetlb pool if bytes is a
	// multiple of 2 MiB and the pool has them, else transparent ones. Memory.Backing
	// tells what came of it.
	HugePages bool
	// NUMANode is the node that pages are taken from while it has any. -1: no
	// preference.
	NUMANode int
}

// CreateExtent creates, maps and seals an extent of bytes, a multiple of 4096.
// Nothing is touched yet: see Populate. name is what /proc shows. ErrNoSpace if
// the kernel has no memory for it, ErrInvalid, ErrIO.
func CreateExtent(name string, bytes int64, o Options) (*Memory, error) {
	m, err := create(name, bytes, o.HugePages)
	if err != nil {
		return nil, err
	}
	if o.NUMANode >= 0 {
		if err := m.prefer(o.NUMANode); err != nil {
			_ = m.Close()
			return nil, fmt.Errorf("bind extent %s to NUMA node %d: %w: %w", name, o.NUMANode, paging.ErrInvalid, err)
		}
	}
	if err := m.seal(extentSeals); err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("seal extent %s: %w: %w", name, paging.ErrIO, err)
	}
	return m, nil
}

// CreateStaging creates, maps and seals memory of bytes, a multiple of 4096, that
// both sides write and neither can resize. Errors as CreateExtent.
func CreateStaging(name string, bytes int64) (*Memory, error) {
	m, err := create(name, bytes, false)
	if err != nil {
		return nil, err
	}
	if err := m.seal(stagingSeals); err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("seal staging %s: %w: %w", name, paging.ErrIO, err)
	}
	return m, nil
}

func create(name string, bytes int64, huge bool) (*Memory, error) {
	if bytes <= 0 || bytes%paging.UnitBytes != 0 {
		return nil, fmt.Errorf("create %s: %w: %d bytes, want a multiple of %d", name, paging.ErrInvalid, bytes, paging.UnitBytes)
	}
	var m *Memory
	err := error(unix.ENOMEM)
	if huge && bytes%hugeBytes == 0 {
		m, err = memfd(name, bytes, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	}
	if m == nil {
		m, err = memfd(name, bytes, 0)
	}
	switch {
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOSPC):
		return nil, fmt.Errorf("create %s of %d bytes: %w: %w", name, bytes, paging.ErrNoSpace, err)
	case err != nil:
		return nil, fmt.Errorf("create %s of %d bytes: %w: %w", name, bytes, paging.ErrIO, err)
	}
	// Pages of engines do not belong into a core dump. Both are advice.
	_ = unix.Madvise(m.data, unix.MADV_DONTDUMP)
	if huge && m.backing == BackingSmall && transparentOnAdvice() && unix.Madvise(m.data, unix.MADV_HUGEPAGE) == nil {
		m.backing = BackingTransparent
	}
	return m, nil
}

func memfd(name string, bytes int64, flags int) (*Memory, error) {
	flags |= unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // a kernel before 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, err
	}
	m := &Memory{fd: fd}
	if flags&unix.MFD_HUGETLB != 0 {
		m.backing = BackingHuge
	}
	if err = unix.Ftruncate(fd, bytes); err == nil {
		m.data, err = mapAligned(fd, bytes, unix.PROT_READ|unix.PROT_WRITE)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return m, nil
}

// transparentOnAdvice tells whether the kernel gives huge pages to a memfd that
// asks for them.
func transparentOnAdvice() bool {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	if err != nil {
		return false
	}
	text := string(b)
	return strings.Contains(text, "[advise]") || strings.Contains(text, "[always]") ||
		strings.Contains(text, "[within_size]") || strings.Contains(text, "[force]")
}

func (m *Memory) seal(seals int) error {
	_, err := unix.FcntlInt(uintptr(m.fd), unix.F_ADD_SEALS, seals)
	return err
}

// prefer makes the kernel take pages from a node while it has any. A strict
// binding would have the process killed when the node is full.
func (m *Memory) prefer(node int) error {
	const mpolPreferred = 1
	var mask [16]uint64
	if node >= 64*len(mask) {
		return unix.EINVAL
	}
	mask[node/64] = 1 << (node % 64)
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&m.data[0])), uintptr(len(m.data)),
		mpolPreferred, uintptr(unsafe.Pointer(&mask[0])), uintptr(64*len(mask)+1), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Bytes is the memory. No view of it may be used after Close.
func (m *Memory) Bytes() []byte { return m.data }

// FD is the descriptor, -1 for memory that another process created. It belongs
// to m.
func (m *Memory) FD() int { return m.fd }

// Size is the number of bytes.
func (m *Memory) Size() int64 { return int64(len(m.data)) }

// Backing is the kind of kernel pages that were asked for with success. Only
// hugetlb pages are certain.
func (m *Memory) Backing() Backing { return m.backing }

// Populate makes the kernel back all of the memory now, so that no later write
// waits for it. It takes up to some seconds per GiB and stops early if ctx ends.
// The contents stay. It asks for huge pages, whatever Options said, and does
// without where the kernel has none: memory that is touched whole loses nothing by
// them. ErrNoSpace if the kernel has no memory.
func (m *Memory) Populate(ctx context.Context) error {
	huge := m.backing != BackingHuge && m.within == nil
	for off := 0; off < len(m.data); off += populateStep {
		if err := ctx.Err(); err != nil {
			return err
		}
		step := m.data[off:min(off+populateStep, len(m.data))]
		huge = huge && collapse(step) // where one failed others will, and each may take long
		if err := populate(step); err != nil {
			return fmt.Errorf("populate memory at %d of %d: %w: %w", off, len(m.data), paging.ErrNoSpace, err)
		}
	}
	return nil
}

func populate(b []byte) error {
	for {
		switch err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EINVAL): // a kernel before 5.14
			touch(b)
			return nil
		default:
			return err
		}
	}
}

// touch writes to each page of b without changing it.
func touch(b []byte) {
	for off := 0; off < len(b); off += paging.UnitBytes {
		atomic.AddUint32((*uint32)(unsafe.Pointer(&b[off])), 0)
	}
	runtime.KeepAlive(b)
}

// Close unmaps the memory and closes its descriptor. The caller guarantees that
// no view of it is left: a read through one would be a fault or another mapping's
// bytes. Idempotent.
func (m *Memory) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	var err error
	if m.within != nil {
		err = m.within.clear(m.data)
	} else {
		err = unmap(m.data)
	}
	if m.fd >= 0 {
		err = errors.Join(err, unix.Close(m.fd))
	}
	return err
}

// Zero overwrites b with zeros.
func Zero(b []byte) { clear(b) }

// MapReadOnly maps an extent that another process created. fd is borrowed: it
// may be closed right after. ErrIncompatible if its size is not bytes, or if it
// is not sealed as an extent is: such memory could change or vanish.
func MapReadOnly(fd int, bytes int64) (*Memory, error) {
	return mapShared(fd, bytes, extentSeals, unix.PROT_READ)
}

// MapReadWrite maps staging that another process created. fd is borrowed.
// ErrIncompatible if its size is not bytes, or if it could be resized.
func MapReadWrite(fd int, bytes int64) (*Memory, error) {
	return mapShared(fd, bytes, stagingSeals, unix.PROT_READ|unix.PROT_WRITE)
}

func mapShared(fd int, bytes int64, wantSeals, prot int) (*Memory, error) {
	if err := checkShared(fd, bytes, wantSeals); err != nil {
		return nil, err
	}
	data, err := mapAligned(fd, bytes, prot)
	if err != nil {
		return nil, fmt.Errorf("map descriptor of %d bytes: %w: %w", bytes, paging.ErrIO, err)
	}
	_ = unix.Madvise(data, unix.MADV_DONTDUMP) // advice
	return &Memory{data: data, fd: -1}, nil
}

// checkShared refuses memory that could change or vanish.
func checkShared(fd int, bytes int64, wantSeals int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("map descriptor: %w: %w", paging.ErrInvalid, err)
	}
	if bytes <= 0 || st.Size != bytes || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("map descriptor: %w: it has %d bytes (mode %#o), want %d", paging.ErrIncompatible, st.Size, st.Mode, bytes)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&wantSeals != wantSeals {
		return fmt.Errorf("map descriptor: %w: seals %#x, want %#x", paging.ErrIncompatible, seals, wantSeals)
	}
	return nil
}

//go:build linux

package shm

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// Range is address space in which memory of others is mapped at chosen places, so
// that one base address and an offset name all of it: the pages of a device pool
// and an engine's own pages beside them. Where nothing is mapped an access is a
// memory fault.
//
// The caller keeps places apart; otherwise it is safe for concurrent use.
type Range struct{ data []byte }

// Reserve takes address space, a multiple of 4096 bytes. It takes no memory.
func Reserve(bytes int64) (*Range, error) {
	if bytes <= 0 || bytes%paging.UnitBytes != 0 {
		return nil, fmt.Errorf("reserve %d bytes of address space: %w: want a multiple of %d", bytes, paging.ErrInvalid, paging.UnitBytes)
	}
	data, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes of address space: %w: %w", bytes, paging.ErrNoSpace, err)
	}
	_ = unix.Madvise(data, unix.MADV_DONTDUMP) // advice
	return &Range{data}, nil
}

// Bytes is the whole range. Only what is mapped in it may be touched.
func (r *Range) Bytes() []byte { return r.data }

// MapReadOnly is MapReadOnly at a place of the range. The Memory must be closed
// before the Range.
func (r *Range) MapReadOnly(at int64, fd int, bytes int64) (*Memory, error) {
	return r.mapShared(at, fd, bytes, extentSeals, unix.PROT_READ)
}

// MapReadWrite is MapReadWrite at a place of the range. The Memory must be closed
// before the Range.
func (r *Range) MapReadWrite(at int64, fd int, bytes int64) (*Memory, error) {
	return r.mapShared(at, fd, bytes, stagingSeals, unix.PROT_READ|unix.PROT_WRITE)
}

func (r *Range) mapShared(at int64, fd int, bytes int64, wantSeals, prot int) (*Memory, error) {
	if at < 0 || at%paging.UnitBytes != 0 || bytes <= 0 || at > int64(len(r.data))-bytes {
		return nil, fmt.Errorf("map %d bytes at %d of a range of %d: %w", bytes, at, len(r.data), paging.ErrInvalid)
	}
	if err := checkShared(fd, bytes, wantSeals); err != nil {
		return nil, err
	}
	data := r.data[at : at+bytes : at+bytes]
	if _, err := unix.MmapPtr(fd, 0, unsafe.Pointer(&data[0]), uintptr(bytes), prot, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return nil, fmt.Errorf("map %d bytes at %d of a range: %w: %w", bytes, at, paging.ErrIO, err)
	}
	return &Memory{data: data, fd: -1, within: r}, nil
}

// clear takes a mapping out and keeps its place reserved.
func (r *Range) clear(data []byte) error {
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&data[0]), uintptr(len(data)), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	return err
}

// Close gives the address space back. Idempotent, not safe for concurrent use.
func (r *Range) Close() error {
	if r.data == nil {
		return nil
	}
	data := r.data
	r.data = nil
	return unix.Munmap(data)
}

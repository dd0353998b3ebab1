//go:build linux

package shm

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// mapAligned maps a descriptor at a multiple of 2 MiB if it has that many bytes:
// the kernel puts one entry of its page table over a huge page only if the address
// lies in it as the offset does.
func mapAligned(fd int, bytes int64, prot int) ([]byte, error) {
	if bytes < hugeBytes {
		return unix.Mmap(fd, 0, int(bytes), prot, unix.MAP_SHARED)
	}
	room := uintptr(bytes) + hugeBytes
	base, err := unix.MmapPtr(-1, 0, nil, room, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	before := -uintptr(base) & (hugeBytes - 1)
	at := unsafe.Add(base, before)
	if _, err = unix.MmapPtr(fd, 0, at, uintptr(bytes), prot, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return nil, errors.Join(err, unix.MunmapPtr(base, room))
	}
	if before > 0 {
		err = unix.MunmapPtr(base, before)
	}
	if after := room - before - uintptr(bytes); after > 0 {
		err = errors.Join(err, unix.MunmapPtr(unsafe.Add(at, bytes), after))
	}
	data := unsafe.Slice((*byte)(at), bytes)
	if err != nil {
		return nil, errors.Join(err, unmap(data))
	}
	return data, nil
}

// unmap undoes mapAligned.
func unmap(data []byte) error {
	if len(data) < hugeBytes {
		return unix.Munmap(data)
	}
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(data)), uintptr(len(data)))
}

// collapseTries is how often the kernel may find something in its way that ends by
// itself.
const collapseTries = 3

// collapse puts huge pages under the whole ones of b, which starts at a multiple of
// 2 MiB, and reports whether the kernel did. It does that whatever it gives to
// shared memory by itself, for a descriptor with seals too, and keeps the content.
// A huge page of which one byte is there already is all it takes: the rest is not
// touched twice.
func collapse(b []byte) bool {
	b = b[:len(b)&^(hugeBytes-1)]
	if len(b) == 0 || uintptr(unsafe.Pointer(&b[0]))%hugeBytes != 0 {
		return false
	}
	for off := 0; off < len(b); off += hugeBytes {
		if populate(b[off:off+paging.UnitBytes]) != nil {
			return false
		}
	}
	for range collapseTries {
		if err := unix.Madvise(b, unix.MADV_COLLAPSE); !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return err == nil
		}
	}
	return false
}

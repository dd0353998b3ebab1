//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"syscall"
	"unsafe"
)

// scratch is what one launch needs besides its operands: lists and tables, written by the CPU into pinned memory and
// copied in stream order, and room for intermediate results. It returns to its stream when the launch is done.
type scratch struct {
	dev    *Device
	size   int
	host   []byte // pinned
	device uintptr
	until  int64 // entry of the stream that uses it
}

const minScratch = 64 << 10

// takeScratch returns one with n bytes, in which nothing is in flight. dev.mu is held, the context is current.
func (s *stream) takeScratch(n int) (*scratch, error) {
	for _, x := range s.scratch {
		if x.size >= n && x.until <= s.done {
			x.until = s.queued
			return x, nil
		}
	}
	x := &scratch{dev: s.dev, size: max(minScratch, 1<<bits.Len(uint(n-1)))}
	lib := s.dev.lib
	host, err := syscall.Mmap(-1, 0, x.size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("scratch: %w", err)
	}
	if err := lib.call(memHostRegister, uintptr(unsafe.Pointer(&host[0])), uintptr(len(host)), registerPortable); err != nil {
		return nil, errors.Join(err, syscall.Munmap(host))
	}
	x.host = host
	if err := lib.call(memAlloc, uintptr(unsafe.Pointer(&x.device)), uintptr(x.size)); err != nil {
		return nil, errors.Join(err, lib.call(memHostUnregister, uintptr(unsafe.Pointer(&host[0]))), syscall.Munmap(host))
	}
	x.until = s.queued
	s.scratch = append(s.scratch, x)
	return x, nil
}

// upload queues the copy of the first n bytes.
func (x *scratch) upload(s *stream, n int) error {
	return x.dev.lib.call(memcpyAsync, x.device, uintptr(unsafe.Pointer(&x.host[0])), uintptr(n), s.handle)
}

func (x *scratch) release() error {
	err := errors.Join(x.dev.lib.call(memFree, x.device), x.dev.lib.call(memHostUnregister, uintptr(unsafe.Pointer(&x.host[0]))))
	return errors.Join(err, syscall.Munmap(x.host))
}

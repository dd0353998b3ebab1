//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// kernelPageBytes is the largest page that the copy kernel moves: beyond it the cost of a copy of its own no longer
// matters. It is an estimate until it has been measured on a device.
const kernelPageBytes = 64 << 10

// Copy implements gpu.Stream.
func (s *stream) Copy(batch []gpu.Copy) error {
	if err := gpu.ValidateCopies(batch); err != nil || len(batch) == 0 {
		return err
	}
	switch {
	case len(batch) == 1:
		return s.copyOne(batch[0])
	case alike(batch):
		return s.submit("copy", spans(batch), func() error { return s.copyByKernel(batch) })
	case s.dev.lib.fn[memcpyBatchAsync] != 0:
		return s.submit("copy", spans(batch), func() error { return s.copyByDriver(batch) })
	}
	return s.copyEach(batch)
}

// alike reports whether the copy kernel can move the batch: small pages of one size, all aligned.
func alike(batch []gpu.Copy) bool {
	n := batch[0].Bytes
	return n <= kernelPageBytes && n%16 == 0 && !slices.ContainsFunc(batch, func(c gpu.Copy) bool {
		return c.Bytes != n || c.Dst%16 != 0 || c.Src%16 != 0
	})
}

// spans lists destinations before sources: runs in one memory then are found once.
func spans(batch []gpu.Copy) func(yield func(gpu.Span) bool) {
	return func(yield func(gpu.Span) bool) {
		for _, c := range batch {
			if !yield(gpu.Span{Addr: c.Dst, Bytes: c.Bytes, Write: true}) {
				return
			}
		}
		for _, c := range batch {
			if !yield(gpu.Span{Addr: c.Src, Bytes: c.Bytes}) {
				return
			}
		}
	}
}

func (s *stream) copyOne(c gpu.Copy) error {
	return s.submit("copy", spans([]gpu.Copy{c}), func() error {
		return s.dev.lib.call(memcpyAsync, uintptr(c.Dst), uintptr(c.Src), uintptr(c.Bytes), s.handle)
	})
}

// copyEach queues copy by copy, after all of them were checked: either every entry is good or none is queued.
func (s *stream) copyEach(batch []gpu.Copy) error {
	s.dev.mu.Lock()
	_, err := s.dev.hold("copy", spans(batch))
	s.dev.mu.Unlock()
	if err != nil {
		return err
	}
	for _, c := range batch {
		if err := s.copyOne(c); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) copyByKernel(batch []gpu.Copy) error {
	list := 8 * len(batch)
	x, err := s.takeScratch(2 * list)
	if err != nil {
		return err
	}
	for i, c := range batch {
		binary.LittleEndian.PutUint64(x.host[8*i:], uint64(c.Src))
		binary.LittleEndian.PutUint64(x.host[list+8*i:], uint64(c.Dst))
	}
	if err := x.upload(s, 2*list); err != nil {
		return err
	}
	src, dst, n, bytes := uint64(x.device), uint64(x.device)+uint64(list), uint32(len(batch)), uint32(batch[0].Bytes)
	threads := min(256, (bytes/16+31)/32*32)
	return s.launch("pages", "kv_copy_pages", [3]uint32{min(n, uint32(4*s.dev.info.Units)), 1, 1}, threads,
		unsafe.Pointer(&src), unsafe.Pointer(&dst), unsafe.Pointer(&n), unsafe.Pointer(&bytes))
}

// copyAttributes is the driver's struct. Sources are read in stream order.
type copyAttributes struct {
	srcAccessOrder   int32
	srcHint, dstHint location
	flags            uint32
}

const accessOrderStream = 1

func (s *stream) copyByDriver(batch []gpu.Copy) error {
	dst, src, sizes := make([]uint64, len(batch)), make([]uint64, len(batch)), make([]uint64, len(batch))
	for i, c := range batch {
		dst[i], src[i], sizes[i] = uint64(c.Dst), uint64(c.Src), uint64(c.Bytes)
	}
	attributes := copyAttributes{srcAccessOrder: accessOrderStream}
	var index, failed uint64
	return s.dev.lib.call(memcpyBatchAsync, uintptr(unsafe.Pointer(&dst[0])), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&sizes[0])),
		uintptr(len(batch)), uintptr(unsafe.Pointer(&attributes)), uintptr(unsafe.Pointer(&index)), 1, uintptr(unsafe.Pointer(&failed)), s.handle)
}

package gpu

import (
	"context"
	"fmt"
	"os"
)

// Addr is an address as the device sees it. Adding byte counts gives addresses inside the same memory. Addresses of two
// devices, or of one device in two processes, have nothing to do with each other.
type Addr uint64

// Use says who else may reach an allocation.
type Use uint8

const (
	// Private memory belongs to this process alone.
	Private Use = iota
	// Pool memory can be exported. Importers may only read it; where Info.ReadOnlyPools is true the system enforces that.
	Pool
	// Shared memory can be exported and importers may write it: timeline slots, working pages.
	Shared
)

// Access is what an importer asks for.
type Access uint8

// What an importer may do.
const (
	ReadOnly Access = iota
	ReadWrite
)

// Info is constant for the life of a device.
type Info struct {
	Driver        string   // "host" or "cuda"
	Name          string   // for people
	Arch          string   // instruction set of the kernels in use, such as "avx512" or "sm_90"
	UUID          [16]byte // names the device across processes; ordinals do not
	TotalBytes    int64    // memory of the device, used or not
	GranuleBytes  int64    // Pool and Shared sizes are rounded up to a multiple of this
	Units         int      // multiprocessors or CPU threads
	ReadOnlyPools bool     // an importer of a Pool cannot get a writable mapping
	Kernels       []string // names that Launch accepts
}

// Stats counts what lives now, for leak checks and metrics.
type Stats struct {
	Mems           int   // allocations and imports not freed
	MemBytes       int64 // their bytes; never above Info.TotalBytes for allocations
	Registered     int   // host ranges registered
	Streams        int   // streams not closed
	UnfinishedWork int   // copies, fills, kernels, signals and waits queued and not known to be done
}

// Device is one accelerator, or the host acting as one.
type Device interface {
	Info() Info
	Stats() Stats

	// Alloc returns size bytes of device memory, at least 256-byte aligned, contents undefined. size is rounded up to
	// Info.GranuleBytes for Pool and Shared. ErrNoMemory when it does not fit.
	Alloc(size int64, use Use) (Mem, error)

	// Import maps memory that another process exported. f is borrowed; the memory stays valid after its exporter died.
	// size must be the exporter's Mem.Size.
	Import(f *os.File, size int64, access Access) (Mem, error)

	// Register makes host memory reachable for copies, until Free. b must come from mmap, start and end on a page
	// boundary, and stay mapped until Free; memory of the Go heap is not allowed. Mem.Addr need not equal b's address.
	Register(b []byte) (Mem, error)

	// NewStream returns an empty stream.
	NewStream() (Stream, error)

	// Close releases the device. ErrBusy, and nothing is closed, while work is unfinished. ErrLeak names what was still
	// alive; it was released. A second Close does nothing.
	Close() error
}

// Mem is a range of device memory, or of host memory that the device may reach.
type Mem interface {
	Addr() Addr
	Size() int64
	// Bytes is the same memory as the CPU sees it, or nil when it cannot. Leased until Free. Reading while queued work
	// writes is a data race like any other.
	Bytes() []byte
	// Export returns a descriptor to hand to another process; the caller closes it. ErrUnsupported unless allocated as
	// Pool or Shared.
	Export() (*os.File, error)
	// Free ends the memory. ErrBusy, and it stays alive, while queued work names it. A second Free is ErrClosed.
	Free() error
}

// Copy is one copy of Bytes bytes. Source and destination lie in device memory or registered memory and do not overlap.
type Copy struct {
	Dst, Src Addr
	Bytes    int64
}

// MaxBatch bounds the entries of one Stream.Copy, so that one batch never holds a stream for long.
const MaxBatch = 65536

// ValidateCopies checks what can be checked without knowing the memory, for drivers: sizes, and entries that overlap
// themselves.
func ValidateCopies(batch []Copy) error {
	if len(batch) > MaxBatch {
		return &ArgError{Op: "copy", Arg: "len(batch)", Got: int64(len(batch)), Want: "at most 65536"}
	}
	for i, c := range batch {
		if c.Bytes <= 0 {
			return &ArgError{Op: "copy", Arg: fmt.Sprintf("batch[%d].Bytes", i), Got: c.Bytes, Want: "a positive size"}
		}
		if n := Addr(c.Bytes); n > maxPool || c.Src+n < c.Src || c.Dst+n < c.Dst {
			return &FaultError{Op: "copy", Addr: c.Src, Bytes: c.Bytes}
		}
		if c.Dst < c.Src+Addr(c.Bytes) && c.Src < c.Dst+Addr(c.Bytes) {
			return &ArgError{Op: "copy", Arg: fmt.Sprintf("batch[%d].Dst", i), Got: int64(c.Dst), Want: "no overlap with the source"}
		}
	}
	return nil
}

// Stream is a queue of work that the device runs in order. The queue is bounded: a call blocks while it is full.
type Stream interface {
	// Copy queues the whole batch or, on an error, nothing. Entries of one batch run in any order and must not overlap.
	// batch is borrowed until return.
	Copy(batch []Copy) error
	// Fill sets n bytes to value.
	Fill(dst Addr, n int64, value byte) error
	// Launch queues a kernel: *Attention or *PageSum. k and what it points to are borrowed until return.
	Launch(k Kernel) error

	// Signal raises the 8-byte slot to value once all earlier work on the stream is done and visible.
	Signal(slot Addr, value uint64) error
	// Await holds later work on the stream until the slot is at least value. Whoever can write the slot can end the
	// wait, this process through another stream included.
	Await(slot Addr, value uint64) error

	// Record returns a fence that is done when all work queued so far is done. Fences need no release.
	Record() (Fence, error)
	// Wait holds later work on this stream until f, recorded on any stream of the device, is done. It does not block.
	Wait(f Fence) error

	// Close releases the stream. ErrBusy while work is unfinished. A second Close does nothing.
	Close() error
}

// Fence is a point in a stream.
type Fence interface {
	// Done reports, without blocking, whether the work before the fence is done. An error is ErrLost.
	Done() (bool, error)
	// Wait blocks until it is, or ctx ends; then the work goes on.
	Wait(ctx context.Context) error
}

// Sync waits until all work queued on s so far is done.
func Sync(ctx context.Context, s Stream) error {
	f, err := s.Record()
	if err != nil {
		return err
	}
	return f.Wait(ctx)
}

// Kernel is the description of one launch. Its set is closed: *Attention and *PageSum.
type Kernel interface {
	// Name is the kernel's name, as in Info.Kernels.
	Name() string
	// Validate checks all that can be checked without looking at device memory.
	Validate() error
	// Spans calls yield for each range of memory that the kernel reads or writes.
	Spans(yield func(Span) bool)
}

// Span is a range that a kernel touches.
type Span struct {
	Addr  Addr
	Bytes int64
	Write bool
}

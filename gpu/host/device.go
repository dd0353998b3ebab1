package host

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host/attn"
	"github.com/kvtier/kvtier/paging/shm"
)

// Config describes a device.
type Config struct {
	// MemoryBytes is what Alloc may hand out in all; required. It is not taken before it is allocated.
	MemoryBytes int64
	// PageSum is the checksum of a page; nil leaves the kernel out. The sum belongs to the pages' owner, not to a device.
	PageSum func(page []byte) uint64
	// Workers is the goroutines of one attention launch; 0 means GOMAXPROCS.
	Workers int
	// Strict makes streams lazy and fills new memory with a pattern. For tests.
	Strict bool
}

const granule = 4096

// Device implements gpu.Device.
type Device struct {
	cfg  Config
	info gpu.Info

	unfinished atomic.Int64 // work queued and not done

	mu      sync.Mutex
	closed  bool
	used    int64 // bytes handed out by Alloc
	mems    gpu.Ranges[*mem]
	streams map[*stream]struct{}
}

// Open returns a device that owns nothing yet.
func Open(cfg Config) (*Device, error) {
	if cfg.MemoryBytes <= 0 {
		return nil, &gpu.ArgError{Op: "open", Arg: "MemoryBytes", Got: cfg.MemoryBytes, Want: "a positive size"}
	}
	if cfg.Workers < 0 {
		return nil, &gpu.ArgError{Op: "open", Arg: "Workers", Got: int64(cfg.Workers), Want: "0 or more"}
	}
	if cfg.Workers == 0 {
		cfg.Workers = runtime.GOMAXPROCS(0)
	}
	kernels := []string{gpu.AttentionKernel}
	if cfg.PageSum != nil {
		kernels = append(kernels, gpu.PageSumKernel)
	}
	return &Device{
		cfg: cfg,
		info: gpu.Info{Driver: "host", Name: "host memory", Arch: attn.Supported()[0].String(), UUID: machineID(),
			TotalBytes: cfg.MemoryBytes, GranuleBytes: granule, Units: cfg.Workers, ReadOnlyPools: true, Kernels: kernels},
		streams: map[*stream]struct{}{},
	}, nil
}

// machineID is the boot id: memory of this kind can be shared by processes of one running system.
func machineID() (id [16]byte) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil { // no proc: every device looks the same, and Import checks what it is given anyway
		return id
	}
	n := 0
	for _, c := range text {
		digit := slices.Index([]byte("0123456789abcdef"), c)
		if digit >= 0 && n < 32 {
			id[n/2] |= byte(digit) << (4 * (1 - n%2))
			n++
		}
	}
	return id
}

// Info implements gpu.Device.
func (d *Device) Info() gpu.Info { return d.info }

// Stats implements gpu.Device.
func (d *Device) Stats() gpu.Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := gpu.Stats{Streams: len(d.streams), UnfinishedWork: int(d.unfinished.Load())}
	for _, m := range d.mems {
		if m.registered {
			s.Registered++
			continue
		}
		s.Mems++
		s.MemBytes += m.Size()
	}
	return s
}

// Alloc implements gpu.Device.
func (d *Device) Alloc(size int64, use gpu.Use) (gpu.Mem, error) {
	if size <= 0 {
		return nil, &gpu.ArgError{Op: "alloc", Arg: "size", Got: size, Want: "a positive size"}
	}
	size = (min(size, math.MaxInt64-granule) + granule - 1) / granule * granule
	if err := d.reserve(size); err != nil {
		return nil, err
	}
	memory, err := create(size, use)
	if err != nil {
		d.release(size)
		return nil, fmt.Errorf("%w: %d bytes: %w", gpu.ErrNoMemory, size, err)
	}
	if d.cfg.Strict {
		for i := range memory.Bytes() {
			memory.Bytes()[i] = 0xa5
		}
	}
	return d.add(&mem{dev: d, b: memory.Bytes(), memory: memory, use: use, charged: size})
}

func create(size int64, use gpu.Use) (*shm.Memory, error) {
	if use == gpu.Pool {
		return shm.CreateExtent("kvtier-pool", size, shm.Options{NUMANode: -1})
	}
	return shm.CreateStaging("kvtier-device", size)
}

// reserve takes size bytes of the budget.
func (d *Device) reserve(size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return gpu.ErrClosed
	}
	if size > d.cfg.MemoryBytes-d.used {
		return fmt.Errorf("%w: %d bytes wanted, %d of %d free", gpu.ErrNoMemory, size, d.cfg.MemoryBytes-d.used, d.cfg.MemoryBytes)
	}
	d.used += size
	return nil
}

func (d *Device) release(size int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.used -= size
}

// add makes m known by its address, or gives it back if the device was closed meanwhile.
func (d *Device) add(m *mem) (gpu.Mem, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		d.used -= m.charged
		return nil, errors.Join(gpu.ErrClosed, m.unmap())
	}
	if !d.mems.Insert(m) {
		return nil, &gpu.ArgError{Op: "register", Arg: "b", Got: int64(len(m.b)), Want: "memory that is not registered already"}
	}
	return m, nil
}

// Import implements gpu.Device. Read-only memory is refused unless it is sealed as a pool is, and writable memory unless
// nobody can resize it.
func (d *Device) Import(f *os.File, size int64, access gpu.Access) (gpu.Mem, error) {
	if size <= 0 || size%granule != 0 {
		return nil, &gpu.ArgError{Op: "import", Arg: "size", Got: size, Want: "the exporter's Mem.Size"}
	}
	open := shm.MapReadWrite
	if access == gpu.ReadOnly {
		open = shm.MapReadOnly
	}
	memory, err := open(int(f.Fd()), size)
	if err != nil {
		return nil, fmt.Errorf("%w: import %d bytes: %w", gpu.ErrArgument, size, err)
	}
	return d.add(&mem{dev: d, b: memory.Bytes(), memory: memory, imported: true, readOnly: access == gpu.ReadOnly})
}

// Register implements gpu.Device. The CPU reaches all memory as it is, so b is only made known.
func (d *Device) Register(b []byte) (gpu.Mem, error) {
	m := &mem{dev: d, b: b, registered: true}
	if len(b) == 0 || len(b)%os.Getpagesize() != 0 || int(m.Addr())%os.Getpagesize() != 0 {
		return nil, &gpu.ArgError{Op: "register", Arg: "b", Got: int64(len(b)), Want: "whole pages"}
	}
	return d.add(m)
}

// NewStream implements gpu.Device.
func (d *Device) NewStream() (gpu.Stream, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, gpu.ErrClosed
	}
	s := newStream(d)
	d.streams[s] = struct{}{}
	return s, nil
}

// Close implements gpu.Device.
func (d *Device) Close() error {
	streams, err := d.close()
	for _, s := range streams {
		<-s.ended
	}
	return err
}

// close returns the streams whose loops are ending.
func (d *Device) close() (streams []*stream, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, nil
	}
	if n := d.unfinished.Load(); n > 0 {
		return nil, fmt.Errorf("%w: %d operations", gpu.ErrBusy, n)
	}
	d.closed = true
	var errs []error
	if len(d.streams)+len(d.mems) > 0 {
		errs = append(errs, fmt.Errorf("%w: %d streams, %d memories", gpu.ErrLeak, len(d.streams), len(d.mems)))
	}
	for s := range d.streams {
		errs = append(errs, s.stop())
		streams = append(streams, s)
	}
	for _, m := range d.mems {
		m.freed = true
		errs = append(errs, m.unmap())
	}
	d.mems, d.streams, d.used = nil, nil, 0
	return streams, errors.Join(errs...)
}

// hold finds the memory that span lies in and keeps it from being freed until drop. d.mu is held.
func (d *Device) hold(op string, span gpu.Span) (*mem, error) {
	m, ok := d.mems.Find(span.Addr, span.Bytes)
	if !ok || span.Write && m.readOnly {
		return nil, &gpu.FaultError{Op: op, Addr: span.Addr, Bytes: span.Bytes}
	}
	m.holds++
	return m, nil
}

// drop undoes hold for each of held.
func (d *Device) drop(held []*mem) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range held {
		m.holds--
	}
}

// holdAll holds every span or none.
func (d *Device) holdAll(op string, spans func(yield func(gpu.Span) bool)) (held []*mem, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, gpu.ErrClosed
	}
	for span := range spans {
		m, err := d.hold(op, span)
		if err != nil {
			for _, m := range held {
				m.holds--
			}
			return nil, err
		}
		if n := len(held); n > 0 && held[n-1] == m { // pages of one pool come in runs: one hold is enough
			m.holds--
			continue
		}
		held = append(held, m)
	}
	return held, nil
}

// demandAll lets every stream run: one waits for a slot that another may raise.
func (d *Device) demandAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s := range d.streams {
		s.demandAll()
	}
}

// dup returns a new descriptor of what fd names.
func dup(fd int) (*os.File, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	return os.NewFile(uintptr(n), "kvtier-pool"), nil
}

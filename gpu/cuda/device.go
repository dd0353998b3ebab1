//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda/kernels"
)

// Device implements gpu.Device.
type Device struct {
	// Constant.
	lib    *library
	device int32
	ctx    uintptr
	info   gpu.Info
	vmm    bool

	// One lock for all: every driver call here only queues or asks, and none waits for the device.
	mu        sync.Mutex
	closed    bool
	lost      error // sticky
	mems      gpu.Ranges[*mem]
	streams   map[*stream]struct{}
	events    []uintptr // free for the next fence
	modules   map[string]uintptr
	functions map[string]uintptr
}

// Open opens a device. gpu.ErrNoDevice if there is no driver or no such device, gpu.ErrDriver if the driver is too old or
// refuses the kernels.
func Open(cfg Config) (gpu.Device, error) {
	lib, err := load(cfg.Library)
	if err != nil {
		return nil, err
	}
	report, device, err := lib.describe(cfg.Ordinal)
	if err != nil {
		return nil, err
	}
	d := &Device{lib: lib, device: device, vmm: report.VMM && report.PosixFD, streams: map[*stream]struct{}{},
		modules: map[string]uintptr{}, functions: map[string]uintptr{}}
	if err := lib.call(primaryCtxRetain, uintptr(unsafe.Pointer(&d.ctx)), uintptr(device)); err != nil {
		return nil, fmt.Errorf("gpu/cuda: context of device %d: %w", cfg.Ordinal, err)
	}
	d.info = gpu.Info{Driver: "cuda", Name: report.Name, Arch: "sm_" + strings.ReplaceAll(report.Compute, ".", ""), UUID: report.UUID,
		TotalBytes: report.TotalBytes, GranuleBytes: 1, Units: max(1, report.Units), Kernels: []string{gpu.AttentionKernel, gpu.PageSumKernel}}
	err = d.do(func() error {
		d.info.GranuleBytes = legacyGranule
		if d.vmm {
			if err := d.granularity(); err != nil {
				return err
			}
		}
		_, err := d.function("pages", "kv_copy_pages")
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("gpu/cuda: open device %d: %w", cfg.Ordinal, err), d.Close())
	}
	return d, nil
}

func (d *Device) granularity() error {
	var granule uint64
	prop := d.property()
	if err := d.lib.call(memGetGranularity, uintptr(unsafe.Pointer(&granule)), uintptr(unsafe.Pointer(&prop)), 0); err != nil {
		return err
	}
	d.info.GranuleBytes = int64(granule)
	return nil
}

// do runs f with the device's context current. The context belongs to the thread, so the goroutine stays on one.
func (d *Device) do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.lib.call(ctxSetCurrent, d.ctx); err != nil {
		return err
	}
	return f()
}

// try is do for calls that a lost device fails: it remembers the loss. d.mu is held.
func (d *Device) try(f func() error) error {
	if d.closed {
		return gpu.ErrClosed
	}
	if d.lost != nil {
		return d.lost
	}
	err := d.do(f)
	if errors.Is(err, gpu.ErrLost) {
		d.lost = err
	}
	return err
}

// function finds a kernel, and loads its module when it is the first of it. d.mu is held, the context is current.
func (d *Device) function(module, name string) (uintptr, error) {
	if f := d.functions[name]; f != 0 {
		return f, nil
	}
	m := d.modules[module]
	if m == 0 {
		text, err := kernels.PTX(module)
		if err != nil {
			return 0, err
		}
		if err := d.lib.call(moduleLoad, uintptr(unsafe.Pointer(&m)), uintptr(unsafe.Pointer(&text[0])), 0, 0, 0); err != nil {
			return 0, fmt.Errorf("%w: module %s: %w", gpu.ErrDriver, module, err)
		}
		d.modules[module] = m
	}
	var f uintptr
	symbol := cString(name)
	if err := d.lib.call(moduleGetFunction, uintptr(unsafe.Pointer(&f)), m, uintptr(unsafe.Pointer(&symbol[0]))); err != nil {
		return 0, fmt.Errorf("%w: kernel %s: %w", gpu.ErrDriver, name, err)
	}
	d.functions[name] = f
	return f, nil
}

// Info implements gpu.Device.
func (d *Device) Info() gpu.Info { return d.info }

// Stats implements gpu.Device.
func (d *Device) Stats() gpu.Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := gpu.Stats{Streams: len(d.streams), UnfinishedWork: d.unfinished()}
	for _, m := range d.mems {
		if m.registered() {
			s.Registered++
			continue
		}
		s.Mems++
		s.MemBytes += m.size
	}
	return s
}

// unfinished asks every stream. d.mu is held.
func (d *Device) unfinished() (n int) {
	if d.lost != nil {
		return 0 // nothing of it will ever be done
	}
	for s := range d.streams {
		s.settle()
		n += int(s.queued - s.done)
	}
	return n
}

// NewStream implements gpu.Device.
func (d *Device) NewStream() (gpu.Stream, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &stream{dev: d}
	err := d.try(func() error { return d.lib.call(streamCreate, uintptr(unsafe.Pointer(&s.handle)), streamNonBlocking) })
	if err != nil {
		return nil, fmt.Errorf("gpu/cuda: stream: %w", err)
	}
	d.streams[s] = struct{}{}
	return s, nil
}

// Close implements gpu.Device. On a lost device it releases what the driver still lets go of.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	if n := d.unfinished(); n > 0 {
		return fmt.Errorf("%w: %d operations", gpu.ErrBusy, n)
	}
	var errs []error
	if len(d.streams)+len(d.mems) > 0 {
		errs = append(errs, fmt.Errorf("%w: %d streams, %d memories", gpu.ErrLeak, len(d.streams), len(d.mems)))
	}
	errs = append(errs, d.do(func() error {
		var errs []error
		for s := range d.streams {
			errs = append(errs, s.destroy())
		}
		for _, m := range d.mems {
			m.freed = true
			errs = append(errs, m.release())
		}
		for _, e := range d.events {
			errs = append(errs, d.lib.call(eventDestroy, e))
		}
		for _, m := range d.modules {
			errs = append(errs, d.lib.call(moduleUnload, m))
		}
		return errors.Join(errs...)
	}), d.lib.call(primaryCtxRelease, uintptr(d.device)))
	d.closed, d.mems, d.streams, d.events = true, nil, nil, nil
	if d.lost != nil { // its calls fail by nature; what leaked is still worth saying
		return errors.Join(errs[:len(errs)-2]...)
	}
	return errors.Join(errs...)
}

// hold finds the memory of every span, or refuses. d.mu is held.
func (d *Device) hold(op string, spans func(yield func(gpu.Span) bool)) (held []*mem, err error) {
	for span := range spans {
		m, ok := d.mems.Find(span.Addr, span.Bytes)
		if !ok || span.Write && m.readOnly {
			return nil, &gpu.FaultError{Op: op, Addr: span.Addr, Bytes: span.Bytes}
		}
		if n := len(held); n == 0 || held[n-1] != m { // pages of one pool come in runs
			held = append(held, m)
		}
	}
	return held, nil
}

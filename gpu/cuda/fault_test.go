//go:build linux && amd64 && !nocuda

package cuda

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

func TestNoDriver(t *testing.T) {
	stubReset()
	text := filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(text, []byte("not a library"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/nowhere/libcuda.so.1", text} {
		if _, err := Open(Config{Library: path}); !errors.Is(err, gpu.ErrNoDevice) {
			t.Errorf("%s: %v", path, err)
		}
		if r, err := Probe(path); !errors.Is(err, gpu.ErrNoDevice) || len(r.Devices) != 0 {
			t.Errorf("probe %s: %+v, %v", path, r, err)
		}
	}
	for _, ordinal := range []int{-1, 1, 99} {
		if _, err := Open(Config{Library: stub.path, Ordinal: ordinal}); !errors.Is(err, gpu.ErrNoDevice) {
			t.Errorf("device %d of 1: %v", ordinal, err)
		}
	}
	stubSet("devices", 0)
	if _, err := Open(Config{Library: stub.path}); !errors.Is(err, gpu.ErrNoDevice) {
		t.Errorf("no devices: %v", err)
	}
	stubReset()
	checkLeaks(t)
}

func TestDriverTooOld(t *testing.T) {
	stubReset()
	stubSet("version", 11000)
	_, err := Open(Config{Library: stub.path})
	if !errors.Is(err, gpu.ErrDriver) || !strings.Contains(err.Error(), "cuStreamWaitValue64@11070") || !strings.Contains(err.Error(), "11000") {
		t.Errorf("open: %v", err)
	}
	r, err := Probe(stub.path)
	if !errors.Is(err, gpu.ErrDriver) || r.DriverVersion != 11000 || len(r.Missing) < 3 {
		t.Errorf("probe: %+v, %v", r, err)
	}
	stubReset()
}

func TestProbe(t *testing.T) {
	stubReset()
	stubSet("devices", 2)
	r, err := Probe(stub.path)
	if err != nil {
		t.Fatal(err)
	}
	if r.DriverVersion != 12080 || !r.BatchCopies || len(r.Devices) != 2 {
		t.Fatalf("%+v", r)
	}
	d := r.Devices[1]
	if d.Name != "Stub GPU 1" || d.Compute != "9.0" || !d.VMM || !d.PosixFD || d.TotalBytes != 1<<30 || d.UUID == r.Devices[0].UUID || !d.Peers[0] || d.Peers[1] {
		t.Errorf("%+v", d)
	}
	stubReset()
	checkLeaks(t)
}

// Every driver call inside Open, Alloc, Import, Register and NewStream fails in turn: the error has the right class and
// nothing stays behind.
func TestEachCallOfSetupMayFail(t *testing.T) {
	for _, c := range []struct {
		call string
		code int
		want error
	}{
		{"cuDevicePrimaryCtxRetain", 2, gpu.ErrNoMemory}, {"cuMemGetAllocationGranularity", 801, gpu.ErrUnsupported},
		{"cuModuleLoadDataEx", 218, gpu.ErrDriver}, {"cuModuleLoadDataEx", 222, gpu.ErrDriver}, {"cuModuleGetFunction", 500, gpu.ErrDriver},
		{"cuDeviceGetUuid_v2", 1, gpu.ErrArgument}, {"cuCtxSetCurrent", 201, gpu.ErrArgument},
	} {
		stubReset()
		stubFail(c.call, 1, c.code)
		if _, err := Open(Config{Library: stub.path}); !errors.Is(err, c.want) {
			t.Errorf("open with %s failing: %v, want %v", c.call, err, c.want)
		}
		checkLeaks(t)
	}
	for _, call := range []string{"cuMemAlloc_v2", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle",
		"cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamCreate"} {
		d := openStub(t)
		pool, err := d.Alloc(4096, gpu.Pool)
		if err != nil {
			t.Fatal(err)
		}
		f, err := pool.Export()
		if err != nil {
			t.Fatal(err)
		}
		host, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		before := d.Stats()
		failed := 0
		for _, step := range []func() (interface{ Free() error }, error){
			func() (interface{ Free() error }, error) { return d.Alloc(4096, gpu.Private) },
			func() (interface{ Free() error }, error) { return d.Alloc(4096, gpu.Pool) },
			func() (interface{ Free() error }, error) { return d.Import(f, pool.Size(), gpu.ReadOnly) },
			func() (interface{ Free() error }, error) { return d.Register(host) },
			func() (interface{ Free() error }, error) { s, err := d.NewStream(); return closer{s}, err },
		} {
			calls := stubCount(call)
			stubFail(call, 1, 2)
			m, err := step()
			if stubCount(call) == calls { // not part of this step: take the fault back by using it up
				stubReset()
			}
			if err != nil {
				failed++
				if !errors.Is(err, gpu.ErrNoMemory) {
					t.Errorf("%s out of memory: %v", call, err)
				}
				continue
			}
			if err := m.Free(); err != nil {
				t.Error(err)
			}
		}
		if failed == 0 || d.Stats() != before {
			t.Errorf("%s: %d steps failed, stats %+v, before %+v", call, failed, d.Stats(), before)
		}
		if err := errors.Join(f.Close(), pool.Free(), d.Close(), syscall.Munmap(host)); err != nil {
			t.Error(err)
		}
	}
}

type closer struct{ gpu.Stream }

func (c closer) Free() error { return c.Close() }

// Out of memory for what a launch needs besides its operands: an error, and the next try works.
func TestScratchOutOfMemory(t *testing.T) {
	d := openStub(t)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(4096, gpu.Private)
	if err != nil {
		t.Fatal(err)
	}
	batch := []gpu.Copy{{Dst: m.Addr(), Src: m.Addr() + 64, Bytes: 16}, {Dst: m.Addr() + 16, Src: m.Addr() + 80, Bytes: 16}}
	for _, call := range []string{"cuMemHostRegister_v2", "cuMemAlloc_v2"} {
		stubFail(call, 1, 2)
		if err := s.Copy(batch); !errors.Is(err, gpu.ErrNoMemory) {
			t.Errorf("%s: %v", call, err)
		}
	}
	if err := errors.Join(s.Copy(batch), gpu.Sync(t.Context(), s), s.Close(), m.Free(), d.Close()); err != nil {
		t.Error(err)
	}
}

// A module that the driver refuses when it is first needed.
func TestAttentionPTXRefused(t *testing.T) {
	d := openStub(t)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(1<<20, gpu.Private)
	if err != nil {
		t.Fatal(err)
	}
	a := &gpu.Attention{Layout: gpu.NHD(gpu.BF16, 16, 1, 64), QHeads: 1, QType: gpu.FP32, Q: m.Addr(), Out: m.Addr() + 4096, Pool: m.Addr() + 8192,
		Pages: 1, MaxPages: 1, Table: []int32{0}, SeqLens: []int32{1}}
	stubFail("cuModuleLoadDataEx", 1, 218)
	if err := s.Launch(a); !errors.Is(err, gpu.ErrDriver) {
		t.Errorf("refused: %v", err)
	}
	if err := errors.Join(s.Launch(a), gpu.Sync(t.Context(), s), s.Close(), m.Free(), d.Close()); err != nil {
		t.Error(err)
	}
}

// The device is lost in the middle of copies: every later call and every fence says so, nobody hangs, and what can be
// given back is.
func TestDeviceLost(t *testing.T) {
	d := openStub(t)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	pool, err := d.Alloc(1<<20, gpu.Pool)
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(4096, gpu.Private)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Fill(m.Addr(), 16, 1); err != nil {
		t.Fatal(err)
	}
	early, err := s.Record()
	if err != nil {
		t.Fatal(err)
	}
	stubFail("cuMemcpyAsync", 2, 700)
	one := []gpu.Copy{{Dst: m.Addr(), Src: m.Addr() + 64, Bytes: 16}}
	if err := s.Copy(one); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func() error{
		"the copy":  func() error { return s.Copy(one) },
		"Fill":      func() error { return s.Fill(m.Addr(), 1, 1) },
		"Record":    func() error { _, err := s.Record(); return err },
		"Wait":      func() error { return early.Wait(t.Context()) },
		"NewStream": func() error { _, err := d.NewStream(); return err },
		"Alloc":     func() error { _, err := d.Alloc(1, gpu.Private); return err },
		"Export":    func() error { _, err := pool.Export(); return err },
	} {
		if name != "the copy" { // maps have no order: lose it first
			_ = s.Copy(one)
		}
		if err := f(); !errors.Is(err, gpu.ErrLost) {
			t.Errorf("%s: %v, want ErrLost", name, err)
		}
	}
	if err := errors.Join(pool.Free(), m.Free(), s.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}

// A fault while a kernel runs is seen by the fence behind it.
func TestFaultInsideAKernel(t *testing.T) {
	d := openStub(t)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(1<<16, gpu.Private)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Launch(&gpu.PageSum{Pages: []gpu.Addr{m.Addr()}, Bytes: 4096, Out: m.Addr() + 8192}); err != nil {
		t.Fatal(err)
	}
	under := *m.(*mem) // freed behind the driver's back while the launch is queued
	if err := d.do(under.release); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := gpu.Sync(ctx, s); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("use after free: %v, want ErrLost", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := d.Close(); !errors.Is(err, gpu.ErrLeak) {
		t.Errorf("close: %v", err)
	}
}

// The context belongs to the thread: a call outside do is refused on a thread that has none.
func TestContextRule(t *testing.T) {
	d := openStub(t)
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := d.lib.call(ctxSetCurrent, 0); err != nil {
			errs <- err
			return
		}
		var at uint64
		errs <- d.lib.call(memAlloc, uintptr(unsafe.Pointer(&at)), 4096)
	}()
	var e *Error
	if err := <-errs; !errors.As(err, &e) || e.Code != 201 {
		t.Errorf("without a context: %v, want code 201", err)
	}
	for range 50 { // on whatever threads these land
		go func() {
			m, err := d.Alloc(4096, gpu.Private)
			if err == nil {
				err = m.Free()
			}
			errs <- err
		}()
	}
	for range 50 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A stream that waits for a dead engine holds up its own callers, outside the device's lock, and nobody else.
func TestFullStreamBlocksOnlyItself(t *testing.T) {
	d := openStub(t)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	slot, err := d.Alloc(4096, gpu.Shared)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Fill(slot.Addr(), 4096, 0), gpu.Sync(t.Context(), s), s.Await(slot.Addr(), 1)); err != nil {
		t.Fatal(err)
	}
	queued := make(chan error)
	go func() {
		var err error
		for range 2 * maxUnfinished {
			err = errors.Join(err, s.Fill(slot.Addr()+64, 8, 1))
		}
		queued <- err
	}()
	other, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(other.Fill(slot.Addr()+128, 8, 2), gpu.Sync(t.Context(), other)); err != nil {
		t.Fatal(err)
	}
	for d.Stats().UnfinishedWork < maxUnfinished {
		runtime.Gosched()
	}
	select {
	case err := <-queued:
		t.Fatalf("%d entries were taken behind a wait: %v", 2*maxUnfinished, err)
	default:
	}
	if err := errors.Join(other.Signal(slot.Addr(), 1), gpu.Sync(t.Context(), other), <-queued, gpu.Sync(t.Context(), s)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Close(), other.Close(), slot.Free(), d.Close()); err != nil {
		t.Error(err)
	}
}

func TestStructsHaveTheDriversSizes(t *testing.T) {
	for name, s := range map[string][2]uintptr{
		"allocation property": {unsafe.Sizeof(allocation{}), 32}, "access descriptor": {unsafe.Sizeof(access{}), 12},
		"copy attributes": {unsafe.Sizeof(copyAttributes{}), 24}, "attention arguments": {unsafe.Sizeof(attentionArgs{}), 128},
	} {
		if s[0] != s[1] {
			t.Errorf("%s: %d bytes, want %d", name, s[0], s[1])
		}
	}
}

// Planted faults in the kernels are noticed: by the shim, or as wrong numbers.
func TestShimNoticesPlantedFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the stub once for each fault")
	}
	for name, c := range map[string][2]string{
		"barrier removed":      {"  barrier();\n#pragma unroll\n  for (int g = 0; g < G; g++) {\n    float top", "#pragma unroll\n  for (int g = 0; g < G; g++) {\n    float top"},
		"last token dropped":   {"to = from + size < len ? from + size : len;", "to = (from + size < len ? from + size : len) - 1;"},
		"divergent trip count": {"base < to; base += teams * TOKENS", "base + (i32)team < to; base += teams * TOKENS"},
	} {
		dir := t.TempDir()
		for _, f := range []string{"simt.h", "pages.cu", "decode.cu"} {
			text, err := os.ReadFile(filepath.Join("kernels", f))
			if err != nil {
				t.Fatal(err)
			}
			if f == "decode.cu" {
				if !bytes.Contains(text, []byte(c[0])) {
					t.Fatalf("%s: the source has changed, plant it anew", name)
				}
				text = bytes.Replace(text, []byte(c[0]), []byte(c[1]), 1)
			}
			if err := os.WriteFile(filepath.Join(dir, f), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		lib := filepath.Join(dir, "libcuda.so.1")
		if err := buildStub(lib, dir); err != nil {
			t.Fatal(err)
		}
		rel, err := attentionOn(t, lib)
		t.Logf("%s: relative error %.2g, %v", name, rel, err)
		if err == nil && rel <= 1e-5 {
			t.Errorf("%s: not noticed", name)
		}
	}
	if rel, err := attentionOn(t, stub.path); err != nil || rel > 1e-5 {
		t.Errorf("no fault: relative error %.2g, %v", rel, err)
	}
}

// attentionOn decodes 37 tokens on a library of its own and returns the error against float64.
func attentionOn(t *testing.T, lib string) (float64, error) {
	t.Helper()
	d, err := Open(Config{Library: lib})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(1<<20, gpu.Private)
	if err != nil {
		t.Fatal(err)
	}
	host, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	h, err := d.Register(host)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(host); i += 2 {
		gpu.BF16.Store(host[i:], float32(r.NormFloat64()))
	}
	a := &gpu.Attention{Layout: gpu.NHD(gpu.BF16, 16, 2, 128), QHeads: 8, QType: gpu.BF16, Q: m.Addr(), Out: m.Addr() + 65536, Pool: m.Addr() + 131072,
		Pages: 4, MaxPages: 3, Table: []int32{3, 1, 2}, SeqLens: []int32{37}}
	want := a.Reference(host, host[131072:])
	err = errors.Join(s.Copy([]gpu.Copy{{Dst: m.Addr(), Src: h.Addr(), Bytes: 1 << 20}}), s.Launch(a), gpu.Sync(t.Context(), s))
	if err == nil {
		err = errors.Join(s.Copy([]gpu.Copy{{Dst: h.Addr(), Src: a.Out, Bytes: a.OutBytes()}}), gpu.Sync(t.Context(), s))
	}
	rel := gpu.RelativeError(host, want)
	if err := errors.Join(s.Close(), m.Free(), h.Free(), d.Close(), syscall.Munmap(host)); err != nil {
		t.Error(err)
	}
	return rel, err
}

package host

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/gputest"
	"github.com/kvtier/kvtier/paging"
)

func open(t *testing.T, strict bool) gpu.Device {
	t.Helper()
	d, err := Open(Config{MemoryBytes: 256 << 20, PageSum: paging.Checksum, Strict: strict})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDevice(t *testing.T) {
	gputest.Run(t, gputest.Target{Open: func(t *testing.T) gpu.Device { return open(t, false) }, Sum: paging.Checksum, Tolerance: 3e-6, Operations: 20000})
}

func TestStrictDevice(t *testing.T) {
	gputest.Run(t, gputest.Target{Open: func(t *testing.T) gpu.Device { return open(t, true) }, Sum: paging.Checksum, Tolerance: 3e-6, Lazy: true, Operations: 5000})
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOpenRefuses(t *testing.T) {
	for _, c := range []Config{{}, {MemoryBytes: -1}, {MemoryBytes: 1, Workers: -1}} {
		if _, err := Open(c); !errors.Is(err, gpu.ErrArgument) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestNoPageSumNoKernel(t *testing.T) {
	d, err := Open(Config{MemoryBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Launch(&gpu.PageSum{Pages: []gpu.Addr{0}, Bytes: 16}); !errors.Is(err, gpu.ErrUnsupported) || slices.Contains(d.Info().Kernels, gpu.PageSumKernel) {
		t.Errorf("%v, kernels %v", err, d.Info().Kernels)
	}
	if err := errors.Join(s.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}

// A queue that is full makes the caller wait for room, and loses nothing.
func TestQueueIsBounded(t *testing.T) {
	for _, strict := range []bool{false, true} {
		d := open(t, strict)
		s, err := d.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		m, err := d.Alloc(8, gpu.Private)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3 * queueLength {
			if err := s.Signal(m.Addr(), uint64(i)); err != nil {
				t.Fatal(err)
			}
			if n := d.Stats().UnfinishedWork; n > queueLength {
				t.Fatalf("%d entries queued, bound %d", n, queueLength)
			}
		}
		if err := gpu.Sync(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if got := m.Bytes()[0]; got != byte((3*queueLength-1)&0xff) {
			t.Errorf("last signal left %d", got)
		}
		if err := errors.Join(s.Close(), m.Free(), d.Close()); err != nil {
			t.Error(err)
		}
	}
}

// Copies of 64 KiB pages in batches beside plain copies of the same pages, in the same run.
func BenchmarkCopy(b *testing.B) {
	const page, count = 64 << 10, 2048
	d, err := Open(Config{MemoryBytes: 1 << 30})
	if err != nil {
		b.Fatal(err)
	}
	pool, err := d.Alloc(2*page*count, gpu.Pool)
	if err != nil {
		b.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		b.Fatal(err)
	}
	var batch []gpu.Copy
	for i, p := range rand.Perm(count) {
		batch = append(batch, gpu.Copy{Dst: pool.Addr() + gpu.Addr(page*(count+i)), Src: pool.Addr() + gpu.Addr(page*p), Bytes: page})
	}
	device, plain := time.Duration(1<<62), time.Duration(1<<62)
	for b.Loop() {
		start := time.Now()
		if err := errors.Join(s.Copy(batch), gpu.Sync(b.Context(), s)); err != nil {
			b.Fatal(err)
		}
		device = min(device, time.Since(start))
		start = time.Now()
		for _, c := range batch {
			copy(pool.Bytes()[c.Dst-pool.Addr():][:page], pool.Bytes()[c.Src-pool.Addr():][:page])
		}
		plain = min(plain, time.Since(start))
	}
	b.ReportMetric(page*count/device.Seconds()/1e9, "GB/s")
	b.ReportMetric(page*count/plain.Seconds()/1e9, "memcpyGB/s")
	b.ReportMetric(plain.Seconds()/device.Seconds(), "ratio")
	if err := errors.Join(s.Close(), pool.Free(), d.Close()); err != nil {
		b.Fatal(err)
	}
}

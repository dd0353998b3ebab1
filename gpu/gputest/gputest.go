// Package gputest is the suite that every gpu.Device passes: lifetimes, ordering, error paths, exported pools, kernels
// against float64, and random work whose outcome is compared with a model. It holds no device of its own.
package gputest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/gpu"
)

// Target is a device under test.
type Target struct {
	// Open returns a device that has allocated nothing, with at least 64 MiB of memory. The suite closes it.
	Open func(t *testing.T) gpu.Device
	// Sum is the page checksum that the page_sum kernel is compared with.
	Sum func(page []byte) uint64
	// Lazy devices run nothing until it is observed; on them the suite also shows that a forgotten wait is noticed.
	Lazy bool
	// PoolsEnd says that the memory of a pool ends with its exporter: importers have
	// to let go first.
	PoolsEnd bool
	// Tolerance of attention against float64.
	Tolerance float64
	// Operations of the random test; 0 means 2,000.
	Operations int
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	for _, c := range []struct {
		name string
		test func(*env)
	}{
		{"Info", testInfo},
		{"AllocAndFree", testAllocAndFree},
		{"OutOfMemory", testOutOfMemory},
		{"Register", testRegister},
		{"CopyEverySize", testCopyEverySize},
		{"CopyBatches", testCopyBatches},
		{"Fill", testFill},
		{"Faults", testFaults},
		{"StreamOrder", testStreamOrder},
		{"WaitOrdersStreams", testWaitOrdersStreams},
		{"ForgottenWaitIsNoticed", testForgottenWait},
		{"LateWrites", testLateWrites},
		{"FreeUnderWork", testFreeUnderWork},
		{"FenceContext", testFenceContext},
		{"ForeignFence", testForeignFence},
		{"Timeline", testTimeline},
		{"ReleaseDeadWaiter", testReleaseDeadWaiter},
		{"ExportPool", testExportPool},
		{"ExportShared", testExportShared},
		{"PoolOutlivesExporter", testPoolOutlivesExporter},
		{"Attention", testAttention},
		{"AttentionRefusals", testAttentionRefusals},
		{"PageSum", testPageSum},
		{"Streams", testStreams},
		{"RandomWork", testRandomWork},
		{"CloseReportsLeaks", testCloseReportsLeaks},
		{"Closed", testClosed},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(&env{T: t, Target: target, dev: target.Open(t)}) })
	}
}

// env is one device and what a test took from it.
type env struct {
	*testing.T
	Target
	dev gpu.Device
}

// done closes the device and checks that the test gave everything back.
func (e *env) done() {
	e.Helper()
	if s := e.dev.Stats(); s != (gpu.Stats{}) {
		e.Errorf("left behind: %+v", s)
	}
	e.ok(e.dev.Close())
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

func (e *env) want(err, want error, what string) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf("%s: %v, want %v", what, err, want)
	}
}

func (e *env) alloc(size int64, use gpu.Use) gpu.Mem {
	e.Helper()
	m, err := e.dev.Alloc(size, use)
	e.ok(err)
	return m
}

func (e *env) stream() gpu.Stream {
	e.Helper()
	s, err := e.dev.NewStream()
	e.ok(err)
	return s
}

// host is registered host memory.
type host struct {
	gpu.Mem
	b []byte
}

func (e *env) host(size int) host {
	e.Helper()
	b := pages(e.T, size)
	m, err := e.dev.Register(b)
	e.ok(err)
	return host{m, b}
}

// pages returns zeroed memory of whole pages that lives as long as the test.
func pages(t *testing.T, size int) []byte {
	t.Helper()
	size = (size + 4095) / 4096 * 4096
	b, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (e *env) sync(s gpu.Stream) {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), time.Minute)
	defer cancel()
	e.ok(gpu.Sync(ctx, s))
}

func (e *env) free(ms ...interface{ Free() error }) {
	e.Helper()
	for _, m := range ms {
		e.ok(m.Free())
	}
}

func (e *env) closeAll(ss ...gpu.Stream) {
	e.Helper()
	for _, s := range ss {
		e.ok(s.Close())
	}
}

// put and get move bytes between the host and the device at once.
func (e *env) put(s gpu.Stream, dst gpu.Addr, b []byte) {
	e.Helper()
	h := e.host(len(b))
	copy(h.b, b)
	e.ok(s.Copy([]gpu.Copy{{Dst: dst, Src: h.Addr(), Bytes: int64(len(b))}}))
	e.sync(s)
	e.free(h)
}

func (e *env) get(s gpu.Stream, src gpu.Addr, n int) []byte {
	e.Helper()
	h := e.host(n)
	e.ok(s.Copy([]gpu.Copy{{Dst: h.Addr(), Src: src, Bytes: int64(n)}}))
	e.sync(s)
	b := bytes.Clone(h.b[:n])
	e.free(h)
	return b
}

func random(r *rand.Rand, n int) []byte {
	b := make([]byte, n+7)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b[:n]
}

func rng(a, b uint64) *rand.Rand { return rand.New(rand.NewPCG(a, b)) }

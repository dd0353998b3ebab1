//go:build linux && amd64 && !nocuda

package client_test

import (
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
	"github.com/kvtier/kvtier/tier/hbm"
	"github.com/kvtier/kvtier/tier/ram"
)

// cudaTier is an HBM tier that closes its device too.
type cudaTier struct {
	*hbm.Arena
	device gpu.Device
}

func (t *cudaTier) Close() error { return errors.Join(t.Arena.Close(), t.device.Close()) }

// cudaDrivers are tiers on the CUDA driver without a GPU, with RAM registered there.
func cudaDrivers(library string) server.Drivers {
	d := servertest.Drivers()
	var pool *hbm.Arena
	d.HBM = func(ctx context.Context, cfg server.Config, log *slog.Logger, added func(string)) (server.HBM, error) {
		device, err := cuda.Open(cuda.Config{Library: library})
		if err != nil {
			return nil, err
		}
		if pool, err = hbm.Open(ctx, hbm.Config{Device: device, BudgetBytes: int64(cfg.HBMBytes), Added: added, Logger: log}); err != nil {
			return nil, errors.Join(err, device.Close())
		}
		return &cudaTier{pool, device}, nil
	}
	d.RAM = func(ctx context.Context, cfg server.Config, log *slog.Logger, added func(string)) (server.RAM, error) {
		return ram.Open(ctx, ram.Config{BudgetBytes: int64(cfg.RAMBytes), Added: added, Logger: log, Mapped: pool.Register})
	}
	return d
}

// The whole way on CUDA, with the driver without a GPU (gpu/cuda/testdata/stub):
// pages come up, the engine imports the extents into its own device by their
// descriptors, reads the slots there, and fills working pages that are committed
// on the device.
func TestCUDAFromEndToEnd(t *testing.T) {
	library := filepath.Join(t.TempDir(), "libcuda.so.1")
	build := exec.CommandContext(t.Context(), "testdata/stub/build.sh", library, "kernels")
	build.Dir = "../gpu/cuda"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the stub driver (needs g++): %v\n%s", err, out)
	}
	cfg := servertest.Config(t)
	cfg.HBMBytes = 64 << 20
	n := servertest.Start(t, cfg, cudaDrivers(library))
	near := daemonFaces(n)[false]
	near.DevicePool, near.WorkingBytes = true, 2<<20
	c := open(t, near)
	ns := register(t, c)
	names := chain(1, 6)
	write(t, c, ns, names)
	e := newCUDAEngine(t, library, c)
	lease := fetchUp(t, c, ns, names)
	e.check(lease, names)
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}

	fresh := chain(2, 5)
	a, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: fresh, Tier: client.TierHBM})
	if err != nil || a.Rows() != 5 {
		t.Fatalf("%v", err)
	}
	for row, name := range fresh {
		for part := range 2 {
			slot, _ := a.Slot(row, part)
			page := make([]byte, slot.Bytes)
			fillPage(name, part, page)
			e.put(slot, page)
		}
	}
	if out, err := a.Commit(t.Context(), client.CommitOptions{}); err != nil || out[4] != client.OutcomeCommitted {
		t.Fatalf("%v, %v", out, err)
	}
	up := fetchUp(t, c, ns, fresh)
	if up.Usable != 5 || up.Tiers[0] != client.TierHBM {
		t.Errorf("%d blocks from %v after a commit on the device", up.Usable, up.Tiers)
	}
	e.check(up, fresh)
	down := fetch(t, c, ns, fresh)
	if err := errors.Join(readAll(down, fresh, 2), down.Release(t.Context()), up.Release(t.Context())); err != nil {
		t.Error(err)
	}
	e.close()
}

// cudaEngine is an engine with a device of its own.
type cudaEngine struct {
	t       *testing.T
	c       *client.Client
	device  gpu.Device
	stream  gpu.Stream
	extents map[paging.ExtentID]gpu.Mem
	host    gpu.Mem
	bytes   []byte
}

func newCUDAEngine(t *testing.T, library string, c *client.Client) *cudaEngine {
	t.Helper()
	e := &cudaEngine{t: t, c: c, extents: map[paging.ExtentID]gpu.Mem{}}
	var err error
	if e.device, err = cuda.Open(cuda.Config{Library: library}); err != nil {
		t.Fatal(err)
	}
	if e.stream, err = e.device.NewStream(); err != nil {
		t.Fatal(err)
	}
	if e.bytes, err = syscall.Mmap(-1, 0, 64<<10, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON); err != nil {
		t.Fatal(err)
	}
	if e.host, err = e.device.Register(e.bytes); err != nil {
		t.Fatal(err)
	}
	return e
}

// at is where the engine's device sees a slot.
func (e *cudaEngine) at(s paging.Slot, access gpu.Access) gpu.Addr {
	e.t.Helper()
	m := e.extents[s.Extent]
	if m == nil {
		pool, err := e.c.Pool()
		if err != nil {
			e.t.Fatal(err)
		}
		if pool.Device != "cuda" || pool.Memory != nil {
			e.t.Fatalf("a pool on %q, mapped: %v", pool.Device, pool.Memory != nil)
		}
		f, err := pool.Descriptor(e.t.Context(), s.Extent)
		if err != nil {
			e.t.Fatal(err)
		}
		bytes := pool.ExtentBytes
		if access == gpu.ReadWrite {
			bytes = 2 << 20
		}
		if m, err = e.device.Import(f, bytes, access); err != nil {
			e.t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			e.t.Fatal(err)
		}
		e.extents[s.Extent] = m
	}
	return m.Addr() + gpu.Addr(s.Offset)
}

func (e *cudaEngine) put(s paging.Slot, page []byte) {
	e.t.Helper()
	copy(e.bytes, page)
	err := e.stream.Copy([]gpu.Copy{{Dst: e.at(s, gpu.ReadWrite), Src: e.host.Addr(), Bytes: int64(len(page))}})
	if err := errors.Join(err, gpu.Sync(e.t.Context(), e.stream)); err != nil {
		e.t.Fatal(err)
	}
}

// check reads every page of a lease on the engine's device.
func (e *cudaEngine) check(lease *client.Lease, names []paging.BlockName) {
	e.t.Helper()
	for row, name := range names {
		for part := range 2 {
			slot, ok := lease.Slot(row, part)
			if !ok {
				e.t.Fatalf("no slot of row %d part %d", row, part)
			}
			err := e.stream.Copy([]gpu.Copy{{Dst: e.host.Addr(), Src: e.at(slot, gpu.ReadOnly), Bytes: int64(slot.Bytes)}})
			if err := errors.Join(err, gpu.Sync(e.t.Context(), e.stream), checkPage(name, part, e.bytes[:slot.Bytes])); err != nil {
				e.t.Fatal(err)
			}
			view, ok := lease.Page(row, part)
			if !ok || view.Bytes() != nil {
				e.t.Errorf("row %d part %d: a view of device memory: %v", row, part, ok)
			}
			if err := view.Close(); err != nil { // the generation is compared all the same
				e.t.Error(err)
			}
		}
	}
}

func (e *cudaEngine) close() {
	e.t.Helper()
	var errs []error
	for _, m := range e.extents {
		errs = append(errs, m.Free())
	}
	if err := errors.Join(append(errs, e.host.Free(), e.stream.Close(), e.device.Close(), syscall.Munmap(e.bytes))...); err != nil {
		e.t.Error(err)
	}
}

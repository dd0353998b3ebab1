// Package servertest runs nodes inside a test, on temporary directories and
// sockets, and stops them when it ends.
package servertest

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/hbm"
	"github.com/kvtier/kvtier/tier/nvme"
	"github.com/kvtier/kvtier/tier/ram"
)

// Node is a node that serves in this process.
type Node struct {
	*server.Server
	Config server.Config // with defaults

	stop context.CancelFunc
	done chan struct{}
	err  error
}

// Config is a small node in a directory of its own: 32 MiB of RAM, 1 MiB of
// staging, no HTTP. The directory is short enough for a socket.
func Config(t testing.TB) server.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return server.Config{
		Socket: filepath.Join(dir, "s"), HTTPListen: server.Off,
		RAMBytes: 32 << 20, StagingBytes: 1 << 20, StopWithin: 10 * time.Second,
	}
}

// Drivers are those of a program: RAM in shared memory, segment files on disk, a
// host device.
func Drivers() server.Drivers {
	d := new(drivers)
	return server.Drivers{HBM: d.openHBM, RAM: d.openRAM, NVMe: openNVMe}
}

type drivers struct{ hbm *hbm.Arena }

// deviceTier closes its device too.
type deviceTier struct {
	*hbm.Arena
	device gpu.Device
}

func (t *deviceTier) Close() error { return errors.Join(t.Arena.Close(), t.device.Close()) }

func (d *drivers) openHBM(ctx context.Context, cfg server.Config, log *slog.Logger, added func(string)) (server.HBM, error) {
	device, err := host.Open(host.Config{MemoryBytes: int64(cfg.HBMBytes) + 1<<20, PageSum: paging.Checksum})
	if err != nil {
		return nil, err
	}
	if d.hbm, err = hbm.Open(ctx, hbm.Config{Device: device, BudgetBytes: int64(cfg.HBMBytes), Added: added, Logger: log}); err != nil {
		return nil, errors.Join(err, device.Close())
	}
	return &deviceTier{d.hbm, device}, nil
}

func openNVMe(_ context.Context, cfg server.Config, dir string, log *slog.Logger) (tier.Durable, error) {
	t, err := nvme.Open(nvme.Config{Dir: dir, BudgetBytes: int64(cfg.NVMeBytes), Logger: log})
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (d *drivers) openRAM(ctx context.Context, cfg server.Config, log *slog.Logger, added func(string)) (server.RAM, error) {
	quotas := map[string]int64{}
	for _, t := range cfg.Tenants {
		quotas[t.Name] = int64(t.RAMBytes)
	}
	c := ram.Config{BudgetBytes: int64(cfg.RAMBytes), Quotas: quotas, HugePages: cfg.HugePages, Added: added, Logger: log}
	if d.hbm != nil {
		c.Mapped = d.hbm.Register
	}
	arena, err := ram.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	return arena, nil
}

// Start opens a node and serves. The test fails if it does not stop in order.
func Start(t testing.TB, cfg server.Config, drivers server.Drivers) *Node {
	t.Helper()
	s, err := server.Open(t.Context(), cfg, server.Options{Drivers: drivers, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := &Node{Server: s, Config: cfg.WithDefaults(), stop: cancel, done: make(chan struct{})}
	go func() { // owner: the test; exits with Stop
		defer close(n.done)
		n.err = s.Serve(ctx)
	}()
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Errorf("node: %v", err)
		}
	})
	return n
}

// Stop ends the node and says how that went. Idempotent.
func (n *Node) Stop() error {
	n.stop()
	<-n.done
	return n.err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda"
	hostdevice "github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/tier/hbm"
	"github.com/kvtier/kvtier/tier/ram"
)

// cudaLibraryEnv names another driver library than the system's libcuda.so.1.
const cudaLibraryEnv = "KVTIER_CUDA_LIBRARY"

// deviceSlack is what streams need beside the budget of the tier.
const deviceSlack = 16 << 20

// drivers are the tiers of a node. RAM is registered with the device that holds
// the HBM tier, if there is one: it is opened first and closed last.
type drivers struct{ hbm *hbm.Arena }

func nodeDrivers() server.Drivers {
	d := new(drivers)
	return server.Drivers{HBM: d.openHBM, RAM: d.openRAM, NVMe: openNVMe}
}

// deviceTier closes its device too.
type deviceTier struct {
	*hbm.Arena
	device gpu.Device
}

func (t *deviceTier) Close() error { return errors.Join(t.Arena.Close(), t.device.Close()) }

// openHBM is the driver of the HBM tier.
func (d *drivers) openHBM(ctx context.Context, c server.Config, log *slog.Logger, added func(tenant string)) (server.HBM, error) {
	device, err := openDevice(c, log)
	if err != nil {
		return nil, err
	}
	cfg := hbm.Config{Device: device, BudgetBytes: int64(c.HBMBytes), Quotas: map[string]int64{}, Added: added, Logger: log}
	if device.Info().Driver == server.DeviceHost {
		cfg.FreeMemory = thisHost().freeMemory
	}
	for _, t := range c.Tenants {
		cfg.Quotas[t.Name] = int64(t.HBMBytes)
	}
	a, err := hbm.Open(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, device.Close())
	}
	d.hbm = a
	return &deviceTier{a, device}, nil
}

// openDevice opens the device that the configuration names.
func openDevice(c server.Config, log *slog.Logger) (gpu.Device, error) {
	kind, ordinal, err := server.ParseDevice(c.Device)
	if err != nil {
		return nil, err
	}
	if kind != server.DeviceHost {
		device, err := cuda.Open(cuda.Config{Library: os.Getenv(cudaLibraryEnv), Ordinal: ordinal})
		switch {
		case err == nil:
			log.Info("device opened", "driver", "cuda", "name", device.Info().Name, "arch", device.Info().Arch)
			return device, nil
		case kind == server.DeviceCUDA || !errors.Is(err, gpu.ErrNoDevice):
			return nil, fmt.Errorf("device %s: %w (kvtier doctor tells more): %w", c.Device, err, paging.ErrUnavailable)
		}
		log.Info("no CUDA device: memory of this machine serves as one", "reason", err)
	}
	return hostdevice.Open(hostdevice.Config{MemoryBytes: int64(c.HBMBytes) + deviceSlack, PageSum: paging.Checksum})
}

// openRAM is the driver of the RAM tier.
func (d *drivers) openRAM(ctx context.Context, c server.Config, log *slog.Logger, added func(tenant string)) (server.RAM, error) {
	cfg := ram.Config{
		BudgetBytes: int64(c.RAMBytes), Quotas: map[string]int64{}, HugePages: c.HugePages,
		FreeMemory: thisHost().freeMemory, Added: added, Logger: log,
	}
	if d.hbm != nil {
		cfg.Mapped = d.hbm.Register
	}
	for _, t := range c.Tenants {
		cfg.Quotas[t.Name] = int64(t.RAMBytes)
	}
	if c.NUMANode != nil {
		cfg.NUMANode = *c.NUMANode + 1
	}
	return ram.Open(ctx, cfg)
}

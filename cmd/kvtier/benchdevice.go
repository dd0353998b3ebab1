package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/server"
)

func attentionWorkload() workload {
	cfg := bench.AttentionConfig{Threads: 1, MemoryBytes: 256 << 20, Rounds: 5}
	return workload{
		use: "attention", short: "Paged decode attention on the CPU against sequential reads of the same memory",
		bind: func(cmd *cobra.Command) { cmd.Flags().IntVar(&cfg.Threads, "threads", 1, "threads of both sides") },
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			if cfg.Threads < 1 || cfg.Threads > 1024 {
				return nil, usagef("--threads: want 1 to 1024")
			}
			if full {
				cfg.MemoryBytes, cfg.Rounds = 2<<30, 20
			}
			cfg.Progress = update
			return bench.Attention(ctx, cfg)
		},
	}
}

func deviceWorkload() workload {
	var device string
	return workload{
		use: "device", short: "Copies of pages between the host and a device, beside memcpy",
		bind: func(cmd *cobra.Command) {
			cmd.Flags().StringVar(&device, "device", server.DeviceAuto, "`device`: auto (CUDA where there is one), host, cuda:N")
		},
		run: func(ctx context.Context, full bool, update func(done, total int64)) (_ bench.Report, err error) {
			if _, _, err := server.ParseDevice(device); err != nil {
				return nil, usagef("--device: %v", err)
			}
			cfg := bench.DeviceConfig{Bytes: 256 << 20, Rounds: 5, Progress: update}
			if full {
				cfg.Bytes, cfg.Rounds = 1<<30, 20
			}
			// Two pools, and what a host device takes beside them.
			if cfg.Device, err = openDevice(server.Config{Device: device, HBMBytes: server.Size(2*cfg.Bytes) + 64<<20}, slog.New(slog.DiscardHandler)); err != nil {
				return nil, err
			}
			rep, err := bench.Device(ctx, cfg)
			if err := errors.Join(err, cfg.Device.Close()); err != nil {
				return nil, err
			}
			return rep, nil
		},
	}
}

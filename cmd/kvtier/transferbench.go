package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/server"
)

// transferWorkloads measure pages that travel.
func transferWorkloads(node func() bench.NodeConfig, dir *string) []workload {
	one := func(use, short string, measure func(context.Context, bench.TransferConfig) (*bench.TransferReport, error)) workload {
		pageBytes := server.Size(256 << 10)
		return workload{
			use: use, short: short,
			bind: func(cmd *cobra.Command) { cmd.Flags().Var(&pageBytes, "page-bytes", "bytes of a page") },
			run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
				cfg := bench.TransferConfig{PageBytes: int64(pageBytes), Bytes: 512 << 20, Rounds: 6, Node: node(), TempDir: *dir, Progress: update}
				if full {
					cfg.Bytes, cfg.Rounds = 2<<30, 20
				}
				if cfg.PageBytes < 4<<10 || cfg.PageBytes > 64<<20 {
					return nil, usagef("--page-bytes: want 4KiB to 64MiB")
				}
				rep, err := measure(ctx, cfg)
				if err != nil {
					return nil, err
				}
				return rep, nil
			},
		}
	}
	return []workload{
		migrateWorkload(node, dir),
		drainWorkload(node, dir),
		one("remote", "Pages of another node through Fetch, against a plain TCP copy that checks them", bench.Remote),
		one("stream", "Pages over the gRPC stream of a client on another machine, against the same", bench.Stream),
	}
}

// migrateWorkload measures sessions that move.
func migrateWorkload(node func() bench.NodeConfig, dir *string) workload {
	pageBytes := server.Size(256 << 10)
	return workload{
		use: "migrate", short: "Sessions that move between nodes, against a plain TCP copy, and how long their appends are held back",
		bind: func(cmd *cobra.Command) { cmd.Flags().Var(&pageBytes, "page-bytes", "bytes of a page") },
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.MigrateConfig{
				PageBytes: int64(pageBytes), Bytes: 512 << 20, Rounds: 4, Moves: 20, MoveBytes: 16 << 20, Node: node(), TempDir: *dir, Progress: update,
			}
			if full {
				cfg.Bytes, cfg.Rounds, cfg.Moves = 2<<30, 6, 200
			}
			if cfg.PageBytes < 4<<10 || cfg.PageBytes > cfg.MoveBytes {
				return nil, usagef("--page-bytes: want 4KiB to 16MiB")
			}
			rep, err := bench.Migrate(ctx, cfg)
			if err != nil {
				return nil, err
			}
			return rep, nil
		},
	}
}

// drainWorkload empties a node under load.
func drainWorkload(node func() bench.NodeConfig, dir *string) workload {
	limit := server.Size(100 << 20)
	return workload{
		use: "drain", short: "A node that is emptied under load: failed fetches, bandwidth against its limit, and whether all is elsewhere",
		bind: func(cmd *cobra.Command) { cmd.Flags().Var(&limit, "max-bandwidth", "most bytes a second") },
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.DrainConfig{PageBytes: 256 << 10, Bytes: 1 << 30, Limit: int64(limit), Node: node(), TempDir: *dir, Progress: update}
			if full {
				cfg.Bytes = 10 << 30
			}
			if cfg.Limit < 1<<20 {
				return nil, usagef("--max-bandwidth: want at least 1MiB")
			}
			rep, err := bench.Drain(ctx, cfg)
			if err != nil {
				return nil, err
			}
			return rep, nil
		},
	}
}

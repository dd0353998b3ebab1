package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
)

func directoryWorkload(program, dir *string) workload {
	return workload{
		use: "directory", short: "The replicated directory: three processes, every commit synced",
		long: `directory starts three processes on this machine, preloads claims, and measures
how many more are committed and applied by all three in a second, lookups in the
local replica, memory, the time until another node sees a claim, and the time
until claims are committed again after the leader was killed. It exits 1 if a
claim is missing, or is there although it was released.`,
		bind: func(*cobra.Command) {},
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.DirectoryConfig{Claims: 1_000_000, More: 900_000, Sights: 200, Failovers: 3, Program: *program, TempDir: *dir, Progress: update}
			if full {
				cfg.Claims, cfg.More, cfg.Sights, cfg.Failovers = 5_000_000, 3_000_000, 1000, 5
			}
			return bench.Directory(ctx, cfg)
		},
	}
}

// newDirectoryReplica is one process of bench directory, which starts it and
// gives it orders over its standard input.
func newDirectoryReplica(stdin io.Reader, stdout io.Writer) *cobra.Command {
	var cfg bench.ReplicaConfig
	cmd := &cobra.Command{
		Use: "directory-replica", Short: "One process of bench directory", Hidden: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return bench.RunReplica(cmd.Context(), cfg, stdin, stdout) },
	}
	flags := cmd.Flags()
	flags.IntVar(&cfg.Node, "node", 0, "its `number`")
	flags.StringVar(&cfg.Dir, "dir", "", "`directory` of its log")
	flags.Uint64Var(&cfg.Incarnation, "incarnation", 0, "its start")
	flags.Int64Var(&cfg.Held, "held", 0, "claims of earlier starts")
	flags.Int64Var(&cfg.MaxClaims, "max-claims", 0, "claim budget")
	return cmd
}

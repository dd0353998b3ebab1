package main

import (
	"context"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/tier/policy"
)

// workload is one bench command: flags are bound to it, run does it.
type workload struct {
	use, short, long string
	bind             func(cmd *cobra.Command)
	// run does the work. full asks for the published size.
	run func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error)
}

func newBench(out *output, stderr io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure a node, each figure beside its bound",
		Long: `Every workload starts its own node in a temporary directory and ends it. Without
--full it takes at most a minute and 6 GiB. The two sides of a ratio alternate
within one run. With -o json the answer is one object: bytes are integers, rates
bytes/s, ratios and hit rates fractions, *_us quantiles in microseconds.`,
		Args: noArgs,
		RunE: showHelp,
	}
	full := cmd.PersistentFlags().Bool("full", false, "the published size")
	dir := cmd.PersistentFlags().String("temp-dir", "", "`directory` for the working directory; default: $TMPDIR or /tmp")
	program := cmd.PersistentFlags().String("program", "", "the kvtier `binary` to run as the node; default: this one")
	if err := cmd.PersistentFlags().MarkHidden("program"); err != nil {
		panic(err)
	}
	node := func() bench.NodeConfig { return bench.NodeConfig{Program: *program} }
	for _, w := range append([]workload{
		policyWorkload(), replayWorkload(node, dir), localWorkload(node, dir), commitWorkload(node, dir),
		attentionWorkload(), deviceWorkload(),
		nvmeWorkload(dir), indexWorkload(dir), crashWorkload(node, dir), directoryWorkload(program, dir),
	}, transferWorkloads(node, dir)...) {
		sub := &cobra.Command{Use: w.use, Short: w.short, Long: w.long, Args: noArgs}
		w.bind(sub)
		sub.RunE = func(cmd *cobra.Command, _ []string) error {
			bar := newProgress(stderr, cmd.Name())
			rep, err := w.run(cmd.Context(), *full, bar.update)
			bar.close()
			if err != nil {
				return err
			}
			return out.report(rep)
		}
		cmd.AddCommand(sub)
	}
	cmd.AddCommand(newDirectoryReplica(os.Stdin, out.w))
	return cmd
}

func policyWorkload() workload {
	var cfg bench.PolicyConfig
	return workload{
		use: "policy", short: "Hit rates of an eviction policy on a trace, without a node",
		bind: func(cmd *cobra.Command) {
			flags := cmd.Flags()
			flags.StringVar(&cfg.Trace, "trace", bench.ShortTrace, traceUsage)
			flags.StringVar(&cfg.Policy, "policy", policy.Default, "one of "+strings.Join(policy.Names(), ", "))
			flags.Int64Var(&cfg.Capacity, "capacity", 1000, "`blocks` that the cache holds")
			flags.Int64Var(&cfg.BlockTokens, "block-tokens", bench.DefaultBlockTokens, "tokens of a block")
		},
		run: func(context.Context, bool, func(done, total int64)) (bench.Report, error) {
			if cfg.Capacity < 1 || cfg.BlockTokens < 1 {
				return nil, usagef("--capacity and --block-tokens: want at least 1")
			}
			if !slices.Contains(policy.Names(), cfg.Policy) {
				return nil, usagef("--policy: %q: want one of %s", cfg.Policy, strings.Join(policy.Names(), ", "))
			}
			rep, err := bench.Policy(cfg)
			if err != nil {
				return nil, &usageError{err} // a trace that cannot be read
			}
			return rep, nil
		},
	}
}

const traceUsage = "`file` with one JSON request a line (.gz: compressed), or " + bench.ShortTrace + " or " + bench.FullTrace + ", which are built in"

func replayWorkload(node func() bench.NodeConfig, dir *string) workload {
	var cfg bench.ReplayConfig
	var trace string
	blockBytes, hbm, ram, nvme := server.Size(64<<10), server.Size(0), server.Size(256<<20), server.Size(4<<30)
	var given *pflag.FlagSet
	var sim simulation
	return workload{
		use: "replay", short: "Replay a trace with real bytes through a daemon process",
		long: `replay plays each request of a trace as an engine does: look up, fetch the usable
prefix, check every byte in place, store the rest. What is counted is what the
client verified; requests = served + unavailable + failed. It exits 1 if a page
was wrong, a leased page was lost, a block was served that was never committed, a
durable block is gone after a kill, or a request failed.

With --simulate no node is started: the eviction policies of --nodes nodes of
--capacity blocks each and the choice of a copy are replayed alone.`,
		bind: func(cmd *cobra.Command) {
			flags := cmd.Flags()
			given = flags
			flags.StringVar(&trace, "trace", bench.ShortTrace, traceUsage+"; with --full the default is "+bench.FullTrace)
			flags.IntVar(&cfg.Requests, "requests", 0, "play only so many; 0: all")
			flags.Var(&blockBytes, "block-bytes", "page of one block")
			flags.IntVar(&cfg.BlockTokens, "block-tokens", bench.DefaultBlockTokens, "tokens of a block")
			flags.Var(&hbm, "hbm", "budget of the HBM tier on a host device, which all pages are fetched to; 0: none")
			flags.Var(&ram, "ram", "budget of the RAM tier")
			flags.Var(&nvme, "nvme", "budget of the NVMe tier; 0: none; with --full the default is 16GiB")
			flags.IntVar(&cfg.Clients, "clients", 1, "requests at a time")
			flags.BoolVar(&cfg.Stream, "stream", false, "clients use TCP as if they were on another machine")
			flags.Float64SliceVar(&cfg.KillAt, "kill-at", nil, "kill the node at these `fractions` of the run and start it again")
			flags.IntVar(&cfg.DurableEvery, "durable-every", 0, "each n-th request commits as durable")
			flags.Uint64Var(&cfg.Seed, "seed", 1, "seed of the contents")
			sim.bind(flags)
			flags.IntVar(&cfg.DamageFlips, "damage", 0, "flip so many bits in the segment files while the node is down")
			if err := flags.MarkHidden("damage"); err != nil {
				panic(err)
			}
		},
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			if full && !given.Changed("trace") {
				trace = bench.FullTrace
			}
			if full && !given.Changed("nvme") {
				nvme = 16 << 30 // all 182,790 different blocks
			}
			if err := checkReplay(&cfg, int64(blockBytes)); err != nil {
				return nil, err
			}
			if err := sim.check(given); err != nil {
				return nil, err
			}
			var err error
			if cfg.Trace, err = bench.OpenTrace(trace); err != nil {
				return nil, &usageError{err}
			}
			if sim.on {
				return sim.run(&cfg)
			}
			cfg.BlockBytes, cfg.Node, cfg.TempDir, cfg.Progress = int64(blockBytes), node(), *dir, update
			cfg.Node.HBM, cfg.Node.RAM, cfg.Node.NVMe = int64(hbm), int64(ram), int64(nvme)
			return bench.Replay(ctx, cfg)
		},
	}
}

func checkReplay(cfg *bench.ReplayConfig, blockBytes int64) error {
	if cfg.Clients < 1 || cfg.BlockTokens < 1 || blockBytes < 1 || cfg.Requests < 0 || cfg.DurableEvery < 0 || cfg.DamageFlips < 0 {
		return usagef("--clients, --block-tokens and --block-bytes: at least 1; --requests, --durable-every and --damage: not negative")
	}
	for _, at := range cfg.KillAt {
		if at < 0 || at >= 1 {
			return usagef("--kill-at: %v is not 0 or above, and below 1", at)
		}
	}
	if cfg.DamageFlips > 0 && len(cfg.KillAt) == 0 {
		return usagef("--damage: needs --kill-at, the node must be down")
	}
	return nil
}

func localWorkload(node func() bench.NodeConfig, dir *string) workload {
	var seed uint64
	return workload{
		use: "local", short: "Fetch of 64 resident pages against an empty call on the same socket",
		bind: func(cmd *cobra.Command) { cmd.Flags().Uint64Var(&seed, "seed", 1, "seed of the order of fetches") },
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.LocalConfig{PageBytes: 64 << 10, Chains: 160, Calls: 20_000, Seed: seed, Node: node(), TempDir: *dir, Progress: update}
			if full {
				cfg.Chains, cfg.Calls = 640, 100_000
			}
			return bench.Local(ctx, cfg)
		},
	}
}

func commitWorkload(node func() bench.NodeConfig, dir *string) workload {
	pageBytes := server.Size(256 << 10)
	return workload{
		use: "commit", short: "Commit of pages against memcpy and checksum of the same bytes",
		bind: func(cmd *cobra.Command) { cmd.Flags().Var(&pageBytes, "page-bytes", "bytes of a page") },
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.CommitConfig{PageBytes: int64(pageBytes), BatchBytes: 64 << 20, Bytes: 4 << 30, Node: node(), TempDir: *dir, Progress: update}
			if cfg.PageBytes < 1 || cfg.PageBytes > cfg.BatchBytes {
				return nil, usagef("--page-bytes: want 1 to %s", bench.FormatBytes(cfg.BatchBytes))
			}
			if full {
				cfg.Bytes = 32 << 30
			}
			return bench.Commit(ctx, cfg)
		},
	}
}

func crashWorkload(node func() bench.NodeConfig, dir *string) workload {
	var rounds int
	var seed uint64
	return workload{
		use: "crash", short: "Kill the node at random points of a write load, over and over",
		long: `crash kills the node with SIGKILL at random points of a write load, starts it
again and checks that every durable block is back, every page is right, no block
is served that was never committed, and that all space can be used in the end.
The same seed makes the same load; when the kill hits is up to the machine.`,
		bind: func(cmd *cobra.Command) {
			cmd.Flags().IntVar(&rounds, "rounds", 20, "kills; --full makes ten times as many")
			cmd.Flags().Uint64Var(&seed, "seed", 1, "seed of the load")
		},
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			if rounds < 1 {
				return nil, usagef("--rounds: want at least 1")
			}
			cfg := bench.CrashConfig{Rounds: rounds, Seed: seed, Node: node(), TempDir: *dir, Progress: update}
			if full {
				cfg.Rounds *= 10
			}
			return bench.Crash(ctx, cfg)
		},
	}
}
func nvmeWorkload(dir *string) workload {
	return workload{
		use: "nvme", short: "The NVMe tier against an O_DIRECT file of the same size and queue depth",
		bind: func(*cobra.Command) {},
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.NVMeConfig{Bytes: 1 << 30, Rounds: 3, TempDir: *dir, Progress: update}
			if full {
				cfg.Bytes, cfg.Rounds = 8<<30, 5
			}
			return bench.NVMe(ctx, cfg)
		},
	}
}

func indexWorkload(dir *string) workload {
	return workload{
		use: "index", short: "Memory per page and load time with many pages on NVMe",
		bind: func(*cobra.Command) {},
		run: func(ctx context.Context, full bool, update func(done, total int64)) (bench.Report, error) {
			cfg := bench.IndexConfig{Pages: 500_000, TempDir: *dir, Progress: update}
			if full {
				cfg.Pages = 4_000_000
			}
			return bench.Index(ctx, cfg)
		},
	}
}

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
)

func newDemo(out *output, stderr io.Writer) *cobra.Command {
	var dir string
	var nodes int
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Replay a real trace through a node that is killed and restarted",
		Long: `demo starts a node in a temporary directory and replays a real trace of an LLM
service through it: for each request it fetches the prefix that the node has,
checks every byte of every page in place, and stores the rest. RAM is so small
that most hits come back from NVMe. In the middle of a request the node is killed
with SIGKILL, started again, everything that was stored is read back, and the
replay goes on. It exits 1 if a page was wrong or a request failed.

With --nodes it starts as many nodes, replays the trace with each request on one of
them at random, first apart and then as one cluster, and kills the leader of the
directory and later another node. At last an agent's session is decoded on one node,
moves to another while it goes on, and is decoded there; then the first node is
drained under load and stopped.`,
		Args: noArgs,
	}
	cmd.Flags().StringVar(&dir, "temp-dir", "", "`directory` for the working directory; default: $TMPDIR or /tmp")
	cmd.Flags().IntVar(&nodes, "nodes", 1, fmt.Sprintf("`nodes`, up to %d", bench.MaxDemoNodes))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if nodes < 1 || nodes > bench.MaxDemoNodes {
			return usagef("--nodes: want 1 to %d", bench.MaxDemoNodes)
		}
		bar := newProgress(stderr, "requests")
		rep, err := demo(cmd.Context(), nodes, dir, bar.update)
		bar.close()
		if err != nil {
			return err
		}
		return out.report(rep)
	}
	return cmd
}

func demo(ctx context.Context, nodes int, dir string, update bench.Progress) (bench.Report, error) {
	if nodes < bench.MinDemoNodes {
		rep, err := bench.Demo(ctx, bench.NodeConfig{}, dir, update)
		if err != nil {
			return nil, err
		}
		return rep, nil
	}
	rep, err := bench.DemoCluster(ctx, bench.DemoClusterConfig{Nodes: nodes, TempDir: dir, Progress: update})
	if err != nil {
		return nil, err
	}
	return rep, nil
}

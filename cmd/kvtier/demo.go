package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
)

func newDemo(out *output, stderr io.Writer) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Replay a real trace through a node that is killed and restarted",
		Long: `demo starts a node in a temporary directory and replays a real trace of an LLM
service through it: for each request it fetches the prefix that the node has,
checks every byte of every page in place, and stores the rest. RAM is so small
that most hits come back from NVMe. In the middle of a request the node is killed
with SIGKILL, started again, everything that was stored is read back, and the
replay goes on. It exits 1 if a page was wrong or a request failed.`,
		Args: noArgs,
	}
	cmd.Flags().StringVar(&dir, "temp-dir", "", "`directory` for the working directory; default: $TMPDIR or /tmp")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		bar := newProgress(stderr, "requests")
		rep, err := bench.Demo(cmd.Context(), bench.NodeConfig{}, dir, bar.update)
		bar.close()
		if err != nil {
			return err
		}
		return out.report(rep)
	}
	return cmd
}

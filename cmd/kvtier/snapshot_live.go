package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
)

func newSnapshotSave(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "save FILE",
		Short: "Save the directory of the cluster as a node has it; needs no quorum",
		Long: `save writes the state of the node's replica of the directory to a new file: nodes,
namespaces, claims. It works without a quorum, and beside a running cluster.`,
		Example: "  kvtier snapshot save directory.snap",
		Args:    oneArg("the file to write"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				bytes, err := saveTo(args[0], func(f *os.File) (int64, error) { return a.SaveSnapshot(ctx, f) })
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string]any{"file": args[0], "bytes": bytes})
				}
				_, err = fmt.Fprintf(out.w, "saved %s to %s; look into it with: kvtier snapshot inspect %s\n", bench.FormatBytes(bytes), args[0], args[0])
				return err
			})
		},
	}
	at.bind(cmd)
	return cmd
}

// saveTo makes a file that is there whole, or not at all.
func saveTo(path string, write func(*os.File) (int64, error)) (n int64, err error) {
	if _, err := os.Lstat(path); err == nil {
		return 0, usagef("%s exists: name another file", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return 0, usagef("%w", err)
	}
	defer func() { os.Remove(f.Name()) }() // gone already if it was renamed
	n, err = write(f)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return n, err
	}
	return n, os.Rename(f.Name(), path)
}

func newSnapshotRestore(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Replace the directory of the cluster by a saved one; the leader takes it",
		Long: `restore replaces nodes, namespaces and claims of the whole cluster by those of a
snapshot that save wrote. The node that is asked has to lead the directory. Nodes make
themselves known again and repair their claims from what they hold.`,
		Example: "  kvtier snapshot restore directory.snap",
		Args:    oneArg("the file of a snapshot"),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := os.Open(args[0])
			if err != nil {
				return usagef("%w", err)
			}
			defer f.Close()
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				nodes, claims, err := a.RestoreSnapshot(ctx, f)
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string]any{"nodes": nodes, "claims": claims})
				}
				_, err = fmt.Fprintf(out.w, "restored: %d nodes, %d claims\n", nodes, claims)
				return err
			})
		},
	}
	at.bind(cmd)
	return cmd
}

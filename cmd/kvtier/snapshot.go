package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/server/directory"
)

func newSnapshot(out *output) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Save, inspect and restore the directory of the cluster",
		Args:  noArgs,
		RunE:  showHelp,
	}
	cmd.AddCommand(newSnapshotSave(out), newSnapshotInspect(out), newSnapshotRestore(out))
	return cmd
}

// snapshotOut is what inspect found.
type snapshotOut struct {
	File       string         `json:"file"`
	Whole      bool           `json:"whole"` // it ends, and its checksum is right
	Bytes      int64          `json:"bytes"`
	Version    uint32         `json:"version"`
	Time       time.Time      `json:"time"`
	LogIndex   uint64         `json:"log_index"` // 0: it does not say
	LogTerm    uint64         `json:"log_term"`
	Commands   uint64         `json:"commands"`
	Claims     int64          `json:"claims"`
	Nodes      []snapshotNode `json:"nodes"`
	Namespaces []snapshotNS   `json:"namespaces"`
}

type snapshotNode struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	Incarnation uint64 `json:"incarnation"`
	Address     string `json:"address"`
	State       string `json:"state"`
	Gap         bool   `json:"gap"` // it was to repair its claims
	Claims      int64  `json:"claims"`
}

type snapshotNS struct {
	ID     string `json:"id"`
	Tenant string `json:"tenant"`
	Model  string `json:"model"`
}

func newSnapshotInspect(out *output) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect FILE",
		Short: "Tell what a snapshot holds and whether it is whole; needs no node",
		Args:  oneArg("the file of a snapshot"),
		RunE: func(_ *cobra.Command, args []string) error {
			f, err := os.Open(args[0])
			if err != nil {
				return usagef("%w", err)
			}
			defer f.Close()
			s, damage := directory.InspectSnapshot(f)
			if err := out.snapshot(args[0], s, damage == nil); err != nil {
				return err
			}
			if damage != nil {
				return fmt.Errorf("%s: %w", args[0], damage)
			}
			return nil
		},
	}
}

func (o *output) snapshot(file string, s *directory.Summary, whole bool) error {
	found := snapshotOut{
		File: file, Whole: whole, Bytes: s.Bytes, Version: s.Version, Time: s.Time.UTC(), LogIndex: s.LogIndex, LogTerm: s.LogTerm,
		Commands: s.Applied, Claims: s.Claims, Nodes: []snapshotNode{}, Namespaces: []snapshotNS{},
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		state := strings.ToLower(strings.TrimPrefix(n.State.String(), "NODE_STATE_"))
		found.Nodes = append(found.Nodes, snapshotNode{n.ID.String(), n.Name, uint64(n.Incarnation), n.PeerAddress, state, n.Gap, n.Claims})
	}
	for _, ns := range s.Namespaces {
		found.Namespaces = append(found.Namespaces, snapshotNS{ns.ID.String(), ns.Tenant, ns.Model})
	}
	if o.json() {
		return o.value(&found)
	}
	state := "whole"
	if !whole {
		state = "DAMAGED"
	}
	err := o.table(nil, [][]string{
		{"snapshot", file, state},
		{"size", bench.FormatBytes(found.Bytes), fmt.Sprintf("format version %d", found.Version)},
		{"taken", found.Time.Format(time.RFC3339), fmt.Sprintf("log index %d, term %d", found.LogIndex, found.LogTerm)},
		{"claims", fmt.Sprint(found.Claims), fmt.Sprintf("%d commands", found.Commands)},
		{"namespaces", fmt.Sprint(len(found.Namespaces))},
	})
	if err != nil || len(found.Nodes) == 0 {
		return err
	}
	fmt.Fprintln(o.w)
	var rows [][]string
	for _, n := range found.Nodes {
		rows = append(rows, []string{n.Name, n.ID[:8], n.State, fmt.Sprint(n.Incarnation), fmt.Sprint(n.Claims), n.Address})
	}
	return o.table([]string{"node", "id", "state", "incarnation", "claims", "address"}, rows)
}

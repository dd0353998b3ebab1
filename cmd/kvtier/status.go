package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
)

// status is the answer of "status": the node, and who is attached to it.
type status struct {
	*client.Status
	AttachmentList []client.AttachmentInfo `json:"attachment_list"`
}

func newStatus(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how a node is: state, problems, tiers, attachments",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				s, err := a.Status(ctx)
				if err != nil {
					return err
				}
				attached, err := a.Attachments(ctx)
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(status{s, attached})
				}
				return printStatus(out, s, attached)
			})
		},
	}
	at.bind(cmd)
	return cmd
}

func printStatus(out *output, s *client.Status, attached []client.AttachmentInfo) error {
	rows := [][]string{
		{"state", s.State},
		{"node", fmt.Sprintf("%s, start %d", s.Node, s.Incarnation)},
		{"version", s.Version},
		{"up", time.Since(s.Started).Round(time.Second).String()},
		{"leases", fmt.Sprintf("%d, %d overdue", s.Leases, s.OverdueLeases)},
		{"writes", fmt.Sprintf("%d in progress", s.Attempts)},
		{"attachments", fmt.Sprintf("%d, and %d tethers without a stream", s.Attachments, s.OrphanTethers)},
	}
	rows = append(rows, clusterRows(s.Cluster)...)
	for _, p := range s.Problems {
		rows = append(rows, []string{"problem", p})
	}
	if err := out.table(nil, rows); err != nil {
		return err
	}
	fmt.Fprintln(out.w)
	if err := printTiers(out, s.Tiers); err != nil || len(attached) == 0 {
		return err
	}
	fmt.Fprintln(out.w)
	rows = rows[:0]
	for _, a := range attached {
		pid := ""
		if a.PID != 0 {
			pid = fmt.Sprint(a.PID)
		}
		rows = append(rows, []string{a.ID, a.Engine, a.Tenant, pid, a.State, fmt.Sprint(a.Leases),
			bench.FormatBytes(int64(a.LeasedBytes)), bench.FormatBytes(int64(a.StagingBytes)), seconds(a.AgeS)}) //nolint:gosec // bytes of this machine
	}
	return out.table([]string{"attachment", "engine", "tenant", "pid", "state", "leases", "leased", "staging", "age"}, rows)
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}

func newTiers(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "tiers",
		Short: "Show what each tier of a node holds and does",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				tiers, err := a.Tiers(ctx)
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string][]client.TierStatus{"tiers": tiers})
				}
				return printTiers(out, tiers)
			})
		},
	}
	at.bind(cmd)
	return cmd
}

func printTiers(out *output, tiers []client.TierStatus) error {
	size := func(n uint64) string { return bench.FormatBytes(int64(n)) } //nolint:gosec // bytes of this machine
	var rows [][]string
	for _, t := range tiers {
		state := t.State
		if t.Loaded < 1 {
			state = fmt.Sprintf("%s %.0f %%", state, 100*t.Loaded)
		}
		rows = append(rows, []string{t.Tier, state, size(t.BudgetBytes), size(t.CapacityBytes), size(t.PageBytes), size(t.LeasedBytes),
			size(t.InFlightBytes), fmt.Sprint(t.Blocks), fmt.Sprint(t.HitBlocks), fmt.Sprint(t.EvictedBlocks), fmt.Sprint(t.Queue),
			fmt.Sprint(t.CorruptPages), fmt.Sprint(t.IOErrors), t.Policy})
	}
	err := out.table(strings.Fields("tier state budget exists pages leased in-flight blocks hits evicted queue corrupt io-errors policy"), rows)
	for _, t := range tiers {
		if t.Problem != "" && err == nil {
			_, err = fmt.Fprintf(out.w, "%s: %s\n", t.Tier, t.Problem)
		}
	}
	return err
}

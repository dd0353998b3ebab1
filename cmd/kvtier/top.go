package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
)

// topOut is one look of top as JSON.
type topOut struct {
	Nodes    []client.NodeStatus  `json:"nodes"`
	Traffic  topTraffic           `json:"traffic"` // of the node that is asked
	Moves    []client.SessionInfo `json:"moves"`   // sessions that move
	Problems []string             `json:"problems"`
}

type topTraffic struct {
	FetchesPerS   float64 `json:"fetches_per_s"`
	HitBlocksPerS float64 `json:"hit_blocks_per_s"`
	HitRate       float64 `json:"hit_rate"` // of blocks asked for since the last look
	RemoteBytesPS float64 `json:"remote_bytes_per_s"`
	Leases        uint64  `json:"leases"`
	Attachments   uint32  `json:"attachments"`
}

func newTop(out *output) *cobra.Command {
	var at target
	var every time.Duration
	var once bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Live view: nodes and tiers, traffic, leases, moves",
		Long: `top shows the nodes of the cluster with what their tiers hold, the traffic and the
leases of the node that is asked, and the sessions that move, and looks again every
second. Without a terminal, or with --once, it looks twice and prints once.`,
		Example: "  kvtier top\n  kvtier top --every 5s\n  kvtier top --once -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return usagef("--every %v: at least 100ms", every)
			}
			terminal := false
			if f, ok := out.w.(*os.File); ok && !out.json() {
				terminal = isTerminal(f)
			}
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				return top(ctx, out, a, every, !terminal || once)
			})
		},
	}
	at.bind(cmd)
	cmd.Flags().DurationVar(&every, "every", time.Second, "time between two looks")
	cmd.Flags().BoolVar(&once, "once", false, "print one look and end")
	return cmd
}

func top(ctx context.Context, out *output, a *client.Admin, every time.Duration, once bool) error {
	before, err := a.Status(ctx)
	if err != nil {
		return err
	}
	last := time.Now()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		status, err := a.Status(ctx)
		if err != nil {
			return err
		}
		look := topOut{Traffic: trafficOf(before, status, time.Since(last)), Problems: status.Problems, Moves: []client.SessionInfo{}}
		before, last = status, time.Now()
		if look.Nodes, err = a.Nodes(ctx); err != nil {
			return err
		}
		if status.Cluster != nil {
			for _, state := range []string{"migrating", "frozen"} {
				moves, _, err := a.Sessions(ctx, client.SessionFilter{State: state, Limit: 20})
				if err != nil {
					return err
				}
				look.Moves = append(look.Moves, moves...)
			}
		}
		if out.json() {
			return out.value(look)
		}
		if !once {
			fmt.Fprint(out.w, "\x1b[H\x1b[2J") // home, clear
		}
		if err := printTop(out, &look); err != nil || once {
			return err
		}
	}
}

func trafficOf(before, now *client.Status, took time.Duration) topTraffic {
	rate := func(name string) float64 { return (now.Counters[name] - before.Counters[name]) / took.Seconds() }
	t := topTraffic{
		FetchesPerS:   rate("kvtier_tier_fetches_total"),
		HitBlocksPerS: rate("kvtier_tier_requested_blocks_total") - rate("kvtier_tier_missed_blocks_total"),
		RemoteBytesPS: rate("kvtier_tier_remote_bytes_total"), Leases: now.Leases, Attachments: now.Attachments,
	}
	if asked := rate("kvtier_tier_requested_blocks_total"); asked > 0 {
		t.HitRate = t.HitBlocksPerS / asked
	}
	return t
}

func printTop(out *output, look *topOut) error {
	fmt.Fprintf(out.w, "%s  %d nodes  %d engines, %d leases here  %.0f fetches/s, %.0f blocks/s hit (%.0f %%), %s/s from other nodes\n\n",
		time.Now().Format(time.TimeOnly), len(look.Nodes), look.Traffic.Attachments, look.Traffic.Leases, look.Traffic.FetchesPerS, look.Traffic.HitBlocksPerS,
		100*look.Traffic.HitRate, bench.FormatBytes(int64(look.Traffic.RemoteBytesPS)))
	var rows [][]string
	for i := range look.Nodes {
		n := &look.Nodes[i]
		mark := ""
		if n.Leader {
			mark = "leader"
		}
		rows = append(rows, []string{n.Name, n.State, answers(n), tierBar(n, "hbm"), tierBar(n, "ram"), tierBar(n, "nvme"), fmt.Sprint(n.Claims), distance(n), mark})
	}
	if err := out.table(strings.Fields("node state answers hbm ram nvme claims round-trip note"), rows); err != nil {
		return err
	}
	return printTopRest(out.w, look)
}

func printTopRest(w io.Writer, look *topOut) error {
	if len(look.Moves) > 0 {
		fmt.Fprintln(w)
	}
	for i := range look.Moves {
		s := &look.Moves[i]
		fmt.Fprintf(w, "session %s of %s: %s from %s to %s, %d blocks\n", s.Session, s.Tenant, s.State, s.OwnerName, s.TargetName, s.Blocks)
	}
	for _, p := range look.Problems {
		fmt.Fprintf(w, "\n%s", p)
	}
	_, err := fmt.Fprintln(w)
	return err
}

// tierBar is how full a tier of a node is.
func tierBar(n *client.NodeStatus, tier string) string {
	for _, t := range n.Tiers {
		if t.Tier != tier || t.BudgetBytes == 0 {
			continue
		}
		const width = 10
		full := min(width, int(width*t.PageBytes/t.BudgetBytes))                                                         //nolint:gosec // at most width
		return strings.Repeat("#", full) + strings.Repeat(".", width-full) + " " + bench.FormatBytes(int64(t.PageBytes)) //nolint:gosec // bytes of a machine
	}
	return "-"
}

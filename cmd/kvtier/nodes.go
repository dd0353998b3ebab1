package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
)

func newNodes(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "List the nodes of the cluster, with what each holds",
		Long: `nodes lists the nodes of the cluster as the node that is asked sees them: what the
directory says of each (up, down, draining, left), whether it answers, how many
blocks it claims, and its tiers.`,
		Example: "  kvtier nodes\n  kvtier nodes --address 10.0.0.7:7440 -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				nodes, err := a.Nodes(ctx)
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string][]client.NodeStatus{"nodes": nodes})
				}
				return printNodes(out, nodes)
			})
		},
	}
	at.bind(cmd)
	return cmd
}

func printNodes(out *output, nodes []client.NodeStatus) error {
	var rows [][]string
	for i := range nodes {
		n := &nodes[i]
		mark := ""
		if n.Leader {
			mark = "leader"
		}
		if n.Self {
			mark = strings.TrimSpace(mark + " asked")
		}
		rows = append(rows, []string{n.Name, n.Node[:min(8, len(n.Node))], n.State, seconds(n.SinceS), answers(n), tierUse(n, "hbm"), tierUse(n, "ram"), tierUse(n, "nvme"),
			fmt.Sprint(n.Claims), distance(n), n.PeerAddress, mark})
	}
	return out.table(strings.Fields("name node state for answers hbm ram nvme claims round-trip peers note"), rows)
}

// answers is whether a node can be used now.
func answers(n *client.NodeStatus) string {
	switch {
	case !n.Seen:
		return "no"
	case !n.Reachable:
		return "left out of reads"
	}
	return "yes"
}

func distance(n *client.NodeStatus) string {
	if n.DistanceUS == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f us", n.DistanceUS)
}

// tierUse is what a node uses of a tier.
func tierUse(n *client.NodeStatus, tier string) string {
	for _, t := range n.Tiers {
		if t.Tier == tier {
			return bench.FormatBytes(int64(t.PageBytes)) + " of " + bench.FormatBytes(int64(t.BudgetBytes)) //nolint:gosec // bytes of a machine
		}
	}
	return "-"
}

// clusterRows are the lines of "status" about the cluster.
func clusterRows(c *client.ClusterStatus) [][]string {
	if c == nil {
		return [][]string{{"cluster", "none: the node is alone"}}
	}
	leader := "no leader is known"
	if c.Leader != "" {
		leader = "leader " + c.Leader[:min(8, len(c.Leader))]
	}
	role := c.Role
	if c.Voter {
		role += ", votes"
	}
	return [][]string{
		{"cluster", c.Cluster},
		{"name", fmt.Sprintf("%s, peers at %s", c.Name, c.PeerAddress)},
		{"directory", fmt.Sprintf("%s; this node: %s; %d voters, %d replicas; %d entries applied, %d behind", leader, role, c.Voters, c.Replicas, c.Applied, c.Behind)},
		{"nodes", fmt.Sprintf("%d, of which %d answer and %d are left out of reads", c.Nodes, c.NodesSeen, c.PeersOut)},
		{"claims", fmt.Sprintf("%d of %d; of this node %d changes wait and %d blocks have no room", c.Claims, c.MaxClaims, c.PendingClaims, c.UnclaimedBlocks)},
	}
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/server"
)

// drainOut is what drain prints as JSON.
type drainOut struct {
	Proposal *client.Proposal   `json:"proposal"`
	Plan     *client.PlanStatus `json:"plan"` // null after a dry run
}

// planFlags are the bounds of carrying a plan out.
type planFlags struct {
	most, total   server.Size
	deadline, hot time.Duration
}

func (f *planFlags) bind(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.Var(&f.most, "max-bandwidth", "most bytes a second that a node sends or receives, such as 2GiB; 0: no limit")
	flags.Var(&f.total, "max-total-bandwidth", "most bytes a second of all nodes together; 0: no limit")
	flags.DurationVar(&f.deadline, "deadline", 0, "time after which it stops, and tells what is left; 0: none")
	flags.DurationVar(&f.hot, "hot-within", time.Minute, "time after its last use that something is hot")
}

func (f *planFlags) options() (client.PlanOptions, error) {
	if f.deadline < 0 || f.hot < time.Millisecond || f.most < 0 || f.total < 0 {
		return client.PlanOptions{}, usagef("--deadline, --max-bandwidth and --max-total-bandwidth are not negative, --hot-within is at least 1ms")
	}
	return client.PlanOptions{NodeBytesPerSecond: int64(f.most), TotalBytesPerSecond: int64(f.total), Deadline: f.deadline, HotWithin: f.hot}, nil
}

func newDrain(out *output, stderr io.Writer) *cobra.Command {
	var at target
	var bounds planFlags
	var dry, drop bool
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Empty a node: its sessions move, what nobody else holds is copied, it leaves",
		Long: `drain takes a node out while it runs: nothing new is placed there, its sessions move to
other nodes, blocks that no other node holds are copied, the hottest first, and then the
node leaves the cluster. It serves what it has until its process is stopped, so no fetch
fails. It stays out, also when it starts again, until kvtier undrain.

The drain goes on if this command is ended: run it again to see how far it is. At its
deadline it stops and tells what is left (exit code 1); the node stays draining.`,
		Example: `  kvtier drain gpu-7 --dry-run
  kvtier drain gpu-7
  kvtier drain gpu-7 --max-bandwidth 2GiB --deadline 10m
  kvtier drain gpu-7 --drop-cold -o json`,
		Args: oneArg("a node"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := bounds.options()
			if err != nil {
				return err
			}
			o.DropCold = drop
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error { return drain(ctx, out, stderr, a, args[0], o, dry) })
		},
	}
	at.bind(cmd)
	bounds.bind(cmd)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "tell what would be done, and change nothing")
	cmd.Flags().BoolVar(&drop, "drop-cold", false, "give up blocks that nobody else holds and that were not used within --hot-within")
	return cmd
}

// errLeft is a plan that ended and left something.
var errLeft = errors.New("it is not done")

func drain(ctx context.Context, out *output, stderr io.Writer, a *client.Admin, node string, o client.PlanOptions, dry bool) error {
	found := drainOut{}
	live := newLive(stderr)
	last, err := a.Drain(ctx, node, o, dry, func(p *client.Proposal, st *client.PlanStatus) {
		if p != nil {
			found.Proposal = p
			if !out.json() {
				printProposal(out, p)
			}
			return
		}
		live.show(planLine(st))
	})
	live.close()
	if err != nil {
		if ctx.Err() != nil && last != nil {
			return fmt.Errorf("%w\nthe drain goes on: kvtier drain %s tells how it is, kvtier undrain %s ends it", err, node, node)
		}
		return err
	}
	found.Plan = last
	if out.json() {
		if err := out.value(found); err != nil {
			return err
		}
	}
	if dry {
		return nil
	}
	return endOfPlan(out, last)
}

// endOfPlan prints how a plan ended; an error if something is left.
func endOfPlan(out *output, p *client.PlanStatus) error {
	if p == nil {
		return fmt.Errorf("%w: how it ended is not known", errLeft)
	}
	name := p.Kind
	if p.Node != "" {
		name += " of " + p.Node
	}
	if p.State != "done" {
		return fmt.Errorf("%s: %w, it ended %s: %s", name, errLeft, p.State, p.Why)
	}
	if !out.json() {
		fmt.Fprintf(out.w, "%s: done in %s: %d sessions moved, %s copied\n", name, seconds(p.TookS), p.Moved, bench.FormatBytes(int64(p.CopiedBytes))) //nolint:gosec // bytes of a machine
		if p.Why != "" {
			fmt.Fprintln(out.w, p.Why)
		}
	}
	return nil
}

// maxShownSteps is how many steps are printed for people; -o json has all.
const maxShownSteps = 50

func printProposal(out *output, p *client.Proposal) {
	moves, copies := 0, 0
	for _, s := range p.Steps {
		if s.Kind == "move" {
			moves++
		} else {
			copies++
		}
	}
	fmt.Fprintf(out.w, "plan: %d sessions move, %d copies and drops of blocks of no session, %s", moves, copies, bench.FormatBytes(int64(p.Bytes))) //nolint:gosec // bytes of a machine
	if p.ExpectedS > 0 {
		fmt.Fprintf(out.w, ", about %s", seconds(p.ExpectedS))
	}
	fmt.Fprintln(out.w)
	var rows [][]string
	for _, s := range p.Steps[:min(len(p.Steps), maxShownSteps)] {
		what := s.Session
		if what == "" {
			what = "-"
		}
		rows = append(rows, []string{s.Kind, what, shortNode(s.From), shortNode(s.To), bench.FormatBytes(int64(s.Bytes)), s.Why}) //nolint:gosec // likewise
	}
	if len(rows) > 0 {
		_ = out.table([]string{"step", "session", "from", "to", "bytes", "why"}, rows) // what is printed next fails the same way
	}
	if n := len(p.Steps) - maxShownSteps; n > 0 {
		fmt.Fprintf(out.w, "and %d more steps\n", n)
	}
	for _, u := range p.Unplaced[:min(len(p.Unplaced), maxShownSteps)] {
		what := "blocks of no session"
		if u.Session != "" {
			what = "session " + u.Session
		}
		fmt.Fprintf(out.w, "stays: %s (%s): %s\n", what, bench.FormatBytes(int64(u.Bytes)), u.Why) //nolint:gosec // likewise
	}
	if p.More {
		fmt.Fprintln(out.w, "a bound ended the plan: another one goes on after it")
	}
}

func shortNode(id string) string {
	if id == "" {
		return "-"
	}
	return id[:min(8, len(id))]
}

// planLine is how far a plan is, in a line.
func planLine(p *client.PlanStatus) string {
	line := fmt.Sprintf("%s: %d sessions moved, %s copied", p.State, p.Moved, bench.FormatBytes(int64(p.CopiedBytes))) //nolint:gosec // bytes of a machine
	if p.Rate > 0 {
		line += fmt.Sprintf(", %s/s", bench.FormatBytes(int64(p.Rate))) //nolint:gosec // likewise
	}
	if p.LeftS > 0 {
		line += ", about " + seconds(p.LeftS) + " left"
	}
	switch {
	case p.Doing != "":
		line += "; " + p.Doing
	case p.Why != "":
		line += "; " + p.Why
	}
	return line
}

func newUndrain(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "undrain NODE",
		Short: "Have a node take part again that is being drained, or was",
		Long: `undrain ends the drain of a node, if one runs, and has the node take part again: it
claims what it holds, and is given sessions and blocks. What was moved stays where it is.`,
		Example: "  kvtier undrain gpu-7",
		Args:    oneArg("a node"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				name, err := a.Undrain(ctx, args[0])
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string]string{"undrained": name})
				}
				_, err = fmt.Fprintf(out.w, "node %s takes part again\n", name)
				return err
			})
		},
	}
	at.bind(cmd)
	return cmd
}

func newAudit(out *output) *cobra.Command {
	var at target
	var since time.Duration
	var limit int
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "List what was done in the cluster, and by whom",
		Long: `audit lists the last records of the audit trail, the latest last: what operators did,
and what the nodes did among themselves: sessions that moved or were taken over, nodes
that went down, left or came back. The cluster keeps 10,000 records.`,
		Example: "  kvtier audit\n  kvtier audit --since 1h --limit 1000 -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if since < 0 || limit < 1 {
				return usagef("--since is not negative and --limit at least 1")
			}
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				var from time.Time
				if since > 0 {
					from = time.Now().Add(-since)
				}
				records, err := a.Audit(ctx, from, limit)
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string][]client.AuditRecord{"records": records})
				}
				var rows [][]string
				for _, r := range records {
					rows = append(rows, []string{r.Time.Format(time.RFC3339), r.Who, r.What, r.Subject, r.Outcome})
				}
				return out.table([]string{"time", "who", "what", "of", "outcome"}, rows)
			})
		},
	}
	at.bind(cmd)
	cmd.Flags().DurationVar(&since, "since", 0, "only what was done within this time; 0: all that is kept")
	cmd.Flags().IntVar(&limit, "limit", 100, "most records, the latest of them; at most 10000")
	return cmd
}

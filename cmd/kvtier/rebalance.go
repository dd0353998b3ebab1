package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/placement"
)

func newRebalance(out *output, stderr io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rebalance",
		Short: "Move sessions from nodes that have more than their share to others",
		Long: `rebalance evens out what the nodes of a cluster have to bear: plan prints which sessions
should move and changes nothing, apply carries a plan out, status shows how far it is,
cancel ends it.`,
		Example: `  kvtier rebalance plan -f plan.yaml
  kvtier rebalance apply plan.yaml --max-bandwidth 1GiB
  kvtier rebalance status
  kvtier rebalance cancel`,
		Args: noArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(newRebalancePlan(out), newRebalanceApply(out, stderr), newRebalanceStatus(out), newRebalanceCancel(out))
	return cmd
}

func newRebalancePlan(out *output) *cobra.Command {
	var at target
	var r client.RebalanceRequest
	var bounds planFlags
	var most server.Size
	var file string
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Plan which sessions should move, and change nothing",
		Long: `plan prints which sessions should move where, and why. With -f it also writes the plan
to a file that can be edited (steps may be removed, or put in another order) and given to
apply. The weights say what is to be even: bytes held by sessions, sessions that were used
lately, traffic of hits.`,
		Example: `  kvtier rebalance plan
  kvtier rebalance plan --hot-sessions 1 --bytes 0.5 -f plan.yaml`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if r.Options, err = bounds.options(); err != nil {
				return err
			}
			if r.MaxBytes = int64(most); r.MaxMoves < 0 || r.MaxBytes < 0 || r.Bytes < 0 || r.HotSessions < 0 || r.HitTraffic < 0 || r.Slack < 0 {
				return usagef("weights and bounds are not negative")
			}
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				p, err := a.PlanRebalance(ctx, r)
				if err != nil {
					return err
				}
				if file != "" {
					if err := writePlan(file, p); err != nil {
						return err
					}
				}
				if out.json() {
					return out.value(p)
				}
				printProposal(out, p)
				if file != "" {
					fmt.Fprintf(out.w, "written to %s; carry it out with: kvtier rebalance apply %s\n", file, file)
				}
				return nil
			})
		},
	}
	at.bind(cmd)
	bounds.bind(cmd)
	flags := cmd.Flags()
	flags.StringVarP(&file, "file", "f", "", "also write the plan to this `file`, which must not exist")
	flags.Float64Var(&r.Bytes, "bytes", 1, "`weight` of the bytes that sessions hold")
	flags.Float64Var(&r.HotSessions, "hot-sessions", 0, "`weight` of the number of sessions used within --hot-within")
	flags.Float64Var(&r.HitTraffic, "hit-traffic", 0, "`weight` of the traffic of hits")
	flags.Float64Var(&r.Slack, "slack", 0.1, "how far above its share a node may be before anything moves")
	flags.IntVar(&r.MaxMoves, "max-moves", 0, "most sessions that move; 0: 2048, the most")
	flags.Var(&most, "max-bytes", "most bytes that are copied, such as 100GiB; 0: no limit")
	return cmd
}

// placed is a proposal as the file format has it.
func placed(p *client.Proposal) (*placement.Plan, error) {
	out := &placement.Plan{More: p.More, Bytes: int64(p.Bytes), Expected: time.Duration(p.ExpectedS * float64(time.Second))} //nolint:gosec // bytes of a machine
	var errs []error
	node := func(text string) placement.NodeID {
		id, err := placement.ParseNodeID(text)
		errs = append(errs, err)
		return id
	}
	for _, s := range p.Steps {
		if s.Kind == "move" {
			out.Moves = append(out.Moves, placement.Move{
				Session: placement.SessionID(s.Session), From: node(s.From), To: node(s.To), Epoch: placement.Epoch(s.Epoch), Bytes: int64(s.Bytes), //nolint:gosec // likewise
				Lands: placement.TierBytes{int64(s.HBMBytes), int64(s.RAMBytes), int64(s.NVMeBytes)}, Why: s.Why, //nolint:gosec // likewise
			})
		}
	}
	for _, u := range p.Unplaced {
		out.Unplaced = append(out.Unplaced, placement.Unplaced{Session: placement.SessionID(u.Session), Node: node(u.Node), Bytes: int64(u.Bytes), Why: u.Why}) //nolint:gosec // likewise
	}
	return out, errors.Join(errs...)
}

func writePlan(file string, p *client.Proposal) error {
	plan, err := placed(p)
	if err != nil {
		return err
	}
	b, err := encodePlan(plan)
	if err != nil {
		return err
	}
	_, err = saveTo(file, func(f *os.File) (int64, error) {
		n, err := f.Write(b)
		return int64(n), err
	})
	return err
}

// readPlan reads the moves of a plan file.
func readPlan(file string) ([]client.PlanStep, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, usagef("%w", err)
	}
	p, err := decodePlan(b)
	if err != nil {
		return nil, &usageError{fmt.Errorf("%s: %w", file, err)}
	}
	if len(p.Copies)+len(p.Drops) > 0 {
		return nil, usagef("%s: a rebalance moves sessions only, and this plan copies or drops blocks: that is done by kvtier drain", file)
	}
	var steps []client.PlanStep
	for _, m := range p.Moves {
		steps = append(steps, client.PlanStep{Kind: "move", Session: string(m.Session), Epoch: uint64(m.Epoch), From: m.From.String(), To: m.To.String(), Bytes: uint64(m.Bytes), Why: m.Why}) //nolint:gosec // checked
	}
	return steps, nil
}

func newRebalanceApply(out *output, stderr io.Writer) *cobra.Command {
	var at target
	var bounds planFlags
	cmd := &cobra.Command{
		Use:   "apply FILE",
		Short: "Carry a plan out, and tell how far it is",
		Long: `apply carries out a plan that plan wrote, perhaps edited. A session that moved since
the plan was made is left alone. The plan goes on if this command is ended: status tells
how far it is, cancel ends it.`,
		Example: "  kvtier rebalance apply plan.yaml\n  kvtier rebalance apply plan.yaml --max-bandwidth 1GiB --deadline 1h",
		Args:    oneArg("the file of a plan"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := bounds.options()
			if err != nil {
				return err
			}
			steps, err := readPlan(args[0])
			if err != nil {
				return err
			}
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				id, err := a.ApplyPlan(ctx, steps, o)
				if err != nil {
					return err
				}
				return followPlan(ctx, out, stderr, a, id)
			})
		},
	}
	at.bind(cmd)
	bounds.bind(cmd)
	return cmd
}

// followEvery is how often a plan is looked at.
const followEvery = 500 * time.Millisecond

// followPlan shows how far a plan is until it has ended.
func followPlan(ctx context.Context, out *output, stderr io.Writer, a *client.Admin, id string) error {
	live := newLive(stderr)
	defer live.close()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		p, err := a.Plan(ctx, id)
		if err != nil {
			return fmt.Errorf("%w\nthe plan goes on: kvtier rebalance status tells how it is", err)
		}
		if p.Ended() {
			live.close()
			if out.json() {
				if err := out.value(p); err != nil {
					return err
				}
			}
			return endOfPlan(out, p)
		}
		live.show(planLine(p))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w\nthe plan goes on: kvtier rebalance status tells how it is, kvtier rebalance cancel ends it", ctx.Err())
		}
	}
}

func newRebalanceStatus(out *output) *cobra.Command {
	return aboutPlan(out, "status", "Show the rebalance that runs, or the last one", func(ctx context.Context, a *client.Admin) (*client.PlanStatus, error) { return a.Plan(ctx, "") })
}

func newRebalanceCancel(out *output) *cobra.Command {
	return aboutPlan(out, "cancel", "End the rebalance that runs; what moves at this moment stays where it is", func(ctx context.Context, a *client.Admin) (*client.PlanStatus, error) {
		return a.CancelPlan(ctx, "")
	})
}

func aboutPlan(out *output, verb, short string, do func(context.Context, *client.Admin) (*client.PlanStatus, error)) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:     verb,
		Short:   short,
		Example: "  kvtier rebalance " + verb + "\n  kvtier rebalance " + verb + " -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				p, err := do(ctx, a)
				if errors.Is(err, paging.ErrNotFound) {
					return fmt.Errorf("no rebalance is remembered: %w", err)
				} else if err != nil {
					return err
				}
				if out.json() {
					return out.value(p)
				}
				return printPlan(out, p)
			})
		},
	}
	at.bind(cmd)
	return cmd
}

func printPlan(out *output, p *client.PlanStatus) error {
	fmt.Fprintf(out.w, "%s, started by %s %s ago\n%s\n", p.Kind, p.Who, seconds(time.Since(p.Started).Seconds()), planLine(p))
	var rows [][]string
	for _, s := range p.Steps[:min(len(p.Steps), maxShownSteps)] {
		rows = append(rows, []string{s.Session, shortNode(s.From), shortNode(s.To), bench.FormatBytes(int64(s.Bytes)), s.State, s.Reason}) //nolint:gosec // bytes of a machine
	}
	if err := out.table([]string{"session", "from", "to", "bytes", "state", "reason"}, rows); err != nil {
		return err
	}
	if n := len(p.Steps) - maxShownSteps; n > 0 {
		fmt.Fprintf(out.w, "and %d more steps\n", n)
	}
	return nil
}

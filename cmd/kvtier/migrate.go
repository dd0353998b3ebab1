package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/server"
)

// migrateOut is what migrate prints as JSON.
type migrateOut struct {
	Plan  *client.MovePlan     `json:"plan"`
	Move  *client.MoveProgress `json:"move"` // null after a dry run
	Moved bool                 `json:"moved"`
}

func newMigrate(out *output, stderr io.Writer) *cobra.Command {
	var at target
	var r client.MigrateRequest
	var most server.Size
	var wanted string
	var end bool
	cmd := &cobra.Command{
		Use:   "migrate SESSION --to NODE",
		Short: "Move a session, with its pages, to another node",
		Long: `migrate moves a session to another node while its engine goes on: what the node
lacks is copied in rounds, then appends are held back for some milliseconds, the rest
is copied, and the node owns the session. Whatever fails in between, one node owns it:
the former one, or the new one.

The move goes on if this command is ended; --cancel ends the move.`,
		Example: `  kvtier migrate chat-42 --to gpu-8
  kvtier migrate chat-42 --to gpu-8 --dry-run
  kvtier migrate chat-42 --to gpu-8 --max-bandwidth 500MiB --deadline 2m
  kvtier migrate chat-42 --cancel`,
		Args: oneArg("a session"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			r.Session, r.MaxBytesPerSecond = args[0], int64(most)
			if r.Tier, err = moveTier(wanted); err != nil {
				return err
			}
			if (r.To == "") != end {
				return usagef("migrate: name the node by --to NODE, or end a move by --cancel")
			}
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				if end {
					return cancelMove(ctx, out, a, r.Tenant, r.Session)
				}
				return migrate(ctx, out, stderr, a, r)
			})
		},
	}
	at.bind(cmd)
	flags := cmd.Flags()
	flags.StringVar(&r.To, "to", "", "`node` that is to own it: name, or digits of its id")
	flags.StringVar(&r.Tenant, "tenant", "", "`tenant` whose session it is; default: the caller's")
	flags.BoolVar(&r.DryRun, "dry-run", false, "tell what it would take, and change nothing")
	flags.Var(&most, "max-bandwidth", "most bytes a second, such as 500MiB; 0: no limit but that of the node")
	flags.DurationVar(&r.Deadline, "deadline", 10*time.Minute, "time for all of it, after which the session stays where it is")
	flags.StringVar(&wanted, "tier", "ram", "`tier` of the node that pages go to: ram or hbm")
	flags.BoolVar(&end, "cancel", false, "end the move of the session that is under way")
	return cmd
}

func moveTier(s string) (client.Tier, error) {
	switch strings.ToLower(s) {
	case "ram":
		return client.TierRAM, nil
	case "hbm":
		return client.TierHBM, nil
	}
	return client.TierNone, usagef("--tier %q: pages go to ram or hbm", s)
}

func cancelMove(ctx context.Context, out *output, a *client.Admin, tenant, session string) error {
	if err := a.CancelMigration(ctx, tenant, session); err != nil {
		return err
	}
	if out.json() {
		return out.value(map[string]string{"cancelled": session})
	}
	fmt.Fprintf(out.w, "the move of session %s ends; kvtier sessions show %s tells who owns it\n", session, session)
	return nil
}

// errStays is a move after which the session is where it was.
var errStays = errors.New("the session did not move")

func migrate(ctx context.Context, out *output, stderr io.Writer, a *client.Admin, r client.MigrateRequest) error {
	var plan *client.MovePlan
	live := newLive(stderr)
	last, err := a.MigrateSession(ctx, r, func(p *client.MovePlan, m *client.MoveProgress) {
		if p != nil {
			plan = p
			if !out.json() {
				printMovePlan(out, p, r.DryRun)
			}
			return
		}
		live.show(moveLine(m))
	})
	live.close()
	if err != nil {
		if ctx.Err() != nil && plan != nil && !r.DryRun {
			return fmt.Errorf("%w\nthe move goes on: kvtier sessions show %s tells how it is, kvtier migrate %s --cancel ends it", err, r.Session, r.Session)
		}
		return err
	}
	if out.json() {
		if err := out.value(migrateOut{Plan: plan, Move: last, Moved: last != nil && last.Moved()}); err != nil {
			return err
		}
	}
	switch {
	case r.DryRun:
		return nil
	case last == nil || !last.Moved():
		why := "it is not known why"
		if last != nil {
			why = last.Why
		}
		return fmt.Errorf("session %s: %w: %s", r.Session, errStays, why)
	case !out.json():
		fmt.Fprintf(out.w, "moved: %s sent in %d rounds, appends held back for %.1f ms; node %s owns it since epoch %d\n",
			bench.FormatBytes(int64(last.SentBytes)), last.Round, last.PauseMS, plan.TargetName, last.Epoch) //nolint:gosec // bytes of a machine
		if last.NowhereBlocks > 0 {
			fmt.Fprintf(out.w, "%d blocks were nowhere any more: the session's engine computes them again when it needs them\n", last.NowhereBlocks)
		}
	}
	return nil
}

func printMovePlan(out *output, p *client.MovePlan, dry bool) {
	verb := "copying"
	if dry {
		verb = "would copy"
	}
	fmt.Fprintf(out.w, "session %s (%d blocks, %d tokens) from %s to %s: %s %d blocks, %s", p.Session.Session, p.Session.Blocks, p.Session.Tokens,
		p.Session.OwnerName, p.TargetName, verb, p.LackingBlocks, bench.FormatBytes(int64(p.LackingBytes))) //nolint:gosec // bytes of a machine
	if p.CopyS > 0 {
		fmt.Fprintf(out.w, ", about %s", seconds(p.CopyS))
	}
	fmt.Fprintln(out.w)
	switch {
	case p.RecomputeS > 0 && p.CopyS > 0 && p.RecomputeIsCheaper:
		fmt.Fprintf(out.w, "computing them again would be sooner: about %s\n", seconds(p.RecomputeS))
	case p.RecomputeS > 0:
		fmt.Fprintf(out.w, "computing them again would take about %s\n", seconds(p.RecomputeS))
	case dry:
		fmt.Fprintln(out.w, "how long computing them again would take is not known: no engine stated its prefill rate")
	}
	if p.NowhereBlocks > 0 {
		fmt.Fprintf(out.w, "%d blocks are nowhere any more\n", p.NowhereBlocks)
	}
}

func moveLine(m *client.MoveProgress) string {
	line := m.State
	if m.Round > 0 {
		line += fmt.Sprintf(", round %d", m.Round)
	}
	line += fmt.Sprintf(": %s of %s", bench.FormatBytes(int64(m.SentBytes)), bench.FormatBytes(int64(m.LackedBytes))) //nolint:gosec // bytes of a machine
	if m.BytesPerSecond > 0 {
		line += fmt.Sprintf(", %s/s", bench.FormatBytes(int64(m.BytesPerSecond))) //nolint:gosec // likewise
	}
	if m.LeftS > 0 {
		line += ", " + seconds(m.LeftS) + " left"
	}
	return line
}

// live shows one line that changes, on a terminal; elsewhere nothing.
type live struct {
	w     io.Writer
	shown bool
}

func newLive(w io.Writer) *live {
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		return &live{w: w}
	}
	return &live{}
}

func (l *live) show(line string) {
	if l.w != nil {
		l.shown = true
		fmt.Fprintf(l.w, "\r\x1b[K%s", line)
	}
}

func (l *live) close() {
	if l.shown {
		fmt.Fprint(l.w, "\r\x1b[K")
	}
}

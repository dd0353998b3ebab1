package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func newSessions(out *output) *cobra.Command {
	var at target
	var f client.SessionFilter
	cmd := &cobra.Command{
		Use:   "sessions",
		Short: "List sessions: who owns what, and where it is",
		Long: `sessions lists the sessions of the cluster: the node that owns each and its epoch,
how long it is, what each tier of its owner has of it, its retention priority, what
it does (active, migrating, frozen), and how long it was not used.`,
		Example: `  kvtier sessions
  kvtier sessions --node gpu-7 --idle 10m
  kvtier sessions show chat-42
  kvtier sessions --state migrating -o json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.Usage = true
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				sessions, more, err := a.Sessions(ctx, f)
				if err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string]any{"sessions": sessions, "more": more})
				}
				return printSessions(out, sessions, more)
			})
		},
	}
	at.bind(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.Tenant, "tenant", "", "only sessions of this `tenant`")
	flags.StringVar(&f.Node, "node", "", "only those that this `node` owns (name, or digits of its id)")
	flags.StringVar(&f.State, "state", "", "only those in this `state`: active, migrating or frozen")
	flags.DurationVar(&f.Idle, "idle", 0, "only those that were not used for so long")
	flags.IntVar(&f.Limit, "limit", 100, "most sessions to list; 0: all")
	cmd.AddCommand(newSessionsShow(&at, out), newSessionsClose(&at, out))
	return cmd
}

func printSessions(out *output, sessions []client.SessionInfo, more bool) error {
	if len(sessions) == 0 {
		fmt.Fprintln(out.w, "no sessions")
		return nil
	}
	var rows [][]string
	for i := range sessions {
		s := &sessions[i]
		state := s.State
		if s.TargetName != "" {
			state += " to " + s.TargetName
		}
		owner := s.OwnerName
		if !s.OwnerUp {
			owner += " (down)"
		}
		rows = append(rows, []string{s.Session, s.Tenant, owner, fmt.Sprint(s.Epoch), fmt.Sprint(s.Blocks), fmt.Sprint(s.Tokens),
			amount(s, "hbm"), amount(s, "ram"), amount(s, "nvme"), fmt.Sprint(s.Priority), state, seconds(s.IdleS)})
	}
	if err := out.table(strings.Fields("session tenant node epoch blocks tokens hbm ram nvme priority state idle"), rows); err != nil {
		return err
	}
	if more {
		fmt.Fprintf(out.w, "and more: raise --limit, or narrow by --tenant, --node, --state or --idle\n")
	}
	return nil
}

// amount is what a tier of the owner has of a session.
func amount(s *client.SessionInfo, tier string) string {
	for _, t := range s.AtOwner {
		if t.Tier == tier {
			return bench.FormatBytes(int64(t.Bytes)) //nolint:gosec // bytes of a machine
		}
	}
	return "-"
}

// sessionOut is what show prints as JSON.
type sessionOut struct {
	*client.SessionDetail
	History []client.AuditRecord `json:"history"` // its moves and takeovers, as far back as the audit trail goes
}

// maxHistory is how far back the audit trail is read.
const maxHistory = 10_000

// historyOf is what the audit trail tells of a session. Callers who may not read the
// trail see none.
func historyOf(ctx context.Context, a *client.Admin, session string) ([]client.AuditRecord, error) {
	out := []client.AuditRecord{}
	trail, err := a.Audit(ctx, time.Time{}, maxHistory)
	if errors.Is(err, paging.ErrDenied) {
		return out, nil
	}
	for _, r := range trail {
		if r.Subject == session {
			out = append(out, r)
		}
	}
	return out, err
}

func newSessionsShow(at *target, out *output) *cobra.Command {
	var tenant string
	cmd := &cobra.Command{
		Use:     "show SESSION",
		Short:   "Tell of one session, and where each of its blocks is",
		Example: "  kvtier sessions show chat-42\n  kvtier sessions show chat-42 --tenant blue -o json",
		Args:    oneArg("a session"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				s, err := a.Session(ctx, tenant, args[0])
				if err != nil {
					return err
				}
				one := sessionOut{SessionDetail: s}
				if one.History, err = historyOf(ctx, a, s.Tenant+"/"+s.Session); err != nil {
					return err
				}
				if out.json() {
					return out.value(one)
				}
				return printSession(out, &one)
			})
		},
	}
	cmd.Flags().StringVar(&tenant, "tenant", "", "`tenant` whose session it is; default: the caller's")
	return cmd
}

func printSession(out *output, s *sessionOut) error {
	second := s.SecondName
	if second == "" {
		second = "no other node: with its owner's disk the chain is lost, unless its engine has it"
	}
	state := s.State
	if s.TargetName != "" {
		state += " to " + s.TargetName
	}
	owner := s.OwnerName
	if !s.OwnerUp {
		owner += ", which is down: an engine that opens it elsewhere takes it over"
	}
	rows := [][]string{
		{"session", s.Session},
		{"tenant", s.Tenant},
		{"model", cmp.Or(s.Model, "not known to the node that was asked")},
		{"namespace", s.Namespace[:min(16, len(s.Namespace))]},
		{"owner", owner},
		{"epoch", fmt.Sprintf("%d, after %d moves and takeovers", s.Epoch, s.Moves)},
		{"state", state},
		{"chain", fmt.Sprintf("%d blocks, %d tokens; its names are kept by %s", s.Blocks, s.Tokens, second)},
		{"retention", retentionText(s)},
		{"used", seconds(s.IdleS) + " ago"},
		{"opened", s.Opened.Format(time.RFC3339)},
	}
	if s.Parent != "" {
		rows = append(rows, []string{"goes on from", s.Parent})
	}
	for _, t := range s.AtOwner {
		rows = append(rows, []string{"at its owner", fmt.Sprintf("%s: %d blocks, %s", t.Tier, t.Blocks, bench.FormatBytes(int64(t.Bytes)))}) //nolint:gosec // bytes of a machine
	}
	if s.AbsentBlocks > 0 {
		rows = append(rows, []string{"not at its owner", fmt.Sprintf("%d blocks", s.AbsentBlocks)})
	}
	if err := out.table(nil, rows); err != nil {
		return err
	}
	if err := printHistory(out, s.History); err != nil || len(s.Runs) == 0 {
		return err
	}
	fmt.Fprintln(out.w)
	var places [][]string
	for _, r := range s.Runs {
		where := strings.Join(r.Places, ", ")
		if where == "" {
			where = "nowhere"
		}
		places = append(places, []string{fmt.Sprintf("%d to %d", r.First, r.First+r.Blocks-1), strconv.FormatUint(r.Blocks, 10), where})
	}
	return out.table([]string{"blocks", "count", "where"}, places)
}

func printHistory(out *output, history []client.AuditRecord) error {
	if len(history) == 0 {
		return nil
	}
	fmt.Fprintln(out.w)
	var rows [][]string
	for _, r := range history {
		rows = append(rows, []string{r.Time.Format(time.RFC3339), r.What, r.Outcome, r.Who})
	}
	return out.table([]string{"time", "what", "outcome", "by"}, rows)
}

func retentionText(s *sessionOut) string {
	text := fmt.Sprintf("priority %d", s.Priority)
	if s.TTLS > 0 {
		return text + ", for " + seconds(s.TTLS) + " after its last use"
	}
	return text + ", without an end"
}

func newSessionsClose(at *target, out *output) *cobra.Command {
	var tenant string
	cmd := &cobra.Command{
		Use:   "close SESSION",
		Short: "End a session; its blocks stay as any cached block does",
		Args:  oneArg("a session"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				if err := a.CloseSession(ctx, tenant, args[0]); err != nil {
					return err
				}
				if out.json() {
					return out.value(map[string]string{"closed": args[0]})
				}
				fmt.Fprintf(out.w, "session %s is closed\n", args[0])
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&tenant, "tenant", "", "`tenant` whose session it is; default: the caller's")
	return cmd
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError marks what the caller must mend before trying again: arguments and
// configuration.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

// run is the program. SIGINT and SIGTERM end its context; a second one ends the
// process.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	root := newRoot(stdout, stderr)
	root.SetArgs(args)
	return exitCode(root.ExecuteContext(ctx), stderr)
}

// exitCode is the one place where errors become exit codes and lines for people.
func exitCode(err error, stderr io.Writer) int {
	if err == nil {
		return exitOK
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintln(stderr, "kvtier:", line)
	}
	var usage *usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailed
}

func newRoot(stdout, stderr io.Writer) *cobra.Command {
	out := &output{w: stdout}
	root := &cobra.Command{
		Use:   "kvtier",
		Short: "Keep, find and hand out KV-cache pages for LLM inference",
		Long: `kvtier keeps the KV-cache pages of inference engines in shared memory and on
local NVMe, and hands them to engines on the same machine without copying.

  kvtier demo      see it work: a real trace, a kill -9, a restart
  kvtier serve     run a node
  kvtier doctor    what on this machine would hold a node back, and how to mend it`,
		Version:       version,
		Args:          noArgs,
		RunE:          showHelp,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.PersistentFlags().VarP(&out.format, "output", "o", "`table` or json")
	root.AddCommand(
		newServe(out, stderr),
		newStatus(out),
		newTiers(out),
		newBlocks(out),
		newNodes(out),
		newDrain(out, stderr),
		newUndrain(out),
		newRebalance(out, stderr),
		newAudit(out),
		newExplain(out),
		newSessions(out),
		newMigrate(out, stderr),
		newTop(out),
		newDoctor(out),
		newCert(out),
		newSnapshot(out),
		newDemo(out, stderr),
		newBench(out, stderr),
	)
	return root
}

func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// noArgs refuses arguments; for a command that has subcommands the argument is
// taken for a misspelt one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if !cmd.HasSubCommands() {
		return usagef("%s takes no argument, got %q", cmd.CommandPath(), args[0])
	}
	hint := "see " + cmd.CommandPath() + " --help"
	var names []string
	for _, sub := range cmd.Commands() {
		names = append(names, sub.Name())
	}
	if near := nearest(args[0], names); near != "" {
		hint = fmt.Sprintf("did you mean %q?", near)
	}
	return usagef("%s has no command %q: %s", cmd.CommandPath(), args[0], hint)
}

func oneArg(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s wants one argument, %s; got %d", cmd.CommandPath(), what, len(args))
		}
		return nil
	}
}

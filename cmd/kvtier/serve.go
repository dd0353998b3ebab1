package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/nvme"
)

func newServe(out *output, stderr io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a node",
		Long: `serve runs a node until SIGINT or SIGTERM, then stops it within --stop-within: what
is only in RAM is written down first, the hottest before the rest.

Each setting can be given as a flag, as an environment variable KVTIER_NAME and as
a key of the configuration file; the first of these that has it wins. Unknown keys
are errors. Everything is checked before anything is touched, and every problem is
told at once. When the node can be used, a line that begins with "ready" is printed.`,
		Args: noArgs,
	}
	file := configFlags(cmd)
	printOnly := cmd.Flags().Bool("print-config", false, "print every setting with its value and origin, and exit")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := loader{file: file(), env: os.Environ(), flags: cmd.Flags()}.load()
		if err != nil {
			return err
		}
		if *printOnly {
			return printConfig(out, c)
		}
		return serve(cmd.Context(), c, out, stderr)
	}
	return cmd
}

// printedSetting is one line of --print-config.
type printedSetting struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

func printConfig(out *output, c *loaded) error {
	effective := c.withDefaults()
	var list []printedSetting
	for _, f := range effective.Fields() {
		list = append(list, printedSetting{f.Name, f.Value, f.Origin})
	}
	for _, s := range settings(&effective) {
		if s.name == "log-level" || s.name == "log-format" {
			list = append(list, printedSetting{s.name, show(s.field), c.origin[s.name]})
		}
	}
	if out.json() {
		return out.value(map[string][]printedSetting{"settings": list})
	}
	var rows [][]string
	for _, s := range list {
		rows = append(rows, []string{s.Name, s.Value, s.Origin})
	}
	return out.table([]string{"setting", "value", "origin"}, rows)
}

// serve runs a node until ctx ends.
func serve(ctx context.Context, c *loaded, out *output, stderr io.Writer) error {
	effective := c.withDefaults()
	if err := mayStart(examine(ctx, thisHost(), &effective, true)); err != nil {
		return err
	}
	log := newLogger(c, stderr)
	s, err := server.Open(ctx, c.Config, server.Options{
		Drivers: nodeDrivers(),
		Logger:  log, Version: version, Progress: loading(log),
	})
	if err != nil {
		return err
	}
	if err := printReady(out, s); err != nil {
		return errors.Join(err, s.Close()) //nolint:contextcheck // Close bounds itself
	}
	return s.Serve(ctx)
}

// mayStart turns failed checks into one error that names limit, need and remedy.
func mayStart(found []finding) error {
	var errs []error
	for _, f := range found {
		if f.Verdict == verdictFail {
			errs = append(errs, fmt.Errorf("%s: %s: %s", f.Check, f.Found, f.Mend))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return &usageError{errors.Join(errs...)}
}

func newLogger(c *loaded, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.LogLevel)) // load has checked it
	opts := &slog.HandlerOptions{Level: level}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// loading logs every tenth of the index.
func loading(log *slog.Logger) func(done, about int64) {
	next := int64(1)
	return func(done, about int64) {
		if about > 0 && done*10/about >= next {
			next = done*10/about + 1
			log.Info("index is loading", "pages", done, "about", about)
		}
	}
}

// printReady says that clients can connect, and where. Who started the process
// waits for the line.
func printReady(out *output, s *server.Server) error {
	listen, http, peers, gossip := server.Off, server.Off, server.Off, server.Off
	if a := s.Addr(); a != nil {
		listen = a.String()
	}
	if a := s.HTTPAddr(); a != nil {
		http = a.String()
	}
	if a := s.PeerAddr(); a != "" {
		peers, gossip = a, s.GossipAddr()
	}
	if out.json() {
		return out.value(map[string]any{"state": "ready", "socket": s.Socket(), "listen": listen, "http": http, "peers": peers, "gossip": gossip, "pid": os.Getpid()})
	}
	_, err := fmt.Fprintf(out.w, "ready socket=%s listen=%s http=%s peers=%s gossip=%s pid=%d\n", s.Socket(), listen, http, peers, gossip, os.Getpid())
	return err
}

// openNVMe is the driver of the disk tier.
func openNVMe(_ context.Context, c server.Config, dir string, log *slog.Logger) (tier.Durable, error) {
	return nvme.Open(nvme.Config{Dir: dir, BudgetBytes: int64(c.NVMeBytes), Logger: log})
}

package main

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/tier/policy"
)

// simulation is "bench replay --simulate".
type simulation struct {
	on  bool
	cfg bench.SimulateConfig
}

func (s *simulation) bind(flags *pflag.FlagSet) {
	flags.BoolVar(&s.on, "simulate", false, "start no node: replay policies and choices alone; the flags below are for this")
	flags.IntVar(&s.cfg.Nodes, "nodes", 10, "nodes that share the trace")
	flags.Int64Var(&s.cfg.Capacity, "capacity", 5859, "`blocks` that each node holds")
	flags.StringVar(&s.cfg.Policy, "policy", "lru_rev", "one of "+strings.Join(policy.Names(), ", "))
	flags.StringVar(&s.cfg.Route, "route", bench.RouteRandom, "how requests are spread: "+strings.Join(bench.Routes(), " or "))
	flags.BoolVar(&s.cfg.NoDirectory, "no-directory", false, "a node finds only what it has itself")
}

// simulateOnly are the flags that mean nothing without --simulate.
var simulateOnly = []string{"nodes", "capacity", "policy", "route", "no-directory"}

// replayOnly are those that mean nothing with it.
var replayOnly = []string{"block-bytes", "ram", "nvme", "clients", "stream", "kill-at", "durable-every", "damage"}

func (s *simulation) check(given *pflag.FlagSet) error {
	meaningless, why := simulateOnly, "is for --simulate"
	if s.on {
		meaningless, why = replayOnly, "means nothing with --simulate"
	}
	for _, name := range meaningless {
		if given.Changed(name) {
			return usagef("--%s %s", name, why)
		}
	}
	switch c := &s.cfg; {
	case c.Nodes < 1 || c.Nodes > 1024 || c.Capacity < 1:
		return usagef("--nodes: 1 to 1024; --capacity: at least 1")
	case !slices.Contains(policy.Names(), c.Policy):
		return usagef("--policy: %q: want one of %s", c.Policy, strings.Join(policy.Names(), ", "))
	case !slices.Contains(bench.Routes(), c.Route):
		return usagef("--route: %q: want one of %s", c.Route, strings.Join(bench.Routes(), ", "))
	}
	return nil
}

// run takes what it shares with a real replay from cfg.
func (s *simulation) run(cfg *bench.ReplayConfig) (bench.Report, error) {
	trace := cfg.Trace
	if cfg.Requests > 0 && cfg.Requests < len(trace.Requests) {
		cut := *trace
		cut.Requests = trace.Requests[:cfg.Requests]
		trace = &cut
	}
	s.cfg.Trace, s.cfg.BlockTokens, s.cfg.Seed = trace, int64(cfg.BlockTokens), cfg.Seed
	return bench.Simulate(s.cfg)
}

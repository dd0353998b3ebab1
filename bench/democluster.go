package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Sizes of the demo of a cluster: each node is as small as the one of the demo, and
// keeps its share of the trace on disk, and copies.
const (
	demoClusterNVMe = 256 << 20 // of each node, beside its share of demoNVMe
	// MinDemoNodes is the smallest cluster of the demo.
	MinDemoNodes = 2
	// MaxDemoNodes is the largest: its processes share one machine.
	MaxDemoNodes = 5
)

// DemoClusterConfig describes "demo --nodes".
type DemoClusterConfig struct {
	Nodes    int // MinDemoNodes to MaxDemoNodes
	Node     NodeConfig
	TempDir  string
	Requests int // of the trace; 0: all
	Progress Progress
}

// DemoCluster replays the embedded trace through nodes that know nothing of each
// other, and then through the same nodes as a cluster, of which the leader and then
// another node are killed.
func DemoCluster(ctx context.Context, cfg DemoClusterConfig) (*ClusterReport, error) {
	trace, err := OpenTrace(ShortTrace)
	if err != nil {
		return nil, err
	}
	n := len(trace.Requests)
	if cfg.Requests > 0 {
		n = min(n, cfg.Requests)
	}
	if cfg.Node.RAM == 0 {
		cfg.Node.RAM, cfg.Node.NVMe = demoRAM, int64(demoNVMe/cfg.Nodes+demoClusterNVMe)
	}
	cfg.Node.Args = append([]string{"--http-listen", "off"}, cfg.Node.Args...)
	step := stepper(cfg.Progress, int64(2*n+actSteps))
	run := clusterConfig{
		trace: trace, requests: n, blockBytes: demoBlockBytes, blockTokens: DefaultBlockTokens, durableEvery: 8,
		nodes: cfg.Nodes, alone: true, seed: 1, node: cfg.Node, tempDir: cfg.TempDir, step: step,
	}
	start := time.Now()
	apart, err := playCluster(ctx, &run)
	if err != nil {
		return nil, fmt.Errorf("without a directory: %w", err)
	}
	run.alone, run.kills = false, true
	together, err := playCluster(ctx, &run)
	if err != nil {
		return nil, err
	}
	act, err := playAct(ctx, NodeConfig{Program: cfg.Node.Program, Env: cfg.Node.Env}, cfg.TempDir, step)
	if err != nil {
		return nil, fmt.Errorf("a session that moves: %w", err)
	}
	r := newClusterReport(apart, together, time.Since(start))
	r.Session = act
	return r, nil
}

// ClusterReport is the answer of "demo --nodes": a replay through a cluster.
type ClusterReport struct {
	ReplayReport
	Nodes               int         `json:"nodes"`
	RemoteHitBlocks     int64       `json:"remote_hit_blocks"`     // hits that came from another node
	HitWithoutDirectory float64     `json:"hit_without_directory"` // of the same nodes, each by itself, none killed
	ServedMeanwhile     int64       `json:"served_meanwhile"`      // requests, while a node was down
	RecoveryMS          float64     `json:"recovery_ms"`           // the worst of all outages
	Outages             []Outage    `json:"outages"`
	Session             *SessionAct `json:"session"` // the act in which a session moves

	apart *ReplayReport
}

func newClusterReport(apart, together *clusterRun, took time.Duration) *ClusterReport {
	r := &ClusterReport{
		ReplayReport: *together.report(took), Nodes: together.cfg.nodes,
		ServedMeanwhile: together.meanwhile.Load(), Outages: together.outages, apart: apart.report(took),
	}
	r.RemoteHitBlocks, r.HitWithoutDirectory = r.HitByTier.Remote, r.apart.Hit
	for _, o := range r.Outages {
		r.RecoveryMS = max(r.RecoveryMS, o.OwnershipMS, o.FoundMS)
	}
	return r
}

// Rows implements Report.
func (r *ClusterReport) Rows() []Row {
	single := r.ReplayReport.Rows()
	rows := []Row{
		{"nodes", fmt.Sprint(r.Nodes), "one cluster on this machine; each request goes to one of them at random"},
		{"requests", fmt.Sprint(r.Requests), fmt.Sprintf("%d served, %d while their node was down, %d failed", r.ServedRequests, r.UnavailableRequests, r.FailedRequests)},
		{"hit rate, blocks", rate4(r.Hit), fmt.Sprintf("of at most %s with any cache (%d of %d blocks)", rate4(r.BestHit), r.HitBlocks, r.Blocks)},
		{"  without directory", rate4(r.HitWithoutDirectory), "the same nodes, each by itself, none killed"},
		{"  from the node's RAM", fmt.Sprint(r.HitByTier.RAM), share(r.HitByTier.RAM, r.HitBlocks)},
		{"  from its NVMe", fmt.Sprint(r.HitByTier.NVMe), share(r.HitByTier.NVMe, r.HitBlocks)},
		{"  from other nodes", fmt.Sprint(r.RemoteHitBlocks), share(r.RemoteHitBlocks, r.HitBlocks)},
	}
	from := slices.IndexFunc(single, func(row Row) bool { return row.Name == "stored" })
	to := slices.IndexFunc(single, func(row Row) bool { return row.Name == "kills (SIGKILL)" })
	if to < 0 {
		to = len(single) - 1
	}
	rows = append(rows, single[from:to]...)
	for _, o := range r.Outages {
		name := "node killed (SIGKILL)"
		if o.Leader {
			name = "leader killed (SIGKILL)"
		}
		rows = append(rows, Row{name, o.Node, fmt.Sprintf("blocks stored after %s are known to others; ready %s after its start, its blocks found after %s",
			micros(1e3*o.OwnershipMS), micros(1e3*o.ReadyMS), micros(1e3*o.FoundMS))})
	}
	rows = append(rows, Row{"served meanwhile", fmt.Sprint(r.ServedMeanwhile), "requests, while a node was down"})
	for _, row := range single[to:] {
		if row.Name != "kills (SIGKILL)" {
			rows = append(rows, row)
		}
	}
	return append(rows, r.Session.rows()...)
}

// Err implements Report.
func (r *ClusterReport) Err() error {
	if err := r.apart.Err(); err != nil {
		return errors.Join(r.ReplayReport.Err(), fmt.Errorf("without a directory: %w", err))
	}
	return errors.Join(r.ReplayReport.Err(), r.Session.err())
}

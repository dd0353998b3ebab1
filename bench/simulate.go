package bench

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier/policy"
)

// Ways of spreading requests over the nodes of a simulation.
const (
	RouteRandom     = "random"
	RouteRoundRobin = "round-robin"
)

// Routes lists the ways of spreading requests.
func Routes() []string { return []string{RouteRandom, RouteRoundRobin} }

// SimulateConfig describes "bench replay --simulate".
type SimulateConfig struct {
	Trace       *Trace
	Policy      string
	Capacity    int64 // blocks of each node
	BlockTokens int64
	Nodes       int
	Route       string // one of Routes
	NoDirectory bool   // a node finds only what it has itself
	Seed        uint64 // of the random route
}

// Simulate replays a trace through the eviction policies of the nodes of a
// cluster and the choice of a copy, without bytes and without a network.
func Simulate(cfg SimulateConfig) (*SimulateReport, error) {
	if !slices.Contains(Routes(), cfg.Route) {
		return nil, fmt.Errorf("route %q: want one of %v", cfg.Route, Routes())
	}
	random := rand.New(rand.NewPCG(cfg.Seed, 0))
	c := policy.Cluster{Nodes: cfg.Nodes, Route: func(i int) int { return i % cfg.Nodes }}
	if cfg.Route == RouteRandom {
		c.Route = func(int) int { return random.IntN(cfg.Nodes) }
	}
	if !cfg.NoDirectory {
		c.Source = leastLoaded
	}
	t := policy.Trace{Requests: cfg.Trace.Requests, BlockTokens: cfg.BlockTokens}
	res, err := policy.ReplayCluster(cfg.Policy, cfg.Capacity, t, c)
	if err != nil {
		return nil, err
	}
	return &SimulateReport{
		PolicyReport: PolicyReport{
			Trace: cfg.Trace.Name, Policy: cfg.Policy, Capacity: cfg.Capacity, BlockTokens: cfg.BlockTokens,
			Requests: res.Requests, Blocks: res.Blocks, Hit: res.HitRate(), TokenHit: res.TokenHitRate(), Evicted: res.Evicted,
			BestHit: policy.Optimal(cfg.Capacity*int64(cfg.Nodes), t).HitRate(),
		},
		Nodes: cfg.Nodes, Route: cfg.Route, Directory: !cfg.NoDirectory, Seed: cfg.Seed,
		LocalHitBlocks: res.LocalHits, RemoteHitBlocks: res.RemoteHits, hitBlocks: res.Hits,
	}, nil
}

// What a copy costs in a simulation: all nodes are as far and as fast as each
// other, so what was asked of each decides.
const (
	simulatedBlockBytes = 1 << 20
	simulatedDistance   = 100 * time.Microsecond
)

// leastLoaded is the product's choice between copies.
func leastLoaded(holders []int, asked []int64) int {
	copies := make([]placement.Copy, len(holders))
	for i, node := range holders {
		copies[i] = placement.Copy{Distance: simulatedDistance, QueuedBytes: asked[node] * simulatedBlockBytes}
	}
	best, _ := placement.ChooseCopy(copies, simulatedBlockBytes)
	return holders[best]
}

// SimulateReport is the answer of "bench replay --simulate". Capacity is that of
// each node, BestHit that of one cache of all nodes' capacity.
type SimulateReport struct {
	PolicyReport
	Nodes           int    `json:"nodes"`
	Route           string `json:"route"`
	Directory       bool   `json:"directory"`
	Seed            uint64 `json:"seed"`
	LocalHitBlocks  int64  `json:"local_hit_blocks"`
	RemoteHitBlocks int64  `json:"remote_hit_blocks"`

	hitBlocks int64
}

// Rows implements Report.
func (r *SimulateReport) Rows() []Row {
	finds := "what any node has"
	if !r.Directory {
		finds = "what it has itself"
	}
	return []Row{
		{"nodes", fmt.Sprint(r.Nodes), fmt.Sprintf("%s, each of %d blocks of %d tokens", r.Policy, r.Capacity, r.BlockTokens)},
		{"trace", r.Trace, fmt.Sprintf("%d requests, %d blocks", r.Requests, r.Blocks)},
		{"route", r.Route, "a node finds " + finds},
		{"block hit rate", rate4(r.Hit), "of at most " + rate4(r.BestHit) + " in one cache of all nodes that knows the future"},
		{"token hit rate", rate4(r.TokenHit), ""},
		{"hits", fmt.Sprint(r.LocalHitBlocks + r.RemoteHitBlocks), fmt.Sprintf("blocks: %d local, %d remote", r.LocalHitBlocks, r.RemoteHitBlocks)},
		{"blocks evicted", fmt.Sprint(r.Evicted), ""},
	}
}

// Err implements Report.
func (r *SimulateReport) Err() error {
	if r.LocalHitBlocks+r.RemoteHitBlocks != r.hitBlocks {
		return fmt.Errorf("%d local and %d remote hits are not %d", r.LocalHitBlocks, r.RemoteHitBlocks, r.hitBlocks)
	}
	return nil
}

package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier/policy"
)

// clusterConfig describes a replay whose requests are spread over several nodes.
type clusterConfig struct {
	trace        *Trace
	requests     int
	blockBytes   int64
	blockTokens  int
	durableEvery int
	nodes        int
	alone        bool   // no cluster: each node finds only what it has itself
	kills        bool   // the leader at a third of the run, another node at two thirds
	seed         uint64 // of contents and routes
	node         NodeConfig
	tempDir      string
	step         func() // after each request
}

// clusterRun is one run.
type clusterRun struct {
	cfg     *clusterConfig
	fleet   *fleet
	engines []*engine // one for each node
	ledger  *ledger
	tally   tally
	best    policy.Result // of a cache without limit

	probes    uint64 // number of the last block outside of the trace
	outages   []Outage
	meanwhile atomic.Int64 // requests served while a node was down
	loaded    int64        // bytes that the nodes read from disk

	audited, recovered, lostDurable int64
}

// playCluster plays the trace, each request on a node that is chosen at random, or
// on the next one if that is down.
func playCluster(ctx context.Context, cfg *clusterConfig) (_ *clusterRun, err error) {
	work, err := NewWorkspace(cfg.tempDir, int64(cfg.nodes)*cfg.node.NVMe)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	r := &clusterRun{cfg: cfg, ledger: newLedger()}
	if r.best, err = cfg.trace.Best(cfg.requests, cfg.blockTokens); err != nil {
		return nil, err
	}
	if r.fleet, err = startFleet(ctx, cfg.node, work.Dir, cfg.nodes, cfg.alone); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.fleet.close(ctx)) }()
	defer r.closeEngines()
	if err := r.openEngines(ctx); err != nil {
		return nil, err
	}
	if !cfg.alone {
		if err := r.fleet.settle(ctx); err != nil {
			return nil, err
		}
	}
	if err := r.play(ctx); err != nil {
		return nil, err
	}
	for i := range r.fleet.nodes {
		if err := r.countLoaded(ctx, i); err != nil {
			return nil, err
		}
	}
	if cfg.kills {
		return r, r.audit(ctx)
	}
	return r, nil
}

func (r *clusterRun) namespace() paging.Namespace {
	return namespaceOf("replay", r.cfg.blockTokens, r.cfg.blockBytes)
}

func (r *clusterRun) openEngines(ctx context.Context) error {
	for i, n := range r.fleet.nodes {
		c, err := client.Open(ctx, client.Config{
			Socket: n.daemon.Socket(), Engine: fmt.Sprintf("bench-%d", i+1),
			StallTimeout: stallTime, StagingBytes: min(stagingMost, r.cfg.node.RAM/8),
		})
		if err != nil {
			return fmt.Errorf("client of node %d: %w", i+1, err)
		}
		e := &engine{client: c, content: Content{Seed: r.cfg.seed}, ledger: r.ledger, tally: &r.tally, parts: 1}
		r.engines = append(r.engines, e)
		if e.ns, err = c.RegisterNamespace(ctx, r.namespace()); err != nil {
			return fmt.Errorf("client of node %d: %w", i+1, err)
		}
	}
	return nil
}

func (r *clusterRun) closeEngines() {
	for _, e := range r.engines {
		e.client.Close() //nolint:errcheck // the workload is over
	}
}

// job is a request, handed to the engine of one node.
type job struct {
	chain *chain
	down  bool // a node is down when it begins
}

// play hands the requests to the engines, in order; each engine does one at a time.
func (r *clusterRun) play(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var workers, outages sync.WaitGroup
	jobs := make([]chan job, len(r.engines))
	for i, e := range r.engines {
		jobs[i] = make(chan job)
		workers.Go(func() { // owner: play; ends when its jobs are closed; one for each node
			for j := range jobs[i] {
				if e.play(ctx, r.fleet.nodes[i], j.chain) && j.down {
					r.meanwhile.Add(1)
				}
				r.cfg.step()
			}
		})
	}
	err := r.dispatch(ctx, jobs, &outages, cancel)
	for i := range jobs {
		close(jobs[i])
	}
	workers.Wait()
	outages.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// holdAt is the part of the run that waits for all nodes to be back, so that they
// are used again before it ends.
const holdAt = 0.9

// dispatch chooses the node of each request. At its turn to be killed a node gets
// the next request, so that it dies in the middle of one.
func (r *clusterRun) dispatch(ctx context.Context, jobs []chan job, outages *sync.WaitGroup, cancel context.CancelCauseFunc) error {
	random := rand.New(rand.NewPCG(r.cfg.seed, 0))
	kills := r.killPoints()
	hold := int(holdAt * float64(r.cfg.requests))
	for i := range r.cfg.requests {
		chosen := random.IntN(len(jobs))
		kill, killing := kills[i]
		if killing || i == hold {
			outages.Wait()
		}
		var o *outage
		if killing && ctx.Err() == nil {
			var err error
			if o, err = r.prepare(ctx, kill); err != nil {
				return err
			}
			chosen = o.victim
		}
		at, down := r.upFrom(chosen)
		select {
		case jobs[at] <- job{r.cfg.trace.chain(i, r.cfg.blockTokens, r.cfg.durableEvery), down}:
		case <-ctx.Done():
			return ctx.Err()
		}
		if o != nil {
			r.fleet.nodes[o.victim].fall()
			outages.Go(func() { // owner: play, which waits for it; one at a time; ends with the outage
				if err := r.endure(ctx, o); err != nil {
					cancel(err)
				}
			})
		}
	}
	return nil
}

// upFrom is the first node from i on that is up, and whether any is down.
func (r *clusterRun) upFrom(i int) (at int, down bool) {
	at = -1
	for j := range r.fleet.nodes {
		if k := (i + j) % len(r.fleet.nodes); r.fleet.nodes[k].mark().down {
			down = true
		} else if at < 0 {
			at = k
		}
	}
	return max(at, 0), down
}

// countLoaded adds what the process of a node has read from disk so far.
func (r *clusterRun) countLoaded(ctx context.Context, node int) error {
	n, err := sumOfCounters(ctx, SocketIn(r.fleet.nodes[node].cfg.Dir), loadedCounter)
	r.loaded += n
	return err
}

// audit reads back, in the end, what was committed, each block from the node that it
// was committed to: elsewhere a copy of it would take room.
func (r *clusterRun) audit(ctx context.Context) error {
	batch := int(max(1, min(auditBlocks, r.cfg.node.RAM/4/r.cfg.blockBytes)))
	for i, e := range r.engines {
		recovered, lost, err := e.audit(ctx, e.stored, batch)
		if err != nil {
			return fmt.Errorf("reading back from node %d in the end: %w", i+1, err)
		}
		r.audited += int64(len(e.stored))
		r.recovered, r.lostDurable = r.recovered+recovered, r.lostDurable+lost
	}
	return nil
}

func (r *clusterRun) report(took time.Duration) *ReplayReport {
	rep := r.tally.report(int64(r.cfg.requests), r.best, r.loaded)
	rep.LostDurableBlocks, rep.RecoveredPages, rep.AuditedPages = r.lostDurable, r.recovered, r.audited
	rep.Kills, rep.Seconds = int64(len(r.outages)), took.Seconds()
	for _, o := range r.outages {
		rep.RestartSeconds = max(rep.RestartSeconds, o.ReadyMS/1e3)
	}
	return rep
}

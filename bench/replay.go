package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier/policy"
)

// ReplayConfig describes a replay of a trace through a daemon process.
type ReplayConfig struct {
	Trace *Trace
	// Requests is how many of the trace's requests are played. 0: all.
	Requests int
	// BlockBytes is the page of one block; BlockTokens its tokens.
	BlockBytes  int64
	BlockTokens int
	// Clients play requests at a time, in the order of the trace.
	Clients int
	// Stream makes the clients use TCP as if they were on another machine.
	Stream bool
	// KillAt are the positions in the run (0 to 1) at which the daemon is killed
	// in the middle of a request and started again.
	KillAt []float64
	// DamageFlips is how many bits are flipped in the segment files, at random
	// places, while the daemon is down.
	DamageFlips int
	// Decodes is about how many of the requests run attention over the pages that
	// they fetched, in place; their blocks must be pages of decodeLayout. 0: none.
	Decodes int
	// DurableEvery makes each n-th request commit as durable. 0: none.
	DurableEvery int
	// Seed of contents and damage.
	Seed uint64
	// Node starts the daemon; its Dir is set by the replay.
	Node NodeConfig
	// TempDir is where the working directory is made. Empty: the system's.
	TempDir string
	// Progress, if not nil, is told how many of how many requests are done.
	Progress Progress
}

// Replay plays the trace and reports what the clients saw. The error is what
// kept the run from its end; what was found is in the report.
func Replay(ctx context.Context, cfg ReplayConfig) (_ *ReplayReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, cfg.Node.NVMe)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	cfg.Node.Dir = work.Dir
	cfg.Node.Args = append([]string{"--http-listen", "off"}, cfg.Node.Args...)
	if cfg.Stream {
		cfg.Node.Args = append(cfg.Node.Args, "--listen", "127.0.0.1:0")
	}
	start := time.Now()
	n, err := startNode(ctx, cfg.Node)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.close(ctx)) }()
	if cfg.Stream { // the port stays over restarts
		n.cfg.Args = append(n.cfg.Args, "--listen", n.daemon.Ready("listen"))
	}
	r := &replay{cfg: &cfg, node: n, ledger: newLedger()}
	if r.best, err = cfg.Trace.Best(r.requests(), cfg.BlockTokens); err != nil {
		return nil, err
	}
	if err := r.openEngines(ctx); err != nil {
		return nil, err
	}
	defer r.closeEngines()
	if err := r.play(ctx); err != nil {
		return nil, err
	}
	if err := r.countLoaded(ctx); err != nil {
		return nil, err
	}
	return r.report(time.Since(start)), nil
}

// replay is one run.
type replay struct {
	cfg     *ReplayConfig
	node    *node
	ledger  *ledger
	tally   tally
	engines []*engine
	best    policy.Result // of a cache without limit

	loaded     int64 // bytes that the node read from disk for requests, up to countLoaded
	loadedBase int64 // what this process of the node had read for something else

	kills, audited, recovered, lostDurable, flipped int64 // of the goroutine that crashes the node
}

func (r *replay) openEngines(ctx context.Context) error {
	for i := range r.cfg.Clients {
		c, err := client.Open(ctx, r.clientConfig(i))
		if err != nil {
			return fmt.Errorf("client %d: %w", i, err)
		}
		e := &engine{client: c, content: Content{Seed: r.cfg.Seed, KV: r.cfg.Decodes > 0}, ledger: r.ledger, tally: &r.tally, parts: 1, private: r.cfg.Stream}
		r.engines = append(r.engines, e)
		if r.cfg.Node.HBM > 0 && !r.cfg.Stream {
			e.wanted = client.TierHBM
		}
		if r.cfg.Decodes > 0 {
			if e.decoder, err = newDecoder(r.cfg.Seed + uint64(i)); err != nil {
				return err
			}
		}
		e.ns, err = c.RegisterNamespace(ctx, r.namespace())
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *replay) namespace() paging.Namespace {
	return namespaceOf("replay", r.cfg.BlockTokens, r.cfg.BlockBytes)
}

func (r *replay) clientConfig(i int) client.Config {
	// Together the clients take an eighth of RAM to write into, as one may at most.
	staging := min(stagingMost, r.cfg.Node.RAM/8/int64(r.cfg.Clients))
	cfg := client.Config{StallTimeout: stallTime, Engine: fmt.Sprintf("bench-%d", i), StagingBytes: staging, DevicePool: r.cfg.Node.HBM > 0}
	if r.cfg.Stream {
		cfg.Address = r.node.daemon.Ready("listen")
	} else {
		cfg.Socket = r.node.daemon.Socket()
	}
	return cfg
}

func (r *replay) closeEngines() {
	for _, e := range r.engines {
		e.client.Close() //nolint:errcheck // the workload is over
		if e.decoder != nil {
			e.decoder.close() //nolint:errcheck // as above
		}
	}
}

// play hands the requests to the engines, in order, and waits for the last one.
// While the node is down none begins: what is measured is what the node keeps,
// not how fast a client can be refused.
func (r *replay) play(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	jobs := make(chan *chain)
	var workers, crashes sync.WaitGroup
	step := stepper(r.cfg.Progress, int64(r.requests()))
	for _, e := range r.engines {
		workers.Go(func() { // owner: play; ends when jobs is closed; one per client
			for c := range jobs {
				e.play(ctx, r.node, c)
				step()
			}
		})
	}
	r.dispatch(ctx, jobs, func() {
		crashes.Go(func() { // owner: play; ends with the outage; one at a time, the dispatcher waits for it
			if err := r.outage(ctx); err != nil {
				cancel(err)
			}
		})
	})
	close(jobs)
	workers.Wait()
	crashes.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

func (r *replay) requests() int {
	n := len(r.cfg.Trace.Requests)
	if r.cfg.Requests > 0 {
		n = min(n, r.cfg.Requests)
	}
	return n
}

func (r *replay) dispatch(ctx context.Context, jobs chan<- *chain, crash func()) {
	kills := map[int]bool{}
	for _, at := range r.cfg.KillAt {
		kills[int(at*float64(r.requests()))] = true
	}
	for i := range r.requests() {
		if r.node.awaitUp(ctx) != nil {
			return
		}
		select {
		case jobs <- r.chain(i):
		case <-ctx.Done():
			return
		}
		if kills[i] {
			if err := r.countLoaded(ctx); err != nil {
				r.tally.note("counters of the node: %v", err)
			}
			r.node.fall()
			crash()
		}
	}
}

// countLoaded adds what this process of the node has read from disk. A kill that
// follows takes with it what the request that is in flight reads until then.
func (r *replay) countLoaded(ctx context.Context) error {
	n, err := sumOfCounters(ctx, r.node.daemon.Socket(), loadedCounter)
	if err != nil {
		return err
	}
	r.loaded += n - r.loadedBase
	r.loadedBase = n
	return nil
}

func (r *replay) chain(i int) *chain {
	c := r.cfg.Trace.chain(i, r.cfg.BlockTokens, r.cfg.DurableEvery)
	c.decode = r.cfg.Decodes > 0 && i%max(1, r.requests()/r.cfg.Decodes) == 0
	return c
}

const stagingMost = 64 << 20

// auditBlocks is the most blocks of one call of the audit; their bytes stay
// under a quarter of the RAM budget.
const auditBlocks = 64

// outage kills the node, damages what it stored if that is asked for, starts it
// again and reads back everything that was committed.
func (r *replay) outage(ctx context.Context) error {
	r.kills++
	err := r.node.crash(ctx, func() error {
		flipped, err := flipBits(filepath.Join(r.node.cfg.Dir, "data"), r.cfg.DamageFlips, rand.New(rand.NewPCG(r.cfg.Seed, uint64(r.kills))))
		r.flipped += int64(flipped)
		return err
	})
	if err != nil {
		return err
	}
	for _, e := range r.engines {
		if err := ready(ctx, e, r.namespace()); err != nil {
			return err
		}
	}
	batch := int(max(1, min(auditBlocks, r.cfg.Node.RAM/4/r.cfg.BlockBytes)))
	names, _ := r.ledger.all()
	recovered, lost, err := r.engines[0].audit(ctx, names, batch)
	if err != nil {
		return fmt.Errorf("reading back after the restart: %w", err)
	}
	r.audited, r.recovered, r.lostDurable = int64(len(names)), recovered, r.lostDurable+lost
	if r.loadedBase, err = sumOfCounters(ctx, r.node.daemon.Socket(), loadedCounter); err != nil {
		return err
	}
	r.node.recovered()
	return nil
}

// reattachTime is the bound of the way back after a restart (docs/failure.md).
const reattachTime = 5 * time.Second

// ready waits until a client has found the node again and its namespace is known.
func ready(ctx context.Context, e *engine, ns paging.Namespace) error {
	ctx, cancel := context.WithTimeout(ctx, reattachTime)
	defer cancel()
	if err := e.client.Ready(ctx); err != nil {
		return fmt.Errorf("a client did not find the node again within %v: %w", reattachTime, err)
	}
	_, err := e.client.RegisterNamespace(ctx, ns)
	return err
}

func (r *replay) report(took time.Duration) *ReplayReport {
	rep := r.tally.report(int64(r.requests()), r.best, r.loaded)
	rep.LostDurableBlocks, rep.RecoveredPages, rep.AuditedPages = r.lostDurable, r.recovered, r.audited
	rep.Kills, rep.FlippedBits = r.kills, r.flipped
	rep.Seconds, rep.RestartSeconds = took.Seconds(), r.node.worst.Seconds()
	return rep
}

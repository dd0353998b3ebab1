package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// CrashConfig describes "bench crash": rounds of a write load that is ended by
// SIGKILL of the daemon.
type CrashConfig struct {
	Rounds   int
	Seed     uint64
	Node     NodeConfig // its Dir is set; RAM and NVMe that are 0 get sizes that make demotion and churn happen
	TempDir  string
	Progress Progress
}

// Shape of the load. The blocks that are alive when a round begins take at most a
// quarter of the NVMe budget and those that a round writes at most half of it, so
// that nothing but a fault can take a durable one away, however fast the disk is.
const (
	crashRAM       = 32 << 20
	crashNVMe      = 256 << 20
	crashWriters   = 2
	crashChain     = 12 // blocks of a chain
	crashMinLoad   = 5 * time.Millisecond
	crashMaxLoad   = 300 * time.Millisecond
	crashAlive     = 4               // the NVMe budget over this is the most that is alive when a round begins
	crashWritten   = 2               // the NVMe budget over this is the most that a round writes
	crashProbes    = 64              // names that were never committed, asked for in every round
	crashBlockSize = 64<<10 + 16<<10 // room of a block's two pages
)

// crashPages are the lengths of the two pages of a block: two slab classes, one
// of them with a length that is no multiple of the slot unit.
var crashPages = []int64{64 << 10, 13_000}

// Crash kills the daemon at random points of a write load, starts it again and
// checks: every durable block is back, every page right, no block is served
// that was never committed, and in the end all space can be used.
func Crash(ctx context.Context, cfg CrashConfig) (_ *CrashReport, err error) {
	if cfg.Node.RAM == 0 {
		cfg.Node.RAM, cfg.Node.NVMe = crashRAM, crashNVMe
	}
	work, err := NewWorkspace(cfg.TempDir, cfg.Node.NVMe)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	cfg.Node.Dir = work.Dir
	cfg.Node.Args = append([]string{"--http-listen", "off", "--flush-after", "200ms", "--staging", "4MiB"}, cfg.Node.Args...)
	start := time.Now()
	n, err := startNode(ctx, cfg.Node)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.close(ctx)) }()
	c := &crashes{cfg: &cfg, node: n, ledger: newLedger(), rng: rand.New(rand.NewPCG(cfg.Seed, 1))}
	defer c.close()
	if err := c.open(ctx); err != nil {
		return nil, err
	}
	step := stepper(cfg.Progress, int64(cfg.Rounds))
	for round := range cfg.Rounds {
		if err := c.round(ctx, round); err != nil {
			return nil, fmt.Errorf("round %d of seed %d: %w", round, cfg.Seed, err)
		}
		step()
	}
	if err := c.refill(ctx); err != nil {
		return nil, fmt.Errorf("filling the tier after %d crashes of seed %d: %w", cfg.Rounds, cfg.Seed, err)
	}
	return c.report(time.Since(start)), nil
}

// crashes is one run.
type crashes struct {
	cfg     *CrashConfig
	node    *node
	ledger  *ledger
	tally   tally
	rng     *rand.Rand
	engines []*engine
	next    uint64 // number of the next block that is named

	checked, recovered, lostDurable, leaked int64
}

func (c *crashes) open(ctx context.Context) error {
	for i := range crashWriters {
		cl, err := client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: c.node.daemon.Socket(), Engine: fmt.Sprintf("bench-%d", i), StagingBytes: 4 << 20})
		if err != nil {
			return err
		}
		e := &engine{client: cl, content: Content{Seed: c.cfg.Seed}, ledger: c.ledger, tally: &c.tally, parts: len(crashPages)}
		c.engines = append(c.engines, e)
		if e.ns, err = cl.RegisterNamespace(ctx, namespaceOf("crash", 16, crashPages...)); err != nil {
			return err
		}
	}
	return nil
}

func (c *crashes) close() {
	for _, e := range c.engines {
		e.client.Close() //nolint:errcheck // the workload is over
	}
}

// round loads the node for a random time, kills it, starts it again and audits.
func (c *crashes) round(ctx context.Context, round int) error {
	if err := c.dropOldest(ctx); err != nil {
		return err
	}
	load := crashMinLoad + time.Duration(c.rng.Int64N(int64(crashMaxLoad-crashMinLoad)))
	loadCtx, stop := context.WithCancel(ctx)
	defer stop()
	var writers sync.WaitGroup
	for i, e := range c.engines {
		rng := rand.New(rand.NewPCG(c.cfg.Seed, uint64(2+round*crashWriters+i)))
		first := c.next + uint64(i)<<40                        // writers name blocks of their own
		writers.Go(func() { c.write(loadCtx, e, rng, first) }) // owner: round; ends with loadCtx or the node
	}
	select {
	case <-time.After(load):
	case <-ctx.Done():
	}
	c.node.fall()
	err := c.node.crash(ctx, nil)
	stop()
	writers.Wait()
	c.next += 1 << 20
	if err != nil {
		return err
	}
	for _, e := range c.engines {
		if err := ready(ctx, e, namespaceOf("crash", 16, crashPages...)); err != nil {
			return err
		}
	}
	c.node.recovered()
	return c.audit(ctx)
}

// write stores chains until the node dies: some as durable, some filled and left
// open for a while before they are aborted.
func (c *crashes) write(ctx context.Context, e *engine, rng *rand.Rand, first uint64) {
	var left *client.Attempt
	most := uint64(c.cfg.Node.NVMe / crashWritten / crashBlockSize / crashWriters)
	for end := first + most; first+crashChain <= end; first += crashChain {
		ch := &chain{names: make([]paging.BlockName, crashChain), blockTokens: 16, tokens: 16 * crashChain}
		for i := range ch.names {
			ch.names[i] = TraceBlock(first + uint64(i))
		}
		var err error
		m := c.node.mark()
		switch rng.IntN(8) {
		case 0, 1:
			if left != nil { // staging comes back when an attempt ends, not before
				err = left.Abort(ctx)
			}
			if err == nil {
				left, err = e.abandon(ctx, ch.names)
			}
		case 2, 3, 4:
			ch.durable = true
			fallthrough
		default:
			err = e.store(ctx, ch, 0)
		}
		if err == nil {
			continue
		}
		if ctx.Err() == nil && !c.node.wasDown(m) {
			c.tally.failed.Add(1)
			c.tally.note("write: %v", err)
		}
		return
	}
}

// abandon fills blocks that are never committed. Their ledger has no entry: if
// the node ever serves one it is a phantom.
func (e *engine) abandon(ctx context.Context, names []paging.BlockName) (*client.Attempt, error) {
	a, err := e.client.Reserve(ctx, client.ReserveRequest{Namespace: e.ns, Names: names, Timeout: reserveTime, TTL: time.Second})
	if err != nil {
		return nil, err
	}
	for row := range a.Rows() {
		for part := range e.parts {
			e.content.Fill(a.Page(row, part), e.page(names[a.Block(row)], part))
		}
	}
	e.ledger.abandon(names)
	return a, nil
}

// dropOldest keeps what is alive under its share of the budget.
func (c *crashes) dropOldest(ctx context.Context) error {
	most := int(c.cfg.Node.NVMe / crashAlive / crashBlockSize)
	names := c.ledger.forgetAbove(most)
	return c.drop(ctx, names)
}

func (c *crashes) drop(ctx context.Context, names []paging.BlockName) error {
	if len(names) == 0 {
		return nil
	}
	_, err := c.engines[0].client.Drop(ctx, c.engines[0].ns, names)
	return err
}

// audit reads back everything that was committed, and asks for what never was.
func (c *crashes) audit(ctx context.Context) error {
	e := c.engines[0]
	names, _ := c.ledger.all()
	recovered, lost, err := e.audit(ctx, names, auditBlocks)
	if err != nil {
		return fmt.Errorf("reading back: %w", err)
	}
	c.checked += int64(len(names))
	c.recovered += recovered
	c.lostDurable += lost
	never := c.ledger.neverCommitted(crashProbes)
	for range crashProbes {
		never = append(never, TraceBlock(1<<63+c.rng.Uint64N(1<<40)))
	}
	lease, err := e.client.Fetch(ctx, client.FetchRequest{Namespace: e.ns, Names: never, Mode: client.ModeSet, Timeout: fetchTime})
	if err != nil {
		return fmt.Errorf("asking for blocks that were never committed: %w", err)
	}
	for row := range lease.Rows {
		if lease.Tiers[row] != client.TierNone {
			c.tally.phantom.Add(1)
			c.tally.note("block %s was never committed and is served from %v", never[row].Short(), lease.Tiers[row])
		}
	}
	return lease.Release(ctx)
}

// refillShare of the NVMe budget must be writable once everything was dropped:
// the rest is slack of slots and of segments that are not full.
const refillShare = 0.8

// refill drops everything and fills the tier with durable blocks again: space
// that a crash leaked is missing then.
func (c *crashes) refill(ctx context.Context) error {
	if err := c.drop(ctx, c.ledger.forgetAbove(0)); err != nil {
		return err
	}
	e := c.engines[0]
	want := int(refillShare * float64(c.cfg.Node.NVMe) / crashBlockSize)
	for n := 0; n < want; n += crashChain {
		ch := &chain{durable: true}
		for i := range crashChain {
			ch.names = append(ch.names, TraceBlock(c.next+uint64(n+i)))
		}
		if err := e.store(ctx, ch, 0); err != nil {
			return err
		}
	}
	names, durable := c.ledger.all()
	recovered, _, err := e.audit(ctx, names, auditBlocks)
	missing := int64(len(names)) - min(recovered, int64(durable))
	c.leaked = missing * crashBlockSize
	return err
}

func (c *crashes) report(took time.Duration) *CrashReport {
	t := &c.tally
	return &CrashReport{
		Seed: c.cfg.Seed, Rounds: c.cfg.Rounds,
		CommittedBlocks: t.committed.Load(), DurableBlocks: t.durable.Load(), LostDurableBlocks: c.lostDurable,
		CheckedBlocks: c.checked, RecoveredBlocks: c.recovered,
		WrongPages: t.wrong.Load(), LostPages: t.lost.Load(), CorruptPages: t.corrupt.Load(), PhantomBlocks: t.phantom.Load(),
		LeakedBytes: c.leaked, FailedRequests: t.failed.Load(),
		RecoveryMS: float64(c.node.worst.Microseconds()) / 1e3, Seconds: took.Seconds(), FirstErrors: t.errors(),
	}
}

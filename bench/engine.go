package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// Times that the node may take for the requests of a workload. A slower answer
// is a shortfall or a failed request, and counted.
const (
	fetchTime   = 10 * time.Second
	reserveTime = 5 * time.Second
	requestTime = time.Minute
	// stallTime is far above what an engine would wait for a silent node: on a
	// busy machine a workload shall measure the node, not the client's breaker.
	stallTime = 5 * time.Second
)

// engine plays an inference engine: it takes what the node has of a request's
// blocks, checks every byte in place, "computes" the rest and stores it. It
// holds the lease until the rest is stored, as an engine does, and then checks
// what it read once more. One goroutine uses an engine.
type engine struct {
	client  *client.Client
	ns      paging.NamespaceID
	content Content
	ledger  *ledger
	tally   *tally
	parts   int                // parts of the layout: every block has a page of each
	private bool               // pages come in a stream, not in place
	wanted  client.Tier        // that pages are fetched to
	decoder *decoder           // nil: nothing is decoded
	stored  []paging.BlockName // that were committed through it
}

func (e *engine) page(name paging.BlockName, part int) paging.PageID {
	return paging.PageID{BlockID: paging.BlockID{Namespace: e.ns, Name: name}, Part: part}
}

// chain is the blocks of one request.
type chain struct {
	names       []paging.BlockName
	tokens      int64 // of the request
	blockTokens int64
	durable     bool // commit as durable
	decode      bool // attend to what was fetched
}

// chain is the blocks of request i; each durableEvery-th commits as durable, 0: none.
func (t *Trace) chain(i, blockTokens, durableEvery int) *chain {
	req := &t.Requests[i]
	c := &chain{tokens: req.InputTokens, blockTokens: int64(blockTokens)}
	c.durable = durableEvery > 0 && i%durableEvery == 0
	for _, id := range req.Blocks {
		c.names = append(c.names, TraceBlock(id))
	}
	return c
}

// play does one request of a node that may be killed meanwhile, and puts it into
// one of three classes. It reports whether it was served.
func (e *engine) play(ctx context.Context, n *node, c *chain) bool {
	m := n.mark()
	err := e.serve(ctx, c)
	switch {
	case err == nil:
		e.tally.served.Add(1)
	case errors.Is(err, paging.ErrUnavailable) && n.wasDown(m):
		e.tally.unavailable.Add(1)
	default:
		e.tally.failed.Add(1)
		e.tally.note("request: %v", err)
	}
	return err == nil
}

// serve does one request and reports what went wrong, if anything did. Hits
// count when they were verified, whatever happens later.
func (e *engine) serve(ctx context.Context, c *chain) error {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	e.tally.blocks.Add(int64(len(c.names)))
	e.tally.tokens.Add(c.tokens)
	prefix, err := e.client.Lookup(ctx, e.ns, c.names, 0)
	if err != nil {
		return err
	}
	if prefix.Usable == 0 {
		return e.store(ctx, c, 0)
	}
	lease, err := e.fetch(ctx, c.names[:prefix.Usable])
	if err != nil {
		return err
	}
	defer lease.ReleaseAsync() // if what follows fails
	hits := e.check(lease, c.names)
	e.tally.hitBlocks.Add(int64(hits))
	e.tally.hitTokens.Add(min(c.blockTokens*int64(hits), c.tokens))
	for _, t := range lease.Tiers[:hits] {
		e.tally.hitTier[t].Add(1)
	}
	if c.decode && e.decoder != nil {
		if err := e.decodeLease(ctx, lease, c.names[:hits]); err != nil {
			return err
		}
	}
	if err := e.store(ctx, c, hits); err != nil {
		return err
	}
	e.recheck(lease, c.names[:hits])
	if err := lease.Release(ctx); err != nil {
		e.tally.lost.Add(1)
		return err
	}
	return nil
}

func (e *engine) fetch(ctx context.Context, names []paging.BlockName) (*client.Lease, error) {
	start := time.Now()
	lease, err := e.client.Fetch(ctx, client.FetchRequest{Namespace: e.ns, Names: names, Wanted: e.wanted, Timeout: fetchTime})
	if err != nil {
		return nil, err
	}
	e.tally.fetch.Add(time.Since(start))
	e.countShortfalls(lease)
	return lease, nil
}

func (e *engine) countShortfalls(lease *client.Lease) {
	for _, s := range lease.Shortfalls {
		if s.Reason == client.ReasonCorrupt || s.Reason == client.ReasonIdentity {
			e.tally.corrupt.Add(int64(s.Count))
		}
	}
}

// check compares the granted prefix with what it must be and returns how many
// leading blocks are right.
func (e *engine) check(lease *client.Lease, names []paging.BlockName) int {
	for row := range lease.Usable {
		if !e.checkBlock(lease, row, names[row]) {
			return row
		}
	}
	return lease.Usable
}

// checkBlock compares the pages of one row.
func (e *engine) checkBlock(lease *client.Lease, row int, name paging.BlockName) bool {
	for part := range e.parts {
		view, ok := lease.Page(row, part)
		if !ok {
			return false
		}
		n := int64(len(view.Bytes()))
		if !e.judgePage(view, name, part) {
			return false
		}
		if e.private {
			e.tally.read.Add(n)
		} else {
			e.tally.inPlace.Add(n)
		}
	}
	if e.ledger.phantom(name) {
		e.tally.phantom.Add(1)
		e.tally.note("block %s was served and never committed", name.Short())
		return false
	}
	return true
}

// judgePage reads one page and closes its view.
func (e *engine) judgePage(view client.View, name paging.BlockName, part int) bool {
	at := e.content.Check(view.Bytes(), e.page(name, part))
	if err := view.Close(); err != nil {
		// A leased page is never reused under an attachment that lives.
		e.tally.lost.Add(1)
		e.tally.note("block %s changed under its lease: %v", name.Short(), err)
		return false
	}
	if at >= 0 {
		e.tally.wrong.Add(1)
		e.tally.note("block %s part %d: wrong bytes at offset %d", name.Short(), part, at)
		return false
	}
	return true
}

// recheck reads the verified pages once more before they are given back. A lease
// that ended meanwhile has no views and nothing to say.
func (e *engine) recheck(lease *client.Lease, names []paging.BlockName) {
	for row, name := range names {
		for part := range e.parts {
			view, ok := lease.Page(row, part)
			if !ok {
				return
			}
			e.judgePage(view, name, part)
		}
	}
}

// store writes the blocks from one position on, in rounds of what the staging
// holds.
func (e *engine) store(ctx context.Context, c *chain, from int) error {
	for next := from; next < len(c.names); {
		done, err := e.storeRound(ctx, c, next)
		if err != nil {
			return err
		}
		if done == 0 {
			e.tally.refused.Add(int64(len(c.names) - next))
			return nil
		}
		next += done
	}
	return nil
}

// storeRound stores a leading part of the blocks from next on and returns how
// many are decided; 0: there is no room.
func (e *engine) storeRound(ctx context.Context, c *chain, next int) (decided int, err error) {
	names := c.names[next:]
	a, err := e.client.Reserve(ctx, client.ReserveRequest{Namespace: e.ns, Names: names, First: next, Timeout: reserveTime})
	if err != nil {
		return 0, err
	}
	defer a.Abort(context.WithoutCancel(ctx)) //nolint:errcheck // its deadline ends it otherwise
	for decided < len(a.Outcomes) && settled(a.Outcomes[decided]) {
		decided++
	}
	if decided == 0 && a.Outcomes[0] == client.OutcomeStagingFull {
		return 0, fmt.Errorf("no staging for one page: %w", paging.ErrNoSpace)
	}
	if a.Rows() == 0 {
		return decided, nil
	}
	bytes := e.fill(a, names)
	start := time.Now()
	outcomes, err := a.Commit(ctx, client.CommitOptions{Durable: c.durable})
	if err != nil {
		return 0, err
	}
	e.tally.commit.Add(time.Since(start))
	if e.private {
		e.tally.written.Add(bytes)
	} else {
		e.tally.staged.Add(bytes)
	}
	return decided, e.judge(a, names, outcomes, c.durable)
}

// settled reports whether nothing more is to be done for a block of a Reserve
// once its granted rows are committed.
func settled(o client.Outcome) bool {
	switch o {
	case client.OutcomeGranted, client.OutcomeExists, client.OutcomeInFlight, client.OutcomeRepeated:
		return true
	default:
		return false
	}
}

func (e *engine) fill(a *client.Attempt, names []paging.BlockName) (bytes int64) {
	for row := range a.Rows() {
		name := names[a.Block(row)]
		for part := range e.parts {
			page := a.Page(row, part)
			e.content.Fill(page, e.page(name, part))
			bytes += int64(len(page))
		}
		e.ledger.willCommit(name)
	}
	return bytes
}

// judge enters what a commit answered.
func (e *engine) judge(a *client.Attempt, names []paging.BlockName, outcomes []client.Outcome, durable bool) error {
	for row, o := range outcomes {
		name := names[a.Block(row)]
		switch o {
		case client.OutcomeDuplicateDivergent:
			// Every writer of this run fills the same bytes.
			e.tally.wrong.Add(1)
			e.tally.note("block %s: the node says that other bytes are stored", name.Short())
		case client.OutcomeCommitted, client.OutcomeNotDurable, client.OutcomeDuplicate:
			e.ledger.didCommit(name, durable && o == client.OutcomeCommitted)
			e.stored = append(e.stored, name)
			e.tally.committed.Add(1)
			if durable && o == client.OutcomeCommitted {
				e.tally.durable.Add(1)
			}
		default:
			return fmt.Errorf("commit of block %s: %v", name.Short(), o)
		}
	}
	return nil
}

// audit fetches each block by itself, after a restart, and returns how
// many are there and right, and how many durable ones are absent without having
// been found corrupt.
func (e *engine) audit(ctx context.Context, names []paging.BlockName, batch int) (recovered, lostDurable int64, err error) {
	for len(names) > 0 && err == nil {
		n := min(batch, len(names))
		var r, l int64
		r, l, err = e.auditBatch(ctx, names[:n])
		recovered, lostDurable, names = recovered+r, lostDurable+l, names[n:]
	}
	return recovered, lostDurable, err
}

func (e *engine) auditBatch(ctx context.Context, names []paging.BlockName) (recovered, lostDurable int64, err error) {
	lease, err := e.client.Fetch(ctx, client.FetchRequest{Namespace: e.ns, Names: names, Mode: client.ModeSet, Timeout: fetchTime})
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, lease.Release(ctx)) }()
	e.countShortfalls(lease)
	damaged := make([]bool, len(names))
	for _, s := range lease.Shortfalls {
		for i := range s.Count {
			damaged[s.Block+i] = s.Reason == client.ReasonCorrupt || s.Reason == client.ReasonIdentity
		}
	}
	for row, name := range names {
		switch {
		case row < lease.Rows && lease.Tiers[row] != client.TierNone:
			if e.checkBlock(lease, row, name) {
				recovered++
			}
		case e.ledger.isDurable(name) && !damaged[row]:
			lostDurable++
			e.tally.note("block %s was acknowledged as durable and is gone", name.Short())
		}
	}
	return recovered, lostDurable, nil
}

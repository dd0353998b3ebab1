package server

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// maxPrefetches bounds the prefetches of one attachment whose deadline has not
// passed.
const maxPrefetches = 1024

// prefetch is one ticket. The hierarchy brings the pages up and holds them until
// they are used or its deadline; one goroutine tells the engine what is ready.
// Guarded by its attachment's mu, except promotion and cancel.
type prefetch struct {
	promotion *tier.Promotion
	cancel    context.CancelFunc
	deadline  time.Time
	quiet     bool // the client was told that there is nothing to wait for
	fresh     rpc.Progress
	told      bool // the end was sent
}

// end gives up what was not brought up or not used.
func (p *prefetch) end() {
	p.cancel()
	p.promotion.Cancel()
}

// Prefetch implements rpc.Writer.
func (a *attachment) Prefetch(_ context.Context, r *rpc.PrefetchRequest) (rpc.PrefetchResult, error) { //nolint:contextcheck // it outlives the call: the attachment bounds it
	if a.node.stopping.Load() {
		return rpc.PrefetchResult{}, errStopping
	}
	layout, err := a.namespace(r.Namespace)
	if err != nil {
		return rpc.PrefetchResult{}, err
	}
	parts, err := partsOf(layout, r.Parts, layout.AllParts())
	if err != nil {
		return rpc.PrefetchResult{}, err
	}
	if err := a.mayPrefetch(); err != nil {
		return rpc.PrefetchResult{}, err
	}
	rowBytes := int64(0)
	for i := range layout.Parts {
		if parts.Has(i) {
			rowBytes += roundUnit(int64(layout.Parts[i].PageBytes))
		}
	}
	names := r.Names[:a.node.takePrefetch(len(r.Names), rowBytes)]
	if len(names) == 0 {
		return rpc.PrefetchResult{Refused: len(r.Names)}, nil
	}
	left := int64(len(names)) * rowBytes // what is still taken of the budget
	defer func() { a.node.prefetching.Add(-left) }()
	deadline := time.Now().Add(r.Timeout)
	promotion, err := a.node.hier.Promote(tier.PromoteRequest{Namespace: r.Namespace, Names: names, First: r.First, Parts: parts, Priority: r.Priority, Deadline: deadline}) //nolint:contextcheck // what it brings outlives the call, bounded by the deadline
	if err != nil {
		return rpc.PrefetchResult{}, err
	}
	ticket := a.node.nextLease()
	ctx, cancel := context.WithDeadline(a.life, deadline)
	p := &prefetch{promotion: promotion, cancel: cancel, deadline: deadline, quiet: promotion.Admitted == 0, fresh: rpc.Progress{Ticket: ticket}}
	a.mu.Lock()
	if a.state != attached || a.err != nil {
		a.mu.Unlock()
		p.end()
		return rpc.PrefetchResult{}, errDetached
	}
	a.prefetches[ticket] = p
	a.mu.Unlock()
	res := rpc.PrefetchResult{Ticket: ticket, Admitted: promotion.Admitted, Refused: promotion.Refused + len(r.Names) - len(names)}
	if p.quiet {
		res.Ticket = 0
		return res, nil
	}
	bytes := int64(promotion.Admitted) * rowBytes
	left -= bytes
	// Owner: the node; exits with the prefetch; bound: maxPrefetches an attachment.
	a.node.workers.Go(func() {
		a.watch(ctx, p)
		a.node.prefetching.Add(-bytes)
	})
	return res, nil
}

// takePrefetch takes from the budget of what prefetches have in flight, for as
// many of so many rows as it has room for.
func (n *node) takePrefetch(rows int, rowBytes int64) int {
	for {
		used := n.prefetching.Load()
		fit := min(int64(rows), max(0, int64(n.cfg.PrefetchBytes)-used)/rowBytes)
		if n.prefetching.CompareAndSwap(used, used+fit*rowBytes) {
			return int(fit)
		}
	}
}

func (a *attachment) mayPrefetch() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state != attached || a.err != nil:
		return errDetached
	case len(a.prefetches) >= maxPrefetches:
		return kvstatus.WithRetry(fmt.Errorf("%d prefetches run, the most of an attachment: cancel some, or wait: %w", maxPrefetches, paging.ErrUnavailable), time.Second)
	}
	return nil
}

// watch passes on what becomes ready until the prefetch ends.
func (a *attachment) watch(ctx context.Context, p *prefetch) {
	for {
		ready, done, reason, err := p.promotion.Next(ctx)
		if err != nil { // its time is over: what no reader began is not brought up any more
			p.promotion.Cancel()
			done, reason = true, tier.Cancelled
			if ctx.Err() == context.DeadlineExceeded {
				reason = tier.Timeout
			}
		}
		a.mu.Lock()
		for _, row := range ready {
			p.fresh.Ready = append(p.fresh.Ready, uint32(row))
		}
		p.fresh.Done, p.fresh.Reason = done, uint8(reason)
		a.outbox.progress = true
		a.notifyLocked()
		a.mu.Unlock()
		if done {
			return
		}
	}
}

// progressLocked takes what is to be told of the attachment's prefetches.
// Requires mu.
func (a *attachment) progressLocked(dst []rpc.Progress) []rpc.Progress {
	if !a.outbox.progress {
		return dst
	}
	for _, p := range a.prefetches {
		if p.quiet || p.told || len(p.fresh.Ready) == 0 && !p.fresh.Done {
			continue
		}
		dst = append(dst, p.fresh)
		p.told = p.fresh.Done
		p.fresh.Ready = nil
	}
	return dst
}

// Cancel implements rpc.Writer. The end of a prefetch that was cancelled is told
// like any other.
func (a *attachment) Cancel(ticket uint64) {
	a.mu.Lock()
	p, ok := a.prefetches[ticket]
	a.mu.Unlock()
	if ok {
		p.end()
	}
}

// sweepPrefetchesLocked forgets the prefetches whose time is over: what they
// hold ends by itself then. Requires mu.
func (a *attachment) sweepPrefetchesLocked(now time.Time) {
	for ticket, p := range a.prefetches {
		if now.After(p.deadline) && (p.told || p.quiet) {
			p.cancel()
			delete(a.prefetches, ticket)
		}
	}
}

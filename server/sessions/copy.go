package sessions

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/tier"
)

// batch is what one call copies: blocks of which the same parts are lacking.
type batch struct {
	blocks []cluster.Block
	parts  paging.PartSet
	bytes  int64
}

// batches cuts what is lacking into calls, the newest blocks last.
func batches(ns *paging.Namespace, l *lack, most int64) (out []batch) {
	for _, i := range l.rows {
		bytes := int64(ns.Layout.BytesOf(l.parts[i])) //nolint:gosec // a page fits memory
		n := len(out) - 1
		if n < 0 || out[n].parts != l.parts[i] || out[n].bytes+bytes > most || len(out[n].blocks) >= pushBlocks {
			out = append(out, batch{parts: l.parts[i]})
			n++
		}
		out[n].blocks = append(out[n].blocks, l.blocks[i])
		out[n].bytes += bytes
	}
	return out
}

// copy has the target copy what it lacks by the last Ask.
func (v *move) copy(ctx context.Context, a migrate.Action) {
	m := v.m
	m.moves.mu.Lock()
	l := v.lack
	m.moves.mu.Unlock()
	e := migrate.Event{Kind: migrate.Copied, Number: a.Number}
	begun := time.Now()
	sent, err := v.push(ctx, &l)
	e.Bytes = sent
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		m.log.Warn("copying a session", "session", v.full, "to", v.to.Short(), "err", err)
		e.Kind, e.Failure = migrate.Failed, failureOf(err)
		if errors.Is(err, errUnreadable) {
			e.Failure = migrate.Unreadable
		}
	}
	if took := time.Since(begun); took > 0 && sent > pushBytes/4 {
		m.moves.mu.Lock()
		m.moves.speeds[v.to] = float64(sent) / took.Seconds()
		m.moves.mu.Unlock()
	}
	v.tell(e)
}

// errUnreadable: a page could not be read here; it is dropped by whoever found that.
var errUnreadable = errors.New("a page could not be read at the source")

// push copies batch by batch and returns the bytes that arrived; the error is that of
// the first batch that did not arrive whole.
func (v *move) push(ctx context.Context, l *lack) (sent int64, err error) {
	m := v.m
	x := m.record(v.full)
	if x == nil {
		return 0, notFound(v.full)
	}
	ns, err := m.layout(namespaceOf(x))
	if err != nil {
		return 0, err
	}
	wanted := v.opts.wanted
	if wanted == tier.None {
		wanted = tier.RAM
	}
	var mu sync.Mutex
	var calls sync.WaitGroup
	slots := make(chan struct{}, pushesAhead)
	for _, b := range batches(ns, l, min(v.pace.Step(pushBytes), m.moves.pace.Step(pushBytes))) {
		if v.pace.Wait(ctx, b.bytes) != nil || m.moves.pace.Wait(ctx, b.bytes) != nil {
			break
		}
		slots <- struct{}{} // whoever has it ends within pushWithin
		mu.Lock()
		failed := err
		mu.Unlock()
		if failed != nil {
			break
		}
		calls.Go(func() { // owner: this call; exits within pushWithin; bound: pushesAhead
			defer func() { <-slots }()
			within, cancel := context.WithTimeout(ctx, pushWithin)
			defer cancel()
			bytes, why, e := m.cluster.Push(within, v.to, ns, b.blocks, b.parts, wanted)
			for i := range why {
				if e == nil {
					e = pushError(why[i])
				}
			}
			mu.Lock()
			defer mu.Unlock()
			sent += bytes
			if err == nil {
				err = e
			}
		})
	}
	calls.Wait()
	return sent, err
}

// pushError is why a block did not arrive.
func pushError(r tier.Reason) error {
	switch r {
	case tier.NoReason:
		return nil
	case tier.NoSpace:
		return paging.ErrNoSpace
	case tier.OverQuota:
		return paging.ErrOverQuota
	case tier.NotFound, tier.PartMissing, tier.Corrupt, tier.Identity, tier.IOError:
		return errUnreadable
	}
	return paging.ErrUnavailable
}

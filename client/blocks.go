package client

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// writing reports whether attempts are open or being reserved.
func (l *link) writing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.attempts)+l.reserving > 0
}

// stagingPoll bounds the wait for staging that this process gives back: another
// process cannot use it, so the wait is for this one's own attempts.
const stagingPoll = 20 * time.Millisecond

// WriteBlocks writes blocks in as many rounds as the staging needs: reserve,
// fill, commit. fill is called for each page that the node wants, one at a time,
// with the block's index in r.Names, the part, and the memory to fill to its
// end; it may not keep dst. An error of fill aborts the round and is returned.
//
// The answer has one Outcome per block: what Commit said, or why the block was
// not written (OutcomeExists, OutcomeInFlight, OutcomeRepeated are as good as
// written; OutcomeNoSpace and OutcomeOverQuota end the call with the rest
// OutcomeNotReached). If the call fails the outcomes tell how far it got.
// ErrNoSpace: the staging is too small for one block. o.Rows is not read.
func (c *Client) WriteBlocks(ctx context.Context, r ReserveRequest, o CommitOptions, fill func(row, part int, dst []byte) error) ([]Outcome, error) {
	o.Rows = nil
	w := &blockWriter{client: c, options: o, fill: fill, outcomes: make([]Outcome, len(r.Names)), ask: askFirst}
	defer w.pass()
	for w.next < len(r.Names) {
		round := r
		round.Names = r.Names[w.next:min(w.next+w.ask, len(r.Names))]
		round.First = r.First + w.next
		if err := w.round(ctx, round); err != nil {
			return w.outcomes, err
		}
		if w.next < len(r.Names) && full(w.outcomes[w.next]) {
			break
		}
	}
	return w.outcomes, nil
}

// askFirst and askLeast bound the blocks of one round: asking for many more than
// the staging takes would send their names over and over.
const (
	askFirst = 1024
	askLeast = 32
)

// blockWriter is one WriteBlocks under way.
type blockWriter struct {
	client   *Client
	options  CommitOptions
	fill     func(row, part int, dst []byte) error
	outcomes []Outcome
	next     int           // first block that is not decided
	ask      int           // blocks of the next round
	turn     chan struct{} // held: this writer is the one that waits for staging
}

// pass lets another writer wait for staging.
func (w *blockWriter) pass() {
	if w.turn != nil {
		<-w.turn
		w.turn = nil
	}
}

func full(o Outcome) bool { return o == OutcomeNoSpace || o == OutcomeOverQuota }

// round writes the leading blocks that have staging, or waits for some.
func (w *blockWriter) round(ctx context.Context, r ReserveRequest) error {
	a, freed, err := w.client.reserveSome(ctx, r)
	if err != nil {
		return err
	}
	defer a.Abort(context.WithoutCancel(ctx)) //nolint:errcheck // its deadline ends it otherwise
	decided := len(a.Outcomes)
	for i, out := range a.Outcomes {
		if out == OutcomeStagingFull || out == OutcomeNotReached || full(out) {
			decided = i
			if full(out) {
				w.outcomes[w.next+i] = out
			}
			break
		}
		if out != OutcomeGranted {
			w.outcomes[w.next+i] = out
		}
	}
	if a.Rows() == 0 && decided == 0 && !full(a.Outcomes[0]) {
		return w.await(ctx, a.link, freed)
	}
	w.pass()
	if err := w.write(ctx, &r, a); err != nil {
		return err
	}
	w.next += decided
	w.ask = max(2*decided, askLeast)
	return nil
}

// write fills and commits the rows of one attempt.
func (w *blockWriter) write(ctx context.Context, r *ReserveRequest, a *Attempt) error {
	if a.Rows() == 0 {
		return nil
	}
	for row := range a.Rows() {
		for part := range paging.MaxParts {
			if dst := a.Page(row, part); dst != nil {
				if err := w.fill(w.next+a.Block(row), part, dst); err != nil {
					return fmt.Errorf("fill block %s: %w", r.Names[a.Block(row)].Short(), err)
				}
			}
		}
	}
	committed, err := a.Commit(ctx, w.options)
	if err != nil {
		return err
	}
	for row, out := range committed {
		w.outcomes[w.next+a.Block(row)] = out
	}
	return nil
}

// reserveSome reserves, and returns what is closed when staging is given back
// after the moment that it was asked for.
func (c *Client) reserveSome(ctx context.Context, r ReserveRequest) (*Attempt, <-chan struct{}, error) {
	l, err := c.up()
	if err != nil {
		return nil, nil, fmt.Errorf("reserve: %w", err)
	}
	l.mu.Lock()
	freed := l.freed
	l.mu.Unlock()
	a, err := c.Reserve(ctx, r)
	return a, freed, err
}

// await waits until another attempt of this client gives staging back. Writers
// take turns: one waits and asks, the others wait for it.
func (w *blockWriter) await(ctx context.Context, l *link, freed <-chan struct{}) error {
	if w.turn != l.turn {
		w.pass()
		select {
		case l.turn <- struct{}{}:
			w.turn = l.turn
			return nil // staging may have been given back meanwhile
		case <-ctx.Done():
			return fmt.Errorf("wait for staging: %w", contextError(ctx))
		case <-l.ctx.Done():
			return fmt.Errorf("wait for staging: %w", l.cause())
		}
	}
	alone := !l.writing()
	timer := time.NewTimer(stagingPoll)
	defer timer.Stop()
	select {
	case <-freed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for staging: %w", contextError(ctx))
	case <-l.ctx.Done():
		return fmt.Errorf("wait for staging: %w", l.cause())
	case <-timer.C:
	}
	if alone && !l.writing() {
		return fmt.Errorf("staging has no room for one block: raise Config.StagingBytes: %w", paging.ErrNoSpace)
	}
	return nil
}

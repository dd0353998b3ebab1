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
	outcomes := make([]Outcome, len(r.Names))
	for next := 0; next < len(r.Names); {
		round := r
		round.Names, round.First = r.Names[next:], r.First+next
		done, err := c.writeRound(ctx, round, o, outcomes[next:], func(row, part int, dst []byte) error {
			return fill(next+row, part, dst)
		})
		if err != nil {
			return outcomes, err
		}
		next += done
		if next < len(r.Names) && full(outcomes[next]) {
			break
		}
	}
	return outcomes, nil
}

func full(o Outcome) bool { return o == OutcomeNoSpace || o == OutcomeOverQuota }

// writeRound writes the leading blocks that have staging and says how many were
// decided.
func (c *Client) writeRound(ctx context.Context, r ReserveRequest, o CommitOptions, outcomes []Outcome, fill func(row, part int, dst []byte) error) (int, error) {
	a, freed, err := c.reserveSome(ctx, r)
	if err != nil {
		return 0, err
	}
	defer a.Abort(context.WithoutCancel(ctx)) //nolint:errcheck // its deadline ends it otherwise
	decided := len(a.Outcomes)
	for i, out := range a.Outcomes {
		if out == OutcomeStagingFull || out == OutcomeNotReached || full(out) {
			decided = i
			if full(out) {
				outcomes[i] = out
			}
			break
		}
		if out != OutcomeGranted {
			outcomes[i] = out
		}
	}
	for row := range a.Rows() {
		for part := range paging.MaxParts {
			if dst := a.Page(row, part); dst != nil {
				if err := fill(a.Block(row), part, dst); err != nil {
					return 0, fmt.Errorf("fill block %s: %w", r.Names[a.Block(row)].Short(), err)
				}
			}
		}
	}
	if a.Rows() > 0 {
		committed, err := a.Commit(ctx, o)
		if err != nil {
			return 0, err
		}
		for row, out := range committed {
			outcomes[a.Block(row)] = out
		}
		return decided, nil
	}
	if decided == 0 && !full(a.Outcomes[0]) {
		return 0, c.awaitStaging(ctx, a.link, freed)
	}
	return decided, nil
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

// awaitStaging waits until another attempt of this client gives staging back.
func (c *Client) awaitStaging(ctx context.Context, l *link, freed <-chan struct{}) error {
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

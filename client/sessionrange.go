package client

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// SessionRange names blocks From to To (0: the end) of a session of the client's tenant,
// at most 65,536 of them: a long conversation is named in a few bytes.
type SessionRange struct {
	Session  string
	From, To uint64
}

func (r *SessionRange) check() error {
	if r.Session == "" || r.To != 0 && r.To <= r.From {
		return fmt.Errorf("blocks %d to %d of session %q: %w", r.From, r.To, r.Session, paging.ErrInvalid)
	}
	return nil
}

func (r *SessionRange) wire() *kvtierv1.SessionRange {
	if r == nil || r.Session == "" {
		return nil
	}
	return &kvtierv1.SessionRange{Session: r.Session, FromBlock: r.From, ToBlock: r.To}
}

// most is how many blocks it names at most.
func (r *SessionRange) most() int {
	if r.To == 0 {
		return paging.MaxCallBlocks
	}
	return int(min(r.To-r.From, paging.MaxCallBlocks))
}

// fits reports whether n things can be one for each of its blocks.
func (r *SessionRange) fits(n int) bool {
	return n > 0 && n <= r.most() && (r.To == 0 || n == r.most())
}

// LookupSession is Lookup of the first blocks of a session (From is 0).
func (c *Client) LookupSession(ctx context.Context, r SessionRange, parts paging.PartSet) (Prefix, error) {
	if err := r.check(); err != nil {
		return Prefix{}, fmt.Errorf("lookup: %w", err)
	}
	p, err := c.lookup(ctx, &kvtierv1.LookupRequest{SessionRange: r.wire(), Parts: uint64(parts)})
	if err == nil && (!r.fits(len(p.Tiers)) || p.Usable > len(p.Tiers)) {
		return Prefix{}, fmt.Errorf("lookup: answer of %d tiers, %d usable for blocks %d to %d: %w", len(p.Tiers), p.Usable, r.From, r.To, paging.ErrInvalid)
	}
	return p, err
}

// RetainRange is Retain of blocks of a session. What the session itself says of its
// blocks is changed by RetainSession.
func (c *Client) RetainRange(ctx context.Context, r SessionRange, how Retention) ([]ItemOutcome, error) {
	retention, err := how.wire()
	if err != nil {
		return nil, fmt.Errorf("retain: %w", err)
	}
	return c.eachOf(ctx, "retain", r, func(ctx context.Context, l *link, w *kvtierv1.SessionRange) ([]byte, error) {
		resp, err := l.pages.Retain(ctx, &kvtierv1.RetainRequest{SessionRange: w, Retention: retention})
		return resp.GetOutcomes(), err
	})
}

// DemoteRange is Demote of blocks of a session.
func (c *Client) DemoteRange(ctx context.Context, r SessionRange, from Tier) ([]ItemOutcome, error) {
	return c.eachOf(ctx, "demote", r, func(ctx context.Context, l *link, w *kvtierv1.SessionRange) ([]byte, error) {
		resp, err := l.pages.Demote(ctx, &kvtierv1.DemoteRequest{SessionRange: w, From: kvtierv1.Tier(from)})
		return resp.GetOutcomes(), err
	})
}

// DropRange is Drop of blocks of a session.
func (c *Client) DropRange(ctx context.Context, r SessionRange) ([]ItemOutcome, error) {
	return c.eachOf(ctx, "drop", r, func(ctx context.Context, l *link, w *kvtierv1.SessionRange) ([]byte, error) {
		resp, err := l.pages.Drop(ctx, &kvtierv1.DropRequest{SessionRange: w})
		return resp.GetOutcomes(), err
	})
}

// PinRange is Pin of blocks of a session.
func (c *Client) PinRange(ctx context.Context, r SessionRange, ttl time.Duration) ([]ItemOutcome, error) {
	return c.eachOf(ctx, "pin", r, func(ctx context.Context, l *link, w *kvtierv1.SessionRange) ([]byte, error) {
		resp, err := l.pages.Pin(ctx, &kvtierv1.PinRequest{SessionRange: w, Ttl: span(ttl)})
		return resp.GetOutcomes(), err
	})
}

// eachOf is each for blocks of a session.
func (c *Client) eachOf(ctx context.Context, verb string, r SessionRange, do func(context.Context, *link, *kvtierv1.SessionRange) ([]byte, error)) ([]ItemOutcome, error) {
	if err := r.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	outcomes, err := c.outcomes(ctx, verb, func(ctx context.Context, l *link) ([]byte, error) { return do(ctx, l, r.wire()) })
	if err == nil && !r.fits(len(outcomes)) {
		return nil, fmt.Errorf("%s: %d outcomes for blocks %d to %d: %w", verb, len(outcomes), r.From, r.To, paging.ErrInvalid)
	}
	return outcomes, err
}

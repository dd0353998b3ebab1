package client

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Retain sets the retention of blocks. One outcome per block.
func (c *Client) Retain(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, r Retention) ([]ItemOutcome, error) {
	retention, err := r.wire()
	if err != nil {
		return nil, fmt.Errorf("retain: %w", err)
	}
	return c.each(ctx, "retain", names, func(ctx context.Context, l *link, packed []byte) ([]byte, error) {
		resp, err := l.pages.Retain(ctx, &kvtierv1.RetainRequest{NamespaceId: ns[:], BlockNames: packed, Retention: retention})
		return resp.GetOutcomes(), err
	})
}

// Demote moves blocks out of a tier (TierNone: RAM) once they are in a slower
// one. One outcome per block.
func (c *Client) Demote(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, from Tier) ([]ItemOutcome, error) {
	return c.each(ctx, "demote", names, func(ctx context.Context, l *link, packed []byte) ([]byte, error) {
		resp, err := l.pages.Demote(ctx, &kvtierv1.DemoteRequest{NamespaceId: ns[:], BlockNames: packed, From: kvtierv1.Tier(from)})
		return resp.GetOutcomes(), err
	})
}

// Drop forgets blocks in every tier of the node; ItemDeferred where a lease
// still holds one. One outcome per block.
func (c *Client) Drop(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName) ([]ItemOutcome, error) {
	return c.each(ctx, "drop", names, func(ctx context.Context, l *link, packed []byte) ([]byte, error) {
		resp, err := l.pages.Drop(ctx, &kvtierv1.DropRequest{NamespaceId: ns[:], BlockNames: packed})
		return resp.GetOutcomes(), err
	})
}

// Pin keeps blocks in RAM for ttl (0: unpin), at most 24 h and at most a quarter
// of the tier and of the quota: ItemClipped beyond. One outcome per block.
func (c *Client) Pin(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, ttl time.Duration) ([]ItemOutcome, error) {
	return c.each(ctx, "pin", names, func(ctx context.Context, l *link, packed []byte) ([]byte, error) {
		resp, err := l.pages.Pin(ctx, &kvtierv1.PinRequest{NamespaceId: ns[:], BlockNames: packed, Ttl: span(ttl)})
		return resp.GetOutcomes(), err
	})
}

// each makes one unary call about blocks that answers a byte for each.
func (c *Client) each(ctx context.Context, verb string, names []paging.BlockName, do func(context.Context, *link, []byte) ([]byte, error)) ([]ItemOutcome, error) {
	packed, err := pack(names)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	outcomes, err := c.outcomes(ctx, verb, func(ctx context.Context, l *link) ([]byte, error) { return do(ctx, l, packed) })
	if err == nil && len(outcomes) != len(names) {
		return nil, fmt.Errorf("%s: %d outcomes for %d blocks: %w", verb, len(outcomes), len(names), paging.ErrInvalid)
	}
	return outcomes, err
}

func (c *Client) outcomes(ctx context.Context, verb string, do func(context.Context, *link) ([]byte, error)) ([]ItemOutcome, error) {
	l, err := c.up()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	var outcomes []byte
	err = l.unary(ctx, verb, c.cfg.CallTimeout, func(ctx context.Context) (err error) {
		outcomes, err = do(ctx, l)
		return err
	})
	if err != nil {
		return nil, err
	}
	return octets[ItemOutcome](outcomes), nil
}

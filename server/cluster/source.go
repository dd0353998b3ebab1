package cluster

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/transport"
	"github.com/kvtier/kvtier/tier"
)

// source is what a Node serves to others.
type source Node

// Open implements transport.Source.
func (s *source) Open(_ context.Context, _ placement.NodeID, r *transport.PageRequest) (transport.Pages, error) {
	n := (*Node)(s)
	blocks := make([]tier.BlockParts, len(r.Blocks))
	for i, b := range r.Blocks {
		blocks[i] = tier.BlockParts{Name: b.Name, Parts: b.Parts}
	}
	h := n.tier.Load()
	if h == nil {
		return nil, fmt.Errorf("this node is starting: %w", paging.ErrUnavailable)
	}
	served, err := h.Serve(r.Namespace, blocks)
	if err != nil {
		return nil, err
	}
	p := &pages{request: r, served: served}
	n.checkClaims(r, p)
	return p, nil
}

// checkClaims has the claims of this node compared if it is asked again and again
// for what it has not.
func (n *Node) checkClaims(r *transport.PageRequest, p *pages) {
	claimer := n.claimer.Load()
	if claimer == nil {
		return // nothing is claimed yet
	}
	now := time.Now()
	for i, last := 0, -1; i < r.Len(); i++ {
		block, _, _ := r.At(i)
		if block == last || p.Page(i).Reason != transport.NotFound {
			continue
		}
		last = block
		k := ClaimKey(r.Namespace, r.Blocks[block].Name)
		if !n.hints.absent(k, now) {
			continue
		}
		var holders []directory.Holder
		_, holders = n.replica().Locate([]placement.BlockKey{k}, nil, nil)
		for _, h := range holders {
			if h.Node == n.cfg.ID {
				claimer.Suspect()
				return
			}
		}
	}
}

// Have implements transport.Source.
func (s *source) Have(_ context.Context, _ placement.NodeID, q *transport.HaveRequest) ([]transport.Held, error) {
	h := s.tier.Load()
	if h == nil {
		return nil, fmt.Errorf("this node is starting: %w", paging.ErrUnavailable)
	}
	held, tiers, err := h.Held(q.Namespace, q.Names, q.Parts)
	if err != nil {
		return nil, err
	}
	out := make([]transport.Held, len(held))
	for i := range held {
		out[i] = transport.Held{Parts: held[i], Tier: uint8(tiers[i])}
	}
	return out, nil
}

// maxDoubts bounds the copies that wait to be checked; more are forgotten: whoever
// receives the next damaged one says so again.
const maxDoubts = 64

// Doubt implements transport.Source.
func (s *source) Doubt(_ placement.NodeID, p paging.PageID) {
	select {
	case s.doubts <- p:
	default:
	}
}

// check reads copies that arrived damaged elsewhere.
func (n *Node) check() {
	for {
		select {
		case <-n.ctx.Done():
			return
		case p := <-n.doubts:
			n.tier.Load().Doubt(n.ctx, p)
		}
	}
}

// pages are the pages of one request.
type pages struct {
	request *transport.PageRequest
	served  *tier.Served
}

// Page implements transport.Pages.
func (p *pages) Page(i int) transport.Content {
	block, part, length := p.request.At(i)
	if l := p.served.Layout(); part >= len(l.Parts) || l.Parts[part].PageBytes != uint64(length) {
		return transport.Content{Reason: transport.Mismatch}
	}
	b, sum, disk, why := p.served.Page(block, part)
	return transport.Content{Bytes: b, Sum: sum, Stored: disk, Reason: transport.Reason(why)}
}

// Load implements transport.Pages.
func (p *pages) Load(ctx context.Context, i int, dst []byte) (uint64, error) {
	block, part, length := p.request.At(i)
	if len(dst) != int(length) {
		return 0, fmt.Errorf("%d bytes for a page of %d: %w", len(dst), length, paging.ErrInvalid)
	}
	sum, err := p.served.Load(ctx, block, part, dst)
	if done := tier.Unsettled(err); done != nil {
		err = transport.StillUsed(err, done)
	}
	return sum, err
}

// Close implements transport.Pages.
func (p *pages) Close() { p.served.Close() }

package client

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// ownPages is the memory of an attempt whose pages will be streamed.
type ownPages struct {
	id    paging.NamespaceID
	names []paging.BlockName // of the request
	first int                // position of the first name
	pages [][]byte           // rows × parts; nil where the part has no page
	parts []int              // the parts, rising
	bytes int64
}

// reserveOwn is Reserve for a client that is not co-located: the room is in this
// process, up to Config.StagingBytes for all its attempts. What the node has
// already is not asked for again, where Lookup can tell.
func (l *link) reserveOwn(ctx context.Context, r *ReserveRequest) (*Attempt, error) {
	c := l.client
	ns := c.namespace(r.Namespace)
	if ns == nil {
		return nil, fmt.Errorf("reserve: namespace %s was not registered by this client: %w", r.Namespace.Short(), paging.ErrUnknownNamespace)
	}
	parts := r.Parts
	if parts == 0 {
		parts = ns.Layout.PartsOfRanks(c.cfg.Ranks)
	}
	if !ns.Layout.AllParts().Contains(parts) || parts == 0 {
		return nil, fmt.Errorf("reserve: part set %#x of a layout of %d parts: %w", uint64(parts), len(ns.pageBytes), paging.ErrInvalid)
	}
	a := &Attempt{Outcomes: make([]Outcome, len(r.Names)), Parts: parts, link: l, cols: parts.Len()}
	if err := l.markExisting(ctx, r, ns, a); err != nil {
		return nil, err
	}
	own := &ownPages{id: r.Namespace, names: r.Names, first: r.First}
	for part := range ns.pageBytes {
		if parts.Has(part) {
			own.parts = append(own.parts, part)
		}
	}
	seen := make(map[paging.BlockName]struct{}, len(r.Names))
	for i, name := range r.Names {
		if _, twice := seen[name]; twice {
			a.Outcomes[i] = OutcomeRepeated
		}
		seen[name] = struct{}{}
		if a.Outcomes[i] != OutcomeNotReached {
			continue
		}
		count, bytes := ns.fit(1, r.First+i, parts, &c.staged, c.cfg.StagingBytes)
		if count == 0 {
			a.Outcomes[i] = OutcomeStagingFull
			break
		}
		a.Outcomes[i] = OutcomeGranted
		a.blocks = append(a.blocks, i)
		own.bytes += bytes
		own.grant(ns, r.First+i)
	}
	a.own = own
	return a, a.begin(nil)
}

// grant adds a row: memory for each part that has a page at this position.
func (o *ownPages) grant(ns *namespace, position int) {
	for _, part := range o.parts {
		var page []byte
		if ns.Layout.PagesAt(position, paging.PartSet(0).With(part)) != 0 {
			page = make([]byte, ns.pageBytes[part])
		}
		o.pages = append(o.pages, page)
	}
}

// markExisting marks the blocks that the node has. Lookup tells that for certain
// only where each block has a page of each part; elsewhere the node's answer to
// WritePages does.
func (l *link) markExisting(ctx context.Context, r *ReserveRequest, ns *namespace, a *Attempt) error {
	for part := range ns.Layout.Parts {
		if p := &ns.Layout.Parts[part]; a.Parts.Has(part) && (p.BlocksPerPage > 1 || p.LastBlocks > 0) {
			return nil
		}
	}
	prefix, err := l.client.Lookup(ctx, r.Namespace, r.Names, a.Parts)
	if err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	for i, tier := range prefix.Tiers {
		if tier != TierNone {
			a.Outcomes[i] = OutcomeExists
		}
	}
	return nil
}

// writePages streams the pages of rows, a call for each run of consecutive
// blocks, and returns an outcome per row.
func (a *Attempt) writePages(ctx context.Context, rows []int, durable bool, retention *kvtierv1.Retention) ([]byte, error) {
	var outcomes []byte
	for from := 0; from < len(rows); {
		to := from + 1
		for to < len(rows) && a.blocks[rows[to]] == a.blocks[rows[to-1]]+1 {
			to++
		}
		got, err := a.writeRun(ctx, rows[from:to], durable, retention)
		if err != nil {
			return nil, fmt.Errorf("commit: %w", err)
		}
		if len(got) != to-from {
			return nil, fmt.Errorf("commit: %d outcomes for %d blocks: %w", len(got), to-from, paging.ErrInvalid)
		}
		outcomes = append(outcomes, got...)
		from = to
	}
	return outcomes, nil
}

func (a *Attempt) writeRun(ctx context.Context, rows []int, durable bool, retention *kvtierv1.Retention) ([]byte, error) {
	l, own := a.link, a.own
	first := a.blocks[rows[0]]
	packed, err := pack(own.names[first : first+len(rows)])
	if err != nil {
		return nil, err
	}
	s, bounded := l.pageStream(ctx)
	defer s.close()
	l.called()
	stream, err := l.pages.WritePages(bounded, pageCall)
	if err != nil {
		return nil, s.err(ctx, err)
	}
	header := &kvtierv1.WritePagesHeader{
		NamespaceId: own.id[:], BlockNames: packed, FirstBlock: uint32(own.first + first),
		Parts: uint64(a.Parts), Durable: durable, Retention: retention,
	}
	err = stream.Send(&kvtierv1.WritePagesRequest{Message: &kvtierv1.WritePagesRequest_Header{Header: header}})
	for i := 0; err == nil && i < len(rows); i++ {
		err = a.sendRow(s, stream, rows[i], i)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, s.err(ctx, err)
	}
	resp, err := stream.CloseAndRecv() // tells why, if Send met the end of the stream
	if err != nil {
		return nil, s.err(ctx, err)
	}
	s.came()
	return resp.GetOutcomes(), nil
}

// sendRow sends the pages of one row, which is the block'th of the call.
func (a *Attempt) sendRow(s *pageStream, stream grpc.ClientStream, row, block int) error {
	for col, part := range a.own.parts {
		page := a.own.pages[row*a.cols+col]
		if page == nil {
			continue
		}
		sum := paging.Checksum(page)
		for offset := 0; offset < len(page); offset += kvstatus.MaxChunkBytes {
			out := &outgoing{
				Chunk: kvstatus.Chunk{Block: block, Part: part, Offset: uint64(offset), PageBytes: uint64(len(page)), Sum: sum},
				data:  page[offset:min(offset+kvstatus.MaxChunkBytes, len(page))],
			}
			out.Bytes = uint64(len(out.data))
			if err := stream.SendMsg(out); err != nil {
				return err
			}
			s.sent()
		}
		a.link.client.counts.streamed.Add(int64(len(page)))
	}
	return nil
}

package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// pageStream bounds a stream of pages: by its caller's context, by the most
// that a node allows, and by the time between two pieces.
type pageStream struct {
	cancel context.CancelFunc
	idle   *time.Timer
	limit  time.Duration
	link   *link
}

func (l *link) pageStream(ctx context.Context) (*pageStream, context.Context) {
	ctx, cancel := context.WithTimeout(ctx, kvstatus.MaxPageStream)
	s := &pageStream{cancel: cancel, limit: l.client.cfg.CallTimeout, link: l}
	s.idle = time.AfterFunc(s.limit, cancel)
	return s, ctx
}

// sent says that a piece was taken, came that one arrived.
func (s *pageStream) sent() { s.idle.Reset(s.limit) }

func (s *pageStream) came() {
	s.link.heard.Add(1)
	s.idle.Reset(s.limit)
}

func (s *pageStream) close() {
	s.idle.Stop()
	s.cancel()
}

// err names why the stream of a caller with ctx failed.
func (s *pageStream) err(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return contextError(ctx)
	case s.link.ctx.Err() != nil:
		return s.link.cause()
	case !answered(err) && !errors.Is(kvstatus.Err(err), paging.ErrUnavailable):
		return fmt.Errorf("no progress for %v: %w", s.limit, paging.ErrExpired)
	}
	return kvstatus.Err(err)
}

// fetchBytes is Fetch for a client that is not co-located: the pages are
// received into memory of this process and verified there.
func (l *link) fetchBytes(ctx context.Context, r *FetchRequest) (*Lease, error) {
	ns := l.client.namespace(r.Namespace)
	if ns == nil {
		return nil, fmt.Errorf("fetch: namespace %s was not registered by this client: %w", r.Namespace.Short(), paging.ErrUnknownNamespace)
	}
	parts := r.Parts
	if parts == 0 {
		parts = ns.Layout.AllParts()
	}
	if !ns.Layout.AllParts().Contains(parts) {
		return nil, fmt.Errorf("fetch: part set %#x of a layout of %d parts: %w", uint64(parts), len(ns.pageBytes), paging.ErrInvalid)
	}
	n, bytes := ns.fit(len(r.Names), r.First, parts, &l.client.private, l.client.cfg.PrivateBytes)
	lease := &Lease{Parts: parts, link: l, cols: parts.Len(), bytes: bytes}
	if n < len(r.Names) {
		lease.Shortfalls = []Shortfall{{Block: n, Count: len(r.Names) - n, Reason: ReasonNoSpace}}
	}
	if n == 0 {
		lease.finish()
		return lease, nil
	}
	in := &incoming{lease: lease, ns: ns, first: r.First, names: n, set: r.Mode == ModeSet}
	if err := in.receive(ctx, r); err != nil {
		lease.finish()
		return nil, fmt.Errorf("fetch: %w", err)
	}
	return lease, nil
}

// fit is the number of leading blocks, of n from position first on, whose pages
// fit what most leaves of used, to which their bytes are added.
func (n *namespace) fit(blocks, first int, parts paging.PartSet, used *atomic.Int64, most int64) (int, int64) {
	for {
		was := used.Load()
		var bytes int64
		count := 0
		for ; count < blocks; count++ {
			more := n.blockBytes(first+count, parts)
			if was+bytes+more > most {
				break
			}
			bytes += more
		}
		if used.CompareAndSwap(was, was+bytes) {
			return count, bytes
		}
	}
}

// blockBytes is the size of the pages that lie at one position.
func (n *namespace) blockBytes(position int, parts paging.PartSet) int64 {
	var sum int64
	at := n.Layout.PagesAt(position, parts)
	for part, bytes := range n.pageBytes {
		if at.Has(part) {
			sum += int64(bytes)
		}
	}
	return sum
}

// incoming receives the pages of one Fetch. What the node sends is checked
// against what was asked: a piece that does not fit ends the fetch, a page whose
// checksum is wrong is left out.
type incoming struct {
	lease *Lease
	ns    *namespace
	first int
	names int
	set   bool

	// the page being received
	block, part int
	at          int // index in lease.own
	page        []byte
	done        uint64
	sum         paging.Hasher
	corrupt     []int // blocks

	fault error // what decode found
}

func (in *incoming) receive(ctx context.Context, r *FetchRequest) error {
	l := in.lease.link
	packed, err := pack(r.Names[:in.names])
	if err != nil {
		return err
	}
	s, bounded := l.pageStream(ctx)
	defer s.close()
	l.called()
	stream, err := l.pages.ReadPages(bounded, &kvtierv1.ReadPagesRequest{
		NamespaceId: r.Namespace[:], BlockNames: packed, Parts: uint64(in.lease.Parts), Mode: r.Mode.wire(), FirstBlock: uint32(r.First),
	}, pageCall)
	if err != nil {
		return s.err(ctx, err)
	}
	for {
		err := stream.RecvMsg(in) // pageCodec calls in.decode
		switch {
		case in.fault != nil:
			return in.fault
		case errors.Is(err, io.EOF):
			return in.end()
		case err != nil:
			return s.err(ctx, err)
		}
		s.came()
	}
}

func (in *incoming) header(h *kvtierv1.ReadPagesHeader) error {
	l := in.lease
	usable, rows := int(h.GetUsableBlocks()), int(h.GetUsableBlocks())
	if in.set {
		rows = in.names
	}
	if l.own != nil || usable > in.names || len(h.GetTiers()) != rows && len(h.GetTiers()) != 0 || paging.PartSet(h.GetParts()) != l.Parts {
		return fmt.Errorf("header of %d usable blocks, %d tiers, part set %#x: %w", usable, len(h.GetTiers()), h.GetParts(), paging.ErrInvalid)
	}
	l.Usable, l.UsableTokens, l.Rows = usable, int64(h.GetUsableTokens()), rows
	l.Tiers = octets[Tier](h.GetTiers())
	l.Shortfalls = append(shortfalls(h.GetShortfalls()), l.Shortfalls...)
	l.own = make([]private, rows*l.cols)
	if rows > 0 {
		l.ID = l.link.client.local.Add(1)
	}
	return nil
}

// piece adds a piece, whose bytes come from r, to its page. Pages come whole, one
// after another.
func (in *incoming) piece(c *kvstatus.Chunk, r io.Reader) error {
	block, part := c.Block, c.Part
	if block >= in.lease.Rows || part >= len(in.ns.pageBytes) || !in.lease.Parts.Has(part) {
		return fmt.Errorf("piece of block %d part %d, which was not asked for: %w", block, part, paging.ErrInvalid)
	}
	if c.Offset == 0 {
		want := in.ns.pageBytes[part]
		at := block*in.lease.cols + (in.lease.Parts & paging.AllParts(part)).Len()
		if c.PageBytes != want || in.lease.own[at].data != nil || !in.ns.Layout.PagesAt(in.first+block, in.lease.Parts).Has(part) {
			return fmt.Errorf("page of %d bytes for block %d part %d, unasked or twice: %w", c.PageBytes, block, part, paging.ErrInvalid)
		}
		in.block, in.part, in.at, in.done = block, part, at, 0
		in.page = in.lease.link.client.spare.take(want, in.lease.link.client.private.Load())
		in.sum.Reset()
	}
	if in.page == nil || block != in.block || part != in.part || c.Offset != in.done || c.Bytes == 0 ||
		c.Bytes > kvstatus.MaxChunkBytes || c.Bytes > uint64(len(in.page))-in.done {
		return fmt.Errorf("piece of %d bytes at %d of block %d part %d out of order: %w", c.Bytes, c.Offset, block, part, paging.ErrInvalid)
	}
	into := in.page[in.done : in.done+c.Bytes]
	if _, err := io.ReadFull(r, into); err != nil {
		return errWire
	}
	_, _ = in.sum.Write(into) // never fails
	in.done += c.Bytes
	if in.done < uint64(len(in.page)) {
		return nil
	}
	counts := &in.lease.link.client.counts
	if sum := in.sum.Sum64(); sum == c.Sum {
		in.lease.own[in.at] = private{data: in.page, sum: sum}
		counts.pages.Add(1)
		counts.streamed.Add(int64(in.done))
	} else {
		in.corrupt = append(in.corrupt, block)
		counts.corrupt.Add(1)
	}
	in.page = nil
	return nil
}

// end cuts the lease to what arrived whole.
func (in *incoming) end() error {
	if in.page != nil {
		return fmt.Errorf("stream ended inside the page of block %d part %d: %w", in.block, in.part, paging.ErrInvalid)
	}
	l := in.lease
	for _, block := range in.corrupt {
		l.Shortfalls = append(l.Shortfalls, Shortfall{Block: block, Count: 1, Reason: ReasonCorrupt})
	}
	if in.set {
		l.Usable = 0
		for row := range l.Rows {
			if have := in.have(row); have != 0 && have.Contains(in.ns.Layout.PagesAt(in.first+row, l.Parts)) {
				l.Usable++
			}
		}
		return nil
	}
	usable := in.ns.Layout.UsablePrefix(in.first+l.Usable, l.Parts, func(position int) paging.PartSet {
		if position < in.first {
			return l.Parts
		}
		return in.have(position - in.first)
	}) - in.first
	if usable = max(usable, 0); usable < l.Usable {
		l.Usable, l.Rows = usable, usable
		l.UsableTokens = int64(usable) * int64(in.ns.Layout.BlockTokens)
		if len(l.Tiers) > usable {
			l.Tiers = l.Tiers[:usable]
		}
	}
	return nil
}

// have is the set of the parts of a row that arrived.
func (in *incoming) have(row int) paging.PartSet {
	var have paging.PartSet
	col := 0
	for part := range in.ns.pageBytes {
		if !in.lease.Parts.Has(part) {
			continue
		}
		if in.lease.own[row*in.lease.cols+col].data != nil {
			have = have.With(part)
		}
		col++
	}
	return have
}

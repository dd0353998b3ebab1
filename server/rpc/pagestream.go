package rpc

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// ReadPages streams pages. They stay pinned until the stream ends, which is at
// its deadline at the latest: a peer that does not read is cut there.
func (p *pagesService) ReadPages(m *kvtierv1.ReadPagesRequest, stream grpc.ServerStreamingServer[kvtierv1.ReadPagesResponse]) error {
	ctx := stream.Context()
	caller, err := p.caller(ctx)
	if err != nil {
		return err
	}
	if err := pageStream(ctx); err != nil {
		return err
	}
	reading, err := p.open(ctx, caller, m)
	if err != nil {
		return err
	}
	defer reading.Close()
	res := reading.Result()
	header := &kvtierv1.ReadPagesHeader{
		UsableBlocks: uint32(res.Usable), UsableTokens: res.Tokens, Tiers: res.Tiers,
		Shortfalls: encodeShort(res.Short), Parts: uint64(res.Parts),
	}
	if err := stream.Send(&kvtierv1.ReadPagesResponse{Message: &kvtierv1.ReadPagesResponse_Header{Header: header}}); err != nil {
		return err
	}
	return sendPages(reading, stream)
}

// open decodes the request and pins its pages. The names live only as long as
// this call.
func (p *pagesService) open(ctx context.Context, caller Caller, m *kvtierv1.ReadPagesRequest) (Reading, error) {
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	r := FetchRequest{Parts: paging.PartSet(m.GetParts())}
	err := fill(ctx, p.node, caller.Tenant, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, &m.FirstBlock})
	if err != nil {
		return nil, err
	}
	r.First = int(m.GetFirstBlock())
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.Set, err = setMode(m.GetMode()); err != nil {
		return nil, err
	}
	if r.Names, err = s.packed(m.GetBlockNames()); err != nil {
		return nil, err
	}
	return p.node.Read(ctx, caller, &r)
}

func sendPages(reading Reading, stream grpc.ServerStreamingServer[kvtierv1.ReadPagesResponse]) error {
	pins := &pins{}
	defer pins.wait(stream.Context())
	for page, ok := reading.Next(); ok; page, ok = reading.Next() {
		for offset := 0; offset < len(page.Bytes); offset += kvstatus.MaxChunkBytes {
			data := page.Bytes[offset:min(offset+kvstatus.MaxChunkBytes, len(page.Bytes))]
			err := stream.SendMsg(&piece{data: data, pins: pins, Chunk: kvstatus.Chunk{
				Block: page.Block, Part: page.Part, Offset: uint64(offset), PageBytes: uint64(len(page.Bytes)), Bytes: uint64(len(data)), Sum: page.Sum,
			}})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// WritePages stores streamed pages. A page whose bytes do not match is an
// outcome of its block; the others go on.
func (p *pagesService) WritePages(stream grpc.ClientStreamingServer[kvtierv1.WritePagesRequest, kvtierv1.WritePagesResponse]) error {
	ctx := stream.Context()
	caller, err := p.caller(ctx)
	if err != nil {
		return err
	}
	if err := pageStream(ctx); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return streamEnd(err)
	}
	writing, err := p.begin(ctx, caller, first.GetHeader())
	if err != nil {
		return err
	}
	receiveErr := receivePages(ctx, writing, stream)
	outcomes, closeErr := writing.Close(ctx)
	if err := errors.Join(receiveErr, closeErr); err != nil {
		return err
	}
	return stream.SendAndClose(&kvtierv1.WritePagesResponse{Outcomes: outcomes})
}

func (p *pagesService) begin(ctx context.Context, caller Caller, h *kvtierv1.WritePagesHeader) (Writing, error) {
	if h == nil {
		return nil, invalid("the first message of WritePages is the header")
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	r := WriteRequest{First: int(h.GetFirstBlock()), Parts: paging.PartSet(h.GetParts()), Durable: h.GetDurable()}
	var err error
	if r.Namespace, err = namespaceID(h.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.Retention, err = retention(h.GetRetention()); err != nil {
		return nil, err
	}
	if r.Names, err = s.packed(h.GetBlockNames()); err != nil {
		return nil, err
	}
	return p.node.Write(ctx, caller, &r)
}

// incoming is the page that is being received.
type incoming struct {
	block, part uint32
	bytes       uint64 // length of the whole page
	have        uint64
	dst         []byte // nil: not wanted
	open        bool
}

func receivePages(ctx context.Context, w Writing, stream grpc.ClientStreamingServer[kvtierv1.WritePagesRequest, kvtierv1.WritePagesResponse]) error {
	var page incoming
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if page.open {
				return invalid("the stream ended inside a page: block %d part %d has %d of %d bytes", page.block, page.part, page.have, page.bytes)
			}
			return nil
		}
		if err != nil {
			return err
		}
		c := m.GetChunk()
		if c == nil {
			return invalid("a message of WritePages that is no chunk")
		}
		if err := page.add(ctx, w, c); err != nil {
			return err
		}
	}
}

// add takes one chunk: chunks of a page come in order and without gaps.
func (p *incoming) add(ctx context.Context, w Writing, c *kvtierv1.PageChunk) error {
	switch {
	case len(c.GetData()) == 0 || len(c.GetData()) > kvstatus.MaxChunkBytes:
		return invalid("a chunk of %d bytes, want 1 to %d", len(c.GetData()), kvstatus.MaxChunkBytes)
	case c.GetOffset() == 0:
		dst, err := w.Page(ctx, int(c.GetBlock()), int(c.GetPart()), c.GetPageBytes())
		if err != nil {
			return err
		}
		*p = incoming{block: c.GetBlock(), part: c.GetPart(), bytes: c.GetPageBytes(), dst: dst, open: true}
	case !p.open || c.GetBlock() != p.block || c.GetPart() != p.part || c.GetOffset() != p.have || c.GetPageBytes() != p.bytes:
		return invalid("chunk of block %d part %d at %d does not continue the page before it", c.GetBlock(), c.GetPart(), c.GetOffset())
	}
	if p.have+uint64(len(c.GetData())) > p.bytes {
		return invalid("block %d part %d has more than its %d bytes", p.block, p.part, p.bytes)
	}
	if p.dst != nil {
		copy(p.dst[p.have:], c.GetData())
	}
	p.have += uint64(len(c.GetData()))
	if p.have < p.bytes {
		return nil
	}
	p.open = false
	if p.dst == nil {
		return nil
	}
	return w.Received(ctx, c.GetChecksum())
}

package client

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// RegionPart says where the pages of one part lie in a region: piece j of the page
// of block b begins at Offset + b × BlockStride + j × PieceStride.
type RegionPart struct {
	Part        int
	Offset      int64
	BlockStride int64
	Pieces      int // 0: 1
	PieceStride int64
}

// RegionRequest describes memory of this process on the device of the node's pool:
// an engine's own KV cache.
type RegionRequest struct {
	Namespace paging.NamespaceID
	// File is the memory: for a host device a memfd that nobody can resize (seals
	// F_SEAL_SHRINK and F_SEAL_GROW), for CUDA an exported allocation. Borrowed.
	File   *os.File
	Bytes  int64 // of all of it
	Blocks int
	Parts  []RegionPart
}

// Region is memory of this process that the node copies pages into and out of. It
// ends with its attachment: register again after ErrNotFound.
type Region struct {
	ID   uint32
	link *link
}

// RegisterRegion makes memory known to the node (Config.DevicePool). ErrInvalid if
// a page would not lie inside it.
func (c *Client) RegisterRegion(ctx context.Context, r RegionRequest) (*Region, error) {
	l, err := c.attached("register region")
	if err != nil {
		return nil, err
	}
	req := &kvtierv1.RegisterRegionRequest{Attachment: l.id, Handle: l.handles.Add(1), NamespaceId: r.Namespace[:], Blocks: uint32(r.Blocks)}
	for _, p := range r.Parts {
		req.Parts = append(req.Parts, &kvtierv1.RegionPart{Part: uint32(p.Part), Offset: uint64(p.Offset), BlockStride: uint64(p.BlockStride),
			Pieces: uint32(p.Pieces), PieceStride: uint64(p.PieceStride)})
	}
	if err := l.tether.SendRegion(ctx, paging.ExtentID(req.GetHandle()), r.Bytes, int(r.File.Fd())); err != nil {
		return nil, fmt.Errorf("register region: %w", err)
	}
	var resp *kvtierv1.RegisterRegionResponse
	err = l.unary(ctx, "register region", c.cfg.CallTimeout, func(ctx context.Context) (err error) {
		resp, err = l.pages.RegisterRegion(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &Region{ID: resp.GetRegionId(), link: l}, nil
}

// Drop ends the region: when it returns the node uses the memory no more. The
// attempts that name it have to be over. Idempotent.
func (r *Region) Drop(ctx context.Context) error {
	return r.link.unary(ctx, "drop region", r.link.client.cfg.CallTimeout, func(ctx context.Context) error {
		_, err := r.link.pages.DropRegion(ctx, &kvtierv1.DropRegionRequest{Attachment: r.link.id, RegionId: r.ID})
		return err
	})
}

// FetchIntoRequest asks for pages in blocks of a region.
type FetchIntoRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	First     int
	Parts     paging.PartSet // 0: those of the region
	Region    *Region
	Blocks    []int // of the region, one per name
	Timeout   time.Duration

	// Session names as many blocks of a session of the tenant, from From on, as Blocks
	// has, in place of Names, First and Namespace.
	Session string
	From    uint64
}

// Copied tells what FetchInto copied.
type Copied struct {
	Usable       int // leading blocks that are in the region now
	UsableTokens int64
	Tiers        []Tier
	Shortfalls   []Shortfall
}

// FetchInto copies the pages of the usable prefix into blocks of a region, on the
// device. When it returns they are there; nothing is held. The engine makes sure
// that nothing uses those blocks meanwhile.
func (c *Client) FetchInto(ctx context.Context, r FetchIntoRequest) (*Copied, error) {
	if r.Region == nil || len(r.Blocks) == 0 || r.Session == "" && len(r.Blocks) != len(r.Names) || r.Session != "" && len(r.Names) > 0 {
		return nil, fmt.Errorf("fetch into: %d blocks of the region for %d names and session %q: %w", len(r.Blocks), len(r.Names), r.Session, paging.ErrInvalid)
	}
	l := r.Region.link
	req := &kvtierv1.FetchIntoRequest{Attachment: l.id, Parts: uint64(r.Parts), RegionId: r.Region.ID, RegionBlocks: packBlocks(r.Blocks), Timeout: span(r.Timeout)}
	var err error
	if r.Session != "" {
		req.SessionRange = (&SessionRange{r.Session, r.From, r.From + uint64(len(r.Blocks))}).wire()
	} else if req.BlockNames, err = pack(r.Names); err != nil {
		return nil, fmt.Errorf("fetch into: %w", err)
	} else {
		req.NamespaceId, req.FirstBlock = r.Namespace[:], uint32(r.First)
	}
	var resp *kvtierv1.FetchIntoResponse
	err = l.unary(ctx, "fetch into", r.Timeout+c.cfg.CallTimeout, func(ctx context.Context) (err error) {
		resp, err = l.pages.FetchInto(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &Copied{Usable: int(resp.GetUsableBlocks()), UsableTokens: int64(resp.GetUsableTokens()), Tiers: octets[Tier](resp.GetTiers()), Shortfalls: shortfalls(resp.GetShortfalls())}, nil
}

func packBlocks(blocks []int) []byte {
	b := make([]byte, 0, 4*len(blocks))
	for _, n := range blocks {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	return b
}

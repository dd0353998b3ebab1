package rpc

import (
	"context"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// writeTier checks where pages are to be written.
func writeTier(t kvtierv1.Tier) (uint8, error) {
	switch t {
	case kvtierv1.Tier_TIER_UNSPECIFIED, kvtierv1.Tier_TIER_RAM, kvtierv1.Tier_TIER_HBM:
		return uint8(t), nil
	}
	return 0, invalid("tier is %v: pages are written in TIER_RAM or TIER_HBM", t)
}

// RegisterRegion makes memory of an engine known.
func (p *pagesService) RegisterRegion(ctx context.Context, m *kvtierv1.RegisterRegionRequest) (*kvtierv1.RegisterRegionResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	r := RegionRequest{Handle: m.GetHandle(), Blocks: m.GetBlocks()}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if n := len(m.GetParts()); n > paging.MaxParts {
		return nil, invalid("parts has %d entries, at most %d", n, paging.MaxParts)
	}
	for _, x := range m.GetParts() {
		r.Parts = append(r.Parts, RegionPart{Part: x.GetPart(), Offset: x.GetOffset(), BlockStride: x.GetBlockStride(),
			Pieces: x.GetPieces(), PieceStride: x.GetPieceStride()})
	}
	region, err := att.RegisterRegion(ctx, &r)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.RegisterRegionResponse{RegionId: region}, nil
}

// DropRegion ends a region.
func (p *pagesService) DropRegion(ctx context.Context, m *kvtierv1.DropRegionRequest) (*kvtierv1.DropRegionResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	return &kvtierv1.DropRegionResponse{}, att.DropRegion(m.GetRegionId())
}

// FetchInto copies pages into a region.
func (p *pagesService) FetchInto(ctx context.Context, m *kvtierv1.FetchIntoRequest) (*kvtierv1.FetchIntoResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, &m.FirstBlock}); err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	r := FetchIntoRequest{First: int(m.GetFirstBlock()), Parts: paging.PartSet(m.GetParts()), Region: m.GetRegionId()}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.Timeout, err = duration("timeout", m.GetTimeout(), 0, maxFetchTime); err != nil {
		return nil, err
	}
	if r.Blocks, err = rows(m.GetRegionBlocks()); err != nil {
		return nil, err
	}
	if r.Names, err = s.packed(m.GetBlockNames()); err != nil {
		return nil, err
	}
	bounded := ctx
	if r.Timeout > 0 {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, r.Timeout)
		defer cancel()
	}
	var res FetchResult
	if err := att.FetchInto(bounded, &r, &res); err != nil {
		return nil, err
	}
	return &kvtierv1.FetchIntoResponse{UsableBlocks: uint32(res.Usable), UsableTokens: res.Tokens, Tiers: res.Tiers, Shortfalls: encodeShort(res.Short)}, nil
}

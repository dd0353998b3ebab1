package server

import (
	"context"
	"errors"
	"math/bits"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// FetchInto implements rpc.Reader. The head of the prefix that lies on the device
// is copied there; what follows comes through RAM.
func (a *attachment) FetchInto(ctx context.Context, r *rpc.FetchIntoRequest, res *rpc.FetchResult) error {
	layout, err := a.namespace(r.Namespace)
	if err != nil {
		return err
	}
	reg, err := a.useRegion(r.Region, r.Namespace, r.Parts, r.Blocks, len(r.Names))
	if err != nil {
		return err
	}
	defer a.endUse(reg)
	c := fetchCall{request: &rpc.FetchRequest{}, layout: layout, parts: r.Parts}
	if c.parts == 0 {
		c.parts = reg.parts
	}
	x := &into{attachment: a, region: reg, request: r, call: &c}
	near, err := x.onDevice()
	if err != nil {
		return err
	}
	done := 0
	if near > 0 {
		if done, err = x.fetch(ctx, tier.HBM, r.Names[:near], res); err != nil {
			return err
		}
	}
	if done == len(r.Names) {
		return nil
	}
	x.done = done
	var rest rpc.FetchResult
	if _, err := x.fetch(ctx, tier.RAM, r.Names[done:], &rest); err != nil {
		return err
	}
	res.Parts = rest.Parts
	res.Usable = done + rest.Usable
	res.Tokens = uint64(res.Usable) * uint64(layout.BlockTokens)
	res.Tiers = append(res.Tiers[:min(done, len(res.Tiers))], rest.Tiers...)
	for i := range rest.Short {
		rest.Short[i].Block += done
	}
	res.Short = rest.Short
	return nil
}

// into is one FetchInto.
type into struct {
	*attachment
	region  *region
	request *rpc.FetchIntoRequest
	call    *fetchCall
	done    int // leading blocks that are where they belong
}

// onDevice is how many leading blocks lie on the device. 0 where a part needs the
// last blocks only: which those are depends on how far the rest goes.
func (x *into) onDevice() (int, error) {
	r, c := x.request, x.call
	for i := range c.layout.Parts {
		if c.parts.Has(i) && c.layout.Parts[i].LastBlocks != 0 {
			return 0, nil
		}
	}
	p, err := x.node.hier.Lookup(r.Namespace, r.Names, c.parts)
	if err != nil || r.First != 0 {
		return 0, err
	}
	n := 0
	for n < p.Usable && p.Tiers[n] == tier.HBM {
		n++
	}
	return n, nil
}

// fetch fetches the blocks after those that are done by way of a tier and copies
// them; usable tells how many are there. A damaged page on the device ends them.
func (x *into) fetch(ctx context.Context, by tier.Kind, names []paging.BlockName, res *rpc.FetchResult) (usable int, err error) {
	h, err := x.node.hier.Fetch(ctx, tier.FetchRequest{Namespace: x.request.Namespace, Names: names, First: x.request.First + x.done, Parts: x.call.parts,
		Wanted: by, Resident: by == tier.HBM || x.request.Timeout <= 0})
	if err != nil {
		return 0, err
	}
	defer h.Release()
	fillFetch(x.call, h, res)
	res.Slots = res.Slots[:0]
	bad, err := x.scatter(h, by == tier.HBM)
	return min(h.Usable, bad), err
}

// scatter copies what a hold has into blocks of the region. bad is the first row of
// which a page was damaged on the device.
func (x *into) scatter(h *tier.Hold, device bool) (bad int, err error) {
	var b scattering
	for i, s := range h.Slots {
		row, column := i/h.Columns, i%h.Columns
		ref := h.Ref(row, column)
		if ref == 0 {
			continue
		}
		var page []byte
		if !device {
			ref, page = 0, h.Page(row, column)
		}
		b.pages, b.refs, b.host = append(b.pages, tier.Page{Bytes: s.Bytes, Sum: s.Sum}), append(b.refs, ref), append(b.host, page)
		b.to, b.at = append(b.to, x.region.spans(x.request.Blocks[x.done+row], nth(h.Parts, column))), append(b.at, i)
	}
	errs := make([]error, len(b.pages))
	if len(b.pages) > 0 {
		x.node.hbm.Scatter(b.pages, b.refs, b.host, b.to, errs)
	}
	bad = len(h.Tiers)
	for j, err := range errs {
		if done := tier.Unsettled(err); done != nil {
			select { // the device may still write: nothing is given back before
			case <-done:
			case <-x.node.ctx.Done():
			}
		}
		if row := b.at[j] / h.Columns; device && errors.Is(err, paging.ErrCorrupt) {
			h.Damaged(row, b.at[j]%h.Columns)
			bad, errs[j] = min(bad, row), nil
		}
	}
	return bad, errors.Join(errs...)
}

// scattering is one batch.
type scattering struct {
	pages []tier.Page
	refs  []tier.Ref
	host  [][]byte
	to    [][]tier.Span
	at    []int // index of each page in the slots of the hold
}

// nth is the part that stands in a column.
func nth(parts paging.PartSet, column int) int {
	for range column {
		parts &= parts - 1
	}
	return bits.TrailingZeros64(uint64(parts))
}

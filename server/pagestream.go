package server

import (
	"context"
	"fmt"
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// reading is a pinned set of pages that is streamed. It implements rpc.Reading.
type reading struct {
	node   *node
	hold   *tier.Hold
	result rpc.FetchResult
	row    int
	left   paging.PartSet // parts of the row that were not stepped over
	column int
}

// Read implements rpc.Pages. Half of the time that the stream has is for bringing
// pages up, the rest for sending them.
func (n *node) Read(ctx context.Context, c rpc.Caller, r *rpc.FetchRequest) (rpc.Reading, error) {
	if n.stopping.Load() {
		return nil, errStopping
	}
	layout, err := n.namespace(c.Tenant, r.Namespace)
	if err != nil {
		return nil, err
	}
	call := fetchCall{request: r, layout: layout, first: r.First}
	if call.parts, err = partsOf(layout, r.Parts, layout.AllParts()); err != nil {
		return nil, err
	}
	call.pinned = call.parts
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/2)
		defer cancel()
	}
	h, err := n.hier.Fetch(ctx, call.tierRequest())
	if err != nil {
		return nil, err
	}
	v := &reading{node: n, hold: h, left: h.Parts}
	fillFetch(&call, h, &v.result)
	v.result.Slots = nil
	return v, nil
}

// Result implements rpc.Reading.
func (v *reading) Result() *rpc.FetchResult { return &v.result }

// Next implements rpc.Reading.
func (v *reading) Next() (rpc.Page, bool) {
	for v.row < len(v.hold.Tiers) {
		for v.left != 0 {
			part, column := bits.TrailingZeros64(uint64(v.left)), v.column
			v.left &= v.left - 1
			v.column++
			if b := v.hold.Page(v.row, column); b != nil {
				v.node.counters.readPageBytes.Add(uint64(len(b)))
				sum := v.hold.Slots[v.row*v.hold.Columns+column].Sum
				return rpc.Page{Block: v.row, Part: part, Bytes: b, Sum: sum}, true
			}
		}
		v.row, v.left, v.column = v.row+1, v.hold.Parts, 0
	}
	return rpc.Page{}, false
}

// Close implements rpc.Reading.
func (v *reading) Close() { v.hold.Release() }

// writing stores streamed pages, a block at a time: the pages of one block are
// received into memory inside the RAM budget, checked, and committed together.
// It implements rpc.Writing.
type writing struct {
	node     *node
	request  rpc.WriteRequest
	layout   *paging.Layout
	outcomes []byte
	deadline time.Time
	charged  int64    // bytes taken from the RAM budget
	memory   [][]byte // by part; nil: not written, or not allocated yet

	block   int // the one being received; -1: none
	attempt *tier.Attempt
	want    paging.PartSet // of the block: set aside
	have    paging.PartSet // received and right
	corrupt bool
	part    int    // the page being received
	page    []byte // its memory
}

// Write implements rpc.Pages.
func (n *node) Write(ctx context.Context, c rpc.Caller, r *rpc.WriteRequest) (rpc.Writing, error) {
	if n.stopping.Load() {
		return nil, errStopping
	}
	layout, err := n.namespace(c.Tenant, r.Namespace)
	if err != nil {
		return nil, err
	}
	w := &writing{node: n, request: *r, layout: layout, block: -1, outcomes: make([]byte, len(r.Names)), memory: make([][]byte, len(layout.Parts))}
	if w.request.Parts, err = partsOf(layout, r.Parts, layout.AllParts()); err != nil {
		return nil, err
	}
	if pages := len(r.Names) * w.request.Parts.Len(); pages > paging.MaxCallPages {
		return nil, fmt.Errorf("%d blocks of %d parts are %d pages, at most %d in a call: %w", len(r.Names), w.request.Parts.Len(), pages, paging.MaxCallPages, paging.ErrInvalid)
	}
	w.request.Names = append([]paging.BlockName(nil), r.Names...)
	w.deadline, _ = ctx.Deadline()
	for i := range layout.Parts {
		if w.request.Parts.Has(i) {
			w.charged += int64(layout.Parts[i].PageBytes)
		}
	}
	w.charged = roundUnit(w.charged)
	if err := n.ram.SetAside(w.charged); err != nil {
		return nil, fmt.Errorf("memory to receive a block of %v inside the RAM budget: %w", Size(w.charged), err)
	}
	return w, nil
}

// Page implements rpc.Writing.
func (w *writing) Page(ctx context.Context, block, part int, bytes uint64) ([]byte, error) {
	switch {
	case block < w.block || block >= len(w.outcomes):
		return nil, fmt.Errorf("page of block %d after block %d, of %d named: blocks come in rising order: %w", block, w.block, len(w.outcomes), paging.ErrInvalid)
	case part >= len(w.layout.Parts) || !w.layout.PagesAt(w.request.First+block, w.request.Parts).Has(part):
		return nil, fmt.Errorf("block %d has no page of part %d in this write: %w", block, part, paging.ErrInvalid)
	case bytes != w.layout.Parts[part].PageBytes:
		return nil, fmt.Errorf("a page of %d bytes, part %q has pages of %d: %w", bytes, w.layout.Parts[part].Name, w.layout.Parts[part].PageBytes, paging.ErrInvalid)
	}
	if block != w.block {
		if err := w.finish(ctx); err != nil {
			return nil, err
		}
		if err := w.begin(ctx, block); err != nil {
			return nil, err
		}
	}
	w.part, w.page = part, nil
	if w.want.Has(part) && !w.have.Has(part) {
		if w.memory[part] == nil {
			w.memory[part] = make([]byte, bytes)
		}
		w.page = w.memory[part]
	}
	return w.page, nil
}

// Received implements rpc.Writing.
func (w *writing) Received(_ context.Context, sum uint64) error {
	w.node.counters.writtenPageBytes.Add(uint64(len(w.page)))
	if paging.Checksum(w.page) != sum {
		w.corrupt = true
		w.node.counters.corruptUploads.Add(1)
		return nil
	}
	w.have = w.have.With(w.part)
	return nil
}

// begin sets room aside for the next block.
func (w *writing) begin(ctx context.Context, block int) error {
	w.block = block
	ta, outcomes, _, err := w.node.hier.Reserve(ctx, tier.ReserveRequest{
		Namespace: w.request.Namespace, Names: w.request.Names[block : block+1], First: w.request.First + block,
		Parts: w.request.Parts, Deadline: w.deadline,
	})
	if err != nil {
		return err
	}
	w.outcomes[block] = byte(outcomes[0])
	if ta != nil {
		w.attempt, w.want = ta, ta.Parts(0)
	}
	return nil
}

// finish commits the block that was received, if it is whole and right.
func (w *writing) finish(ctx context.Context) error {
	attempt, block := w.attempt, w.block
	whole := w.have == w.want && !w.corrupt
	corrupt := w.corrupt
	w.attempt, w.want, w.have, w.corrupt = nil, 0, 0, false
	switch {
	case attempt == nil:
		return nil
	case corrupt:
		attempt.Abort()
		w.outcomes[block] = outcomeCorrupt
		return nil
	case !whole:
		attempt.Abort()
		w.outcomes[block] = byte(tier.NotReached)
		return nil
	}
	src := make([][]byte, 0, w.request.Parts.Len())
	for s := w.request.Parts; s != 0; s &= s - 1 {
		src = append(src, w.memory[bits.TrailingZeros64(uint64(s))])
	}
	opt := commitOptions(w.request.Durable, w.request.Retention)
	got, err := attempt.Commit(ctx, []tier.CommitRow{{Row: 0, Src: src}}, opt)
	attempt.Abort() // a committed row stays
	if err != nil {
		return err
	}
	w.outcomes[block] = byte(got[0])
	return nil
}

// outcomeCorrupt is the wire's outcome of a page that did not match.
const outcomeCorrupt = 12

// Close implements rpc.Writing. A stream that was cut stores nothing more.
func (w *writing) Close(ctx context.Context) ([]byte, error) {
	defer w.node.ram.GiveBack(w.charged)
	if err := ctx.Err(); err != nil {
		if w.attempt != nil {
			w.attempt.Abort()
		}
		return nil, err
	}
	return w.outcomes, w.finish(ctx)
}

func commitOptions(durable bool, r *rpc.Retention) tier.CommitOptions {
	opt := tier.CommitOptions{Durable: durable}
	if r != nil {
		opt.Retention = &tier.Retention{Priority: r.Priority, TTL: r.TTL, RefreshOnHit: r.RefreshOnHit}
	}
	return opt
}

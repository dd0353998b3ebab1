package server

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// Memory of one engine on the device of the HBM tier: its working pages, which the
// node made, and regions, which it brought. The device copies out of them and into
// them; both go when the attachment is gone and no call uses them.

// Bounds of an attachment.
const (
	maxRegions  = 16
	maxPieces   = 4096
	regionsWait = time.Second // for a descriptor that is still on its way
)

// deviceMemory is guarded by the attachment's mu.
type deviceMemory struct {
	working tier.Shared // nil: none
	id      paging.ExtentID
	slots   *paging.Allocator
	regions map[uint32]*region
	next    uint32
	arrived map[uint32]arrival // descriptors that RegisterRegion has not named yet
	came    chan struct{}      // closed and replaced when one arrives
}

type arrival struct {
	file  *os.File
	bytes int64
}

// region is memory of an engine with pages of one namespace at places that it
// chose.
type region struct {
	mem       tier.Shared
	namespace paging.NamespaceID
	layout    *paging.Layout
	blocks    uint32
	parts     paging.PartSet
	places    [paging.MaxParts]rpc.RegionPart
	busy      int  // calls that use it
	dropped   bool // goes when busy is 0
}

// spans is where the page of a part lies in a block of the region.
func (r *region) spans(block uint32, part int) []tier.Span {
	p := &r.places[part]
	piece := int64(r.layout.Parts[part].PageBytes) / int64(p.Pieces)
	spans := make([]tier.Span, p.Pieces)
	at := r.mem.Addr() + p.Offset + uint64(block)*p.BlockStride
	for i := range spans {
		spans[i] = tier.Span{Addr: at + uint64(i)*p.PieceStride, Bytes: piece}
	}
	return spans
}

// addWorking gives an engine working pages, or the half, the quarter and so on
// where there is no room for more.
func (a *attachment) addWorking(wanted uint64) error {
	if !a.pool || wanted == 0 {
		return nil
	}
	bytes := int64(min(roundUnit(wanted), 1<<46))
	for {
		mem, err := a.node.hbm.NewWorking(bytes)
		if errors.Is(err, paging.ErrNoSpace) && bytes > paging.UnitBytes {
			bytes = roundUnit(bytes / 2)
			continue
		}
		if err != nil {
			return fmt.Errorf("working pages on the device: %w", err)
		}
		id := stagingIDs + paging.ExtentID(a.node.stagingCount.Add(1))
		slots := paging.NewAllocator(paging.AllocatorConfig{})
		if err := slots.AddExtent(id, 0, uint64(mem.Bytes())); err != nil {
			return errors.Join(err, mem.Close())
		}
		a.device = deviceMemory{working: mem, id: id, slots: slots}
		return nil
	}
}

// extents lists what is to be handed over of the working pages.
func (d *deviceMemory) extents() []shm.Extent {
	if d.working == nil {
		return nil
	}
	return []shm.Extent{{ID: d.id, Kind: shm.KindWorking, Bytes: d.working.Bytes(), FD: d.working.FD()}}
}

// take returns what is to be closed. Nothing uses it any more.
func (d *deviceMemory) take() (all []tier.Shared) {
	if d.working != nil {
		all = append(all, d.working)
	}
	for _, r := range d.regions {
		all = append(all, r.mem)
	}
	for _, x := range d.arrived {
		_ = x.file.Close() // nothing was written to it
	}
	*d = deviceMemory{}
	return all
}

func (n *node) freeDevice(all []tier.Shared) {
	for _, m := range all {
		if err := m.Close(); err != nil {
			n.log.Error("memory of an engine on the device stays", "bytes", m.Bytes(), "error", err)
		}
	}
}

// stageDevice is stage in working pages.
func (d *deviceMemory) stage(l *paging.Layout, columns, parts paging.PartSet) (stagedRow, bool) {
	row := stagedRow{places: make([]paging.Place, columns.Len()), spans: make([][]tier.Span, columns.Len())}
	column := 0
	for p := columns; p != 0; p &= p - 1 {
		if part := bits.TrailingZeros64(uint64(p)); parts.Has(part) {
			bytes := l.Parts[part].PageBytes
			place, ok := d.slots.Alloc(bytes, 0)
			if !ok {
				d.unstage(row.places)
				return stagedRow{}, false
			}
			row.places[column] = place
			row.spans[column] = []tier.Span{{Addr: d.working.Addr() + place.Offset, Bytes: int64(bytes)}}
		}
		column++
	}
	return row, true
}

func (d *deviceMemory) unstage(places []paging.Place) {
	for _, p := range places {
		if p.Extent != 0 && p.Extent == d.id {
			d.slots.Free(p)
		}
	}
}

// stageRegion is where a row lies in a region already.
func (r *region) stage(block uint32, columns, parts paging.PartSet) stagedRow {
	row := stagedRow{places: make([]paging.Place, columns.Len()), spans: make([][]tier.Span, columns.Len())}
	column := 0
	for p := columns; p != 0; p &= p - 1 {
		if part := bits.TrailingZeros64(uint64(p)); parts.Has(part) {
			row.spans[column] = r.spans(block, part)
		}
		column++
	}
	return row
}

// received takes the descriptor of a region that an engine sent.
func (a *attachment) received(e shm.Extent) {
	f := e.File()
	a.mu.Lock()
	defer a.mu.Unlock()
	d := &a.device
	if _, again := d.arrived[uint32(e.ID)]; again || !a.pool || a.state != attached || len(d.arrived) >= maxRegions {
		_ = f.Close() // nothing was written to it
		return
	}
	if d.arrived == nil {
		d.arrived = map[uint32]arrival{}
	}
	d.arrived[uint32(e.ID)] = arrival{f, e.Bytes}
	if d.came != nil {
		close(d.came)
		d.came = nil
	}
}

// awaitRegion waits for a descriptor that was sent over the other socket.
func (a *attachment) awaitRegion(ctx context.Context, handle uint32) (arrival, error) {
	ctx, cancel := context.WithTimeout(ctx, regionsWait)
	defer cancel()
	for {
		a.mu.Lock()
		x, ok := a.device.arrived[handle]
		delete(a.device.arrived, handle)
		if a.device.came == nil {
			a.device.came = make(chan struct{})
		}
		came := a.device.came
		a.mu.Unlock()
		if ok {
			return x, nil
		}
		select {
		case <-came:
		case <-ctx.Done():
			return arrival{}, fmt.Errorf("handle %d: no descriptor with that number came over the hand-off socket: %w", handle, paging.ErrInvalid)
		}
	}
}

// RegisterRegion implements rpc.Writer.
func (a *attachment) RegisterRegion(ctx context.Context, r *rpc.RegionRequest) (uint32, error) {
	if !a.pool {
		return 0, fmt.Errorf("a region: this node has no HBM tier, or the engine attached without device_pool: %w", paging.ErrInvalid)
	}
	layout, err := a.namespace(r.Namespace)
	if err != nil {
		return 0, err
	}
	x, err := a.awaitRegion(ctx, r.Handle)
	if err != nil {
		return 0, err
	}
	defer x.file.Close()
	reg := &region{namespace: r.Namespace, layout: layout, blocks: r.Blocks}
	if err := reg.describe(r.Parts, uint64(x.bytes)); err != nil {
		return 0, err
	}
	if reg.mem, err = a.node.hbm.NewRegion(x.file, x.bytes); err != nil {
		return 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != attached || len(a.device.regions) >= maxRegions {
		err := errDetached
		if a.state == attached {
			err = fmt.Errorf("%d regions are registered, the most at once: drop some: %w", maxRegions, paging.ErrUnavailable)
		}
		return 0, errors.Join(err, reg.mem.Close())
	}
	if a.device.regions == nil {
		a.device.regions = map[uint32]*region{}
	}
	a.device.next++
	a.device.regions[a.device.next] = reg
	return a.device.next, nil
}

// describe checks that every page of every block lies inside the region, in pieces
// of one length.
func (r *region) describe(parts []rpc.RegionPart, bytes uint64) error {
	for i, p := range parts {
		if int(p.Part) >= len(r.layout.Parts) || r.parts.Has(int(p.Part)) {
			return fmt.Errorf("parts[%d].part is %d: it stands twice, or the layout has %d: %w", i, p.Part, len(r.layout.Parts), paging.ErrInvalid)
		}
		if p.Pieces == 0 {
			p.Pieces = 1
		}
		page := r.layout.Parts[p.Part].PageBytes
		if p.Pieces > maxPieces || page%uint64(p.Pieces) != 0 {
			return fmt.Errorf("parts[%d].pieces is %d: want 1 to %d that divide a page of %d bytes: %w", i, p.Pieces, maxPieces, page, paging.ErrInvalid)
		}
		if p.Pieces == 1 {
			p.PieceStride = 0
		}
		const most = 1 << 46
		if p.Offset > most || p.BlockStride > most || p.PieceStride > most || r.blocks == 0 || r.blocks > 1<<31 {
			return fmt.Errorf("parts[%d]: an offset or stride beyond 2^46, or %d blocks: %w", i, r.blocks, paging.ErrInvalid)
		}
		hi, end := bits.Mul64(uint64(r.blocks-1), p.BlockStride)
		end += p.Offset + uint64(p.Pieces-1)*p.PieceStride + page/uint64(p.Pieces)
		if hi != 0 || end > bytes {
			return fmt.Errorf("parts[%d]: %d blocks end at byte %d of a region of %d: %w", i, r.blocks, end, bytes, paging.ErrInvalid)
		}
		if !apart(&p, page/uint64(p.Pieces), uint64(r.blocks)) {
			return fmt.Errorf("parts[%d]: with block_stride %d and piece_stride %d pages overlap: %w", i, p.BlockStride, p.PieceStride, paging.ErrInvalid)
		}
		r.places[p.Part] = p
		r.parts = r.parts.With(int(p.Part))
	}
	if r.parts == 0 {
		return fmt.Errorf("a region without parts: %w", paging.ErrInvalid)
	}
	return nil
}

// apart says whether no two pieces, each of so many bytes, share a byte: the blocks
// lie one after another in each plane of pieces, or the pieces in each block.
func apart(p *rpc.RegionPart, piece, blocks uint64) bool {
	planes := p.Pieces == 1 || p.PieceStride >= (blocks-1)*p.BlockStride+piece
	rows := blocks == 1 || p.BlockStride >= uint64(p.Pieces-1)*p.PieceStride+piece
	return (blocks == 1 || p.BlockStride >= piece) && (p.Pieces == 1 || p.PieceStride >= piece) && (planes || rows)
}

// useRegion finds a region and counts a user of it, for pages of these parts.
func (a *attachment) useRegion(id uint32, ns paging.NamespaceID, parts paging.PartSet, blocks []uint32, names int) (*region, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.device.regions[id]
	switch {
	case r == nil || a.state != attached:
		return nil, fmt.Errorf("region %d: %w", id, paging.ErrNotFound)
	case r.namespace != ns:
		return nil, fmt.Errorf("region %d holds pages of another namespace: %w", id, paging.ErrInvalid)
	case !r.parts.Contains(parts):
		return nil, fmt.Errorf("region %d has parts %#x, not %#x: %w", id, uint64(r.parts), uint64(parts), paging.ErrInvalid)
	case len(blocks) != names:
		return nil, fmt.Errorf("region_blocks has %d blocks for %d names: %w", len(blocks), names, paging.ErrInvalid)
	}
	for i, b := range blocks {
		if b >= r.blocks {
			return nil, fmt.Errorf("region_blocks[%d] is %d: the region has %d: %w", i, b, r.blocks, paging.ErrInvalid)
		}
	}
	r.busy++
	return r, nil
}

// endUse undoes useRegion.
func (a *attachment) endUse(r *region) {
	a.mu.Lock()
	r.busy--
	goes := r.dropped && r.busy == 0
	a.mu.Unlock()
	if goes {
		a.node.freeDevice([]tier.Shared{r.mem})
	}
}

// DropRegion implements rpc.Writer. Attempts that name the region are the client's
// to end first; calls that copy are waited for by whoever made them.
func (a *attachment) DropRegion(id uint32) error {
	a.mu.Lock()
	r := a.device.regions[id]
	if r != nil && r.busy > 0 {
		a.mu.Unlock()
		return fmt.Errorf("region %d is used by %d calls or attempts: end them first: %w", id, r.busy, paging.ErrUnavailable)
	}
	delete(a.device.regions, id)
	a.mu.Unlock()
	if r != nil {
		a.node.freeDevice([]tier.Shared{r.mem})
	}
	return nil
}

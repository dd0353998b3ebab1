package tier

import (
	"context"
	"fmt"
	"math/bits"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// Hold is what Fetch gives: pages that stay where they are until Release. Its
// fields must not be changed.
type Hold struct {
	Usable  int            // blocks granted: the usable prefix; ModeSet: the number of complete blocks
	Tokens  uint64         // tokens of the usable prefix; 0 with ModeSet
	Parts   paging.PartSet // what the columns stand for, in rising order
	Columns int            // number of Parts
	// Slots has a row per granted block (ModeSet: per named block) of Columns
	// slots each; the zero Slot where there is no page.
	Slots []paging.Slot
	Tiers []Kind // per row: where it was served from; None: not granted
	Short []Shortfall

	h     *Hierarchy
	arena Arena     // where the slots are
	ids   []blockID // per row; 0: not pinned
	refs  []Ref     // as Slots
}

// Lookup tells how much of a chain could be served and from where. It pins
// nothing and promises nothing. parts 0: all of the layout. Errors:
// paging.ErrUnknownNamespace, paging.ErrInvalid, paging.ErrClosed.
func (h *Hierarchy) Lookup(ns paging.NamespaceID, names []paging.BlockName, parts paging.PartSet) (Prefix, error) {
	f := h.getFetch()
	defer h.putFetch(f)
	f.req = FetchRequest{Namespace: ns, Names: names, Parts: parts}
	h.mu.lockForHit()
	defer h.mu.Unlock()
	if err := f.resolve(); err != nil {
		return Prefix{}, err
	}
	f.findAll()
	if f.usable = f.plan(); f.locate() {
		f.usable = f.plan()
	}
	p := Prefix{Usable: f.usable, Tiers: make([]Kind, len(names))}
	p.Tokens = uint64(p.Usable) * uint64(f.ns.ns.Layout.BlockTokens)
	for i, id := range f.ids {
		parts := f.ns.pagesAt(i, f.parts)
		if p.Tiers[i] = h.kindOf(id, parts); p.Tiers[i] == None && parts != 0 && f.have(i).Contains(parts) {
			p.Tiers[i] = Remote
		}
	}
	h.mu.metrics.Lookups++
	return p, nil
}

// kindOf is the slowest tier that the parts of a block would come from.
func (h *Hierarchy) kindOf(id blockID, parts paging.PartSet) Kind {
	if id == 0 {
		return None
	}
	b := h.mu.index.at(id)
	device := h.deviceParts(id, b)
	switch {
	case device != 0 && device.Contains(parts):
		return HBM
	case b.ram.Contains(parts) && b.ram != 0:
		return RAM
	case b.ram|b.disk|device != 0 && (b.ram | b.disk | device).Contains(parts):
		return NVMe
	}
	return None
}

// Fetch makes the pages of the usable prefix, or of a set, present in RAM and
// holds them there until Release. What cannot be had before ctx ends is a
// shortfall, not an error; a load that runs then goes on and its page becomes
// cache. The caller must Release the Hold, whatever it granted.
//
// Pages that are resident are granted without I/O, without reading their bytes
// and without waiting. The Hold is nil only with NoWait. Errors:
// paging.ErrUnknownNamespace, paging.ErrInvalid, paging.ErrClosed.
func (h *Hierarchy) Fetch(ctx context.Context, req FetchRequest) (*Hold, error) {
	f := h.getFetch()
	defer h.putFetch(f)
	f.req = req
	h.mu.lockForHit()
	if err := f.resolve(); err != nil {
		h.mu.Unlock()
		return nil, err
	}
	f.findAll()
	f.usable = f.plan()
	if f.locate() {
		f.usable = f.plan()
	}
	if h.mu.closed {
		h.mu.Unlock()
		return nil, paging.ErrClosed
	}
	f.pinRows()
	near := f.resident() && f.raised()
	if !near || len(h.mu.uses) > maxUses {
		h.settleUses()
	}
	if !near {
		if req.NoWait {
			f.usable = 0
			f.pinRows()
			h.mu.Unlock()
			return nil, nil
		}
		if !f.resident() {
			f.bringUp(ctx)
		}
		f.raise(ctx)
	}
	hold := f.grant()
	h.mu.Unlock()
	for i, r := range hold.refs {
		if r != 0 {
			hold.Slots[i] = hold.arena.Slot(r, hold.Slots[i].Bytes, hold.Slots[i].Sum)
		}
	}
	return hold, nil
}

// Page is the bytes of one page, nil where there is none. They must not be
// changed and are valid until Release.
func (hold *Hold) Page(row, column int) []byte {
	i := row*hold.Columns + column
	if hold.refs[i] == 0 {
		return nil
	}
	return hold.arena.Bytes(hold.refs[i], hold.Slots[i].Bytes)
}

// Ref is where one page lies in the tier that was wanted; 0: there is none. Valid
// until Release.
func (hold *Hold) Ref(row, column int) Ref { return hold.refs[row*hold.Columns+column] }

// Release gives the pages up and tells whether none of their slots was reused
// while they were held. A second call does nothing and answers the same.
func (hold *Hold) Release() (intact bool) {
	h := hold.h
	intact = hold.Intact()
	h.mu.Lock()
	defer h.mu.Unlock()
	if hold.ids == nil {
		return intact
	}
	h.mu.metrics.Holds--
	if hold.arena != h.cfg.Arena {
		hold.releaseDevice()
		hold.ids = nil
		return intact
	}
	// From the head: see unblock.
	for _, id := range hold.ids {
		if id != 0 {
			h.unpin(id, h.mu.index.at(id))
		}
	}
	hold.ids = nil
	return intact
}

// Intact tells whether no slot was reused since Fetch. After Release it means
// nothing.
func (hold *Hold) Intact() bool {
	for i, r := range hold.refs {
		if r != 0 && hold.arena.Slot(r, hold.Slots[i].Bytes, 0).Generation != hold.Slots[i].Generation {
			return false
		}
	}
	return true
}

// fetch is the scratch of one Fetch, Lookup or Promote. Its methods require
// Hierarchy.mu; the ones that wait say so.
type fetch struct {
	h       *Hierarchy
	req     FetchRequest
	ns      *namespace
	parts   paging.PartSet
	now     uint32
	limit   int       // rows below it are considered
	usable  int       // rows below it are wanted; ModeSet: the limit
	ids     []blockID // per row; 0: not there
	pins    []bool    // per row: pinned by this fetch
	reasons []Reason  // per row: why it was given up
	from    []Kind    // per row: the slowest tier that pages came from; None: none had to come
	remote  []bool    // per row: what this node has was tried and is no use
	// per row: parts that other nodes are said to have; nil: nobody was asked
	elsewhere []paging.PartSet
	bring     []loadItem // to be copied from other nodes by this fetch
	waits     []wait
	shrinks   int

	up        bool       // wanted on the device
	deviceIDs deviceRows // pinned there by this fetch
	filled    deviceRows // copied there by this fetch, or for it
}

// wait is a load that this fetch waits for.
type wait struct {
	row    int
	l      *load
	joined bool // somebody else started it
}

func (h *Hierarchy) getFetch() *fetch {
	f := h.fetches.Get().(*fetch)
	f.h = h
	return f
}

func (h *Hierarchy) putFetch(f *fetch) {
	clear(f.waits)
	clear(f.bring)
	*f = fetch{ids: f.ids[:0], pins: f.pins[:0], reasons: f.reasons[:0], from: f.from[:0], remote: f.remote[:0], waits: f.waits[:0], bring: f.bring[:0], deviceIDs: f.deviceIDs[:0], filled: f.filled[:0]}
	h.fetches.Put(f)
}

// resolve checks the request.
func (f *fetch) resolve() (err error) {
	if f.ns, err = f.h.namespaceLocked(f.req.Namespace); err != nil {
		return err
	}
	n := len(f.req.Names)
	if f.parts = f.req.Parts; f.parts == 0 {
		f.parts = f.ns.all
	}
	if err := f.ns.check(n, f.req.First, f.parts); err != nil {
		return err
	}
	switch {
	case f.req.Wanted > RAM || f.req.Wanted == HBM && f.h.cfg.Device == nil:
		return fmt.Errorf("wanted tier %v, which this node has not or does not hand out: %w", f.req.Wanted, paging.ErrInvalid)
	case f.req.Mode > ModeSet:
		return fmt.Errorf("mode %d: %w", f.req.Mode, paging.ErrInvalid)
	case f.req.At != nil && (len(f.req.At) != n || f.req.Mode != ModeSet):
		return fmt.Errorf("%d positions of %d blocks: %w", len(f.req.At), n, paging.ErrInvalid)
	}
	for _, at := range f.req.At {
		if err := f.ns.check(1, int(at), f.parts); err != nil {
			return err
		}
	}
	f.up = f.req.Wanted == HBM
	f.now = f.h.nowSeconds()
	f.ns.used = f.now
	f.limit = n
	f.pins = append(f.pins[:0], make([]bool, n)...)
	f.reasons = append(f.reasons[:0], make([]Reason, n)...)
	f.from = append(f.from[:0], make([]Kind, n)...)
	f.remote = append(f.remote[:0], make([]bool, n)...)
	return nil
}

// findAll looks up the rows that are not pinned.
func (f *fetch) findAll() {
	if len(f.ids) == 0 {
		for i := range f.req.Names {
			f.ids = append(f.ids, f.h.mu.index.find(f.ns.num, &f.req.Names[i]))
		}
		return
	}
	for i := range f.req.Names {
		if !f.pins[i] {
			f.ids[i] = f.h.mu.index.find(f.ns.num, &f.req.Names[i])
		}
	}
}

// have is the set of parts that row i could be served with.
func (f *fetch) have(i int) paging.PartSet {
	if f.reasons[i] != NoReason {
		return 0
	}
	var have paging.PartSet
	if f.ids[i] != 0 {
		b := f.h.mu.index.at(f.ids[i])
		have = b.ram
		if f.up && f.req.Resident {
			have = 0
		}
		if !f.req.Resident && !f.remote[i] {
			have |= b.disk
		}
		if b.flags.has(onDevice) && (f.up || !f.req.Resident) {
			have |= f.onDevice(i)
		}
	}
	if f.elsewhere != nil && !f.req.Resident {
		have |= f.elsewhere[i]
	}
	return have
}

// chain is the number of blocks in the chain of the request.
func (f *fetch) chain() int { return f.req.First + len(f.req.Names) }

// at is the position of row i in its chain.
func (f *fetch) at(i int) int {
	if f.req.At != nil {
		return int(f.req.At[i])
	}
	return f.req.First + i
}

// plan is the number of leading rows that could be granted.
func (f *fetch) plan() int {
	if f.req.Mode == ModeSet {
		return f.limit
	}
	return f.ns.usable(f.req.First, f.limit, f.parts, f.have)
}

// wanted is the set of pages of row i that are granted if it is granted.
func (f *fetch) wanted(i int) paging.PartSet {
	if f.req.Mode == ModeSet {
		if at := f.ns.pagesAt(f.at(i), f.parts); f.have(i).Contains(at) {
			return at
		}
		return 0
	}
	return f.ns.needed(f.req.First+f.usable, f.req.First+i, f.parts)
}

// pinRows pins exactly the rows that are wanted and have pages.
func (f *fetch) pinRows() {
	for i, id := range f.ids {
		want := i < f.usable && f.wanted(i) != 0
		if want == f.pins[i] {
			continue
		}
		f.pins[i] = want
		if want {
			if id == 0 { // it comes from another node
				id = f.h.blockFor(f.ns, &f.req.Names[i], f.at(i), f.now)
				f.ids[i] = id
			}
			f.h.pin(f.h.mu.index.at(id))
		} else {
			f.h.unpin(id, f.h.mu.index.at(id))
		}
	}
	f.pinDevice()
}

// missing is the set of pages of row i that have to be brought up.
func (f *fetch) missing(i int) paging.PartSet {
	if !f.pins[i] {
		return 0
	}
	missing := f.wanted(i) &^ f.h.mu.index.at(f.ids[i]).ram
	if f.up && missing != 0 {
		missing &^= f.onDevice(i)
	}
	return missing
}

func (f *fetch) resident() bool {
	for i := range f.usable {
		if f.missing(i) != 0 {
			return false
		}
	}
	return true
}

// grant makes the Hold of the rows that are pinned and counts.
func (f *fetch) grant() *Hold {
	h := f.h
	rows := f.usable
	cols := f.parts.Len()
	hold := &Hold{h: h, arena: h.cfg.Arena, Parts: f.parts, Columns: cols, Slots: make([]paging.Slot, rows*cols), Tiers: make([]Kind, rows),
		ids: make([]blockID, rows), refs: make([]Ref, rows*cols)}
	if f.up {
		hold.arena = h.cfg.Device
	}
	m := &h.mu.metrics
	for step := range rows {
		i := step
		if !h.headFirst {
			i = rows - 1 - step // the head of a chain is the last to be evicted
		}
		if f.up && f.pins[i] {
			hold.Tiers[i] = f.grantDevice(hold, i)
		} else if f.pins[i] {
			id := f.ids[i]
			b := h.mu.index.at(id)
			f.grantRow(b, f.wanted(i), hold.Slots[i*cols:(i+1)*cols], hold.refs[i*cols:])
			if !f.req.Moved {
				h.mu.uses = append(h.mu.uses, use{id: id, now: f.now, length: int32(f.chain())})
			}
			if f.from[i] == NVMe {
				h.hitDisk(id, b, f.chain(), f.now)
			}
			if hold.ids[i] = id; sabotage.On("reuse-leased-slot") {
				h.settleUses()
				hold.ids[i] = 0
				h.unpin(id, b)
			}
		} else if f.req.Mode == ModeSet && f.ns.pagesAt(f.at(i), f.parts) != 0 {
			continue
		}
		hold.Usable++
		if hold.Tiers[i] == None {
			if hold.Tiers[i] = f.from[i]; hold.Tiers[i] == None {
				hold.Tiers[i] = RAM
			}
		}
		if f.req.Moved {
			m.MovedBlocks++
			continue
		}
		switch hold.Tiers[i] {
		case HBM:
			m.DeviceHitBlocks++
		case NVMe:
			m.DiskHitBlocks++
		case Remote:
			m.RemoteHitBlocks++
		default:
			m.RAMHitBlocks++
		}
	}
	if f.req.Mode == ModePrefix {
		hold.Tokens = uint64(rows) * uint64(f.ns.ns.Layout.BlockTokens)
	}
	m.Holds++
	if !f.req.Moved {
		m.Fetches++
		m.RequestedBlocks += int64(len(f.req.Names))
		m.MissedBlocks += int64(len(f.req.Names) - hold.Usable)
		m.addTokens(int64(f.ns.ns.Layout.BlockTokens), len(f.req.Names), hold.Tiers)
	}
	hold.Short = f.shortfalls(hold.Tiers)
	return hold
}

func (f *fetch) grantRow(b *block, parts paging.PartSet, slots []paging.Slot, refs []Ref) {
	pages := f.h.pagesOf(b)
	col := 0
	for s := f.parts; s != 0; s &= s - 1 {
		if part := bits.TrailingZeros64(uint64(s)); parts.Has(part) {
			check.That(b.ram.Has(part), "granted a page that is not resident")
			refs[col] = pages[part].ram
			slots[col] = paging.Slot{Bytes: f.ns.bytes[part], Sum: pages[part].sum}
		}
		col++
	}
}

// shortfalls says why rows were not granted, in runs of one reason.
func (f *fetch) shortfalls(tiers []Kind) (short []Shortfall) {
	for i := range f.req.Names {
		if i < len(tiers) && tiers[i] != None {
			continue
		}
		r := f.reasonOf(i)
		f.h.mu.metrics.Shortfalls[r]++
		if n := len(short); n > 0 && short[n-1].Reason == r && short[n-1].Block+short[n-1].Count == i {
			short[n-1].Count++
			continue
		}
		short = append(short, Shortfall{Block: i, Count: 1, Reason: r})
	}
	return short
}

func (f *fetch) reasonOf(i int) Reason {
	if f.reasons[i] != NoReason {
		return f.reasons[i]
	}
	id := f.h.mu.index.find(f.ns.num, &f.req.Names[i])
	if id == 0 {
		return NotFound
	}
	b := f.h.mu.index.at(id)
	at := f.ns.pagesAt(f.at(i), f.parts)
	stored := f.h.stored(id, b)
	switch {
	case stored == 0 && b.flags.has(busy):
		return InFlight
	case stored == 0:
		return NotFound
	case f.req.Resident && stored.Contains(at):
		return Timeout
	}
	return PartMissing
}

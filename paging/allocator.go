package paging

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/kvtier/kvtier/paging/check"
)

// grainUnits is the number of units of a grain: slabs begin at multiples of
// 64 KiB of an extent, so that what is left between them is of use again.
const grainUnits = 16

// Place is where a slot begins: an extent, and a byte offset in it that is a
// multiple of UnitBytes.
type Place struct {
	Extent ExtentID
	Offset uint64
}

// AllocatorConfig is how an Allocator divides extents.
type AllocatorConfig struct {
	// WholeExtents gives each extent to one slot size as long as it is not empty,
	// so that what lies where can be told from the slot size alone (Restore).
	WholeExtents bool
}

// Allocator hands out slots in extents. It does arithmetic on offsets and
// touches no memory.
//
// A page is rounded up to UnitBytes; each rounded size is a class. A class gets
// slabs, runs of whole grains (or whole extents), and divides them into slots
// without gaps: a slab is made so long that at most 1/32 of it is left over. A
// slab without pages is given back, joined with its free neighbours, and can
// serve another class; each class keeps one empty slab at hand until somebody
// needs the room. Alloc and Free take constant time, except that making a slab
// takes time in proportion to its length.
//
// Not safe for concurrent use.
type Allocator struct {
	whole bool

	extents     []extent // an unused one has id 0
	byID        map[ExtentID]int32
	unused      []int32 // indices of extents
	slabs       []slab
	unusedSlabs []int32
	classes     []class
	classOf     map[uint32]int32 // by units
	runs        runIndex

	largest uint32 // units of the largest extent ever added
	usage   AllocUsage
	cursor  position // where the next Reclaim begins
	window  []span   // scratch of Reclaim
}

type extent struct {
	id    ExtentID
	start uint64 // byte offset of the first unit
	units uint32
	grain uint32 // units in a grain; the last grain may have fewer
	used  uint32 // slots in use
	at    []tag  // by grain
}

// tag says what lies at a grain: each grain of a slab has the slab's, the first
// and the last grain of a free run have the run's, others have none.
type tag uint32

const noTag tag = 0

func slabTag(i int32) tag         { return tag(i+1)<<1 | 1 }
func runTag(i int32) tag          { return tag(i+1) << 1 }
func (t tag) slab() (int32, bool) { return int32(t>>1) - 1, t&1 == 1 }
func (t tag) run() (int32, bool)  { return int32(t>>1) - 1, t&1 == 0 && t != noTag }

// span is the number of units in grains of e.
func (e *extent) span(first, grains uint32) uint32 {
	return uint32(min(uint64(first+grains)*uint64(e.grain), uint64(e.units)) - uint64(first)*uint64(e.grain))
}

// class is all slabs of one slot size.
type class struct {
	units   uint32
	partial int32 // list of slabs with used and free slots; none: -1
	spare   int32 // slab without pages kept for the next Alloc; none: -1
	usage   ClassUsage
}

// AllocUsage counts bytes of an Allocator. Capacity = used + free.
type AllocUsage struct {
	CapacityBytes uint64 // of all extents
	UsedBytes     uint64 // of slots in use
	PageBytes     uint64 // of the pages in them, without rounding
	FreeBytes     uint64 // not in use, whether or not bound to a class
	SlabBytes     uint64 // bound to a class
	Slots         uint64 // in use
	Extents       int
}

// ClassUsage counts the slots of one size.
type ClassUsage struct {
	SlotBytes uint64
	Slots     uint64 // in all slabs of the class
	UsedSlots uint64
	PageBytes uint64 // of the pages in them, without rounding
	SlabBytes uint64 // of all slabs of the class
}

// NewAllocator returns an allocator without extents.
func NewAllocator(c AllocatorConfig) *Allocator {
	a := &Allocator{whole: c.WholeExtents, byID: map[ExtentID]int32{}, classOf: map[uint32]int32{}}
	a.runs.init()
	return a
}

// AddExtent adds the bytes from start of an extent; both are multiples of
// UnitBytes. ErrInvalid if they are not, or if id is 0 or there already.
func (a *Allocator) AddExtent(id ExtentID, start, bytes uint64) error {
	units := bytes / UnitBytes
	switch _, exists := a.byID[id]; {
	case id == 0 || exists:
		return fmt.Errorf("add extent %d: %w: its id is 0 or taken", id, ErrInvalid)
	case start%UnitBytes != 0 || bytes%UnitBytes != 0 || bytes == 0 || units > math.MaxUint32-grainUnits || start > math.MaxInt64:
		return fmt.Errorf("add extent %d: %w: %d bytes from %d, want multiples of %d", id, ErrInvalid, bytes, start, UnitBytes)
	}
	e := extent{id: id, start: start, units: uint32(units), grain: grainUnits}
	if a.whole {
		e.grain = e.units
	}
	grains := (e.units + e.grain - 1) / e.grain
	e.at = make([]tag, grains)
	var i int32
	if n := len(a.unused); n > 0 {
		i, a.unused = a.unused[n-1], a.unused[:n-1]
		a.extents[i] = e
	} else {
		i = int32(len(a.extents))
		a.extents = append(a.extents, e)
	}
	a.byID[id] = i
	a.largest = max(a.largest, e.units)
	a.usage.CapacityBytes += bytes
	a.usage.Extents++
	a.addRun(i, 0, grains)
	return nil
}

// RemoveExtent forgets an extent without pages. ErrNotFound, ErrInvalid if there
// are pages in it.
func (a *Allocator) RemoveExtent(id ExtentID) error {
	i, ok := a.byID[id]
	if !ok {
		return fmt.Errorf("remove extent %d: %w", id, ErrNotFound)
	}
	e := &a.extents[i]
	if e.used > 0 {
		return fmt.Errorf("remove extent %d: %w: it holds %d pages", id, ErrInvalid, e.used)
	}
	for c := range a.classes {
		if s := a.classes[c].spare; s >= 0 && a.slabs[s].extent == i {
			a.releaseSpare(int32(c))
		}
	}
	r, free := e.at[0].run()
	check.That(free && a.runs.recs[r].grains == uint32(len(e.at)), "extent %d without pages is not one free run", id)
	a.runs.remove(r)
	a.usage.CapacityBytes -= uint64(e.units) * UnitBytes
	a.usage.Extents--
	*e = extent{}
	delete(a.byID, id)
	a.unused = append(a.unused, i)
	return nil
}

// EmptyExtents returns the extents without pages, by rising id.
func (a *Allocator) EmptyExtents() []ExtentID {
	var ids []ExtentID
	for i := range a.extents {
		if e := &a.extents[i]; e.id != 0 && e.used == 0 {
			ids = append(ids, e.id)
		}
	}
	slices.Sort(ids)
	return ids
}

// unitsOf is size in units, 0 if no slot can have that size.
func unitsOf(size uint64) uint32 {
	if size > math.MaxUint32/2*UnitBytes {
		return 0
	}
	return uint32((size + UnitBytes - 1) / UnitBytes)
}

// Alloc finds a slot for a page of size bytes and notes its owner. false if no
// slot is free and none can be made, or if size is 0.
func (a *Allocator) Alloc(size uint64, owner uint32) (Place, bool) {
	units := unitsOf(size)
	if units == 0 {
		return Place{}, false
	}
	s, ok := a.slabWithRoom(a.class(units))
	if !ok {
		return Place{}, false
	}
	i := a.slabs[s].take()
	a.occupy(s, i, size, owner)
	return a.place(s, i), true
}

// class is the number of the class of slots of so many units.
func (a *Allocator) class(units uint32) int32 {
	c, ok := a.classOf[units]
	if !ok {
		c = int32(len(a.classes))
		a.classes = append(a.classes, class{units: units, partial: -1, spare: -1, usage: ClassUsage{SlotBytes: uint64(units) * UnitBytes}})
		a.classOf[units] = c
	}
	return c
}

// slabWithRoom returns a slab of the class that is in the list of those with
// free slots.
func (a *Allocator) slabWithRoom(c int32) (int32, bool) {
	cl := &a.classes[c]
	if cl.partial >= 0 {
		return cl.partial, true
	}
	s := cl.spare
	if s < 0 {
		s = a.carve(c)
	}
	if s < 0 && a.releaseSpares() {
		s = a.carve(c)
	}
	if s < 0 {
		return 0, false
	}
	cl.spare = -1
	a.pushPartial(s)
	return s, true
}

// occupy counts a slot that was taken, and notes what is in it.
func (a *Allocator) occupy(s int32, i uint32, size uint64, owner uint32) {
	sl := &a.slabs[s]
	cl := &a.classes[sl.class]
	sl.note(i, owner, uint32(cl.usage.SlotBytes-size))
	if sl.used++; sl.used == sl.slots {
		a.dropPartial(s)
	}
	a.extents[sl.extent].used++
	cl.usage.UsedSlots++
	cl.usage.PageBytes += size
	a.usage.Slots++
	a.usage.UsedBytes += cl.usage.SlotBytes
	a.usage.PageBytes += size
}

func (a *Allocator) place(s int32, i uint32) Place {
	sl := &a.slabs[s]
	e := &a.extents[sl.extent]
	unit := uint64(sl.first)*uint64(e.grain) + uint64(i)*uint64(a.classes[sl.class].units)
	return Place{Extent: e.id, Offset: e.start + unit*UnitBytes}
}

// locate finds the slot in use that begins at p.
func (a *Allocator) locate(p Place) (s int32, i uint32, ok bool) {
	x, ok := a.byID[p.Extent]
	if !ok {
		return 0, 0, false
	}
	e := &a.extents[x]
	unit := (p.Offset - e.start) / UnitBytes
	if p.Offset < e.start || p.Offset%UnitBytes != 0 || unit >= uint64(e.units) {
		return 0, 0, false
	}
	if s, ok = e.at[unit/uint64(e.grain)].slab(); !ok {
		return 0, 0, false
	}
	sl := &a.slabs[s]
	rel, units := unit-uint64(sl.first)*uint64(e.grain), uint64(a.classes[sl.class].units)
	if rel%units != 0 || rel/units >= uint64(sl.slots) || sl.free(uint32(rel/units)) {
		return 0, 0, false
	}
	return s, uint32(rel / units), true
}

// Free gives a slot back. To free what is not in use is a fault of the caller:
// it changes nothing, and panics in checked builds.
func (a *Allocator) Free(p Place) {
	s, i, ok := a.locate(p)
	if check.Enabled {
		check.That(ok, "free of %+v, where no slot in use begins", p)
	}
	if !ok {
		return
	}
	sl := &a.slabs[s]
	cl := &a.classes[sl.class]
	size := cl.usage.SlotBytes - uint64(sl.slack(i))
	sl.give(i)
	a.extents[sl.extent].used--
	cl.usage.UsedSlots--
	cl.usage.PageBytes -= size
	a.usage.Slots--
	a.usage.UsedBytes -= cl.usage.SlotBytes
	a.usage.PageBytes -= size
	if sl.used == sl.slots {
		a.pushPartial(s)
	}
	if sl.used--; sl.used > 0 {
		return
	}
	a.dropPartial(s)
	if cl.spare < 0 {
		cl.spare = s
	} else {
		a.release(s)
	}
}

// Owner is who owns the slot that begins at p; false if none in use does.
func (a *Allocator) Owner(p Place) (uint32, bool) {
	s, i, ok := a.locate(p)
	if !ok {
		return 0, false
	}
	return a.slabs[s].owner(i), true
}

// SetOwner changes who owns the slot in use that begins at p; false if none does.
func (a *Allocator) SetOwner(p Place, owner uint32) bool {
	s, i, ok := a.locate(p)
	if ok {
		a.slabs[s].note(i, owner, a.slabs[s].slack(i))
	}
	return ok
}

// PageSize is the size of the page in the slot in use that begins at p, without
// rounding; 0 if there is none.
func (a *Allocator) PageSize(p Place) uint64 {
	s, i, ok := a.locate(p)
	if !ok {
		return 0
	}
	return a.classes[a.slabs[s].class].usage.SlotBytes - uint64(a.slabs[s].slack(i))
}

// SlotSize is the bytes of the slot in use that begins at p, 0 if there is none.
func (a *Allocator) SlotSize(p Place) uint64 {
	s, _, ok := a.locate(p)
	if !ok {
		return 0
	}
	return a.classes[a.slabs[s].class].usage.SlotBytes
}

// Restore marks a slot as in use that was handed out by another allocator with
// the same extents: one that held the same pages before a restart. Only with
// WholeExtents. ErrInvalid if no slot of that size can begin there, or if the
// place is taken.
func (a *Allocator) Restore(p Place, size uint64, owner uint32) error {
	units := unitsOf(size)
	x, ok := a.byID[p.Extent]
	if !a.whole || !ok || units == 0 || units > a.extents[x].units || p.Offset < a.extents[x].start || (p.Offset-a.extents[x].start)%UnitBytes != 0 {
		return fmt.Errorf("restore %d bytes at %+v: %w: no slot can begin there", size, p, ErrInvalid)
	}
	c := a.class(units)
	s, bound := a.extents[x].at[0].slab()
	if bound && a.slabs[s].used == 0 && a.slabs[s].class != c {
		a.releaseSpare(a.slabs[s].class)
		bound = false
	}
	unit := (p.Offset - a.extents[x].start) / UnitBytes
	i := unit / uint64(units)
	switch {
	case bound && a.slabs[s].class != c:
		return fmt.Errorf("restore %d bytes at %+v: %w: the extent holds slots of another size", size, p, ErrInvalid)
	case unit%uint64(units) != 0 || i >= uint64(a.extents[x].units/units):
		return fmt.Errorf("restore %d bytes at %+v: %w: no slot begins there", size, p, ErrInvalid)
	case bound && !a.slabs[s].free(uint32(i)):
		return fmt.Errorf("restore %d bytes at %+v: %w: the slot is taken", size, p, ErrInvalid)
	}
	if !bound {
		r, _ := a.extents[x].at[0].run()
		s = a.bind(c, r, a.extents[x].units/units)
		a.pushPartial(s)
	} else if a.classes[c].spare == s {
		a.classes[c].spare = -1
		a.pushPartial(s)
	}
	a.slabs[s].claim(uint32(i))
	a.occupy(s, uint32(i), size, owner)
	return nil
}

// Usage counts everything.
func (a *Allocator) Usage() AllocUsage {
	u := a.usage
	u.FreeBytes = u.CapacityBytes - u.UsedBytes
	return u
}

// UsageByClass counts the classes that have slots, by rising size.
func (a *Allocator) UsageByClass() []ClassUsage {
	var all []ClassUsage
	for i := range a.classes {
		if u := a.classes[i].usage; u.Slots > 0 {
			all = append(all, u)
		}
	}
	slices.SortFunc(all, func(x, y ClassUsage) int { return cmp.Compare(x.SlotBytes, y.SlotBytes) })
	return all
}

package paging

import (
	"cmp"
	"slices"
)

// Bounds of one Reclaim: it looks at so many slots and slabs, and at more only
// until it has found a first answer.
const (
	reclaimEnough = 1 << 13
	reclaimMost   = 1 << 16
	// reclaimShort is how many of the emptiest whole extents are looked at first.
	reclaimShort = 16
)

// position is where a scan goes on.
type position struct {
	extent int
	grain  uint32
}

// span is a slab or a free run while Reclaim looks at it.
type span struct {
	slab   int32 // -1: free
	first  uint32
	grains uint32
	cost   uint64 // units of slots in use
}

// Reclaim names the owners whose pages must go so that Alloc(size) finds room by
// turning slabs of other classes over: of the neighbouring slabs that together
// are long enough and hold pages of movable owners only, those that hold the
// fewest bytes. If there are none, one movable owner of a page of the same class.
// Owners come once each; none means that there is room already. false if nothing
// was found among the slots looked at, which are bounded; the next call goes on
// where this one stopped.
//
// The caller frees all slots of these owners and then calls Alloc.
func (a *Allocator) Reclaim(size uint64, movable func(owner uint32) bool) (owners []uint32, ok bool) {
	units := unitsOf(size)
	if units == 0 || len(a.extents) == 0 {
		return nil, false
	}
	scan := reclaim{a: a, class: a.class(units), movable: movable, best: ^uint64(0)}
	if a.whole {
		scan.emptiest()
	}
	pos := a.cursor
	if pos.extent >= len(a.extents) {
		pos = position{}
	}
	for range len(a.extents) + 1 { // once more for the grains before the cursor
		next, done := scan.extent(pos)
		if !done {
			a.cursor = next
			break
		}
		pos = position{extent: (pos.extent + 1) % len(a.extents)}
		a.cursor = pos
	}
	if scan.best == ^uint64(0) {
		return scan.same, scan.same != nil
	}
	slices.Sort(scan.owners)
	return slices.Compact(scan.owners), true
}

// reclaim is the state of one Reclaim.
type reclaim struct {
	a       *Allocator
	class   int32
	movable func(uint32) bool
	work    int

	best   uint64   // cost of the cheapest window so far
	owners []uint32 // of its pages
	same   []uint32 // an owner in the class itself
}

// emptiest looks at the whole extents that hold the fewest bytes, in that order,
// so that a bounded look at many is not a look at the first ones.
func (r *reclaim) emptiest() {
	units := r.a.classes[r.class].units
	short := r.a.window[:0]
	for i := range r.a.slabs {
		sl := &r.a.slabs[i]
		if sl.extent < 0 || sl.class == r.class || r.a.extents[sl.extent].units < units {
			continue
		}
		s := span{slab: int32(i), grains: 1, cost: uint64(sl.used) * uint64(r.a.classes[sl.class].units)}
		at, _ := slices.BinarySearchFunc(short, s, func(x, y span) int { return cmp.Compare(x.cost, y.cost) })
		if at < reclaimShort {
			short = slices.Insert(short[:min(len(short), reclaimShort-1)], min(at, reclaimShort-1), s)
		}
	}
	r.a.window = short
	for i, s := range short {
		if _, movable := r.look(&r.a.extents[r.a.slabs[s.slab].extent], 0); movable {
			r.best = s.cost
			r.collect(short[i : i+1])
			return
		}
	}
}

// begins tells whether a slab or a free run begins at a position: one that was
// noted earlier may be inside of one by now.
func (a *Allocator) begins(pos position) bool {
	e := &a.extents[pos.extent]
	if pos.grain >= uint32(len(e.at)) {
		return false
	}
	if r, ok := e.at[pos.grain].run(); ok {
		return a.runs.recs[r].first == pos.grain
	}
	s, ok := e.at[pos.grain].slab()
	return ok && a.slabs[s].first == pos.grain
}

// extent looks at an extent from a position on. false, and where to go on, if
// the bound is reached.
func (r *reclaim) extent(pos position) (position, bool) {
	e := &r.a.extents[pos.extent]
	units := r.a.classes[r.class].units
	if e.id == 0 || e.units < units {
		return pos, true
	}
	if !r.a.begins(pos) {
		pos.grain = 0
	}
	window := r.a.window[:0]
	var cost uint64
	for g := pos.grain; g < uint32(len(e.at)); {
		if r.work >= reclaimMost || r.work >= reclaimEnough && r.best != ^uint64(0) {
			return position{pos.extent, g}, false
		}
		s, movable := r.look(e, g)
		g += s.grains
		if !movable {
			window, cost = window[:0], 0
			continue
		}
		window, cost = append(window, s), cost+s.cost
		// Leave out from the left what is not needed for the length.
		for len(window) > 1 && e.span(window[1].first, g-window[1].first) >= units {
			cost -= window[0].cost
			window = window[1:]
		}
		if cost < r.best && e.span(window[0].first, g-window[0].first) >= units {
			r.best = cost
			r.collect(window)
		}
	}
	r.a.window = window[:0]
	return pos, true
}

// look judges the slab or free run at a grain. Slabs of the class itself are not
// turned over: one page of them would do.
func (r *reclaim) look(e *extent, g uint32) (span, bool) {
	r.work++
	if run, ok := e.at[g].run(); ok {
		return span{slab: -1, first: g, grains: r.a.runs.recs[run].grains}, true
	}
	i, _ := e.at[g].slab()
	sl := &r.a.slabs[i]
	s := span{slab: i, first: g, grains: sl.grains, cost: uint64(sl.used) * uint64(r.a.classes[sl.class].units)}
	if sl.class == r.class {
		r.lookInside(sl)
		return s, sl.used == 0
	}
	if s.cost >= r.best {
		return s, false // no window with it is better
	}
	for slot := range sl.slots {
		if sl.free(slot) {
			continue
		}
		r.work++
		if !r.movable(sl.owner(slot)) {
			return s, false
		}
	}
	return s, true
}

// lookInside looks for a movable owner in a slab of the class itself.
func (r *reclaim) lookInside(sl *slab) {
	for slot := uint32(0); slot < sl.slots && r.same == nil; slot++ {
		if sl.free(slot) {
			continue
		}
		r.work++
		if owner := sl.owner(slot); r.movable(owner) {
			r.same = []uint32{owner}
		}
	}
}

func (r *reclaim) collect(window []span) {
	r.owners = r.owners[:0]
	for _, s := range window {
		if s.slab < 0 {
			continue
		}
		sl := &r.a.slabs[s.slab]
		for slot := range sl.slots {
			if !sl.free(slot) {
				r.owners = append(r.owners, sl.owner(slot))
			}
		}
	}
}

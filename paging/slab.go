package paging

import "math/bits"

// slab is a run of grains that is divided into slots of one class.
type slab struct {
	extent     int32
	class      int32
	first      uint32 // grain
	grains     uint32
	slots      uint32
	used       uint32
	next, prev int32 // in the list of its class
	// words is one piece of memory: a bit for each slot, set if it is free; a bit
	// for each of those words, set if it has one; then for each slot its owner
	// and, from bit 32 on, how many bytes its page is shorter than the slot.
	words []uint64
}

func bitWords(n uint32) uint32 { return (n + 63) / 64 }

// divide makes all slots free.
func (s *slab) divide(slots uint32) {
	free := bitWords(slots)
	n := int(free + bitWords(free) + slots)
	if cap(s.words) < n {
		s.words = make([]uint64, n)
	}
	s.words = s.words[:n]
	s.slots, s.used = slots, 0
	setBits(s.words[:free], slots)
	setBits(s.words[free:], free)
}

// setBits sets the first n bits of b and clears the rest of the last word.
func setBits(b []uint64, n uint32) {
	for i := range bitWords(n) {
		b[i] = ^uint64(0)
	}
	if rest := n % 64; rest > 0 {
		b[n/64] = 1<<rest - 1
	}
}

// take claims the first free slot. There must be one.
func (s *slab) take() uint32 {
	free := bitWords(s.slots)
	top := s.words[free : free+bitWords(free)]
	for t, word := range top {
		if word == 0 {
			continue
		}
		w := uint32(t)*64 + uint32(bits.TrailingZeros64(word))
		i := w*64 + uint32(bits.TrailingZeros64(s.words[w]))
		s.claim(i)
		return i
	}
	panic("slab without a free slot in the list of those with one")
}

// claim takes slot i, which is free.
func (s *slab) claim(i uint32) {
	w := i / 64
	if s.words[w] &^= 1 << (i % 64); s.words[w] == 0 {
		s.words[bitWords(s.slots)+w/64] &^= 1 << (w % 64)
	}
}

// give makes slot i free.
func (s *slab) give(i uint32) {
	w := i / 64
	s.words[w] |= 1 << (i % 64)
	s.words[bitWords(s.slots)+w/64] |= 1 << (w % 64)
}

func (s *slab) free(i uint32) bool { return s.words[i/64]>>(i%64)&1 == 1 }

// about is the word of slot i.
func (s *slab) about(i uint32) *uint64 {
	return &s.words[uint32(len(s.words))-s.slots+i]
}

func (s *slab) note(i, owner, slack uint32) { *s.about(i) = uint64(owner) | uint64(slack)<<32 }
func (s *slab) owner(i uint32) uint32       { return uint32(*s.about(i)) }
func (s *slab) slack(i uint32) uint32       { return uint32(*s.about(i) >> 32) }

// pushPartial puts a slab at the head of the list of its class: one that was
// full until now is filled first, so that emptier ones can run empty.
func (a *Allocator) pushPartial(s int32) {
	sl := &a.slabs[s]
	head := &a.classes[sl.class].partial
	sl.next, sl.prev = *head, -1
	if *head >= 0 {
		a.slabs[*head].prev = s
	}
	*head = s
}

func (a *Allocator) dropPartial(s int32) {
	sl := &a.slabs[s]
	if sl.prev >= 0 {
		a.slabs[sl.prev].next = sl.next
	} else {
		a.classes[sl.class].partial = sl.next
	}
	if sl.next >= 0 {
		a.slabs[sl.next].prev = sl.prev
	}
}

// slabSlots is how many slots a slab of the class should have: as many as make
// it about a megabyte (less in small extents, which more classes share), and
// then more until at most 1/32 of its grains is left over. Sixteen slots always
// fill whole grains.
func slabSlots(units, extentUnits uint32) uint32 {
	n := max(1, min(max(extentUnits/64, grainUnits), 256)/units)
	for {
		length := uint64(n) * uint64(units)
		if left := -length % grainUnits; left*32 <= length+left {
			return n
		}
		n++
	}
}

// carve makes a slab of a class from a free run and returns it, -1 if no run can
// hold a slot. If no run is long enough for a good slab the longest one must do.
func (a *Allocator) carve(c int32) int32 {
	units := a.classes[c].units
	if units > a.largest {
		return -1
	}
	if a.whole {
		if r := a.runs.atLeast(units); r >= 0 {
			return a.bind(c, r, a.runs.recs[r].units/units)
		}
		return -1
	}
	good := min(slabSlots(units, a.largest), a.largest/units)
	r := a.runs.atLeast(good * units)
	if r < 0 {
		r = a.runs.longest(units)
	}
	if r < 0 {
		return -1
	}
	return a.bind(c, r, min(good, a.runs.recs[r].units/units))
}

// bind makes a slab of so many slots at the start of a run, which is long enough.
func (a *Allocator) bind(c, r int32, slots uint32) int32 {
	run := a.runs.recs[r]
	e := &a.extents[run.extent]
	grains := uint32((uint64(slots)*uint64(a.classes[c].units) + uint64(e.grain) - 1) / uint64(e.grain))
	a.dropRun(r)
	if run.grains > grains {
		a.addRun(run.extent, run.first+grains, run.grains-grains)
	}
	var s int32
	if n := len(a.unusedSlabs); n > 0 {
		s, a.unusedSlabs = a.unusedSlabs[n-1], a.unusedSlabs[:n-1]
	} else {
		s = int32(len(a.slabs))
		a.slabs = append(a.slabs, slab{})
	}
	sl := &a.slabs[s]
	sl.extent, sl.class, sl.first, sl.grains = run.extent, c, run.first, grains
	sl.divide(slots)
	for g := range grains {
		e.at[run.first+g] = slabTag(s)
	}
	bytes := uint64(e.span(sl.first, grains)) * UnitBytes
	a.usage.SlabBytes += bytes
	a.classes[c].usage.SlabBytes += bytes
	a.classes[c].usage.Slots += uint64(slots)
	return s
}

// release gives the grains of a slab without pages back.
func (a *Allocator) release(s int32) {
	sl := &a.slabs[s]
	e := &a.extents[sl.extent]
	for g := range sl.grains {
		e.at[sl.first+g] = noTag
	}
	bytes := uint64(e.span(sl.first, sl.grains)) * UnitBytes
	a.usage.SlabBytes -= bytes
	cl := &a.classes[sl.class]
	cl.usage.SlabBytes -= bytes
	cl.usage.Slots -= uint64(sl.slots)
	a.addRun(sl.extent, sl.first, sl.grains)
	*sl = slab{words: sl.words[:0], extent: -1}
	a.unusedSlabs = append(a.unusedSlabs, s)
}

func (a *Allocator) releaseSpare(c int32) {
	s := a.classes[c].spare
	a.classes[c].spare = -1
	a.release(s)
}

// releaseSpares gives the spare slabs of all classes back; false if there was none.
func (a *Allocator) releaseSpares() bool {
	found := false
	for c := range a.classes {
		if a.classes[c].spare >= 0 {
			a.releaseSpare(int32(c))
			found = true
		}
	}
	return found
}

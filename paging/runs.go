package paging

import "math/bits"

// run is a maximal sequence of free grains of an extent.
type run struct {
	extent     int32
	first      uint32 // grain
	grains     uint32
	units      uint32
	next, prev int32 // in its bin
}

// runBins is the number of lists by length: one for each length below eight
// units, then eight for each power of two.
const runBins = 8 * 31

// runIndex finds free runs by their length.
type runIndex struct {
	recs   []run
	unused []int32
	heads  [runBins]int32
	some   [(runBins + 63) / 64]uint64 // bit i: bin i is not empty
}

func (x *runIndex) init() {
	for i := range x.heads {
		x.heads[i] = -1
	}
}

// bin is the list of runs of so many units; longer runs have no lower bin.
func bin(units uint32) int {
	if units < 8 {
		return int(units)
	}
	log := bits.Len32(units) - 1
	return 8*(log-2) + int(units>>(log-3)&7)
}

func (x *runIndex) add(r run) int32 {
	var i int32
	if n := len(x.unused); n > 0 {
		i, x.unused = x.unused[n-1], x.unused[:n-1]
	} else {
		i = int32(len(x.recs))
		x.recs = append(x.recs, run{})
	}
	b := bin(r.units)
	r.next, r.prev = x.heads[b], -1
	if r.next >= 0 {
		x.recs[r.next].prev = i
	}
	x.heads[b] = i
	x.some[b/64] |= 1 << (b % 64)
	x.recs[i] = r
	return i
}

func (x *runIndex) remove(i int32) {
	r := &x.recs[i]
	b := bin(r.units)
	if r.prev >= 0 {
		x.recs[r.prev].next = r.next
	} else {
		x.heads[b] = r.next
	}
	if r.next >= 0 {
		x.recs[r.next].prev = r.prev
	}
	if x.heads[b] < 0 {
		x.some[b/64] &^= 1 << (b % 64)
	}
	*r = run{extent: -1}
	x.unused = append(x.unused, i)
}

// atLeast returns a run of so many units or more, -1 if there is none: one of
// about that length if there is one, else of the next greater.
func (x *runIndex) atLeast(units uint32) int32 {
	b := bin(units)
	for i := x.heads[b]; i >= 0; i = x.recs[i].next {
		if x.recs[i].units >= units {
			return i
		}
	}
	for b++; b < runBins; b = (b/64 + 1) * 64 {
		if word := x.some[b/64] >> (b % 64); word != 0 {
			return x.heads[b+bits.TrailingZeros64(word)]
		}
	}
	return -1
}

// longest returns a run among the longest ones, if it has so many units, else -1.
func (x *runIndex) longest(units uint32) int32 {
	for w := len(x.some) - 1; w >= 0; w-- {
		if x.some[w] == 0 {
			continue
		}
		b := w*64 + bits.Len64(x.some[w]) - 1
		for i := x.heads[b]; i >= 0; i = x.recs[i].next {
			if x.recs[i].units >= units {
				return i
			}
		}
		return -1
	}
	return -1
}

// addRun makes grains of an extent free and joins them with free neighbours.
func (a *Allocator) addRun(extent int32, first, grains uint32) {
	e := &a.extents[extent]
	if first > 0 {
		if r, ok := e.at[first-1].run(); ok {
			first -= a.runs.recs[r].grains
			grains += a.runs.recs[r].grains
			a.dropRun(r)
		}
	}
	if end := first + grains; end < uint32(len(e.at)) {
		if r, ok := e.at[end].run(); ok {
			grains += a.runs.recs[r].grains
			a.dropRun(r)
		}
	}
	r := a.runs.add(run{extent: extent, first: first, grains: grains, units: e.span(first, grains)})
	e.at[first], e.at[first+grains-1] = runTag(r), runTag(r)
}

// dropRun makes grains that are to be used no longer a run.
func (a *Allocator) dropRun(r int32) {
	run := &a.runs.recs[r]
	e := &a.extents[run.extent]
	e.at[run.first], e.at[run.first+run.grains-1] = noTag, noTag
	a.runs.remove(r)
}

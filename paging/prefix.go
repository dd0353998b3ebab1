package paging

import "math/bits"

// AllParts is the set of all parts of the layout.
func (l *Layout) AllParts() PartSet { return AllParts(len(l.Parts)) }

// BytesOf is the bytes of one page of each of these parts, which are in the layout.
func (l *Layout) BytesOf(parts PartSet) (bytes uint64) {
	for ; parts != 0; parts &= parts - 1 {
		bytes += l.Parts[bits.TrailingZeros64(uint64(parts))].PageBytes
	}
	return bytes
}

// PartsOfRanks is the set of the parts that any of the ranks reads. No ranks:
// all parts.
func (l *Layout) PartsOfRanks(ranks []uint32) PartSet {
	if len(ranks) == 0 {
		return l.AllParts()
	}
	var set PartSet
	for i := range l.Parts {
		if len(l.Parts[i].Ranks) == 0 || meet(l.Parts[i].Ranks, ranks) {
			set = set.With(i)
		}
	}
	return set
}

func meet(a, b []uint32) bool {
	for _, x := range a {
		for _, y := range b {
			if x == y {
				return true
			}
		}
	}
	return false
}

// PagesAt is the subset of parts that have a page at position block of a chain
// (0 is the first): a page that covers several blocks lies at the last of them.
func (l *Layout) PagesAt(block int, parts PartSet) PartSet {
	at := parts & l.AllParts()
	for s := at; s != 0; s &= s - 1 {
		i := bits.TrailingZeros64(uint64(s))
		if b := l.Parts[i].BlocksPerPage; b > 1 && (uint64(block)+1)%uint64(b) != 0 {
			at = at.Without(i)
		}
	}
	return at
}

// Needed is the subset of parts whose page at position block is needed to reuse
// a prefix of usable blocks.
func (l *Layout) Needed(usable, block int, parts PartSet) PartSet {
	if block < 0 || block >= usable {
		return 0
	}
	at := l.PagesAt(block, parts)
	for s := at; s != 0; s &= s - 1 {
		i := bits.TrailingZeros64(uint64(s))
		if last := l.Parts[i].LastBlocks; last > 0 && uint64(usable-block) > uint64(last) {
			at = at.Without(i)
		}
	}
	return at
}

// UsablePrefix is the largest number of blocks, at most n, that can be reused:
// a multiple of BlocksPerPage of every part asked for, below which each page of
// those parts that Needed names is present. have tells the parts present at a
// position; it is called once for each position from 0 on, and not beyond the
// first page that every longer prefix would need. No parts: 0.
func (l *Layout) UsablePrefix(n int, parts PartSet, have func(block int) PartSet) int {
	parts &= l.AllParts()
	if parts == 0 {
		return 0
	}
	step := l.step(parts)
	every, sparse := l.split(parts)
	usable := 0
	// A missing page of a `last n` part at position b leaves out the prefixes of
	// b+1 to b+n blocks, whatever comes later: first is the shortest prefix that
	// is not left out by what was seen.
	first := 0
	due := parts
	for b, next := 0, step; b < n; b++ {
		if sparse != 0 {
			due = parts&^sparse | l.PagesAt(b, sparse)
		}
		if missing := due &^ have(b); missing != 0 {
			if missing&every != 0 {
				break
			}
			for ; missing != 0; missing &= missing - 1 {
				last := int(l.Parts[bits.TrailingZeros64(uint64(missing))].LastBlocks)
				first = max(first, b+last+1)
			}
		}
		if b+1 == next {
			next += step
			if b+1 >= first {
				usable = b + 1
			}
		}
	}
	return usable
}

// split returns the parts of which every page is needed, and those that have
// fewer pages than blocks.
func (l *Layout) split(parts PartSet) (every, sparse PartSet) {
	for s := parts; s != 0; s &= s - 1 {
		i := bits.TrailingZeros64(uint64(s))
		if l.Parts[i].LastBlocks == 0 {
			every = every.With(i)
		}
		if l.Parts[i].BlocksPerPage > 1 {
			sparse = sparse.With(i)
		}
	}
	return every, sparse
}

// step is the least number of blocks at which a page of each part ends; some
// number above MaxBlocksPerPage if it is larger than that.
func (l *Layout) step(parts PartSet) int {
	step := uint64(1)
	for s := parts; s != 0; s &= s - 1 {
		b := uint64(max(1, l.Parts[bits.TrailingZeros64(uint64(s))].BlocksPerPage))
		if step = step / gcd(step, b) * b; step > MaxBlocksPerPage {
			return MaxBlocksPerPage + 1
		}
	}
	return int(step)
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

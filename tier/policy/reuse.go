package policy

import "math/bits"

// reuse is the default policy: evict the block from which the fewest hits are
// to be expected for the room it would take until then.
//
// Blocks are put into classes. A block that was used before belongs to a
// conversation that goes on, or to a prompt that is shared; its class is how
// often it was used, in powers of two. A block that was used once is in a class
// by the length of the request that brought it, and apart from the others if it
// was the last of the request: in traces that is a partial block, which no
// longer prompt contains. A block that comes back after it was evicted keeps its
// count (history).
//
// For each class, a sample of all offers shows how likely the next use is by
// the time since the last one (sampler), whether or not the block was resident.
// Within a class the block used longest ago leaves first; between classes the
// oldest blocks are compared by their density. Until enough was seen all
// densities are equal, and this is LRU over tail-first offers.
//
// The weight of a block plays no part: one that is heavier is taken to save as
// much more work.
//
// Time is counted in offers, not in seconds: what ages a block is that others
// want its room, and a trace may have no useful clock.
type reuse struct {
	blocks  *Blocks
	lists   []list // classes lists for each level in use, oldest end first
	levels  [MaxPriority + 1]level
	offers  uint64
	members int
	past    history
	sampler sampler

	// The offer before this one.
	child     Access
	childUses uint8
}

type level struct {
	lists   int // start in lists, plus one
	visible int
}

// Classes of blocks: first those used once, two for each length of request.
const (
	lengths       = 9 // by binary length: 0 (not known), 1, 2–3, … 128 and more
	lastOfRequest = 1 // the odd class
	turns         = 6 // 2–3 uses, 4–7, … 64 and more
	turnClass     = 2 * lengths
	classes       = turnClass + turns
)

func class(uses uint8, a Access) uint8 {
	if uses > 1 {
		return uint8(turnClass + min(bits.Len8(uses), turns+1) - 2)
	}
	c := 2 * min(bits.Len32(uint32(max(a.Length, 0))), lengths-1)
	if a.Length > 0 && a.Position == a.Length-1 {
		c += lastOfRequest
	}
	return uint8(c)
}

// tickShift makes a tick of 16 offers: 32 bits of ticks last for 70 days at
// 10,000 offers a second, after which blocks that old look young.
const tickShift = 4

func newReuse(b *Blocks) *reuse { return &reuse{blocks: b, child: Access{Position: -1}} }

func (o *reuse) tick() uint32 { return uint32(o.offers >> tickShift) }

// queue is the list of a block's level and class.
func (o *reuse) queue(n *node) *list {
	level := &o.levels[n.level]
	if level.lists == 0 {
		level.lists = len(o.lists) + 1
		for range classes {
			o.lists = append(o.lists, newList())
		}
	}
	return &o.lists[level.lists-1+int(n.queue)]
}

func (o *reuse) insert(id ID, a Access) {
	n := o.blocks.at(id)
	n.uses = o.past.take(n.key)
	o.members++
	o.use(id, n, a)
}

func (o *reuse) hit(id ID, a Access) {
	o.hide(id)
	o.use(id, o.blocks.at(id), a)
}

// use counts an offer of a hidden block and shows it.
func (o *reuse) use(id ID, n *node, a Access) {
	o.offers++
	if n.uses < 255 {
		n.uses++
	}
	// A block was used at least as often as what extends it. The history
	// forgets single blocks; a hole in a chain would make the rest useless.
	if a.Position+1 == o.child.Position && a.Length == o.child.Length {
		n.uses = max(n.uses, o.childUses)
	}
	o.child, o.childUses = a, n.uses
	n.queue = class(n.uses, a)
	blocks := max(a.Length, a.Position+1, 1)
	o.sampler.offer(sample{mix(n.key), o.tick(), n.queue}, float64(blocks), o.members)
	o.show(id, true)
}

func (o *reuse) leave(id ID, evicted bool) {
	o.hide(id)
	o.members--
	if evicted {
		n := o.blocks.at(id)
		o.past.put(n.key, n.uses, o.members)
	}
}

// next compares the oldest block of each class of the lowest level.
func (o *reuse) next() (ID, bool) {
	for l := range o.levels {
		if o.levels[l].visible > 0 {
			return o.least(o.lists[o.levels[l].lists-1:][:classes]), true
		}
	}
	return none, false
}

// least is the block of the lowest density; among equals the longest unused,
// then the one used less often, which is deeper in its chain.
func (o *reuse) least(lists []list) ID {
	best, bestDensity, bestAge := none, 0.0, uint32(0)
	for c := range lists {
		id := lists[c].oldest
		if id == none {
			continue
		}
		age := o.tick() - o.blocks.at(id).tick
		d := o.sampler.density[c][ageOf(age)]
		if best == none || d < bestDensity || d == bestDensity && age > bestAge {
			best, bestDensity, bestAge = id, d, age
		}
	}
	return best
}

func (o *reuse) hide(id ID) {
	n := o.blocks.at(id)
	o.levels[n.level].visible--
	o.blocks.unlink(o.queue(n), id)
}

func (o *reuse) show(id ID, newest bool) {
	n := o.blocks.at(id)
	if newest {
		n.tick = o.tick()
	}
	o.blocks.push(o.queue(n), id, newest)
	o.levels[n.level].visible++
}

func (o *reuse) resize(int64) {}

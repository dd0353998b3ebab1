package policy

import "math/bits"

// sampler learns, for each class, when blocks are used again. It follows a
// sample of keys through all their offers and knows nothing of what is resident:
// so what it learns does not depend on what the policy decides.
//
// It keeps a ring of the sampled offers, oldest first, and in it a cursor for
// each age: entries behind a cursor have outlived that age. An entry counts for
// every age that it survives, and ends as a hit at the age at which its key
// comes again. That gives the probability of the next use by age without bias
// from offers whose next use is still to come (the Kaplan-Meier estimate).
type sampler struct {
	ring    []sample // its length is a power of two
	first   uint64   // number of the oldest entry; number n lies at n modulo the length
	end     uint64   // number of the next entry
	cursors [ages]uint64
	index   []uint32 // open addressing by mixed key: place in ring plus one, 0 is empty
	shift   uint     // of 1<<shift keys one is sampled

	learned [classes]learned
	samples int     // since what was learned was last halved
	returns float64 // requests that came back, ever
	wait    int     // offers until the densities are computed again
	density density
}

type sample struct {
	key   uint64 // mixed
	tick  uint32
	class uint8 // ended if its next use came
}

const (
	ended = 255

	ringStart = 1 << 10
	ringSize  = 1 << 14 // 256 KiB, and half of that for the index
	// The sample is thinned until the ring spans this many ticks, 65,536 offers,
	// and this many times the offers that fill the tier: what comes back later
	// is not known to.
	spanTicks = 1 << 12
	spanLives = 4

	halfLife = 2 * ringSize // samples after which what was learned counts half

	// The densities are computed again after this many offers, or this fraction
	// of the resident blocks if that is more.
	rankEvery = 1024
	rankShare = 16
)

// Ages are ticks in steps of a quarter octave: 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, …
const (
	stepBits = 2
	ages     = 84 // the last begins at 7<<19 ticks, 58 million offers
)

func ageOf(ticks uint32) int {
	if ticks < 1<<stepBits {
		return int(ticks)
	}
	octave := bits.Len32(ticks) - 1 - stepBits
	return min(octave<<stepBits+int(ticks>>octave), ages-1)
}

// ageStart is the least number of ticks of an age.
func ageStart(age int) uint32 {
	if age < 2<<stepBits {
		return uint32(age)
	}
	octave := age>>stepBits - 1
	return uint32(age-octave<<stepBits) << octave
}

// offer records an offer of a key at a time, in its new class, by a request of
// some blocks.
func (s *sampler) offer(o sample, blocks float64, resident int) {
	if s.wait--; s.wait < 0 {
		s.wait = max(rankEvery, resident/rankShare)
		s.advance(o.tick)
		if s.returns >= minReturns {
			s.density.compute(&s.learned, s.shift)
		}
	}
	if !s.sampled(o.key) {
		return
	}
	s.learned[o.class].blocks++
	s.learned[o.class].requests += 1 / blocks
	if n, ok := s.lookup(o.key); ok {
		s.hit(n, o.tick)
		s.unindex(o.key)
		s.returns += float64(uint64(1)<<s.shift) / blocks
	}
	if int(s.end-s.first) == len(s.ring) {
		s.makeRoom(o.tick, resident)
		if !s.sampled(o.key) {
			return
		}
	}
	place := s.end & s.mask()
	s.ring[place] = o
	s.insert(o.key, uint32(place))
	s.end++
	if s.samples++; s.samples == halfLife {
		s.samples = 0
		for c := range s.learned {
			s.learned[c].halve()
		}
	}
}

func (s *sampler) sampled(mixed uint64) bool { return mixed&(1<<s.shift-1) == 0 }

func (s *sampler) mask() uint64 { return uint64(len(s.ring) - 1) }

// hit ends an entry whose key was offered again.
func (s *sampler) hit(n uint64, now uint32) {
	e := &s.ring[n&s.mask()]
	age := ageOf(now - e.tick)
	for a := age - 1; a >= 0 && s.cursors[a] <= n; a-- {
		s.learned[e.class].survived[a]++
	}
	s.learned[e.class].hits[age]++
	e.class = ended
}

// advance moves the cursors past all entries that have outlived their age.
func (s *sampler) advance(now uint32) {
	for a := range ages - 1 {
		c, over := s.cursors[a], ageStart(a+1)
		for ; c < s.end; c++ {
			e := s.ring[c&s.mask()]
			if now-e.tick < over {
				break
			}
			if e.class != ended {
				s.learned[e.class].survived[a]++
			}
		}
		s.cursors[a] = c
	}
}

// makeRoom lets the ring grow, thins the sample if the ring spans too little,
// or forgets the oldest entry.
func (s *sampler) makeRoom(now uint32, resident int) {
	if len(s.ring) < ringSize {
		s.rebuild(max(ringStart, 2*len(s.ring)))
		return
	}
	span := max(spanTicks, uint32(spanLives*resident>>tickShift))
	if now-s.ring[s.first&s.mask()].tick < span {
		s.shift++
		s.rebuild(ringSize)
	}
	if int(s.end-s.first) < len(s.ring) {
		return
	}
	if e := s.ring[s.first&s.mask()]; e.class != ended {
		s.unindex(e.key)
	}
	s.first++
	for a := range s.cursors {
		s.cursors[a] = max(s.cursors[a], s.first)
	}
}

// rebuild copies the entries that count and are still sampled to a ring of the
// given size.
func (s *sampler) rebuild(size int) {
	old, oldMask := s.ring, uint64(len(s.ring)-1)
	s.ring, s.index = make([]sample, size), make([]uint32, 2*size)
	kept, cursors := uint64(0), s.cursors
	a := ages - 1 // cursors of higher ages are further back
	for n := s.first; ; n++ {
		for ; a >= 0 && cursors[a] <= n; a-- {
			s.cursors[a] = kept
		}
		if n == s.end {
			break
		}
		e := old[n&oldMask]
		if e.class == ended || !s.sampled(e.key) {
			continue
		}
		s.ring[kept] = e
		s.insert(e.key, uint32(kept))
		kept++
	}
	s.first, s.end = 0, kept
}

// The index is a table with linear probing, at most half full.

func (s *sampler) home(mixed uint64) uint32 {
	return uint32(mixed>>24) & uint32(len(s.index)-1)
}

func (s *sampler) find(mixed uint64) (at uint32, ok bool) {
	if len(s.index) == 0 {
		return 0, false
	}
	mask := uint32(len(s.index) - 1)
	at = s.home(mixed)
	for ; s.index[at] != 0; at = (at + 1) & mask {
		if s.ring[s.index[at]-1].key == mixed {
			return at, true
		}
	}
	return at, false
}

// lookup is the number of the entry of a key.
func (s *sampler) lookup(mixed uint64) (n uint64, ok bool) {
	at, ok := s.find(mixed)
	if !ok {
		return 0, false
	}
	place := uint64(s.index[at] - 1)
	return s.first + (place-s.first)&s.mask(), true
}

func (s *sampler) insert(mixed uint64, place uint32) {
	at, _ := s.find(mixed)
	s.index[at] = place + 1
}

// unindex removes a key and closes the gap, so that no probe ends early.
func (s *sampler) unindex(mixed uint64) {
	gap, ok := s.find(mixed)
	if !ok {
		return
	}
	mask := uint32(len(s.index) - 1)
	for at := (gap + 1) & mask; s.index[at] != 0; at = (at + 1) & mask {
		home := s.home(s.ring[s.index[at]-1].key)
		if (at-home)&mask >= (at-gap)&mask {
			s.index[gap] = s.index[at]
			gap = at
		}
	}
	s.index[gap] = 0
}

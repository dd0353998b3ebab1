package policy

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestAges(t *testing.T) {
	for age := range ages {
		if got := ageOf(ageStart(age)); got != age {
			t.Errorf("ageOf(ageStart(%d)) = %d", age, got)
		}
		if age > 0 {
			if got := ageOf(ageStart(age) - 1); got != age-1 {
				t.Errorf("ageOf(ageStart(%d) − 1) = %d", age, got)
			}
		}
	}
	if got := ageOf(math.MaxUint32); got != ages-1 {
		t.Errorf("ageOf(max) = %d, want %d", got, ages-1)
	}
}

// TestSamplerIndex compares the index with a map, while the sample grows, is
// thinned and wraps around.
func TestSamplerIndex(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var s sampler
	last := map[uint64]uint32{} // to the tick of the last offer
	for i := range uint32(300000) {
		key := mix(r.Uint64N(40000))
		s.offer(sample{key, i / 10, uint8(key % classes)}, 10, 1000)
		last[key] = i / 10
		if i%10007 != 0 {
			continue
		}
		found := 0
		for key, tick := range last {
			n, ok := s.lookup(key)
			if !ok {
				continue
			}
			found++
			if e := s.ring[n&s.mask()]; e.key != key || e.tick != tick || !s.sampled(key) || n < s.first || n >= s.end {
				t.Fatalf("offer %d: entry %d of %d to %d is %+v, want key %d, tick %d", i, n, s.first, s.end, e, key, tick)
			}
		}
		live := 0
		for n := s.first; n < s.end; n++ {
			if s.ring[n&s.mask()].class != ended {
				live++
			}
		}
		if live != found {
			t.Fatalf("offer %d: %d live entries, the index finds %d", i, live, found)
		}
		for a := 1; a < ages; a++ {
			if s.cursors[a] > s.cursors[a-1] || s.cursors[a] < s.first {
				t.Fatalf("offer %d: cursors %d and %d after entry %d", i, s.cursors[a-1], s.cursors[a], s.first)
			}
		}
	}
	if s.shift == 0 || len(s.ring) != ringSize {
		t.Errorf("shift %d, ring of %d: the test has not reached them", s.shift, len(s.ring))
	}
}

// TestSamplerHazard: of blocks that are used again after 100 ticks with
// probability .3, and else never, it learns just that, although the offers of
// the last 100 ticks have not had their chance.
func TestSamplerHazard(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var s sampler
	key := uint64(0)
	again := map[uint32][]uint64{}
	for tick := range uint32(1000) {
		for range 10 {
			key++
			s.offer(sample{mix(key), tick, 3}, 1, 1000)
			if r.Float64() < .3 {
				again[tick+100] = append(again[tick+100], key)
			}
		}
		for _, k := range again[tick] {
			s.offer(sample{mix(k), tick, 4}, 1, 1000)
		}
	}
	s.advance(999)
	at := ageOf(100)
	for a := range ages {
		hits, survived := s.learned[3].hits[a], s.learned[3].survived[a]
		switch {
		case a == at:
			if got := hits / (hits + survived); math.Abs(got-.3) > .02 {
				t.Errorf("probability of a use at age %d = %.3f, want .3", a, got)
			}
		case hits != 0:
			t.Errorf("%v hits at age %d, want all at %d", hits, a, at)
		}
	}
}

// TestSamplerCountsOnce: an offer counts at every age that it survived, once,
// and at the age of its next use.
func TestSamplerCountsOnce(t *testing.T) {
	for _, when := range []uint32{0, 5, 50, 100, 101, 500} {
		var s sampler
		s.offer(sample{mix(1), 0, 2}, 1, 10)
		s.advance(when)
		s.offer(sample{mix(1), max(100, when), 3}, 1, 10)
		s.advance(10000)
		for a := range ages {
			survived, hits := 0.0, 0.0
			if a < ageOf(max(100, when)) {
				survived = 1
			} else if a == ageOf(max(100, when)) {
				hits = 1
			}
			if l := &s.learned[2]; l.survived[a] != survived || l.hits[a] != hits {
				t.Errorf("advanced at %d: age %d survived %v times, hit %v times; want %v, %v", when, a, l.survived[a], l.hits[a], survived, hits)
			}
		}
	}
}

func TestDensityFallsWithAgeAndRisesWithUses(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var of [classes]learned
	for c := range of {
		for a := range ages {
			of[c].hits[a] = float64(r.IntN(30))
			of[c].survived[a] = float64(r.IntN(1000))
		}
		of[c].blocks, of[c].requests = 1000, 30
	}
	var d density
	d.compute(&of, 2)
	for c := range d {
		for a := range ages {
			if a > 0 && d[c][a] > d[c][a-1]*(1+1e-12) {
				t.Fatalf("class %d: density rises from %g to %g at age %d", c, d[c][a-1], d[c][a], a)
			}
			if c >= turnClass && d[c][a] < d[c-1][a] && c > turnClass {
				t.Fatalf("age %d: density falls from %g to %g at class %d", a, d[c-1][a], d[c][a], c)
			}
		}
	}
}

// TestEnvelope: a use that comes only between 64 and 80 ticks gives all ages
// before it the slope of waiting for it.
func TestEnvelope(t *testing.T) {
	var hazard, slopes [ages]float64
	at := ageOf(64)
	hazard[at] = .5
	envelope(&hazard, &slopes)
	want := .5 / (64 + 16*.75)
	for a := range ages {
		if a > at {
			want = 0
		}
		if math.Abs(slopes[a]-want) > 1e-12 {
			t.Errorf("age %d: slope %g, want %g", a, slopes[a], want)
		}
	}
}

func TestHistory(t *testing.T) {
	var h history
	if got := h.take(1); got != 0 {
		t.Errorf("empty history remembers %d uses", got)
	}
	const n = 4 * historyFloor
	for key := range uint64(n) {
		h.put(key, uint8(key%200)+1, 0)
	}
	recent, old, size := 0, 0, 0
	for key := range uint64(n) {
		uses := h.take(key)
		if uses == 0 {
			continue
		}
		if want := uint8(key%200) + 1; uses != want {
			t.Fatalf("key %d: %d uses, want %d", key, uses, want)
		}
		if key >= n-historyFloor/2 {
			recent++
		} else if key < n-2*historyFloor {
			old++
		}
		if h.take(key) != 0 {
			t.Fatalf("key %d was not forgotten when it was taken", key)
		}
	}
	if recent < historyFloor/2*9/10 || old > historyFloor/20 {
		t.Errorf("remembers %d of the last %d, and %d that are older than twice its size", recent, historyFloor/2, old)
	}
	for i := range h.shards {
		size += len(h.shards[i].entries)
	}
	if size > historyFloor {
		t.Errorf("%d entries, want at most %d", size, historyFloor)
	}
}

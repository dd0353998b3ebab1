package policy

// history remembers how often evicted blocks were used, so that a turn that
// finds its blocks gone is still known as a later turn. It holds the most
// recently evicted in sets of eight, newest first; 8 bytes each.
type history struct{ shards [historyShards]historyShard }

const (
	historyShards = 64
	// historyFloor entries are remembered however small the tier is: what
	// matters is the number of blocks that pass between two turns, and a small
	// tier forgets within seconds.
	historyFloor = 32768
	historyWays  = 8
	// historyStart is the size of a shard when its first entry comes.
	historyStart = 8 * historyWays
)

// historyShard grows alone, so that no eviction rehashes more than a shard. An
// entry is the upper 56 bits of a mixed key and a count; 0 is empty.
type historyShard struct {
	entries []uint64
	used    int
}

// mix spreads the bits of a key (the finaliser of splitmix64).
func mix(key uint64) uint64 {
	key ^= key >> 30
	key *= 0xbf58476d1ce4e5b9
	key ^= key >> 27
	key *= 0x94d049bb133111eb
	return key ^ key>>31
}

func (h *history) shard(mixed uint64) *historyShard { return &h.shards[mixed>>(64-6)] }

// set is the eight entries where a mixed key may be.
func (s *historyShard) set(mixed uint64) []uint64 {
	sets := uint64(len(s.entries) / historyWays)
	i := (mixed >> 26 & 0xffffffff) * sets >> 32
	return s.entries[i*historyWays:][:historyWays]
}

// put remembers an evicted block beside resident ones.
func (h *history) put(key uint64, uses uint8, resident int) {
	mixed := mix(key)
	s := h.shard(mixed)
	s.grow((historyFloor + resident) / historyShards)
	s.add(mixed&^0xff | uint64(max(uses, 1)))
}

func (s *historyShard) add(e uint64) {
	set := s.set(e)
	if set[historyWays-1] == 0 {
		s.used++
	}
	copy(set[1:], set[:historyWays-1])
	set[0] = e
}

// grow doubles a shard that is getting full, up to limit entries.
func (s *historyShard) grow(limit int) {
	size := len(s.entries)
	switch {
	case size == 0:
		s.entries = make([]uint64, historyStart)
		return
	case s.used < size/4*3 || 2*size > limit:
		return
	}
	old := s.entries
	*s = historyShard{entries: make([]uint64, 2*size)}
	for i := 0; i < size; i += historyWays {
		for j := historyWays - 1; j >= 0; j-- { // the newest last, to end first
			if e := old[i+j]; e != 0 {
				s.add(e)
			}
		}
	}
}

// take forgets a block that is back and answers how often it had been used, 0
// if it is not remembered.
func (h *history) take(key uint64) uint8 {
	mixed := mix(key)
	s := h.shard(mixed)
	if len(s.entries) == 0 {
		return 0
	}
	set := s.set(mixed)
	for i, e := range set {
		if e != 0 && (e^mixed)>>8 == 0 {
			copy(set[i:], set[i+1:])
			set[historyWays-1] = 0
			s.used--
			return uint8(e)
		}
	}
	return 0
}

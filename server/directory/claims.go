package directory

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Shards is the number of shards that DropClaims names.
const Shards = shardCount

// shardCount is the number of shards of the claim table. A shard is what one
// write may have to copy while a snapshot reads the table: at 5 M claims about
// 20,000 claims of 32 bytes, well under a millisecond.
const shardCount = 256

// bucketCount is the number of digests that an owner and the directory compare.
const bucketCount = 1024

// Buckets names some of them.
type Buckets [bucketCount]bool

const bucketsPerShard = bucketCount / shardCount

// claim says that a node holds parts of a block. 32 bytes, no pointer: the
// garbage collector never looks at claims.
type claim struct {
	key   placement.BlockKey
	parts paging.PartSet
	node  uint16 // number of the holder, 0: the slot is empty
}

// claimTable holds claims in shards of open addressing. A block with several
// holders has one claim each, in one probe run.
type claimTable struct {
	shards [shardCount]claimShard
	count  int64
}

type claimShard struct {
	slots  []claim
	used   int
	shared bool // a snapshot reads slots: copy before the next write
}

// shardOf takes bits that home does not use.
func shardOf(k placement.BlockKey) int { return int(k[15]) }

// bucketOf is the digest bucket of a block: four buckets lie in one shard, so
// that a repair looks at the shards of its buckets only.
func bucketOf(k placement.BlockKey) int {
	return shardOf(k)*bucketsPerShard + int(k[14])%bucketsPerShard
}

// home is the first slot to look at: keys are hashes, so their first bytes are.
func (s *claimShard) home(k placement.BlockKey) int {
	hi, _ := bits.Mul64(binary.LittleEndian.Uint64(k[:]), uint64(len(s.slots)))
	return int(hi)
}

func (s *claimShard) next(i int) int {
	if i++; i == len(s.slots) {
		return 0
	}
	return i
}

// find returns the slot of (k, node), or the empty slot that ends its run.
func (s *claimShard) find(k placement.BlockKey, node uint16) (int, bool) {
	i := s.home(k)
	for s.slots[i].node != 0 {
		if s.slots[i].node == node && s.slots[i].key == k {
			return i, true
		}
		i = s.next(i)
	}
	return i, false
}

// get returns the parts that node claims of k; 0 if none.
func (t *claimTable) get(k placement.BlockKey, node uint16) paging.PartSet {
	s := &t.shards[shardOf(k)]
	if s.used == 0 {
		return 0
	}
	if i, ok := s.find(k, node); ok {
		return s.slots[i].parts
	}
	return 0
}

// put sets what node claims of k and returns what it claimed before. No parts
// removes the claim.
func (t *claimTable) put(k placement.BlockKey, node uint16, parts paging.PartSet) (before paging.PartSet) {
	s := &t.shards[shardOf(k)]
	if parts == 0 {
		return t.remove(s, k, node)
	}
	s.own()
	if (s.used+1)*5 > len(s.slots)*4 {
		s.grow()
	}
	i, ok := s.find(k, node)
	if ok {
		before = s.slots[i].parts
		s.slots[i].parts = parts
		return before
	}
	s.slots[i] = claim{key: k, parts: parts, node: node}
	s.used++
	t.count++
	return 0
}

// own makes the shard's slots the table's alone.
func (s *claimShard) own() {
	if s.shared {
		s.slots = slices.Clone(s.slots)
		s.shared = false
	}
}

// grow keeps the load between 0.6 and 0.8: 40 to 53 bytes a claim.
func (s *claimShard) grow() {
	old := s.slots
	s.slots = make([]claim, max(16, len(old)+len(old)/3))
	s.shared = false
	for i := range old {
		if old[i].node != 0 {
			j, _ := s.find(old[i].key, old[i].node)
			s.slots[j] = old[i]
		}
	}
}

func (t *claimTable) remove(s *claimShard, k placement.BlockKey, node uint16) paging.PartSet {
	if s.used == 0 {
		return 0
	}
	i, ok := s.find(k, node)
	if !ok {
		return 0
	}
	s.own()
	before := s.slots[i].parts
	s.used--
	t.count--
	for j := s.next(i); s.slots[j].node != 0; j = s.next(j) {
		// The claim at j may fill the hole at i unless its home lies in (i, j].
		h := s.home(s.slots[j].key)
		if (i < j && i < h && h <= j) || (i > j && (i < h || h <= j)) {
			continue
		}
		s.slots[i] = s.slots[j]
		i = j
	}
	s.slots[i] = claim{}
	return before
}

// each calls f with every claim of k.
func (t *claimTable) each(k placement.BlockKey, f func(node uint16, parts paging.PartSet)) {
	s := &t.shards[shardOf(k)]
	if s.used == 0 {
		return
	}
	for i := s.home(k); s.slots[i].node != 0; i = s.next(i) {
		if s.slots[i].key == k {
			f(s.slots[i].node, s.slots[i].parts)
		}
	}
}

// freeze returns the slots of all shards as they are now. The next write to a
// shard copies it first.
func (t *claimTable) freeze() *[shardCount][]claim {
	out := new([shardCount][]claim)
	for i := range t.shards {
		out[i] = t.shards[i].slots
		t.shards[i].shared = true
	}
	return out
}

// sortedClaims returns the claims of a frozen shard in order of key and node.
func sortedClaims(slots []claim) []claim {
	var out []claim
	for i := range slots {
		if slots[i].node != 0 {
			out = append(out, slots[i])
		}
	}
	slices.SortFunc(out, func(a, b claim) int {
		if c := bytes.Compare(a.key[:], b.key[:]); c != 0 {
			return c
		}
		return int(a.node) - int(b.node)
	})
	return out
}

// claimHash is a claim's contribution to digests and to the state hash: sums and
// exclusive ors of it do not depend on order.
func claimHash(k placement.BlockKey, parts paging.PartSet) uint64 {
	h := binary.LittleEndian.Uint64(k[:]) ^ bits.RotateLeft64(binary.LittleEndian.Uint64(k[8:]), 31)
	h = (h ^ uint64(parts)*0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>29) * 0x94d049bb133111eb
	return h ^ h>>32
}

package directory

import (
	"encoding/binary"
	"slices"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// changeBytes is the length of one change of a batch: block key, part set.
const changeBytes = 24

// Bounds of one batch, so that no log entry is large and no Apply is long.
const (
	MaxBatchBytes   = 256 << 10
	MaxBatchChanges = 4096
)

// AppendChange appends a change to the changes of a ClaimBatch. No parts: released.
func AppendChange(b []byte, k placement.BlockKey, parts paging.PartSet) []byte {
	b = append(b, k[:]...)
	return binary.LittleEndian.AppendUint64(b, uint64(parts))
}

func decodeChange(b []byte) (k placement.BlockKey, parts paging.PartSet) {
	copy(k[:], b)
	return k, paging.PartSet(binary.LittleEndian.Uint64(b[len(k):]))
}

// sequenced decides whether an entry with this sequence is the node's next.
func (n *Node) sequenced(sequence uint64) Result {
	switch {
	case sequence <= n.Sequence:
		return Stale
	case sequence > n.Sequence+1:
		return Gap
	}
	return OK
}

// claimBatch applies the next batch of a node. An older sequence is a retry of
// what was applied: success. A newer one is a gap: nothing changes but the note
// that the owner must repair.
func (s *State) claimBatch(c *kvtierv1.ClaimBatch) Result {
	changes := c.GetChanges()
	if len(changes)%changeBytes != 0 || len(changes) > MaxBatchChanges*changeBytes || len(changes) > MaxBatchBytes {
		return Invalid
	}
	n, r := s.current(c.GetNode(), c.GetIncarnation())
	if n == nil {
		return r
	}
	switch n.sequenced(c.GetSequence()) {
	case Stale:
		if sabotage.On("apply-older-sequences") {
			return s.change(n, changes)
		}
		return OK
	case Gap:
		n.Gap = true
		return Gap
	}
	n.Sequence = c.GetSequence()
	return s.change(n, changes)
}

// change applies changes. Those beyond the claim budget are left out and the
// answer is FULL: the owner finds by its digests which were made.
func (s *State) change(n *Node, changes []byte) Result {
	result := OK
	for ; len(changes) > 0; changes = changes[changeBytes:] {
		k, parts := decodeChange(changes)
		if parts != 0 && s.claims.count >= s.maxClaims && s.claims.get(k, n.number) == 0 {
			result = Full
			continue
		}
		if parts == 0 && sabotage.On("drop-claim-releases") {
			continue
		}
		s.set(n, k, parts)
	}
	return result
}

// set is the only way in which a claim changes.
func (s *State) set(n *Node, k placement.BlockKey, parts paging.PartSet) {
	before := s.claims.put(k, n.number, parts)
	if before == parts {
		return
	}
	digest := &n.digests[bucketOf(k)]
	if before != 0 {
		*digest ^= claimHash(k, before)
		n.Claims--
	}
	if parts != 0 {
		*digest ^= claimHash(k, parts)
		n.Claims++
	}
}

// claimRepair replaces a node's claims in some buckets. It takes the next
// sequence like a batch, or sets it where the owner says that it starts over.
func (s *State) claimRepair(c *kvtierv1.ClaimRepair) Result {
	var named [bucketCount]bool
	if len(c.GetBuckets())%2 != 0 || len(c.GetBuckets()) > 2*bucketCount || len(c.GetClaims())%changeBytes != 0 ||
		len(c.GetClaims()) > MaxBatchBytes {
		return Invalid
	}
	for b := c.GetBuckets(); len(b) > 0; b = b[2:] {
		i := binary.LittleEndian.Uint16(b)
		if i >= bucketCount {
			return Invalid
		}
		named[i] = true
	}
	for b := c.GetClaims(); len(b) > 0; b = b[changeBytes:] {
		if k, parts := decodeChange(b); !named[bucketOf(k)] || parts == 0 {
			return Invalid
		}
	}
	n, r := s.current(c.GetNode(), c.GetIncarnation())
	if n == nil {
		return r
	}
	switch order := n.sequenced(c.GetSequence()); {
	case order == Stale:
		return OK
	case order == Gap && !c.GetResetsSequence():
		n.Gap = true
		return Gap
	}
	n.Sequence = c.GetSequence()
	if c.GetResetsSequence() {
		n.Gap = false
	}
	s.forget(n, &named)
	return s.change(n, c.GetClaims())
}

// forget drops the node's claims in the named buckets.
func (s *State) forget(n *Node, named *[bucketCount]bool) {
	var keys []placement.BlockKey
	for i := range s.claims.shards {
		if first := i * bucketsPerShard; !slices.Contains(named[first:first+bucketsPerShard], true) {
			continue
		}
		keys = keys[:0]
		for _, c := range s.claims.shards[i].slots {
			if c.node == n.number && named[bucketOf(c.key)] {
				keys = append(keys, c.key)
			}
		}
		for _, k := range keys {
			s.set(n, k, 0)
		}
	}
}

func (s *State) dropClaims(c *kvtierv1.DropClaims) Result {
	if c.GetFromShard() > c.GetToShard() || c.GetToShard() > shardCount {
		return Invalid
	}
	n, r := s.current(c.GetNode(), c.GetIncarnation())
	if n == nil {
		return r
	}
	if n.State == kvtierv1.NodeState_NODE_STATE_UP {
		return Stale
	}
	var named [bucketCount]bool
	for i := int(c.GetFromShard()) * bucketsPerShard; i < int(c.GetToShard())*bucketsPerShard; i++ {
		named[i] = true
	}
	s.forget(n, &named)
	// What was dropped is missing if the node comes back in this incarnation.
	n.Gap = true
	return OK
}

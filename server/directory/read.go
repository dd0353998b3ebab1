package directory

import (
	"bytes"
	"slices"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// Locate appends the nodes that claim block k and are not known to be gone, in
// the order of their numbers.
func (s *State) Locate(k placement.BlockKey, out []Holder) []Holder {
	first := len(out)
	s.claims.each(k, func(number uint16, parts paging.PartSet) {
		if n := s.numbers[number]; n.State == kvtierv1.NodeState_NODE_STATE_UP || n.State == kvtierv1.NodeState_NODE_STATE_DRAINING {
			out = append(out, Holder{Node: n.ID, Parts: parts})
		}
	})
	if len(out)-first > 1 {
		slices.SortFunc(out[first:], func(a, b Holder) int { return bytes.Compare(a.Node[:], b.Node[:]) })
	}
	return out
}

// Nodes returns copies of all node records in order of id.
func (s *State) Nodes() []Node {
	out := make([]Node, 0, len(s.nodes))
	for _, n := range s.numbers {
		if n != nil {
			c := *n
			c.Capacity = slices.Clone(n.Capacity)
			c.digests = nil
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b Node) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	return out
}

// Node returns a copy of a node's record.
func (s *State) Node(id placement.NodeID) (Node, bool) {
	n := s.nodes[id]
	if n == nil {
		return Node{}, false
	}
	c := *n
	c.Capacity = slices.Clone(n.Capacity)
	c.digests = nil
	return c, true
}

// Digests returns the digest of each bucket of a node's claims, for its owner to
// compare with ClaimDigest of its own; false if the node is not known.
func (s *State) Digests(id placement.NodeID) (*[bucketCount]uint64, bool) {
	n := s.nodes[id]
	if n == nil {
		return nil, false
	}
	out := *n.digests
	return &out, true
}

// ClaimDigest returns the bucket of a claim and what it contributes to that
// bucket's digest: an owner accumulates contributions of its inventory by
// exclusive or.
func ClaimDigest(k placement.BlockKey, parts paging.PartSet) (bucket int, contribution uint64) {
	return bucketOf(k), claimHash(k, parts)
}

// Namespace returns the canonical encoding of a namespace. Not to be modified.
func (s *State) Namespace(id paging.NamespaceID) ([]byte, bool) {
	ns, ok := s.namespaces[id]
	return ns.encoded, ok
}

// Namespaces calls f with each namespace, in no order: its canonical encoding, not
// to be modified, and when it was put last, to the hour.
func (s *State) Namespaces(f func(id paging.NamespaceID, encoded []byte, putMillis int64)) {
	for id, rec := range s.namespaces {
		f(id, rec.encoded, rec.sinceMillis)
	}
}

// MaxClaims is the claim budget in force: the leader's.
func (s *State) MaxClaims() int64 { return s.maxClaims }

// Claims is the number of claims held.
func (s *State) Claims() int64 { return s.claims.count }

// NowMillis is the clock of the state machine: the greatest time in any command.
func (s *State) NowMillis() int64 { return s.nowMillis }

// StateName is the word that people use for a node's state.
func StateName(s kvtierv1.NodeState) string {
	switch s {
	case kvtierv1.NodeState_NODE_STATE_UP:
		return "up"
	case kvtierv1.NodeState_NODE_STATE_DOWN:
		return "down"
	case kvtierv1.NodeState_NODE_STATE_DRAINING:
		return "draining"
	case kvtierv1.NodeState_NODE_STATE_LEFT:
		return "left"
	default:
		return "unknown"
	}
}

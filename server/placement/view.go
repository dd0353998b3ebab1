package placement

import (
	"slices"
	"time"
)

// NodeInfo is what gossip knows of one node.
type NodeInfo struct {
	ID          NodeID
	Incarnation Incarnation
	Name        string // for people
	PeerAddress string // host:port of its peer port
	RPCAddress  string // host:port of its gRPC port; "": it has none
	Seen        bool   // it answers
	Left        bool   // it is leaving, or left, in good order
	Since       time.Time
}

// View is the cluster as gossip sees it at one moment: a hint about who is
// alive, never more. It is immutable and may be shared.
type View struct {
	Version uint64     // rises with each change
	Nodes   []NodeInfo // in order of id; this node included
}

// Find returns the record of a node.
func (v *View) Find(id NodeID) (NodeInfo, bool) {
	i, ok := slices.BinarySearchFunc(v.Nodes, id, func(n NodeInfo, id NodeID) int { return slices.Compare(n.ID[:], id[:]) })
	if !ok {
		return NodeInfo{}, false
	}
	return v.Nodes[i], true
}

// Members is the view as decisions about voters need it.
func (v *View) Members(now time.Time) []Member {
	out := make([]Member, len(v.Nodes))
	for i, n := range v.Nodes {
		out[i] = Member{ID: n.ID, Seen: n.Seen, Left: n.Left}
		if !n.Seen {
			out[i].Gone = max(0, now.Sub(n.Since))
		}
	}
	return out
}

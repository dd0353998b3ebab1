package placement

import (
	"bytes"
	"cmp"
	"slices"
	"time"
)

// Member is a node as gossip sees it.
type Member struct {
	ID   NodeID
	Seen bool          // it answers
	Gone time.Duration // how long it has not; 0 while Seen
	Left bool          // it left in good order
}

// Replica is a node as the directory's configuration has it.
type Replica struct {
	ID    NodeID
	Voter bool
}

// ChangeKind is a kind of configuration change.
type ChangeKind uint8

// Kinds of change.
const (
	AddReplica ChangeKind = iota + 1 // a node follows the log without a vote
	Promote                          // a follower gets a vote
	Demote                           // a voter becomes a follower
	RemoveReplica
)

// String is the lower-case verb.
func (k ChangeKind) String() string {
	return [...]string{"none", "add", "promote", "demote", "remove"}[k]
}

// Change is one change of the directory's configuration.
type Change struct {
	Kind ChangeKind
	Node NodeID
	Why  string
}

// votersFor is the number of voters that a cluster of n nodes shall have: one
// alone decides by itself, two as well (two voters would stop with either), then
// any one of three or two of five may fail.
func votersFor(n int) int {
	switch {
	case n >= 7:
		return 5
	case n >= 3:
		return 3
	case n >= 1:
		return 1
	}
	return 0
}

// NextChange is the next change that brings the replicas nearer to what the
// cluster needs; false: none. Changes are made one at a time, and the decision
// is taken anew after each. A vote moves away from a node that has been out of
// sight for replaceAfter only if another can take it, and is given before it is
// taken, so that the number of voters that answer never sinks by a change. self
// is the leader.
func NextChange(replicas []Replica, members []Member, self NodeID, replaceAfter time.Duration) (Change, bool) {
	byID := make(map[NodeID]Member, len(members))
	known := 0
	for _, m := range members {
		byID[m.ID] = m
	}
	replicas = slices.SortedFunc(slices.Values(replicas), func(a, b Replica) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	in := make(map[NodeID]bool, len(replicas))
	for _, r := range replicas {
		in[r.ID] = true
		if !byID[r.ID].Left {
			known++
		}
	}
	if c, ok := join(members, in); ok {
		return c, true
	}
	v := electorate{byID: byID, self: self, replaceAfter: replaceAfter, want: votersFor(known)}
	v.count(replicas)
	return v.next(replicas)
}

// join adds the first member that answers and is no replica.
func join(members []Member, in map[NodeID]bool) (Change, bool) {
	members = slices.SortedFunc(slices.Values(members), func(a, b Member) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	for _, m := range members {
		if m.Seen && !m.Left && !in[m.ID] {
			return Change{AddReplica, m.ID, "it joined"}, true
		}
	}
	return Change{}, false
}

// electorate is what a decision about voters looks at.
type electorate struct {
	byID         map[NodeID]Member
	self         NodeID
	replaceAfter time.Duration
	want         int

	voters  int    // in the configuration
	lost    int    // of them out of sight for long, or left
	seat    NodeID // a follower that answers
	hasSeat bool
}

func (v *electorate) lostVoter(r Replica) bool {
	m, known := v.byID[r.ID]
	if r.ID == v.self {
		return false
	}
	return !known || m.Left || !m.Seen && m.Gone >= v.replaceAfter
}

func (v *electorate) count(replicas []Replica) {
	for _, r := range replicas {
		switch m := v.byID[r.ID]; {
		case r.Voter && v.lostVoter(r):
			v.voters++
			v.lost++
		case r.Voter:
			v.voters++
		case m.Seen && !m.Left && !v.hasSeat:
			v.seat, v.hasSeat = r.ID, true
		}
	}
}

func (v *electorate) next(replicas []Replica) (Change, bool) {
	good := v.voters - v.lost
	if good < v.want && v.hasSeat {
		return Change{Promote, v.seat, "the cluster needs more voters that answer"}, true
	}
	if good >= v.want || v.want < v.voters {
		for _, r := range replicas {
			if r.Voter && v.lostVoter(r) && good >= min(v.want, v.voters-1) {
				return Change{Demote, r.ID, "it does not answer and others vote"}, true
			}
		}
	}
	if good > v.want {
		// The voter with the highest id that is not the leader gives its vote back.
		rest := slices.DeleteFunc(slices.Clone(replicas), func(r Replica) bool { return !r.Voter || r.ID == v.self })
		if len(rest) > 0 {
			last := slices.MaxFunc(rest, func(a, b Replica) int { return cmp.Compare(string(a.ID[:]), string(b.ID[:])) })
			return Change{Demote, last.ID, "fewer voters are enough"}, true
		}
	}
	for _, r := range replicas {
		if !r.Voter && v.byID[r.ID].Left {
			return Change{RemoveReplica, r.ID, "it left"}, true
		}
	}
	return Change{}, false
}

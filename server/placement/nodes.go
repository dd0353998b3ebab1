package placement

import (
	"slices"
	"time"
)

// NodeStatus is what the directory thinks of a node.
type NodeStatus uint8

// Statuses. The numbers are those of the wire enum NodeState.
const (
	Up       NodeStatus = 1
	Down     NodeStatus = 2
	Draining NodeStatus = 3
	Departed NodeStatus = 4 // it left in good order
)

// NodeRecord is a node as the directory has it.
type NodeRecord struct {
	ID          NodeID
	Incarnation Incarnation
	Status      NodeStatus
	For         time.Duration // how long it has had this status
	Claims      int64
	Drained     bool // an operator emptied it: that it is seen does not bring it back
}

// Patience is how long a leader waits before it acts.
type Patience struct {
	DownAfter time.Duration // out of sight before it is recorded as down
	GraceTime time.Duration // down before its claims are dropped
	ForgetIn  time.Duration // down and without claims before it is forgotten
}

// TendKind is a kind of Tend.
type TendKind uint8

// Kinds of what a leader does about a node.
const (
	MarkUp TendKind = iota + 1
	MarkDown
	MarkDeparted
	DropClaims
	Forget
)

// String is the lower-case name used in logs.
func (k TendKind) String() string {
	return [...]string{"none", "up", "down", "left", "claims dropped", "forgotten"}[k]
}

// Tend is one thing that a leader does about a node.
type Tend struct {
	Kind TendKind
	Node NodeRecord
}

// NextTends is what the leader has to do about the nodes of the directory now, at
// most one thing for each node. watched is how long the leader has been looking: a
// node that it never saw has been out of its sight for so long.
func NextTends(records []NodeRecord, members []Member, self NodeID, watched time.Duration, p Patience) (out []Tend) {
	byID := make(map[NodeID]Member, len(members))
	for _, m := range members {
		byID[m.ID] = m
	}
	for _, r := range records {
		m, known := byID[r.ID]
		if !known {
			m = Member{ID: r.ID, Gone: watched}
		}
		if kind := tend(&r, m, r.ID == self, p); kind != 0 {
			out = append(out, Tend{kind, r})
		}
	}
	slices.SortStableFunc(out, func(a, b Tend) int { return int(a.Kind) - int(b.Kind) }) // what readers see first
	return out
}

func tend(r *NodeRecord, m Member, self bool, p Patience) TendKind {
	alive := self || m.Seen && !m.Left
	serves := r.Status == Up || r.Status == Draining
	switch {
	case alive && (r.Status == Down || r.Status == Departed && !r.Drained):
		return MarkUp
	case alive:
		return 0
	case serves && m.Left:
		return MarkDeparted
	case serves && m.Gone >= p.DownAfter:
		return MarkDown
	case serves, !m.Left && m.Gone < p.DownAfter: // it may just be back, or a new leader may not have heard of it yet
		return 0
	case r.Claims > 0 && r.For >= p.GraceTime:
		return DropClaims
	case r.Claims == 0 && r.For >= p.ForgetIn:
		return Forget
	}
	return 0
}

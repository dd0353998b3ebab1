package placement

import "time"

// Tier is a tier, from fast to slow.
type Tier uint8

// Tiers.
const (
	HBM Tier = iota
	RAM
	NVMe
	tierCount
)

// TierBytes are bytes by tier.
type TierBytes [tierCount]int64

// Sum is all of them.
func (b TierBytes) Sum() int64 { return b[HBM] + b[RAM] + b[NVMe] }

func (b TierBytes) plus(c TierBytes) TierBytes {
	for t := range b {
		b[t] += c[t]
	}
	return b
}

func (b TierBytes) minus(c TierBytes) TierBytes {
	for t := range b {
		b[t] -= c[t]
	}
	return b
}

// NodeUsage is a node as a planner sees it.
type NodeUsage struct {
	ID     NodeID
	Name   string     // for people; "": its short id
	Status NodeStatus // only what is Up is given anything

	Budget TierBytes
	Used   TierBytes
	// GivesWay is the part of Used that is evicted without a loss when room is needed:
	// blocks of no living session that are not pinned and have another copy, or are cold.
	// A cache is always full, so room is what is free or gives way.
	GivesWay TierBytes

	BytesPerSecond    int64 // that it sends or receives; 0: not known, all count alike
	HitBytesPerSecond int64 // of fetches that it serves, those of its sessions included

	// Bytes of blocks that no session has and that no other node holds. Hot: those
	// that were used lately, by whoever says so.
	SoleHotBytes, SoleColdBytes int64
}

// SessionUsage is a session as a planner sees it. Each block counts once, in the tier
// that it is read from.
type SessionUsage struct {
	ID       SessionID
	Owner    NodeID
	Epoch    Epoch
	Bytes    TierBytes // of blocks that no other session has
	Shared   []int32   // runs of blocks that others have too, as indexes into Usage.Shared
	Tokens   int64
	Idle     time.Duration // since it was used
	Priority int           // 0 to 100
	// HitBytesPerSecond is what is fetched of it. It moves with it.
	HitBytesPerSecond int64
}

// SharedRun is a run of blocks that several sessions begin with. It is copied to a
// node once.
type SharedRun struct {
	Bytes int64
	At    []RunAt // nodes that hold it
}

// RunAt is a run at one node.
type RunAt struct {
	Node  NodeID
	Bytes TierBytes // their sum is the run's
}

// Usage is what a plan is made from.
type Usage struct {
	Nodes    []NodeUsage
	Sessions []SessionUsage
	Shared   []SharedRun
}

// Weights say what a balance is about. All zero: bytes alone.
type Weights struct {
	Bytes       float64 // of blocks that do not give way
	HotSessions float64 // sessions that were used within Options.HotWithin
	HitTraffic  float64 // bytes a second of fetches
}

// Options bound a plan. The zero value has the defaults.
type Options struct {
	Weights Weights
	// Slack is how far a node may be above its share before anything moves, and what
	// a move of nothing but shared blocks is worth. 0: 0.10. A plan goes on to half of it,
	// so that the plan after next does not undo it when usage has moved a little.
	Slack float64
	// Fill is how much of a tier's budget a plan uses. 0: 0.95.
	Fill float64
	// HotWithin is how long after its last use a session is hot. 0: one minute.
	HotWithin time.Duration
	// MaxMoves and MaxBytes end a plan: what is left is for the next one. 0: no limit.
	MaxMoves int
	MaxBytes int64
	// BytesPerSecond is what a node may spend on moves, for the time that a plan is
	// expected to take. 0: all that it has.
	BytesPerSecond int64
	// DropCold says that a drain does not copy sole copies that are cold.
	DropCold bool
}

func (o Options) withDefaults() Options {
	if o.Weights == (Weights{}) {
		o.Weights.Bytes = 1
	}
	if o.Slack == 0 {
		o.Slack = 0.10
	}
	if o.Fill == 0 {
		o.Fill = 0.95
	}
	if o.HotWithin == 0 {
		o.HotWithin = time.Minute
	}
	return o
}

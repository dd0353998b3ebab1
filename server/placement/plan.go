package placement

import "time"

// Plan is what is to be moved, in the order in which it is done. Each step fits into
// the budgets when those before it are done.
type Plan struct {
	Moves  []Move
	Copies []SoleCopy
	Drops  []SoleDrop
	// Unplaced cannot be moved: each with its reason.
	Unplaced []Unplaced
	// More says that a limit ended the plan: the next one goes on.
	More bool
	// Bytes that are copied, and the time that it is expected to take; 0: not known.
	Bytes    int64
	Expected time.Duration
}

// Empty reports whether there is nothing to do.
func (p *Plan) Empty() bool { return len(p.Moves) == 0 && len(p.Copies) == 0 && len(p.Drops) == 0 }

// Move is one session that moves.
type Move struct {
	Session  SessionID
	From, To NodeID
	Epoch    Epoch     // that it had: a session that moved meanwhile is left alone
	Bytes    int64     // that the target lacks
	Lands    TierBytes // where they go; their sum is Bytes
	Why      string    // one line
}

// SoleCopy copies blocks that no other node holds and no session has.
type SoleCopy struct {
	From, To NodeID
	Hot      bool
	Bytes    int64
	Lands    TierBytes
	Why      string // one line
}

// SoleDrop gives such blocks up.
type SoleDrop struct {
	Node  NodeID
	Bytes int64
	Why   string // one line
}

// Unplaced is what has to stay.
type Unplaced struct {
	Session SessionID // "": sole copies
	Node    NodeID    // where it is
	Bytes   int64
	Why     string // one line
}

// expect says how long the plan takes: the time of the node that has most to send
// or receive.
func (p *Plan) expect(l *ledger) {
	through := make([]int64, len(l.nodes))
	add := func(from, to NodeID, bytes int64) {
		through[l.index[from]] += bytes
		through[l.index[to]] += bytes
	}
	for i := range p.Moves {
		add(p.Moves[i].From, p.Moves[i].To, p.Moves[i].Bytes)
	}
	for i := range p.Copies {
		add(p.Copies[i].From, p.Copies[i].To, p.Copies[i].Bytes)
	}
	for i, bytes := range through {
		speed := l.usage.Nodes[i].BytesPerSecond
		if limit := l.opts.BytesPerSecond; limit > 0 && (speed == 0 || limit < speed) {
			speed = limit
		}
		if bytes > 0 && speed > 0 {
			p.Expected = max(p.Expected, time.Duration(float64(bytes)/float64(speed)*float64(time.Second)).Round(time.Millisecond))
		}
	}
}

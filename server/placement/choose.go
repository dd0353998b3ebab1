package placement

import (
	"container/heap"
)

// maxTries bounds the targets that are looked at for one session, the least loaded
// first, before the rest of them are.
const maxTries = 16

// choice is a target for a session.
type choice struct {
	node  int32
	lacks int64
	lands TierBytes
	score float64
}

// chooser finds targets.
type chooser struct {
	l *ledger
	// full: nothing as large as this fits anywhere; room only shrinks in a drain.
	full   int64
	popped []int32
}

// try says what it would be like to give a session to a node. accepts has the last
// word, by the load of the node afterwards.
func (c *chooser) try(i int, to int32, accepts func(load float64) bool) (choice, bool) {
	l := c.l
	s, from, e := &l.usage.Sessions[i], l.owner[i], &l.nodes[to]
	if !e.target || to == from {
		return choice{}, false
	}
	lacks := l.lacking(s, from, to)
	lands, fits := e.land(lacks)
	if !fits {
		return choice{}, false
	}
	load := l.loadAfter(s, to, lacks.Sum())
	if !accepts(load) {
		return choice{}, false
	}
	whole := max(1, s.Bytes.Sum()+l.sharedBytes(s))
	// That nothing need be copied is worth as much as a difference in load that would
	// not be worth a move.
	score := load + l.opts.Slack*float64(lacks.Sum())/float64(whole)
	return choice{node: to, lacks: lacks.Sum(), lands: lands, score: score}, true
}

func (l *ledger) sharedBytes(s *SessionUsage) (sum int64) {
	for _, r := range s.Shared {
		sum += l.usage.Shared[r].Bytes
	}
	return sum
}

func (l *ledger) loadAfter(s *SessionUsage, to int32, lacks int64) float64 {
	e := &l.nodes[to]
	hot := e.hot
	if l.hot(s) {
		hot++
	}
	return l.loadWith(e, e.bytes+lacks, hot, e.traffic+s.HitBytesPerSecond)
}

// choose finds the best target for a session: among the nodes that hold what it
// shares with others and the least loaded one that takes it. tries bounds how many
// are looked at; whoever asks for all of them gets a target if there is one.
func (c *chooser) choose(i int, all bool, accepts func(load float64) bool) (best choice, ok bool) {
	l := c.l
	s := &l.usage.Sessions[i]
	if own := s.Bytes.Sum(); all && c.full > 0 && own >= c.full {
		return choice{}, false
	}
	consider := func(to int32) bool {
		x, fits := c.try(i, to, accepts)
		if fits && (!ok || x.score < best.score || x.score == best.score && x.node < best.node) {
			best, ok = x, true
		}
		return fits
	}
	for _, r := range s.Shared {
		at := l.usage.Shared[r].At
		for k := 0; k < len(at) && k < maxTries; k++ {
			if to, known := l.index[at[k].Node]; known {
				consider(to)
			}
		}
	}
	if !c.leastLoaded(consider) && !ok && all {
		var roomiest int64
		for to := range l.nodes {
			if e := &l.nodes[to]; e.target && int32(to) != l.owner[i] {
				consider(int32(to))
				roomiest = max(roomiest, e.room())
			}
		}
		if !ok {
			c.full = roomiest + 1
		}
	}
	return best, ok
}

// leastLoaded considers the targets from the least loaded one on, until one fits.
func (c *chooser) leastLoaded(consider func(to int32) bool) (found bool) {
	h := &c.l.order
	c.popped = c.popped[:0]
	for range maxTries {
		if h.Len() == 0 {
			break
		}
		if found = consider(h.nodes[0]); found {
			break
		}
		c.popped = append(c.popped, heap.Pop(h).(int32))
	}
	for _, to := range c.popped {
		heap.Push(h, to)
	}
	return found
}

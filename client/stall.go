package client

import "time"

// A stall is detected after stallTicks ticks in a row without a sign of life
// while something is asked; the node is pinged after pingTicks, so that a node
// that is merely slow with one request is told from one that is gone.
const (
	stallTicks = 5
	pingTicks  = 2
)

type verdict uint8

const (
	calm verdict = iota
	ping         // ask for a sign of life
	trip         // the node went silent: fail everything that is asked
	mend         // it is back
)

// stall is the breaker's decision, apart from its effects: it is fed one tick
// per interval while calls are in flight, or while it is open.
//
// A tick that comes late proves nothing: this process was not scheduled, and the
// node, on the same machine, may not have been either. So only punctual ticks
// count, and a loaded machine is not taken for a dead service.
type stall struct {
	interval time.Duration

	last  time.Time
	heard uint64
	quiet int
	open  bool
}

// tick is told how many calls are in flight and how many messages have been
// received so far.
func (s *stall) tick(now time.Time, asked int, heard uint64) verdict {
	if !s.last.IsZero() && now.Sub(s.last) < s.interval*3/4 {
		return calm // woken for something else
	}
	punctual := !s.last.IsZero() && now.Sub(s.last) < 2*s.interval
	s.last = now
	if heard != s.heard {
		s.heard = heard
		s.quiet = 0
		if s.open {
			s.open = false
			return mend
		}
		return calm
	}
	if s.open {
		return calm
	}
	if asked == 0 {
		s.quiet = 0
		return calm
	}
	if punctual {
		s.quiet++
	}
	switch s.quiet {
	case stallTicks:
		s.open = true
		return trip
	case pingTicks:
		if punctual {
			return ping
		}
	}
	return calm
}

// pause says that no ticks come until the next call: the gap is no lateness.
func (s *stall) pause() {
	s.last = time.Time{}
	s.quiet = 0
}

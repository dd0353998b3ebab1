package placement

import "time"

// Copy is a node that is said to hold a page, as whoever chooses a source sees it.
type Copy struct {
	Node NodeID
	// Distance is the time of a round trip to it. 0: not known yet.
	Distance time.Duration
	// QueuedBytes were asked of it and have not arrived, or it owes them to others.
	QueuedBytes int64
	// BytesPerSecond is how fast it has been lately. 0: not known yet.
	BytesPerSecond float64
	// Out says not to choose it: it failed lately, or was tried.
	Out bool
}

// guessBytesPerSecond stands for a speed that is not known.
const guessBytesPerSecond = 1e9

// ChooseCopy is the index of the copy from which a page of so many bytes is
// expected to arrive first: the nearest that is least loaded. The first of equal
// ones wins. false: all are out.
func ChooseCopy(copies []Copy, bytes int64) (best int, ok bool) {
	var least float64
	for i := range copies {
		c := &copies[i]
		if c.Out {
			continue
		}
		speed := c.BytesPerSecond
		if speed <= 0 {
			speed = guessBytesPerSecond
		}
		cost := c.Distance.Seconds() + float64(max(c.QueuedBytes, 0)+bytes)/speed
		if !ok || cost < least {
			best, least, ok = i, cost, true
		}
	}
	return best, ok
}

// Times of Health: a peer that failed is looked for at once, for its connection
// may only have been old, then ever more seldom.
const (
	probeFirst = 100 * time.Millisecond
	probeMost  = 5 * time.Second
)

// Health is what is known of whether a peer answers. The zero value: it does. It
// is a value: each event makes another.
type Health struct {
	Failures int       // since it last did what was asked of it
	Trial    bool      // a probe has reached it since the last failure
	ProbeAt  time.Time // when to look whether it is back
}

// Out reports whether the peer is left out of every choice: from its first
// failure until a probe has reached it, so that a broken peer costs one attempt
// and not one per request.
func (h Health) Out() bool { return h.Failures > 0 && !h.Trial }

// Failed is the health after a failure at a time. A peer that can be reached but
// fails whenever it is used is on trial ever more seldom.
func (h Health) Failed(now time.Time) Health {
	wait := probeFirst << min(h.Failures, 10)
	return Health{Failures: h.Failures + 1, ProbeAt: now.Add(min(wait, probeMost))}
}

// Reached is the health after a probe that succeeded.
func (h Health) Reached() Health {
	h.Trial = h.Failures > 0
	return h
}

// Served is the health after the peer did what was asked of it.
func (Health) Served() Health { return Health{} }

// Due reports whether it is time to look for a peer that is out.
func (h Health) Due(now time.Time) bool { return h.Out() && !now.Before(h.ProbeAt) }

package nvme

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Waits before a segment is tried again after it could not be added.
const (
	firstGrowWait = time.Second
	lastGrowWait  = time.Minute
)

// prewriter adds segments ahead of need until Close. A segment is written in
// full before it is used: direct writes into space that was only allocated are
// 1.4 to 2 times slower, as each has to convert an extent of the file.
func (t *Tier) prewriter(clock *ioClock) {
	for {
		for t.growWanted() {
			t.growResult(t.grow(clock))
		}
		select {
		case <-t.closing:
			return
		case <-t.growNow:
		}
	}
}

// growWanted reports whether a segment is to be added now, and reserves its
// share of the budget.
func (t *Tier) growWanted() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != tier.Ready || t.growStop != "" || t.heldBytes+t.segmentSize > t.cfg.BudgetBytes {
		return false
	}
	empty := t.alloc.EmptyExtents()
	if t.waiting == 0 && len(empty) > 0 && t.emptyBytesLocked()+t.segmentSize > t.cfg.AheadBytes {
		return false
	}
	t.growing = true
	t.growID, t.growBytes = t.nextSegment, t.segmentSize
	t.nextSegment++
	t.heldBytes += t.growBytes
	return true
}

func (t *Tier) growResult(s *segment, err error) {
	if held, err := t.grown(s, err); err != nil && !errors.Is(err, paging.ErrClosed) {
		t.log.Warn("nvme tier cannot grow", "held_bytes", held, "budget_bytes", t.cfg.BudgetBytes, "error", err)
	}
}

// grown puts a segment to use, or notes why there is none.
func (t *Tier) grown(s *segment, err error) (held int64, _ error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.growing = false
	if err == nil {
		err = t.addSegmentLocked(s)
	}
	if err != nil {
		t.heldBytes -= t.growBytes
		if !errors.Is(err, paging.ErrClosed) {
			t.growWait = min(max(2*t.growWait, t.cfg.growWait), lastGrowWait)
			t.growAt = time.Now().Add(t.growWait)
			t.growStop = err.Error()
			t.counters.growErrors.Add(1)
		}
	} else {
		t.growWait = 0
		t.counters.segmentsAdded.Add(1)
	}
	t.roomLocked()
	return t.heldBytes, err
}

// grow writes the next segment.
func (t *Tier) grow(clock *ioClock) (*segment, error) {
	name := segmentName(t.growID)
	free, err := t.vol.FreeBytes()
	if err != nil {
		return nil, err
	}
	if room := free - t.cfg.roomBytes; room < t.growBytes {
		return nil, fmt.Errorf("the file system has %d bytes free, a segment needs %d and the index %d: %w",
			free, t.growBytes, t.cfg.roomBytes, paging.ErrNoSpace)
	}
	f, err := t.vol.Create(name+tmpSuffix, t.growBytes)
	if err != nil {
		return nil, err
	}
	if err = t.fill(clock, f); err == nil {
		err = t.vol.Rename(name+tmpSuffix, name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), t.vol.Remove(name+tmpSuffix))
	}
	return &segment{id: t.growID, file: f, bytes: t.growBytes}, nil
}

// fill writes all of a new segment, as one writer among the others.
func (t *Tier) fill(clock *ioClock, f file) error {
	zeros := t.zeros()
	defer t.bounces.put(zeros)
	for off := int64(0); off < t.growBytes; off += int64(len(zeros)) {
		n := min(int64(len(zeros)), t.growBytes-off)
		if !t.pace.writeBegins(n) {
			return paging.ErrClosed
		}
		began := time.Now()
		clock.begin()
		err := f.WriteAt([][]byte{zeros[:n]}, off)
		clock.end()
		t.pace.writeEnds(n, time.Since(began))
		if err != nil {
			return err
		}
		t.counters.prewritten.Add(n)
	}
	clock.begin()
	defer clock.end()
	return f.Sync()
}

// zeros is an aligned buffer of zeros, to be put back.
func (t *Tier) zeros() []byte {
	b := t.bounces.get()
	clear(b)
	return b
}

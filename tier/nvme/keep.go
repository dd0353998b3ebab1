package nvme

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Waits between the probes of a tier in bypass, doubled each time. A tier that
// fails again soon after a probe goes on where it was.
const (
	firstProbeWait = 100 * time.Millisecond
	lastProbeWait  = 30 * time.Second
	// maxReopens bounds the dead instances of the index that may be left
	// behind, some MiB each.
	maxReopens = 16
)

// status says whether the tier takes part; guarded by Tier.mu but for the atomics.
type status struct {
	manifest   *manifest
	state      tier.State
	reason     string
	bypassed   chan struct{} // closed while in bypass
	since      time.Time     // of the state
	probeAt    time.Time
	probeWait  time.Duration
	reopens    int
	recovering bool // Recover was called
	readsHang  bool // no reader is left that answers

	writesFailing atomic.Int32 // failures in a row
	identifying   atomic.Bool
}

func (s *status) init() {
	s.state = tier.Loading
	s.bypassed = make(chan struct{})
	s.probeWait = firstProbeWait
}

// stateErrorLocked is nil when pages can be stored.
func (s *status) stateErrorLocked() error {
	switch s.state {
	case tier.Ready:
		return nil
	case tier.Closed:
		return paging.ErrClosed
	case tier.Loading:
		return fmt.Errorf("the index is still being read: %w", paging.ErrUnavailable)
	}
	return fmt.Errorf("bypassed: %s: %w", s.reason, paging.ErrUnavailable)
}

func (t *Tier) stateError() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stateErrorLocked()
}

func (t *Tier) bypassChan() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bypassed
}

// bypass takes the tier out of use for stores.
func (t *Tier) bypass(reason string) {
	if t.enterBypass(reason) {
		t.log.Warn("nvme tier bypassed", "reason", reason)
	}
}

// enterBypass reports whether the tier was in use.
func (t *Tier) enterBypass(reason string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != tier.Ready {
		return false
	}
	now := time.Now()
	if now.Sub(t.since) > lastProbeWait {
		t.probeWait = firstProbeWait
	}
	t.state, t.reason, t.since = tier.Bypass, reason, now
	t.probeAt = now.Add(t.probeWait)
	close(t.bypassed)
	t.roomLocked()
	t.counters.bypasses.Add(1)
	return true
}

// unbypass puts the tier back to use.
func (t *Tier) unbypass() {
	if t.leaveBypass() {
		t.log.Info("nvme tier back in use")
	}
}

// leaveBypass reports whether the tier was in bypass.
func (t *Tier) leaveBypass() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != tier.Bypass {
		return false
	}
	t.state, t.reason, t.since = tier.Ready, "", time.Now()
	t.bypassed = make(chan struct{})
	t.growStop = ""
	t.writesFailing.Store(0)
	return true
}

// keeper looks after the tier until Close: I/O that hangs, space to give back,
// probes while in bypass.
func (t *Tier) keeper() {
	tick := time.NewTicker(t.cfg.keepEvery)
	defer tick.Stop()
	for {
		select {
		case <-t.closing:
			return
		case <-tick.C:
		case <-t.keepNow:
		}
		now := time.Now()
		t.watch(now)
		t.mu.Lock()
		var drop []*segment
		if t.state == tier.Ready {
			drop = t.takeEmptyLocked(now)
		}
		probe := t.state == tier.Bypass && !now.Before(t.probeAt)
		retry := t.growStop != "" && !now.Before(t.growAt)
		if retry {
			t.growStop = ""
		}
		t.mu.Unlock()
		t.dropSegments(drop)
		if retry {
			wake(t.growNow)
		}
		if probe {
			t.probe()
		}
	}
}

// watch notices I/O that has run for too long.
func (t *Tier) watch(now time.Time) {
	hungReads, hungReaders, hungWrites := 0, 0, 0
	for i := range t.busy {
		if t.busy[i].hangs(now, t.cfg.HangAfter) {
			hungWrites++
		}
	}
	t.mu.Lock()
	for rd := range t.running {
		if rd.clock.hangs(now, t.cfg.HangAfter) {
			hungReads++
			if !rd.here {
				hungReaders++
			}
		}
	}
	t.readsHang = hungReaders == t.cfg.Readers
	t.mu.Unlock()
	t.pace.setHung(hungReads)
	t.counters.hungReads.Store(int64(hungReads))
	t.counters.hungWrites.Store(int64(hungWrites))
	if hungWrites > 0 {
		t.bypass(fmt.Sprintf("the disk has not answered a write for %v", t.cfg.HangAfter))
	}
}

// probe finds out whether a tier in bypass can write again.
func (t *Tier) probe() {
	err := t.tryWrite()
	if err == nil {
		t.unbypass()
		t.queue.resume()
		wake(t.growNow)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reason = err.Error()
	t.probeWait = min(2*t.probeWait, lastProbeWait)
	t.probeAt = time.Now().Add(t.probeWait)
}

func (t *Tier) tryWrite() error {
	if t.counters.hungWrites.Load() > 0 {
		return errors.New("the disk does not answer writes")
	}
	t.mu.Lock()
	m := t.manifest
	t.mu.Unlock()
	if m.stalled() {
		return errors.New("disk full: the index cannot be written")
	}
	if err := t.writeProbe(); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	if m.fs.isFenced() {
		return t.reopenIndex()
	}
	return nil
}

// writeProbe writes a small file in the way of a segment.
func (t *Tier) writeProbe() error {
	name := filepath.Join(segmentDir, "probe"+tmpSuffix)
	f, err := t.vol.Create(name, paging.UnitBytes)
	if err != nil {
		return err
	}
	b := t.zeros()
	defer t.bounces.put(b)
	err = f.WriteAt([][]byte{b[:paging.UnitBytes]}, 0)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close(), t.vol.Remove(name))
}

// reopenIndex replaces an index that died. All that it acknowledged is there.
func (t *Tier) reopenIndex() error {
	t.mu.Lock()
	t.reopens++
	n := t.reopens
	t.mu.Unlock()
	if n > maxReopens {
		return fmt.Errorf("the index failed %d times: restart when the disk is mended", maxReopens)
	}
	m, err := openManifest(t.indexConfig(false))
	if err != nil {
		return err
	}
	t.mu.Lock()
	closed := t.state == tier.Closed
	if !closed {
		t.manifest = m
	}
	t.mu.Unlock()
	if closed {
		return m.close(closeBound)
	}
	t.log.Info("index opened again")
	return nil
}

// Usage implements tier.Tier.
func (t *Tier) Usage() tier.Usage {
	t.mu.Lock()
	defer t.mu.Unlock()
	u := tier.Usage{
		State: t.state, Reason: t.reason,
		BudgetBytes: t.cfg.BudgetBytes, HeldBytes: t.heldBytes,
		UsedBytes: int64(t.alloc.Usage().UsedBytes), PageBytes: t.pageBytes,
		InFlightBytes: t.flightBytes, DeadBytes: t.deadBytes + t.readBytes,
		Pages: t.pages,
	}
	if u.Reason == "" && t.growStop != "" {
		u.Reason = "cannot grow: " + t.growStop
	}
	if u.Reason == "" {
		u.Reason = t.vol.Remark()
	}
	return u
}

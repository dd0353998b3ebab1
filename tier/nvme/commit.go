package nvme

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/tier"
)

// Bounds of a group of the committer.
const (
	maxGroupRuns = 4096
	// Removals alone make a group when there are this many, or the first is
	// this old, or a store waits for the slots.
	removeGroup = 1024
	removeDelay = 20 * time.Millisecond
)

// commitQueue is what the committer has to make durable: written runs, and
// records to remove. The runs are bounded by the slots of the budget that are
// in flight, the removals by the slots that are dead.
type commitQueue struct {
	wake chan struct{} // capacity 1

	mu      sync.Mutex
	runs    []*run
	removes []tier.Ref
	since   time.Time // of the first removal
	urgent  bool
	paused  bool // the index is dead: removals wait for the next one
	closed  bool
}

func (q *commitQueue) init() { q.wake = make(chan struct{}, 1) }

func (q *commitQueue) add(r *run) {
	q.mu.Lock()
	q.runs = append(q.runs, r)
	q.mu.Unlock()
	wake(q.wake)
}

func (q *commitQueue) remove(refs []tier.Ref, urgent bool) {
	if len(refs) == 0 {
		return
	}
	q.mu.Lock()
	if len(q.removes) == 0 {
		q.since = time.Now()
	}
	q.removes = append(q.removes, refs...)
	q.urgent = q.urgent || urgent
	q.mu.Unlock()
	wake(q.wake)
}

// hurry has the removals made durable now: somebody waits for the slots.
func (q *commitQueue) hurry() {
	q.mu.Lock()
	hurry := len(q.removes) > 0
	q.urgent = q.urgent || hurry
	q.mu.Unlock()
	if hurry {
		wake(q.wake)
	}
}

// pause keeps removals back until resume.
func (q *commitQueue) pause() { q.mu.Lock(); q.paused = true; q.mu.Unlock() }

func (q *commitQueue) resume() { q.mu.Lock(); q.paused = false; q.mu.Unlock(); wake(q.wake) }

// close lets take return what is left and then end.
func (q *commitQueue) close() { q.mu.Lock(); q.closed = true; q.mu.Unlock(); wake(q.wake) }

// take waits for the next group. false: closed, and nothing is left.
func (q *commitQueue) take() ([]*run, []tier.Ref, bool) {
	for {
		q.mu.Lock()
		due := time.Until(q.since.Add(removeDelay))
		removing := len(q.removes) > 0 && !q.paused
		now := removing && (q.urgent || q.closed || due <= 0 || len(q.removes) >= removeGroup)
		if len(q.runs) > 0 || now {
			runs := q.runs[:min(len(q.runs), maxGroupRuns)]
			q.runs = append([]*run(nil), q.runs[len(runs):]...)
			var removes []tier.Ref
			if removing {
				removes, q.removes, q.urgent = q.removes, nil, false
			}
			q.mu.Unlock()
			return runs, removes, true
		}
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return nil, nil, false
		}
		if !removing {
			<-q.wake
			continue
		}
		timer := time.NewTimer(due)
		select {
		case <-q.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// committer makes groups durable until Close: it syncs the segments that were
// written, then commits the records of the new pages together with the
// removals, in one synced write. What arrives meanwhile is the next group.
func (t *Tier) committer(clock *ioClock) {
	for {
		runs, removes, ok := t.queue.take()
		if !ok {
			return
		}
		clock.begin()
		t.commitGroup(runs, removes)
		clock.end()
	}
}

func (t *Tier) commitGroup(runs []*run, removes []tier.Ref) {
	began := time.Now()
	runs = t.dropAbandoned(runs)
	if !sabotage.On("publish-first") {
		runs = t.syncSegments(runs)
	}
	if len(runs) == 0 && len(removes) == 0 {
		return
	}
	var records []record
	for _, r := range runs {
		records = append(records, r.call.records[r.first:r.end]...)
	}
	t.mu.Lock()
	m := t.manifest
	t.mu.Unlock()
	if err := m.commit(records, removes); err != nil {
		t.commitFailed(m, runs, removes, err)
		return
	}
	t.counters.groups.Add(1)
	t.counters.groupPages.Add(int64(len(records)))
	t.counters.commitTime.observe(time.Since(began))
	t.publish(runs)
	t.buried(removes)
}

// dropAbandoned gives the slots of runs back that nobody waits for.
func (t *Tier) dropAbandoned(runs []*run) []*run {
	live := runs[:0]
	for _, r := range runs {
		if r.call.isAbandoned() {
			t.giveUp(r, paging.ErrExpired)
			continue
		}
		live = append(live, r)
	}
	return live
}

// syncSegments makes the bytes of the runs durable and returns those for which
// that worked. A device that fails a sync may have lost anything written since
// the last one, so the tier stops writing.
func (t *Tier) syncSegments(runs []*run) []*run {
	failed := map[*segment]error{}
	synced := map[*segment]bool{}
	for _, r := range runs {
		if synced[r.seg] || failed[r.seg] != nil {
			continue
		}
		t.counters.segmentSyncs.Add(1)
		if err := r.seg.file.Sync(); err != nil {
			t.counters.writeErrors.Add(1)
			failed[r.seg] = mediumError("sync", r.seg.id, err)
			t.bypass(failed[r.seg].Error())
			continue
		}
		synced[r.seg] = true
	}
	if len(failed) == 0 {
		return runs
	}
	live := runs[:0]
	for _, r := range runs {
		if err := failed[r.seg]; err != nil {
			t.giveUp(r, err)
			continue
		}
		live = append(live, r)
	}
	return live
}

// commitFailed handles a group whose fate in the index is unknown: the slots
// stay dead until an index has removed the records.
func (t *Tier) commitFailed(m *manifest, runs []*run, removes []tier.Ref, err error) {
	reason := m.dead()
	if reason == "" {
		reason = err.Error()
	}
	t.queue.pause()
	t.bypass("index: " + reason)
	t.counters.writeErrors.Add(1)
	doubtful := append([]tier.Ref(nil), removes...)
	t.mu.Lock()
	for _, r := range runs {
		for _, rec := range r.call.records[r.first:r.end] {
			t.flightBytes -= int64(rec.bytes)
			t.deadBytes += int64(rec.bytes)
			t.alloc.SetOwner(placeOf(rec.ref), deadOwner)
			doubtful = append(doubtful, rec.ref)
		}
	}
	t.mu.Unlock()
	t.queue.remove(doubtful, false)
	for _, r := range runs {
		r.call.fail(r.first, r.end, fmt.Errorf("commit to the index: %s: %w", reason, paging.ErrIO))
	}
}

// publish turns pages in flight into stored ones and tells their calls.
func (t *Tier) publish(runs []*run) {
	t.mu.Lock()
	for _, r := range runs {
		for _, rec := range r.call.records[r.first:r.end] {
			t.flightBytes -= int64(rec.bytes)
			t.pageBytes += int64(rec.bytes)
			t.pages++
			t.counters.storedBytes.Add(int64(rec.bytes))
		}
	}
	t.mu.Unlock()
	for _, r := range runs {
		if r.call.stored(r) {
			continue
		}
		var refs []tier.Ref
		for _, rec := range r.call.records[r.first:r.end] {
			refs = append(refs, rec.ref)
		}
		t.bury(refs)
	}
}

package nvme

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
	"github.com/kvtier/kvtier/tier"
)

// deadOwner marks slots of freed pages whose record still has to go.
const deadOwner = ^uint32(0)

// segment is an open, pre-written file.
type segment struct {
	id    paging.ExtentID
	file  file
	bytes int64
}

// space is where pages lie and what is free; guarded by Tier.mu.
type space struct {
	alloc       *paging.Allocator
	segments    map[paging.ExtentID]*segment
	nextSegment paging.ExtentID
	lastSegment paging.ExtentID // in which a page was placed last
	segmentSize int64           // of the next segment
	emptySince  map[paging.ExtentID]time.Time

	heldBytes   int64 // segment files, with the one being written
	pages       int64
	pageBytes   int64
	flightBytes int64
	deadBytes   int64 // of slots whose records still have to go
	readBytes   int64 // of freed slots that a read still holds
	dropBytes   int64 // of segments that are being deleted

	running map[*read]struct{}    // reads that wait or run
	pinned  map[tier.Ref]int32    // reads that run
	ended   map[tier.Ref]struct{} // removed durably, but still pinned
	waiting int                   // stores that wait for room

	growing   bool // a segment is being pre-written
	growID    paging.ExtentID
	growBytes int64
	growStop  string    // why no segment can be added now, "" if it can
	growAt    time.Time // when to try again
	growWait  time.Duration

	changed chan struct{} // closed and replaced when room may have appeared

	numbers    map[paging.NamespaceID]uint32
	namespaces map[uint32]namespace
	nextNumber uint32
}

func (s *space) init(segmentBytes int64) {
	s.alloc = paging.NewAllocator(paging.AllocatorConfig{WholeExtents: true})
	s.segments = map[paging.ExtentID]*segment{}
	s.nextSegment = 1
	s.segmentSize = segmentBytes
	s.emptySince = map[paging.ExtentID]time.Time{}
	s.running = map[*read]struct{}{}
	s.pinned = map[tier.Ref]int32{}
	s.ended = map[tier.Ref]struct{}{}
	s.changed = make(chan struct{})
	s.numbers = map[paging.NamespaceID]uint32{}
	s.namespaces = map[uint32]namespace{}
}

// roomLocked wakes the stores that wait for room.
func (s *space) roomLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// emptyBytesLocked is the space of segments that hold nothing.
func (s *space) emptyBytesLocked() int64 {
	var n int64
	for _, id := range s.alloc.EmptyExtents() {
		n += s.segments[id].bytes
	}
	return n
}

// mayGrowLocked reports whether a segment can still be added, if need be in the
// place of empty ones that are too short.
func (t *Tier) mayGrowLocked() bool {
	return t.growing || t.dropBytes > 0 ||
		t.growStop == "" && t.heldBytes-t.emptyBytesLocked()+t.segmentSize <= t.cfg.BudgetBytes
}

// place takes a slot for a page. It waits while room is about to appear: a
// freed slot whose record is being removed, a segment being pre-written.
// before, if not nil, is called before each wait.
func (t *Tier) place(ctx context.Context, bytes, owner uint32, before func()) (paging.Place, *segment, error) {
	waited := false
	defer func() {
		if waited {
			t.mu.Lock()
			t.waiting--
			t.mu.Unlock()
		}
	}()
	for {
		t.mu.Lock()
		if err := t.stateErrorLocked(); err != nil {
			t.mu.Unlock()
			return paging.Place{}, nil, err
		}
		if p, ok := t.alloc.Alloc(uint64(bytes), owner); ok {
			s := t.segments[p.Extent]
			t.flightBytes += int64(bytes)
			another := p.Extent != t.lastSegment
			t.lastSegment = p.Extent
			t.mu.Unlock()
			if another { // perhaps one that was empty
				wake(t.growNow)
			}
			return p, s, nil
		}
		t.raiseSegmentLocked(int64(bytes))
		if int64(bytes) > t.segmentSize || t.deadBytes == 0 && !t.mayGrowLocked() {
			t.mu.Unlock()
			return paging.Place{}, nil, fmt.Errorf("no slot of %d bytes in %d of %d: %w", bytes, t.heldBytes, t.cfg.BudgetBytes, paging.ErrNoSpace)
		}
		if !waited {
			waited = true
			t.waiting++
		}
		changed, bypassed := t.changed, t.bypassed
		t.mu.Unlock()
		wake(t.growNow)
		wake(t.keepNow)
		t.queue.hurry()
		if before != nil {
			before()
		}
		select {
		case <-changed:
		case <-bypassed:
		case <-t.closing:
		case <-ctx.Done():
			return paging.Place{}, nil, fmt.Errorf("wait for a slot: %w: %w", context.Cause(ctx), paging.ErrExpired)
		}
	}
}

// raiseSegmentLocked makes new segments long enough for a page of this length.
func (t *Tier) raiseSegmentLocked(bytes int64) {
	if need := int64(roundUp(int(bytes))); need > t.segmentSize && need <= t.cfg.BudgetBytes {
		t.segmentSize = need
	}
}

// wake leaves a token for one goroutine that may be busy.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// returnLocked gives back a slot that never got a record.
func (t *Tier) returnLocked(p paging.Place, bytes uint32) {
	t.flightBytes -= int64(bytes)
	t.alloc.Free(p)
	t.roomLocked()
}

// Free implements tier.Tier. The records go in the next group of the committer.
func (t *Tier) Free(refs ...tier.Ref) {
	t.mu.Lock()
	closed := t.state == tier.Closed
	t.mu.Unlock()
	if !closed {
		t.bury(refs)
	}
}

// bury has the records of pages removed, during Close too.
func (t *Tier) bury(refs []tier.Ref) {
	t.mu.Lock()
	dead := make([]tier.Ref, 0, len(refs))
	for _, r := range refs {
		if r != 0 && t.killLocked(r) {
			dead = append(dead, r)
		}
	}
	urgent := t.waiting > 0
	t.mu.Unlock()
	t.queue.remove(dead, urgent)
}

// killLocked turns a stored page into a dead slot.
func (t *Tier) killLocked(r tier.Ref) bool {
	p := placeOf(r)
	bytes := t.alloc.PageSize(p)
	if owner, used := t.alloc.Owner(p); !used || owner == deadOwner {
		check.That(false, "free of %v, which holds no page", p)
		return false
	}
	t.alloc.SetOwner(p, deadOwner)
	t.pages--
	t.pageBytes -= int64(bytes)
	t.deadBytes += int64(bytes)
	return true
}

// buried gives back the slots whose records are gone for good.
func (t *Tier) buried(refs []tier.Ref) {
	if len(refs) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range refs {
		p := placeOf(r)
		if owner, used := t.alloc.Owner(p); !used || owner != deadOwner {
			continue // a record that never had a slot
		}
		bytes := t.alloc.PageSize(p)
		t.deadBytes -= int64(bytes)
		if t.pinned[r] > 0 {
			t.ended[r] = struct{}{}
			t.readBytes += int64(bytes)
			continue
		}
		t.alloc.Free(p)
	}
	t.roomLocked()
}

// pinLocked keeps the slot at r from being used again while it is read.
func (t *Tier) pinLocked(r tier.Ref, bytes uint32) (*segment, error) {
	p := placeOf(r)
	stored := t.alloc.PageSize(p)
	if owner, used := t.alloc.Owner(p); !used || owner == deadOwner {
		return nil, fmt.Errorf("no page at %d: %w", uint64(r), paging.ErrNotFound)
	}
	if stored != uint64(bytes) {
		return nil, fmt.Errorf("page of %d bytes where %d are asked: %w", stored, bytes, paging.ErrInvalid)
	}
	t.pinned[r]++
	return t.segments[p.Extent], nil
}

func (t *Tier) unpinLocked(r tier.Ref) {
	if t.pinned[r]--; t.pinned[r] > 0 {
		return
	}
	delete(t.pinned, r)
	if _, ok := t.ended[r]; ok {
		delete(t.ended, r)
		t.readBytes -= int64(t.alloc.PageSize(placeOf(r)))
		t.alloc.Free(placeOf(r))
		t.roomLocked()
	}
}

// Reclaim implements tier.Durable.
func (t *Tier) Reclaim(bytes uint32, movable func(owner uint32) bool) ([]uint32, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.raiseSegmentLocked(int64(bytes))
	chosen := map[uint32]bool{}
	pick := func(size int64) bool {
		owners, ok := t.alloc.Reclaim(uint64(size), func(owner uint32) bool {
			return owner == deadOwner || !chosen[owner] && movable(owner)
		})
		for _, o := range owners {
			if o != deadOwner {
				chosen[o] = true
			}
		}
		return ok
	}
	if !pick(int64(bytes)) && !t.reclaimSegmentsLocked(int64(bytes), pick) {
		return nil, false
	}
	owners := make([]uint32, 0, len(chosen))
	for o := range chosen {
		owners = append(owners, o)
	}
	return owners, true
}

// reclaimSegmentsLocked empties enough segments to make room for a longer one:
// a page may be longer than the segments that fill the budget.
func (t *Tier) reclaimSegmentsLocked(bytes int64, pick func(size int64) bool) bool {
	need := t.heldBytes + t.segmentSize - t.cfg.BudgetBytes
	empty := map[paging.ExtentID]bool{}
	for _, id := range t.alloc.EmptyExtents() {
		empty[id] = true
		need -= t.segments[id].bytes
	}
	for id, s := range t.segments {
		if need <= 0 {
			return true
		}
		if s.bytes >= bytes || empty[id] {
			continue
		}
		if !pick(s.bytes) {
			return false
		}
		need -= s.bytes
	}
	return need <= 0
}

// dropSegments deletes empty segments from the directory.
func (t *Tier) dropSegments(segments []*segment) {
	for _, s := range segments {
		err := errors.Join(s.file.Close(), t.vol.Remove(segmentName(s.id)))
		if err != nil {
			t.log.Warn("segment not removed", "segment", uint32(s.id), "error", err)
		}
		t.mu.Lock()
		t.heldBytes -= s.bytes
		t.dropBytes -= s.bytes
		t.roomLocked()
		t.mu.Unlock()
		t.counters.segmentsRemoved.Add(1)
	}
	if len(segments) > 0 {
		wake(t.growNow)
	}
}

// takeEmptyLocked takes empty segments out of use, to be deleted: those that
// have been idle beyond the reserve, and as many as a longer segment needs.
func (t *Tier) takeEmptyLocked(now time.Time) []*segment {
	empty := t.alloc.EmptyExtents()
	seen := make(map[paging.ExtentID]time.Time, len(empty))
	var total int64
	for _, id := range empty {
		since, ok := t.emptySince[id]
		if !ok {
			since = now
		}
		seen[id] = since
		total += t.segments[id].bytes
	}
	t.emptySince = seen
	var taken []*segment
	over := t.heldBytes + t.segmentSize - t.cfg.BudgetBytes
	for _, id := range empty {
		s := t.segments[id]
		idle := total-s.bytes >= t.cfg.AheadBytes && now.Sub(seen[id]) >= t.cfg.idleAfter
		short := t.waiting > 0 && over > 0 && s.bytes < t.segmentSize
		if !idle && !short {
			continue
		}
		if err := t.alloc.RemoveExtent(id); err != nil {
			continue
		}
		delete(t.segments, id)
		delete(t.emptySince, id)
		total -= s.bytes
		over -= s.bytes
		t.dropBytes += s.bytes
		taken = append(taken, s)
	}
	return taken
}

// addSegmentLocked puts a pre-written segment to use.
func (t *Tier) addSegmentLocked(s *segment) error {
	if err := t.alloc.AddExtent(s.id, 0, uint64(s.bytes)); err != nil {
		return fmt.Errorf("add %s: %w", filepath.Base(segmentName(s.id)), err)
	}
	t.segments[s.id] = s
	return nil
}

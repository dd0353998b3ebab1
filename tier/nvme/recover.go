package nvme

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// progressEvery is how many records lie between two reports.
const progressEvery = 1 << 16

// Recover implements tier.Durable. A record whose slot does not exist, is
// taken by another record, whose namespace is unknown or whose key is not that of
// its page is dropped; slots without a record are free.
func (t *Tier) Recover(ctx context.Context, keep func(tier.Record) (owner uint32, ok bool), progress func(done, about int64)) error {
	t.mu.Lock()
	m, state, again := t.manifest, t.state, t.recovering
	t.recovering = true
	t.mu.Unlock()
	if state == tier.Closed {
		return paging.ErrClosed
	}
	if again {
		return fmt.Errorf("recover a second time: %w", paging.ErrInvalid)
	}
	if err := t.fitBudget(ctx, m); err != nil {
		return fmt.Errorf("recover nvme tier: %w", err)
	}
	if progress == nil {
		progress = func(int64, int64) {}
	}
	r := recovery{t: t, keep: keep}
	about, done := m.about(), int64(0)
	err := m.scan(ctx, func(key, value []byte) error {
		r.record(key, value)
		if done++; done%progressEvery == 0 {
			progress(done, max(about, done))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("recover nvme tier: %w", markIndexError(err))
	}
	progress(done, done)
	t.recovered(r.removes)
	return nil
}

// recovered lets stores and loads begin.
func (t *Tier) recovered(removes []tier.Ref) {
	t.mu.Lock()
	if t.state == tier.Loading {
		t.state = tier.Ready
	}
	t.mu.Unlock()
	t.queue.remove(removes, false)
	wake(t.growNow)
}

// recovery is one run of Recover.
type recovery struct {
	t       *Tier
	keep    func(tier.Record) (uint32, bool)
	removes []tier.Ref // records that are to go
}

// record takes one entry of the index.
func (r *recovery) record(key, value []byte) {
	t := r.t
	rec, err := decodeRecord(key, value)
	if err != nil {
		t.counters.recordsDropped.Add(1)
		if ref, ok := refOfKey(key); ok {
			r.removes = append(r.removes, ref)
		}
		return
	}
	p := placeOf(rec.ref)
	t.mu.Lock()
	t.nextSegment = max(t.nextSegment, p.Extent+1)
	ns, known := t.namespaces[rec.namespace]
	if !known || t.segments[p.Extent] == nil || t.alloc.Restore(p, uint64(rec.bytes), deadOwner) != nil {
		t.mu.Unlock()
		t.counters.recordsDropped.Add(1)
		r.removes = append(r.removes, rec.ref)
		return
	}
	t.deadBytes += int64(rec.bytes)
	id := ns.id
	t.mu.Unlock()

	if paging.StorageKey(id, rec.name, int(rec.part)) != rec.key { // what it says of itself is not one page
		t.counters.recordsDropped.Add(1)
		r.removes = append(r.removes, rec.ref)
		return
	}
	page := tier.Page{
		ID:  paging.PageID{BlockID: paging.BlockID{Namespace: id, Name: rec.name}, Part: int(rec.part)},
		Key: rec.key, Bytes: rec.bytes, Sum: rec.sum, Meta: rec.meta,
	}
	owner, ok := r.keep(tier.Record{Page: page, Ref: rec.ref})
	if !ok || owner == deadOwner {
		r.removes = append(r.removes, rec.ref)
		return
	}
	t.mu.Lock()
	t.alloc.SetOwner(p, owner)
	t.deadBytes -= int64(rec.bytes)
	t.pageBytes += int64(rec.bytes)
	t.pages++
	t.mu.Unlock()
	t.counters.recovered.Add(1)
}

// fitBudget puts the segments found at Open to use. Those that hold least are
// deleted until the rest fits the budget, which may have been lowered.
func (t *Tier) fitBudget(ctx context.Context, m *manifest) error {
	t.mu.Lock()
	segments := make([]*segment, 0, len(t.segments))
	var total int64
	for _, s := range t.segments {
		segments = append(segments, s)
		total += s.bytes
	}
	t.heldBytes = total
	t.mu.Unlock()

	if total > t.cfg.BudgetBytes {
		live := map[paging.ExtentID]int64{}
		err := m.scan(ctx, func(key, value []byte) error {
			if rec, err := decodeRecord(key, value); err == nil {
				live[placeOf(rec.ref).Extent] += int64(rec.bytes)
			}
			return nil
		})
		if err != nil {
			return markIndexError(err)
		}
		slices.SortFunc(segments, func(a, b *segment) int {
			if d := live[a.id] - live[b.id]; d != 0 {
				return int(max(min(d, 1), -1))
			}
			return int(int64(a.id) - int64(b.id))
		})
		for total > t.cfg.BudgetBytes {
			s := segments[0]
			segments, total = segments[1:], total-s.bytes
			t.mu.Lock()
			delete(t.segments, s.id)
			t.dropBytes += s.bytes
			t.mu.Unlock()
			t.dropSegments([]*segment{s})
		}
	}
	var errs []error
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range segments {
		errs = append(errs, t.addSegmentLocked(s))
	}
	return errors.Join(errs...)
}

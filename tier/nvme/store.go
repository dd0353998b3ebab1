package nvme

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/tier"
)

// runBytes bounds the pages that are written together because they lie side by
// side: a write much longer than this gains nothing more.
const runBytes = 512 << 10

// storeCall is one call of Store. Its pages are cut into runs, which travel
// from a writer to the committer.
type storeCall struct {
	src     [][]byte
	records []record // of the pages; ref is set once there is a slot

	mu        sync.Mutex
	out       []tier.Ref // what became durable
	err       error      // the first
	open      int        // pages whose fate is not known
	reading   int        // runs whose src may still be read
	abandoned bool       // Store has returned, or is about to
	done      chan struct{}
	settled   chan struct{} // set when abandoned: closed when reading is 0
}

// run is a number of pages of one call that lie side by side in one segment.
type run struct {
	call   *storeCall
	seg    *segment
	offset int64
	bytes  int64 // whole units
	first  int
	end    int // records[first:end]
}

// Store implements tier.Tier. Pages that do not become durable before ctx ends
// give their slots back by themselves.
func (t *Tier) Store(ctx context.Context, pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) error {
	call, err := t.newCall(pages, src, owners, refs)
	if err != nil || len(pages) == 0 {
		return err
	}
	t.submit(ctx, call, owners)
	return t.await(ctx, call, refs)
}

func (t *Tier) newCall(pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) (*storeCall, error) {
	n := len(pages)
	if len(src) != n || len(owners) != n || len(refs) != n {
		return nil, fmt.Errorf("store %d pages from %d sources, %d owners, %d refs: %w", n, len(src), len(owners), len(refs), paging.ErrInvalid)
	}
	records := make([]record, n)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.stateErrorLocked(); err != nil {
		return nil, err
	}
	for i := range pages {
		refs[i] = 0
		p := &pages[i]
		if len(src[i]) != int(p.Bytes) || p.Bytes < paging.MinPageBytes || p.Bytes > paging.MaxPageBytes {
			return nil, fmt.Errorf("store a page of %d bytes from %d: %w", p.Bytes, len(src[i]), paging.ErrInvalid)
		}
		if p.ID.Part < 0 || p.ID.Part >= paging.MaxParts || owners[i] == deadOwner {
			return nil, fmt.Errorf("store part %d of owner %d: %w", p.ID.Part, owners[i], paging.ErrInvalid)
		}
		number, ok := t.numbers[p.ID.Namespace]
		if !ok {
			return nil, fmt.Errorf("store into %s: %w", p.ID.Namespace.Short(), paging.ErrUnknownNamespace)
		}
		records[i] = record{
			namespace: number, name: p.ID.Name, part: uint16(p.ID.Part),
			bytes: p.Bytes, sum: p.Sum, key: p.Key, meta: p.Meta,
		}
	}
	return &storeCall{src: src, records: records, out: make([]tier.Ref, n), open: n, done: make(chan struct{})}, nil
}

// submit finds slots for the pages and hands them to the writers.
func (t *Tier) submit(ctx context.Context, call *storeCall, owners []uint32) {
	var cur *run
	flush := func() {
		if cur != nil {
			t.send(ctx, cur)
			cur = nil
		}
	}
	defer flush()
	var full []int // rounded lengths for which there is no room
	for i := range call.records {
		bytes := call.records[i].bytes
		size := roundUp(int(bytes))
		if slices.Contains(full, size) {
			call.fail(i, i+1, paging.ErrNoSpace)
			continue
		}
		place, seg, err := t.place(ctx, bytes, owners[i], flush)
		if errors.Is(err, paging.ErrNoSpace) {
			full = append(full, size)
			call.fail(i, i+1, err)
			continue
		}
		if err != nil {
			call.fail(i, len(call.records), err)
			return
		}
		call.records[i].ref = refOf(place)
		if cur != nil && cur.seg == seg && cur.end == i && cur.offset+cur.bytes == int64(place.Offset) && cur.bytes+int64(size) <= runBytes {
			cur.end, cur.bytes = i+1, cur.bytes+int64(size)
			continue
		}
		flush()
		cur = &run{call: call, seg: seg, offset: int64(place.Offset), bytes: int64(size), first: i, end: i + 1}
	}
}

// send hands a run to a writer, or gives its slots back.
func (t *Tier) send(ctx context.Context, r *run) {
	r.call.mu.Lock()
	r.call.reading++
	r.call.mu.Unlock()
	var err error
	select {
	case t.writes <- r:
		return
	case <-ctx.Done():
		err = fmt.Errorf("wait for a writer: %w: %w", context.Cause(ctx), paging.ErrExpired)
	case <-t.bypassChan():
		err = t.stateError()
	case <-t.closing:
		err = paging.ErrClosed
	}
	r.call.wrote()
	t.giveUp(r, err)
}

// await waits for the fate of all pages and reports it.
func (t *Tier) await(ctx context.Context, call *storeCall, refs []tier.Ref) error {
	var why error
	select {
	case <-call.done:
	case <-ctx.Done():
		why = fmt.Errorf("store: %w: %w", context.Cause(ctx), paging.ErrExpired)
	case <-t.bypassChan():
		why = t.stateError()
	case <-t.closing:
		why = paging.ErrClosed
	}
	call.mu.Lock()
	defer call.mu.Unlock()
	copy(refs, call.out)
	if call.open == 0 {
		return call.err
	}
	call.abandoned = true
	if call.err != nil {
		why = call.err
	}
	if call.reading == 0 {
		return why
	}
	call.settled = make(chan struct{})
	return tier.NotSettled(why, call.settled)
}

// fail notes that pages[first:end] were not stored.
func (c *storeCall) fail(first, end int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	c.closeLocked(end - first)
}

// stored notes that the pages of a run are durable. false: nobody waits for
// them any more.
func (c *storeCall) stored(r *run) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := r.first; i < r.end && !c.abandoned; i++ {
		c.out[i] = c.records[i].ref
	}
	c.closeLocked(r.end - r.first)
	return !c.abandoned
}

func (c *storeCall) closeLocked(pages int) {
	if c.open -= pages; c.open == 0 {
		close(c.done)
	}
}

func (c *storeCall) isAbandoned() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.abandoned
}

// wrote notes that one run does not read src any more.
func (c *storeCall) wrote() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reading--; c.reading == 0 && c.settled != nil {
		close(c.settled)
	}
}

// giveUp returns the slots of a run that has no records.
func (t *Tier) giveUp(r *run, err error) {
	t.mu.Lock()
	for i := r.first; i < r.end; i++ {
		t.returnLocked(placeOf(r.call.records[i].ref), r.call.records[i].bytes)
	}
	t.mu.Unlock()
	r.call.fail(r.first, r.end, err)
}

// writer writes runs until Close.
func (t *Tier) writer(clock *ioClock) {
	for {
		var r *run
		select {
		case r = <-t.writes:
		case <-t.closing:
			return
		}
		if r.call.isAbandoned() {
			r.call.wrote()
			t.giveUp(r, paging.ErrExpired)
			continue
		}
		err := t.writeRun(clock, r)
		r.call.wrote()
		if err != nil {
			t.giveUp(r, err)
			continue
		}
		t.queue.add(r)
	}
}

func (t *Tier) writeRun(clock *ioClock, r *run) error {
	bufs := r.call.src[r.first:r.end]
	if sabotage.On("publish-first") {
		t.writeLater(r, bufs)
		return nil
	}
	began := time.Now()
	var err error
	if len(bufs) == 1 {
		err = t.writeChunks(clock, r, bufs[0])
	} else {
		err = t.writeAt(clock, r.seg, bufs, r.offset, r.bytes)
	}
	if err != nil {
		return t.writeFailed(r.seg, err)
	}
	t.writesFailing.Store(0)
	t.counters.writes.Add(1)
	t.counters.writeBytes.Add(r.bytes)
	t.counters.writeTime.observe(time.Since(began))
	return nil
}

// writeChunks writes one page, a long one in several pieces.
func (t *Tier) writeChunks(clock *ioClock, r *run, b []byte) error {
	var vec [1][]byte
	for off := 0; off < len(b); off += writeChunkBytes {
		vec[0] = b[off:min(off+writeChunkBytes, len(b))]
		if err := t.writeAt(clock, r.seg, vec[:], r.offset+int64(off), int64(len(vec[0]))); err != nil {
			return err
		}
	}
	return nil
}

func (t *Tier) writeAt(clock *ioClock, s *segment, bufs [][]byte, offset, bytes int64) error {
	if !t.pace.writeBegins(bytes) {
		return paging.ErrClosed
	}
	began := time.Now()
	clock.begin()
	err := s.file.WriteAt(bufs, offset)
	clock.end()
	t.pace.writeEnds(bytes, time.Since(began))
	return err
}

// maxWriteFailures in a row put the tier in bypass.
const maxWriteFailures = 3

// writeFailed marks and counts an error of a segment.
func (t *Tier) writeFailed(s *segment, err error) error {
	if errors.Is(err, paging.ErrClosed) {
		return err
	}
	t.counters.writeErrors.Add(1)
	err = mediumError("write", s.id, err)
	if isDiskFull(err) || t.writesFailing.Add(1) >= maxWriteFailures {
		t.bypass(err.Error())
	}
	return err
}

// writeLater is the sabotage publish-first: the bytes follow long after the
// record.
func (t *Tier) writeLater(r *run, bufs [][]byte) {
	late := make([][]byte, len(bufs))
	for i, b := range bufs {
		late[i] = slices.Clone(b)
	}
	t.workers.Go(func() {
		select {
		case <-t.closing:
		case <-time.After(50 * time.Millisecond):
			if err := r.seg.file.WriteAt(late, r.offset); err != nil {
				t.log.Warn("sabotaged write", "error", err)
			}
		}
	})
}

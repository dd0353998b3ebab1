package nvme

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/tier"
)

// read is one page on its way from the disk.
type read struct {
	seg    *segment
	ref    tier.Ref
	offset int64
	dst    []byte
	here   bool // in the goroutine of the caller
	clock  ioClock
	err    error
	done   chan struct{} // closed when dst is not used any more
}

// Load implements tier.Tier. The read runs on one of the readers, so that it
// can be left behind when ctx ends. If ctx cannot end (its Done is nil) it runs
// in the caller's goroutine, which saves two switches: 40 µs of 300 on a busy
// machine.
func (t *Tier) Load(ctx context.Context, p tier.Page, r tier.Ref, dst []byte) error {
	if len(dst) != int(p.Bytes) {
		return fmt.Errorf("load a page of %d bytes into %d: %w", p.Bytes, len(dst), paging.ErrInvalid)
	}
	began := time.Now()
	rd := &read{ref: r, offset: int64(placeOf(r).Offset), dst: dst, here: ctx.Done() == nil, done: make(chan struct{})}
	if err := t.beginRead(rd, p); err != nil {
		return err
	}
	if sabotage.On("neighbour-page") {
		rd.offset = t.neighbour(rd)
	}
	if rd.here {
		t.read(rd)
		t.workers.Done()
	} else if err := t.handRead(ctx, rd); err != nil {
		return err
	}
	t.counters.readTime.observe(time.Since(began))
	if rd.err != nil {
		t.counters.readErrors.Add(1)
		return mediumError("read", rd.seg.id, rd.err)
	}
	t.counters.reads.Add(1)
	t.counters.readBytes.Add(int64(len(dst)))
	return t.verify(ctx, p, dst)
}

// beginRead pins the page and holds writes back.
func (t *Tier) beginRead(rd *read, p tier.Page) error {
	t.mu.Lock()
	seg, err := t.loadableLocked(p, rd)
	if err == nil {
		rd.seg = seg
		t.running[rd] = struct{}{}
		if rd.here {
			t.workers.Add(1) // Close, which waits for it, has not set the state yet
		}
	}
	t.mu.Unlock()
	if err == nil {
		t.pace.readBegins()
	}
	return err
}

func (t *Tier) endRead(rd *read) {
	t.pace.readEnds()
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.running, rd)
	t.unpinLocked(rd.ref)
}

// read does the I/O.
func (t *Tier) read(rd *read) {
	rd.clock.begin()
	rd.err = rd.seg.file.ReadAt(rd.dst, rd.offset)
	rd.clock.end()
	t.endRead(rd)
	close(rd.done)
}

func (t *Tier) loadableLocked(p tier.Page, rd *read) (*segment, error) {
	switch {
	case t.state == tier.Closed:
		return nil, paging.ErrClosed
	case t.state == tier.Loading:
		return nil, t.stateErrorLocked()
	case t.readsHang && !rd.here:
		return nil, fmt.Errorf("the disk does not answer reads: %w", paging.ErrUnavailable)
	}
	return t.pinLocked(rd.ref, p.Bytes)
}

// handRead has a reader do rd and waits for the end of it.
func (t *Tier) handRead(ctx context.Context, rd *read) error {
	var err error
	select {
	case t.reads <- rd:
	case <-ctx.Done():
		err = fmt.Errorf("wait for a reader: %w: %w", context.Cause(ctx), paging.ErrExpired)
	case <-t.closing:
		err = paging.ErrClosed
	}
	if err != nil {
		t.endRead(rd)
		return err
	}
	select {
	case <-rd.done:
		return nil
	case <-ctx.Done():
		t.counters.readsLeft.Add(1)
		return tier.NotSettled(fmt.Errorf("read: %w: %w", context.Cause(ctx), paging.ErrExpired), rd.done)
	case <-t.closing:
		return tier.NotSettled(paging.ErrClosed, rd.done)
	}
}

// reader reads until Close.
func (t *Tier) reader() {
	for {
		select {
		case rd := <-t.reads:
			t.read(rd)
		case <-t.closing:
			return
		}
	}
}

// verify compares what was read with what was stored.
func (t *Tier) verify(ctx context.Context, p tier.Page, dst []byte) error {
	if sabotage.On("skip-verify") || sabotage.On("neighbour-page") {
		return nil
	}
	sum := paging.Checksum(dst)
	if sum == p.Sum {
		return nil
	}
	t.counters.corrupt.Add(1)
	if other, ok := t.identify(ctx, sum, p.Bytes); ok {
		t.counters.identity.Add(1)
		return fmt.Errorf("part %d of %s holds the bytes of part %d of %s: %w", p.ID.Part, p.ID.Name.Short(), other.part, other.name.Short(), paging.ErrIdentity)
	}
	return fmt.Errorf("part %d of %s fails its checksum: %w", p.ID.Part, p.ID.Name.Short(), paging.ErrCorrupt)
}

// Bounds of the search for the page that misplaced bytes belong to. One runs at
// a time: on a failing disk mismatches come in numbers.
const (
	identifyRecords = 1 << 20
	identifyTime    = time.Second
)

var errFound = errors.New("found")

// identify looks for a page with this checksum and length.
func (t *Tier) identify(ctx context.Context, sum uint64, bytes uint32) (found record, ok bool) {
	if !t.identifying.CompareAndSwap(false, true) {
		return record{}, false
	}
	defer t.identifying.Store(false)
	ctx, cancel := context.WithTimeout(ctx, identifyTime)
	defer cancel()
	t.mu.Lock()
	m := t.manifest
	t.mu.Unlock()
	left := identifyRecords
	err := m.scan(ctx, func(key, value []byte) error {
		if left--; left < 0 {
			return context.DeadlineExceeded
		}
		rec, err := decodeRecord(key, value)
		if err == nil && rec.sum == sum && rec.bytes == bytes {
			found = rec
			return errFound
		}
		return nil
	})
	return found, errors.Is(err, errFound)
}

// neighbour is the sabotage of that name: the offset of the slot beside.
func (t *Tier) neighbour(rd *read) int64 {
	size := int64(roundUp(len(rd.dst)))
	if rd.offset >= size {
		return rd.offset - size
	}
	return min(rd.offset+size, rd.seg.bytes-size)
}

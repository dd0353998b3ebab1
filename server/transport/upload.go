package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// upload is a bulk connection at the source. One goroutine reads requests and
// cancels, one opens requests and writes what they ask for: requests take turns
// frame by frame, so that a large one does not hold up a small one.
type upload struct {
	// Immutable.
	t      *Transport
	l      *link
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	wake   chan struct{} // capacity 1: there may be something to write
	cork   *cork         // below TLS; nil: none

	// Guarded by loads.mu.
	loads struct {
		queue []loadItem
		bytes int64 // of its buffers
	}

	mu struct {
		sync.Mutex
		queue []*serving          // not opened; at most maxOpenLots with open
		open  map[uint64]*serving // that have not ended, queued ones included
	}

	// The writer's.
	active []*serving
	turn   int
	batch  batch
}

// serving is one request under way.
type serving struct {
	// Immutable after admit.
	id     uint64
	req    *PageRequest
	ctx    context.Context
	cancel context.CancelFunc
	pages  Pages // nil: Open failed

	refs      atomic.Int32 // the writer, and each load
	cancelled atomic.Bool  // by the other side

	landed []loadedPage // read from disk and not yet written. Guarded by upload.mu.

	// The writer's.
	end      Reason // of the whole request
	resident []uint16
	missing  []byte // frame of pages that do not come, not yet written
	loading  int    // pages that have not landed
	current  sending
	sends    bool // current is set
}

// sending is the page being written.
type sending struct {
	index  uint32
	bytes  []byte
	offset uint32
	sum    uint64
	buf    []byte // to be released when it is written; nil: in the arena
}

// serveBulk is the life of a bulk connection that another node made.
func (t *Transport) serveBulk(l *link) {
	u := &upload{t: t, l: l, wake: make(chan struct{}, 1), cork: corkOf(l.Conn)}
	u.ctx, u.cancel = context.WithCancel(t.ctx)
	u.mu.open = map[uint64]*serving{}
	defer u.cancel()
	if !t.enter(l) {
		return
	}
	defer t.leave(l)
	var writer sync.WaitGroup
	writer.Go(u.write) // owner: serveBulk; exits when the connection ends
	t.metrics.ended(u.read())
	u.cancel()
	hangUp(l)
	writer.Wait()
}

// read takes requests until the connection ends.
func (u *upload) read() error {
	var scratch [headerBytes]byte
	var payload []byte
	for {
		if err := u.l.SetReadDeadline(time.Now().Add(u.t.serveIdle())); err != nil {
			return err
		}
		h, err := readHeader(u.l, bulkSource, scratch[:])
		if err != nil {
			return err
		}
		if h.kind == frameCancel {
			u.cancelled(h.request)
			continue
		}
		if err := u.l.SetReadDeadline(time.Now().Add(u.t.cfg.IOTimeout)); err != nil {
			return err
		}
		if payload, err = readPayload(u.l, &h, payload); err != nil {
			return err
		}
		req, err := decodeRequest(payload)
		if err != nil {
			return err
		}
		if err := u.enqueue(h.request, req); err != nil {
			return err
		}
	}
}

func (u *upload) enqueue(id uint64, req *PageRequest) error {
	s := &serving{id: id, req: req}
	s.refs.Store(1)
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, twice := u.mu.open[id]; twice || len(u.mu.open) >= maxOpenLots {
		return fmt.Errorf("request %d, %d are open: %w", id, len(u.mu.open), paging.ErrInvalid)
	}
	u.mu.open[id] = s
	u.mu.queue = append(u.mu.queue, s)
	u.t.metrics.owed.Add(req.bytes)
	s.ctx, s.cancel = context.WithTimeout(u.ctx, min(req.timeout, maxServeTime))
	wake(u.wake)
	return nil
}

// cancelled ends a request early. One that has ended is not an error: the
// cancel crossed its end.
func (u *upload) cancelled(id uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s := u.mu.open[id]; s != nil {
		s.cancelled.Store(true)
		s.cancel()
		wake(u.wake)
	}
}

// landed takes a page that was read from disk, and ends the load's use of the
// request.
func (u *upload) landed(s *serving, p loadedPage) {
	u.mu.Lock()
	s.landed = append(s.landed, p)
	u.mu.Unlock()
	wake(u.wake)
	u.unref(s)
}

// unref ends one use of a request; the last one ends its pins.
func (u *upload) unref(s *serving) {
	if s.refs.Add(-1) > 0 {
		return
	}
	for _, p := range s.landed { // nobody else has it any more
		if p.buf != nil {
			u.t.loads.release(u, p.buf)
		}
	}
	s.landed = nil
	if s.pages != nil {
		s.pages.Close()
		u.t.serving.release(u.t.serving.charge(s.req.bytes))
	}
}

// write serves until the connection ends.
func (u *upload) write() {
	defer u.abandon()
	beat := time.NewTimer(u.t.cfg.beatEvery())
	defer beat.Stop()
	for u.ctx.Err() == nil {
		waiting := u.admit()
		if u.gather(); u.batch.empty() {
			if !u.rest(beat, waiting) {
				return
			}
		}
		if err := u.flush(); err != nil {
			u.t.metrics.ended(err)
			hangUp(u.l)
			return
		}
		beat.Reset(u.t.cfg.beatEvery())
	}
}

// rest waits for something to do, and adds a beat to the batch when it has been
// silent for long while something is owed. false: the connection ended.
func (u *upload) rest(beat *time.Timer, waiting bool) bool {
	if len(u.active) == 0 && !waiting {
		select {
		case <-u.wake:
			return true
		case <-u.ctx.Done():
			return false
		}
	}
	select {
	case <-u.wake:
	case <-beat.C:
		u.batch.frame(header{kind: frameBeat}, nil)
	case <-u.ctx.Done():
		return false
	}
	return true
}

// admit opens the requests that came in, as long as there is room for their
// pins. It reports whether some have to wait.
func (u *upload) admit() (waiting bool) {
	for {
		u.mu.Lock()
		if len(u.mu.queue) == 0 {
			u.mu.Unlock()
			return false
		}
		s := u.mu.queue[0]
		alive := s.ctx.Err() == nil
		if alive && !u.t.serving.tryAcquire(u.t.serving.charge(s.req.bytes), u.wake) {
			u.mu.Unlock()
			return true
		}
		u.mu.queue[0] = nil
		u.mu.queue = u.mu.queue[1:]
		u.mu.Unlock()
		if alive {
			u.open(s)
		}
		u.active = append(u.active, s)
	}
}

// open asks the source for the pages of a request, and sorts them.
func (u *upload) open(s *serving) {
	pages, err := u.t.cfg.Source.Open(s.ctx, u.l.peer, s.req)
	if err != nil {
		u.t.serving.release(u.t.serving.charge(s.req.bytes))
		s.end = reasonOf(err)
		return
	}
	s.pages = pages
	var items []loadItem
	for i := range s.req.Len() {
		_, _, length := s.req.At(i)
		switch c := pages.Page(i); {
		case c.Reason != NoReason:
			s.missing = appendMissing(s.missing, missingPage{uint32(i), c.Reason})
		case c.Stored:
			items = append(items, loadItem{s, i})
		case len(c.Bytes) != int(length):
			s.missing = appendMissing(s.missing, missingPage{uint32(i), Mismatch})
		default:
			s.resident = append(s.resident, uint16(i))
		}
	}
	u.t.metrics.pagesMissing.Add(int64(len(s.missing) / 8))
	if len(items) > 0 {
		s.loading = len(items)
		s.refs.Add(int32(len(items)))
		u.t.loads.add(u, items)
	}
}

// gather fills the batch with what the active requests have to send, in turn.
func (u *upload) gather() {
	for idle := 0; len(u.active) > 0 && idle < len(u.active) && !u.batch.full(); {
		if u.turn >= len(u.active) {
			u.turn = 0
		}
		s := u.active[u.turn]
		sent, over := u.step(s)
		switch {
		case over:
			u.active = append(u.active[:u.turn], u.active[u.turn+1:]...)
			u.batch.over = append(u.batch.over, s)
			idle = 0
		case sent:
			u.turn++
			idle = 0
		default:
			u.turn++
			idle++
		}
	}
}

// step adds one frame of a request to the batch, if it has one; over: that was
// its last.
func (u *upload) step(s *serving) (sent, over bool) {
	if err := s.ctx.Err(); err != nil || s.pages == nil {
		if s.end == NoReason {
			s.end = reasonOf(err)
		}
		return true, u.finish(s)
	}
	if !s.sends {
		u.nextPage(s)
	}
	switch {
	case len(s.missing) > 0:
		u.batch.frame(header{kind: frameMissing, request: s.id}, s.missing)
		s.missing = nil
	case s.sends:
		u.batch.page(s)
	case s.loading > 0:
		return false, false
	default:
		return true, u.finish(s)
	}
	return true, false
}

// finish adds the last frame of a request to the batch.
func (u *upload) finish(s *serving) bool {
	u.mu.Lock()
	delete(u.mu.open, s.id)
	u.mu.Unlock()
	owed := u.t.metrics.owed.Add(-s.req.bytes)
	u.batch.frame(header{kind: frameEnd, flags: uint8(s.end), request: s.id, value: uint64(max(owed, 0))}, nil)
	return true
}

// nextPage sets the page to be written next, if there is one now.
func (u *upload) nextPage(s *serving) {
	u.mu.Lock()
	var p loadedPage
	landed := len(s.landed) > 0
	if landed {
		p = s.landed[0]
		s.landed = s.landed[1:]
	}
	u.mu.Unlock()
	switch {
	case landed && p.err != nil:
		s.loading--
		s.missing = appendMissing(s.missing, missingPage{uint32(p.index), reasonOf(p.err)})
		u.t.metrics.pagesMissing.Add(1)
		if p.buf != nil {
			u.t.loads.release(u, p.buf)
		}
	case landed:
		s.loading--
		_, _, length := s.req.At(p.index)
		s.current, s.sends = sending{index: uint32(p.index), bytes: p.buf[:length], sum: p.sum, buf: p.buf}, true
	case len(s.resident) > 0:
		i := int(s.resident[0])
		s.resident = s.resident[1:]
		c := s.pages.Page(i)
		s.current, s.sends = sending{index: uint32(i), bytes: c.Bytes, sum: c.Sum}, true
	}
}

// flush writes the batch and lets go of what it held.
func (u *upload) flush() error {
	if u.batch.empty() {
		return nil
	}
	if err := u.l.SetWriteDeadline(time.Now().Add(u.t.cfg.IOTimeout)); err != nil {
		return err
	}
	pages, bytes := u.batch.pages, u.batch.pageBytes
	if err := u.batch.writeTo(u.l.Conn, u.cork); err != nil {
		return err
	}
	u.t.metrics.pagesSent.Add(int64(pages))
	u.t.metrics.bytesSent.Add(bytes)
	u.letGo()
	return nil
}

// letGo ends what the batch held, written or not.
func (u *upload) letGo() {
	for _, buf := range u.batch.bufs {
		u.t.loads.release(u, buf)
	}
	for _, s := range u.batch.over {
		u.drop(s)
	}
	u.batch.reset()
}

// drop ends the writer's use of a request.
func (u *upload) drop(s *serving) {
	s.cancel()
	if s.loading > 0 {
		u.t.loads.poke()
	}
	if s.sends && s.current.buf != nil {
		u.t.loads.release(u, s.current.buf)
	}
	s.current, s.sends = sending{}, false
	u.unref(s)
}

// abandon ends what is under way when the connection has ended.
func (u *upload) abandon() {
	u.cancel()
	u.letGo()
	u.mu.Lock()
	rest := u.mu.queue
	u.mu.queue = nil
	u.mu.Unlock()
	for _, s := range append(u.active, rest...) {
		u.t.metrics.owed.Add(-s.req.bytes)
		u.drop(s)
	}
	u.active = nil
}

// Bounds of a batch.
const (
	maxBatchFrames = 64
	batchBytes     = 1 << 20
)

// batch is what one write takes to the network: frames whose page bytes lie
// where the pages do.
type batch struct {
	heads     [maxBatchFrames * headerBytes]byte
	frames    int
	vec       [2 * maxBatchFrames][]byte
	out       net.Buffers
	pages     int // whole pages, by their last frame
	pageBytes int64
	bufs      [][]byte   // to be released once written
	over      []*serving // ended with this batch
}

func (b *batch) empty() bool { return b.frames == 0 }

func (b *batch) full() bool { return b.frames == maxBatchFrames || b.pageBytes >= batchBytes }

// head adds a header.
func (b *batch) head(h *header) {
	at := b.heads[b.frames*headerBytes:][:headerBytes]
	h.put(at)
	if b.frames == 0 {
		b.out = b.vec[:0]
	}
	b.out = append(b.out, at)
	b.frames++
}

// frame adds a frame that is not a page's.
func (b *batch) frame(h header, payload []byte) {
	h.length = uint32(len(payload))
	if len(payload) > 0 {
		h.value = paging.Checksum(payload)
	}
	b.head(&h)
	if len(payload) > 0 {
		b.out = append(b.out, payload)
	}
}

// page adds the next piece of the page that s is sending.
func (b *batch) page(s *serving) {
	c := &s.current
	piece := c.bytes[c.offset:]
	piece = piece[:min(len(piece), framePageBytes)]
	b.head(&header{kind: framePage, length: uint32(len(piece)), request: s.id, index: c.index, offset: c.offset, value: c.sum})
	b.out = append(b.out, piece)
	b.pageBytes += int64(len(piece))
	if c.offset += uint32(len(piece)); int(c.offset) == len(c.bytes) {
		b.pages++
		if c.buf != nil {
			b.bufs = append(b.bufs, c.buf)
		}
		s.current, s.sends = sending{}, false
	}
}

// writeTo writes the batch: by one call of the kernel without TLS, by one for
// each corkBytes with it.
func (b *batch) writeTo(w io.Writer, below *cork) error {
	if below == nil {
		_, err := b.out.WriteTo(w)
		return err
	}
	below.hold()
	_, err := b.out.WriteTo(w)
	return errors.Join(err, below.release())
}

func (b *batch) reset() {
	clear(b.vec[:])
	clear(b.bufs)
	clear(b.over)
	b.out, b.frames, b.pages, b.pageBytes, b.bufs, b.over = nil, 0, 0, 0, b.bufs[:0], b.over[:0]
}

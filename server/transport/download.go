package transport

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// readStep is the most that is read before it is summed: what is still in the
// core's cache then.
const readStep = 4 * paging.ChunkBytes

// download is a bulk connection at the node that fetches. Its reader puts page
// bytes where they belong; its outbox sends requests and cancels.
//
// Whoever cancels a lot must know that its slots are not written to any more
// when it returns. So the reader holds a lot while it reads into one of its
// slots, step by step, and lets go between the steps; a cancel that finds the
// lot held interrupts the read.
type download struct {
	// Immutable.
	t    *Transport
	p    *peer
	l    *link
	out  *outbox
	lots *budget // requests that have not ended, at most maxOpenLots

	mu struct {
		sync.Mutex
		open   map[uint64]*lot
		next   uint64
		held   *lot       // whose slot the reader works on
		letGo  *sync.Cond // held changed
		kicked bool       // the read deadline lies in the past because of a cancel
		armed  time.Time  // when the read deadline was set
		ended  bool
	}

	// The reader's.
	scratch [headerBytes]byte
	payload []byte
	trash   []byte // where bytes go that nobody wants
	sums    []*paging.Hasher
	since   time.Time // when the last lot ended
}

// lot is one request: some pages of one call, of one source.
type lot struct {
	call  *call
	req   *PageRequest
	pages []lotPage

	d         *download
	id        uint64    // guarded by download.mu
	cancelled bool      // guarded by download.mu
	charged   int64     // bytes of budgets not given back; guarded by download.mu
	asked     time.Time // guarded by download.mu
}

// lotPage is one page of a lot. The fields below slot are the reader's.
type lotPage struct {
	index  int // in the call
	slot   []byte
	got    uint32 // bytes that arrived
	summed uint32 // of them
	sum    uint64 // what the source says
	hasher *paging.Hasher
	over   bool // arrived, or known not to
}

func newDownload(p *peer, l *link) *download {
	d := &download{t: p.t, p: p, l: l, out: newOutbox(l.Conn, p.t.cfg.IOTimeout), lots: newBudget(maxOpenLots)}
	d.mu.open = map[uint64]*lot{}
	d.mu.letGo = sync.NewCond(&d.mu)
	d.since = time.Now()
	return d
}

// ask sends the request of a lot. If it was cancelled before, or the connection
// has ended, it answers false and the lot is the caller's.
func (d *download) ask(l *lot, timeout time.Duration) bool {
	request := l.req.encode(timeout)
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.cancelled || d.mu.ended {
		return false
	}
	l.id, l.asked = d.mu.next, time.Now()
	d.mu.next++
	d.mu.open[l.id] = l
	d.armLocked(l.asked)
	if err := d.out.send(header{kind: frameRequest, request: l.id}, request); err != nil {
		hangUp(d.l) // the reader sees it, and ends the lot with the others
	}
	return true
}

// cancel makes the source stop sending a lot, and returns when its slots are not
// touched any more.
func (d *download) cancel(l *lot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l.cancelled = true
	if d.mu.open[l.id] == l && !d.mu.ended {
		if err := d.out.send(header{kind: frameCancel, request: l.id}, nil); err != nil {
			hangUp(d.l)
		}
	}
	for d.mu.held == l {
		if !d.mu.kicked {
			d.mu.kicked = d.l.SetReadDeadline(time.Unix(1, 0)) == nil
		}
		d.mu.letGo.Wait()
	}
}

// armLocked sets the read deadline: while something is owed, bytes must come.
func (d *download) armLocked(now time.Time) {
	d.mu.armed = now
	wait := d.t.cfg.IdleAfter
	if len(d.mu.open) > 0 {
		wait = d.t.cfg.StallAfter
	}
	if d.l.SetReadDeadline(now.Add(wait)) != nil {
		hangUp(d.l)
	}
}

// hold makes the lot the reader's, unless it was cancelled.
func (d *download) hold(l *lot) bool {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.kicked || now.Sub(d.mu.armed) > d.t.cfg.StallAfter/8 {
		d.mu.kicked = false
		d.armLocked(now)
	}
	if l.cancelled {
		return false
	}
	d.mu.held = l
	return true
}

func (d *download) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.held != nil {
		d.mu.held = nil
		d.mu.letGo.Broadcast()
	}
}

// goesOn reports whether a read failed only because a cancel interrupted it.
func (d *download) goesOn(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.mu.kicked || !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	d.mu.kicked = false
	d.armLocked(time.Now())
	return true
}

// run reads until the connection ends.
func (d *download) run() {
	err := d.read()
	hangUp(d.l)
	d.out.close()
	d.end(err)
}

func (d *download) read() error {
	for {
		d.mu.Lock()
		if d.mu.kicked || len(d.mu.open) == 0 || time.Since(d.mu.armed) > d.t.cfg.StallAfter/8 {
			d.mu.kicked = false
			d.armLocked(time.Now())
		}
		d.mu.Unlock()
		h, err := readHeader(d.l, bulkTarget, d.scratch[:])
		if err != nil {
			return err
		}
		switch h.kind {
		case framePage:
			err = d.page(&h)
		case frameMissing:
			err = d.missing(&h)
		case frameEnd:
			err = d.lotEnds(&h)
		case frameBeat:
		}
		if err != nil {
			return err
		}
	}
}

func (d *download) lotOf(id uint64) (*lot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.mu.open[id]
	if l == nil {
		return nil, fmt.Errorf("frame of request %d, which is not open: %w", id, paging.ErrInvalid)
	}
	return l, nil
}

// page takes a piece of a page.
func (d *download) page(h *header) error {
	l, err := d.lotOf(h.request)
	if err != nil {
		return err
	}
	if int(h.index) >= len(l.pages) {
		return fmt.Errorf("page %d of %d: %w", h.index, len(l.pages), paging.ErrInvalid)
	}
	p := &l.pages[h.index]
	if p.over || h.length == 0 || h.offset != p.got || h.length > uint32(len(p.slot))-p.got || p.got > 0 && p.sum != h.value {
		return fmt.Errorf("piece of page %d at %d with %d bytes, want offset %d of %d: %w", h.index, h.offset, h.length, p.got, len(p.slot), paging.ErrInvalid)
	}
	if p.sum = h.value; p.hasher == nil {
		p.hasher = d.hasher()
	}
	if err := d.fill(l, p, h.length); err != nil {
		return err
	}
	if int(p.got) == len(p.slot) {
		d.arrived(l, p)
	}
	return nil
}

// fill reads n bytes into a slot, and sums them while they are near. What comes
// for a lot that was cancelled goes to the trash.
func (d *download) fill(l *lot, p *lotPage, n uint32) error {
	for n > 0 {
		mine := d.hold(l)
		var to []byte
		if mine {
			to = p.slot[p.got:]
		} else {
			if d.trash == nil {
				d.trash = make([]byte, readStep)
			}
			to = d.trash
		}
		got, err := d.l.Read(to[:min(len(to), int(n), readStep)])
		p.got += uint32(got)
		n -= uint32(got)
		if mine {
			p.add()
			d.release()
		}
		switch {
		case err == nil || n == 0 || d.goesOn(err):
		case errors.Is(err, io.EOF):
			return io.ErrUnexpectedEOF
		default:
			return err
		}
	}
	return nil
}

// add sums what has arrived, in whole chunks until the page is complete.
func (p *lotPage) add() {
	end := p.got
	if int(end) < len(p.slot) {
		end &^= paging.ChunkBytes - 1
	}
	if end > p.summed {
		_, _ = p.hasher.Write(p.slot[p.summed:end]) // never fails
		p.summed = end
	}
}

// arrived judges a page that is complete.
func (d *download) arrived(l *lot, p *lotPage) {
	sum := p.hasher.Sum64()
	d.over(l, p)
	if d.isCancelled(l) {
		return
	}
	if sum != p.sum && !sabotage.On("skip-receive-verify") {
		d.t.metrics.pagesCorrupt.Add(1)
		d.p.doubt(l.call.id(p.index))
		l.call.failed(p.index, Corrupt, d.p.id)
		return
	}
	d.t.metrics.pagesReceived.Add(1)
	d.t.metrics.bytesReceived.Add(int64(len(p.slot)))
	l.call.settle(p.index, Result{Sum: p.sum, From: d.p.id})
}

func (d *download) isCancelled(l *lot) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return l.cancelled
}

// over ends a page, and gives its share of the budgets back.
func (d *download) over(l *lot, p *lotPage) {
	p.over = true
	if p.hasher != nil {
		p.hasher.Reset()
		d.sums = append(d.sums, p.hasher)
		p.hasher = nil
	}
	charge := d.t.charge(int64(len(p.slot)))
	d.mu.Lock()
	l.charged -= charge
	d.mu.Unlock()
	d.p.giveBack(charge)
}

// hasher is one that is not in use. There are as many as pages arrive at once.
func (d *download) hasher() *paging.Hasher {
	if n := len(d.sums); n > 0 {
		h := d.sums[n-1]
		d.sums = d.sums[:n-1]
		return h
	}
	return new(paging.Hasher)
}

// missing takes the news that some pages do not come.
func (d *download) missing(h *header) (err error) {
	if d.payload, err = readPayload(d.l, h, d.payload); err != nil {
		return err
	}
	l, err := d.lotOf(h.request)
	if err != nil {
		return err
	}
	return eachMissing(d.payload, func(m missingPage) error {
		if int(m.index) >= len(l.pages) || l.pages[m.index].over {
			return fmt.Errorf("missing page %d of %d: %w", m.index, len(l.pages), paging.ErrInvalid)
		}
		d.giveUp(l, &l.pages[m.index], m.reason)
		return nil
	})
}

func (d *download) giveUp(l *lot, p *lotPage, why Reason) {
	d.over(l, p)
	if !d.isCancelled(l) {
		l.call.failed(p.index, why, d.p.id)
	}
}

// lotEnds takes the end of a request.
func (d *download) lotEnds(h *header) error {
	l, err := d.lotOf(h.request)
	if err != nil {
		return err
	}
	var bytes int64
	left := 0
	for i := range l.pages {
		if p := &l.pages[i]; !p.over {
			left++
		} else if int(p.got) == len(p.slot) {
			bytes += int64(p.got)
		}
	}
	d.mu.Lock()
	delete(d.mu.open, l.id)
	cancelled, asked := l.cancelled, l.asked
	d.mu.Unlock()
	if left > 0 && h.flags == 0 && !cancelled {
		d.drop(l, Unreachable)
		return fmt.Errorf("request ended with %d pages not answered: %w", left, paging.ErrInvalid)
	}
	now := time.Now()
	if d.since.After(asked) {
		asked = d.since
	}
	d.since = now
	d.drop(l, Reason(h.flags))
	d.p.served(bytes, now.Sub(asked), int64(h.value))
	return nil
}

// drop ends a lot that is not open any more: pages that did not come failed.
func (d *download) drop(l *lot, why Reason) {
	for i := range l.pages {
		if p := &l.pages[i]; !p.over {
			d.giveUp(l, p, why)
		}
	}
	l.call.lotEnded(l)
	d.lots.release(1)
}

// end ends what is open when the connection has ended.
func (d *download) end(err error) {
	d.mu.Lock()
	d.mu.ended = true
	open := d.mu.open
	d.mu.open = map[uint64]*lot{}
	d.mu.Unlock()
	why := Unreachable
	if d.t.ctx.Err() != nil {
		why = Stopping
	}
	d.p.lost(d, err, len(open) > 0)
	for _, l := range open {
		d.drop(l, why)
	}
}

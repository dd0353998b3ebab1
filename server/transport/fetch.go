package transport

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// WantedPage is one page that a Fetch asks for.
type WantedPage struct {
	Name   paging.BlockName
	Part   int
	Bytes  uint32             // its length
	Owners []placement.NodeID // that are said to have it, the preferred first; may be shared with other pages, and is not changed
}

// FetchRequest asks for pages of one namespace.
type FetchRequest struct {
	Namespace paging.NamespaceID
	Pages     []WantedPage // at most paging.MaxCallPages; borrowed until return
	Sink      Sink
}

func (r *FetchRequest) validate() error {
	if len(r.Pages) > maxFetchPages || r.Sink == nil {
		return fmt.Errorf("fetch of %d pages, at most %d, sink %v: %w", len(r.Pages), maxFetchPages, r.Sink != nil, paging.ErrInvalid)
	}
	for i := range r.Pages {
		if w := &r.Pages[i]; w.Part < 0 || w.Part >= paging.MaxParts || w.Bytes < paging.MinPageBytes || w.Bytes > paging.MaxPageBytes {
			return fmt.Errorf("page %d of a fetch: part %d with %d bytes: %w", i, w.Part, w.Bytes, paging.ErrInvalid)
		}
	}
	return nil
}

// Fetch brings pages from their owners into slots of the sink, and returns when
// Sink.Done was called for each of them. Each page comes from the owner from
// which it is expected first, and from byte 0 of the next one if that fails; a
// page that another Fetch is bringing is not asked for twice. When ctx ends, what
// has not arrived is given up at once; without a deadline a request waits two
// minutes. Errors, before any page was touched: paging.ErrInvalid,
// paging.ErrClosed.
func (t *Transport) Fetch(ctx context.Context, r *FetchRequest) error {
	if err := r.validate(); err != nil {
		return err
	}
	if len(r.Pages) == 0 {
		return nil
	}
	if !t.begin() {
		return fmt.Errorf("fetch: %w", paging.ErrClosed)
	}
	defer t.running.Done()
	ctx, cancel := context.WithTimeout(ctx, maxServeTime)
	defer cancel()
	c := newCall(ctx, t, r)
	t.metrics.fetches.Add(1)
	for i := range r.Pages {
		c.start(i)
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		c.end(reasonOf(ctx.Err()))
	case <-t.ctx.Done():
		c.end(Stopping)
	}
	<-c.done
	cancel()
	c.workers.Wait()
	return nil
}

// call is one Fetch under way.
type call struct {
	t       *Transport
	ctx     context.Context
	req     *FetchRequest
	done    chan struct{}  // every page is settled
	workers sync.WaitGroup // one per source while pages wait for it

	mu struct {
		sync.Mutex
		pages  []callPage
		queues map[placement.NodeID]*sourceQueue
		lots   map[*lot]struct{}
		open   int    // pages whose Sink.Done has not returned
		ended  Reason // why nothing more is asked for
	}
}

// callPage is one page of a call. Guarded by call.mu.
type callPage struct {
	slot    []byte
	tried   uint64 // owners that were tried, by index
	why     Reason // why the last one failed
	from    placement.NodeID
	leads   bool // in Transport.flights as the one who brings it
	settled bool
	asking  bool    // the sink is being asked for its slot
	late    *Result // its outcome, if it was settled meanwhile
	queued  *peer   // whose assigned bytes it counts in
}

// sourceQueue is the pages of a call that wait for one source.
type sourceQueue struct {
	pages   []int
	running bool // a worker takes them
}

func newCall(ctx context.Context, t *Transport, r *FetchRequest) *call {
	c := &call{t: t, ctx: ctx, req: r, done: make(chan struct{})}
	c.mu.pages = make([]callPage, len(r.Pages))
	c.mu.queues = map[placement.NodeID]*sourceQueue{}
	c.mu.lots = map[*lot]struct{}{}
	c.mu.open = len(r.Pages)
	return c
}

// id is the identity of page i.
func (c *call) id(i int) paging.PageID {
	w := &c.req.Pages[i]
	return paging.PageID{BlockID: paging.BlockID{Namespace: c.req.Namespace, Name: w.Name}, Part: w.Part}
}

func (c *call) flight(i int) flight { return flight{c.id(i), c.req.Pages[i].Bytes} }

// start asks for page i, or waits for the call that is asking for it.
func (c *call) start(i int) {
	if !c.t.flights.lead(c.flight(i), c, i) {
		c.t.metrics.pagesJoined.Add(1)
		return
	}
	c.mu.Lock()
	c.mu.pages[i].leads = true
	c.mu.Unlock()
	c.next(i)
}

// heard tells what became of page i in the call that this one waited for. What
// ended only that call is no reason to give the page up here, nor is that its
// owners did not have it if others are known here.
func (c *call) heard(i int, owners []placement.NodeID, r Result) {
	why := reasonOf(r.Err)
	if why == NoReason {
		r.Elsewhere = true
		c.settle(i, r)
		return
	}
	again := why == Cancelled || why == Timeout || why == NoSpace || why == OverQuota || !slices.Equal(owners, c.req.Pages[i].Owners)
	c.mu.Lock()
	over := c.mu.pages[i].settled || c.mu.ended != NoReason
	c.mu.Unlock()
	switch {
	case over:
	case again:
		c.start(i)
	default:
		c.settle(i, r)
	}
}

// failed notes that page i did not come from a source, and goes on to the next.
func (c *call) failed(i int, why Reason, from placement.NodeID) {
	c.mu.Lock()
	c.mu.pages[i].why, c.mu.pages[i].from = why, from
	c.mu.Unlock()
	c.t.metrics.fellThrough.Add(1)
	c.next(i)
}

// next queues page i at the source that is best of those not tried, or gives it up.
func (c *call) next(i int) {
	c.mu.Lock()
	p := &c.mu.pages[i]
	c.unassignLocked(i)
	why := c.mu.ended
	if why == NoReason && !p.settled {
		if source := c.chooseLocked(i); source != nil {
			p.queued = source
			source.assigned.Add(int64(c.req.Pages[i].Bytes))
			c.queueLocked(source, i)
			c.mu.Unlock()
			return
		}
		if why = p.why; why == NoReason {
			why = Unreachable
		}
	}
	from := p.from
	c.mu.Unlock()
	c.settle(i, Result{Err: &PageError{Reason: why, From: from}})
}

func (c *call) unassignLocked(i int) {
	if p := &c.mu.pages[i]; p.queued != nil {
		p.queued.assigned.Add(-int64(c.req.Pages[i].Bytes))
		p.queued = nil
	}
}

// chooseLocked is the source to try next for page i; nil: none is left.
func (c *call) chooseLocked(i int) *peer {
	p, w := &c.mu.pages[i], &c.req.Pages[i]
	var copies [8]placement.Copy
	var peers [8]*peer
	list, at := copies[:0], peers[:0]
	for k, owner := range w.Owners[:min(len(w.Owners), maxOwners)] {
		if p.tried>>k&1 == 1 || owner == c.t.self() {
			continue
		}
		source := c.t.peer(owner)
		if source == nil {
			continue
		}
		list, at = append(list, source.copy()), append(at, source)
	}
	best, ok := placement.ChooseCopy(list, int64(w.Bytes))
	if !ok {
		return nil
	}
	for k, owner := range w.Owners[:min(len(w.Owners), maxOwners)] {
		if owner == at[best].id {
			p.tried |= 1 << k
		}
	}
	return at[best]
}

func (c *call) queueLocked(source *peer, i int) {
	q := c.mu.queues[source.id]
	if q == nil {
		q = &sourceQueue{}
		c.mu.queues[source.id] = q
	}
	q.pages = append(q.pages, i)
	if !q.running {
		q.running = true
		c.workers.Go(func() { c.drive(source, q) }) // owner: Fetch; exits when its queue is empty; bound: one per source
	}
}

// settle ends page i, once.
func (c *call) settle(i int, r Result) {
	c.mu.Lock()
	p := &c.mu.pages[i]
	if p.settled {
		c.mu.Unlock()
		return
	}
	p.settled = true
	c.unassignLocked(i)
	if p.asking {
		p.late = &r
		c.mu.Unlock()
		return
	}
	leads := p.leads
	c.mu.Unlock()
	c.deliver(i, r, leads)
}

// deliver tells the outcome of page i, which is settled.
func (c *call) deliver(i int, r Result, leads bool) {
	c.t.metrics.settled(reasonOf(r.Err))
	c.req.Sink.Done(i, r)
	if leads {
		c.t.flights.landed(c.flight(i), c.req.Pages[i].Owners, r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.open--; c.mu.open == 0 {
		close(c.done)
	}
}

// end gives up what has not arrived.
func (c *call) end(why Reason) {
	c.mu.Lock()
	if c.mu.ended == NoReason {
		c.mu.ended = why
	}
	lots := make([]*lot, 0, len(c.mu.lots))
	for l := range c.mu.lots {
		lots = append(lots, l)
	}
	c.mu.Unlock()
	for _, l := range lots {
		l.d.cancel(l)
	}
	for i := range c.req.Pages {
		c.settle(i, Result{Err: &PageError{Reason: why}})
	}
}

// lotEnded forgets a lot that ended.
func (c *call) lotEnded(l *lot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.lots, l)
}

// drive asks one source for the pages that are queued for it.
func (c *call) drive(source *peer, q *sourceQueue) {
	for {
		l := c.nextLot(q)
		if l == nil {
			return
		}
		c.ask(source, l)
	}
}

// nextLot takes as many pages from a queue as fit into one request, each with
// its slot; nil: the queue is empty, and the worker ends.
func (c *call) nextLot(q *sourceQueue) *lot {
	l := &lot{call: c, req: &PageRequest{Namespace: c.req.Namespace}}
	for {
		i, slot, more := c.take(q, l.req)
		if !more {
			break
		}
		w := &c.req.Pages[i]
		if slot == nil {
			if slot = c.slot(i, w); slot == nil {
				continue
			}
		}
		l.req.add(w.Name, w.Part, w.Bytes)
		l.pages = append(l.pages, lotPage{index: i, slot: slot})
	}
	if len(l.pages) == 0 {
		return nil
	}
	return l
}

// take removes the next page from a queue that fits into a request, with its
// slot if it has one. The worker of a queue that finds it empty, with an empty
// request, has ended.
func (c *call) take(q *sourceQueue, r *PageRequest) (i int, slot []byte, more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(q.pages) > 0 {
		i = q.pages[0]
		w := &c.req.Pages[i]
		if !c.mu.pages[i].settled && !r.fits(w.Name, w.Part, w.Bytes, c.t.lotBytes()) {
			return 0, nil, false
		}
		q.pages = q.pages[1:]
		if p := &c.mu.pages[i]; !p.settled {
			p.asking = p.slot == nil
			return i, p.slot, true
		}
	}
	q.running = r.Len() > 0
	return 0, nil, false
}

// errShortSlot is a fault of the sink.
var errShortSlot = errors.New("slot is not as long as its page")

// slot asks the sink for the slot of page i; nil: the page is settled. If the
// call ends meanwhile, the sink hears of it only after it has answered: a slot
// is never set aside for a page that is done.
func (c *call) slot(i int, w *WantedPage) []byte {
	slot, err := c.req.Sink.Slot(i)
	if err == nil && len(slot) != int(w.Bytes) {
		err = errShortSlot
	}
	c.mu.Lock()
	p := &c.mu.pages[i]
	p.asking = false
	late, leads := p.late, p.leads
	if late == nil && err == nil {
		p.slot = slot
		c.mu.Unlock()
		return slot
	}
	c.mu.Unlock()
	if late != nil {
		c.deliver(i, *late, leads)
	} else {
		c.settle(i, Result{Err: &PageError{Reason: reasonOf(err)}})
	}
	return nil
}

// ask sends a lot to its source, when the budgets allow.
func (c *call) ask(source *peer, l *lot) {
	if err := c.reserve(source, l); err != nil {
		if c.ctx.Err() != nil {
			return // end settles the pages
		}
		for i := range l.pages {
			c.failed(l.pages[i].index, Unreachable, source.id)
		}
		return
	}
	c.mu.Lock()
	ended := c.mu.ended != NoReason
	if !ended {
		c.mu.lots[l] = struct{}{}
	}
	c.mu.Unlock()
	deadline, _ := c.ctx.Deadline()
	if !ended && l.d.ask(l, until(deadline)) {
		return
	}
	l.d.lots.release(1)
	source.giveBack(l.charged)
	c.lotEnded(l)
	for i := range l.pages {
		c.failed(l.pages[i].index, Unreachable, source.id)
	}
}

// reserve finds the connection for a lot and room in all budgets.
func (c *call) reserve(source *peer, l *lot) error {
	var charge int64
	for i := range l.pages {
		charge += c.t.charge(int64(len(l.pages[i].slot)))
	}
	if err := source.inflight.acquire(c.ctx, charge); err != nil {
		return err
	}
	if err := c.t.inflight.acquire(c.ctx, charge); err != nil {
		source.inflight.release(charge)
		return err
	}
	l.charged = charge
	d, err := source.download(c.ctx)
	if err == nil {
		err = d.lots.acquire(c.ctx, 1)
	}
	if err != nil {
		source.giveBack(charge)
		return err
	}
	l.d = d
	return nil
}

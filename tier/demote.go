package tier

import (
	"cmp"
	"errors"
	"math/bits"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Bounds of one batch of the demotion writer: enough pages in flight to keep a
// disk busy, few enough that what waits for a clean block waits for
// milliseconds.
const (
	batchPages = 256
	batchBytes = 16 << 20
)

// cleanShare is the share of a tenant's RAM that the demotion writer keeps
// evictable without I/O, so that a Fetch or Reserve finds room at once.
const cleanShare = 8

const (
	recheckEvery = 250 * time.Millisecond // while the disk is busy or in bypass
	spaceTries   = 8                      // rounds of making room on disk for one batch
)

// dirtyBlock is one block of a batch.
type dirtyBlock struct {
	id    blockID
	n     *namespace
	parts paging.PartSet // being written
}

// batch is what the demotion writer writes in one Store. Owned by its goroutine.
type batch struct {
	blocks []dirtyBlock
	pages  []Page
	src    [][]byte
	owners []uint32
	refs   []Ref
	bytes  int64
}

// writeDown is the demotion writer: one goroutine from Open to Close. It writes
// blocks that are only in RAM to disk: at once where that was asked for, oldest
// first where a tenant runs out of clean blocks, and after Config.FlushAfter
// while the disk is idle. At Close it writes everything, hottest first, until
// its time is up.
func (h *Hierarchy) writeDown() {
	var b batch
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		h.mu.Lock()
		b.reset()
		was := h.mu.bypass
		pause := h.fill(&b, time.Now())
		back := was && !h.mu.bypass
		done := h.mu.closed && len(b.blocks) == 0
		h.mu.Unlock()
		if back {
			h.log.Info("disk tier takes blocks again")
		}
		if done || h.ctx.Err() != nil {
			h.abandon(&b)
			return
		}
		if len(b.blocks) > 0 {
			h.write(&b)
			continue
		}
		timer.Reset(pause)
		select {
		case <-h.wake:
		case <-timer.C:
		case <-h.ctx.Done():
		}
	}
}

func (b *batch) reset() {
	clear(b.src)
	*b = batch{blocks: b.blocks[:0], pages: b.pages[:0], src: b.src[:0], owners: b.owners[:0], refs: b.refs[:0]}
}

func (b *batch) full() bool { return len(b.pages) >= batchPages || b.bytes >= batchBytes }

// fill chooses what to write next and pins it; if that is nothing, it says when
// to look again. Requires Hierarchy.mu.
func (h *Hierarchy) fill(b *batch, now time.Time) (pause time.Duration) {
	m := &h.mu
	if m.bypass {
		if u := h.cfg.Durable.Usage(); u.State != Ready {
			h.endAllDurable()
			return recheckEvery
		}
		m.bypass = false
	}
	if wait := m.pauseUntil.Sub(now); wait > 0 {
		return wait
	}
	if m.closed && m.hottest == nil {
		m.hottest = h.hottestDirty()
	}
	for m.closed && len(m.hottest) > 0 && !b.full() {
		h.take(b, m.hottest[0])
		m.hottest = m.hottest[1:]
	}
	for m.urgent.len() > 0 && !b.full() {
		h.takeFrom(b, &m.urgent, hastened)
	}
	u := h.cfg.Arena.Usage()
	for _, t := range m.tenantList {
		for t.dirtyq.len() > 0 && !b.full() && h.shortOfClean(t, u.HeldBytes-u.UsedBytes) {
			h.takeFrom(b, &t.dirtyq, queued)
		}
	}
	if len(b.blocks) > 0 || m.closed {
		return 0
	}
	return h.fillIdle(b, now)
}

// fillIdle takes blocks that are old enough if the disk does nothing else.
func (h *Hierarchy) fillIdle(b *batch, now time.Time) (pause time.Duration) {
	pause = time.Hour
	for _, t := range h.mu.tenantList {
		for !b.full() {
			since, ok := t.dirtyq.oldest()
			if !ok {
				break
			}
			if wait := time.Unix(int64(since), 0).Add(h.cfg.FlushAfter).Sub(now); wait > 0 {
				pause = min(pause, wait)
				break
			}
			if !h.mu.loads.idle() {
				return recheckEvery
			}
			h.takeFrom(b, &t.dirtyq, queued)
		}
	}
	return pause
}

// shortOfClean reports whether a tenant has less room that is free, clean or
// about to be clean than cleanShare asks for, or somebody waits for room.
// free is what nobody uses of the arena.
func (h *Hierarchy) shortOfClean(t *tenant, free int64) bool {
	if t.starving > 0 {
		return true
	}
	if t.quota.RAMBytes > 0 {
		free = min(free, t.quota.RAMBytes-t.ram[leased]-t.ram[dirty]-t.ram[clean]-t.aside)
	}
	return free+t.ram[clean]+t.writingBytes < h.ramLimit(t)/cleanShare
}

// takeFrom pops the oldest entry of a queue whose blocks carry flag, and takes
// its block if it is still to be written.
func (h *Hierarchy) takeFrom(b *batch, q *dirtyQueue, flag flags) {
	e := q.pop()
	blk := h.mu.index.at(e.id)
	if blk.epoch != e.epoch || !blk.flags.has(flag) {
		return
	}
	q.live--
	asked := flag == hastened
	blk.flags &^= flag
	if asked || h.needsCopy(blk) {
		h.take(b, e.id)
	}
}

// take puts a block into the batch and pins it.
func (h *Hierarchy) take(b *batch, id blockID) {
	blk := h.mu.index.at(id)
	parts := blk.ram &^ blk.disk
	if parts == 0 || blk.flags.has(writing|dropped) {
		return
	}
	n := h.of(blk)
	if !h.fitsDiskQuota(n, parts) {
		h.shed(blk)
		return
	}
	h.pin(blk)
	blk.flags |= writing
	n.tenant.writing++
	n.tenant.writingBytes += n.slotsOf(parts)
	b.blocks = append(b.blocks, dirtyBlock{id: id, n: n, parts: parts})
	pages := h.pagesOf(blk)
	meta := packMeta(blk)
	for s := parts; s != 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		p := Page{Bytes: n.bytes[part], Sum: pages[part].sum, Meta: meta}
		p.ID = paging.PageID{BlockID: paging.BlockID{Namespace: n.id, Name: blk.name}, Part: part}
		b.pages = append(b.pages, p)
		b.src = append(b.src, h.cfg.Arena.Bytes(pages[part].ram, p.Bytes))
		b.owners = append(b.owners, id)
		b.bytes += n.slot[part]
	}
}

// write stores a batch and publishes what the disk took.
func (h *Hierarchy) write(b *batch) {
	for i := range b.pages {
		p := &b.pages[i]
		p.Key = paging.StorageKey(p.ID.Namespace, p.ID.Name, p.ID.Part)
	}
	b.refs = append(b.refs, make([]Ref, len(b.pages))...)
	err := h.store(b)
	h.awaitSettled(err) // else nothing is evicted any more
	if h.wrote(b, err) {
		h.log.Warn("disk tier is bypassed", "error", err)
	}
}

// wrote enters what became of a batch; bypassed says that the disk takes nothing
// from now on.
func (h *Hierarchy) wrote(b *batch, err error) (bypassed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		was := h.mu.bypass
		h.storeFailed(err)
		bypassed = h.mu.bypass && !was && !h.mu.closed
	}
	// From the first page on: blocks of one commit were queued tail first, so the
	// head of a chain becomes the newest on disk too.
	at := 0
	for _, d := range b.blocks {
		h.written(d, b, at, err)
		at += d.parts.Len()
	}
	h.letGo(b)
	h.broadcastLocked()
	return bypassed
}

// letGo unpins the blocks of a batch, from the head of a chain: see unblock.
// Requires Hierarchy.mu.
func (h *Hierarchy) letGo(b *batch) {
	for _, d := range slices.Backward(b.blocks) {
		h.unpin(d.id, h.mu.index.at(d.id))
	}
}

// store writes the pages of the batch, making room on disk as needed.
func (h *Hierarchy) store(b *batch) error {
	// Room that is made ahead is free when Store looks for it: the records of what
	// goes have to be removed first.
	if u := h.cfg.Durable.Usage(); u.BudgetBytes-u.UsedBytes < b.bytes {
		h.makeDiskRoom(b, b.bytes-(u.BudgetBytes-u.UsedBytes))
	}
	err := h.cfg.Durable.Store(h.ctx, b.pages, b.src, b.owners, b.refs)
	for range spaceTries {
		if err == nil || Unsettled(err) != nil {
			return err
		}
		switch {
		case errors.Is(err, paging.ErrUnknownNamespace):
			if err := h.putNamespaces(b); err != nil {
				return err
			}
		case !errors.Is(err, paging.ErrNoSpace) || !h.makeDiskRoom(b, b.bytes):
			return err
		}
		err = h.storeRest(b)
	}
	return err
}

// storeRest stores the pages of the batch that have no ref yet.
func (h *Hierarchy) storeRest(b *batch) error {
	var rest batch
	var at []int
	for i, r := range b.refs {
		if r == 0 {
			at = append(at, i)
			rest.pages = append(rest.pages, b.pages[i])
			rest.src = append(rest.src, b.src[i])
			rest.owners = append(rest.owners, b.owners[i])
		}
	}
	rest.refs = make([]Ref, len(at))
	err := h.cfg.Durable.Store(h.ctx, rest.pages, rest.src, rest.owners, rest.refs)
	for j, i := range at {
		b.refs[i] = rest.refs[j]
	}
	return err
}

// putNamespaces makes the namespaces of a batch durable: one that was
// registered while the disk was in bypass is not.
func (h *Hierarchy) putNamespaces(b *batch) error {
	var last *namespace
	for _, d := range b.blocks {
		if d.n == last {
			continue
		}
		last = d.n
		if err := h.cfg.Durable.PutNamespace(d.n.ns); err != nil {
			return err
		}
	}
	return nil
}

// storeFailed notes why a Store failed. Requires Hierarchy.mu.
func (h *Hierarchy) storeFailed(err error) {
	m := &h.mu
	switch {
	case errors.Is(err, paging.ErrNoSpace):
		m.metrics.DiskFullBatches++
	case errors.Is(err, paging.ErrUnavailable):
		m.bypass = true
		m.metrics.Bypasses++
	default:
		m.metrics.StoreErrors++
		m.pauseUntil = time.Now().Add(recheckEvery)
	}
}

// written ends the writing of one block, which letGo unpins: its pages are
// refs[at:]. Requires Hierarchy.mu.
func (h *Hierarchy) written(d dirtyBlock, b *batch, at int, err error) {
	blk := h.mu.index.at(d.id)
	refs := b.refs[at : at+d.parts.Len()]
	blk.flags &^= writing
	d.n.tenant.writing--
	d.n.tenant.writingBytes -= d.n.slotsOf(d.parts)
	switch {
	case slices.Contains(refs, 0) || blk.flags.has(dropped):
		h.cfg.Durable.Free(refs...) // all parts of a block or none
		if blk.flags.has(dropped) {
			break
		}
		if errors.Is(err, paging.ErrNoSpace) {
			h.shed(blk)
		}
	default:
		i := 0
		for s := d.parts; s != 0; s &= s - 1 {
			h.publishDisk(d.id, blk, bits.TrailingZeros64(uint64(s)), refs[i])
			i++
		}
		m := &h.mu.metrics
		m.StoredBlocks++
		m.StoredPages += int64(len(refs))
		m.StoredBytes += d.n.bytesOf(d.parts)
	}
	if blk.ram&^blk.disk != 0 {
		h.queueDirty(d.id, blk, h.nowSeconds())
	}
	if err == nil && blk.ram&^blk.disk != 0 && len(h.mu.durable[d.id]) > 0 {
		h.hasten(d.id, blk) // a part that came meanwhile
	} else {
		h.endDurable(d.id)
	}
}

// abandon lets go of a batch that is not written because the time to stop is up.
func (h *Hierarchy) abandon(b *batch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b.refs = append(b.refs[:0], make([]Ref, len(b.pages))...)
	at := 0
	for _, d := range b.blocks {
		h.written(d, b, at, paging.ErrClosed)
		at += d.parts.Len()
	}
	h.letGo(b)
	h.endAllDurable()
	h.broadcastLocked()
}

// queueDirty queues a block whose pages are not all on disk. Requires Hierarchy.mu.
func (h *Hierarchy) queueDirty(id blockID, b *block, now uint32) {
	if !h.needsCopy(b) || b.flags.has(queued) {
		return
	}
	q := &h.of(b).tenant.dirtyq
	q.sweep(h.stale(queued))
	b.flags |= queued
	q.push(dirtyEntry{id: id, epoch: b.epoch, since: now})
	q.live++
}

// hasten has a block written at once. Requires Hierarchy.mu.
func (h *Hierarchy) hasten(id blockID, b *block) {
	if h.cfg.Durable == nil || b.ram&^b.disk == 0 || b.flags.has(hastened|dropped) {
		return
	}
	q := &h.mu.urgent
	q.sweep(h.stale(hastened))
	b.flags |= hastened
	q.push(dirtyEntry{id: id, epoch: b.epoch})
	q.live++
	h.wakeWriter()
}

func (h *Hierarchy) stale(flag flags) func(dirtyEntry) bool {
	return func(e dirtyEntry) bool {
		b := h.mu.index.at(e.id)
		return b.epoch != e.epoch || !b.flags.has(flag)
	}
}

// awaitDisk has w wait until the disk has all pages of a block or refused them;
// false if it has them, or will not.
func (h *Hierarchy) awaitDisk(id blockID, b *block, w *waiter) bool {
	if h.cfg.Durable == nil || h.mu.bypass || b.flags.has(dropped) {
		return false
	}
	w.left++
	h.mu.durable[id] = append(h.mu.durable[id], w)
	return true
}

// endDurable lets those go on who wait for a block to be durable.
func (h *Hierarchy) endDurable(id blockID) {
	for _, w := range h.mu.durable[id] {
		w.done()
	}
	delete(h.mu.durable, id)
}

func (h *Hierarchy) endAllDurable() {
	for id := range h.mu.durable {
		h.endDurable(id)
	}
}

// forgetWaiter takes w off the waiters of a block.
func (h *Hierarchy) forgetWaiter(id blockID, w *waiter) {
	ws := slices.DeleteFunc(h.mu.durable[id], func(x *waiter) bool { return x == w })
	if len(ws) == 0 {
		delete(h.mu.durable, id)
	} else {
		h.mu.durable[id] = ws
	}
}

// hottestDirty lists what Close writes down, the most valuable first: by
// priority, then by last use, then from the head of a chain. Requires Hierarchy.mu.
func (h *Hierarchy) hottestDirty() []blockID {
	ids := []blockID{}
	// A block that is in both queues is listed twice, and written once.
	add := func(q *dirtyQueue, flag flags) {
		stale := h.stale(flag)
		for _, e := range q.items[q.head:] {
			if !stale(e) {
				ids = append(ids, e.id)
			}
		}
	}
	add(&h.mu.urgent, hastened)
	for _, t := range h.mu.tenantList {
		add(&t.dirtyq, queued)
	}
	slices.SortFunc(ids, func(i, j blockID) int {
		a, b := h.mu.index.at(i), h.mu.index.at(j)
		return cmp.Or(cmp.Compare(b.priority, a.priority), cmp.Compare(b.used, a.used), cmp.Compare(a.position, b.position))
	})
	return ids
}

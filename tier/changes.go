package tier

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// maxChanges bounds the changes that wait to be told: beyond it they are dropped,
// and Changes says so.
const maxChanges = 1 << 17

// changeLog notes which blocks came, changed or went. Guarded by Hierarchy.mu.
type changeLog struct {
	signal chan struct{} // has a token while something waits
	items  []changedBlock
	spare  []changedBlock // to be used as items next
	missed bool
}

type changedBlock struct {
	name paging.BlockName
	ns   *namespace
}

// HeldBlock is what this node holds of a block.
type HeldBlock struct {
	ID       paging.BlockID
	Parts    paging.PartSet // in whatever tier; 0: nothing any more
	Used     uint32         // last use, Unix seconds
	Position uint32         // in its chain
}

// noteChange notes that what the node holds of a block has changed.
func (h *Hierarchy) noteChange(n *namespace, name *paging.BlockName) {
	if !h.cfg.Observed {
		return
	}
	c := &h.mu.changes
	if len(c.items) >= maxChanges {
		c.missed = true
		return
	}
	if last := len(c.items) - 1; last >= 0 && c.items[last].ns == n && c.items[last].name == *name {
		return
	}
	c.items = append(c.items, changedBlock{name: *name, ns: n})
	select {
	case c.signal <- struct{}{}:
	default:
	}
}

// Changes waits until blocks came, changed or went, and appends what the node
// holds of them now, the last state of each. missed says that more has changed
// than was noted: HeldBlocks tells all. One goroutine calls it at a time, and only
// with Config.Observed. The error is that of ctx.
func (h *Hierarchy) Changes(ctx context.Context, out []HeldBlock) (_ []HeldBlock, missed bool, err error) {
	select {
	case <-h.mu.changes.signal:
	case <-ctx.Done():
		return out, false, ctx.Err()
	}
	h.mu.Lock()
	c := &h.mu.changes
	items := c.items
	missed, c.missed = c.missed, false
	c.items, c.spare = c.spare, nil
	h.mu.Unlock()
	// What changes from now on is noted again: each is told as it is when it is looked
	// at, or later. There may be many, so not in one go of the lock.
	for left := items; len(left) > 0; {
		n := min(len(left), changeStep)
		h.mu.Lock()
		for i := range left[:n] {
			out = append(out, h.heldNow(&left[i]))
		}
		h.mu.Unlock()
		left = left[n:]
	}
	if cap(items) <= 1<<14 {
		h.mu.Lock()
		c.spare = items[:0]
		h.mu.Unlock()
	}
	return out, missed, nil
}

// changeStep is how many changes are looked at in one go of the lock: a fraction of
// a millisecond.
const changeStep = 1024

// heldNow is what is held of a block that changed. Requires h.mu.
func (h *Hierarchy) heldNow(x *changedBlock) HeldBlock {
	held := HeldBlock{ID: paging.BlockID{Namespace: x.ns.id, Name: x.name}}
	if id := h.mu.index.find(x.ns.num, &x.name); id != 0 && h.of(h.mu.index.at(id)) == x.ns {
		b := h.mu.index.at(id)
		held.Parts, held.Used, held.Position = b.ram|b.disk, b.used, b.position
	}
	return held
}

// heldStep is how many blocks HeldBlocks looks at in one go of the lock.
const heldStep = 4096

// HeldBlocks calls f, unlocked, with every block that the node holds. A block that
// changes meanwhile may be seen in either state, or twice; Changes tells it again.
func (h *Hierarchy) HeldBlocks(f func(HeldBlock)) {
	step := make([]HeldBlock, 0, heldStep)
	for at := blockID(1); at != 0; {
		step = step[:0]
		h.mu.Lock()
		at = h.mu.index.walk(at, heldStep, func(_ blockID, b *block) {
			if b.ram|b.disk != 0 && !b.flags.has(dropped) {
				step = append(step, HeldBlock{ID: paging.BlockID{Namespace: h.of(b).id, Name: b.name}, Parts: b.ram | b.disk, Used: b.used, Position: b.position})
			}
		})
		h.mu.Unlock()
		for _, held := range step {
			f(held)
		}
	}
}

// Cause says why a block is not here any more.
type Cause uint8

// Causes.
const (
	StillUnknown Cause = iota // it is not in the history
	Evicted                   // its room was wanted
	Dropped                   // by request, or damaged
	Unfinished                // parts did not come in time
)

// String is the name used in tables.
func (c Cause) String() string {
	return [...]string{"unknown", "evicted", "dropped", "unfinished"}[c]
}

// Gone says when and why a block left this node for good.
type Gone struct {
	Cause Cause
	At    time.Time
}

// historySize is how many blocks that are gone are remembered.
const historySize = 1_000_000

// history remembers the blocks that left last. Guarded by Hierarchy.mu; it grows
// to 16 bytes for each.
type history struct {
	entries []goneEntry // a ring when it is full
	next    int
}

type goneEntry struct {
	key   uint64 // as of index.hash
	at    uint32 // Unix seconds
	cause Cause
}

// remember notes that a block is gone, if it is; evicted says that its room was
// wanted.
func (h *Hierarchy) remember(b *block, evicted bool) {
	if b.ram|b.disk != 0 || b.flags.has(onDevice) {
		return
	}
	x := &h.mu.history
	e := goneEntry{key: h.mu.index.hash(b.ns, &b.name), at: h.nowSeconds(), cause: Dropped}
	switch {
	case b.flags.has(incomplete):
		e.cause = Unfinished
	case evicted:
		e.cause = Evicted
	}
	if len(x.entries) < historySize {
		x.entries = append(x.entries, e)
		return
	}
	x.entries[x.next] = e
	x.next = (x.next + 1) % historySize
}

// historyStep is how many entries History looks at in one go of the lock.
const historyStep = 1 << 16

// History tells of each block when and why it left this node last; the zero Gone
// where that is not known. complete: everything that left since the start is known,
// so that what is not is here or never was. Errors: paging.ErrUnknownNamespace,
// paging.ErrClosed.
func (h *Hierarchy) History(ns paging.NamespaceID, names []paging.BlockName) (gone []Gone, complete bool, err error) {
	h.mu.Lock()
	n, err := h.namespaceLocked(ns)
	h.mu.Unlock()
	if err != nil {
		return nil, false, err
	}
	wanted := make(map[uint64]Gone, len(names))
	for i := range names {
		wanted[h.mu.index.hash(n.num, &names[i])] = Gone{}
	}
	for at, end := 0, 1; at < end; at += historyStep {
		h.mu.Lock()
		end = len(h.mu.history.entries)
		complete = end < historySize
		for _, e := range h.mu.history.entries[min(at, end):min(at+historyStep, end)] {
			if g, ok := wanted[e.key]; ok {
				if t := time.Unix(int64(e.at), 0); t.After(g.At) || g.Cause == StillUnknown {
					wanted[e.key] = Gone{Cause: e.cause, At: t}
				}
			}
		}
		h.mu.Unlock()
	}
	out := make([]Gone, len(names))
	for i := range names {
		out[i] = wanted[h.mu.index.hash(n.num, &names[i])]
	}
	return out, complete, nil
}

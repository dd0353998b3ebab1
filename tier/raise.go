package tier

import (
	"context"
	"math/bits"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check"
)

// A Fetch that wants pages on the device brings what is nowhere near into RAM like
// any other, and then copies what is in RAM only. A row that it wants is pinned in
// RAM until it is granted, and on the device from the moment that anything of it
// is there.

// onDevice is what of row i lies on the device.
func (f *fetch) onDevice(i int) paging.PartSet {
	if f.ids[i] == 0 {
		return 0
	}
	return f.h.deviceParts(f.ids[i], f.h.mu.index.at(f.ids[i]))
}

// absent is the set of pages of row i that have to be copied to the device.
func (f *fetch) absent(i int) paging.PartSet {
	if !f.pins[i] {
		return 0
	}
	return f.wanted(i) &^ f.onDevice(i)
}

// raised reports whether nothing has to be copied to the device.
func (f *fetch) raised() bool {
	if !f.up {
		return true
	}
	for i := range f.usable {
		if f.absent(i) != 0 {
			return false
		}
	}
	return true
}

// pinDevice pins on the device exactly the rows that are pinned and have
// something there.
func (f *fetch) pinDevice() {
	if !f.up {
		return
	}
	for i, id := range f.ids {
		want := f.pins[i] && f.h.mu.index.at(id).flags.has(onDevice)
		if want && !f.deviceIDs.has(i) {
			f.h.mu.device.of[id].pins++
			f.deviceIDs.set(i, id)
		} else if !f.pins[i] && f.deviceIDs.has(i) {
			id := f.deviceIDs[i]
			f.deviceIDs[i] = 0
			f.h.unpinDevice(id)
		}
	}
}

// deviceRows are the blocks that a fetch pinned on the device, by row; 0: none.
type deviceRows []blockID

func (r deviceRows) has(i int) bool { return i < len(r) && r[i] != 0 }

func (r *deviceRows) set(i int, id blockID) {
	for len(*r) <= i {
		*r = append(*r, 0)
	}
	(*r)[i] = id
}

// raise copies the pinned rows to the device. It unlocks while it waits. Each
// round waits for something or gives something up for good.
func (f *fetch) raise(ctx context.Context) {
	for !f.raised() {
		if err := ctx.Err(); err != nil || f.req.Resident {
			r := Timeout
			if err != nil {
				r = reasonOfContext(err)
			}
			f.giveUp(r)
			return
		}
		if !f.resident() { // a shorter prefix can need other pages
			f.bringUp(ctx)
			continue
		}
		f.startFills()
		if len(f.waits) == 0 {
			continue
		}
		f.await(ctx, false)
		if f.h.mu.closed {
			f.giveUp(Stopping)
			return
		}
		f.replan()
	}
}

// startFills sees to it that every page that is not on the device is being copied
// there, and notes the copies in waits. It gives up rows for which there is no
// room.
func (f *fetch) startFills() {
	f.waits = f.waits[:0]
	for i := 0; i < f.usable; i++ {
		absent := f.absent(i)
		if absent == 0 {
			continue
		}
		if f.missing(i) != 0 {
			return // not in RAM yet
		}
		r := f.fillRow(i, absent)
		switch {
		case r == NoReason:
		case len(f.waits) > 0:
			return // first see what those bring
		case f.req.Mode == ModePrefix && f.usable > i+1 && f.shrinks < maxShrinks:
			f.shrinks++
			f.refuse(i+1+(f.usable-i-1)/2, r) // what the end of the prefix holds serves its head
			i--
		default:
			f.refuse(i, r)
		}
	}
}

// fillRow starts or joins the copies of some parts of a row.
func (f *fetch) fillRow(i int, parts paging.PartSet) Reason {
	h := f.h
	id := f.ids[i]
	b := h.mu.index.at(id)
	f.filled.set(i, id)
	if b.flags.has(onDevice) {
		for _, l := range h.mu.device.of[id].fills {
			if l.open&parts != 0 {
				f.waits = append(f.waits, wait{i, l, true})
				parts &^= l.open
			}
		}
	}
	if parts == 0 {
		return NoReason
	}
	l, lowering, r := h.startFill(id, b, parts)
	for _, x := range lowering {
		f.waits = append(f.waits, wait{-1, x, true})
	}
	if r == NoReason {
		f.waits = append(f.waits, wait{i, l, false})
	}
	f.pinDevice()
	return r
}

// grantDevice hands a row over on the device and lets its RAM go; it reports from
// where it was served.
func (f *fetch) grantDevice(hold *Hold, i int) Kind {
	h := f.h
	id := f.ids[i]
	b := h.mu.index.at(id)
	d := h.mu.device.of[id]
	pages := h.pagesOf(b)
	parts, at := f.wanted(i), i*hold.Columns
	for s := f.parts; s != 0; s &= s - 1 {
		if part := bits.TrailingZeros64(uint64(s)); parts.Has(part) {
			check.That(d.parts.Has(part), "granted a page that is not on the device")
			hold.refs[at] = d.refs[part]
			hold.Slots[at] = paging.Slot{Bytes: f.ns.bytes[part], Sum: pages[part].sum}
		}
		at++
	}
	h.touchDevice(id, b, d, f.chain(), f.now)
	if f.from[i] == NVMe {
		h.hitDisk(id, b, f.chain(), f.now)
	}
	hold.ids[i] = id
	f.deviceIDs[i] = 0 // the pin is the Hold's now
	h.unpin(id, b)
	switch {
	case f.from[i] > RAM:
		return f.from[i]
	case f.filled.has(i):
		return RAM
	}
	return HBM
}

// Damaged says that a page of the hold, which must not be released yet, was found
// damaged where it lies on the device: nobody else gets that copy.
func (hold *Hold) Damaged(row, column int) {
	h := hold.h
	h.mu.Lock()
	defer h.mu.Unlock()
	id, part := hold.ids[row], 0
	for s := hold.Parts; s != 0; s &= s - 1 {
		if part = bits.TrailingZeros64(uint64(s)); column == 0 {
			break
		}
		column--
	}
	h.mu.metrics.CorruptPages++
	h.dropDevice(id, h.mu.index.at(id), part)
}

// releaseDevice gives up what a Hold has on the device.
func (hold *Hold) releaseDevice() {
	for _, id := range hold.ids {
		if id != 0 {
			hold.h.unpinDevice(id)
		}
	}
}

package tier

import (
	"fmt"
	"math/bits"

	"github.com/kvtier/kvtier/paging"
)

// checkDevice checks the pages of a row that lie on the device. Requires
// Hierarchy.mu.
func (a *Attempt) checkDevice(r CommitRow) error {
	switch {
	case a.h.cfg.Device == nil:
		return fmt.Errorf("row %d lies on a device, and there is none: %w", r.Row, paging.ErrInvalid)
	case len(r.Device) != a.parts.Len():
		return fmt.Errorf("row %d with %d pages, want %d: %w", r.Row, len(r.Device), a.parts.Len(), paging.ErrInvalid)
	}
	parts, col := a.rows[r.Row].parts, 0
	for s := a.parts; s != 0; s &= s - 1 {
		part := bits.TrailingZeros64(uint64(s))
		if got := spanBytes(r.Device[col]); parts.Has(part) && got != int64(a.ns.bytes[part]) {
			return fmt.Errorf("part %d of row %d has %d bytes, want %d: %w", part, r.Row, got, a.ns.bytes[part], paging.ErrInvalid)
		}
		col++
	}
	return nil
}

func spanBytes(spans []Span) (n int64) {
	for _, s := range spans {
		n += s.Bytes
	}
	return n
}

// gathering is the pages of a commit that come from the device, in one batch.
type gathering struct {
	rows  []int // index of the row of each page, in the call
	at    []int // its place in Attempt.refs
	pages []Page
	from  [][]Span
	refs  []Ref // on the device; 0: there was no room
	host  [][]byte
	errs  []error
}

// gatherRows copies the rows that lie on the device and are Granted: to slots on
// the device, if it has room for them, and to their slots in RAM. A row of which a
// page fails stays open, and its outcome is NotReached.
func (a *Attempt) gatherRows(rows []CommitRow, out []Outcome) {
	h := a.h
	var g gathering
	h.mu.Lock()
	for i, r := range rows {
		if r.Device != nil && out[i] == Granted {
			a.gatherRow(&g, i, r)
		}
	}
	h.mu.Unlock()
	if len(g.pages) == 0 {
		return
	}
	h.cfg.Device.Gather(g.pages, g.from, g.refs, g.host, g.errs)
	for i := range g.errs {
		h.awaitSettled(g.errs[i])
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if a.device == nil {
		a.device = make([]Ref, len(a.refs))
	}
	failed := map[int]bool{}
	for i, row := range g.rows {
		failed[row] = failed[row] || g.errs[i] != nil
	}
	for i, row := range g.rows {
		if failed[row] {
			if a.onDevice { // still set aside: the row can be committed again
				continue
			}
			a.ungather(g.refs[i], a.partAt(rows[row].Row, g.at[i]))
			continue
		}
		a.sums[g.at[i]], a.device[g.at[i]] = g.pages[i].Sum, g.refs[i]
	}
	for row := range failed {
		if failed[row] {
			out[row] = NotReached
			a.rows[rows[row].Row].state = open
			h.mu.metrics.GatherErrors++
		}
	}
}

// gatherRow sets slots on the device aside for the pages of a row. Requires
// Hierarchy.mu.
func (a *Attempt) gatherRow(g *gathering, i int, r CommitRow) {
	row := &a.rows[r.Row]
	at, col := row.at, 0
	for s := a.parts; s != 0; s &= s - 1 {
		if part := bits.TrailingZeros64(uint64(s)); row.parts.Has(part) {
			var ref Ref
			if a.onDevice {
				ref = a.device[at]
			} else if got, _, why := a.h.allocDevice(a.ns, part, row.id); why == NoReason {
				ref = got
			}
			g.rows, g.at, g.refs = append(g.rows, i), append(g.at, at), append(g.refs, ref)
			g.pages, g.from = append(g.pages, Page{Bytes: a.ns.bytes[part]}), append(g.from, r.Device[col])
			g.host, g.errs = append(g.host, a.h.cfg.Arena.Bytes(a.refs[at], a.ns.bytes[part])), append(g.errs, nil)
			at++
		}
		col++
	}
}

// compareDevice is compareRow for a row that lies on the device: its pages come
// down one at a time. What cannot be read counts as equal.
func (a *Attempt) compareDevice(r CommitRow) Outcome {
	row := &a.rows[r.Row]
	at, col := row.at, 0
	for s := a.parts; s != 0; s &= s - 1 {
		if part := bits.TrailingZeros64(uint64(s)); row.parts.Has(part) {
			pages, errs := []Page{{Bytes: a.ns.bytes[part]}}, make([]error, 1)
			a.h.cfg.Device.Gather(pages, r.Device[col:col+1], []Ref{0}, [][]byte{make([]byte, a.ns.bytes[part])}, errs)
			a.h.awaitSettled(errs[0])
			if errs[0] == nil && pages[0].Sum != a.sums[at] {
				return DuplicateDivergent
			}
			at++
		}
		col++
	}
	return Duplicate
}

// partAt is the part whose page lies at a place of refs.
func (a *Attempt) partAt(row, at int) int {
	parts := a.rows[row].parts
	for range at - a.rows[row].at {
		parts &= parts - 1
	}
	return bits.TrailingZeros64(uint64(parts))
}

// ungather gives a slot on the device back. Requires Hierarchy.mu.
func (a *Attempt) ungather(ref Ref, part int) {
	if ref != 0 {
		a.h.cfg.Device.Free(ref)
		a.ns.tenant.deviceAside -= a.ns.slot[part]
	}
}

// publishDevice makes a page resident on the device that a commit brought.
func (h *Hierarchy) publishDevice(id blockID, b *block, part int, ref Ref) {
	n := h.of(b)
	n.tenant.deviceAside -= n.slot[part]
	if b.flags.has(dropped) {
		h.cfg.Device.Free(ref)
		return
	}
	d := h.copyOf(id, b)
	d.pins++
	d.refs[part] = ref
	d.parts = d.parts.With(part)
	n.tenant.device += n.slot[part]
	h.unpinDevice(id)
}

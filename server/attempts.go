package server

import (
	"context"
	"fmt"
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// maxAttempts bounds the open write attempts of one attachment.
const maxAttempts = 1024

// attempt is a two-phase write under way: staging slots given to the client, and
// room set aside for them. Guarded by its attachment's mu.
type attempt struct {
	parts    paging.PartSet
	deadline time.Time
	expired  bool
	rows     []attemptRow
	open     int // rows that were neither committed nor given up
	tier     *tier.Attempt
	working  bool     // its staging is working pages on the device
	region   *region  // its pages lie there already; nil: they are staged
	blocks   []uint32 // of the region, per named block
	left     bool     // let go of the region
}

// attemptRow is one granted block.
type attemptRow struct {
	stagedRow
	row   int // index of the block in the Reserve
	state rowState
}

type rowState uint8

const (
	rowOpen rowState = iota
	rowCommitting
	rowDone
)

// stagedRow is staging set aside for one block, one entry per part of the write.
type stagedRow struct {
	places []paging.Place // Extent 0: no page there
	src    [][]byte       // the memory at places; nil: no page there
	spans  [][]tier.Span  // instead of src: where the pages are on the device
}

// stage sets staging aside for the pages of these parts, in columns of the parts
// of the write, or for none.
func (s *staging) stage(l *paging.Layout, columns, parts paging.PartSet) (stagedRow, bool) {
	row := stagedRow{places: make([]paging.Place, columns.Len()), src: make([][]byte, columns.Len())}
	column := 0
	for p := columns; p != 0; p &= p - 1 {
		if part := bits.TrailingZeros64(uint64(p)); parts.Has(part) {
			place, ok := s.slots.Alloc(l.Parts[part].PageBytes, 0)
			if !ok {
				s.unstage(row.places)
				return stagedRow{}, false
			}
			row.places[column], row.src[column] = place, s.memory(place, l.Parts[part].PageBytes)
		}
		column++
	}
	return row, true
}

// unstage gives staging slots back.
func (s *staging) unstage(places []paging.Place) {
	if s.slots == nil {
		return
	}
	for _, p := range places {
		if p.Extent != 0 {
			s.slots.Free(p)
		}
	}
}

// rowsIn is about how many blocks of these parts an allocator has room for, at
// least 1: the hierarchy should not make room for what cannot be filled.
func rowsIn(slots *paging.Allocator, l *paging.Layout, parts paging.PartSet) int {
	row := uint64(0)
	for i := range l.Parts {
		if parts.Has(i) && l.Parts[i].BlocksPerPage <= 1 {
			row += roundUnit(l.Parts[i].PageBytes)
		}
	}
	if row == 0 || slots == nil {
		return 1
	}
	return int(max(1, slots.Usage().FreeBytes/row))
}

// bytes is the length of the slot in a column; 0: there is none.
func (r *stagedRow) bytes(i int) uint32 {
	switch {
	case r.places[i].Extent == 0:
		return 0
	case r.spans != nil:
		return uint32(r.spans[i][0].Bytes)
	}
	return uint32(len(r.src[i]))
}

// source finds out where the pages of an attempt are written. endSource follows.
func (a *attachment) source(t *attempt, r *rpc.ReserveRequest) (err error) {
	if r.Region != 0 {
		t.blocks = r.Blocks
		t.region, err = a.useRegion(r.Region, r.Namespace, t.parts, r.Blocks, len(r.Names))
		return err
	}
	if tier.Kind(r.Tier) != tier.HBM {
		return nil
	}
	t.working = true
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.device.working == nil {
		return fmt.Errorf("reserve in tier hbm: attach with device_pool and working_bytes: %w", paging.ErrInvalid)
	}
	return nil
}

func (a *attachment) endSource(t *attempt) {
	if t.region != nil {
		a.endUse(t.region)
	}
}

// leaveRegionLocked lets go of the region of an attempt that has ended.
func (a *attachment) leaveRegionLocked(t *attempt) {
	if t.region != nil && !t.left {
		t.left = true
		t.region.busy--
	}
}

// stageLocked finds where the pages of a granted row go.
func (a *attachment) stageLocked(l *paging.Layout, t *attempt, row int) (stagedRow, bool) {
	switch parts := t.tier.Parts(row); {
	case t.region != nil:
		return t.region.stage(t.blocks[row], t.parts, parts), true
	case t.working:
		return a.device.stage(l, t.parts, parts)
	default:
		return a.staging.stage(l, t.parts, parts)
	}
}

// Reserve implements rpc.Writer.
func (a *attachment) Reserve(ctx context.Context, r *rpc.ReserveRequest, res *rpc.ReserveResult) error {
	if a.node.stopping.Load() {
		return errStopping
	}
	layout, err := a.namespace(r.Namespace)
	if err != nil {
		return err
	}
	parts, err := partsOf(layout, r.Parts, layout.PartsOfRanks(a.ranks))
	if err != nil {
		return err
	}
	t := &attempt{parts: parts, deadline: time.Now().Add(r.TTL)}
	if err := a.source(t, r); err != nil {
		return err
	}
	defer a.endSource(t)
	rows, err := a.mayReserve(layout, t)
	if err != nil {
		return err
	}
	ta, outcomes, retry, err := a.node.hier.Reserve(ctx, tier.ReserveRequest{
		Namespace: r.Namespace, Names: r.Names, First: r.First, Parts: parts,
		Want: a.wants(layout, parts), Device: tier.Kind(r.Tier) == tier.HBM, MaxRows: rows, Deadline: t.deadline,
	})
	if err != nil {
		return err
	}
	res.Parts, res.InFlight = parts, retry
	if ta != nil {
		t.tier = ta
		if res.Attempt, err = a.openAttempt(layout, t, r.Attempt, outcomes); err != nil {
			ta.Abort()
			return err
		}
	}
	res.Outcomes = make([]byte, len(outcomes))
	for i, o := range outcomes {
		res.Outcomes[i] = byte(o)
	}
	for i := range t.rows {
		res.Slots = t.rows[i].appendSlots(res.Slots)
	}
	return nil
}

// mayReserve refuses what can have no attempt, and tells how many rows staging
// can take about now.
func (a *attachment) mayReserve(l *paging.Layout, t *attempt) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state != attached || a.err != nil:
		return 0, errDetached
	case len(a.attempts) >= maxAttempts:
		return 0, fmt.Errorf("%d write attempts are open, the most at once: commit or abort some: %w", maxAttempts, paging.ErrUnavailable)
	}
	switch {
	case t.region != nil:
		return 0, nil // no bound
	case t.working:
		return rowsIn(a.device.slots, l, t.parts), nil
	}
	return rowsIn(a.staging.slots, l, t.parts), nil
}

// openAttempt finds staging for the granted rows and makes the attempt known. A
// row without staging, and the granted ones after it, are given back. The token
// is chosen, or random without; nil if no row is left.
func (a *attachment) openAttempt(l *paging.Layout, t *attempt, chosen *rpc.ID, outcomes []tier.Outcome) (*rpc.ID, error) {
	token := randomID()
	if chosen != nil {
		token = *chosen
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != attached || a.err != nil {
		return nil, errDetached
	}
	if _, open := a.attempts[token]; open {
		return nil, fmt.Errorf("attempt %s is open already: choose another token: %w", shortID(token), paging.ErrInvalid)
	}
	full := false
	for i, o := range outcomes {
		if o != tier.Granted {
			continue
		}
		var staged stagedRow
		if !full {
			var ok bool
			staged, ok = a.stageLocked(l, t, i)
			full = !ok
		}
		if full {
			t.tier.GiveBack(i)
			outcomes[i] = tier.StagingFull
			continue
		}
		t.rows = append(t.rows, attemptRow{stagedRow: staged, row: i})
	}
	if len(t.rows) == 0 {
		t.tier.Abort()
		return nil, nil
	}
	t.open = len(t.rows)
	if t.region != nil {
		t.region.busy++ // until the attempt has ended
	}
	a.attempts[token] = t
	return &token, nil
}

// appendSlots packs the staging slots of a row.
func (r *attemptRow) appendSlots(b []byte) []byte {
	for i, p := range r.places {
		b = paging.AppendSlot(b, paging.Slot{Extent: p.Extent, Offset: p.Offset, Bytes: r.bytes(i)})
	}
	return b
}

// wants is the set of parts that make a block of this writer complete: those
// that its group attached on this node.
func (a *attachment) wants(l *paging.Layout, parts paging.PartSet) paging.PartSet {
	if a.group == nil {
		return parts
	}
	return a.group.parts(l) | parts
}

// Commit implements rpc.Writer.
func (a *attachment) Commit(ctx context.Context, r *rpc.CommitRequest) ([]byte, error) {
	t, rows, err := a.beginCommit(r)
	if err != nil {
		return nil, err
	}
	outcomes := make([]byte, len(rows))
	if t == nil { // it expired
		for i := range outcomes {
			outcomes[i] = byte(tier.Expired)
		}
		return outcomes, nil
	}
	opt := commitOptions(r.Durable, r.Retention)
	commits := make([]tier.CommitRow, len(rows))
	for i, row := range rows {
		commits[i] = tier.CommitRow{Row: t.rows[row].row, Src: t.rows[row].src, Device: t.rows[row].spans}
	}
	got, err := t.tier.Commit(ctx, commits, opt)
	a.endCommit(r.Attempt, t, rows)
	if err != nil {
		return nil, err
	}
	for i, o := range got {
		outcomes[i] = byte(o)
	}
	return outcomes, nil
}

// beginCommit marks the rows as being committed. A nil attempt with rows is one
// whose deadline has passed: its rows were given up.
func (a *attachment) beginCommit(r *rpc.CommitRequest) (*attempt, []uint32, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != attached {
		return nil, nil, errDetached
	}
	t, ok := a.attempts[r.Attempt]
	if !ok {
		return nil, nil, fmt.Errorf("attempt: it was ended, or is another attachment's: %w", paging.ErrNotFound)
	}
	rows := r.Rows
	if len(rows) == 0 {
		rows = t.openRows()
	}
	if err := t.checkRows(rows); err != nil {
		return nil, nil, err
	}
	if t.expired || !time.Now().Before(t.deadline) {
		a.doneLocked(r.Attempt, t, rows)
		return nil, rows, nil
	}
	for _, row := range rows {
		t.rows[row].state = rowCommitting
	}
	a.staging.busy++
	return t, rows, nil
}

func (t *attempt) openRows() []uint32 {
	rows := make([]uint32, 0, len(t.rows))
	for i := range t.rows {
		if t.rows[i].state == rowOpen {
			rows = append(rows, uint32(i))
		}
	}
	return rows
}

// checkRows refuses rows that are not open, and those named twice.
func (t *attempt) checkRows(rows []uint32) error {
	named := make([]bool, len(t.rows))
	for _, row := range rows {
		switch {
		case int(row) >= len(t.rows):
			return fmt.Errorf("row %d: the attempt has %d: %w", row, len(t.rows), paging.ErrInvalid)
		case t.rows[row].state != rowOpen || named[row]:
			return fmt.Errorf("row %d was committed already: %w", row, paging.ErrInvalid)
		}
		named[row] = true
	}
	return nil
}

// endCommit gives back the staging of rows whose write has ended.
func (a *attachment) endCommit(token rpc.ID, t *attempt, rows []uint32) {
	a.mu.Lock()
	a.staging.busy--
	a.doneLocked(token, t, rows)
	var over []stagingExtent
	var device []tier.Shared
	if a.staging.closing {
		over, device = a.takeMemoryLocked()
	}
	a.mu.Unlock()
	a.node.freeStaging(over)
	a.node.freeDevice(device)
}

// doneLocked ends rows: their staging may be used again. The attempt ends with
// its last row. Requires mu.
func (a *attachment) doneLocked(token rpc.ID, t *attempt, rows []uint32) {
	for _, row := range rows {
		r := &t.rows[row]
		if r.state == rowDone {
			continue
		}
		r.state = rowDone
		t.open--
		if t.working {
			a.device.unstage(r.places)
		} else {
			a.staging.unstage(r.places)
		}
	}
	if t.open == 0 {
		t.tier.Abort() // what was committed stays
		a.leaveRegionLocked(t)
		if a.attempts[token] == t {
			delete(a.attempts, token)
		}
	}
}

// Abort implements rpc.Writer.
func (a *attachment) Abort(token rpc.ID) error {
	a.mu.Lock()
	t, ok := a.attempts[token]
	if ok {
		delete(a.attempts, token)
		a.doneLocked(token, t, t.openRows())
	}
	a.mu.Unlock()
	if ok {
		t.tier.Abort()
	}
	return nil
}

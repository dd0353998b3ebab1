package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// ReserveRequest asks for room to write blocks.
type ReserveRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName // in chain order
	First     int                // position of the first name in its chain
	Parts     paging.PartSet     // parts that this writer brings; 0: those of Config.Ranks
	TTL       time.Duration      // after it the attempt cannot be committed any more; 0: 60 s, at most 10 min
	Timeout   time.Duration      // time that the node may take to make room; 0: 1 s
	// Tier is where the pages are written: TierNone or TierRAM is staging, TierHBM
	// the working pages on the device (Config.WorkingBytes).
	Tier Tier
	// Region holds the pages already, in these of its blocks, one per name; the
	// Attempt has no memory to fill. nil: they are to be written.
	Region *Region
	Blocks []int
}

// CommitOptions says what to commit and how.
type CommitOptions struct {
	Rows      []int      // rows of the attempt; nil: all that are open
	Durable   bool       // answer only when the pages are on disk
	Retention *Retention // of the new blocks; nil: the namespace's default
}

// Attempt is room for some blocks, to be filled and committed: row by row or all
// at once, by any goroutine, each row by one. It ends with the commit of its
// last row or with Abort, which may always be deferred: after that it does
// nothing. The memory that Page returned is not to be touched once its row was
// handed to Commit, or after Abort: it is given to other blocks.
type Attempt struct {
	// Outcomes has one entry per block of the request: OutcomeGranted for those
	// that have a row here, else why there is none.
	Outcomes []Outcome
	// InFlightFor is the time after which blocks with OutcomeInFlight are decided.
	InFlightFor time.Duration
	// Parts that each row has pages of.
	Parts paging.PartSet

	link   *link
	token  []byte
	blocks []int // of each row: index in the request
	cols   int
	slots  []byte     // packed references: rows × cols
	maps   []*mapping // the staging memory, held
	own    *ownPages  // instead of both, when streamed

	mu    sync.Mutex
	open  []bool // rows not committed yet
	left  int
	state attemptState
	busy  int  // commits in flight
	late  bool // a row had expired: only Abort ends the attempt
}

type attemptState uint8

const (
	attemptOpen     attemptState = iota
	attemptEnded                 // committed or aborted
	attemptOrphaned              // its attachment is gone
)

// Reserve asks for staging for a leading part of the blocks and sets aside their
// destination, so that Commit cannot fail for room. Blocks without a row are
// told by Outcomes; if none has a row the attempt is over already. The caller
// ends the attempt.
func (c *Client) Reserve(ctx context.Context, r ReserveRequest) (*Attempt, error) {
	packed, err := pack(r.Names)
	if err != nil {
		return nil, fmt.Errorf("reserve: %w", err)
	}
	l, err := c.up()
	if err != nil {
		return nil, fmt.Errorf("reserve: %w", err)
	}
	l.reserves(1)
	defer l.reserves(-1)
	if l.mux == nil {
		return l.reserveOwn(ctx, &r)
	}
	budget := c.cfg.CallTimeout + r.Timeout
	if r.Timeout == 0 {
		budget += kvstatus.DefaultReserveTime
	}
	req := &kvtierv1.ReserveRequest{
		Attachment: l.id, NamespaceId: r.Namespace[:], BlockNames: packed, FirstBlock: uint32(r.First),
		Parts: uint64(r.Parts), Ttl: span(r.TTL), Timeout: span(r.Timeout),
		Attempt: make([]byte, kvstatus.AttachmentBytes), Tier: kvtierv1.Tier(r.Tier),
	}
	if r.Region != nil {
		if len(r.Blocks) != len(r.Names) || r.Region.link != l {
			return nil, fmt.Errorf("reserve: %d blocks of a region for %d names, or a region of an attachment that ended: %w", len(r.Blocks), len(r.Names), paging.ErrInvalid)
		}
		req.RegionId, req.RegionBlocks = r.Region.ID, packBlocks(r.Blocks)
	}
	_, _ = rand.Read(req.Attempt) // never fails
	var resp *kvtierv1.ReserveResponse
	lost := false
	err = l.unary(ctx, "reserve", budget, func(ctx context.Context) (err error) {
		resp, err = l.pages.Reserve(ctx, req)
		lost = !answered(err)
		return err
	})
	if err != nil && lost {
		l.abandonAttempt(req.GetAttempt())
	}
	if err != nil {
		return nil, err
	}
	a := &Attempt{
		Outcomes: octets[Outcome](resp.GetOutcomes()), InFlightFor: resp.GetInFlightFor().AsDuration(),
		Parts: paging.PartSet(resp.GetParts()), link: l, token: resp.GetAttempt(), slots: resp.GetSlots(),
	}
	if err := a.accept(ctx, c.namespace(r.Namespace), len(r.Names)); err != nil {
		a.tellAbort()
		return nil, fmt.Errorf("reserve: %w", err)
	}
	return a, nil
}

// accept checks what the node granted and puts the attempt on the books.
func (a *Attempt) accept(ctx context.Context, ns *namespace, names int) error {
	if len(a.Outcomes) != names {
		return fmt.Errorf("%d outcomes for %d blocks: %w", len(a.Outcomes), names, paging.ErrInvalid)
	}
	for i, o := range a.Outcomes {
		if o == OutcomeGranted {
			a.blocks = append(a.blocks, i)
		}
	}
	a.cols = a.Parts.Len()
	if want := len(a.blocks) * a.cols * paging.SlotBytes; len(a.slots) != want || len(a.blocks) > 0 && (want == 0 || len(a.token) != kvstatus.AttachmentBytes) {
		return fmt.Errorf("slot table of %d bytes for %d rows of %d parts: %w", len(a.slots), len(a.blocks), a.cols, paging.ErrInvalid)
	}
	if err := ns.checkLengths(a.slots, a.Parts); err != nil {
		return err
	}
	maps, err := a.link.extents.resolve(ctx, a.slots, true, nil)
	if err != nil {
		return err
	}
	return a.begin(maps)
}

// begin puts the attempt on the books of its link, holding the staging.
func (a *Attempt) begin(maps []*mapping) error {
	a.left = len(a.blocks)
	if a.left == 0 {
		a.state = attemptEnded
		return nil
	}
	a.open = make([]bool, a.left)
	for i := range a.open {
		a.open[i] = true
	}
	l := a.link
	if l.extents != nil && !l.extents.hold(maps) {
		return l.cause()
	}
	a.maps = maps
	l.mu.Lock()
	gone := l.gone
	if !gone {
		l.attempts[a] = struct{}{}
	}
	l.mu.Unlock()
	if gone {
		a.unhold()
		return l.cause()
	}
	return nil
}

// Rows is the number of blocks granted.
func (a *Attempt) Rows() int { return len(a.blocks) }

// Block is the index in the request of the block of a row.
func (a *Attempt) Block(row int) int { return a.blocks[row] }

// Page is the memory to fill with the page of one part of a row: writable, of
// exactly the page's length, with unspecified content. nil: the part has no page
// at this block, or the row or the attempt is over.
func (a *Attempt) Page(row, part int) []byte {
	if row < 0 || row >= len(a.blocks) || part < 0 || part >= paging.MaxParts || !a.Parts.Has(part) {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == attemptEnded || !a.open[row] {
		return nil
	}
	at := row*a.cols + (a.Parts & paging.AllParts(part)).Len()
	if a.own != nil {
		return a.own.pages[at]
	}
	slot, err := paging.DecodeSlot(a.slots[at*paging.SlotBytes:])
	if err != nil || slot.Bytes == 0 {
		return nil
	}
	for _, m := range a.maps {
		if m.id == slot.Extent {
			return m.page(slot)
		}
	}
	return nil
}

// Slot is the place of the memory of Page, for those who hand it to a device;
// false: there is none, or it is private.
func (a *Attempt) Slot(row, part int) (paging.Slot, bool) {
	if row < 0 || row >= len(a.blocks) || part < 0 || part >= paging.MaxParts || !a.Parts.Has(part) || a.own != nil {
		return paging.Slot{}, false
	}
	at := row*a.cols + (a.Parts & paging.AllParts(part)).Len()
	s, err := paging.DecodeSlot(a.slots[at*paging.SlotBytes:])
	return s, err == nil && s.Bytes != 0
}

// Commit publishes filled rows: from then on the pages are immutable and found
// by everybody in the namespace. It answers one Outcome per row committed, in
// the order of the request. If it fails the rows stay as they were, and may be
// committed again: a block that had got through then answers OutcomeDuplicate.
// ErrClosed: a row, or the attempt, is over.
func (a *Attempt) Commit(ctx context.Context, o CommitOptions) ([]Outcome, error) {
	retention, err := o.Retention.wire()
	if err != nil {
		return nil, fmt.Errorf("commit: %w", err)
	}
	rows, err := a.take(o.Rows)
	if err != nil {
		return nil, fmt.Errorf("commit: %w", err)
	}
	var outcomes []byte
	if a.own != nil {
		outcomes, err = a.writePages(ctx, rows, o.Durable, retention)
	} else {
		req := &kvtierv1.CommitRequest{
			Attachment: a.link.id, Attempt: a.token, Rows: packRows(rows), Durable: o.Durable, Retention: retention,
		}
		err = a.link.unary(ctx, "commit", a.link.client.cfg.CallTimeout, func(ctx context.Context) error {
			resp, err := a.link.pages.Commit(ctx, req)
			outcomes = resp.GetOutcomes()
			return err
		})
	}
	if err == nil && len(outcomes) != len(rows) {
		err = fmt.Errorf("commit: %d outcomes for %d rows: %w", len(outcomes), len(rows), paging.ErrInvalid)
	}
	a.settle(rows, outcomes, err)
	if err != nil {
		return nil, err
	}
	return octets[Outcome](outcomes), nil
}

// take marks rows as being committed; nil: all that are open.
func (a *Attempt) take(rows []int) ([]int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == attemptOrphaned {
		return nil, fmt.Errorf("its attachment ended: %w", a.link.cause())
	}
	if a.state == attemptEnded {
		return nil, fmt.Errorf("the attempt is over: %w", paging.ErrClosed)
	}
	if rows == nil {
		for row, open := range a.open {
			if open {
				rows = append(rows, row)
			}
		}
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("no row to commit: %w", paging.ErrInvalid)
	}
	for i, row := range rows {
		if row < 0 || row >= len(a.open) || !a.open[row] {
			for _, undo := range rows[:i] {
				a.open[undo] = true
			}
			if row < 0 || row >= len(a.open) {
				return nil, fmt.Errorf("row %d of %d: %w", row, len(a.open), paging.ErrInvalid)
			}
			return nil, fmt.Errorf("row %d is committed already, or twice in the list: %w", row, paging.ErrClosed)
		}
		a.open[row] = false
	}
	a.busy++
	return rows, nil
}

// settle ends the rows that were committed, and the attempt with its last one.
// A row whose time had passed ends with the attempt only: its staging is not
// given back before the node is told.
func (a *Attempt) settle(rows []int, outcomes []byte, err error) {
	c := &a.link.client.counts
	a.mu.Lock()
	a.busy--
	for i, row := range rows {
		switch {
		case err != nil:
			a.open[row] = a.state == attemptOpen
			continue
		case Outcome(outcomes[i]) == OutcomeExpired:
			a.late = true
		default:
			c.committed.Add(1)
		}
		a.left--
	}
	over := a.left == 0 && a.busy == 0 && a.state == attemptOpen && !a.late
	if over {
		a.state = attemptEnded
	}
	a.mu.Unlock()
	if over {
		a.leave()
		return
	}
	if err == nil {
		a.link.stagingFreed()
	}
}

// Abort ends the attempt without publishing what is not committed. Idempotent;
// where the node cannot be asked it ends the attempt by its deadline or with
// the attachment.
func (a *Attempt) Abort(ctx context.Context) error {
	a.mu.Lock()
	was := a.state
	a.state = attemptEnded
	a.mu.Unlock()
	if was == attemptEnded {
		return nil
	}
	a.leave()
	if was == attemptOrphaned || a.own != nil {
		return nil
	}
	return a.abort(ctx)
}

func (a *Attempt) abort(ctx context.Context) error {
	req := &kvtierv1.AbortRequest{Attachment: a.link.id, Attempt: a.token}
	err := a.link.unary(ctx, "abort", a.link.client.cfg.CallTimeout, func(ctx context.Context) error {
		_, err := a.link.pages.Abort(ctx, req)
		return err
	})
	a.link.stagingFreed()
	if a.link.ctx.Err() != nil {
		return nil //nolint:nilerr // the attempt ended with its attachment
	}
	return err
}

// tellAbort gives back a grant that could not be accepted.
func (a *Attempt) tellAbort() {
	if len(a.token) == kvstatus.AttachmentBytes {
		_ = a.abort(a.link.ctx) // the attempt's deadline ends it otherwise
	}
}

// abandonAttempt ends an attempt that the node may have granted although the
// call that asked for it failed. It follows the call on its connection, so that
// the node has seen that the call is over before it sees this.
func (l *link) abandonAttempt(token []byte) {
	full := false
	l.mux.post(func(o *outbox) {
		if full = len(o.attempts) >= maxAbandoned; !full {
			o.attempts = append(o.attempts, token)
		}
	})
	if full {
		l.fail(fmt.Errorf("%d given up Reserve calls that the node cannot be told of: %w", maxAbandoned, paging.ErrUnavailable))
	}
	l.stagingFreed()
}

// orphan is called when the attachment ends: what is being filled stays mapped
// until Abort, but can only be thrown away.
func (a *Attempt) orphan() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == attemptOpen && a.own == nil {
		a.state = attemptOrphaned
	}
}

// leave takes the attempt off the books and gives its memory back.
func (a *Attempt) leave() {
	a.link.mu.Lock()
	delete(a.link.attempts, a)
	a.link.mu.Unlock()
	a.unhold()
	a.link.stagingFreed()
}

func (a *Attempt) unhold() {
	a.mu.Lock()
	maps, own := a.maps, a.own
	a.maps = nil
	a.mu.Unlock()
	if own != nil {
		a.link.client.staged.Add(-own.bytes)
		return
	}
	if len(maps) > 0 {
		a.link.extents.drop(maps)
	}
}

func (l *link) reserves(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reserving += n
}

// stagingFreed wakes writers that wait for staging of this attachment.
func (l *link) stagingFreed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.freed)
	l.freed = make(chan struct{})
}

func packRows(rows []int) []byte {
	b := make([]byte, 0, 4*len(rows))
	for _, row := range rows {
		b = binary.LittleEndian.AppendUint32(b, uint32(row))
	}
	return b
}

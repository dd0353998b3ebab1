package client

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// maxUntold bounds the events that may arrive for tickets before the calls that
// asked for them have returned.
const maxUntold = 1024

// PrefetchRequest names pages to bring up.
type PrefetchRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName
	Parts     paging.PartSet // 0: all parts of the layout
	Tier      Tier           // where to; TierNone: RAM
	Priority  int            // 0 to 100, higher goes first
	Timeout   time.Duration  // after it the pages are not wanted any more; 0: 30 s, at most 10 min

	// Session names blocks From to To (0: its end) of a session of the tenant, in place
	// of Names and Namespace. Ticket.Ready then counts from From.
	Session  string
	From, To uint64
}

// Ticket is a prefetch under way. It is safe for concurrent use.
type Ticket struct {
	ID       uint64 // 0: there is nothing to do
	Admitted int    // blocks that will be brought up
	Refused  int    // blocks that the tier has no room for

	link  *link
	names int
	ready chan int      // capacity: one per block
	done  chan struct{} // closed at the end

	mu     sync.Mutex
	seen   []uint64 // bit per block: it was reported
	ended  bool
	reason Reason
}

// Prefetch starts bringing pages up and returns at once. It needs an attachment.
func (c *Client) Prefetch(ctx context.Context, r PrefetchRequest) (*Ticket, error) {
	packed, most, err := r.chain()
	if err != nil {
		return nil, fmt.Errorf("prefetch: %w", err)
	}
	if r.Priority < 0 || r.Priority > 100 {
		return nil, fmt.Errorf("prefetch: priority %d, want 0 to 100: %w", r.Priority, paging.ErrInvalid)
	}
	l, err := c.attached("prefetch")
	if err != nil {
		return nil, err
	}
	req := &kvtierv1.PrefetchRequest{
		Attachment: l.id, BlockNames: packed, Parts: uint64(r.Parts),
		Tier: kvtierv1.Tier(r.Tier), Priority: uint32(r.Priority), Timeout: span(r.Timeout),
		SessionRange: (&SessionRange{r.Session, r.From, r.To}).wire(),
	}
	if r.Session == "" {
		req.NamespaceId = r.Namespace[:]
	}
	l.mu.Lock()
	l.asking++
	l.mu.Unlock()
	var resp *kvtierv1.PrefetchResponse
	err = l.unary(ctx, "prefetch", c.cfg.CallTimeout, func(ctx context.Context) (err error) {
		resp, err = l.pages.Prefetch(ctx, req)
		return err
	})
	t := &Ticket{
		ID: resp.GetTicket(), Admitted: int(resp.GetAdmittedBlocks()), Refused: int(resp.GetRefusedBlocks()),
		link: l, names: most, done: make(chan struct{}),
		ready: make(chan int, most), seen: make([]uint64, (most+63)/64),
	}
	early := l.enroll(t)
	if err != nil {
		return nil, err
	}
	if t.ID == 0 {
		t.finish(ReasonNone)
	}
	for _, p := range early {
		t.note(p)
	}
	return t, nil
}

// chain is the names of the request, packed, and how many blocks it has at most.
func (r *PrefetchRequest) chain() (packed []byte, most int, err error) {
	if r.Session == "" {
		packed, err = pack(r.Names)
		return packed, len(r.Names), err
	}
	named := SessionRange{r.Session, r.From, r.To}
	if err := named.check(); err != nil {
		return nil, 0, err
	}
	if len(r.Names) > 0 {
		return nil, 0, fmt.Errorf("%d names and session %q: give one of them: %w", len(r.Names), r.Session, paging.ErrInvalid)
	}
	return nil, named.most(), nil
}

// enroll puts a ticket on the books and returns the events that came before.
func (l *link) enroll(t *Ticket) []*kvtierv1.PrefetchProgress {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asking--
	early := l.untold[t.ID]
	delete(l.untold, t.ID)
	if l.asking == 0 {
		clear(l.untold)
	}
	if t.ID == 0 {
		return nil
	}
	if l.gone {
		t.finish(ReasonAttachmentEnded)
		return nil
	}
	l.tickets[t.ID] = t
	return early
}

// progress hands an event to its ticket. Events of unknown tickets are kept
// while a call may still return them.
func (l *link) progress(p *kvtierv1.PrefetchProgress) {
	l.mu.Lock()
	t := l.tickets[p.GetTicket()]
	if t == nil && l.asking > 0 && len(l.untold) < maxUntold && len(l.untold[p.GetTicket()]) < maxUntold {
		l.untold[p.GetTicket()] = append(l.untold[p.GetTicket()], p)
	}
	l.mu.Unlock()
	if t != nil {
		t.note(p)
	}
}

func (t *Ticket) note(p *kvtierv1.PrefetchProgress) {
	t.mu.Lock()
	for b := p.GetReady(); len(b) >= 4 && !t.ended; b = b[4:] {
		block := int(binary.LittleEndian.Uint32(b))
		if block >= t.names || t.seen[block/64]>>(block%64)&1 == 1 {
			continue
		}
		t.seen[block/64] |= 1 << (block % 64)
		t.ready <- block // never blocks: each block once
	}
	t.mu.Unlock()
	if p.GetDone() {
		t.link.mu.Lock()
		delete(t.link.tickets, t.ID)
		t.link.mu.Unlock()
		t.finish(Reason(p.GetReason()))
	}
}

// finish ends the ticket; the first reason stays.
func (t *Ticket) finish(why Reason) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return
	}
	t.ended, t.reason = true, why
	close(t.ready)
	close(t.done)
}

// Ready gives the index of each block that became ready, and is closed when the
// prefetch has ended. Nobody has to read it.
func (t *Ticket) Ready() <-chan int { return t.ready }

// Wait waits for the end of the prefetch and returns why it ended early: ReasonNone
// if it did not. The error is that of ctx.
func (t *Ticket) Wait(ctx context.Context) (Reason, error) {
	select {
	case <-t.done:
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.reason, nil
	case <-ctx.Done():
		return ReasonNone, fmt.Errorf("wait for prefetch: %w", contextError(ctx))
	}
}

// Cancel stops the prefetch. Idempotent; what is ready stays.
func (t *Ticket) Cancel(ctx context.Context) error {
	select {
	case <-t.done:
		return nil
	default:
	}
	req := &kvtierv1.CancelRequest{Attachment: t.link.id, Ticket: t.ID}
	err := t.link.unary(ctx, "cancel", t.link.client.cfg.CallTimeout, func(ctx context.Context) error {
		_, err := t.link.pages.Cancel(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	t.link.mu.Lock()
	delete(t.link.tickets, t.ID)
	t.link.mu.Unlock()
	t.finish(ReasonCancelled)
	return nil
}

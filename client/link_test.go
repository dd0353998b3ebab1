package client

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// bareLink is a link whose stream nobody drives: what it would send stays in the
// outbox.
func bareLink(t *testing.T) *link {
	t.Helper()
	cfg := Config{Socket: "unused"}.withDefaults()
	c := &Client{cfg: cfg, log: cfg.Logger, ctx: t.Context()}
	l := newLink(c, nil)
	l.extents = newExtentSet(nil, func() {})
	l.mux = newMux(nil, &l.heard, l.event)
	return l
}

// A revocation may overtake the answer that its lease comes with: the caller
// then gets a lease without views, and the node its answer at once.
func TestRevocationBeforeTheLeaseIsKnown(t *testing.T) {
	l := bareLink(t)
	l.revoke([]uint64{7})
	if !slices.Equal(l.mux.outbox.revoked, []uint64{7}) {
		t.Errorf("answered %v, want 7", l.mux.outbox.revoked)
	}
	lease := &Lease{ID: 7, Rows: 1, Parts: 1, cols: 1, slots: make([]byte, paging.SlotBytes), TTL: time.Minute, link: l}
	if err := l.register(lease, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, ok := lease.Page(0, 0); ok || !errors.Is(lease.Err(), paging.ErrExpired) {
		t.Errorf("a revoked lease gives a view, or says %v", lease.Err())
	}
	if err := l.register(&Lease{ID: 7, TTL: time.Minute}, time.Now()); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a lease granted twice: %v", err)
	}
}

func TestRenewalIsBounded(t *testing.T) {
	l := bareLink(t)
	l.client.cfg.MaxHold = 250 * time.Millisecond
	begin := time.Unix(1, 0)
	lease := &Lease{ID: 7, TTL: 100 * time.Millisecond, link: l}
	if err := l.register(lease, begin); err != nil {
		t.Fatal(err)
	}
	var at []time.Duration
	for d := time.Duration(0); d < 2*time.Second; d += 10 * time.Millisecond {
		l.renewLeases(begin.Add(d))
		for range l.mux.outbox.renewals {
			at = append(at, d/time.Millisecond)
		}
		l.mux.outbox.renewals = nil
	}
	if !slices.Equal(at, []time.Duration{50, 100, 150, 200, 250}) {
		t.Errorf("renewed after %d ms", at)
	}
	if wait := l.sleep(begin, time.Hour); wait != time.Hour {
		t.Errorf("nothing is due, yet the watch wakes after %v", wait)
	}
}

func TestProgressBeforeTheTicketIsKnown(t *testing.T) {
	l := bareLink(t)
	event := func(ticket uint64) *kvtierv1.PrefetchProgress {
		return &kvtierv1.PrefetchProgress{Ticket: ticket, Ready: []byte{1, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 5}}
	}
	l.progress(event(3)) // nobody asks: not kept
	if len(l.untold) != 0 {
		t.Error("an event of nobody's ticket was kept")
	}
	l.asking = 1
	for range 2 * maxUntold {
		l.progress(event(3))
	}
	if got := len(l.untold[3]); got != maxUntold {
		t.Errorf("%d events kept, at most %d", got, maxUntold)
	}
	ticket := &Ticket{ID: 3, link: l, names: 2, ready: make(chan int, 2), done: make(chan struct{}), seen: make([]uint64, 1)}
	for _, p := range l.enroll(ticket) {
		ticket.note(p)
	}
	if got := <-ticket.Ready(); got != 1 {
		t.Errorf("block %d reported", got)
	}
	if len(ticket.ready) != 0 {
		t.Error("a block was reported twice, or one that was not asked for")
	}
	if len(l.untold) != 0 {
		t.Error("events are kept after the last call has returned")
	}
	l.progress(&kvtierv1.PrefetchProgress{Ticket: 3, Done: true, Reason: kvtierv1.Reason_REASON_TIMEOUT})
	if why, err := ticket.Wait(t.Context()); why != ReasonTimeout || err != nil {
		t.Errorf("ended with %v, %v", why, err)
	}
}

// What is told one-way is sent in bounded messages and in full.
func TestOutboxIsSentInBatches(t *testing.T) {
	l := bareLink(t)
	sent := &recordingStream{}
	l.mux.stream = sent
	l.mux.post(func(o *outbox) {
		for id := range uint64(flushMost + 10) {
			o.releases = append(o.releases, id+1)
			o.revoked = append(o.revoked, id+1)
		}
		o.tokens = [][]byte{{1}}
		o.renewals = []renewal{{time.Second, []uint64{4}}}
		o.pings = 1
	})
	if err := l.mux.flush(); err != nil {
		t.Fatal(err)
	}
	released, revoked, pings := 0, 0, 0
	for _, m := range sent.sent {
		if n := len(m.GetRelease().GetLeaseIds()); n > flushMost {
			t.Errorf("one message of %d leases", n)
		}
		released += len(m.GetRelease().GetLeaseIds())
		revoked += len(m.GetRevoked().GetLeaseIds())
		if m.GetRenew() != nil && m.GetRequestId() != 0 {
			pings++
		}
	}
	if released != flushMost+10 || revoked != flushMost+10 || pings != 1 {
		t.Errorf("%d released, %d revoked, %d pings", released, revoked, pings)
	}
	if !l.mux.outbox.empty() {
		t.Error("something was left")
	}
}

type recordingStream struct {
	attachStream
	sent []*kvtierv1.AttachRequest
}

func (s *recordingStream) Send(m *kvtierv1.AttachRequest) error {
	s.sent = append(s.sent, m)
	return nil
}

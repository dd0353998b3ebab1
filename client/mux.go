package client

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// queueLen bounds the requests that wait for the stream's writer; callers
// beyond it wait within their deadlines.
const queueLen = 128

// flushMost bounds the leases of one one-way message.
const flushMost = 4096

// attachStream is the part of the generated stream that a mux uses.
type attachStream interface {
	Send(*kvtierv1.AttachRequest) error
	Recv() (*kvtierv1.AttachResponse, error)
	CloseSend() error
}

// mux carries many calls at once over the one attachment stream. Callers queue
// requests; one goroutine (write) sends them, another (read) hands each answer
// to the call that waits for it. What needs no answer is collected in the
// outbox and sent in batches, so that it neither blocks nor can be lost.
type mux struct {
	stream attachStream
	queue  chan *kvtierv1.AttachRequest
	wake   chan struct{} // the outbox is not empty; capacity 1
	heard  *atomic.Uint64
	event  func(*kvtierv1.AttachResponse) // answers nobody waits for, and events

	nextID atomic.Uint64

	mu      sync.Mutex
	pending map[uint64]*call
	closed  error // why nothing is sent any more
	outbox  outbox
}

// maxAbandoned bounds the attempts that the node is yet to be told of: as many
// as it lets one attachment have. Beyond it the link ends, and they with it.
const maxAbandoned = 1024

// outbox is what the client tells without waiting for an answer. It is bounded
// by the leases that are held, and by maxAbandoned.
type outbox struct {
	releases []uint64
	tokens   [][]byte
	attempts [][]byte
	revoked  []uint64
	renewals []renewal
	pings    int // 0 or 1
}

// renewal extends leases of one time to live.
type renewal struct {
	ttl time.Duration
	ids []uint64
}

func (o *outbox) empty() bool {
	return len(o.releases) == 0 && len(o.tokens) == 0 && len(o.attempts) == 0 && len(o.revoked) == 0 && len(o.renewals) == 0 && o.pings == 0
}

// call waits for the answer to one request.
type call struct {
	done     chan answer // capacity 1: whoever takes the call out of pending sends once
	deadline time.Time
}

type answer struct {
	msg *kvtierv1.AttachResponse
	err error
}

func newMux(stream attachStream, heard *atomic.Uint64, event func(*kvtierv1.AttachResponse)) *mux {
	return &mux{
		stream: stream, heard: heard, event: event,
		queue:   make(chan *kvtierv1.AttachRequest, queueLen),
		wake:    make(chan struct{}, 1),
		pending: map[uint64]*call{},
	}
}

// roundTrip sends req, which it numbers and keeps, and waits for its answer
// until ctx ends or deadline passes (seen by sweep, within one tick). An error
// that the node reported comes back as an error.
func (m *mux) roundTrip(ctx context.Context, req *kvtierv1.AttachRequest, deadline time.Time) (*kvtierv1.AttachResponse, error) {
	c := &call{done: make(chan answer, 1), deadline: deadline}
	req.RequestId = m.nextID.Add(1)
	m.mu.Lock()
	if err := m.closed; err != nil {
		m.mu.Unlock()
		return nil, err
	}
	m.pending[req.RequestId] = c
	m.mu.Unlock()

	select {
	case m.queue <- req:
	case a := <-c.done:
		return a.msg, a.err
	case <-ctx.Done():
		return m.abandon(ctx, req.RequestId, c)
	}
	select {
	case a := <-c.done:
		return a.msg, a.err
	case <-ctx.Done():
		return m.abandon(ctx, req.RequestId, c)
	}
}

// abandon gives up a call whose context ended. If its answer was on its way
// already the call succeeds; if it comes later, event sees it.
func (m *mux) abandon(ctx context.Context, id uint64, c *call) (*kvtierv1.AttachResponse, error) {
	m.mu.Lock()
	_, waiting := m.pending[id]
	delete(m.pending, id)
	m.mu.Unlock()
	if !waiting {
		a := <-c.done
		return a.msg, a.err
	}
	return nil, contextError(ctx)
}

func (m *mux) take(id uint64) *call {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.pending[id]
	delete(m.pending, id)
	return c
}

// sweep fails the calls whose deadline passed.
func (m *mux) sweep(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, c := range m.pending {
		if now.After(c.deadline) {
			delete(m.pending, id)
			c.done <- answer{err: fmt.Errorf("no answer in time: %w (%w)", paging.ErrExpired, context.DeadlineExceeded)}
		}
	}
}

// failAll fails what waits now. With closing, nothing is accepted from then on.
func (m *mux) failAll(err error, closing bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if closing && m.closed == nil {
		m.closed = err
	}
	for id, c := range m.pending {
		delete(m.pending, id)
		c.done <- answer{err: err}
	}
}

func (m *mux) waiting() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.pending)
}

// post adds to the outbox and wakes the writer; it never blocks. After the
// stream ended it does nothing: the node knows.
func (m *mux) post(add func(*outbox)) {
	m.mu.Lock()
	if m.closed == nil {
		add(&m.outbox)
	}
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// write sends until ctx ends or the stream breaks (which read sees too). Owner:
// the link; one per attachment.
func (m *mux) write(ctx context.Context) {
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case req := <-m.queue:
			err = m.stream.Send(req)
		case <-m.wake:
			err = m.flush()
		}
		if err != nil {
			return
		}
	}
}

// flush sends what the outbox holds.
func (m *mux) flush() error {
	for {
		m.mu.Lock()
		if m.outbox.empty() {
			m.mu.Unlock()
			return nil
		}
		batch := m.outbox
		rest := outbox{}
		if len(batch.releases) > flushMost {
			batch.releases, rest.releases = batch.releases[:flushMost], batch.releases[flushMost:]
		}
		if len(batch.revoked) > flushMost {
			batch.revoked, rest.revoked = batch.revoked[:flushMost], batch.revoked[flushMost:]
		}
		m.outbox = rest
		m.mu.Unlock()
		if err := m.sendBatch(&batch); err != nil {
			return err
		}
	}
}

func (m *mux) sendBatch(b *outbox) error {
	if len(b.releases) > 0 || len(b.tokens) > 0 {
		rel := &kvtierv1.ReleaseRequest{LeaseIds: b.releases, AdoptTokens: b.tokens}
		if err := m.stream.Send(&kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Release{Release: rel}}); err != nil {
			return err
		}
	}
	if len(b.revoked) > 0 {
		rev := &kvtierv1.Revoked{LeaseIds: b.revoked}
		if err := m.stream.Send(&kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Revoked{Revoked: rev}}); err != nil {
			return err
		}
	}
	for _, token := range b.attempts {
		abort := &kvtierv1.AbortRequest{Attempt: token}
		if err := m.stream.Send(&kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Abort{Abort: abort}}); err != nil {
			return err
		}
	}
	for _, r := range b.renewals {
		if err := m.sendRenew(0, &kvtierv1.RenewRequest{LeaseIds: r.ids, LeaseTtl: span(r.ttl)}); err != nil {
			return err
		}
	}
	if b.pings > 0 {
		return m.sendRenew(m.nextID.Add(1), &kvtierv1.RenewRequest{})
	}
	return nil
}

func (m *mux) sendRenew(id uint64, r *kvtierv1.RenewRequest) error {
	return m.stream.Send(&kvtierv1.AttachRequest{RequestId: id, Message: &kvtierv1.AttachRequest_Renew{Renew: r}})
}

// read hands out answers until the stream ends, and returns why it did. Owner:
// the link; one per attachment.
func (m *mux) read() error {
	for {
		msg, err := m.stream.Recv()
		if err != nil {
			return err
		}
		m.heard.Add(1)
		if msg.GetRequestId() != 0 {
			if c := m.take(msg.GetRequestId()); c != nil {
				c.done <- answer{msg: msg, err: kvstatus.FromDetail(msg.GetError())}
				continue
			}
		}
		m.event(msg)
	}
}

// contextError is the typed error of a context that ended.
func contextError(ctx context.Context) error {
	if err := ctx.Err(); err == context.DeadlineExceeded {
		return fmt.Errorf("%w (%w)", paging.ErrExpired, err)
	} else if err != nil {
		return err
	}
	return paging.ErrExpired
}

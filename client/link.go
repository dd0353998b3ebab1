package client

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// link is one connection to one run of a node: with Config.Socket an attachment
// (mux, tether, extents), with Config.Address a plain connection. It is made
// by connect, used until it fails, and never repaired: the client makes another.
type link struct {
	// constant once connected
	client   *Client
	conn     *grpc.ClientConn
	pages    kvtierv1.PagesServiceClient
	mux      *mux       // nil: streamed
	extents  *extentSet // nil: streamed
	tether   *shm.Tether
	handles  atomic.Uint32 // of regions
	id       []byte        // of the attachment
	tenant   string
	ttl      time.Duration
	since    time.Time
	ctx      context.Context // ends when the link fails or is closed; the cause says why
	cancel   context.CancelCauseFunc
	routines sync.WaitGroup

	heard   atomic.Uint64 // messages and answers received
	asked   atomic.Int64  // unary calls in flight
	begun   atomic.Uint64 // calls begun, of either kind
	silent  atomic.Bool   // the breaker is open
	pinging atomic.Bool   // a unary ping is in flight
	resting atomic.Bool   // watch has no ticks until it is nudged
	nudge   chan struct{} // capacity 1
	turn    chan struct{} // capacity 1: full while a writer waits for staging

	mu        sync.Mutex
	leases    map[uint64]*Lease
	renewDue  time.Time  // of the lease that is due first; zero: none
	wakeAt    time.Time  // when watch looks at the clock next
	early     [16]uint64 // leases that were revoked before they were known
	earlyAt   int
	attempts  map[*Attempt]struct{}
	reserving int           // Reserve calls in flight
	freed     chan struct{} // closed and replaced when staging is given back
	tickets   map[uint64]*Ticket
	asking    int                                     // Prefetch calls in flight
	untold    map[uint64][]*kvtierv1.PrefetchProgress // events of tickets that no call has returned yet
	tripped   context.Context                         // ends when the breaker opens; replaced when it closes
	trip      context.CancelCauseFunc
	gone      bool
}

func newLink(c *Client, conn *grpc.ClientConn) *link {
	l := &link{
		client: c, conn: conn, pages: kvtierv1.NewPagesServiceClient(conn), since: time.Now(),
		nudge:    make(chan struct{}, 1),
		turn:     make(chan struct{}, 1),
		leases:   map[uint64]*Lease{},
		attempts: map[*Attempt]struct{}{},
		freed:    make(chan struct{}),
		tickets:  map[uint64]*Ticket{},
		untold:   map[uint64][]*kvtierv1.PrefetchProgress{},
	}
	l.ctx, l.cancel = context.WithCancelCause(c.ctx)
	l.tripped, l.trip = context.WithCancelCause(l.ctx)
	return l
}

// fail ends the link; the first reason stays.
func (l *link) fail(err error) { l.cancel(err) }

// start runs the goroutines of the link; close joins them.
func (l *link) start() {
	l.routines.Go(l.watch) // owner: link; exits with ctx; bound: 1 a link
	if l.mux == nil {
		l.routines.Go(l.watchConn)     // owner: link; exits with the connection or ctx; bound: 1 a link
		l.routines.Go(l.watchSessions) // owner: link; exits with ctx; bound: 1 a link
		return
	}
	l.routines.Go(func() { l.mux.write(l.ctx) }) // owner: link; exits with ctx or the stream; bound: 1 a link
	l.routines.Go(func() {                       // owner: link; exits with the stream; bound: 1 a link
		err := l.mux.read()
		l.fail(fmt.Errorf("attachment stream ended: %w: %v", paging.ErrUnavailable, err)) //nolint:errorlint // what ended this one link says nothing about calls
	})
	l.routines.Go(l.receive) // owner: link; exits with the tether or ctx; bound: 1 a link
}

// receive maps the extents that the node hands over, until the tether or the
// link ends.
func (l *link) receive() {
	for {
		extents, err := l.tether.RecvExtents(l.ctx)
		if err != nil {
			l.fail(fmt.Errorf("tether ended: %w: %v", paging.ErrUnavailable, err)) //nolint:errorlint // as above: a closed tether is no closed client
			return
		}
		for i := range extents {
			if err = l.extents.add(&extents[i]); err != nil {
				l.fail(fmt.Errorf("extent from the node: %w: %v", paging.ErrUnavailable, err)) //nolint:errorlint // as above
				break
			}
		}
		for i := range extents { // those not taken over
			extents[i].Discard()
		}
	}
}

// event takes what the stream says unasked, and answers whose caller gave up.
// It is called by the reader and does not block.
func (l *link) event(msg *kvtierv1.AttachResponse) {
	switch m := msg.GetMessage().(type) {
	case *kvtierv1.AttachResponse_Revocation:
		l.revoke(m.Revocation.GetLeaseIds())
	case *kvtierv1.AttachResponse_Prefetch:
		l.progress(m.Prefetch)
	case *kvtierv1.AttachResponse_Session:
		l.client.book.tell(m.Session)
	case *kvtierv1.AttachResponse_Stopping:
		l.client.log.Info("node is stopping", "within", m.Stopping.GetWithin().AsDuration())
	case *kvtierv1.AttachResponse_Fetch:
		l.abandonLease(m.Fetch.GetLeaseId(), m.Fetch.GetAdoptToken())
	case *kvtierv1.AttachResponse_Adopt:
		l.abandonLease(m.Adopt.GetLeaseId(), nil)
	}
}

// abandonLease gives back what was granted to a caller that did not wait.
func (l *link) abandonLease(id uint64, token []byte) {
	if id == 0 && len(token) == 0 {
		return
	}
	l.mux.post(func(o *outbox) {
		if id != 0 {
			o.releases = append(o.releases, id)
		}
		if len(token) > 0 {
			o.tokens = append(o.tokens, token)
		}
	})
}

// revoke ends leases that the node wants back. One that is not known here was
// released meanwhile, or its answer is on the way to its caller: nothing reads
// it, and register will refuse it views.
func (l *link) revoke(ids []uint64) {
	var known []*Lease
	var unknown []uint64
	l.mu.Lock()
	for _, id := range ids {
		if lease := l.leases[id]; lease != nil {
			known = append(known, lease)
			continue
		}
		unknown = append(unknown, id)
		l.early[l.earlyAt%len(l.early)] = id
		l.earlyAt++
	}
	l.mu.Unlock()
	l.client.counts.revoked.Add(int64(len(known)))
	for _, lease := range known {
		lease.end(stateRevoked)
	}
	if len(unknown) > 0 {
		l.mux.post(func(o *outbox) { o.revoked = append(o.revoked, unknown...) })
	}
}

// register puts a lease on the books: it is renewed and can be revoked from now on.
func (l *link) register(lease *Lease, now time.Time) error {
	lease.renewAt = now.Add(max(lease.TTL/2, minRenew))
	lease.heldUntil = now.Add(l.client.cfg.MaxHold)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return l.cause()
	}
	if _, dup := l.leases[lease.ID]; dup {
		return fmt.Errorf("node granted lease %d twice: %w", lease.ID, paging.ErrInvalid)
	}
	if slices.Contains(l.early[:], lease.ID) {
		lease.state.Or(stateRevoked)
	}
	l.leases[lease.ID] = lease
	if l.renewDue.IsZero() || lease.renewAt.Before(l.renewDue) {
		l.renewDue = lease.renewAt
		if lease.renewAt.Before(l.wakeAt) {
			l.wake()
		}
	}
	return nil
}

func (l *link) wake() {
	select {
	case l.nudge <- struct{}{}:
	default:
	}
}

// cause is why the link ended.
func (l *link) cause() error {
	if err := context.Cause(l.ctx); err != nil {
		return err
	}
	return paging.ErrUnavailable
}

// close ends the link, joins its goroutines and ends what hangs on it. Leases
// with open views keep their mappings, and with them the tether, until the last
// is closed.
func (l *link) close(why error) {
	l.fail(why)
	l.wake()
	if l.mux != nil {
		l.mux.failAll(l.cause(), true)
	}
	_ = l.conn.Close() // fails only when closed twice
	l.routines.Wait()

	l.mu.Lock()
	l.gone = true
	var leases []*Lease
	for _, lease := range l.leases {
		leases = append(leases, lease)
	}
	var attempts []*Attempt
	for a := range l.attempts {
		attempts = append(attempts, a)
	}
	tickets := l.tickets
	l.tickets = map[uint64]*Ticket{}
	l.mu.Unlock()
	for _, lease := range leases {
		lease.end(stateDead)
	}
	for _, a := range attempts {
		a.orphan()
	}
	for _, t := range tickets {
		t.finish(ReasonAttachmentEnded)
	}
	if l.extents != nil {
		l.extents.retire()
	}
}

// filling is the number of attempts that hold staging.
func (l *link) filling() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.attempts)
}

// held lists the leases that still have views.
func (l *link) held() (leases []uint64, views int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, lease := range l.leases {
		if n := lease.state.Load() & viewsMask; n > 0 {
			leases = append(leases, id)
			views += int64(n)
		}
	}
	slices.Sort(leases)
	return leases, views
}

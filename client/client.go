package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
)

// Client uses one node. All its methods are safe for concurrent use. After
// Close they answer ErrClosed.
type Client struct {
	SessionCalls // of the client's tenant

	cfg Config
	log *slog.Logger

	ctx     context.Context // ends with Close
	cancel  context.CancelCauseFunc
	keeper  sync.WaitGroup
	link    atomic.Pointer[link] // nil: none is up
	private atomic.Int64         // bytes of streamed leases
	spare   spare                // memory of those that ended
	staged  atomic.Int64         // bytes of streamed attempts
	local   atomic.Uint64        // numbers of streamed leases
	counts  counts

	book sessionBook // of the sessions that are open

	namespaces atomic.Pointer[map[paging.NamespaceID]*namespace] // replaced under mu

	mu       sync.Mutex
	why      error         // why there is no link
	changed  chan struct{} // closed and replaced when link or why changes
	past     []*link       // ended links with open views
	previous []byte        // id of the last attachment that ended
	old      *link         // that attachment; nil once no view of it is left
	closed   bool
	closing  error
}

// backoff between tries to attach: it starts at least, doubles, and ends at
// most, with half of it random, so that many engines do not come back as one.
// most keeps the way back under 5 s after the node is up.
const (
	backoffLeast = 50 * time.Millisecond
	backoffMost  = 2 * time.Second
)

// Open makes a client and tries to attach once, within Config.DialTimeout and
// ctx. A node that is absent or does not answer is no error: calls answer
// ErrUnavailable until the client has attached, which it keeps trying (Ready
// waits for it). A node that refuses the client is (ErrDenied, ErrIncompatible,
// ErrInvalid), and so is a wrong config (ErrInvalid).
func Open(ctx context.Context, cfg Config) (*Client, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Client{
		cfg: cfg, log: cfg.Logger, spare: spare{limit: cfg.PrivateBytes},
		changed: make(chan struct{}),
	}
	c.SessionCalls = c.sessionCalls()
	c.namespaces.Store(&map[paging.NamespaceID]*namespace{})
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	l, err := c.connect(ctx)
	if refused(err) {
		c.cancel(err)
		return nil, err
	}
	c.publish(l, err)
	c.keeper.Go(func() { c.keep(l) }) // owner: client; exits with Close; bound: 1
	return c, nil
}

// refused reports whether trying again is pointless unless someone changes
// something.
func refused(err error) bool {
	return errors.Is(err, paging.ErrDenied) || errors.Is(err, paging.ErrIncompatible) || errors.Is(err, paging.ErrInvalid)
}

// keep holds a link up until Close.
func (c *Client) keep(l *link) {
	wait, said := backoffLeast, ""
	for {
		if l != nil {
			began := time.Now()
			c.attend(l)
			if time.Since(began) > backoffMost {
				wait = backoffLeast
			}
		}
		if !c.pause(wait) {
			return
		}
		wait = min(2*wait, backoffMost)
		var err error
		switch l, err = c.connect(c.ctx); {
		case err == nil:
			said = ""
			c.counts.attached.Add(1)
			c.log.Info("attached")
		case err.Error() != said && c.ctx.Err() == nil:
			said = err.Error()
			c.log.Warn("cannot attach, trying again", "error", err)
		}
		c.publish(l, err)
		if l != nil {
			c.book.attached()
		}
	}
}

// attend waits until l ends and takes it down.
func (c *Client) attend(l *link) {
	<-l.ctx.Done()
	err := l.cause()
	if c.ctx.Err() == nil {
		c.log.Warn("attachment lost, attaching again", "error", err)
	}
	c.publish(nil, err)
	l.close(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.extents != nil {
		c.previous, c.old = l.id, l
		c.past = append(c.past, l)
		c.pruneLocked()
	}
}

// pruneLocked forgets the ended links of which no view is left.
func (c *Client) pruneLocked() {
	kept := c.past[:0]
	for _, l := range c.past {
		if !l.extents.isIdle() || l.filling() > 0 {
			kept = append(kept, l)
		}
	}
	clear(c.past[len(kept):])
	c.past = kept
	if c.old != nil && c.old.extents.isIdle() {
		c.old = nil
	}
}

// pause waits for about d; false: the client is closed.
func (c *Client) pause(d time.Duration) bool {
	timer := time.NewTimer(d/2 + rand.N(d/2)) //nolint:gosec // jitter
	defer timer.Stop()
	select {
	case <-timer.C:
		return c.ctx.Err() == nil
	case <-c.ctx.Done():
		return false
	}
}

// publish says which link calls use, or why there is none.
func (c *Client) publish(l *link, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case why == nil || errors.Is(why, paging.ErrUnavailable):
	case refused(why):
		why = fmt.Errorf("not attached: %w: %w", paging.ErrUnavailable, why)
	default:
		why = fmt.Errorf("not attached: %w: %v", paging.ErrUnavailable, why) //nolint:errorlint // what the node says of itself, such as closed, is not so of this client
	}
	c.why = why
	c.link.Store(l)
	c.stirLocked()
}

// stir makes those who wait in Ready look again.
func (c *Client) stir() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stirLocked()
}

func (c *Client) stirLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Ready waits until the client is attached, or ctx ends: then the error says
// why it is not.
func (c *Client) Ready(ctx context.Context) error {
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		_, err := c.up()
		if err == nil || errors.Is(err, paging.ErrClosed) {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		}
	}
}

// up is the link that a call uses. Where there is none, or its node is silent,
// the call costs nothing more.
func (c *Client) up() (*link, error) {
	l := c.link.Load()
	if l != nil && !l.silent.Load() {
		return l, nil
	}
	c.counts.unavailable.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, fmt.Errorf("client: %w", paging.ErrClosed)
	case l != nil:
		return nil, fmt.Errorf("node does not answer: %w", paging.ErrUnavailable)
	case c.why != nil:
		return nil, c.why
	}
	return nil, fmt.Errorf("not attached: %w", paging.ErrUnavailable)
}

// within bounds ctx by budget if it has no deadline of its own.
func within(ctx context.Context, budget time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, budget)
}

// unary makes one unary call within ctx, or budget. verb begins its errors.
func (l *link) unary(ctx context.Context, verb string, budget time.Duration, do func(context.Context) error) error {
	ctx, cancel := within(ctx, budget)
	defer cancel()
	l.mu.Lock()
	tripped := l.tripped
	l.mu.Unlock()
	defer context.AfterFunc(tripped, cancel)() //nolint:contextcheck // the breaker ends calls, whoever made them
	l.asked.Add(1)
	l.called()
	err := do(ctx)
	l.asked.Add(-1)
	if answered(err) {
		l.heard.Add(1)
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", verb, l.callError(ctx, tripped, err))
}

// answered reports whether err, of a unary call, came from the node.
func answered(err error) bool {
	switch status.Code(err) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable:
		return false
	default:
		return true
	}
}

// callError names why a call of this link failed.
func (l *link) callError(ctx, tripped context.Context, err error) error {
	if cause := context.Cause(tripped); cause != nil {
		return cause
	}
	typed := kvstatus.Err(err)
	switch {
	case errors.Is(typed, paging.ErrUnknownAttachment) && l.mux != nil:
		l.fail(fmt.Errorf("node does not know the attachment: %w", errors.Join(paging.ErrUnavailable, typed)))
	case ctx.Err() != nil && !answered(err):
		return contextError(ctx)
	}
	return typed
}

// Close ends the attachment and with it every lease, attempt and ticket. It
// joins the goroutines of the client, unmaps what is not used, and is
// idempotent. Views that are still open stay readable, and their extents mapped,
// until they are closed; the same holds for the staging of attempts that were
// neither committed nor aborted. The error (ErrInvalid) names both.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.keeper.Wait()
		return c.closing
	}
	c.closed = true
	c.mu.Unlock()
	c.cancel(fmt.Errorf("client: %w", paging.ErrClosed))
	c.book.close()
	c.keeper.Wait()

	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, l := range c.past {
		if leases, n := l.held(); n > 0 {
			errs = append(errs, fmt.Errorf("client closed with %d views open of leases %d: %w", n, leases, paging.ErrInvalid))
		}
		if n := l.filling(); n > 0 {
			errs = append(errs, fmt.Errorf("client closed with %d attempts open: %w", n, paging.ErrInvalid))
		}
	}
	c.closing = errors.Join(errs...)
	return c.closing
}

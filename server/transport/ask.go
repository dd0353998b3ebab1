package transport

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// maxPending bounds the questions of one control connection that wait for an
// answer; one more is refused.
const maxPending = 1024

// callFixedBytes of the payload of a call: its method, and the milliseconds that
// the caller waits.
const callFixedBytes = 1 + 4

// control is a control connection at the node that asks.
type control struct {
	p   *peer
	l   *link
	out *outbox

	mu struct {
		sync.Mutex
		pending map[uint64]chan answer
		next    uint64
		pinged  time.Time // zero: every ping was answered
		asked   time.Time // when the last ping was sent
		ended   bool
	}
}

// answer is what came back for a question.
type answer struct {
	h       header
	payload []byte
}

func newControl(p *peer, l *link) *control {
	c := &control{p: p, l: l, out: newOutbox(l.Conn, p.t.cfg.IOTimeout)}
	c.mu.pending = map[uint64]chan answer{}
	return c
}

// control is the control connection to the peer, made if there is none.
func (p *peer) controlConn(ctx context.Context) (*control, error) {
	p.mu.Lock()
	c := p.mu.control
	p.mu.used = time.Now()
	p.mu.Unlock()
	if c != nil {
		return c, nil
	}
	if p.out() {
		return nil, fmt.Errorf("node %s failed lately: %w", p.id.Short(), paging.ErrUnavailable)
	}
	return p.dialControl(ctx)
}

// dialControl makes the control connection, unless somebody did meanwhile.
func (p *peer) dialControl(ctx context.Context) (*control, error) {
	if err := p.token(ctx); err != nil {
		return nil, err
	}
	defer func() { <-p.dialing }()
	p.mu.Lock()
	c := p.mu.control
	p.mu.Unlock()
	if c != nil {
		return c, nil
	}
	l, err := p.dial(ctx, Control)
	if err != nil {
		return nil, err
	}
	c = newControl(p, l)
	p.mu.Lock()
	p.mu.control = c
	p.mu.health = p.mu.health.Reached()
	p.mu.Unlock()
	if !p.t.run(l, func() { _ = c.out.run(); hangUp(l) }, c.run) {
		return nil, fmt.Errorf("node %s: %w", p.id.Short(), paging.ErrClosed)
	}
	return c, nil
}

// ask sends a question and waits for its answer.
func (c *control) ask(ctx context.Context, kind frameKind, payload []byte) (answer, error) {
	ch := make(chan answer, 1)
	c.mu.Lock()
	if c.mu.ended || len(c.mu.pending) >= maxPending {
		c.mu.Unlock()
		return answer{}, fmt.Errorf("%d questions wait, or the connection ended: %w", maxPending, paging.ErrUnavailable)
	}
	id := c.mu.next
	c.mu.next++
	c.mu.pending[id] = ch
	c.mu.Unlock()
	defer c.forget(id)
	if err := c.out.send(header{kind: kind, request: id}, payload); err != nil {
		return answer{}, err
	}
	select {
	case a, ok := <-ch:
		if !ok {
			return a, fmt.Errorf("connection to node %s ended: %w", c.p.id.Short(), paging.ErrUnavailable)
		}
		return a, nil
	case <-ctx.Done():
		return answer{}, ctx.Err()
	}
}

func (c *control) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.pending, id)
}

// ping asks whether the peer lives, if it is time to and the last ping was answered.
func (c *control) ping(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.pinged.IsZero() && now.Sub(c.mu.asked) >= c.p.t.cfg.pingEvery() {
		c.mu.pinged, c.mu.asked = now, now
		if c.out.send(header{kind: framePing}, nil) != nil {
			hangUp(c.l)
		}
	}
}

// run reads answers until the connection ends. As pings go out all the time,
// silence means that the peer, or the way to it, is broken.
func (c *control) run() {
	err := c.read()
	hangUp(c.l)
	c.out.close()
	c.mu.Lock()
	c.mu.ended = true
	used := len(c.mu.pending) > 0 || !c.mu.pinged.IsZero()
	for id, ch := range c.mu.pending {
		close(ch)
		delete(c.mu.pending, id)
	}
	c.mu.Unlock()
	c.p.lostControl(c, err, used)
}

func (c *control) read() error {
	var scratch [headerBytes]byte
	cfg := &c.p.t.cfg
	for {
		if err := c.l.SetReadDeadline(time.Now().Add(cfg.StallAfter + cfg.pingEvery() + cfg.lookEvery())); err != nil {
			return err
		}
		h, err := readHeader(c.l, controlTarget, scratch[:])
		if err != nil {
			return err
		}
		payload, err := readPayload(c.l, &h, nil)
		if err != nil {
			return err
		}
		c.mu.Lock()
		if h.kind == framePong {
			sent := c.mu.pinged
			c.mu.pinged = time.Time{}
			c.mu.Unlock()
			if sent.IsZero() {
				return fmt.Errorf("pong without a ping: %w", paging.ErrInvalid)
			}
			c.p.ponged(time.Since(sent), int64(h.value))
			continue
		}
		ch := c.mu.pending[h.request]
		delete(c.mu.pending, h.request)
		c.mu.Unlock()
		if ch != nil { // else whoever asked has given up
			ch <- answer{h, payload}
		}
	}
}

// lostControl notes that a control connection has ended.
func (p *peer) lostControl(c *control, err error, used bool) {
	p.mu.Lock()
	mine := p.mu.control == c
	if mine {
		p.mu.control = nil
	}
	p.mu.Unlock()
	if mine && used && p.t.ctx.Err() == nil {
		p.t.metrics.ended(err)
		p.failed(err)
	}
}

// doubt tells the peer that its copy of a page arrived damaged.
func (p *peer) doubt(id paging.PageID) {
	p.mu.Lock()
	c := p.mu.control
	p.mu.Unlock()
	if c != nil {
		_ = c.out.send(header{kind: frameDoubt}, encodeDoubt(&id)) // if too much waits, the next receiver will tell
	}
}

// Have asks a node which parts of some blocks it holds now, and returns one
// answer per name. Errors: paging.ErrUnavailable, the sentinel of what the node
// answered, or that of ctx.
func (t *Transport) Have(ctx context.Context, node placement.NodeID, q *HaveRequest) ([]Held, error) {
	held := make([]Held, 0, len(q.Names))
	for names := q.Names; len(names) > 0; {
		some := &HaveRequest{Namespace: q.Namespace, Parts: q.Parts, Names: names[:min(len(names), maxHaveBlocks)]}
		names = names[len(some.Names):]
		a, err := t.ask(ctx, node, frameHave, some.encode())
		if err != nil {
			return nil, err
		}
		if a.h.kind != frameHeld {
			return nil, fmt.Errorf("node %s answers a question with frame %d: %w", node.Short(), a.h.kind, paging.ErrIncompatible)
		}
		if held, err = decodeHeld(held, a.payload, len(some.Names)); err != nil {
			return nil, fmt.Errorf("node %s: %w", node.Short(), err)
		}
	}
	return held, nil
}

// Call gives an argument of at most MaxCallBytes to the Answer of another node,
// and returns what it answers. What a method does when its caller gives up, or
// the connection ends before the answer, is the method's affair. Errors:
// paging.ErrUnavailable, the sentinel of what Answer returned, paging.ErrInvalid,
// or that of ctx.
func (t *Transport) Call(ctx context.Context, node placement.NodeID, method uint8, argument []byte) ([]byte, error) {
	if len(argument) > MaxCallBytes-callFixedBytes {
		return nil, fmt.Errorf("argument of %d bytes, more than %d: %w", len(argument), MaxCallBytes-callFixedBytes, paging.ErrInvalid)
	}
	wait := maxServeTime
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, until(deadline))
	}
	payload := make([]byte, 0, callFixedBytes+len(argument))
	payload = append(payload, method)
	payload = binary.LittleEndian.AppendUint32(payload, uint32(max(wait.Milliseconds(), 1)))
	a, err := t.ask(ctx, node, frameCall, append(payload, argument...))
	return a.payload, err
}

// until is the time until a deadline, at least 0.
func until(deadline time.Time) time.Duration { return max(time.Until(deadline), 0) }

// ask is a question to a node, whatever its control connection.
func (t *Transport) ask(ctx context.Context, node placement.NodeID, kind frameKind, payload []byte) (answer, error) {
	if !t.begin() {
		return answer{}, fmt.Errorf("question: %w", paging.ErrClosed)
	}
	defer t.running.Done()
	p := t.peer(node)
	if p == nil {
		return answer{}, fmt.Errorf("node %s cannot be asked: %w", node.Short(), paging.ErrUnavailable)
	}
	c, err := p.controlConn(ctx)
	if err != nil {
		return answer{}, err
	}
	a, err := c.ask(ctx, kind, payload)
	if err == nil && a.h.kind == frameReply && a.h.flags != 0 {
		return answer{}, fmt.Errorf("node %s: %w: %s", node.Short(), Reason(a.h.flags).sentinel(), a.payload)
	}
	return a, err
}

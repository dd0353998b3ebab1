package transport

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// maxErrorBytes of the text of an error that is answered.
const maxErrorBytes = 1024

// answering is a control connection at the node that is asked.
type answering struct {
	t     *Transport
	l     *link
	out   *outbox
	ctx   context.Context // ends with the connection
	calls sync.WaitGroup
}

// serveControl is the life of a control connection that another node made.
func (t *Transport) serveControl(l *link) {
	a := &answering{t: t, l: l, out: newOutbox(l.Conn, t.cfg.IOTimeout)}
	ctx, cancel := context.WithCancel(t.ctx)
	a.ctx = ctx
	defer cancel()
	if !t.enter(l) {
		return
	}
	defer t.leave(l)
	var writer sync.WaitGroup
	writer.Go(func() { // owner: serveControl; exits when the outbox closes or a write fails
		if err := a.out.run(); err != nil {
			t.metrics.ended(err)
		}
		hangUp(l)
	})
	t.metrics.ended(a.read())
	cancel()
	a.out.close()
	hangUp(l)
	writer.Wait()
	a.calls.Wait()
}

func (a *answering) read() error {
	var scratch [headerBytes]byte
	for {
		if err := a.l.SetReadDeadline(time.Now().Add(a.t.serveIdle())); err != nil {
			return err
		}
		h, err := readHeader(a.l, controlSource, scratch[:])
		if err != nil {
			return err
		}
		if err := a.l.SetReadDeadline(time.Now().Add(a.t.cfg.IOTimeout)); err != nil {
			return err
		}
		payload, err := readPayload(a.l, &h, nil)
		if err != nil {
			return err
		}
		if err := a.take(&h, payload); err != nil {
			return err
		}
	}
}

// take answers one frame. An error ends the connection.
func (a *answering) take(h *header, payload []byte) error {
	switch h.kind {
	case framePing:
		return a.out.send(header{kind: framePong, value: uint64(max(a.t.metrics.owed.Load(), 0))}, nil)
	case frameHave:
		q, err := decodeHave(payload)
		if err != nil {
			return err
		}
		held, err := a.t.cfg.Source.Have(a.ctx, a.l.peer, q)
		if err == nil && len(held) != len(q.Names) {
			err = fmt.Errorf("%d answers for %d blocks: %w", len(held), len(q.Names), paging.ErrUnavailable)
		}
		if err != nil {
			return a.refuse(h.request, err)
		}
		return a.out.send(header{kind: frameHeld, request: h.request}, encodeHeld(held))
	case frameDoubt:
		id, err := decodeDoubt(payload)
		if err != nil {
			return err
		}
		a.t.metrics.doubts.Add(1)
		a.t.cfg.Source.Doubt(a.l.peer, id)
	case frameCall:
		return a.call(h.request, payload)
	}
	return nil
}

// call answers a call on a goroutine of its own: it may wait for others.
func (a *answering) call(id uint64, payload []byte) error {
	if len(payload) < callFixedBytes {
		return fmt.Errorf("call of %d bytes: %w", len(payload), paging.ErrInvalid)
	}
	if a.t.cfg.Answer == nil {
		return a.refuse(id, fmt.Errorf("this node answers no calls: %w", paging.ErrUnavailable))
	}
	select {
	case a.t.calls <- struct{}{}:
	default:
		return a.refuse(id, fmt.Errorf("%d calls run already: %w", maxCalls, paging.ErrUnavailable))
	}
	wait := min(time.Duration(binary.LittleEndian.Uint32(payload[1:]))*time.Millisecond, maxServeTime)
	a.calls.Go(func() { // owner: serveControl; exits with the answer; bound: maxCalls
		defer func() { <-a.t.calls }()
		ctx, cancel := context.WithTimeout(a.ctx, wait)
		defer cancel()
		out, err := a.t.cfg.Answer(ctx, a.l.peer, payload[0], payload[callFixedBytes:])
		if err == nil && len(out) > MaxCallBytes {
			err = fmt.Errorf("answer of %d bytes, more than %d: %w", len(out), MaxCallBytes, paging.ErrInvalid)
		}
		if err != nil {
			err = a.refuse(id, err)
		} else {
			err = a.out.send(header{kind: frameReply, request: id}, out)
		}
		if err != nil {
			hangUp(a.l) // too much waits to be read: the caller must not wait for this answer
		}
	})
	return nil
}

// refuse answers with an error.
func (a *answering) refuse(id uint64, err error) error {
	text := err.Error()
	return a.out.send(header{kind: frameReply, flags: uint8(reasonOf(err)), request: id}, []byte(text[:min(len(text), maxErrorBytes)]))
}

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/server/rpc"
)

// Times of the hand-off socket.
const (
	tetherHelloWithin = 10 * time.Second // to say whose descriptors are wanted
	tetherSendWithin  = 30 * time.Second // to take them
	acceptAgainAfter  = 100 * time.Millisecond
)

// acceptTethers serves the hand-off socket until it is closed. Owner: the node;
// exits when the listener is closed; one.
func (n *node) acceptTethers(l *shm.Listener) {
	slots := make(chan struct{}, n.cfg.MaxAttachments)
	for {
		t, err := l.Accept()
		if errors.Is(err, paging.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors: those who wait are served when some are free
			n.log.Error("hand-off socket", "error", err)
			select {
			case <-time.After(acceptAgainAfter):
				continue
			case <-n.ctx.Done():
				return
			}
		}
		select {
		case slots <- struct{}{}:
			n.workers.Go(func() { // owner: the node; exits with the tether or the node; bound: MaxAttachments
				defer func() { <-slots }()
				n.serveTether(t)
			})
		default:
			n.counters.tethersRefused.Add(1)
			n.closeTether(t)
		}
	}
}

// serveTether hands descriptors to one process until it is gone.
func (n *node) serveTether(t *shm.Tether) {
	defer n.closeTether(t)
	a, deliver, err := n.greetTether(t)
	if err != nil {
		n.counters.tethersRefused.Add(1)
		n.log.Warn("hand-off refused", "pid", t.Peer().PID, "uid", t.Peer().UID, "error", err)
		return
	}
	ctx, cancel := context.WithCancel(a.life)
	sent := make(chan struct{})
	go func() { // owner: this call; exits with ctx; one per tether
		defer close(sent)
		n.deliverExtents(ctx, a, t, deliver)
	}()
	for {
		// Also after the attachment is gone: its process may have memory mapped.
		err := t.Wait(n.ctx, a.received)
		if errors.Is(err, paging.ErrInvalid) || errors.Is(err, paging.ErrIncompatible) {
			n.log.Warn("hand-off protocol broken", "attachment", shortID(a.id), "error", err)
			a.end(fmt.Errorf("hand-off socket: %w", err))
			continue
		}
		cancel()
		<-sent
		if err == nil {
			a.untethered()
		} else if n.ctx.Err() == nil { // then its slots stay for good: nothing says that nobody reads them
			n.log.Error("hand-off socket", "attachment", shortID(a.id), "error", err)
		}
		return
	}
}

func (n *node) closeTether(t *shm.Tether) {
	if err := t.Close(); err != nil {
		n.log.Error("close of a hand-off connection", "error", err)
	}
}

// greetTether finds out whose tether it is.
func (n *node) greetTether(t *shm.Tether) (*attachment, <-chan struct{}, error) {
	ctx, cancel := context.WithTimeout(n.ctx, tetherHelloWithin)
	defer cancel()
	id, err := t.RecvHello(ctx)
	if err != nil {
		return nil, nil, err
	}
	a, err := n.attachments.ofUser(rpc.ID(id), uint32(t.Peer().UID))
	if err != nil {
		return nil, nil, err
	}
	deliver, err := a.tethered()
	return a, deliver, err
}

// deliverExtents sends what the engine does not have yet, now and whenever
// something was added.
func (n *node) deliverExtents(ctx context.Context, a *attachment, t *shm.Tether, deliver <-chan struct{}) {
	have := map[handed]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-deliver:
		}
		if err := n.deliverOnce(ctx, a, t, have); err != nil {
			if ctx.Err() == nil {
				a.end(fmt.Errorf("hand-off of descriptors: %w", err))
			}
			return
		}
	}
}

// handed names a descriptor: an extent of a pool has two.
type handed struct {
	id   paging.ExtentID
	kind shm.Kind
}

func (n *node) deliverOnce(ctx context.Context, a *attachment, t *shm.Tether, have map[handed]bool) error {
	ctx, cancel := context.WithTimeout(ctx, tetherSendWithin)
	defer cancel()
	a.handing.Lock()
	defer a.handing.Unlock()
	var fresh []shm.Extent
	for _, e := range n.extentsOf(a) {
		if !have[handed{e.ID, e.Kind}] {
			fresh = append(fresh, e)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	if err := t.SendExtents(ctx, fresh); err != nil {
		return err
	}
	var added []rpc.Extent
	for _, e := range fresh {
		have[handed{e.ID, e.Kind}] = true
		if e.Kind != shm.KindPoolTable { // not an extent: it goes with one
			added = append(added, rpc.Extent{ID: e.ID, Arena: arenaOf(e.Kind), Bytes: uint64(e.Bytes)})
		}
	}
	a.announce(added)
	return nil
}

// Numbers of the arenas in messages.
const (
	ramArena     = 1
	stagingArena = 2
	poolArena    = 3
	workingArena = 4
)

func arenaOf(k shm.Kind) uint32 {
	switch k {
	case shm.KindStaging:
		return stagingArena
	case shm.KindPool:
		return poolArena
	case shm.KindWorking:
		return workingArena
	}
	return ramArena
}

package directory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Bounds of proposing.
const (
	maxProposals     = 1024      // that wait at the same time; beyond it ErrUnavailable
	maxCommandBytes  = 512 << 10 // of one command
	retryFirst       = 10 * time.Millisecond
	retryMost        = 200 * time.Millisecond
	defaultProposing = 10 * time.Second // without a deadline of the caller
)

// Propose commits a command and returns what it did, wherever the leader is.
// While its fate is not known it is proposed again; it carries a request id or a
// sequence, so it applies once. ErrUnavailable: no quorum answered before ctx
// ended; the command may still take effect later. The command is modified: its
// request id is set if it has none.
func (d *Directory) Propose(ctx context.Context, c *kvtierv1.DirectoryCommand) (Result, error) {
	if !sequenced(c) && len(c.GetRequestId()) == 0 {
		c.RequestId = make([]byte, len(requestID{}))
		_, _ = rand.Read(c.RequestId) // never fails
	}
	b, err := proto.Marshal(c)
	if err != nil {
		return Invalid, fmt.Errorf("directory command: %w", err)
	}
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultProposing)
		defer cancel()
	}
	wait := retryFirst
	for {
		r, err := d.try(ctx, b)
		if err == nil || !errors.Is(err, paging.ErrUnavailable) {
			return r, err
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return Invalid, fmt.Errorf("directory command has no quorum within its deadline: %w", err)
		case <-d.ctx.Done():
			timer.Stop()
			return Invalid, fmt.Errorf("directory: %w", paging.ErrClosed)
		case <-timer.C:
		}
		wait = min(2*wait, retryMost)
	}
}

// try bounds one try: a leader that hangs must not use up the caller's deadline
// while another is elected.
func (d *Directory) try(ctx context.Context, command []byte) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.StallAfter/2)
	defer cancel()
	return d.propose(ctx, command)
}

// sequenced reports whether the command is idempotent by its sequence or nature.
func sequenced(c *kvtierv1.DirectoryCommand) bool {
	switch c.GetCommand().(type) {
	case *kvtierv1.DirectoryCommand_ClaimBatch, *kvtierv1.DirectoryCommand_ClaimRepair, *kvtierv1.DirectoryCommand_Tick:
		return true
	}
	return false
}

// propose tries once, here if this node leads, else at the leader.
func (d *Directory) propose(ctx context.Context, command []byte) (Result, error) {
	leader, known := d.Leader()
	if !known {
		return Invalid, fmt.Errorf("the directory has no leader: %w", paging.ErrUnavailable)
	}
	if leader != d.cfg.ID {
		r, err := d.cfg.Peers.Forward(ctx, leader, command)
		if err != nil {
			return Invalid, fmt.Errorf("forward to leader %s: %w: %w", leader.Short(), err, paging.ErrUnavailable)
		}
		return r, nil
	}
	return d.ProposeHere(ctx, command)
}

// ProposeHere commits a command that was forwarded to this node: it is refused
// with ErrUnavailable if the node does not lead. It takes the time of the command
// from this node's clock.
func (d *Directory) ProposeHere(ctx context.Context, command []byte) (Result, error) {
	if len(command) > maxCommandBytes {
		return Invalid, fmt.Errorf("directory command of %d bytes, more than %d: %w", len(command), maxCommandBytes, paging.ErrInvalid)
	}
	if why := d.Stalled(); why != "" {
		return Invalid, fmt.Errorf("%s: %w", why, paging.ErrUnavailable)
	}
	var c kvtierv1.DirectoryCommand
	if err := proto.Unmarshal(command, &c); err != nil || c.GetCommand() == nil {
		return Invalid, fmt.Errorf("directory command cannot be read: %w", paging.ErrInvalid)
	}
	c.NowUnixMs, c.MaxClaims = d.cfg.Clock().UnixMilli(), d.cfg.MaxClaims
	b, err := proto.Marshal(&c)
	if err != nil {
		return Invalid, fmt.Errorf("directory command: %w", err)
	}
	return d.commit(ctx, b)
}

type outcome struct {
	result Result
	err    error
}

// commit waits for Raft in a goroutine of its own: a future has no context, and
// a leader whose disk hangs answers none.
func (d *Directory) commit(ctx context.Context, b []byte) (Result, error) {
	select {
	case d.slots <- struct{}{}:
	default:
		return Invalid, fmt.Errorf("%d directory commands wait already: %w", maxProposals, paging.ErrUnavailable)
	}
	done := make(chan outcome, 1)
	r := d.now.Load()
	if !r.begin() {
		<-d.slots
		return Invalid, fmt.Errorf("the replica stops: %w", paging.ErrUnavailable)
	}
	go func() { // owner: the replica, whose close waits for it; exits with the future; bound: maxProposals
		defer func() { <-d.slots }()
		defer r.end()
		f := r.raft.Apply(b, d.cfg.StallAfter)
		if err := f.Error(); err != nil {
			done <- outcome{err: raftError(err)}
			return
		}
		switch resp := f.Response().(type) {
		case Result:
			done <- outcome{result: resp}
		case error:
			done <- outcome{err: resp}
		default:
			done <- outcome{err: fmt.Errorf("directory answered %T: %w", resp, paging.ErrIncompatible)}
		}
	}()
	select {
	case o := <-done:
		return o.result, o.err
	case <-ctx.Done():
		return Invalid, fmt.Errorf("directory command not committed in time: %w", paging.ErrUnavailable)
	}
}

// raftError makes every error after which a command may be proposed again, its
// fate being open, ErrUnavailable.
func raftError(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrAbortedByRestore),
		errors.Is(err, raft.ErrRaftShutdown), errors.Is(err, raft.ErrEnqueueTimeout), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("directory: %w: %w", err, paging.ErrUnavailable)
	}
	return fmt.Errorf("directory: %w", err)
}

// ReadLatest calls see with a state that holds everything that was committed
// before the call. ErrUnavailable unless this node leads and a quorum confirms
// it afterwards: reading first and confirming then leaves no moment in which
// another leader had already changed what was read.
func (d *Directory) ReadLatest(ctx context.Context, see func(*State)) error {
	if sabotage.On("read-cut-off") && d.now.Load().raft.State() == raft.Leader {
		d.Read(see)
		return nil
	}
	if why := d.Stalled(); why != "" {
		return fmt.Errorf("%s: %w", why, paging.ErrUnavailable)
	}
	r := d.now.Load()
	if r.raft.State() != raft.Leader || !r.begin() {
		return fmt.Errorf("this node does not lead the directory: %w", paging.ErrUnavailable)
	}
	defer r.end()
	within := defaultProposing
	if deadline, has := ctx.Deadline(); has {
		within = time.Until(deadline)
	}
	if err := r.raft.Barrier(within).Error(); err != nil {
		return raftError(err)
	}
	r.fsm.read(see)
	if err := r.raft.VerifyLeader().Error(); err != nil {
		return raftError(err)
	}
	return nil
}

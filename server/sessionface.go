package server

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/sessions"
)

// sessionFace is the Manager as package rpc wants it.
type sessionFace struct {
	*sessions.Manager
	intake context.Context // ends when the node begins to stop
}

// Sessions implements rpc.Node.
func (n *node) Sessions() (rpc.Sessions, error) {
	if n.sessions == nil {
		return nil, fmt.Errorf("this node is of no cluster, and sessions are kept by a cluster: start the node with --bootstrap (a cluster of one) or --join: %w", paging.ErrIncompatible)
	}
	return sessionFace{n.sessions, n.intake}, nil
}

// untilStop is ctx, and ends when the node begins to stop: calls that go on for long
// would hold it up.
func (f sessionFace) untilStop(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(f.intake, func() { cancel(errStopping) })
	return ctx, func() { stop(); cancel(nil) }
}

// stopped is err, or that the node stops, if that ended ctx.
func stopped(ctx context.Context, err error) error {
	if err != nil && context.Cause(ctx) == errStopping { //nolint:errorlint // the very one
		return errStopping
	}
	return err
}

// Open implements rpc.Sessions.
func (f sessionFace) Open(ctx context.Context, r *kvtierv1.OpenSessionRequest) (*kvtierv1.OpenSessionResponse, error) {
	ctx, cancel := f.untilStop(ctx) // it may wait for a whole move
	defer cancel()
	a, err := f.Manager.Open(ctx, r)
	return a, stopped(ctx, err)
}

// Migrate implements rpc.Sessions.
func (f sessionFace) Migrate(ctx context.Context, r *kvtierv1.MigrateSessionRequest, send func(*kvtierv1.MigrateSessionResponse) error) error {
	ctx, cancel := f.untilStop(ctx)
	defer cancel()
	return stopped(ctx, f.Manager.Migrate(ctx, r, send))
}

// WatchSessions implements rpc.Sessions.
func (f sessionFace) WatchSessions(ctx context.Context, r *kvtierv1.WatchSessionsRequest, send func(*kvtierv1.SessionEvent) error) error {
	ctx, cancel := f.untilStop(ctx)
	defer cancel()
	w, err := f.Watch(r.GetTenant(), r.GetSessions())
	if err != nil {
		return err
	}
	defer w.Close()
	for {
		events, err := w.Next(ctx)
		if err != nil {
			return stopped(ctx, err)
		}
		for _, e := range events {
			if err := send(e); err != nil {
				return err
			}
		}
	}
}

// WatchSession implements rpc.Attachment.
func (a *attachment) WatchSession(session string) error {
	a.mu.Lock()
	w, state := a.watched, a.state
	a.mu.Unlock()
	if state != attached {
		return errDetached
	}
	if w == nil {
		var err error
		if w, err = a.follow(); err != nil {
			return err
		}
	}
	return w.Add(session)
}

// follow gives the attachment its watch, which signals it.
func (a *attachment) follow() (*sessions.Watch, error) {
	w, err := a.node.sessions.Follow(a.caller.Tenant, a.signal)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	other, state := a.watched, a.state
	if other == nil && state == attached {
		a.watched = w
	}
	a.mu.Unlock()
	switch {
	case state != attached:
		w.Close()
		return nil, errDetached
	case other != nil: // another call was faster
		w.Close()
		return other, nil
	}
	return w, nil
}

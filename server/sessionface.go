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
type sessionFace struct{ *sessions.Manager }

// Sessions implements rpc.Node.
func (n *node) Sessions() (rpc.Sessions, error) {
	if n.sessions == nil {
		return nil, fmt.Errorf("this node is of no cluster, and sessions are kept by a cluster: start it with --bootstrap (a cluster of one) or --join: %w", paging.ErrIncompatible)
	}
	return sessionFace{n.sessions}, nil
}

// WatchSessions implements rpc.Sessions.
func (f sessionFace) WatchSessions(ctx context.Context, r *kvtierv1.WatchSessionsRequest, send func(*kvtierv1.SessionEvent) error) error {
	w, err := f.Watch(r.GetTenant(), r.GetSessions())
	if err != nil {
		return err
	}
	defer w.Close()
	for {
		events, err := w.Next(ctx)
		if err != nil {
			return err
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
	defer a.mu.Unlock()
	if a.state != attached {
		return errDetached
	}
	if a.watched != nil {
		return a.watched.Add(session)
	}
	w, err := a.node.sessions.Watch(a.caller.Tenant, []string{session})
	if err != nil {
		return err
	}
	a.watched = w
	a.node.workers.Go(func() { // owner: the node; exits when the attachment is gone; bound: one an attachment
		defer w.Close()
		for {
			select {
			case <-w.Ready():
				a.mu.Lock()
				a.outbox.sessions = true
				a.notifyLocked()
				a.mu.Unlock()
			case <-a.ended:
				return
			case <-a.life.Done():
				return
			}
		}
	})
	return nil
}

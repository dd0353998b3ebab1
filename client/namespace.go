package client

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// namespace is what the client remembers of one that it registered.
type namespace struct {
	paging.Namespace
	pageBytes []uint64 // per part
}

// RegisterNamespace makes a namespace known to the node and returns its id.
// Idempotent. The tenant is the one that the node knows the client by; one in ns
// is not used. After a restart of the node the client registers it again by
// itself.
//
// ErrBadLayout names the field; ErrIncompatible: client and node compute
// different ids.
func (c *Client) RegisterNamespace(ctx context.Context, ns paging.Namespace) (paging.NamespaceID, error) {
	if err := ns.Layout.Validate(); err != nil {
		return paging.NamespaceID{}, fmt.Errorf("register namespace: %w", err)
	}
	l, err := c.up()
	if err != nil {
		return paging.NamespaceID{}, fmt.Errorf("register namespace: %w", err)
	}
	ns.Layout.Parts = slices.Clone(ns.Layout.Parts)
	ns.Salt = slices.Clone(ns.Salt)
	n := &namespace{Namespace: ns}
	for i := range ns.Layout.Parts {
		p := &ns.Layout.Parts[i]
		p.Ranks = slices.Clone(p.Ranks)
		n.pageBytes = append(n.pageBytes, p.PageBytes)
	}
	id, err := l.registerNamespace(ctx, n)
	if err != nil {
		return id, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	next := make(map[paging.NamespaceID]*namespace, len(c.names())+1)
	for k, v := range c.names() {
		next[k] = v
	}
	next[id] = n
	c.namespaces.Store(&next)
	return id, nil
}

func (c *Client) names() map[paging.NamespaceID]*namespace { return *c.namespaces.Load() }

// namespace is nil for one that this client has not registered.
func (c *Client) namespace(id paging.NamespaceID) *namespace { return c.names()[id] }

func (l *link) registerNamespace(ctx context.Context, n *namespace) (id paging.NamespaceID, err error) {
	req := &kvtierv1.RegisterNamespaceRequest{Layout: wireLayout(&n.Layout), Salt: n.Salt, Attachment: l.id}
	err = l.unary(ctx, "register namespace", l.client.cfg.CallTimeout, func(ctx context.Context) error {
		resp, err := l.pages.RegisterNamespace(ctx, req)
		if err == nil && len(resp.GetNamespaceId()) != len(id) {
			return fmt.Errorf("namespace id of %d bytes: %w", len(resp.GetNamespaceId()), paging.ErrInvalid)
		}
		copy(id[:], resp.GetNamespaceId())
		return err
	})
	if err != nil {
		return id, err
	}
	if l.tenant != "" {
		ns := n.Namespace
		ns.Tenant = l.tenant
		if own := ns.ID(); own != id {
			return id, fmt.Errorf("register namespace: the node computes id %s, this client %s: %w", id.Short(), own.Short(), paging.ErrIncompatible)
		}
	}
	return id, nil
}

// registerAll registers on a new link what was registered on earlier ones. A
// namespace that the node refuses now is logged; calls that use it say why.
func (c *Client) registerAll(ctx context.Context, l *link) error {
	for id, n := range c.names() {
		_, err := l.registerNamespace(ctx, n)
		switch {
		case err == nil:
		case errors.Is(err, paging.ErrUnavailable) || ctx.Err() != nil || l.ctx.Err() != nil:
			return err
		default:
			c.log.Warn("namespace is refused after the restart of the node", "namespace", id.Short(), "error", err)
		}
	}
	return nil
}

func wireLayout(l *paging.Layout) *kvtierv1.Layout {
	out := &kvtierv1.Layout{
		Model: l.Model, Revision: l.Revision, Dtype: l.DType, KvDtype: l.KVDType, Attention: l.Attention,
		Layers: l.Layers, KvHeads: l.KVHeads, HeadDim: l.HeadDim,
		EngineLayout: l.EngineLayout, EngineEpoch: l.EngineEpoch,
		TensorParallel: l.TP, PipelineParallel: l.PP, ContextParallel: l.CP,
		Isa: l.ISA, HashAlgorithm: l.HashAlgorithm, HashSeed: l.HashSeed, BlockTokens: l.BlockTokens,
	}
	for i := range l.Parts {
		p := &l.Parts[i]
		out.Parts = append(out.Parts, &kvtierv1.Part{
			Name: p.Name, PageBytes: p.PageBytes, BlocksPerPage: p.BlocksPerPage,
			LastBlocks: p.LastBlocks, Ranks: slices.Clone(p.Ranks),
		})
	}
	return out
}

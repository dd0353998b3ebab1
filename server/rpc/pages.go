package rpc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// pagesService is the PagesService.
type pagesService struct {
	kvtierv1.UnimplementedPagesServiceServer
	node     Node
	accounts *Accounts
	calls    *calls
	streams  sync.WaitGroup // readers of attachment streams
	scratch  sync.Pool      // *scratch: decoding a call of 64 names without it allocates 3 times
}

func newPagesService(node Node, accounts *Accounts, c *calls) *pagesService {
	return &pagesService{node: node, accounts: accounts, calls: c, scratch: sync.Pool{New: func() any { return new(scratch) }}}
}

// attachment recognises the caller and the attachment that it names.
func (p *pagesService) attachment(ctx context.Context, b []byte) (Attachment, error) {
	if err := expired(ctx); err != nil {
		return nil, err
	}
	caller, err := p.accounts.engine(ctx)
	if err != nil {
		return nil, err
	}
	attachment, err := id("attachment", b)
	if err != nil {
		return nil, err
	}
	return p.node.Attachment(caller, attachment)
}

// caller recognises the caller of a data call.
func (p *pagesService) caller(ctx context.Context) (Caller, error) {
	if err := expired(ctx); err != nil {
		return Caller{}, err
	}
	return p.accounts.engine(ctx)
}

// RegisterNamespace makes a namespace known.
func (p *pagesService) RegisterNamespace(ctx context.Context, m *kvtierv1.RegisterNamespaceRequest) (*kvtierv1.RegisterNamespaceResponse, error) {
	caller, err := p.caller(ctx)
	if err != nil {
		return nil, err
	}
	switch {
	case m.GetLayout() == nil:
		return nil, invalid("layout is missing")
	case len(m.GetSalt()) > kvstatus.MaxSaltBytes:
		return nil, invalid("salt has %d bytes, at most %d", len(m.GetSalt()), kvstatus.MaxSaltBytes)
	}
	r := RegisterRequest{Namespace: paging.Namespace{Layout: layout(m.GetLayout()), Salt: m.GetSalt()}}
	if r.PrefillRate = m.GetPrefillTokensPerSecond(); !(r.PrefillRate >= 0) || math.IsInf(r.PrefillRate, 0) { // NaN included
		return nil, fmt.Errorf("prefill rate %v tokens a second: %w", r.PrefillRate, paging.ErrInvalid)
	}
	if r.Attachment, err = optionalID("attachment", m.GetAttachment()); err != nil {
		return nil, err
	}
	res, err := p.node.RegisterNamespace(ctx, caller, &r)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.RegisterNamespaceResponse{
		NamespaceId: res.ID[:], StagingExtent: uint32(res.StagingExtent), StagingBytes: res.StagingBytes,
	}, nil
}

// Lookup tells the usable prefix.
func (p *pagesService) Lookup(ctx context.Context, m *kvtierv1.LookupRequest) (*kvtierv1.LookupResponse, error) {
	caller, err := p.caller(ctx)
	if err != nil {
		return nil, err
	}
	if m.GetSessionRange().GetFromBlock() != 0 {
		return nil, invalid("session_range begins at block %d: a lookup begins at block 0", m.GetSessionRange().GetFromBlock())
	}
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, nil}); err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	r := LookupRequest{Parts: paging.PartSet(m.GetParts())}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.Names, err = s.packed(m.GetBlockNames()); err != nil {
		return nil, err
	}
	res, err := p.node.Lookup(ctx, caller, &r)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.LookupResponse{UsableBlocks: uint32(res.Usable), UsableTokens: res.Tokens, Tiers: res.Tiers}, nil
}

// Fetch makes pages present and returns a lease on them.
func (p *pagesService) Fetch(ctx context.Context, m *kvtierv1.FetchRequest) (*kvtierv1.FetchResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, &m.FirstBlock}); err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	var r FetchRequest
	if err := s.fetch(m, &r); err != nil {
		return nil, err
	}
	var res FetchResult // not used again: gRPC encodes it after this method returned
	done, err := att.FetchResident(&r, &res)
	if err == nil && !done {
		bounded, cancel := context.WithTimeout(ctx, r.Timeout)
		defer cancel()
		err = att.Fetch(bounded, &r, &res)
	}
	if err != nil {
		return nil, err
	}
	if err := expired(ctx); err != nil { // nobody learns of the lease
		dropLease(att, &res)
		return nil, err
	}
	out := new(kvtierv1.FetchResponse)
	encodeFetch(&res, out)
	return out, nil
}

// dropLease ends a lease whose answer nobody waits for any more.
func dropLease(att Attachment, res *FetchResult) {
	var tokens []ID
	if res.Token != nil {
		tokens = append(tokens, *res.Token)
	}
	att.Release([]uint64{res.Lease}, tokens, nil)
}

// Adopt gives a worker the slots of its parts.
func (p *pagesService) Adopt(ctx context.Context, m *kvtierv1.AdoptRequest) (*kvtierv1.AdoptResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	token, err := id("adopt_token", m.GetAdoptToken())
	if err != nil {
		return nil, err
	}
	var res FetchResult
	if err := att.Adopt(token, paging.PartSet(m.GetParts()), &res); err != nil {
		return nil, err
	}
	if err := expired(ctx); err != nil {
		dropLease(att, &res)
		return nil, err
	}
	out := new(kvtierv1.AdoptResponse)
	encodeAdopt(&res, out)
	return out, nil
}

// Release ends leases.
func (p *pagesService) Release(ctx context.Context, m *kvtierv1.ReleaseRequest) (*kvtierv1.ReleaseResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	tokens, err := s.released(m)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.ReleaseResponse{Lost: att.Release(m.GetLeaseIds(), tokens, nil)}, nil
}

// Renew extends leases.
func (p *pagesService) Renew(ctx context.Context, m *kvtierv1.RenewRequest) (*kvtierv1.RenewResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	ttl, err := duration("lease_ttl", m.GetLeaseTtl(), 0, maxLeaseTTL)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.RenewResponse{Unknown: att.Renew(m.GetLeaseIds(), ttl, nil)}, nil
}

// Reserve grants staging slots.
func (p *pagesService) Reserve(ctx context.Context, m *kvtierv1.ReserveRequest) (*kvtierv1.ReserveResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	r := ReserveRequest{First: int(m.GetFirstBlock()), Parts: paging.PartSet(m.GetParts())}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.TTL, err = duration("ttl", m.GetTtl(), kvstatus.DefaultAttemptTTL, kvstatus.MaxAttemptTTL); err != nil {
		return nil, err
	}
	if r.Timeout, err = duration("timeout", m.GetTimeout(), kvstatus.DefaultReserveTime, maxFetchTime); err != nil {
		return nil, err
	}
	if r.Attempt, err = optionalID("attempt", m.GetAttempt()); err != nil {
		return nil, err
	}
	if r.Names, err = appendNames(s.names[:0], m.GetBlockNames()); err != nil {
		return nil, err
	}
	if r.Tier, err = writeTier(m.GetTier()); err != nil {
		return nil, err
	}
	r.Region = m.GetRegionId()
	if r.Blocks, err = rows(m.GetRegionBlocks()); err != nil {
		return nil, err
	}
	s.names = r.Names // repeated names are an outcome of theirs here, no error
	bounded, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	var res ReserveResult
	if err := att.Reserve(bounded, &r, &res); err != nil {
		return nil, err
	}
	// Nobody learns of an attempt whose caller gave up before now. Who gives up
	// after it aborts by the token it chose.
	if err := expired(ctx); err != nil {
		if res.Attempt != nil {
			err = errors.Join(err, att.Abort(*res.Attempt))
		}
		return nil, err
	}
	out := &kvtierv1.ReserveResponse{
		Outcomes: res.Outcomes, Slots: res.Slots, InFlightFor: optionalDuration(res.InFlight), Parts: uint64(res.Parts),
	}
	if res.Attempt != nil {
		out.Attempt = res.Attempt[:]
	}
	return out, nil
}

// Commit publishes filled pages.
func (p *pagesService) Commit(ctx context.Context, m *kvtierv1.CommitRequest) (*kvtierv1.CommitResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	r := CommitRequest{Durable: m.GetDurable()}
	if r.Attempt, err = id("attempt", m.GetAttempt()); err != nil {
		return nil, err
	}
	if r.Rows, err = rows(m.GetRows()); err != nil {
		return nil, err
	}
	if r.Retention, err = retention(m.GetRetention()); err != nil {
		return nil, err
	}
	outcomes, err := att.Commit(ctx, &r)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.CommitResponse{Outcomes: outcomes}, nil
}

// Abort ends an attempt.
func (p *pagesService) Abort(ctx context.Context, m *kvtierv1.AbortRequest) (*kvtierv1.AbortResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	attempt, err := id("attempt", m.GetAttempt())
	if err != nil {
		return nil, err
	}
	return &kvtierv1.AbortResponse{}, att.Abort(attempt)
}

// Prefetch starts bringing pages up.
func (p *pagesService) Prefetch(ctx context.Context, m *kvtierv1.PrefetchRequest) (*kvtierv1.PrefetchResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, &m.FirstBlock}); err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	if m.GetPriority() > 100 {
		return nil, invalid("priority is %d, at most 100", m.GetPriority())
	}
	if t := m.GetTier(); t != kvtierv1.Tier_TIER_UNSPECIFIED && t != kvtierv1.Tier_TIER_RAM {
		return nil, invalid("tier is %v: this node prefetches to TIER_RAM", t)
	}
	r := PrefetchRequest{First: int(m.GetFirstBlock()), Parts: paging.PartSet(m.GetParts()), Tier: uint8(m.GetTier()), Priority: uint8(m.GetPriority())}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return nil, err
	}
	if r.Timeout, err = duration("timeout", m.GetTimeout(), kvstatus.DefaultPrefetch, kvstatus.MaxPrefetchTime); err != nil {
		return nil, err
	}
	if r.Names, err = s.packed(m.GetBlockNames()); err != nil {
		return nil, err
	}
	res, err := att.Prefetch(ctx, &r)
	if err != nil {
		return nil, err
	}
	return &kvtierv1.PrefetchResponse{Ticket: res.Ticket, AdmittedBlocks: uint32(res.Admitted), RefusedBlocks: uint32(res.Refused)}, nil
}

// Cancel stops a prefetch.
func (p *pagesService) Cancel(ctx context.Context, m *kvtierv1.CancelRequest) (*kvtierv1.CancelResponse, error) {
	att, err := p.attachment(ctx, m.GetAttachment())
	if err != nil {
		return nil, err
	}
	att.Cancel(m.GetTicket())
	return &kvtierv1.CancelResponse{}, nil
}

// Retain sets retention.
func (p *pagesService) Retain(ctx context.Context, m *kvtierv1.RetainRequest) (*kvtierv1.RetainResponse, error) {
	r := KeepRequest{Verb: VerbRetain}
	ret, err := retention(m.GetRetention())
	if err != nil {
		return nil, err
	}
	if ret == nil {
		return nil, invalid("retention is missing")
	}
	r.Retention = *ret
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, nil}); err != nil {
		return nil, err
	}
	outcomes, err := p.keep(ctx, &r, m.GetNamespaceId(), m.GetBlockNames())
	if err != nil {
		return nil, err
	}
	return &kvtierv1.RetainResponse{Outcomes: outcomes}, nil
}

// Demote moves blocks down.
func (p *pagesService) Demote(ctx context.Context, m *kvtierv1.DemoteRequest) (*kvtierv1.DemoteResponse, error) {
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, nil}); err != nil {
		return nil, err
	}
	outcomes, err := p.keep(ctx, &KeepRequest{Verb: VerbDemote, From: uint8(m.GetFrom())}, m.GetNamespaceId(), m.GetBlockNames())
	if err != nil {
		return nil, err
	}
	return &kvtierv1.DemoteResponse{Outcomes: outcomes}, nil
}

// Drop forgets blocks.
func (p *pagesService) Drop(ctx context.Context, m *kvtierv1.DropRequest) (*kvtierv1.DropResponse, error) {
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, nil}); err != nil {
		return nil, err
	}
	outcomes, err := p.keep(ctx, &KeepRequest{Verb: VerbDrop}, m.GetNamespaceId(), m.GetBlockNames())
	if err != nil {
		return nil, err
	}
	return &kvtierv1.DropResponse{Outcomes: outcomes}, nil
}

// Pin keeps blocks in RAM. A longer time than the most is clipped by the node.
func (p *pagesService) Pin(ctx context.Context, m *kvtierv1.PinRequest) (*kvtierv1.PinResponse, error) {
	ttl, err := duration("ttl", m.GetTtl(), 0, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	if err := p.fill(ctx, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, nil}); err != nil {
		return nil, err
	}
	outcomes, err := p.keep(ctx, &KeepRequest{Verb: VerbPin, TTL: ttl}, m.GetNamespaceId(), m.GetBlockNames())
	if err != nil {
		return nil, err
	}
	return &kvtierv1.PinResponse{Outcomes: outcomes}, nil
}

func (p *pagesService) keep(ctx context.Context, r *KeepRequest, ns, names []byte) ([]byte, error) {
	caller, err := p.caller(ctx)
	if err != nil {
		return nil, err
	}
	s := p.scratch.Get().(*scratch)
	defer p.scratch.Put(s)
	if r.Namespace, err = namespaceID(ns); err != nil {
		return nil, err
	}
	if r.Names, err = s.packed(names); err != nil {
		return nil, err
	}
	return p.node.Keep(ctx, caller, r)
}

// pageStream checks that a page stream ends by itself: it must have a deadline.
func pageStream(ctx context.Context) error {
	if err := expired(ctx); err != nil {
		return err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		return invalid("a page stream needs a deadline, at most %v", kvstatus.MaxPageStream)
	}
	if left := time.Until(deadline); left > kvstatus.MaxPageStream+time.Minute {
		return invalid("the stream's deadline is in %v, at most %v", left.Round(time.Second), kvstatus.MaxPageStream)
	}
	return nil
}

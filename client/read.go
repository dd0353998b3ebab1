package client

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// extentWait bounds the wait for the descriptor of an extent that a slot names:
// it travels on another socket and may come a little later than the answer.
const extentWait = time.Second

// answerTime is kept of a caller's deadline for the answer to travel.
const answerTime = 2 * time.Millisecond

// Prefix tells how much of a chain is stored.
type Prefix struct {
	Usable       int    // blocks
	UsableTokens int64  // tokens
	Tiers        []Tier // one per block asked for; TierNone: absent
}

// Mode says which blocks a Fetch wants.
type Mode uint8

// Modes of Fetch: the longest usable prefix of the named chain, or each named
// block by itself.
const (
	ModePrefix Mode = iota
	ModeSet
)

// FetchRequest asks for a lease on pages.
type FetchRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName // in chain order; with PrefixLease: the blocks after it
	First     int                // position of the first name in its chain
	// PrefixLease is a held lease whose blocks come before Names. 0: none.
	PrefixLease uint64
	Parts       paging.PartSet // 0: all parts of the layout
	Mode        Mode
	Wanted      Tier          // whose arena the pages shall lie in; TierNone: RAM
	Timeout     time.Duration // time that the node may take to bring pages up; 0: only what is there
	TTL         time.Duration // of the lease; 0: the node's default
	ForGroup    bool          // decide for the group: Lease.AdoptToken

	// Session names blocks From to To (0: its end) of a session of the tenant, in place
	// of Names, First and Namespace. Namespace is then read to know the layout.
	Session  string
	From, To uint64
}

// Lookup tells the usable prefix of a chain for some parts (0: all) and the tier
// of each block. It pins nothing and promises nothing.
func (c *Client) Lookup(ctx context.Context, ns paging.NamespaceID, names []paging.BlockName, parts paging.PartSet) (Prefix, error) {
	packed, err := pack(names)
	if err != nil {
		return Prefix{}, fmt.Errorf("lookup: %w", err)
	}
	p, err := c.lookup(ctx, &kvtierv1.LookupRequest{NamespaceId: ns[:], BlockNames: packed, Parts: uint64(parts)})
	if err == nil && (len(p.Tiers) != len(names) || p.Usable > len(names)) {
		return Prefix{}, fmt.Errorf("lookup: answer of %d tiers, %d usable for %d blocks: %w", len(p.Tiers), p.Usable, len(names), paging.ErrInvalid)
	}
	return p, err
}

func (c *Client) lookup(ctx context.Context, req *kvtierv1.LookupRequest) (Prefix, error) {
	l, err := c.up()
	if err != nil {
		return Prefix{}, fmt.Errorf("lookup: %w", err)
	}
	var resp *kvtierv1.LookupResponse
	err = l.unary(ctx, "lookup", c.cfg.CallTimeout, func(ctx context.Context) (err error) {
		resp, err = l.pages.Lookup(ctx, req)
		return err
	})
	if err != nil {
		return Prefix{}, err
	}
	return Prefix{
		Usable: int(resp.GetUsableBlocks()), UsableTokens: int64(resp.GetUsableTokens()), Tiers: octets[Tier](resp.GetTiers()),
	}, nil
}

// Fetch makes the pages of the usable prefix (or of a set) present and returns a
// lease on them, which the caller releases. What cannot be had in time is a
// shortfall of the lease, not an error; nothing at all is a lease with ID 0.
//
// The call is bounded by the deadline of ctx, of which the node is given what is
// left, else by Timeout + Config.CallTimeout. A streamed Fetch is cut to what
// Config.PrivateBytes has room for (ReasonNoSpace beyond).
func (c *Client) Fetch(ctx context.Context, r FetchRequest) (*Lease, error) {
	packed, rows, err := r.chain()
	if err != nil {
		return nil, fmt.Errorf("fetch: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("fetch: %w", contextError(ctx))
	}
	l, err := c.up()
	if err != nil {
		return nil, fmt.Errorf("fetch: %w", err)
	}
	c.counts.fetches.Add(1)
	if l.mux == nil {
		if r.Session != "" {
			if r.Names, err = l.sessionNames(ctx, &r); err != nil {
				return nil, fmt.Errorf("fetch: %w", err)
			}
			r.First = int(r.From)
		}
		return l.fetchBytes(ctx, &r)
	}
	lease, err := l.fetch(ctx, &r, packed, rows)
	if err != nil {
		return nil, fmt.Errorf("fetch: %w", err)
	}
	return lease, nil
}

// chain is the names of the request, packed, and how many rows it has at most.
func (r *FetchRequest) chain() (packed []byte, rows int, err error) {
	if r.Session == "" {
		packed, err = pack(r.Names)
		return packed, len(r.Names), err
	}
	if len(r.Names) > 0 || r.Mode == ModeSet || r.To != 0 && r.To <= r.From {
		return nil, 0, fmt.Errorf("blocks %d to %d of session %q: a session names a prefix, and no other names go with it: %w", r.From, r.To, r.Session, paging.ErrInvalid)
	}
	return nil, (&SessionRange{r.Session, r.From, r.To}).most(), nil
}

// sessionNames asks for the names of a session's blocks.
func (l *link) sessionNames(ctx context.Context, r *FetchRequest) ([]paging.BlockName, error) {
	to := r.To
	if to == 0 {
		to = r.From + paging.MaxCallBlocks
	}
	var resp *kvtierv1.GetSessionResponse
	err := l.unary(ctx, "session", l.client.cfg.CallTimeout, func(ctx context.Context) (err error) {
		resp, err = kvtierv1.NewSessionsServiceClient(l.conn).GetSession(ctx, &kvtierv1.GetSessionRequest{Session: r.Session, FromBlock: r.From, ToBlock: to})
		return err
	})
	if err != nil {
		return nil, err
	}
	packed := resp.GetBlockNames()
	if len(packed) == 0 || len(packed)%32 != 0 {
		return nil, fmt.Errorf("session %q has no blocks from %d on: %w", r.Session, r.From, paging.ErrNotFound)
	}
	names := make([]paging.BlockName, len(packed)/32)
	for i := range names {
		names[i] = paging.BlockName(packed[32*i:])
	}
	return names, nil
}

func (r *FetchRequest) sessionRange() *kvtierv1.SessionRange {
	return (&SessionRange{r.Session, r.From, r.To}).wire()
}

func (l *link) fetch(ctx context.Context, r *FetchRequest, packed []byte, rows int) (*Lease, error) {
	timeout := r.Timeout
	if deadline, ok := ctx.Deadline(); ok {
		timeout = max(min(timeout, time.Until(deadline)-answerTime), 0)
	}
	req := &kvtierv1.FetchRequest{
		NamespaceId: r.Namespace[:], BlockNames: packed, FirstBlock: uint32(r.First), PrefixLease: r.PrefixLease,
		Parts: uint64(r.Parts), Mode: r.Mode.wire(), WantedTier: kvtierv1.Tier(r.Wanted),
		Timeout: span(timeout), LeaseTtl: span(r.TTL), ForGroup: r.ForGroup, SessionRange: r.sessionRange(),
	}
	var resp *kvtierv1.FetchResponse
	budget := timeout + l.client.cfg.CallTimeout
	if l.client.cfg.UnaryCalls {
		req.Attachment = l.id
		err := l.unary(ctx, "unary", budget, func(ctx context.Context) (err error) {
			resp, err = l.pages.Fetch(ctx, req)
			return err
		})
		if err != nil {
			return nil, err
		}
	} else {
		msg, err := l.ask(ctx, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Fetch{Fetch: req}}, budget)
		if err != nil {
			return nil, err
		}
		if resp = msg.GetFetch(); resp == nil {
			return nil, errAnswer
		}
	}
	lease := &Lease{
		ID: resp.GetLeaseId(), Usable: int(resp.GetUsableBlocks()), UsableTokens: int64(resp.GetUsableTokens()),
		Tiers: octets[Tier](resp.GetTiers()), Shortfalls: shortfalls(resp.GetShortfalls()),
		AdoptToken: resp.GetAdoptToken(), TTL: resp.GetLeaseTtl().AsDuration(),
		Parts: paging.PartSet(resp.GetParts()), link: l, slots: resp.GetSlots(),
	}
	if lease.Parts == 0 {
		lease.Parts = r.Parts
	}
	return lease, l.accept(ctx, lease, l.client.namespace(r.Namespace), r.Mode, rows)
}

var errAnswer = fmt.Errorf("the node answered something else: %w", paging.ErrInvalid)

func (m Mode) wire() kvtierv1.FetchMode {
	if m == ModeSet {
		return kvtierv1.FetchMode_FETCH_MODE_SET
	}
	return kvtierv1.FetchMode_FETCH_MODE_PREFIX
}

// ask makes one call on the attachment stream within ctx, or budget.
func (l *link) ask(ctx context.Context, req *kvtierv1.AttachRequest, budget time.Duration) (*kvtierv1.AttachResponse, error) {
	l.called()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(budget)
	}
	return l.mux.roundTrip(ctx, req, deadline)
}

// accept checks what the node granted, holds the mappings and puts the lease on
// the books. What it does not accept it gives back.
func (l *link) accept(ctx context.Context, lease *Lease, ns *namespace, mode Mode, most int) error {
	if lease.ID == 0 {
		lease.slots, lease.Rows = nil, 0
		lease.state.Store(stateFinished)
		return nil
	}
	err := lease.shape(ns, mode, most)
	if err == nil {
		err = l.holdSlots(ctx, lease)
	}
	if err == nil {
		if err = l.register(lease, time.Now()); err != nil {
			l.extents.drop(lease.maps)
		}
	}
	if err != nil {
		l.abandonLease(lease.ID, lease.AdoptToken)
		return fmt.Errorf("lease %d: %w", lease.ID, err)
	}
	l.client.counts.pages.Add(int64(lease.Rows * lease.cols))
	return nil
}

// shape works out the rows and columns of the slot table and checks the lengths
// of its pages against the layout, if the namespace is known here.
func (l *Lease) shape(ns *namespace, mode Mode, most int) error {
	if l.Parts == 0 && ns != nil {
		l.Parts = ns.Layout.AllParts()
	}
	refs := len(l.slots) / paging.SlotBytes
	switch l.cols = l.Parts.Len(); {
	case l.cols == 0:
		return fmt.Errorf("the parts of this namespace are not known: register it, or name the parts: %w", paging.ErrUnknownNamespace)
	case len(l.slots)%paging.SlotBytes != 0 || refs%l.cols != 0 || refs == 0 || refs > paging.MaxCallPages:
		return fmt.Errorf("slot table of %d bytes for %d parts: %w", len(l.slots), l.cols, paging.ErrInvalid)
	}
	l.Rows = refs / l.cols
	if l.Rows > most || l.Usable > l.Rows || mode == ModePrefix && l.Usable != l.Rows || len(l.Tiers) != l.Rows && len(l.Tiers) != 0 {
		return fmt.Errorf("%d usable blocks, %d rows and %d tiers for %d blocks: %w", l.Usable, l.Rows, len(l.Tiers), most, paging.ErrInvalid)
	}
	if l.TTL <= 0 {
		l.TTL = l.link.ttl
	}
	return ns.checkLengths(l.slots, l.Parts)
}

// holdSlots checks each slot against the mapped memory and holds the extents.
func (l *link) holdSlots(ctx context.Context, lease *Lease) error {
	maps, err := l.extents.resolve(ctx, lease.slots, false, lease.first[:0])
	if err != nil {
		return err
	}
	if !l.extents.hold(maps) {
		return l.cause()
	}
	lease.maps = maps
	return nil
}

// Adopt gives a member of a group the pages of its parts (0: the parts of its
// ranks) of a decision that another member's Fetch made with ForGroup. It makes
// no decision and causes no I/O. The caller releases the lease.
func (c *Client) Adopt(ctx context.Context, token []byte, parts paging.PartSet) (*Lease, error) {
	l, err := c.attached("adopt")
	if err != nil {
		return nil, err
	}
	req := &kvtierv1.AdoptRequest{AdoptToken: token, Parts: uint64(parts)}
	var resp *kvtierv1.AdoptResponse
	if c.cfg.UnaryCalls {
		req.Attachment = l.id
		err = l.unary(ctx, "unary", c.cfg.CallTimeout, func(ctx context.Context) (err error) {
			resp, err = l.pages.Adopt(ctx, req)
			return err
		})
	} else {
		var msg *kvtierv1.AttachResponse
		msg, err = l.ask(ctx, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Adopt{Adopt: req}}, c.cfg.CallTimeout)
		if resp = msg.GetAdopt(); err == nil && resp == nil {
			err = errAnswer
		}
	}
	if err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}
	lease := &Lease{
		ID: resp.GetLeaseId(), Usable: int(resp.GetUsableBlocks()), Parts: paging.PartSet(resp.GetParts()),
		link: l, slots: resp.GetSlots(),
	}
	if err := l.accept(ctx, lease, nil, ModeSet, paging.MaxCallBlocks); err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}
	return lease, nil
}

// DropDecision ends a decision that Fetch made with ForGroup: who has not
// adopted it does not any more. It does not wait for the node.
func (c *Client) DropDecision(token []byte) error {
	l, err := c.attached("drop decision")
	if err != nil {
		return err
	}
	l.abandonLease(0, token)
	return nil
}

// Renew extends leases to ttl from now (0: the node's default). ErrExpired names
// those that are not held any more. With no lease it is the cheapest call there
// is: it only asks the node for an answer.
func (c *Client) Renew(ctx context.Context, ttl time.Duration, leases ...*Lease) error {
	l, err := c.up()
	if err != nil {
		return fmt.Errorf("renew: %w", err)
	}
	req := &kvtierv1.RenewRequest{LeaseTtl: span(ttl)}
	for _, lease := range leases {
		if err := lease.Err(); err != nil {
			return fmt.Errorf("renew: %w", err)
		}
		req.LeaseIds = append(req.LeaseIds, lease.ID)
	}
	var resp *kvtierv1.RenewResponse
	if l.mux == nil || c.cfg.UnaryCalls {
		req.Attachment = l.id
		err = l.unary(ctx, "unary", c.cfg.CallTimeout, func(ctx context.Context) (err error) {
			resp, err = l.pages.Renew(ctx, req)
			return err
		})
	} else {
		var msg *kvtierv1.AttachResponse
		msg, err = l.ask(ctx, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Renew{Renew: req}}, c.cfg.CallTimeout)
		resp = msg.GetRenew()
	}
	if err != nil {
		return fmt.Errorf("renew: %w", err)
	}
	if unknown := resp.GetUnknown(); len(unknown) > 0 {
		return fmt.Errorf("renew: leases %d are not held any more: %w", unknown, paging.ErrExpired)
	}
	return nil
}

// release asks the node to end leases.
func (l *link) release(ctx context.Context, req *kvtierv1.ReleaseRequest) (resp *kvtierv1.ReleaseResponse, err error) {
	if l.silent.Load() {
		return nil, paging.ErrUnavailable
	}
	if l.client.cfg.UnaryCalls {
		req.Attachment = l.id
		err = l.unary(ctx, "release", l.client.cfg.CallTimeout, func(ctx context.Context) (err error) {
			resp, err = l.pages.Release(ctx, req)
			return err
		})
		return resp, err
	}
	msg, err := l.ask(ctx, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Release{Release: req}}, l.client.cfg.CallTimeout)
	return msg.GetRelease(), err
}

// attached is the link of a call that needs an attachment.
func (c *Client) attached(verb string) (*link, error) {
	l, err := c.up()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	if l.mux == nil {
		return nil, fmt.Errorf("%s: needs an attachment (Config.Socket): %w", verb, paging.ErrInvalid)
	}
	return l, nil
}

// checkLengths compares the length of each page with the layout. nil: nothing is known.
func (n *namespace) checkLengths(slots []byte, parts paging.PartSet) error {
	if n == nil {
		return nil
	}
	if !n.Layout.AllParts().Contains(parts) {
		return fmt.Errorf("part set %#x of a layout of %d parts: %w", uint64(parts), len(n.pageBytes), paging.ErrInvalid)
	}
	cols := parts.Len()
	for col, part := 0, 0; part < len(n.pageBytes); part++ {
		if !parts.Has(part) {
			continue
		}
		want := n.pageBytes[part]
		for at := col * paging.SlotBytes; at < len(slots); at += cols * paging.SlotBytes {
			if got := slotBytes(slots[at:]); got != 0 && uint64(got) != want {
				return fmt.Errorf("page of part %d has %d bytes, the layout says %d: %w", part, got, want, paging.ErrInvalid)
			}
		}
		col++
	}
	return nil
}

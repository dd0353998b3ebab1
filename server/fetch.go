package server

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// fetchCall is one Fetch under way.
type fetchCall struct {
	request *rpc.FetchRequest
	layout  *paging.Layout
	parts   paging.PartSet // wanted
	pinned  paging.PartSet // of the hold: all parts for a group
	first   int            // position of the first named block
}

// FetchResident implements rpc.Reader.
func (a *attachment) FetchResident(r *rpc.FetchRequest, res *rpc.FetchResult) (bool, error) {
	c, err := a.prepare(r)
	if err != nil {
		return false, err
	}
	req := c.tierRequest()
	req.Resident, req.NoWait = r.Timeout <= 0, r.Timeout > 0
	h, err := a.node.hier.Fetch(a.node.ctx, req)
	if err != nil || h == nil {
		return false, err
	}
	return true, a.grant(&c, h, res)
}

// Fetch implements rpc.Reader.
func (a *attachment) Fetch(ctx context.Context, r *rpc.FetchRequest, res *rpc.FetchResult) error {
	c, err := a.prepare(r)
	if err != nil {
		return err
	}
	h, err := a.node.hier.Fetch(ctx, c.tierRequest())
	if err != nil {
		return err
	}
	return a.grant(&c, h, res)
}

// prepare checks a request against its layout and the lease that it goes on from.
func (a *attachment) prepare(r *rpc.FetchRequest) (fetchCall, error) {
	c := fetchCall{request: r, first: r.First}
	if a.node.stopping.Load() {
		return c, errStopping
	}
	if err := a.checkWanted(r.Wanted); err != nil {
		return c, err
	}
	var err error
	if c.layout, err = a.namespace(r.Namespace); err != nil {
		return c, err
	}
	if c.parts, err = partsOf(c.layout, r.Parts, c.layout.AllParts()); err != nil {
		return c, err
	}
	c.pinned = c.parts
	if r.ForGroup { // the prefix is decided for all parts of the group, wherever they are read
		if a.group == nil {
			return c, fmt.Errorf("for_group from an attachment without a group: %w", paging.ErrInvalid)
		}
		c.pinned = r.Parts | a.group.parts(c.layout)
		if r.Parts == 0 {
			c.parts = c.pinned
		}
	}
	if pages := len(r.Names) * c.pinned.Len(); pages > paging.MaxCallPages {
		return c, fmt.Errorf("%d blocks of %d parts are %d pages, at most %d in a call: %w", len(r.Names), c.pinned.Len(), pages, paging.MaxCallPages, paging.ErrInvalid)
	}
	if r.PrefixLease != 0 {
		c.first, err = a.afterLease(r)
	}
	return c, err
}

// partsOf checks a part set that a call names: 0 means def.
func partsOf(l *paging.Layout, parts, def paging.PartSet) (paging.PartSet, error) {
	if parts == 0 {
		return def, nil
	}
	if !l.AllParts().Contains(parts) {
		return 0, fmt.Errorf("part set %#x: the layout has %d parts: %w", uint64(parts), len(l.Parts), paging.ErrInvalid)
	}
	return parts, nil
}

// afterLease is the position where the blocks of a lease end.
func (a *attachment) afterLease(r *rpc.FetchRequest) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	l, ok := a.leases.held[r.PrefixLease]
	switch {
	case !ok:
		return 0, fmt.Errorf("prefix_lease %d is not held: %w", r.PrefixLease, paging.ErrNotFound)
	case l.namespace != r.Namespace:
		return 0, fmt.Errorf("prefix_lease %d is of another namespace: %w", r.PrefixLease, paging.ErrInvalid)
	case r.First != 0 && r.First != l.blocks:
		return 0, fmt.Errorf("first_block is %d, but prefix_lease ends at %d: %w", r.First, l.blocks, paging.ErrInvalid)
	}
	return l.blocks, nil
}

func (c *fetchCall) tierRequest() tier.FetchRequest {
	mode := tier.ModePrefix
	if c.request.Set {
		mode = tier.ModeSet
	}
	return tier.FetchRequest{
		Namespace: c.request.Namespace, Names: c.request.Names, First: c.first, Parts: c.pinned,
		Mode: mode, Wanted: tier.Kind(c.request.Wanted),
	}
}

// grant turns a hold into a lease of the attachment and fills res. It owns h.
func (a *attachment) grant(c *fetchCall, h *tier.Hold, res *rpc.FetchResult) error {
	fillFetch(c, h, res)
	if len(h.Slots) == 0 {
		h.Release()
		return nil
	}
	var pins hold = h
	if c.request.ForGroup {
		shared := &sharedHold{Hold: h}
		pins = shared.share()
		if err := a.decide(c, shared.share(), res); err != nil {
			pins.Release()
			shared.Release()
			return err
		}
	}
	ttl := c.request.TTL
	if ttl == 0 {
		ttl = a.node.cfg.LeaseTTL
	}
	res.TTL = ttl
	blocks := c.first + res.Usable
	var err error
	res.Lease, err = a.lease(pins, c.request.Namespace, blocks, heldBytes(h.Slots), ttl)
	if err != nil {
		if res.Token != nil {
			a.group.drop(*res.Token)
		}
		return err
	}
	return nil
}

// fillFetch packs what was decided.
func fillFetch(c *fetchCall, h *tier.Hold, res *rpc.FetchResult) {
	res.Usable = h.Usable
	res.Parts = c.parts
	if !c.request.Set {
		res.Tokens = uint64(h.Usable) * uint64(c.layout.BlockTokens)
	}
	res.Slots = appendColumns(res.Slots[:0], h.Slots, h.Parts, c.parts)
	res.Tiers = res.Tiers[:0]
	for _, t := range h.Tiers {
		res.Tiers = append(res.Tiers, byte(t))
	}
	res.Short = res.Short[:0]
	for _, s := range h.Short {
		res.Short = append(res.Short, rpc.Shortfall{Block: s.Block, Count: s.Count, Reason: uint8(s.Reason)})
	}
}

func heldBytes(slots []paging.Slot) int64 {
	var n int64
	for i := range slots {
		n += int64(slots[i].Bytes)
	}
	return n
}

// decide gives the group the decision; it owns pins, also on error.
func (a *attachment) decide(c *fetchCall, pins *sharedHold, res *rpc.FetchResult) error {
	life := max(minTokenLife, c.request.TTL, a.node.cfg.LeaseTTL)
	d := &decision{
		pins: pins, namespace: c.request.Namespace, layout: c.layout, first: c.first, usable: res.Usable,
		deadline: time.Now().Add(life),
	}
	token, err := a.group.decide(d, c.pinned)
	if err != nil {
		return err
	}
	res.Token = &token
	return nil
}

// lease takes pins as a lease; on error they were released.
func (a *attachment) lease(pins hold, ns paging.NamespaceID, blocks int, bytes int64, ttl time.Duration) (uint64, error) {
	id := a.node.nextLease()
	l := &lease{hold: pins, namespace: ns, blocks: blocks, bytes: bytes, deadline: time.Now().Add(ttl)}
	a.mu.Lock()
	err := error(nil)
	switch {
	case a.state != attached || a.err != nil:
		err = errDetached
	case len(a.leases.held) >= maxLeases:
		err = fmt.Errorf("the attachment holds %d leases, the most at once: release some: %w", maxLeases, paging.ErrUnavailable)
	default:
		a.leases.add(id, l)
	}
	a.mu.Unlock()
	if err != nil {
		pins.Release()
		return 0, err
	}
	return id, nil
}

// Adopt implements rpc.Reader.
func (a *attachment) Adopt(token rpc.ID, parts paging.PartSet, res *rpc.FetchResult) error {
	if a.group == nil {
		return fmt.Errorf("adopt from an attachment without a group: %w", paging.ErrInvalid)
	}
	d, err := a.group.find(token)
	if err != nil {
		return err
	}
	if parts, err = partsOf(d.layout, parts, d.layout.PartsOfRanks(a.ranks)); err != nil {
		return err
	}
	pins, err := a.group.adopt(token, parts, a.ranks)
	if err != nil {
		return err
	}
	res.Usable, res.Parts, res.TTL = d.usable, parts, a.node.cfg.LeaseTTL
	res.Slots = appendColumns(res.Slots[:0], pins.Slots, pins.Parts, parts)
	var bytes int64
	for at := 0; at < len(res.Slots); at += paging.SlotBytes {
		slot, err := paging.DecodeSlot(res.Slots[at:])
		if err != nil {
			pins.Release()
			return err
		}
		bytes += int64(slot.Bytes)
	}
	res.Lease, err = a.lease(pins, d.namespace, d.first+d.usable, bytes, res.TTL)
	return err
}

// Release implements rpc.Reader.
func (a *attachment) Release(ids []uint64, tokens []rpc.ID, lost []uint64) []uint64 {
	type released struct {
		id   uint64
		hold hold
	}
	var few [8]released
	ended := few[:0]
	a.mu.Lock()
	for _, id := range ids {
		h, ok := a.leases.remove(id)
		if !ok {
			continue
		}
		ended = append(ended, released{id, h})
	}
	a.mu.Unlock()
	for _, e := range ended {
		if !e.hold.Release() {
			lost = append(lost, e.id)
		}
	}
	if a.group != nil {
		for _, token := range tokens {
			a.group.drop(token)
		}
	}
	a.node.counters.leasesLost.Add(uint64(len(lost)))
	return lost
}

// Renew implements rpc.Reader.
func (a *attachment) Renew(ids []uint64, ttl time.Duration, unknown []uint64) []uint64 {
	if len(ids) == 0 {
		return unknown
	}
	if ttl == 0 {
		ttl = a.node.cfg.LeaseTTL
	}
	deadline := time.Now().Add(ttl)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range ids {
		if !a.leases.renew(id, deadline) {
			unknown = append(unknown, id)
		}
	}
	return unknown
}

// Revoked implements rpc.Reader: the client has let go of these, as by Release.
func (a *attachment) Revoked(ids []uint64) {
	a.Release(ids, nil, nil)
}

// Lookup implements rpc.Node.
func (n *node) Lookup(ctx context.Context, c rpc.Caller, r *rpc.LookupRequest) (rpc.LookupResult, error) {
	layout, err := n.namespace(c.Tenant, r.Namespace)
	if err != nil {
		return rpc.LookupResult{}, err
	}
	parts, err := partsOf(layout, r.Parts, layout.AllParts())
	if err != nil {
		return rpc.LookupResult{}, err
	}
	p, err := n.hier.Lookup(r.Namespace, r.Names, parts)
	if err != nil {
		return rpc.LookupResult{}, err
	}
	tiers := make([]byte, len(p.Tiers))
	for i, t := range p.Tiers {
		tiers[i] = byte(t)
	}
	return rpc.LookupResult{Usable: p.Usable, Tokens: p.Tokens, Tiers: tiers}, nil
}

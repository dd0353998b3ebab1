package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// This file is the test node's handling of pages.

func (n *testNode) RegisterNamespace(_ context.Context, r *kvtierv1.RegisterNamespaceRequest) (*kvtierv1.RegisterNamespaceResponse, error) {
	l := r.GetLayout()
	ns := &paging.Namespace{Tenant: testTenant, Salt: r.GetSalt(), Layout: paging.Layout{
		Model: l.GetModel(), Revision: l.GetRevision(), DType: l.GetDtype(), KVDType: l.GetKvDtype(),
		Attention: l.GetAttention(), Layers: l.GetLayers(), KVHeads: l.GetKvHeads(), HeadDim: l.GetHeadDim(),
		EngineLayout: l.GetEngineLayout(), EngineEpoch: l.GetEngineEpoch(),
		TP: l.GetTensorParallel(), PP: l.GetPipelineParallel(), CP: l.GetContextParallel(),
		ISA: l.GetIsa(), HashAlgorithm: l.GetHashAlgorithm(), HashSeed: l.GetHashSeed(), BlockTokens: l.GetBlockTokens(),
	}}
	for _, p := range l.GetParts() {
		ns.Layout.Parts = append(ns.Layout.Parts, paging.Part{
			Name: p.GetName(), PageBytes: p.GetPageBytes(), BlocksPerPage: p.GetBlocksPerPage(), LastBlocks: p.GetLastBlocks(), Ranks: p.GetRanks(),
		})
	}
	if err := ns.Validate(); err != nil {
		return nil, kvstatus.Status(err)
	}
	id := ns.ID()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.namespaces[id] = ns
	return &kvtierv1.RegisterNamespaceResponse{NamespaceId: id[:]}, nil
}

func unpack(b []byte) []paging.BlockName {
	var names []paging.BlockName
	for ; len(b) >= 32; b = b[32:] {
		names = append(names, paging.BlockName(b))
	}
	return names
}

// namespaceLocked finds a namespace and the parts that 0 stands for.
func (n *testNode) namespaceLocked(id []byte, parts uint64) (paging.NamespaceID, *paging.Layout, paging.PartSet, error) {
	nsid := paging.NamespaceID(id)
	ns := n.namespaces[nsid]
	if ns == nil {
		return nsid, nil, 0, fmt.Errorf("namespace %s: %w", nsid.Short(), paging.ErrUnknownNamespace)
	}
	if parts == 0 {
		return nsid, &ns.Layout, ns.Layout.AllParts(), nil
	}
	return nsid, &ns.Layout, paging.PartSet(parts), nil
}

func (n *testNode) haveLocked(ns paging.NamespaceID, name paging.BlockName) paging.PartSet {
	var have paging.PartSet
	for part := range n.namespaces[ns].Layout.Parts {
		if n.pages[testKey{ns, name, part}] != nil {
			have = have.With(part)
		}
	}
	return have
}

func (n *testNode) Lookup(_ context.Context, r *kvtierv1.LookupRequest) (*kvtierv1.LookupResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ns, layout, parts, err := n.namespaceLocked(r.GetNamespaceId(), r.GetParts())
	if err != nil {
		return nil, kvstatus.Status(err)
	}
	names := unpack(r.GetBlockNames())
	usable := layout.UsablePrefix(len(names), parts, func(i int) paging.PartSet { return n.haveLocked(ns, names[i]) })
	tiers := make([]byte, len(names))
	for i, name := range names {
		if n.haveLocked(ns, name).Contains(layout.PagesAt(i, parts)) {
			tiers[i] = byte(kvtierv1.Tier_TIER_RAM)
		}
	}
	return &kvtierv1.LookupResponse{UsableBlocks: uint32(usable), UsableTokens: uint64(usable) * uint64(layout.BlockTokens), Tiers: tiers}, nil
}

func (n *testNode) attachment(id []byte) (*testAttachment, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(id) == 16 && n.attachments[shm.AttachmentID(id)] != nil {
		return n.attachments[shm.AttachmentID(id)], nil
	}
	return nil, kvstatus.Status(paging.ErrUnknownAttachment)
}

func (n *testNode) Fetch(_ context.Context, r *kvtierv1.FetchRequest) (*kvtierv1.FetchResponse, error) {
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	resp, err := n.fetch(a, r)
	return resp, kvstatus.Status(err)
}

func (n *testNode) Renew(_ context.Context, r *kvtierv1.RenewRequest) (*kvtierv1.RenewResponse, error) {
	if len(r.GetLeaseIds()) == 0 {
		return &kvtierv1.RenewResponse{}, nil
	}
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	return a.renew(r), nil
}

func (n *testNode) Release(_ context.Context, r *kvtierv1.ReleaseRequest) (*kvtierv1.ReleaseResponse, error) {
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	return a.release(r), nil
}

func (n *testNode) fetch(a *testAttachment, r *kvtierv1.FetchRequest) (*kvtierv1.FetchResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ns, layout, parts, err := n.namespaceLocked(r.GetNamespaceId(), r.GetParts())
	if err != nil {
		return nil, err
	}
	names, first := unpack(r.GetBlockNames()), int(r.GetFirstBlock())
	resp, keys := n.chooseLocked(ns, layout, parts, names, first, r.GetMode())
	if len(keys) == 0 {
		resp.Slots, resp.Tiers = nil, nil
		return resp, nil
	}
	n.lastLease++
	resp.LeaseId, resp.LeaseTtl = n.lastLease, durationpb.New(n.ttl)
	if r.GetLeaseTtl() != nil {
		resp.LeaseTtl = r.GetLeaseTtl()
	}
	a.leases[n.lastLease] = keys
	if n.mangle != nil {
		n.mangle(resp)
	}
	return resp, nil
}

// chooseLocked decides which pages a fetch gets.
func (n *testNode) chooseLocked(ns paging.NamespaceID, layout *paging.Layout, parts paging.PartSet, names []paging.BlockName, first int, mode kvtierv1.FetchMode) (*kvtierv1.FetchResponse, []testKey) {
	have := func(position int) paging.PartSet {
		if position < first {
			return parts
		}
		return n.haveLocked(ns, names[position-first])
	}
	set := mode == kvtierv1.FetchMode_FETCH_MODE_SET
	resp := &kvtierv1.FetchResponse{Parts: uint64(parts)}
	usable := layout.UsablePrefix(first+len(names), parts, have)
	rows := max(usable-first, 0)
	if set {
		rows = len(names)
	} else {
		resp.UsableBlocks, resp.UsableTokens = uint32(rows), uint64(rows)*uint64(layout.BlockTokens)
		if rows < len(names) {
			resp.Shortfalls = []*kvtierv1.Shortfall{{Block: uint32(rows), Count: uint32(len(names) - rows), Reason: kvtierv1.Reason_REASON_NOT_FOUND}}
		}
	}
	var keys []testKey
	for row := range rows {
		want := layout.Needed(usable, first+row, parts)
		if set {
			if want = layout.PagesAt(first+row, parts); have(first + row).Contains(want) {
				resp.UsableBlocks++
			}
		}
		tier := byte(0)
		for part := range layout.Parts {
			if !parts.Has(part) {
				continue
			}
			slot := paging.Slot{}
			if p := n.pages[testKey{ns, names[row], part}]; p != nil && want.Has(part) {
				slot, tier = p.slot, byte(kvtierv1.Tier_TIER_RAM)
				keys = append(keys, testKey{ns, names[row], part})
			}
			resp.Slots = paging.AppendSlot(resp.Slots, slot)
		}
		resp.Tiers = append(resp.Tiers, tier)
	}
	return resp, keys
}

func (n *testNode) Reserve(ctx context.Context, r *kvtierv1.ReserveRequest) (out *kvtierv1.ReserveResponse, err error) {
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	if n.deaf.Load() { // the answer is ready, but does not arrive, even if this side sees the deadline first
		defer func() {
			<-ctx.Done()
			out, err = nil, status.FromContextError(ctx.Err()).Err()
		}()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	ns, layout, parts, err := n.namespaceLocked(r.GetNamespaceId(), r.GetParts())
	if err != nil {
		return nil, kvstatus.Status(err)
	}
	names := unpack(r.GetBlockNames())
	resp := &kvtierv1.ReserveResponse{Outcomes: make([]byte, len(names)), Parts: uint64(parts)}
	ttl := kvstatus.DefaultAttemptTTL
	if r.GetTtl() != nil {
		ttl = r.GetTtl().AsDuration()
	}
	at := &testAttempt{until: time.Now().Add(ttl)}
	seen := map[paging.BlockName]bool{}
	for i, name := range names {
		pages := layout.PagesAt(int(r.GetFirstBlock())+i, parts)
		switch {
		case seen[name]:
			resp.Outcomes[i] = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_REPEATED)
			continue
		case pages != 0 && n.haveLocked(ns, name).Contains(pages):
			resp.Outcomes[i] = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_EXISTS)
			continue
		}
		seen[name] = true
		if len(a.staging.free) < pages.Len() {
			resp.Outcomes[i] = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_STAGING_FULL)
			break
		}
		resp.Outcomes[i] = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_GRANTED)
		resp.Slots = at.grant(a, layout, parts, pages, testKey{ns: ns, name: name}, resp.Slots)
	}
	if len(at.open) > 0 {
		token := r.GetAttempt()
		resp.Attempt = token
		a.attempts[string(token)] = at
	}
	return resp, nil
}

// grant adds a row to the attempt and its slot references to refs.
func (at *testAttempt) grant(a *testAttachment, layout *paging.Layout, parts, pages paging.PartSet, key testKey, refs []byte) []byte {
	var keys []testKey
	var slots []paging.Slot
	for part := range layout.Parts {
		if !parts.Has(part) {
			continue
		}
		slot := paging.Slot{}
		if pages.Has(part) {
			last := len(a.staging.free) - 1
			slot = paging.Slot{Extent: a.staging.id, Bytes: uint32(layout.Parts[part].PageBytes), Offset: a.staging.free[last]}
			a.staging.free = a.staging.free[:last]
			key.part = part
			keys, slots = append(keys, key), append(slots, slot)
		}
		refs = paging.AppendSlot(refs, slot)
	}
	at.keys, at.slots, at.open = append(at.keys, keys), append(at.slots, slots), append(at.open, true)
	return refs
}

func (n *testNode) Commit(_ context.Context, r *kvtierv1.CommitRequest) (*kvtierv1.CommitResponse, error) {
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	at := a.attempts[string(r.GetAttempt())]
	if at == nil {
		n.mu.Unlock()
		return nil, kvstatus.Status(fmt.Errorf("attempt: %w", paging.ErrClosed))
	}
	var rows []int
	for b := r.GetRows(); len(b) >= 4; b = b[4:] {
		rows = append(rows, int(binary.LittleEndian.Uint32(b)))
	}
	resp := &kvtierv1.CommitResponse{}
	for _, row := range rows {
		outcome := kvtierv1.WriteOutcome_WRITE_OUTCOME_COMMITTED
		if time.Now().After(at.until) {
			resp.Outcomes = append(resp.Outcomes, byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_EXPIRED))
			continue
		}
		for i, key := range at.keys[row] {
			s := at.slots[row][i]
			same, err := n.storeLocked(key, a.staging.mem.Bytes()[s.Offset:s.Offset+uint64(s.Bytes)])
			if err != nil {
				n.mu.Unlock()
				return nil, kvstatus.Status(err)
			}
			outcome = max(outcome, same)
			a.staging.free = append(a.staging.free, s.Offset)
		}
		at.open[row] = false
		resp.Outcomes = append(resp.Outcomes, byte(outcome))
	}
	n.mu.Unlock()
	n.handOver(a)
	return resp, nil
}

// storeLocked copies a page into an extent, unless it is there.
func (n *testNode) storeLocked(key testKey, src []byte) (kvtierv1.WriteOutcome, error) {
	if p := n.pages[key]; p != nil {
		if p.slot.Sum == paging.Checksum(src) {
			return kvtierv1.WriteOutcome_WRITE_OUTCOME_DUPLICATE, nil
		}
		return kvtierv1.WriteOutcome_WRITE_OUTCOME_DUPLICATE_DIVERGENT, nil
	}
	e, offset, err := n.allocLocked()
	if err != nil {
		return 0, err
	}
	mem := e.mem.Bytes()[offset : offset+uint64(len(src))]
	sum := paging.CopyChecksum(mem, src)
	n.pages[key] = &testPage{mem: mem, slot: paging.Slot{
		Extent: e.id, Bytes: uint32(len(src)), Offset: offset, Sum: sum, Generation: shm.Of(e.mem.Bytes()).Load(offset),
	}}
	return kvtierv1.WriteOutcome_WRITE_OUTCOME_COMMITTED, nil
}

func (n *testNode) Abort(_ context.Context, r *kvtierv1.AbortRequest) (*kvtierv1.AbortResponse, error) {
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	a.abort(r.GetAttempt())
	return &kvtierv1.AbortResponse{}, nil
}

func (a *testAttachment) abort(token []byte) {
	a.node.mu.Lock()
	defer a.node.mu.Unlock()
	if at := a.attempts[string(token)]; at != nil {
		for row, open := range at.open {
			for _, s := range at.slots[row] {
				if open {
					a.staging.free = append(a.staging.free, s.Offset)
				}
			}
		}
		delete(a.attempts, string(token))
	}
}

// Prefetch reports every block ready in two events, the first of which may come
// before the answer.
func (n *testNode) Prefetch(_ context.Context, r *kvtierv1.PrefetchRequest) (*kvtierv1.PrefetchResponse, error) {
	a, err := n.attachment(r.GetAttachment())
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.lastTicket++
	ticket := n.lastTicket
	n.mu.Unlock()
	names := len(unpack(r.GetBlockNames()))
	var ready []byte
	for i := range names {
		ready = binary.LittleEndian.AppendUint32(ready, uint32(i))
	}
	half := len(ready) / 8 * 4
	if err := a.progress(ticket, ready[:half], false); err != nil {
		return nil, err
	}
	if r.GetPriority() > 0 {
		if err := a.progress(ticket, ready[half:], true); err != nil {
			return nil, err
		}
	}
	return &kvtierv1.PrefetchResponse{Ticket: ticket, AdmittedBlocks: uint32(names)}, nil
}

func (a *testAttachment) progress(ticket uint64, ready []byte, done bool) error {
	return a.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Prefetch{
		Prefetch: &kvtierv1.PrefetchProgress{Ticket: ticket, Ready: ready, Done: done},
	}})
}

func (n *testNode) Cancel(context.Context, *kvtierv1.CancelRequest) (*kvtierv1.CancelResponse, error) {
	return &kvtierv1.CancelResponse{}, nil
}

func (n *testNode) Drop(_ context.Context, r *kvtierv1.DropRequest) (*kvtierv1.DropResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	resp := &kvtierv1.DropResponse{}
	for _, name := range unpack(r.GetBlockNames()) {
		outcome := kvtierv1.ItemOutcome_ITEM_OUTCOME_MISSING
		for part := range 64 {
			if key := (testKey{paging.NamespaceID(r.GetNamespaceId()), name, part}); n.pages[key] != nil {
				delete(n.pages, key)
				outcome = kvtierv1.ItemOutcome_ITEM_OUTCOME_ACCEPTED
			}
		}
		resp.Outcomes = append(resp.Outcomes, byte(outcome))
	}
	return resp, nil
}

func (n *testNode) ReadPages(r *kvtierv1.ReadPagesRequest, stream grpc.ServerStreamingServer[kvtierv1.ReadPagesResponse]) error {
	n.mu.Lock()
	ns, layout, parts, err := n.namespaceLocked(r.GetNamespaceId(), r.GetParts())
	if err != nil {
		n.mu.Unlock()
		return kvstatus.Status(err)
	}
	names := unpack(r.GetBlockNames())
	resp, keys := n.chooseLocked(ns, layout, parts, names, int(r.GetFirstBlock()), r.GetMode())
	pages := map[testKey]*testPage{}
	for _, key := range keys {
		pages[key] = n.pages[key]
	}
	if n.mangle != nil {
		n.mangle(resp)
	}
	n.mu.Unlock()
	err = stream.Send(&kvtierv1.ReadPagesResponse{Message: &kvtierv1.ReadPagesResponse_Header{Header: &kvtierv1.ReadPagesHeader{
		UsableBlocks: resp.GetUsableBlocks(), UsableTokens: resp.GetUsableTokens(), Tiers: resp.GetTiers(),
		Shortfalls: resp.GetShortfalls(), Parts: uint64(parts),
	}}})
	for block, name := range names {
		for part := range layout.Parts {
			p := pages[testKey{ns, name, part}]
			for offset := 0; p != nil && offset < len(p.mem) && err == nil; offset += 10_000 {
				err = stream.Send(&kvtierv1.ReadPagesResponse{Message: &kvtierv1.ReadPagesResponse_Chunk{Chunk: &kvtierv1.PageChunk{
					Block: uint32(block), Part: uint32(part), Offset: uint64(offset), Data: p.mem[offset:min(offset+10_000, len(p.mem))],
					PageBytes: uint64(len(p.mem)), Checksum: p.slot.Sum,
				}}})
			}
		}
	}
	return err
}

func (n *testNode) WritePages(stream grpc.ClientStreamingServer[kvtierv1.WritePagesRequest, kvtierv1.WritePagesResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	h := first.GetHeader()
	names := unpack(h.GetBlockNames())
	resp := &kvtierv1.WritePagesResponse{Outcomes: make([]byte, len(names))}
	var page []byte
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(resp)
		}
		if err != nil {
			return err
		}
		c := m.GetChunk()
		if c.GetOffset() == 0 {
			page = nil
		}
		page = append(page, c.GetData()...)
		if uint64(len(page)) < c.GetPageBytes() {
			continue
		}
		outcome := kvtierv1.WriteOutcome_WRITE_OUTCOME_CORRUPT
		if paging.Checksum(page) == c.GetChecksum() {
			n.mu.Lock()
			outcome, err = n.storeLocked(testKey{paging.NamespaceID(h.GetNamespaceId()), names[c.GetBlock()], int(c.GetPart())}, page)
			n.mu.Unlock()
			if err != nil {
				return kvstatus.Status(err)
			}
		}
		resp.Outcomes[c.GetBlock()] = max(resp.Outcomes[c.GetBlock()], byte(outcome))
	}
}

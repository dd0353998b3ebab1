package server

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/tier"
)

// admin is the AdminService of this node. Package rpc lets only operators reach it.
type admin struct {
	kvtierv1.UnimplementedAdminServiceServer
	node *node
}

// GetStatus tells how the node is.
func (s *admin) GetStatus(context.Context, *kvtierv1.GetStatusRequest) (*kvtierv1.GetStatusResponse, error) {
	n := s.node
	m := n.metrics()
	out := &kvtierv1.GetStatusResponse{
		Node: n.identity.node[:], Incarnation: n.identity.incarnation, Version: n.version, Started: timestamppb.New(n.started),
		State: n.state(), Problems: n.problems(),
		Attachments: uint32(m.Attachments), OrphanTethers: uint32(m.OrphanTethers),
		Leases: uint64(m.Leases), OverdueLeases: uint64(m.OverdueLeases), Attempts: uint64(m.Attempts),
		Counters: counterValues(&m), Tiers: n.tierStatus(&m), Cluster: n.clusterStatus(),
	}
	for _, f := range n.cfg.Fields() {
		out.Config = append(out.Config, &kvtierv1.ConfigValue{Name: f.Name, Value: f.Value, Origin: f.Origin})
	}
	return out, nil
}

// ListTiers tells what each tier holds.
func (s *admin) ListTiers(context.Context, *kvtierv1.ListTiersRequest) (*kvtierv1.ListTiersResponse, error) {
	m := s.node.metrics()
	return &kvtierv1.ListTiersResponse{Tiers: s.node.tierStatus(&m)}, nil
}

// ListAttachments lists attachments and tethers, oldest first.
func (s *admin) ListAttachments(context.Context, *kvtierv1.ListAttachmentsRequest) (*kvtierv1.ListAttachmentsResponse, error) {
	all := s.node.attachments.all()
	slices.SortFunc(all, func(a, b *attachment) int { return a.since.Compare(b.since) })
	out := &kvtierv1.ListAttachmentsResponse{}
	now := time.Now()
	for _, a := range all {
		out.Attachments = append(out.Attachments, a.info(now))
	}
	return out, nil
}

func (a *attachment) info(now time.Time) *kvtierv1.AttachmentInfo {
	a.mu.Lock()
	defer a.mu.Unlock()
	engine := a.engine
	if a.version != "" {
		engine += " " + a.version
	}
	info := &kvtierv1.AttachmentInfo{
		Id: shortID(a.id), Engine: engine, Tenant: a.caller.Tenant, Pid: uint32(a.caller.PID), State: a.state.String(),
		Leases: uint64(len(a.leases.held)), LeasedBytes: uint64(a.leases.bytes), StagingBytes: uint64(a.staging.bytes),
		Age: durationpb.New(now.Sub(a.since)),
	}
	if a.group != nil {
		info.Group = a.group.key.name
	}
	if a.state != attached {
		info.OrphanFor = durationpb.New(now.Sub(a.streamEnded))
		if a.tethers > 0 && now.Sub(a.streamEnded) >= orphanAfter {
			info.State = "orphan"
		}
	}
	return info
}

// Bounds of ListBlocks and GetBlock.
const (
	defaultBlockPage = 100
	maxBlockPage     = 10000
	minNameDigits    = 4
)

func wrongRequest(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, paging.ErrInvalid)...)
}

// ListBlocks lists blocks in order of namespace and name. The page token is the
// last block of the page before, in hex.
func (s *admin) ListBlocks(_ context.Context, m *kvtierv1.ListBlocksRequest) (*kvtierv1.ListBlocksResponse, error) {
	q := tier.BlockQuery{Tier: tier.Kind(m.GetTier()), Limit: int(m.GetPageSize())}
	if b := m.GetNamespaceId(); len(b) > 0 {
		if len(b) != len(paging.NamespaceID{}) {
			return nil, wrongRequest("namespace_id has %d bytes, want 32", len(b))
		}
		ns := paging.NamespaceID(b)
		q.Namespace = &ns
	}
	if q.Limit == 0 {
		q.Limit = defaultBlockPage
	}
	if q.Limit > maxBlockPage {
		return nil, wrongRequest("page_size is %d, at most %d", q.Limit, maxBlockPage)
	}
	var err error
	if q.After, err = parsePageToken(m.GetPageToken()); err != nil {
		return nil, err
	}
	blocks, err := s.node.hier.Blocks(q)
	if err != nil {
		return nil, err
	}
	out := &kvtierv1.ListBlocksResponse{}
	for i := range blocks {
		out.Blocks = append(out.Blocks, encodeBlock(&blocks[i]))
	}
	if len(blocks) == q.Limit {
		last := blocks[len(blocks)-1].ID
		out.NextPageToken = last.Namespace.String() + last.Name.String()
	}
	return out, nil
}

func parsePageToken(token string) (*paging.BlockID, error) {
	if token == "" {
		return nil, nil
	}
	b, err := hex.DecodeString(token)
	if err != nil || len(b) != 64 {
		return nil, wrongRequest("page_token was not made by this service")
	}
	return &paging.BlockID{Namespace: paging.NamespaceID(b), Name: paging.BlockName(b[32:])}, nil
}

func encodeBlock(b *tier.BlockInfo) *kvtierv1.BlockInfo {
	out := &kvtierv1.BlockInfo{
		NamespaceId: b.ID.Namespace[:], Name: b.ID.Name[:], Tenant: b.Tenant, Model: b.Model,
		Parts: uint64(b.RAM | b.Disk | b.Device), Bytes: uint64(b.Bytes), Position: uint32(b.Position), Hits: uint32(b.Hits),
		Priority: uint32(b.Priority), Leases: uint32(b.Leases), Idle: durationpb.New(b.Idle),
	}
	if b.Retained > 0 {
		out.RetentionLeft = durationpb.New(b.Retained)
	}
	for _, k := range b.Tiers() {
		out.Tiers = append(out.Tiers, kvtierv1.Tier(k))
	}
	return out
}

// GetBlock tells all about the one block whose name begins so.
func (s *admin) GetBlock(ctx context.Context, m *kvtierv1.GetBlockRequest) (*kvtierv1.GetBlockResponse, error) {
	id, err := s.findBlock(m.GetName())
	if err != nil {
		return nil, err
	}
	info, pages, err := s.node.hier.Block(ctx, id, m.GetVerify())
	if err != nil {
		return nil, err
	}
	out := &kvtierv1.GetBlockResponse{Block: encodeBlock(&info)}
	for _, p := range pages {
		out.Pages = append(out.Pages, &kvtierv1.PageInfo{
			Part: uint32(p.Part), PartName: p.PartName, Key: p.Key[:], Bytes: uint64(p.Bytes), Checksum: p.Sum,
			Tier: kvtierv1.Tier(p.Tier), Place: p.Place, Verdict: p.Verdict,
		})
	}
	return out, nil
}

// findBlock finds the one block whose name begins with these hex digits.
func (s *admin) findBlock(name string) (paging.BlockID, error) {
	if len(name) < minNameDigits || len(name) > 64 {
		return paging.BlockID{}, wrongRequest("name has %d hex digits, want %d to 64", len(name), minNameDigits)
	}
	prefix, err := hex.DecodeString(name[:len(name)&^1])
	if err != nil {
		return paging.BlockID{}, wrongRequest("name %q is not hex", name)
	}
	blocks, err := s.node.hier.Blocks(tier.BlockQuery{Prefix: prefix, Limit: maxBlockPage})
	if err != nil {
		return paging.BlockID{}, err
	}
	found := blocks[:0]
	for _, b := range blocks {
		if strings.HasPrefix(b.ID.Name.String(), strings.ToLower(name)) {
			found = append(found, b)
		}
	}
	switch {
	case len(found) == 0:
		return paging.BlockID{}, fmt.Errorf("no block's name begins with %s: %w", name, paging.ErrNotFound)
	case len(found) > 1:
		return paging.BlockID{}, wrongRequest("%d blocks' names begin with %s, such as %s and %s: give more digits, or the namespace differs", len(found), name, found[0].ID.Name.Short(), found[1].ID.Name.Short())
	}
	return found[0].ID, nil
}

// tierStatus tells what each tier holds and does, fastest first.
func (n *node) tierStatus(m *Metrics) []*kvtierv1.TierStatus {
	h := &m.Hierarchy
	ram := usageStatus(kvtierv1.Tier_TIER_RAM, &m.RAM)
	ram.LeasedBytes, ram.HitBlocks, ram.EvictedBlocks = uint64(h.LeasedBytes), uint64(h.RAMHitBlocks), uint64(h.EvictedBlocks)
	ram.InFlightBytes += uint64(m.StagingBytes)
	ram.Blocks, ram.Policy, ram.Queue = uint64(h.RAMBlocks), h.RAMPolicy, uint64(h.QueueLoads)
	var all []*kvtierv1.TierStatus
	if m.HBM != nil {
		hbm := usageStatus(kvtierv1.Tier_TIER_HBM, m.HBM)
		hbm.HitBlocks, hbm.EvictedBlocks = uint64(h.DeviceHitBlocks), uint64(h.DeviceEvictedBlocks)
		hbm.Blocks, hbm.Policy, hbm.Queue = uint64(h.DeviceBlocks), h.RAMPolicy, uint64(h.QueueMoves)
		all = append(all, hbm)
	}
	all = append(all, ram)
	if m.NVMe == nil {
		return all
	}
	nvme := usageStatus(kvtierv1.Tier_TIER_NVME, m.NVMe)
	nvme.HitBlocks, nvme.EvictedBlocks = uint64(h.DiskHitBlocks), uint64(h.DiskEvictedBlocks)
	nvme.Blocks, nvme.Policy, nvme.Queue = uint64(h.DiskBlocks), h.DiskPolicy, uint64(h.QueueBlocks)
	nvme.CorruptPages = uint64(h.CorruptPages + h.IdentityPages)
	nvme.IoErrors = uint64(h.LoadErrors + h.StoreErrors)
	return append(all, nvme)
}

func usageStatus(kind kvtierv1.Tier, u *tier.Usage) *kvtierv1.TierStatus {
	out := &kvtierv1.TierStatus{
		Tier: kind, State: u.State.String(), Problem: u.Reason, BudgetBytes: uint64(u.BudgetBytes), CapacityBytes: uint64(u.HeldBytes),
		PageBytes: uint64(u.PageBytes), InFlightBytes: uint64(u.InFlightBytes), Pages: uint64(u.Pages),
		FreeBytes: uint64(max(0, u.HeldBytes-u.PageBytes-u.InFlightBytes)), Loaded: 1,
	}
	if u.State == tier.Ready && u.Growing {
		out.State = "growing"
	}
	return out
}

package client

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Admin asks a node what operators ask. It holds a connection and is no
// attachment. All its methods are safe for concurrent use; errors are the
// sentinels of package paging, ErrDenied for a caller who is no operator. A call
// whose context has no deadline is bounded by Config.CallTimeout.
type Admin struct {
	SessionCalls // of the tenant that is named; empty: the caller's

	conn    *grpc.ClientConn
	service kvtierv1.AdminServiceClient
	timeout time.Duration
}

// OpenAdmin makes an Admin of the node that cfg names; of cfg it reads Socket,
// Address, TLS, Token and CallTimeout. It does not connect: the first call does.
func OpenAdmin(cfg Config) (*Admin, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	conn, err := (&Client{cfg: cfg}).dial()
	if err != nil {
		return nil, fmt.Errorf("connect: %w (%w)", err, paging.ErrInvalid)
	}
	a := &Admin{conn: conn, service: kvtierv1.NewAdminServiceClient(conn), timeout: cfg.CallTimeout}
	a.SessionCalls = a.sessionCalls()
	return a, nil
}

// Close ends the connection.
func (a *Admin) Close() error { return a.conn.Close() }

// Status is how a node is.
type Status struct {
	Node          string             `json:"node"` // id, hex
	Incarnation   uint64             `json:"incarnation"`
	Version       string             `json:"version"`
	Started       time.Time          `json:"started"`
	State         string             `json:"state"`    // "starting", "ready", "degraded" or "stopping"
	Problems      []string           `json:"problems"` // a line each, with what to do
	Attachments   uint32             `json:"attachments"`
	OrphanTethers uint32             `json:"orphan_tethers"` // open without a stream
	Leases        uint64             `json:"leases"`
	OverdueLeases uint64             `json:"overdue_leases"`
	Attempts      uint64             `json:"attempts"` // writes in progress
	Tiers         []TierStatus       `json:"tiers"`
	Config        []ConfigValue      `json:"config"`
	Counters      map[string]float64 `json:"counters"` // by Prometheus name, since the start
	Cluster       *ClusterStatus     `json:"cluster"`  // nil: the node is alone
}

// ConfigValue is one setting in force.
type ConfigValue struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"` // "default", "file", "env" or "flag"
}

// TierStatus is what a tier holds and does.
type TierStatus struct {
	Tier          string  `json:"tier"`
	State         string  `json:"state"`
	Problem       string  `json:"problem"`
	Policy        string  `json:"policy"`
	BudgetBytes   uint64  `json:"budget_bytes"`
	CapacityBytes uint64  `json:"capacity_bytes"` // of extents or segments that exist
	PageBytes     uint64  `json:"page_bytes"`
	InFlightBytes uint64  `json:"in_flight_bytes"`
	LeasedBytes   uint64  `json:"leased_bytes"`
	FreeBytes     uint64  `json:"free_bytes"`
	Pages         uint64  `json:"pages"`
	Blocks        uint64  `json:"blocks"`
	HitBlocks     uint64  `json:"hit_blocks"`
	EvictedBlocks uint64  `json:"evicted_blocks"`
	CorruptPages  uint64  `json:"corrupt_pages"`
	IOErrors      uint64  `json:"io_errors"`
	Queue         uint64  `json:"queue"`  // entries to be written down
	Loaded        float64 `json:"loaded"` // fraction of the index, at start
}

// BlockInfo is one block of a node.
type BlockInfo struct {
	Namespace string  `json:"namespace"` // id, hex
	Name      string  `json:"name"`      // hex
	Tenant    string  `json:"tenant"`
	Model     string  `json:"model"`
	Tiers     []Tier  `json:"tiers"` // that hold it, fastest first
	Parts     uint64  `json:"parts"` // bit mask
	Bytes     uint64  `json:"bytes"`
	Position  uint32  `json:"position"` // in its chain
	Hits      uint32  `json:"hits"`
	Priority  uint32  `json:"priority"`
	Leases    uint32  `json:"leases"`
	IdleS     float64 `json:"idle_s"`
	RetainedS float64 `json:"retained_s"` // time until its retention ends; 0: it has none
}

// PageInfo is one stored copy of a page.
type PageInfo struct {
	Part     uint32 `json:"part"`
	PartName string `json:"part_name"`
	Key      string `json:"key"` // hex
	Bytes    uint64 `json:"bytes"`
	Checksum string `json:"checksum"` // 16 hex digits
	Tier     Tier   `json:"tier"`
	Place    string `json:"place"`
	Verdict  string `json:"verdict,omitempty"` // if it was verified: "ok", or what is wrong
}

// MarshalText is String, for JSON.
func (t Tier) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Status asks how the node is.
func (a *Admin) Status(ctx context.Context) (*Status, error) {
	resp, err := ask(ctx, a, "status", a.service.GetStatus, &kvtierv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	s := &Status{
		Node: hex.EncodeToString(resp.GetNode()), Incarnation: resp.GetIncarnation(), Version: resp.GetVersion(),
		Started: resp.GetStarted().AsTime(), State: resp.GetState(), Problems: append([]string{}, resp.GetProblems()...),
		Attachments: resp.GetAttachments(), OrphanTethers: resp.GetOrphanTethers(),
		Leases: resp.GetLeases(), OverdueLeases: resp.GetOverdueLeases(), Attempts: resp.GetAttempts(),
		Tiers: tiersOf(resp.GetTiers()), Counters: resp.GetCounters(), Cluster: clusterOf(resp.GetCluster()),
	}
	for _, c := range resp.GetConfig() {
		s.Config = append(s.Config, ConfigValue{Name: c.GetName(), Value: c.GetValue(), Origin: c.GetOrigin()})
	}
	return s, nil
}

// Tiers asks what each tier holds, fastest first.
func (a *Admin) Tiers(ctx context.Context) ([]TierStatus, error) {
	resp, err := ask(ctx, a, "tiers", a.service.ListTiers, &kvtierv1.ListTiersRequest{})
	return tiersOf(resp.GetTiers()), err
}

func tiersOf(in []*kvtierv1.TierStatus) []TierStatus {
	out := make([]TierStatus, len(in))
	for i, t := range in {
		out[i] = TierStatus{
			Tier: Tier(t.GetTier()).String(), State: t.GetState(), Problem: t.GetProblem(), Policy: t.GetPolicy(),
			BudgetBytes: t.GetBudgetBytes(), CapacityBytes: t.GetCapacityBytes(), PageBytes: t.GetPageBytes(),
			InFlightBytes: t.GetInFlightBytes(), LeasedBytes: t.GetLeasedBytes(), FreeBytes: t.GetFreeBytes(),
			Pages: t.GetPages(), Blocks: t.GetBlocks(), HitBlocks: t.GetHitBlocks(), EvictedBlocks: t.GetEvictedBlocks(),
			CorruptPages: t.GetCorruptPages(), IOErrors: t.GetIoErrors(), Queue: t.GetQueue(), Loaded: t.GetLoaded(),
		}
	}
	return out
}

// BlocksRequest says which blocks to list. Zero fields do not select.
type BlocksRequest struct {
	Namespace paging.NamespaceID
	Tier      Tier
	Most      int    // at most 10,000; 0: 100
	After     string // token of the last answer
}

// Blocks lists blocks in order of namespace and name, and returns a token for
// the next call; "" : there are no more.
func (a *Admin) Blocks(ctx context.Context, r BlocksRequest) ([]BlockInfo, string, error) {
	req := &kvtierv1.ListBlocksRequest{Tier: kvtierv1.Tier(r.Tier), PageSize: uint32(max(r.Most, 0)), PageToken: r.After}
	if r.Namespace != (paging.NamespaceID{}) {
		req.NamespaceId = r.Namespace[:]
	}
	resp, err := ask(ctx, a, "list blocks", a.service.ListBlocks, req)
	if err != nil {
		return nil, "", err
	}
	out := make([]BlockInfo, len(resp.GetBlocks()))
	for i, b := range resp.GetBlocks() {
		out[i] = blockOf(b)
	}
	return out, resp.GetNextPageToken(), nil
}

func blockOf(b *kvtierv1.BlockInfo) BlockInfo {
	out := BlockInfo{
		Namespace: hex.EncodeToString(b.GetNamespaceId()), Name: hex.EncodeToString(b.GetName()),
		Tenant: b.GetTenant(), Model: b.GetModel(), Tiers: []Tier{}, Parts: b.GetParts(), Bytes: b.GetBytes(),
		Position: b.GetPosition(), Hits: b.GetHits(), Priority: b.GetPriority(), Leases: b.GetLeases(),
		IdleS: b.GetIdle().AsDuration().Seconds(), RetainedS: b.GetRetentionLeft().AsDuration().Seconds(),
	}
	for _, t := range b.GetTiers() {
		out.Tiers = append(out.Tiers, Tier(t))
	}
	return out
}

// Block tells all about one block. name is hex, a prefix of at least 4 digits
// is enough if only one block has it. With verify the stored copies are read and
// compared with their checksums. ErrNotFound, or ErrInvalid for a prefix that
// several blocks have.
func (a *Admin) Block(ctx context.Context, name string, verify bool) (BlockInfo, []PageInfo, error) {
	resp, err := ask(ctx, a, "block "+name, a.service.GetBlock, &kvtierv1.GetBlockRequest{Name: name, Verify: verify})
	if err != nil {
		return BlockInfo{}, nil, err
	}
	pages := make([]PageInfo, len(resp.GetPages()))
	for i, p := range resp.GetPages() {
		pages[i] = PageInfo{
			Part: p.GetPart(), PartName: p.GetPartName(), Key: hex.EncodeToString(p.GetKey()), Bytes: p.GetBytes(),
			Checksum: fmt.Sprintf("%016x", p.GetChecksum()), Tier: Tier(p.GetTier()), Place: p.GetPlace(), Verdict: p.GetVerdict(),
		}
	}
	return blockOf(resp.GetBlock()), pages, nil
}

// AttachmentInfo is an engine process that uses a node.
type AttachmentInfo struct {
	ID           string  `json:"id"` // first 8 hex digits
	Engine       string  `json:"engine"`
	Tenant       string  `json:"tenant"`
	Group        string  `json:"group"`
	PID          uint32  `json:"pid"`   // 0: unknown
	State        string  `json:"state"` // "attached", "orphan" (tether without stream) or "quarantined"
	Leases       uint64  `json:"leases"`
	LeasedBytes  uint64  `json:"leased_bytes"`
	StagingBytes uint64  `json:"staging_bytes"`
	AgeS         float64 `json:"age_s"`
	OrphanForS   float64 `json:"orphan_for_s"` // since its stream ended; 0: it is held
}

// Attachments lists attachments and tethers, oldest first.
func (a *Admin) Attachments(ctx context.Context) ([]AttachmentInfo, error) {
	resp, err := ask(ctx, a, "attachments", a.service.ListAttachments, &kvtierv1.ListAttachmentsRequest{})
	if err != nil {
		return nil, err
	}
	out := make([]AttachmentInfo, len(resp.GetAttachments()))
	for i, at := range resp.GetAttachments() {
		out[i] = AttachmentInfo{
			ID: at.GetId(), Engine: at.GetEngine(), Tenant: at.GetTenant(), Group: at.GetGroup(), PID: at.GetPid(), State: at.GetState(),
			Leases: at.GetLeases(), LeasedBytes: at.GetLeasedBytes(), StagingBytes: at.GetStagingBytes(),
			AgeS: at.GetAge().AsDuration().Seconds(), OrphanForS: at.GetOrphanFor().AsDuration().Seconds(),
		}
	}
	return out, nil
}

// ask makes one call within ctx, or the configured bound.
func ask[Req, Resp any](ctx context.Context, a *Admin, verb string, call func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req) (Resp, error) {
	ctx, cancel := within(ctx, a.timeout)
	defer cancel()
	resp, err := call(ctx, req)
	if err != nil {
		return resp, fmt.Errorf("%s: %w", verb, kvstatus.Err(err))
	}
	return resp, nil
}

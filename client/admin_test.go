package client

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// adminNode answers what operators ask.
type adminNode struct {
	kvtierv1.UnimplementedAdminServiceServer
	listed *kvtierv1.ListBlocksRequest
}

func (*adminNode) GetStatus(context.Context, *kvtierv1.GetStatusRequest) (*kvtierv1.GetStatusResponse, error) {
	return &kvtierv1.GetStatusResponse{
		Node: []byte{0xab, 0xcd}, State: "ready", Tiers: []*kvtierv1.TierStatus{{Tier: kvtierv1.Tier_TIER_NVME, Pages: 7}},
		Counters: map[string]float64{"kvtier_x_total": 3}, Config: []*kvtierv1.ConfigValue{{Name: "ram", Value: "1GiB", Origin: "flag"}},
	}, nil
}

func (*adminNode) ListTiers(context.Context, *kvtierv1.ListTiersRequest) (*kvtierv1.ListTiersResponse, error) {
	return nil, kvstatus.Status(paging.ErrDenied)
}

func (n *adminNode) ListBlocks(_ context.Context, r *kvtierv1.ListBlocksRequest) (*kvtierv1.ListBlocksResponse, error) {
	n.listed = r
	return &kvtierv1.ListBlocksResponse{Blocks: []*kvtierv1.BlockInfo{{
		Name: []byte{1, 2}, Tiers: []kvtierv1.Tier{kvtierv1.Tier_TIER_RAM, kvtierv1.Tier_TIER_NVME}, Idle: durationpb.New(1500 * time.Millisecond),
	}}, NextPageToken: "next"}, nil
}

func (*adminNode) GetBlock(_ context.Context, r *kvtierv1.GetBlockRequest) (*kvtierv1.GetBlockResponse, error) {
	p := &kvtierv1.PageInfo{Checksum: 0xbeef, Tier: kvtierv1.Tier_TIER_RAM}
	if r.GetVerify() {
		p.Verdict = "ok"
	}
	return &kvtierv1.GetBlockResponse{Block: &kvtierv1.BlockInfo{Name: []byte{1}}, Pages: []*kvtierv1.PageInfo{p}}, nil
}

func (*adminNode) ListAttachments(ctx context.Context, _ *kvtierv1.ListAttachmentsRequest) (*kvtierv1.ListAttachmentsResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func openTestAdmin(t *testing.T) (*Admin, *adminNode) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	node, server := &adminNode{}, grpc.NewServer()
	kvtierv1.RegisterAdminServiceServer(server, node)
	done := make(chan error)
	go func() { done <- server.Serve(l) }()
	a, err := OpenAdmin(Config{Socket: socket, CallTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return a, node
}

func TestAdminAnswers(t *testing.T) {
	a, node := openTestAdmin(t)
	s, err := a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Node != "abcd" || s.Tiers[0].Tier != "nvme" || s.Tiers[0].Pages != 7 || s.Counters["kvtier_x_total"] != 3 || s.Config[0].Origin != "flag" {
		t.Errorf("status %+v", s)
	}
	blocks, next, err := a.Blocks(t.Context(), BlocksRequest{Namespace: paging.NamespaceID{9}, Tier: TierRAM, Most: 5, After: "here"})
	if err != nil || next != "next" || len(blocks) != 1 {
		t.Fatalf("blocks %v, next %q, %v", blocks, next, err)
	}
	if r := node.listed; r.GetPageSize() != 5 || r.GetPageToken() != "here" || r.GetTier() != kvtierv1.Tier_TIER_RAM || r.GetNamespaceId()[0] != 9 {
		t.Errorf("asked %v", r)
	}
	text, err := json.Marshal(blocks[0])
	if err != nil || !strings.Contains(string(text), `"name":"0102"`) || !strings.Contains(string(text), `"tiers":["ram","nvme"]`) || !strings.Contains(string(text), `"idle_s":1.5`) {
		t.Errorf("block as JSON: %s, %v", text, err)
	}
	_, pages, err := a.Block(t.Context(), "01", true)
	if err != nil || pages[0].Checksum != "000000000000beef" || pages[0].Verdict != "ok" {
		t.Errorf("pages %+v, %v", pages, err)
	}
}

func TestAdminErrors(t *testing.T) {
	a, _ := openTestAdmin(t)
	if _, err := a.Tiers(t.Context()); !errors.Is(err, paging.ErrDenied) {
		t.Errorf("denied: %v", err)
	}
	if _, err := a.Attachments(t.Context()); !errors.Is(err, paging.ErrExpired) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a node that does not answer: %v", err)
	}
	if _, err := OpenAdmin(Config{}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("no node named: %v", err)
	}
	absent, err := OpenAdmin(Config{Socket: filepath.Join(t.TempDir(), "absent")})
	if err != nil {
		t.Fatal(err)
	}
	defer absent.Close()
	if _, err := absent.Status(t.Context()); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("no node: %v", err)
	}
}

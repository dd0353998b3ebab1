package server_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/servertest"
)

// Every wrong request gets a typed error that names what is wrong, and leaves
// nothing behind.
func TestWrongRequests(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 2)
	names := packNames(blockNames(0, 3))
	tooMany := make([]byte, 65537*32)
	twice := append(append([]byte(nil), names...), names[:32]...)
	other := append([]byte(nil), ns...)
	other[0] ^= 1
	half := packNames(blockNames(0, 40000))

	fetch := func(m *kvtierv1.FetchRequest) func(context.Context) error {
		m.Attachment = e.id
		return func(ctx context.Context) error { _, err := e.pages.Fetch(ctx, m); return err }
	}
	reserve := func(m *kvtierv1.ReserveRequest) func(context.Context) error {
		m.Attachment = e.id
		return func(ctx context.Context) error { _, err := e.pages.Reserve(ctx, m); return err }
	}
	for _, c := range []struct {
		name string
		do   func(context.Context) error
		want error
		text string
	}{
		{"unknown namespace", fetch(&kvtierv1.FetchRequest{NamespaceId: other, BlockNames: names}), paging.ErrUnknownNamespace, "register"},
		{"short namespace", fetch(&kvtierv1.FetchRequest{NamespaceId: ns[:31], BlockNames: names}), paging.ErrInvalid, "namespace_id"},
		{"wrong part", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: names, Parts: 4}), paging.ErrInvalid, "2 parts"},
		{"no block", fetch(&kvtierv1.FetchRequest{NamespaceId: ns}), paging.ErrInvalid, "at least one"},
		{"65,537 blocks", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: tooMany}), paging.ErrInvalid, "65536"},
		{"80,000 pages", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: half}), paging.ErrInvalid, "65536"},
		{"duplicate", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: twice}), paging.ErrInvalid, "block 3 repeats block 0"},
		{"unknown lease", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: names, PrefixLease: 12}), paging.ErrNotFound, "prefix_lease"},
		{"no group", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: names, ForGroup: true}), paging.ErrInvalid, "group"},
		{"nvme slots", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: names, WantedTier: kvtierv1.Tier_TIER_NVME}), paging.ErrInvalid, "wanted_tier"},
		{"negative time", fetch(&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: names, Timeout: durationpb.New(-time.Second)}), paging.ErrInvalid, "timeout"},
		{"reserve, wrong part", reserve(&kvtierv1.ReserveRequest{NamespaceId: ns, BlockNames: names, Parts: 8}), paging.ErrInvalid, "2 parts"},
		{"reserve, long ttl", reserve(&kvtierv1.ReserveRequest{NamespaceId: ns, BlockNames: names, Ttl: durationpb.New(time.Hour)}), paging.ErrInvalid, "10m"},
		{"other attachment", func(ctx context.Context) error {
			_, err := e.pages.Fetch(ctx, &kvtierv1.FetchRequest{Attachment: make([]byte, 16), NamespaceId: ns, BlockNames: names})
			return err
		}, paging.ErrUnknownAttachment, "attachment"},
		{"unknown attempt", func(ctx context.Context) error {
			_, err := e.pages.Commit(ctx, &kvtierv1.CommitRequest{Attachment: e.id, Attempt: make([]byte, 16)})
			return err
		}, paging.ErrNotFound, "attempt"},
		{"long salt", func(ctx context.Context) error {
			_, err := e.pages.RegisterNamespace(ctx, &kvtierv1.RegisterNamespaceRequest{Layout: wireLayout(4096, 1), Salt: make([]byte, 257)})
			return err
		}, paging.ErrInvalid, "256"},
		{"oversized page", func(ctx context.Context) error {
			_, err := e.pages.RegisterNamespace(ctx, &kvtierv1.RegisterNamespaceRequest{Layout: wireLayout(paging.MaxPageBytes+1, 1)})
			return err
		}, paging.ErrBadLayout, ""},
		{"page beyond this node", func(ctx context.Context) error {
			_, err := e.pages.RegisterNamespace(ctx, &kvtierv1.RegisterNamespaceRequest{Layout: wireLayout(20<<20, 1)})
			return err
		}, paging.ErrBadLayout, ""},
		{"no layout", func(ctx context.Context) error {
			_, err := e.pages.RegisterNamespace(ctx, &kvtierv1.RegisterNamespaceRequest{})
			return err
		}, paging.ErrInvalid, "layout"},
		{"stream without deadline", func(ctx context.Context) error {
			s, err := e.pages.ReadPages(ctx, &kvtierv1.ReadPagesRequest{NamespaceId: ns, BlockNames: names})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		}, paging.ErrInvalid, "deadline"},
	} {
		err := kvstatus.Err(c.do(t.Context()))
		if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got %v, want %v naming %q", c.name, err, c.want, c.text)
		}
	}
	if m := n.Metrics(); m.Leases+m.Attempts != 0 || m.Hierarchy.Holds+m.Hierarchy.Attempts != 0 {
		t.Errorf("wrong requests left %d leases, %d attempts, %d holds", m.Leases, m.Attempts, m.Hierarchy.Holds)
	}
}

// A call whose deadline passed before it began does nothing.
func TestExpiredDeadline(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	e.put(ns, blockNames(0, 1))
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	_, err := e.pages.Fetch(ctx, &kvtierv1.FetchRequest{Attachment: e.id, NamespaceId: ns, BlockNames: packNames(blockNames(0, 1))})
	if err := kvstatus.Err(err); !errors.Is(err, paging.ErrExpired) {
		t.Errorf("got %v, want expired", err)
	}
	if m := n.Metrics(); m.Leases != 0 {
		t.Errorf("%d leases held after a fetch that expired", m.Leases)
	}
}

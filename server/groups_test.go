package server_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/servertest"
)

var secret = bytes.Repeat([]byte("s"), 16)

// tensorParallel is a layout with a part per rank, and one that all ranks read.
func tensorParallel(ranks int) paging.Namespace {
	ns := testNamespace(4096, 0)
	ns.Layout.TP = uint32(ranks)
	for r := range ranks {
		ns.Layout.Parts = append(ns.Layout.Parts, paging.Part{Name: string(rune('a' + r)), PageBytes: 4096, BlocksPerPage: 1, Ranks: []uint32{uint32(r)}})
	}
	ns.Layout.Parts = append(ns.Layout.Parts, paging.Part{Name: "all", PageBytes: 4096, BlocksPerPage: 1})
	return ns
}

// The scheduler's fetch decides for all ranks; each worker adopts its parts; the
// pins go when the last of them has released.
func TestAdopt(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	group := func(ranks ...uint32) *client.Client {
		return n.client(t, client.Config{Group: "g", GroupSecret: secret, Ranks: ranks})
	}
	w0, w1 := group(0), group(1)
	scheduler := group()
	layout := tensorParallel(2)
	ns, err := scheduler.RegisterNamespace(t.Context(), layout)
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, 4)
	for _, w := range []*client.Client{w0, w1} {
		if id, err := w.RegisterNamespace(t.Context(), layout); err != nil || id != ns {
			t.Fatal(id, err)
		}
		write(t, w, ns, names)
	}
	l, err := scheduler.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, ForGroup: true})
	if err != nil || l.Usable != 4 || len(l.AdoptToken) != 16 {
		t.Fatalf("fetch for the group: %+v, %v", l, err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	pinned := n.Metrics().Hierarchy.LeasedBytes
	if pinned != 4*3*4096 {
		t.Errorf("the token pins %d bytes, want %d", pinned, 4*3*4096)
	}
	var adopted []*client.Lease
	for rank, w := range []*client.Client{w0, w1} {
		al, err := w.Adopt(t.Context(), l.AdoptToken, 0)
		if err != nil || al.Usable != 4 || al.Parts != paging.PartSet(4|1<<rank) {
			t.Fatalf("rank %d adopts: %+v, %v", rank, al, err)
		}
		for row := range al.Rows {
			for _, part := range []int{rank, 2} {
				v, ok := al.Page(row, part)
				if !ok || !bytes.Equal(v.Bytes(), wantPage(4096, names[row], part)) {
					t.Errorf("rank %d row %d part %d: wrong page", rank, row, part)
				}
				v.Close()
			}
			if _, ok := al.Page(row, 1-rank); ok {
				t.Errorf("rank %d was given the part of the other", rank)
			}
		}
		adopted = append(adopted, al)
	}
	if m := n.Metrics(); m.AdoptTokens != 0 || m.Hierarchy.LeasedBytes != pinned {
		t.Errorf("adopted by all: %d tokens, %d bytes pinned, want 0 and %d", m.AdoptTokens, m.Hierarchy.LeasedBytes, pinned)
	}
	if _, err := w0.Adopt(t.Context(), l.AdoptToken, 0); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("adopt after all did: %v", err)
	}
	for _, al := range adopted {
		if err := al.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if m := n.Metrics(); m.Hierarchy.LeasedBytes != 0 || m.Leases != 0 {
		t.Errorf("released by all: %d bytes pinned, %d leases", m.Hierarchy.LeasedBytes, m.Leases)
	}
}

// A part that all ranks read is adopted by each of them: the first does not end
// the token for the second.
func TestReplicatedPartIsAdoptedByEachRank(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	layout := testNamespace(4096, 1)
	layout.Layout.TP = 2
	w0 := n.client(t, client.Config{Group: "g", GroupSecret: secret, Ranks: []uint32{0}})
	w1 := n.client(t, client.Config{Group: "g", GroupSecret: secret, Ranks: []uint32{1}})
	ns, err := w0.RegisterNamespace(t.Context(), layout)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w1.RegisterNamespace(t.Context(), layout); err != nil {
		t.Fatal(err)
	}
	write(t, w0, ns, blockNames(0, 2))
	l, err := w0.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: blockNames(0, 2), ForGroup: true})
	if err != nil {
		t.Fatal(err)
	}
	for rank, w := range []*client.Client{w0, w1} {
		al, err := w.Adopt(t.Context(), l.AdoptToken, 0)
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
		checkLease(t, al, blockNames(0, 2), 1)
	}
	l.ReleaseAsync()
	eventually(t, "nothing is pinned", func() bool { return n.Metrics().Hierarchy.LeasedBytes == 0 })
}

func TestTokenEndsWithItsSchedulerOrGroup(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	hello := func() *kvtierv1.Hello { return &kvtierv1.Hello{GroupId: "g", GroupSecret: secret} }
	e := n.raw(t, "", hello())
	ns := e.register(4096, 1)
	names := blockNames(0, 2)
	e.put(ns, names)
	decide := func() *kvtierv1.FetchResponse {
		res, err := e.pages.Fetch(e.ctx, &kvtierv1.FetchRequest{Attachment: e.id, NamespaceId: ns, BlockNames: packNames(names), ForGroup: true})
		if err != nil {
			t.Fatal(err)
		}
		e.release(res.GetLeaseId())
		return res
	}
	dropped := decide()
	if _, err := e.pages.Release(e.ctx, &kvtierv1.ReleaseRequest{Attachment: e.id, AdoptTokens: [][]byte{dropped.GetAdoptToken()}}); err != nil {
		t.Fatal(err)
	}
	if m := n.Metrics(); m.AdoptTokens != 0 || m.Hierarchy.LeasedBytes != 0 {
		t.Errorf("dropped: %d tokens, %d bytes", m.AdoptTokens, m.Hierarchy.LeasedBytes)
	}
	kept := decide()
	// Another group, and a wrong secret, get nothing of it.
	other := n.raw(t, "", &kvtierv1.Hello{GroupId: "h", GroupSecret: secret})
	if _, err := other.pages.Adopt(other.ctx, &kvtierv1.AdoptRequest{Attachment: other.id, AdoptToken: kept.GetAdoptToken()}); !errors.Is(kvstatus.Err(err), paging.ErrNotFound) {
		t.Errorf("adopt by another group: %v", err)
	}
	wrong, err := other.pages.Attach(t.Context())
	if err == nil {
		err = wrong.Send(&kvtierv1.AttachRequest{RequestId: 1, Message: &kvtierv1.AttachRequest_Hello{
			Hello: &kvtierv1.Hello{ProtocolVersion: 1, GroupId: "g", GroupSecret: bytes.Repeat([]byte("x"), 16)},
		}})
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := wrong.Recv(); !errors.Is(kvstatus.Err(err), paging.ErrDenied) {
		t.Errorf("join with a wrong secret: %v", err)
	}
	if m := n.Metrics(); m.AdoptTokens != 1 || m.Hierarchy.LeasedBytes == 0 {
		t.Errorf("%d tokens, %d bytes pinned", m.AdoptTokens, m.Hierarchy.LeasedBytes)
	}
	if err := e.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group ends", func() bool { m := n.Metrics(); return m.AdoptTokens == 0 && m.Hierarchy.LeasedBytes == 0 })
}

// A fetch that goes on from a lease asks for the blocks after it.
func TestFetchAfterALease(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	names := blockNames(0, 8)
	e.put(ns, names)
	l := e.fetch(ns, names[:5], time.Minute)
	res, err := e.pages.Fetch(e.ctx, &kvtierv1.FetchRequest{Attachment: e.id, NamespaceId: ns, BlockNames: packNames(names[5:]), PrefixLease: l.GetLeaseId()})
	if err != nil || res.GetUsableBlocks() != 3 {
		t.Fatalf("%v, %v", res, err)
	}
	for i, s := range e.slots(res.GetSlots()) {
		if !bytes.Equal(e.at(s), wantPage(4096, names[5+i], 0)) {
			t.Errorf("block %d: wrong bytes", 5+i)
		}
	}
	e.release(l.GetLeaseId(), res.GetLeaseId())
}

package server_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// A session of a million tokens: every call that names blocks names them by the session,
// and answers as it does for their names.
func TestSessionRangeOfAMillionTokens(t *testing.T) {
	const blocks, stored = 62_500, 3000 // of 16 tokens; the others were never written
	n := startNode(t, clusterConfig(t, ""))
	c := n.client(t, client.Config{Engine: "test", CallTimeout: 30 * time.Second})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(64, 1))
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, blocks)
	write(t, c, ns, names[:stored])
	s, err := c.OpenSession(t.Context(), client.SessionOptions{Name: "long", Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := errors.Join(s.Append(0, names), s.Wait(ctx)); err != nil {
		t.Fatal(err)
	}
	all := client.SessionRange{Session: "long"}
	if d, err := c.Session(ctx, "", "long"); err != nil || d.Blocks != blocks || d.Tokens != 1_000_000 || d.AbsentBlocks != blocks-stored || len(d.Runs) != 2 {
		t.Errorf("%+v, %v", d, err)
	}
	if p, err := c.LookupSession(ctx, all, 0); err != nil || p.Usable != stored || len(p.Tiers) != blocks {
		t.Errorf("lookup: %d usable of %d, %v", p.Usable, len(p.Tiers), err)
	}
	for _, to := range []uint64{0, blocks} {
		l, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Session: "long", To: to})
		if err != nil || l.Rows != stored {
			t.Fatalf("fetch: %v, %v", l, err)
		}
		checkLease(t, l, names, 1)
	}
	l, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Session: "long", From: 1000, To: 1010})
	if err != nil || l.Rows != 10 {
		t.Fatalf("fetch: %v, %v", l, err)
	}
	checkLease(t, l, names[1000:], 1)

	part := client.SessionRange{Session: "long", From: stored - 1, To: stored + 1}
	for verb, do := range map[string]func(client.SessionRange) ([]client.ItemOutcome, error){
		"retain": func(r client.SessionRange) ([]client.ItemOutcome, error) {
			return c.RetainRange(ctx, r, client.Retention{Priority: 70, TTL: time.Hour})
		},
		"pin": func(r client.SessionRange) ([]client.ItemOutcome, error) { return c.PinRange(ctx, r, time.Minute) },
		"demote": func(r client.SessionRange) ([]client.ItemOutcome, error) {
			return c.DemoteRange(ctx, r, client.TierRAM)
		},
	} {
		out, err := do(part)
		if err != nil || len(out) != 2 || out[0] == client.ItemMissing || out[1] != client.ItemMissing {
			t.Errorf("%s: %v, %v", verb, out, err)
		}
		if out, err := do(all); err != nil || len(out) != blocks {
			t.Errorf("%s of all: %d outcomes, %v", verb, len(out), err)
		}
	}
	ticket, err := c.Prefetch(ctx, client.PrefetchRequest{Session: "long", To: 200})
	if err != nil {
		t.Fatal(err)
	}
	if why, err := ticket.Wait(ctx); err != nil || why != client.ReasonNone {
		t.Errorf("prefetch: %v, %v", why, err)
	}
	ready := 0
	for range ticket.Ready() {
		ready++
	}
	if ready != 200 && ticket.ID != 0 {
		t.Errorf("%d of 200 blocks became ready", ready)
	}
	if out, err := c.DropRange(ctx, client.SessionRange{Session: "long", From: 2000, To: 2500}); err != nil || slices.Contains(out, client.ItemMissing) {
		t.Errorf("drop: %v, %v", out, err)
	}
	if l, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Session: "long", Timeout: 10 * time.Second}); err != nil || l.Rows != 2000 {
		t.Errorf("after the drop: %v, %v", l, err)
	} else {
		checkLease(t, l, names, 1)
	}
}

// What is wrong with a range is said by name.
func TestWrongSessionRanges(t *testing.T) {
	n := startNode(t, clusterConfig(t, ""))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	c := kvtierv1.NewSessionsServiceClient(e.conn)
	names := packNames(blockNames(0, 10))
	if _, err := c.OpenSession(e.ctx, &kvtierv1.OpenSessionRequest{Session: "s", NamespaceId: ns}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.AppendSession(e.ctx, &kvtierv1.AppendSessionRequest{Session: "s", BlockNames: names}); err != nil {
		t.Fatal(err)
	}
	other := slices.Clone(ns)
	other[0] ^= 1
	of := func(session string, from, to uint64) *kvtierv1.SessionRange {
		return &kvtierv1.SessionRange{Session: session, FromBlock: from, ToBlock: to}
	}
	for name, x := range map[string]struct {
		request *kvtierv1.FetchRequest
		want    error
	}{
		"names and a range":   {&kvtierv1.FetchRequest{NamespaceId: ns, BlockNames: names, SessionRange: of("s", 0, 0)}, paging.ErrInvalid},
		"another namespace":   {&kvtierv1.FetchRequest{NamespaceId: other, SessionRange: of("s", 0, 0)}, paging.ErrInvalid},
		"past its end":        {&kvtierv1.FetchRequest{NamespaceId: ns, SessionRange: of("s", 0, 11)}, paging.ErrInvalid},
		"turned round":        {&kvtierv1.FetchRequest{NamespaceId: ns, SessionRange: of("s", 5, 4)}, paging.ErrInvalid},
		"of nothing":          {&kvtierv1.FetchRequest{NamespaceId: ns, SessionRange: of("s", 10, 0)}, paging.ErrNotFound},
		"no such session":     {&kvtierv1.FetchRequest{NamespaceId: ns, SessionRange: of("t", 0, 0)}, paging.ErrNotFound},
		"a name that is none": {&kvtierv1.FetchRequest{NamespaceId: ns, SessionRange: of("a/b", 0, 0)}, paging.ErrInvalid},
	} {
		x.request.Attachment = e.id
		if _, err := e.pages.Fetch(e.ctx, x.request); !errors.Is(kvstatus.Err(err), x.want) {
			t.Errorf("%s: %v, want %v", name, err, x.want)
		}
		x.request.Attachment = nil
		if err := e.stream.Send(&kvtierv1.AttachRequest{RequestId: 7, Message: &kvtierv1.AttachRequest_Fetch{Fetch: x.request}}); err != nil {
			t.Fatal(err)
		}
		m, err := e.stream.Recv()
		for err == nil && m.GetRequestId() == 0 { // an event
			m, err = e.stream.Recv()
		}
		if err != nil || !errors.Is(kvstatus.FromDetail(m.GetError()), x.want) {
			t.Errorf("%s, on the stream: %v, %v, want %v", name, m, err, x.want)
		}
	}
	if _, err := e.pages.Lookup(e.ctx, &kvtierv1.LookupRequest{SessionRange: of("s", 1, 0)}); !errors.Is(kvstatus.Err(err), paging.ErrInvalid) {
		t.Errorf("a lookup in the middle: %v", err)
	}
}

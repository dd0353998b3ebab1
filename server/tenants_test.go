package server_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

const (
	tokenA    = "the-token-of-tenant-a"
	tokenB    = "the-token-of-tenant-b"
	tokenOps  = "the-token-of-operators"
	tokenRead = "the-token-to-look-only"
)

func twoTenants(t testing.TB) server.Config {
	t.Helper()
	cfg := servertest.Config(t)
	cfg.Tenants = []server.Tenant{
		{Name: "a", Tokens: []server.Token{{Secret: tokenA}}, RAMBytes: 8 << 20},
		{Name: "b", Tokens: []server.Token{{Secret: tokenB}, {Secret: tokenOps, Role: "operator"}, {Secret: tokenRead, Role: "read-only"}}},
	}
	return cfg
}

// Tenant B learns nothing of A: not A's namespace, not its blocks, not its
// leases, attempts or tokens, and no byte of it in anything B can map.
func TestTenantsSeeNothingOfEachOther(t *testing.T) {
	n := startNode(t, twoTenants(t))
	a, b := n.raw(t, tokenA, &kvtierv1.Hello{}), n.raw(t, tokenB, &kvtierv1.Hello{})
	nsA, nsB := a.register(4096, 1), b.register(4096, 1)
	if bytes.Equal(nsA, nsB) {
		t.Fatal("two tenants share a namespace")
	}
	names := blockNames(0, 64)
	a.put(nsA, names)
	lease := a.fetch(nsA, names, time.Minute)
	attempt := a.reserve(nsA, blockNames(1000, 1), time.Minute)
	b.put(nsB, blockNames(2000, 64))

	// A's namespace and one that nobody has are the same to B.
	random := bytes.Repeat([]byte{7}, 32)
	say := func(ns []byte) string {
		_, err := b.pages.Lookup(b.ctx, &kvtierv1.LookupRequest{NamespaceId: ns, BlockNames: packNames(names)})
		if err := kvstatus.Err(err); !errors.Is(err, paging.ErrUnknownNamespace) {
			t.Errorf("lookup: %v, want unknown namespace", err)
		}
		return strings.ReplaceAll(err.Error(), paging.NamespaceID(ns).Short(), "X")
	}
	if own, other := say(nsA), say(random); own != other {
		t.Errorf("A's namespace: %q, nobody's: %q", own, other)
	}
	// The same names in B's own namespace are not there.
	res, err := b.pages.Lookup(b.ctx, &kvtierv1.LookupRequest{NamespaceId: nsB, BlockNames: packNames(names)})
	if err != nil || res.GetUsableBlocks() != 0 || bytes.Contains(res.GetTiers(), []byte{2}) {
		t.Errorf("A's names in B's namespace: %v, %v", res, err)
	}
	for what, ns := range map[string][]byte{"read": nsA, "drop": nsA} {
		if _, err := b.pages.Drop(b.ctx, &kvtierv1.DropRequest{NamespaceId: ns, BlockNames: packNames(names)}); !errors.Is(kvstatus.Err(err), paging.ErrUnknownNamespace) {
			t.Errorf("%s of A's blocks: %v", what, err)
		}
	}
	// A's attachment, lease and attempt in B's hands.
	if _, err := b.pages.Fetch(b.ctx, &kvtierv1.FetchRequest{Attachment: a.id, NamespaceId: nsA, BlockNames: packNames(names)}); !errors.Is(kvstatus.Err(err), paging.ErrUnknownAttachment) {
		t.Errorf("fetch with A's attachment: %v", err)
	}
	b.release(lease.GetLeaseId())
	if m := n.Metrics(); m.Leases != 1 {
		t.Errorf("B released A's lease: %d held", m.Leases)
	}
	if _, err := b.pages.Commit(b.ctx, &kvtierv1.CommitRequest{Attachment: b.id, Attempt: attempt.GetAttempt()}); !errors.Is(kvstatus.Err(err), paging.ErrNotFound) {
		t.Errorf("commit of A's attempt: %v", err)
	}
	scanFor(t, b, wantPage(4096, names[0], 0)[:64])
	scanFor(t, a, wantPage(4096, blockNames(2000, 1)[0], 0)[:64])
	if !bytes.Contains(allMapped(t, a), wantPage(4096, names[0], 0)[:64]) {
		t.Error("A does not find its own bytes: the scan sees nothing")
	}
}

// allMapped is all memory that an engine was given.
func allMapped(t testing.TB, e *rawEngine) []byte {
	t.Helper()
	e.at(e.slots(e.fetch(e.register(4096, 1), blockNames(lastWritten(e), 1), time.Minute).GetSlots())[0])
	var all []byte
	for _, m := range e.mapped {
		all = append(all, m.Bytes()...)
	}
	return all
}

// lastWritten is the number of a block that the tests above wrote.
func lastWritten(e *rawEngine) int {
	if e.token == tokenB {
		return 2000
	}
	return 0
}

func scanFor(t testing.TB, e *rawEngine, secret []byte) {
	t.Helper()
	if bytes.Contains(allMapped(t, e), secret) {
		t.Error("an engine finds another tenant's bytes in memory it was given")
	}
}

// A tether in the hands of another user is refused; so is one for nobody.
func TestTetherNeedsTheAttachment(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	tether, err := shm.DialHandoff(t.Context(), n.Config.HandoffSocket)
	if err != nil {
		t.Fatal(err)
	}
	defer tether.Close()
	if err := tether.SendHello(t.Context(), shm.AttachmentID{1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	if _, err := tether.RecvExtents(t.Context()); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("a tether for no attachment: %v, want it closed", err)
	}
	eventually(t, "the refusal is counted", func() bool { return n.Metrics().TethersRefused == 1 })
}

func TestQuotaOfATenant(t *testing.T) {
	n := startNode(t, twoTenants(t))
	a, b := n.raw(t, tokenA, &kvtierv1.Hello{}), n.raw(t, tokenB, &kvtierv1.Hello{})
	nsA, nsB := a.register(256<<10, 1), b.register(256<<10, 1)
	var outcome byte
	for at := 0; at < 100 && outcome == 0; at++ {
		names := blockNames(at, 1)
		if o := a.put(nsA, names)[0]; o != committed {
			outcome = o
			break
		}
		a.fetch(nsA, names, time.Minute)
	}
	if want := byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_OVER_QUOTA); outcome != want {
		t.Errorf("a tenant at its quota, all leased: outcome %d, want %d", outcome, want)
	}
	if o := b.put(nsB, blockNames(0, 1)); !bytes.Equal(o, []byte{committed}) {
		t.Errorf("another tenant meanwhile: %v", o)
	}
}

package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func TestWriteAndReadInPlace(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 100) // more than one extent
	write(t, c, ns, names)

	prefix, err := c.Lookup(t.Context(), ns, chain(1, 120), 0)
	if err != nil {
		t.Fatal(err)
	}
	if prefix.Usable != 100 || prefix.UsableTokens != 1600 || prefix.Tiers[99] != client.TierRAM || prefix.Tiers[100] != client.TierNone {
		t.Errorf("lookup: %d blocks, %d tokens, tiers %v %v", prefix.Usable, prefix.UsableTokens, prefix.Tiers[99], prefix.Tiers[100])
	}
	lease := fetch(t, c, ns, chain(1, 120))
	if lease.Usable != 100 || lease.Rows != 100 || len(lease.Shortfalls) != 1 || lease.Shortfalls[0].Reason != client.ReasonNotFound {
		t.Errorf("fetch: %d usable, %d rows, shortfalls %v", lease.Usable, lease.Rows, lease.Shortfalls)
	}
	if err := readAll(lease, names, 2); err != nil {
		t.Error(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("release: %v", err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("second release: %v", err)
	}
	if got := n.held(); got != 0 {
		t.Errorf("%d leases held after release", got)
	}
	if _, ok := lease.Page(0, 0); ok {
		t.Error("a released lease gave a view")
	}
	if err := lease.Err(); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("a released lease says %v", err)
	}
}

func TestPartsAreColumns(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 8)
	write(t, c, ns, names)
	lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, Parts: paging.PartSet(0).With(1)})
	if err != nil {
		t.Fatal(err)
	}
	defer lease.ReleaseAsync()
	if _, ok := lease.Page(3, 0); ok {
		t.Error("a view of a part that was not asked for")
	}
	view, ok := lease.Page(3, 1)
	if !ok {
		t.Fatal("no view of the part asked for")
	}
	defer view.Close()
	if err := checkPage(names[3], 1, view.Bytes()); err != nil {
		t.Error(err)
	}
	if view.Sum != paging.Checksum(view.Bytes()) {
		t.Error("the view's sum is not that of its bytes")
	}
	for _, at := range [][2]int{{-1, 1}, {8, 1}, {0, -1}, {0, 2}, {0, 64}, {0, 1 << 40}} {
		if _, ok := lease.Page(at[0], at[1]); ok {
			t.Errorf("a view of row %d part %d", at[0], at[1])
		}
	}
}

func TestFetchSetAndNothing(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names[2:3])
	lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, Mode: client.ModeSet})
	if err != nil {
		t.Fatal(err)
	}
	if lease.Usable != 1 || lease.Rows != 4 {
		t.Errorf("%d usable of %d rows", lease.Usable, lease.Rows)
	}
	if _, ok := lease.Page(1, 0); ok {
		t.Error("a view of an absent block")
	}
	if view, ok := lease.Page(2, 0); !ok {
		t.Error("no view of the block that is there")
	} else if err := errors.Join(checkPage(names[2], 0, view.Bytes()), view.Close()); err != nil {
		t.Error(err)
	}
	lease.ReleaseAsync()
	eventually(t, "one-way release", func() bool { return n.held() == 0 })

	none := fetch(t, c, ns, chain(2, 3))
	if none.ID != 0 || none.Usable != 0 {
		t.Errorf("nothing stored, yet lease %d with %d blocks", none.ID, none.Usable)
	}
	if err := none.Release(t.Context()); err != nil {
		t.Errorf("release of nothing: %v", err)
	}
}

func TestUnaryCalls(t *testing.T) {
	n := startTestNode(t)
	cfg := patient(n)
	cfg.UnaryCalls = true
	c := open(t, cfg)
	ns := register(t, c)
	names := chain(1, 8)
	write(t, c, ns, names)
	lease := fetch(t, c, ns, names)
	if err := readAll(lease, names, 2); err != nil {
		t.Error(err)
	}
	if err := c.Renew(t.Context(), 0, lease); err != nil {
		t.Error(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if got := n.held(); got != 0 {
		t.Errorf("%d leases held", got)
	}
}

func TestArgumentsAreChecked(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	expired, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	for what, tt := range map[string]struct {
		call func() error
		want error
	}{
		"no names": {func() error { _, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns}); return err }, paging.ErrInvalid},
		"65,537 names": {func() error {
			_, err := c.Lookup(t.Context(), ns, make([]paging.BlockName, 65537), 0)
			return err
		}, paging.ErrInvalid},
		"unknown namespace": {func() error {
			_, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: paging.NamespaceID{1}, Names: chain(1, 1)})
			return err
		}, paging.ErrUnknownNamespace},
		"expired": {func() error {
			_, err := c.Fetch(expired, client.FetchRequest{Namespace: ns, Names: chain(1, 1)})
			return err
		}, paging.ErrExpired},
		"expired is also the context's error": {func() error {
			_, err := c.Lookup(expired, ns, chain(1, 1), 0)
			return err
		}, context.DeadlineExceeded},
		"priority": {func() error {
			_, err := c.Retain(t.Context(), ns, chain(1, 1), client.Retention{Priority: 101})
			return err
		}, paging.ErrInvalid},
		"layout": {func() error { _, err := c.RegisterNamespace(t.Context(), paging.Namespace{}); return err }, paging.ErrBadLayout},
	} {
		if err := tt.call(); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", what, err, tt.want)
		}
	}
	if _, err := c.Lookup(t.Context(), ns, make([]paging.BlockName, 65537), 0); err == nil || !strings.Contains(err.Error(), "65536") {
		t.Errorf("the error does not name the limit: %v", err)
	}
}

func TestConfigReportsEverything(t *testing.T) {
	_, err := client.Open(t.Context(), client.Config{
		Socket: "/x", Address: "far.example:7440", Token: "secret", Group: strings.Repeat("g", 65), StagingBytes: -1, CallTimeout: -1,
	})
	if !errors.Is(err, paging.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	for _, field := range []string{"Socket and Address", "Token", "Group has 65", "GroupSecret", "StagingBytes", "timeouts"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("%q is not reported in:\n%v", field, err)
		}
	}
}

func TestClosedClient(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	write(t, c, ns, chain(1, 4))
	lease := fetch(t, c, ns, chain(1, 4))
	if err := c.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	if _, ok := lease.Page(0, 0); ok {
		t.Error("a lease of a closed client gave a view")
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("release after close: %v", err)
	}
	for what, call := range map[string]func() error{
		"fetch": func() error {
			_, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: chain(1, 1)})
			return err
		},
		"lookup": func() error { _, err := c.Lookup(t.Context(), ns, chain(1, 1), 0); return err },
		"reserve": func() error {
			_, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: chain(1, 1)})
			return err
		},
		"prefetch": func() error {
			_, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: chain(1, 1)})
			return err
		},
		"drop":     func() error { _, err := c.Drop(t.Context(), ns, chain(1, 1)); return err },
		"register": func() error { _, err := c.RegisterNamespace(t.Context(), testNamespace()); return err },
		"adopt":    func() error { _, err := c.Adopt(t.Context(), make([]byte, 16), 0); return err },
		"renew":    func() error { return c.Renew(t.Context(), 0) },
		"ready":    func() error { return c.Ready(t.Context()) },
	} {
		if err := call(); !errors.Is(err, paging.ErrClosed) {
			t.Errorf("%s after close: %v", what, err)
		}
	}
}

func TestCloseNamesTheViewsThatAreHeld(t *testing.T) {
	n := startTestNode(t)
	c, err := client.Open(t.Context(), patient(n))
	if err != nil {
		t.Fatal(err)
	}
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	lease := fetch(t, c, ns, names)
	view, ok := lease.Page(2, 0)
	if !ok {
		t.Fatal("no view")
	}
	if err := c.Close(); !errors.Is(err, paging.ErrInvalid) || !strings.Contains(err.Error(), "1 views open") {
		t.Errorf("close with an open view: %v", err)
	}
	if err := checkPage(names[2], 0, view.Bytes()); err != nil {
		t.Errorf("after close: %v", err)
	}
	n.mu.Lock()
	ended := n.tethersEnd
	n.mu.Unlock()
	if ended != 0 {
		t.Error("the tether ended under an open view")
	}
	if err := view.Close(); err != nil {
		t.Errorf("close of the view: %v", err)
	}
	eventually(t, "end of the tether after the last view", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.tethersEnd == 1
	})
}

func TestReleaseWithOpenViews(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	write(t, c, ns, chain(1, 4))
	lease := fetch(t, c, ns, chain(1, 4))
	a, _ := lease.Page(0, 0)
	b, _ := lease.Page(1, 1)
	if err := lease.Release(t.Context()); !errors.Is(err, paging.ErrInvalid) || !strings.Contains(err.Error(), "2 views") {
		t.Errorf("release with two views open: %v", err)
	}
	if _, ok := lease.Page(0, 0); ok {
		t.Error("a view of a lease under release")
	}
	if n.held() != 1 {
		t.Error("the node was told while views are open")
	}
	a.Close()
	a.Close() // does nothing
	if n.held() != 1 {
		t.Error("the node was told while a view is open")
	}
	b.Close()
	eventually(t, "release by the last view", func() bool { return n.held() == 0 })
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("release afterwards: %v", err)
	}
}

func TestRevocationIsAnsweredByTheLastView(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	used, unused := fetch(t, c, ns, names), fetch(t, c, ns, names)
	view, _ := used.Page(1, 0)
	n.revoke()
	answered := func(id uint64) bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, got := range n.revoked {
			if got == id {
				return true
			}
		}
		return false
	}
	eventually(t, "answer for the lease without views", func() bool { return answered(unused.ID) })
	if answered(used.ID) {
		t.Fatal("a revocation was answered under an open view")
	}
	if _, ok := used.Page(0, 0); ok {
		t.Error("a new view of a lease under revocation")
	}
	if err := used.Err(); !errors.Is(err, paging.ErrExpired) {
		t.Errorf("a lease under revocation says %v", err)
	}
	if err := checkPage(names[1], 0, view.Bytes()); err != nil {
		t.Error(err)
	}
	if err := view.Close(); err != nil {
		t.Errorf("the view of a lease under revocation: %v", err)
	}
	eventually(t, "answer by the last view", func() bool { return answered(used.ID) })
	for _, lease := range []*client.Lease{used, unused} {
		if err := lease.Release(t.Context()); err != nil {
			t.Errorf("release after revocation: %v", err)
		}
	}
	if got := c.Metrics().Revoked; got != 2 {
		t.Errorf("%d revocations counted, want 2", got)
	}
}

func TestLostGeneration(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	lease := fetch(t, c, ns, names)
	good, _ := lease.Page(0, 0)
	bad, _ := lease.Page(1, 0)
	if err := bad.Check(); err != nil {
		t.Fatalf("before reuse: %v", err)
	}
	n.reuse(testKey{ns, names[1], 0})
	if err := good.Close(); err != nil {
		t.Errorf("a page that was not reused: %v", err)
	}
	if err := bad.Check(); !errors.Is(err, paging.ErrLost) {
		t.Errorf("check after reuse: %v", err)
	}
	if err := bad.Close(); !errors.Is(err, paging.ErrLost) {
		t.Errorf("close after reuse: %v", err)
	}
	if err := lease.Release(t.Context()); !errors.Is(err, paging.ErrLost) {
		t.Errorf("release after reuse: %v", err)
	}
}

// What the client did not look at again, the node knows.
func TestLostByTheNodesWord(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	lease := fetch(t, c, ns, names)
	view, _ := lease.Page(1, 0)
	view.Close()
	n.reuse(testKey{ns, names[1], 0})
	if err := lease.Release(t.Context()); !errors.Is(err, paging.ErrLost) {
		t.Errorf("release after reuse: %v", err)
	}
}

func TestLeasesAreRenewedWhileHeld(t *testing.T) {
	n := startTestNode(t)
	cfg := patient(n)
	c := open(t, cfg)
	ns := register(t, c)
	write(t, c, ns, chain(1, 4))
	lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: chain(1, 4), TTL: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	renewed := func() int {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.renewed)
	}
	eventually(t, "renewals", func() bool { return renewed() >= 3 })
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if c.Metrics().Renewed < 3 {
		t.Error("renewals are not counted")
	}
}

func TestRenewNamesWhatIsNotHeld(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	write(t, c, ns, chain(1, 4))
	lease := fetch(t, c, ns, chain(1, 4))
	if err := c.Renew(t.Context(), time.Minute, lease); err != nil {
		t.Error(err)
	}
	n.mu.Lock()
	for _, a := range n.attachments {
		clear(a.leases)
	}
	n.mu.Unlock()
	if err := c.Renew(t.Context(), time.Minute, lease); !errors.Is(err, paging.ErrExpired) {
		t.Errorf("renew of a lease that is not held: %v", err)
	}
	lease.ReleaseAsync()
	if err := c.Renew(t.Context(), time.Minute, lease); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("renew of a released lease: %v", err)
	}
}

func TestDescriptorThatComesLate(t *testing.T) {
	n := newTestNode(t)
	n.holdExtents = make(chan struct{})
	n.start(t)
	writer := open(t, patient(n))
	ns := register(t, writer)
	names := chain(1, 4)
	// The writer's tether is held up as well, so store the pages in the node.
	n.mu.Lock()
	for _, name := range names {
		for part, bytes := range []int{16 << 10, 4096} {
			page := make([]byte, bytes)
			fillPage(name, part, page)
			if _, err := n.storeLocked(testKey{ns, name, part}, page); err != nil {
				t.Fatal(err)
			}
		}
	}
	n.mu.Unlock()
	time.AfterFunc(50*time.Millisecond, func() { close(n.holdExtents) })
	lease := fetch(t, writer, ns, names)
	if err := readAll(lease, names, 2); err != nil {
		t.Error(err)
	}
	lease.ReleaseAsync()
}

func TestPrefetch(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	ticket, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: chain(1, 9), Priority: 1})
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for range ticket.Ready() {
		seen++
	}
	if seen != 9 || ticket.Admitted != 9 {
		t.Errorf("%d of %d blocks reported ready", seen, ticket.Admitted)
	}
	if why, err := ticket.Wait(t.Context()); why != client.ReasonNone || err != nil {
		t.Errorf("ended with %v, %v", why, err)
	}

	running, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: chain(1, 9)})
	if err != nil {
		t.Fatal(err)
	}
	if err := running.Cancel(t.Context()); err != nil {
		t.Error(err)
	}
	if why, err := running.Wait(t.Context()); why != client.ReasonCancelled || err != nil {
		t.Errorf("cancelled, but ended with %v, %v", why, err)
	}
	lost, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: chain(1, 9)})
	if err != nil {
		t.Fatal(err)
	}
	n.stop()
	if why, err := lost.Wait(t.Context()); why != client.ReasonAttachmentEnded || err != nil {
		t.Errorf("node gone, but ended with %v, %v", why, err)
	}
}

func TestRetentionVerbs(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	write(t, c, ns, chain(1, 2))
	outcomes, err := c.Drop(t.Context(), ns, chain(1, 3))
	if err != nil {
		t.Fatal(err)
	}
	if outcomes[0] != client.ItemAccepted || outcomes[2] != client.ItemMissing {
		t.Errorf("outcomes %v", outcomes)
	}
	// The test node does not speak these: an unknown call is an incompatible node.
	if _, err := c.Pin(t.Context(), ns, chain(1, 1), time.Hour); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("pin: %v", err)
	}
	if _, err := c.Demote(t.Context(), ns, chain(1, 1), client.TierRAM); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("demote: %v", err)
	}
	if _, err := c.Retain(t.Context(), ns, chain(1, 1), client.Retention{Priority: 50}); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("retain: %v", err)
	}
}

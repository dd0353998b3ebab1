package server_test

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// twoTiers is a node whose RAM is much smaller than its disk.
func twoTiers(t testing.TB) server.Config {
	t.Helper()
	cfg := servertest.Config(t)
	cfg.Dir = filepath.Join(filepath.Dir(cfg.Socket), "data")
	cfg.RAMBytes, cfg.NVMeBytes = 16<<20, 128<<20
	cfg.FlushAfter = 10 * time.Millisecond
	return cfg
}

const diskPage = 64 << 10

// manyBlocks writes more than RAM holds and waits until all is on disk.
func manyBlocks(t testing.TB, n testNode, c *client.Client, blocks int) (paging.NamespaceID, []paging.BlockName) {
	t.Helper()
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(diskPage, 1))
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, blocks)
	for i, o := range write(t, c, ns, names) {
		if o != client.OutcomeCommitted {
			t.Fatalf("block %d: %v", i, o)
		}
	}
	eventually(t, "all is on disk", func() bool { return n.Metrics().Hierarchy.DirtyBytes == 0 })
	return ns, names
}

func TestPagesComeBackFromDiskAndSurviveARestart(t *testing.T) {
	cfg := twoTiers(t)
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 400) // 25 MiB
	read := func(n testNode) {
		t.Helper()
		fromDisk := n.Metrics().Hierarchy.DiskHitBlocks
		for at := 0; at < len(names); at += 50 {
			l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[at : at+50], Mode: client.ModeSet, Timeout: 10 * time.Second})
			if err != nil || l.Usable != 50 {
				t.Fatalf("from %d on: %+v, %v", at, l, err)
			}
			checkLease(t, l, names[at:at+50], 1)
		}
		if n.Metrics().Hierarchy.DiskHitBlocks == fromDisk {
			t.Error("nothing came from disk")
		}
	}
	read(n)
	first := n.Metrics()
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	again := startNode(t, cfg)
	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the client is back", func() bool { return again.Metrics().Attachments == 1 })
	read(again)
	if m := again.Metrics(); m.Hierarchy.Blocks != first.Hierarchy.Blocks || m.Hierarchy.CorruptPages != 0 {
		t.Errorf("%d blocks after the restart, %d before", m.Hierarchy.Blocks, first.Hierarchy.Blocks)
	}
}

// A fetch that waits for the disk does not hold up what comes after it on the
// same stream, and without time it takes only what is there.
func TestFetchFromDiskOnTheStream(t *testing.T) {
	n := startNode(t, twoTiers(t))
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 300)
	l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, Mode: client.ModeSet})
	if err != nil {
		t.Fatal(err)
	}
	if l.Usable == 0 || l.Usable == len(names) || l.Shortfalls[0].Reason != client.ReasonTimeout {
		t.Errorf("without time: %d usable, %v", l.Usable, l.Shortfalls)
	}
	for _, tier := range l.Tiers {
		if tier == client.TierNVMe {
			t.Error("without time: a block came from disk")
		}
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := n.Metrics().Hierarchy; m.RequestedBlocks != m.RAMHitBlocks+m.DiskHitBlocks+m.MissedBlocks || m.Fetches != 1 {
		t.Errorf("%d fetches, requested %d = %d + %d + %d", m.Fetches, m.RequestedBlocks, m.RAMHitBlocks, m.DiskHitBlocks, m.MissedBlocks)
	}
	l, err = c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[:100], Timeout: 10 * time.Second})
	if err != nil || l.Usable != 100 {
		t.Fatalf("with time: %+v, %v", l, err)
	}
	checkLease(t, l, names[:100], 1)
	if m := n.Metrics().Hierarchy; m.Fetches != 2 {
		t.Errorf("a fetch from disk counted as %d", m.Fetches-1)
	}
}

func TestDurableCommit(t *testing.T) {
	cfg := twoTiers(t)
	cfg.FlushAfter = time.Hour
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(diskPage, 1))
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, 5)
	outcomes, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{Durable: true},
		func(row, part int, dst []byte) error { fillPage(dst, names[row], part); return nil })
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range outcomes {
		if o != client.OutcomeCommitted {
			t.Errorf("block %d: %v", i, o)
		}
	}
	if m := n.Metrics(); m.Hierarchy.StoredBlocks != 5 {
		t.Errorf("%d blocks on disk when a durable commit answered, want 5", m.Hierarchy.StoredBlocks)
	}
}

// makeRoom drops the blocks that are in RAM: a prefetch takes no room from what
// was used just now.
func makeRoom(t testing.TB, c *client.Client, ns paging.NamespaceID, names []paging.BlockName) {
	t.Helper()
	p, err := c.Lookup(t.Context(), ns, names, 0)
	if err != nil {
		t.Fatal(err)
	}
	var resident []paging.BlockName
	for i, tier := range p.Tiers {
		if tier == client.TierRAM {
			resident = append(resident, names[i])
		}
	}
	if _, err := c.Drop(t.Context(), ns, resident); err != nil {
		t.Fatal(err)
	}
}

// A prefetch reports each block once as it becomes ready, and its end.
func TestPrefetch(t *testing.T) {
	n := startNode(t, twoTiers(t))
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 300)
	cold := names[:20] // written first, evicted first
	makeRoom(t, c, ns, names)
	p, err := c.Lookup(t.Context(), ns, cold, 0)
	if err != nil || p.Usable != 20 || p.Tiers[0] != client.TierNVMe {
		t.Fatalf("lookup: %+v, %v", p, err)
	}
	ticket, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: cold, Timeout: 20 * time.Second})
	if err != nil || ticket.Admitted < 10 {
		t.Fatalf("prefetch: %+v, %v", ticket, err)
	}
	if _, err := ticket.Wait(t.Context()); err != nil {
		t.Fatalf("wait: %v", err)
	}
	l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: cold[:ticket.Admitted]})
	if err != nil || l.Usable != ticket.Admitted {
		t.Fatalf("fetch without time: %+v, %v", l, err)
	}
	checkLease(t, l, cold, 1)
	if m := n.Metrics().Hierarchy; m.PrefetchUseful != int64(ticket.Admitted) || m.PrefetchWasted != 0 {
		t.Errorf("useful %d of %d, wasted %d", m.PrefetchUseful, ticket.Admitted, m.PrefetchWasted)
	}
}

// What a prefetch holds ends with its ticket or its attachment.
func TestPrefetchEnds(t *testing.T) {
	n := startNode(t, twoTiers(t))
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 300)
	makeRoom(t, c, ns, names)
	e := n.raw(t, "", &kvtierv1.Hello{})
	begin := func() uint64 {
		res, err := e.pages.Prefetch(e.ctx, &kvtierv1.PrefetchRequest{Attachment: e.id, NamespaceId: ns[:], BlockNames: packNames(names[:10])})
		if err != nil || res.GetTicket() == 0 {
			t.Fatal(res, err)
		}
		return res.GetTicket()
	}
	ticket := begin()
	if _, err := e.pages.Cancel(e.ctx, &kvtierv1.CancelRequest{Attachment: e.id, Ticket: ticket}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is held after the cancel", func() bool { return n.Metrics().Hierarchy.ForeseenBytes == 0 })
	eventually(t, "they are cold again", func() bool {
		if _, err := c.Demote(t.Context(), ns, names[:10], client.TierNone); err != nil { // a load that had begun may end after the first
			t.Fatal(err)
		}
		p, err := c.Lookup(t.Context(), ns, names[:10], 0)
		return err == nil && p.Tiers[0] == client.TierNVMe && p.Tiers[9] == client.TierNVMe
	})
	begin()
	e.conn.Close()
	e.tether.Close()
	eventually(t, "nothing is held after the attachment", func() bool { m := n.Metrics(); return m.Hierarchy.ForeseenBytes == 0 && m.Prefetches == 0 })
}

func TestRetentionVerbs(t *testing.T) {
	n := startNode(t, twoTiers(t))
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 20)
	absent := blockNames(9000, 1)
	check := func(what string, got []client.ItemOutcome, err error, want ...client.ItemOutcome) {
		t.Helper()
		if err != nil || len(got) != len(want) {
			t.Fatalf("%s: %v, %v", what, got, err)
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("%s: block %d: %v, want %v", what, i, got[i], want[i])
			}
		}
	}
	two := []paging.BlockName{names[0], absent[0]}
	got, err := c.Retain(t.Context(), ns, two, client.Retention{Priority: 80, TTL: time.Minute})
	check("retain", got, err, client.ItemAccepted, client.ItemMissing)
	got, err = c.Pin(t.Context(), ns, two, time.Minute)
	check("pin", got, err, client.ItemAccepted, client.ItemMissing)
	l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[1:2], First: 1})
	if err != nil || l.Usable != 1 {
		t.Fatal(l, err)
	}
	got, err = c.Drop(t.Context(), ns, names[1:3])
	check("drop", got, err, client.ItemDeferred, client.ItemAccepted)
	checkLease(t, l, names[1:2], 1)
	got, err = c.Drop(t.Context(), ns, names[1:3])
	check("drop again", got, err, client.ItemMissing, client.ItemMissing)
	got, err = c.Demote(t.Context(), ns, names[5:6], client.TierNone)
	check("demote", got, err, client.ItemAccepted)
}

func TestTwoNodesOnOneDirectory(t *testing.T) {
	cfg := twoTiers(t)
	startNode(t, cfg)
	second := servertest.Config(t)
	second.Dir, second.NVMeBytes = cfg.Dir, cfg.NVMeBytes
	if _, err := server.Open(t.Context(), second, server.Options{Drivers: servertest.Drivers()}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("second node on the directory: %v, want unavailable", err)
	}
}

// RAM full of leases: a fetch of what is on disk says so at once, whatever time
// it was given.
func TestFetchIntoFullRAM(t *testing.T) {
	cfg := twoTiers(t)
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 400)
	var leases []*client.Lease
	full := false
	for at := 0; at+20 <= len(names) && !full; at += 20 {
		l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[at : at+20], Mode: client.ModeSet, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
		full = l.Usable < 20
	}
	if !full {
		t.Fatal("RAM did not fill up")
	}
	start := time.Now()
	l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[395:], Mode: client.ModeSet, Timeout: 10 * time.Second})
	if err != nil || l.Usable != 0 || l.Shortfalls[0].Reason != client.ReasonNoSpace {
		t.Errorf("fetch into full RAM: %+v, %v", l, err)
	}
	if d := time.Since(start); d > slack*time.Second {
		t.Errorf("it took %v to say so", d)
	}
	for _, l := range append(leases, l) {
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// What is stored under one cache salt is not there under another, in RAM, on
// disk or after a restart, and a layout that differs in one field is as far away.
func TestSaltsAndLayoutsAreApart(t *testing.T) {
	cfg := twoTiers(t)
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	salted := testNamespace(diskPage, 1)
	salted.Salt = []byte("s1")
	ns, err := c.RegisterNamespace(t.Context(), salted)
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, 40)
	write(t, c, ns, names)
	otherSalt, otherLayout := salted, salted
	otherSalt.Salt = []byte("s2")
	otherLayout.Layout.KVDType += "_scaled"
	usable := func(of paging.Namespace) int {
		t.Helper()
		id, err := c.RegisterNamespace(t.Context(), of)
		if err != nil {
			t.Fatal(err)
		}
		l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: id, Names: names, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer l.ReleaseAsync()
		return l.Usable
	}
	check := func(when string) {
		t.Helper()
		if own, salt, layout := usable(salted), usable(otherSalt), usable(otherLayout); own != len(names) || salt != 0 || layout != 0 {
			t.Errorf("%s: %d of %d blocks under their own salt, %d under another, %d under another layout", when, own, len(names), salt, layout)
		}
	}
	check("in RAM")
	eventually(t, "all is on disk", func() bool { return n.Metrics().Hierarchy.DirtyBytes == 0 })
	if _, err := c.Demote(t.Context(), ns, names, client.TierRAM); err != nil {
		t.Fatal(err)
	}
	check("demoted")
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	again := startNode(t, cfg)
	c = again.client(t, client.Config{})
	check("after a restart")
}

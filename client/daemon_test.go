package client_test

import (
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// The tests of this file run the client against the real daemon.

func startDaemon(t testing.TB, change func(*server.Config)) *servertest.Node {
	t.Helper()
	cfg := servertest.Config(t)
	if change != nil {
		change(&cfg)
	}
	return servertest.Start(t, cfg, servertest.Drivers())
}

// daemonFaces are the configs of a client in place (false) and of one that streams.
func daemonFaces(n *servertest.Node) map[bool]client.Config {
	base := client.Config{Engine: "test", StallTimeout: 5 * time.Second, CallTimeout: 20 * time.Second}
	near, far := base, base
	near.Socket = n.Config.Socket
	if addr := n.Addr(); addr != nil {
		far.Address = addr.String()
	}
	return map[bool]client.Config{false: near, true: far}
}

func TestDaemonNearAndFar(t *testing.T) {
	n := startDaemon(t, func(cfg *server.Config) { cfg.Listen = "127.0.0.1:0" })
	names := chain(1, 60)
	for streamed, cfg := range daemonFaces(n) {
		c := open(t, cfg)
		ns := register(t, c)
		mine := names[:30]
		if streamed {
			mine = names[30:]
		}
		write(t, c, ns, mine)
		write(t, c, ns, mine) // exists: as good
	}
	for streamed, cfg := range daemonFaces(n) {
		c := open(t, cfg)
		ns := register(t, c)
		prefix, err := c.Lookup(t.Context(), ns, chain(1, 70), 0)
		if err != nil || prefix.Usable != 60 || prefix.UsableTokens != 960 || prefix.Tiers[0] != client.TierRAM {
			t.Errorf("streamed=%v: lookup: %+v, %v", streamed, prefix, err)
		}
		lease := fetch(t, c, ns, chain(1, 70))
		if lease.Usable != 60 || len(lease.Shortfalls) == 0 || lease.Shortfalls[0].Block != 60 {
			t.Errorf("streamed=%v: %d blocks, shortfalls %v", streamed, lease.Usable, lease.Shortfalls)
		}
		if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context())); err != nil {
			t.Errorf("streamed=%v: %v", streamed, err)
		}
		set, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: []paging.BlockName{names[50], chain(9, 1)[0], names[3]}, Mode: client.ModeSet})
		if err != nil || set.Usable != 2 || set.Rows != 3 {
			t.Fatalf("streamed=%v: set: %+v, %v", streamed, set, err)
		}
		for row, name := range map[int]paging.BlockName{0: names[50], 2: names[3]} {
			view, ok := set.Page(row, 1)
			if !ok {
				t.Errorf("streamed=%v: row %d of the set has no page", streamed, row)
				continue
			}
			if err := errors.Join(checkPage(name, 1, view.Bytes()), view.Close()); err != nil {
				t.Errorf("streamed=%v: %v", streamed, err)
			}
		}
		if _, ok := set.Page(1, 0); ok {
			t.Errorf("streamed=%v: a page of a block that is not stored", streamed)
		}
		set.ReleaseAsync()
	}
	eventually(t, "no lease left", func() bool { return n.Metrics().Leases == 0 })
}

func TestDaemonPrefixLease(t *testing.T) {
	n := startDaemon(t, nil)
	c := open(t, daemonFaces(n)[false])
	ns := register(t, c)
	names := chain(1, 20)
	write(t, c, ns, names)
	head := fetch(t, c, ns, names[:12])
	tail, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[12:], PrefixLease: head.ID})
	if err != nil || tail.Usable != 8 || tail.Rows != 8 {
		t.Fatalf("blocks after a lease: %+v, %v", tail, err)
	}
	if err := errors.Join(readAll(tail, names[12:], 2), tail.Release(t.Context()), head.Release(t.Context())); err != nil {
		t.Error(err)
	}
	if _, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[12:], PrefixLease: head.ID}); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("blocks after a released lease: %v", err)
	}
}

func TestDaemonRetentionAndPrefetch(t *testing.T) {
	n := startDaemon(t, func(cfg *server.Config) {
		cfg.Dir, cfg.NVMeBytes = filepath.Join(filepath.Dir(cfg.Socket), "data"), 64<<20
	})
	c := open(t, daemonFaces(n)[false])
	ns := register(t, c)
	names := chain(1, 8)
	write(t, c, ns, names)
	check := func(verb string, outcomes []client.ItemOutcome, err error, want ...client.ItemOutcome) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", verb, err)
			return
		}
		for i, o := range outcomes {
			ok := false
			for _, w := range want {
				ok = ok || o == w
			}
			if !ok {
				t.Errorf("%s: block %d: %v, want %v", verb, i, o, want)
			}
		}
	}
	outcomes, err := c.Retain(t.Context(), ns, names, client.Retention{Priority: 80, TTL: time.Minute, RefreshOnHit: true})
	check("retain", outcomes, err, client.ItemAccepted)
	outcomes, err = c.Pin(t.Context(), ns, names[:2], time.Minute)
	check("pin", outcomes, err, client.ItemAccepted)
	outcomes, err = c.Pin(t.Context(), ns, names[:2], 0)
	check("unpin", outcomes, err, client.ItemAccepted)
	outcomes, err = c.Retain(t.Context(), ns, chain(7, 2), client.Retention{Priority: 1})
	check("retain of nothing", outcomes, err, client.ItemMissing)
	outcomes, err = c.Demote(t.Context(), ns, names, client.TierRAM)
	check("demote", outcomes, err, client.ItemAccepted, client.ItemDeferred)
	eventually(t, "demotion", func() bool {
		prefix, err := c.Lookup(t.Context(), ns, names, 0)
		return err == nil && prefix.Usable == 8 && prefix.Tiers[7] == client.TierNVMe
	})

	ticket, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: names, Priority: 50})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for block := range ticket.Ready() {
		seen[block] = true
	}
	why, err := ticket.Wait(t.Context())
	if err != nil || why != client.ReasonNone || len(seen) != 8 || ticket.Admitted != 8 {
		t.Errorf("prefetch: %d of %d blocks ready, ended with %v, %v", len(seen), ticket.Admitted, why, err)
	}
	if err := ticket.Cancel(t.Context()); err != nil {
		t.Errorf("cancel of an ended prefetch: %v", err)
	}
	lease := fetch(t, c, ns, names)
	if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context())); err != nil || lease.Usable != 8 {
		t.Errorf("after the prefetch: %d blocks, %v", lease.Usable, err)
	}
	outcomes, err = c.Drop(t.Context(), ns, names)
	check("drop", outcomes, err, client.ItemAccepted, client.ItemDeferred)
}

func TestDaemonRestart(t *testing.T) {
	dir := t.TempDir()
	var cfg server.Config
	n := startDaemon(t, func(c *server.Config) {
		c.Dir, c.NVMeBytes = filepath.Join(dir, "data"), 64<<20
		cfg = *c
	})
	c := open(t, daemonFaces(n)[false])
	ns := register(t, c)
	names := chain(1, 20)
	outcomes, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{Durable: true},
		func(row, part int, dst []byte) error {
			fillPage(names[row], part, dst)
			return nil
		})
	if err != nil {
		t.Fatal(outcomes, err)
	}
	lease := fetch(t, c, ns, names)
	view, ok := lease.Page(3, 0)
	if !ok {
		t.Fatal("no view")
	}
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("a call without a daemon: %v", err)
	}
	if err := checkPage(names[3], 0, view.Bytes()); err != nil {
		t.Errorf("an open view after the daemon's end: %v", err)
	}

	n = servertest.Start(t, cfg, servertest.Drivers())
	began := time.Now()
	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, Timeout: 5 * time.Second})
	if err != nil || again.Usable != 20 {
		t.Fatalf("durable pages after the restart: %+v, %v", again, err)
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("hits are back after %v", d)
	}
	if err := readAll(again, names, 2); err != nil {
		t.Error(err)
	}
	if again.Tiers[0] != client.TierNVMe {
		t.Errorf("served from %v", again.Tiers[0])
	}
	if err := checkPage(names[3], 0, view.Bytes()); err != nil {
		t.Errorf("an open view beside a new attachment: %v", err)
	}
	if err := errors.Join(view.Close(), lease.Release(t.Context()), again.Release(t.Context())); err != nil {
		t.Error(err)
	}
	eventually(t, "no lease left", func() bool { return n.Metrics().Leases == 0 })
}

// More is written than RAM takes, while 32 readers read in place: every page
// that a reader gets is the right one, and none is lost.
func TestDaemonUnderEvictionPressure(t *testing.T) {
	n := startDaemon(t, func(cfg *server.Config) { cfg.RAMBytes = 8 << 20 })
	c := open(t, daemonFaces(n)[false])
	ns := register(t, c)
	const chains, length = 40, 20 // 16 MiB
	var work sync.WaitGroup
	for w := range 4 {
		work.Go(func() {
			for i := w; i < chains; i += 4 {
				outcomes, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: chain(i, length)}, client.CommitOptions{},
					func(row, part int, dst []byte) error {
						fillPage(chain(i, length)[row], part, dst)
						return nil
					})
				if err != nil && !errors.Is(err, paging.ErrNoSpace) {
					t.Error(outcomes, err)
				}
			}
		})
	}
	for r := range 32 {
		work.Go(func() {
			for i := range 20 {
				names := chain((r*7+i*3)%chains, length)
				lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
				if err != nil {
					t.Error(err)
					return
				}
				if err := readAll(lease, names, 2); err != nil {
					t.Error(err)
				}
				if i%2 == 0 {
					lease.ReleaseAsync()
				} else if err := lease.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	eventually(t, "no lease left", func() bool {
		m := n.Metrics()
		return m.Leases == 0 && m.Hierarchy.LeasedBytes == 0
	})
	if c.Metrics().Pages == 0 {
		t.Error("nothing was read")
	}
}

func TestDaemonWithOnePageOfStaging(t *testing.T) {
	n := startDaemon(t, nil)
	cfg := daemonFaces(n)[false]
	cfg.StagingBytes = 16 << 10
	c := open(t, cfg)
	namespace := testNamespace()
	namespace.Layout.Parts = namespace.Layout.Parts[:1]
	ns, err := c.RegisterNamespace(t.Context(), namespace)
	if err != nil {
		t.Fatal(err)
	}
	names := chain(1, 400)
	var writers sync.WaitGroup
	for i := range 8 {
		writers.Go(func() {
			if err := tryWrite(t.Context(), c, ns, names[i*50:(i+1)*50]); err != nil {
				t.Error(err)
			}
		})
	}
	writers.Wait()
	lease := fetch(t, c, ns, names)
	if err := errors.Join(readAll(lease, names, 1), lease.Release(t.Context())); err != nil || lease.Usable != 400 {
		t.Errorf("%d blocks, %v", lease.Usable, err)
	}
}

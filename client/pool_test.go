package client_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// openPool starts a daemon with an HBM tier on the host device and a client that
// gets its memory.
func openPool(t *testing.T) (*servertest.Node, *client.Client) {
	t.Helper()
	n := startDaemon(t, func(cfg *server.Config) { cfg.HBMBytes = 32 << 20 })
	cfg := daemonFaces(n)[false]
	cfg.DevicePool = true
	return n, open(t, cfg)
}

func fetchUp(t *testing.T, c *client.Client, ns paging.NamespaceID, names []paging.BlockName) *client.Lease {
	t.Helper()
	lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, Wanted: client.TierHBM, Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

func TestPagesOnTheDevice(t *testing.T) {
	n, c := openPool(t)
	ns := register(t, c)
	names := chain(1, 20)
	write(t, c, ns, names)
	for _, from := range []client.Tier{client.TierRAM, client.TierHBM} {
		lease := fetchUp(t, c, ns, names)
		if lease.Usable != 20 || lease.Tiers[0] != from || lease.Tiers[19] != from {
			t.Errorf("%d blocks from %v, want 20 from %v", lease.Usable, lease.Tiers, from)
		}
		pool, err := c.Pool()
		if err != nil {
			t.Fatal(err)
		}
		for row, name := range names {
			slot, ok := lease.Slot(row, 1)
			if !ok {
				t.Fatalf("no slot of row %d", row)
			}
			at := pool.Offset(slot)
			if err := checkPage(name, 1, pool.Memory[at:at+int64(slot.Bytes)]); err != nil || at%pool.UnitBytes != 0 {
				t.Errorf("row %d at %d of the pool: %v", row, at, err)
			}
		}
		if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context())); err != nil {
			t.Error(err)
		}
	}
	if m := n.Metrics(); m.Hierarchy.DeviceHitBlocks != 20 || m.Hierarchy.FilledPages != 40 || m.HBM.Pages != 40 {
		t.Errorf("device hits %d, filled %d, pages %d", m.Hierarchy.DeviceHitBlocks, m.Hierarchy.FilledPages, m.HBM.Pages)
	}
	plain := open(t, daemonFaces(n)[false])
	if _, err := plain.Fetch(t.Context(), client.FetchRequest{Namespace: register(t, plain), Names: names, Wanted: client.TierHBM}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a client without the pool asks for it: %v", err)
	}
	if _, err := plain.Pool(); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a client without the pool: %v", err)
	}
}

// Two engines decode with paged attention over the same pages, where they lie:
// the block table counts units of the pool.
func TestAttentionInPlace(t *testing.T) {
	n, writer := openPool(t)
	const tokens, kvHeads, dim, blocks = 16, 2, 64, 6
	l := gpu.NHD(gpu.BF16, tokens, kvHeads, dim)
	layout := testNamespace()
	layout.Layout.BlockTokens = tokens
	layout.Layout.Parts = []paging.Part{{Name: "kv", PageBytes: uint64(l.PageStride), BlocksPerPage: 1}}
	ns, err := writer.RegisterNamespace(t.Context(), layout)
	if err != nil {
		t.Fatal(err)
	}
	names := chain(3, blocks)
	a, err := writer.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: names})
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	var all []byte // the pages one after another
	for row := range a.Rows() {
		page := a.Page(row, 0)
		for i := 0; i < len(page); i += 2 {
			gpu.BF16.Store(page[i:], float32(random.NormFloat64()))
		}
		all = append(all, page...)
	}
	if _, err := a.Commit(t.Context(), client.CommitOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		cfg := daemonFaces(n)[false]
		cfg.DevicePool = true
		c := open(t, cfg)
		if _, err := c.RegisterNamespace(t.Context(), layout); err != nil {
			t.Fatal(err)
		}
		lease := fetchUp(t, c, ns, names)
		pool, err := c.Pool()
		if err != nil || lease.Usable != blocks {
			t.Fatalf("%d blocks, %v", lease.Usable, err)
		}
		at := gpu.Attention{Layout: l, QHeads: 8, QType: gpu.FP32, Pages: int(int64(len(pool.Memory)) / pool.UnitBytes), MaxPages: blocks, SeqLens: []int32{tokens*blocks - 5}}
		at.PageBytes, at.PageStride = l.PageStride, pool.UnitBytes
		for row := range blocks {
			slot, _ := lease.Slot(row, 0)
			at.Table = append(at.Table, int32(pool.Offset(slot)/pool.UnitBytes))
		}
		got, q := decode(t, at, pool.Memory)
		want := at
		want.Layout, want.Pages, want.Table = l, blocks, []int32{0, 1, 2, 3, 4, 5}
		if rel := gpu.RelativeError(got, want.Reference(q, all)); !(rel < 3e-6) {
			t.Errorf("relative error %.2g", rel)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// decode runs attention on a host device of this process.
func decode(t *testing.T, a gpu.Attention, pool []byte) (out, q []byte) {
	t.Helper()
	d, err := host.Open(host.Config{MemoryBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	mapped, err := d.Register(pool)
	if err != nil {
		t.Fatal(err)
	}
	own, err := d.Alloc(1<<19, gpu.Private)
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(3, 4))
	for i := int64(0); i < a.QBytes(); i += 4 {
		gpu.FP32.Store(own.Bytes()[i:], float32(random.NormFloat64()))
	}
	a.Pool, a.Q, a.Out = mapped.Addr(), own.Addr(), own.Addr()+1<<18
	if err := errors.Join(s.Launch(&a), gpu.Sync(t.Context(), s)); err != nil {
		t.Fatal(err)
	}
	out, q = slices.Clone(own.Bytes()[1<<18:][:a.OutBytes()]), slices.Clone(own.Bytes()[:a.QBytes()])
	if err := errors.Join(mapped.Free(), own.Free(), s.Close(), d.Close()); err != nil {
		t.Error(err)
	}
	return out, q
}

// A daemon that goes away leaves the views of its device pool readable; the client
// attaches to the next one and finds another pool.
func TestPoolOutlivesItsDaemon(t *testing.T) {
	n, c := openPool(t)
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	lease := fetchUp(t, c, ns, names)
	view, ok := lease.Page(0, 0)
	if !ok {
		t.Fatal("no view")
	}
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := checkPage(names[0], 0, view.Bytes()); err != nil {
		t.Errorf("after the daemon stopped: %v", err)
	}
	again := servertest.Start(t, n.Config, servertest.Drivers())
	eventually(t, "attached again", func() bool { return c.Ready(t.Context()) == nil })
	write(t, c, ns, names)
	next := fetchUp(t, c, ns, names)
	if err := errors.Join(readAll(next, names, 2), checkPage(names[0], 0, view.Bytes()), view.Close(), next.Release(t.Context())); err != nil {
		t.Error(err)
	}
	lease.ReleaseAsync()
	eventually(t, "no lease left", func() bool { return again.Metrics().Leases == 0 })
}

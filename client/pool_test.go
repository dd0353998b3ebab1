package client_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
	"github.com/kvtier/kvtier/tier"
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

// Pages that are written on the device are committed there, and an attention over
// pool and working pages together has one base address.
func TestWriteOnTheDevice(t *testing.T) {
	n := startDaemon(t, func(cfg *server.Config) { cfg.HBMBytes = 32 << 20 })
	cfg := daemonFaces(n)[false]
	cfg.DevicePool, cfg.WorkingBytes = true, 1<<20
	c := open(t, cfg)
	ns := register(t, c)
	names := chain(1, 8)
	a, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: names, Tier: client.TierHBM})
	if err != nil || a.Rows() != 8 {
		t.Fatalf("%v", err)
	}
	pool, err := c.Pool()
	if err != nil {
		t.Fatal(err)
	}
	for row := range a.Rows() {
		for part := range 2 {
			page := a.Page(row, part)
			fillPage(names[row], part, page)
			slot, ok := a.Slot(row, part)
			if at := pool.Offset(slot); !ok || &pool.Memory[at] != &page[0] {
				t.Fatalf("working page at %d does not lie in the range of the pool", at)
			}
		}
	}
	outcomes, err := a.Commit(t.Context(), client.CommitOptions{})
	if err != nil || outcomes[0] != client.OutcomeCommitted || outcomes[7] != client.OutcomeCommitted {
		t.Fatalf("%v, %v", outcomes, err)
	}
	lease := fetchUp(t, c, ns, names)
	if lease.Tiers[0] != client.TierHBM || lease.Usable != 8 {
		t.Errorf("%d blocks from %v after a commit on the device", lease.Usable, lease.Tiers)
	}
	down := fetch(t, c, ns, names)
	if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context()), readAll(down, names, 2), down.Release(t.Context())); err != nil {
		t.Error(err)
	}
	if m := n.Metrics(); m.Hierarchy.FilledPages != 0 || m.Hierarchy.GatherErrors != 0 {
		t.Errorf("filled %d pages, %d rows failed", m.Hierarchy.FilledPages, m.Hierarchy.GatherErrors)
	}
	if out, err := c.Demote(t.Context(), ns, names, client.TierHBM); err != nil || out[0] != client.ItemAccepted || n.Metrics().Hierarchy.DeviceBlocks != 0 {
		t.Errorf("demote from the device: %v, %v, %d blocks stay", out, err, n.Metrics().Hierarchy.DeviceBlocks)
	}
	if _, err := open(t, daemonFaces(n)[false]).Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: chain(2, 1), Tier: client.TierHBM}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("without working pages: %v", err)
	}
}

// recorded is a device tier of which the test knows where commits went.
type recorded struct {
	server.HBM
	gathered []tier.Ref
}

func (r *recorded) Gather(pages []tier.Page, from [][]tier.Span, refs []tier.Ref, host [][]byte, errs []error) {
	r.gathered = append(r.gathered, refs...)
	r.HBM.Gather(pages, from, refs, host, errs)
}

// An engine's own KV cache: K and V of each part lie in planes of their own, and
// blocks go in and come out where the engine wants them.
func TestRegion(t *testing.T) {
	conf, drivers, device := servertest.Config(t), servertest.Drivers(), new(recorded)
	conf.HBMBytes = 32 << 20
	openHBM := drivers.HBM
	drivers.HBM = func(ctx context.Context, cfg server.Config, log *slog.Logger, added func(string)) (_ server.HBM, err error) {
		device.HBM, err = openHBM(ctx, cfg, log, added)
		return device, err
	}
	n := servertest.Start(t, conf, drivers)
	face := daemonFaces(n)[false]
	face.DevicePool = true
	c := open(t, face)
	ns := register(t, c)
	const blocks, page0, page1 = 16, 16 << 10, 4096
	mem, err := shm.CreateStaging("kvtier-test-engine", blocks*(page0+page1))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	fd, err := syscall.Dup(mem.FD())
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "engine")
	defer file.Close()
	request := client.RegionRequest{Namespace: ns, File: file, Bytes: mem.Size(), Blocks: blocks, Parts: []client.RegionPart{
		{Part: 0, BlockStride: page0 / 2, Pieces: 2, PieceStride: blocks * page0 / 2},
		{Part: 1, Offset: blocks * page0, BlockStride: page1},
	}}
	region, err := c.RegisterRegion(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	at := func(block, part int) [][]byte { // the pieces of a page
		if part == 1 {
			return [][]byte{mem.Bytes()[blocks*page0+block*page1:][:page1]}
		}
		k := mem.Bytes()[block*page0/2:][:page0/2]
		return [][]byte{k, mem.Bytes()[blocks*page0/2+block*page0/2:][:page0/2]}
	}
	names := chain(1, 6)
	where := []int{3, 0, 15, 7, 8, 1}
	for i, name := range names {
		for part, size := range []int{page0, page1} {
			page := make([]byte, size)
			fillPage(name, part, page)
			for _, piece := range at(where[i], part) {
				page = page[copy(piece, page):]
			}
		}
	}
	a, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: names, Region: region, Blocks: where})
	if err != nil {
		t.Fatal(err)
	}
	if err := region.Drop(t.Context()); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("drop under an open attempt: %v", err)
	}
	if out, err := a.Commit(t.Context(), client.CommitOptions{}); err != nil || out[5] != client.OutcomeCommitted {
		t.Fatalf("%v, %v", out, err)
	}
	clear(mem.Bytes())
	lease := fetch(t, c, ns, names)
	if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context())); err != nil {
		t.Error(err)
	}
	back := []int{4, 5, 6, 9, 10, 11, 12}
	got, err := c.FetchInto(t.Context(), client.FetchIntoRequest{Namespace: ns, Names: chain(1, 7), Region: region, Blocks: back, Timeout: time.Second})
	if err != nil || got.Usable != 6 || len(got.Shortfalls) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	for i, name := range names {
		for part := range 2 {
			if err := checkPage(name, part, slices.Concat(at(back[i], part)...)); err != nil {
				t.Error(err)
			}
		}
	}
	// The head came from the device, where the commit had put it, and a page that was
	// damaged there comes from RAM.
	if got.Tiers[0] != client.TierHBM {
		t.Errorf("served from %v", got.Tiers)
	}
	clear(mem.Bytes())
	device.Bytes(device.gathered[2*2], page0)[100] ^= 1 // part 0 of the third block
	if got, err = c.FetchInto(t.Context(), client.FetchIntoRequest{Namespace: ns, Names: names, Region: region, Blocks: back[:6], Timeout: time.Second}); err != nil ||
		got.Usable != 6 || got.Tiers[1] != client.TierHBM || got.Tiers[2] != client.TierRAM || len(got.Shortfalls) != 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	for i, name := range names {
		for part := range 2 {
			if err := checkPage(name, part, slices.Concat(at(back[i], part)...)); err != nil {
				t.Errorf("after damage: %v", err)
			}
		}
	}
	if m := n.Metrics().Hierarchy; m.CorruptPages != 1 || m.DroppedCopies != 1 {
		t.Errorf("%d damaged pages were found, %d copies dropped", m.CorruptPages, m.DroppedCopies)
	}
	// What does not fit is refused at once.
	for name, spoil := range map[string]func(r *client.RegionRequest){
		"beyond the end": func(r *client.RegionRequest) { r.Blocks = 17 },
		"wrong stride":   func(r *client.RegionRequest) { r.Parts = []client.RegionPart{{Part: 1, BlockStride: 1 << 40}} },
		"blocks overlap": func(r *client.RegionRequest) { r.Parts = []client.RegionPart{{Part: 1, BlockStride: page1 - 16}} },
		"pieces overlap": func(r *client.RegionRequest) {
			r.Parts = []client.RegionPart{{Part: 0, BlockStride: page0 / 2, Pieces: 2, PieceStride: page0 / 2}}
		},
		"odd pieces":   func(r *client.RegionRequest) { r.Parts = []client.RegionPart{{Part: 0, Pieces: 3}} },
		"no such part": func(r *client.RegionRequest) { r.Parts = []client.RegionPart{{Part: 2}} },
		"other length": func(r *client.RegionRequest) { r.Bytes += 4096 },
	} {
		bad := request
		spoil(&bad)
		if _, err := c.RegisterRegion(t.Context(), bad); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.FetchInto(t.Context(), client.FetchIntoRequest{Namespace: ns, Names: names[:1], Region: region, Blocks: []int{16}}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a block out of range: %v", err)
	}
	if err := errors.Join(region.Drop(t.Context()), region.Drop(t.Context())); err != nil {
		t.Error(err)
	}
	if _, err := c.FetchInto(t.Context(), client.FetchIntoRequest{Namespace: ns, Names: names[:1], Region: region, Blocks: []int{1}}); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("a region that was dropped: %v", err)
	}
	_ = n
}

// What an engine had on the device goes back when it is gone: its leases, its
// working pages, its regions.
func TestDeviceMemoryGoesBack(t *testing.T) {
	n := startDaemon(t, func(cfg *server.Config) { cfg.HBMBytes = 32 << 20 })
	eventually(t, "the pool has grown", func() bool { return !n.Metrics().HBM.Growing })
	before := n.Metrics().HBM.HeldBytes
	cfg := daemonFaces(n)[false]
	cfg.DevicePool, cfg.WorkingBytes = true, 1<<20
	c, err := client.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	lease := fetchUp(t, c, ns, names)
	a, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: chain(2, 4), Tier: client.TierHBM})
	if err != nil || a.Rows() != 4 || lease.Usable != 4 {
		t.Fatalf("%v", err)
	}
	if held := n.Metrics().HBM.HeldBytes; held != before+1<<20 {
		t.Errorf("held %d with working pages, before %d", held, before)
	}
	_ = c.Close() // with a lease and an attempt open, as a process that dies
	eventually(t, "everything is back", func() bool {
		m := n.Metrics()
		return m.Leases == 0 && m.Attempts == 0 && m.HBM.HeldBytes == before && m.Attachments == 0
	})
	other := open(t, daemonFaces(n)[false])
	write(t, other, register(t, other), chain(2, 4))
}

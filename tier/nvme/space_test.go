package nvme

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// TestGivesSpaceBack: what stays empty beyond the reserve leaves the disk.
func TestGivesSpaceBack(t *testing.T) {
	cfg := diskConfig(t)
	cfg.keepEvery, cfg.idleAfter = 5*time.Millisecond, 20*time.Millisecond
	tr := mustOpen(t, cfg)
	refs := fill(t, tr, 0, 65_536)
	files := func() int64 {
		var n int64
		entries, err := os.ReadDir(filepath.Join(cfg.Dir, segmentDir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if info, err := e.Info(); err == nil {
				n += info.Size()
			}
		}
		return n
	}
	if u := tr.Usage(); u.HeldBytes != testBudget || files() > testBudget {
		t.Errorf("a full tier holds %d bytes, %d in files, want the budget of %d", u.HeldBytes, files(), testBudget)
	}
	tr.Free(refs...)
	until(t, "segments given back", func() bool { return tr.Usage().HeldBytes == cfg.AheadBytes && files() == cfg.AheadBytes })
	if m := tr.Metrics(); m.SegmentsAdded-m.SegmentsRemoved != 1 {
		t.Errorf("%d segments added, %d removed, want one more", m.SegmentsAdded, m.SegmentsRemoved)
	}
	if again := fill(t, tr, 1000, 65_536); len(again) != len(refs) {
		t.Errorf("room for %d pages, before for %d", len(again), len(refs))
	}
}

// TestClassesTurnOver: the budget of one page size serves another.
func TestClassesTurnOver(t *testing.T) {
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	for round, bytes := range []uint32{4096, 65_536, 20_000, testSegment, 4096} {
		refs := fill(t, tr, uint64(round)<<32, bytes)
		u := tr.Usage()
		if want := int64(testBudget/testSegment) * (testSegment / int64(roundUp(int(bytes)))); int64(len(refs)) != want || u.Pages != want {
			t.Errorf("%d pages of %d bytes fit, %d counted, want %d", len(refs), bytes, u.Pages, want)
		}
		tr.Free(refs...)
	}
}

// TestPagesLongerThanSegments: longer segments take the place of short ones.
func TestPagesLongerThanSegments(t *testing.T) {
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	small := fill(t, tr, 0, 4096)
	const big = 3*testSegment + 100
	if _, _, err := store(t.Context(), tr, 1<<40, big); !errors.Is(err, paging.ErrNoSpace) {
		t.Fatalf("store of %d bytes in a full tier: %v, want %v", big, err, paging.ErrNoSpace)
	}
	if _, ok := tr.Reclaim(big, func(uint32) bool { return false }); ok {
		t.Error("reclaimed although nothing is movable")
	}
	owners, ok := tr.Reclaim(big, func(uint32) bool { return true })
	if !ok {
		t.Fatal("nothing to reclaim")
	}
	if most := 5 * testSegment / 4096; len(owners) > most {
		t.Errorf("%d pages are to go, want at most %d", len(owners), most)
	}
	for _, o := range owners {
		tr.Free(small[o])
	}
	p, r := mustStore(t, tr, 1<<40, big)
	mustLoad(t, tr, 1<<40, p, r)
	if u := tr.Usage(); u.HeldBytes > u.BudgetBytes {
		t.Errorf("%d bytes held, budget %d", u.HeldBytes, u.BudgetBytes)
	}
}

// TestPageLongerThanBudget is refused at once, also while segments are empty.
func TestPageLongerThanBudget(t *testing.T) {
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	until(t, "the reserve is written", func() bool { return tr.Usage().HeldBytes == 2*testSegment })
	if _, _, err := store(t.Context(), tr, 1, testBudget+1); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("store of more than the budget: %v, want %v", err, paging.ErrNoSpace)
	}
}

// TestNamespaceRaisesSegments: the largest part of a layout is known before its
// first page.
func TestNamespaceRaisesSegments(t *testing.T) {
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	ns := tiertest.Namespace(2)
	ns.Layout.Parts[0].PageBytes = 2 * testSegment
	if err := tr.PutNamespace(ns); err != nil {
		t.Fatal(err)
	}
	mustStore(t, tr, 1, 2*testSegment)
}

// TestLowerBudget: a restart with a smaller budget keeps the fullest segments.
func TestLowerBudget(t *testing.T) {
	mem := vfs.NewMem()
	cfg := memConfig(mem, nil)
	tr := mustOpen(t, cfg)
	refs := fill(t, tr, 0, 65_536)
	var thin []tier.Ref
	for _, r := range refs {
		if placeOf(r).Extent%2 == 0 && placeOf(r).Offset > 0 {
			thin = append(thin, r)
		}
	}
	tr.Free(thin...)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.BudgetBytes = testBudget / 2
	again, found := reopen(t, cfg)
	if u := again.Usage(); u.HeldBytes > cfg.BudgetBytes || len(found) != testBudget/2/65_536 {
		t.Errorf("%d pages in %d bytes, want %d in %d", len(found), u.HeldBytes, testBudget/2/65_536, cfg.BudgetBytes)
	}
	for p, r := range found {
		mustLoad(t, again, nameNumber(p), p, r)
	}
	if more := fill(t, again, 1<<32, 65_536); len(more) != 0 {
		t.Errorf("%d more pages fit a full tier", len(more))
	}
}

// TestNumbersOfSegments: a number is not given twice while records may name it.
func TestNumbersOfSegments(t *testing.T) {
	mem := vfs.NewMem()
	cfg := memConfig(mem, nil)
	tr := mustOpen(t, cfg)
	refs := fill(t, tr, 0, 65_536)
	last := placeOf(slices.Max(refs)).Extent
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	for id := paging.ExtentID(1); id <= last; id++ {
		if err := mem.Remove(filepath.Join("tier", segmentName(id))); err != nil {
			t.Fatal(err)
		}
	}
	again, found := reopen(t, cfg)
	if len(found) != 0 {
		t.Errorf("%d pages without segments", len(found))
	}
	if _, r := mustStore(t, again, 1, 4096); placeOf(r).Extent <= last {
		t.Errorf("segment %d was used again", placeOf(r).Extent)
	}
}

// TestAlignment: aligned memory moves without a copy, other memory through a
// buffer, both right, also for lengths that are no whole units.
func TestAlignment(t *testing.T) {
	cfg := diskConfig(t)
	tr := mustOpen(t, cfg)
	if remark := tr.Usage().Reason; remark != "" {
		t.Skipf("no direct I/O here: %s", remark)
	}
	mem := arena(t, 2, 64<<10)
	for n, bytes := range []int{1, 4095, 4096, 5000, 64 << 10, 64<<10 - 1} {
		for _, shift := range []int{0, 1, 513} {
			src, dst := mem[0][:cap(mem[0])], mem[1][:cap(mem[1])]
			src, dst = src[min(shift, len(src)-bytes):][:bytes], dst[min(shift, len(dst)-bytes):][:bytes]
			number := uint64(n*1000 + shift)
			tiertest.FillPage(src, testNS, number)
			p := tiertest.Identity(testNS, number, src)
			refs := make([]tier.Ref, 1)
			if err := tr.Store(t.Context(), []tier.Page{p}, [][]byte{src}, []uint32{1}, refs); err != nil {
				t.Fatal(err)
			}
			guard := mem[1][:cap(mem[1])]
			for i := range guard {
				guard[i] = 0xEE
			}
			if err := tr.Load(t.Context(), p, refs[0], dst); err != nil {
				t.Fatal(err)
			}
			if got := tiertest.Identity(testNS, number, dst); got != p {
				t.Errorf("%d bytes at %d: wrong bytes", bytes, shift)
			}
			clear(dst)
			for i, c := range guard {
				if c != 0xEE && c != 0 {
					t.Fatalf("%d bytes at %d: byte %d beyond the page was written", bytes, shift, i)
				}
			}
		}
	}
	m := tr.Metrics()
	if m.UnalignedReads == 0 || m.UnalignedWrites == 0 {
		t.Errorf("%d reads and %d writes through a buffer, want some of the unaligned", m.UnalignedReads, m.UnalignedWrites)
	}
	before := m
	for n := range uint64(20) {
		tiertest.FillPage(mem[0], testNS, n)
		p := tiertest.Identity(testNS, n, mem[0])
		refs := make([]tier.Ref, 1)
		if err := tr.Store(t.Context(), []tier.Page{p}, [][]byte{mem[0]}, []uint32{1}, refs); err != nil {
			t.Fatal(err)
		}
		if err := tr.Load(t.Context(), p, refs[0], mem[1]); err != nil {
			t.Fatal(err)
		}
	}
	if m := tr.Metrics(); m.UnalignedReads != before.UnalignedReads || m.UnalignedWrites != before.UnalignedWrites {
		t.Error("aligned memory went through a buffer")
	}
}

// TestBatchesAreJoined: pages side by side are one write.
func TestBatchesAreJoined(t *testing.T) {
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	pages, src := make([]tier.Page, 32), make([][]byte, 32)
	refs := make([]tier.Ref, 32)
	for i := range pages {
		pages[i], src[i] = tiertest.Page(testNS, uint64(i), 4000)
	}
	if err := tr.Store(t.Context(), pages, src, make([]uint32, 32), refs); err != nil {
		t.Fatal(err)
	}
	if m := tr.Metrics(); m.Writes != 1 || m.Groups != 1 || m.GroupPages != 32 || m.WrittenBytes != 32*4096 || m.StoredBytes != 32*4000 {
		t.Errorf("%d writes of %d bytes, %d groups of %d pages, want one of each", m.Writes, m.WrittenBytes, m.Groups, m.GroupPages)
	}
	for i, p := range pages {
		mustLoad(t, tr, uint64(i), p, refs[i])
	}
}

// TestPacer: many writes at once when no read is about, else one; the depth is
// bounded in number and in bytes.
func TestPacer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPacer(0)
		running := func(n int, bytes int64) int {
			var mu sync.Mutex
			begun := 0
			for range n {
				go func() {
					if p.writeBegins(bytes) {
						mu.Lock()
						begun++
						mu.Unlock()
					}
				}()
			}
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			return begun
		}
		if got := running(20, 4096); got != writeDepth {
			t.Errorf("%d small writes at once, want %d", got, writeDepth)
		}
		p.readBegins()
		for range writeDepth {
			p.writeEnds(4096, 0)
		}
		synctest.Wait()
		if p.writes != 1 {
			t.Errorf("%d writes at once beside a read, want 1", p.writes)
		}
		p.setHung(1)
		synctest.Wait()
		if p.writes != writeDepth {
			t.Errorf("%d writes at once beside a read that hangs, want %d", p.writes, writeDepth)
		}
		p.close()
		synctest.Wait()
	})
	p := newPacer(0)
	for range 2 {
		p.writeBegins(2 << 20)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.roomLocked(2 << 20) {
		t.Error("a third write of 2 MiB may start")
	}
}

// TestWriteCap holds writes to the bytes per second that were set.
func TestWriteCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPacer(1 << 20)
		began := time.Now()
		for range 30 {
			p.writeBegins(1 << 18)
			p.writeEnds(1<<18, 0)
		}
		if d := time.Since(began); d < 7*time.Second || d > 8*time.Second {
			t.Errorf("7.5 MiB at 1 MiB/s took %v", d)
		}
	})
}

// TestCloseEndsTheWaitForTheCap: a write that waits for its allowance does not
// hold up Close.
func TestCloseEndsTheWaitForTheCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPacer(1)
		if !p.writeBegins(1 << 20) {
			t.Fatal("the first write waits for nothing and was refused")
		}
		p.writeEnds(1<<20, 0)
		began := time.Now()
		late := make(chan bool)
		go func() { late <- p.writeBegins(1) }() // due in 12 days
		synctest.Wait()
		p.close()
		if <-late {
			t.Error("the write that waited began after close")
		}
		if d := time.Since(began); d != 0 {
			t.Errorf("close took %v", d)
		}
		if p.writes != 0 || p.bytes != 0 {
			t.Errorf("%d writes of %d bytes count as running", p.writes, p.bytes)
		}
	})
}

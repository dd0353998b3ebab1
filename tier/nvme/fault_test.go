package nvme

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func wantState(t *testing.T, tr *Tier, want tier.State) {
	t.Helper()
	until(t, "state "+want.String(), func() bool { return tr.Usage().State == want })
}

// wantBypass waits for the bypass and checks what it means to callers.
func wantBypass(t *testing.T, tr *Tier, page tier.Page, r tier.Ref, reason string) {
	t.Helper()
	wantState(t, tr, tier.Bypass)
	if u := tr.Usage(); !strings.Contains(u.Reason, reason) {
		t.Errorf("bypass for the reason %q, want one about %q", u.Reason, reason)
	}
	if _, _, err := store(t.Context(), tr, 1<<40, 4096); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("store in bypass: got %v, want %v", err, paging.ErrUnavailable)
	}
	mustLoad(t, tr, nameNumber(page), page, r)
}

func TestHungRead(t *testing.T) {
	f := &faults{}
	cfg := memConfig(vfs.NewMem(), f)
	cfg.HangAfter = 500 * time.Millisecond
	tr := mustOpen(t, cfg)
	hung, hungRef := mustStore(t, tr, 1, 70_000)
	good, goodRef := mustStore(t, tr, 2, 4096) // in another segment
	release := make(chan struct{})
	name := segmentName(placeOf(hungRef).Extent)
	f.set(func(f *faults) {
		f.before = func(file string) error {
			if file == name {
				<-release
			}
			return nil
		}
	})
	dst := make([]byte, hung.Bytes)
	var unsettled []<-chan struct{}
	expire := func() {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		err := tr.Load(ctx, hung, hungRef, dst)
		if !errors.Is(err, paging.ErrExpired) {
			t.Fatalf("load of a page that hangs: got %v, want %v", err, paging.ErrExpired)
		}
		if c := tier.Unsettled(err); c != nil {
			unsettled = append(unsettled, c)
		}
	}
	expire()
	if len(unsettled) != 1 {
		t.Fatal("the read runs on, but Unsettled is nil")
	}
	mustLoad(t, tr, 2, good, goodRef)
	until(t, "the hang is noticed", func() bool { return tr.Metrics().HungReads == 1 })
	mustStore(t, tr, 3, 4096) // and does not hold writes back

	// A freed page whose read runs keeps its slot.
	tr.Free(hungRef)
	for n := range uint64(20) {
		_, r := mustStore(t, tr, 100+n, 70_000)
		if r == hungRef {
			t.Fatal("the slot was used again while a read into the caller's memory runs")
		}
	}
	if u := tr.Usage(); u.DeadBytes != 70_000 {
		t.Errorf("%d dead bytes, want 70000", u.DeadBytes)
	}
	select {
	case <-unsettled[0]:
		t.Error("settled while the read runs")
	default:
	}

	close(release)
	<-unsettled[0]
	until(t, "the slot is free", func() bool { return tr.Usage().DeadBytes == 0 })
	until(t, "the hang is over", func() bool { return tr.Metrics().HungReads == 0 })
}

// TestAllReadersHang: loads are refused at once instead of piling up.
func TestAllReadersHang(t *testing.T) {
	f := &faults{}
	cfg := memConfig(vfs.NewMem(), f)
	cfg.HangAfter = 500 * time.Millisecond
	tr := mustOpen(t, cfg)
	p, r := mustStore(t, tr, 1, 4096)
	release := make(chan struct{})
	f.set(func(f *faults) { f.before = func(string) error { <-release; return nil } })
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range cfg.Readers {
		wg.Go(func() { load(ctx, tr, p, r) })
	}
	until(t, "the hang is noticed", func() bool { return tr.Metrics().HungReads == int64(cfg.Readers) })
	until(t, "loads are refused", func() bool {
		return errors.Is(tr.Load(t.Context(), p, r, make([]byte, 4096)), paging.ErrUnavailable)
	})
	cancel()
	close(release)
	wg.Wait()
	until(t, "loads again", func() bool {
		_, err := load(t.Context(), tr, p, r)
		return err == nil
	})
}

func TestHungWrite(t *testing.T) {
	f := &faults{}
	cfg := memConfig(vfs.NewMem(), f)
	cfg.HangAfter = 500 * time.Millisecond
	tr := mustOpen(t, cfg)
	p, r := mustStore(t, tr, 1, 4096)
	release := make(chan struct{})
	let := sync.OnceFunc(func() { close(release) })
	t.Cleanup(let) // before Close
	var hang atomic.Bool
	hang.Store(true)
	f.set(func(f *faults) {
		f.write = func(name string, _ int64) error {
			if hang.Load() && strings.HasSuffix(name, segSuffix) {
				<-release
			}
			return nil
		}
	})
	page, b := tiertest.Page(testNS, 2, 4096)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	refs := make([]tier.Ref, 1)
	err := tr.Store(ctx, []tier.Page{page}, [][]byte{b}, []uint32{1}, refs)
	if !errors.Is(err, paging.ErrExpired) || refs[0] != 0 {
		t.Fatalf("store that hangs: ref %d, %v, want %v", refs[0], err, paging.ErrExpired)
	}
	settled := tier.Unsettled(err)
	if settled == nil {
		t.Fatal("the write runs on, but Unsettled is nil")
	}
	wantBypass(t, tr, p, r, "not answered a write")
	hang.Store(false)
	let()
	<-settled
	wantState(t, tr, tier.Ready)
	mustStore(t, tr, 3, 4096)
	if u := tr.Usage(); u.Pages != 2 || u.InFlightBytes != 0 {
		t.Errorf("usage %+v, want 2 pages and none in flight", u)
	}
}

// TestWriteErrors: one error fails one page; several in a row, a full disk or a
// failed sync put the tier in bypass until a probe succeeds.
func TestWriteErrors(t *testing.T) {
	for name, fault := range map[string]struct {
		err    error
		sync   bool
		stores int // until the bypass
		want   error
	}{
		"input/output error": {err: unix.EIO, stores: maxWriteFailures, want: paging.ErrIO},
		"disk full":          {err: unix.ENOSPC, stores: 1, want: paging.ErrIO},
		"failed sync":        {err: unix.EIO, sync: true, stores: 1, want: paging.ErrIO},
	} {
		t.Run(name, func(t *testing.T) {
			f := &faults{}
			tr := mustOpen(t, memConfig(vfs.NewMem(), f))
			p, r := mustStore(t, tr, 1, 20_000)
			inject := func(err error) {
				f.set(func(f *faults) {
					f.write = func(string, int64) error { return err }
					f.sync = func(string) error { return err }
					if fault.sync {
						f.write = nil
					} else {
						f.sync = nil
					}
				})
			}
			inject(fault.err)
			for n := range uint64(fault.stores) {
				_, ref, err := store(t.Context(), tr, 10+n, 20_000)
				if ref != 0 || !errors.Is(err, fault.want) && !errors.Is(err, paging.ErrUnavailable) {
					t.Errorf("store %d: ref %d, %v, want %v", n, ref, err, fault.want)
				}
				if state := tr.Usage().State; state == tier.Bypass && n+1 < uint64(fault.stores) {
					t.Errorf("bypass after %d errors, want %d", n+1, fault.stores)
				}
			}
			wantBypass(t, tr, p, r, fault.err.Error())
			inject(nil)
			wantState(t, tr, tier.Ready)
			mustStore(t, tr, 50, 20_000)
			if u := tr.Usage(); u.Pages != 2 || u.PageBytes != 40_000 || u.InFlightBytes != 0 {
				t.Errorf("usage %+v, want 2 pages of 40000 bytes", u)
			}
		})
	}
}

// TestBatchWithAnError: a status for each page, and after a restart exactly the
// pages that were said to be there.
func TestBatchWithAnError(t *testing.T) {
	f := &faults{}
	mem := vfs.NewMem()
	tr := mustOpen(t, memConfig(mem, f))
	var writes atomic.Int64
	f.set(func(f *faults) {
		f.write = func(name string, _ int64) error {
			if strings.HasSuffix(name, segSuffix) && writes.Add(1) == 3 {
				return unix.ENOSPC
			}
			return nil
		}
	})
	sizes := []uint32{4096, 20_000, 70_000, 9000} // a write each
	pages, src := make([]tier.Page, 4), make([][]byte, 4)
	refs := make([]tier.Ref, 4)
	for i := range pages {
		pages[i], src[i] = tiertest.Page(testNS, uint64(i), sizes[i])
	}
	err := tr.Store(t.Context(), pages, src, make([]uint32, 4), refs)
	if err == nil {
		t.Fatal("a batch with a full disk: no error")
	}
	if c := tier.Unsettled(err); c != nil {
		<-c
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	_, found := reopen(t, memConfig(mem, nil))
	for i, p := range pages {
		if found[p] != refs[i] {
			t.Errorf("page %d: Store said %d, restart says %d", i, refs[i], found[p])
		}
	}
	if len(found) == 4 {
		t.Error("all pages are there")
	}
}

// faultyIndex injects errors into writes of the index.
type faultyIndex struct {
	err atomic.Pointer[error]
	// match: "" is every write, else the suffix of the files.
	match string
}

func (f *faultyIndex) set(err error) {
	if err == nil {
		f.err.Store(nil)
		return
	}
	f.err.Store(&err)
}

// MaybeError implements errorfs.Injector.
func (f *faultyIndex) MaybeError(op errorfs.Op) error {
	if op.Kind.ReadOrWrite() != errorfs.OpIsWrite || !strings.Contains(op.Path, indexName) || !strings.HasSuffix(op.Path, f.match) {
		return nil
	}
	if err := f.err.Load(); err != nil {
		return *err
	}
	return nil
}

func (f *faultyIndex) String() string { return "faulty index" }

// TestIndexDiskFull: the index waits for room, the tier is in bypass meanwhile,
// and goes on by itself with nothing lost.
func TestIndexDiskFull(t *testing.T) {
	mem := vfs.NewMem()
	index := &faultyIndex{}
	cfg := memConfig(mem, nil)
	cfg.index = errorfs.Wrap(mem, index)
	tr := mustOpen(t, cfg)
	p, r := mustStore(t, tr, 1, 4096)
	index.set(unix.ENOSPC)
	_, ref, err := store(t.Context(), tr, 2, 4096)
	if ref != 0 || !errors.Is(err, paging.ErrUnavailable) {
		t.Fatalf("store with a full disk: ref %d, %v, want %v", ref, err, paging.ErrUnavailable)
	}
	wantBypass(t, tr, p, r, "disk full")
	if err := tr.PutNamespace(tiertest.Namespace(9)); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("put a namespace with a full disk: %v, want %v", err, paging.ErrUnavailable)
	}
	tr.Free(r)
	index.set(nil)
	wantState(t, tr, tier.Ready)
	q, _ := mustStore(t, tr, 3, 4096)
	until(t, "slots freed", func() bool { return tr.Usage().DeadBytes == 0 })
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	again, found := reopen(t, memConfig(mem, nil))
	if len(found) != 1 || found[q] == 0 {
		t.Errorf("after a restart %d pages, want the one stored last", len(found))
	}
	mustLoad(t, again, 3, q, found[q])
}

// TestIndexDies: the index cannot write its log and gives up for good; another
// instance takes over what it had acknowledged.
func TestIndexDies(t *testing.T) {
	if !inChild(t) {
		return
	}
	mem := vfs.NewMem()
	index := &faultyIndex{match: ".log"}
	cfg := memConfig(mem, nil)
	cfg.index = errorfs.Wrap(mem, index)
	tr := mustOpen(t, cfg)
	want := map[tier.Page]tier.Ref{}
	for n := range uint64(20) {
		p, r := mustStore(t, tr, n, 4096)
		want[p] = r
	}
	index.set(unix.EIO)
	_, ref, err := store(t.Context(), tr, 100, 4096)
	if ref != 0 || err == nil {
		t.Fatalf("store without a log: ref %d, %v", ref, err)
	}
	for p, r := range want {
		wantBypass(t, tr, p, r, "")
		tr.Free(r)
		delete(want, p)
		break
	}
	index.set(nil)
	wantState(t, tr, tier.Ready)
	p, r := mustStore(t, tr, 200, 4096)
	want[p] = r
	until(t, "slots freed", func() bool { return tr.Usage().DeadBytes == 0 })
	if u := tr.Usage(); u.Pages != 20 {
		t.Errorf("%d pages, want 20", u.Pages)
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	again, found := reopen(t, memConfig(mem, nil))
	if len(found) != len(want) {
		t.Errorf("%d pages after a restart, want %d", len(found), len(want))
	}
	for p, r := range want {
		if found[p] != r {
			t.Errorf("page %d moved from %d to %d", nameNumber(p), r, found[p])
		}
		mustLoad(t, again, nameNumber(p), p, r)
	}
}

// TestCloseOnFullDisk ends within its bound.
func TestCloseOnFullDisk(t *testing.T) {
	if !inChild(t) {
		return
	}
	mem := vfs.NewMem()
	index := &faultyIndex{}
	cfg := memConfig(mem, nil)
	cfg.index = errorfs.Wrap(mem, index)
	tr := mustOpen(t, cfg)
	mustStore(t, tr, 1, 4096)
	index.set(unix.ENOSPC)
	store(t.Context(), tr, 2, 4096)
	wantState(t, tr, tier.Bypass)
	began := time.Now()
	if err := tr.Close(); !errors.Is(err, paging.ErrIO) {
		t.Errorf("close: %v, want %v", err, paging.ErrIO)
	}
	if d := time.Since(began); d > closeBound {
		t.Errorf("close took %v", d)
	}
}

// TestNoRoomToGrow: the file system is smaller than the budget.
func TestNoRoomToGrow(t *testing.T) {
	f := &faults{}
	var free atomic.Int64
	free.Store(4 * testSegment)
	f.free = free.Load
	cfg := memConfig(vfs.NewMem(), f)
	cfg.growWait = time.Millisecond
	tr := mustOpen(t, cfg)
	until(t, "the reserve is written", func() bool { return tr.Usage().HeldBytes == 2*testSegment })
	free.Store(0)
	n := len(fill(t, tr, 0, 65_536))
	if n != 2*testSegment/65_536 {
		t.Errorf("%d pages before the disk was full, want %d", n, 2*testSegment/65_536)
	}
	u := tr.Usage()
	if u.State != tier.Ready || !strings.Contains(u.Reason, "cannot grow") {
		t.Errorf("state %v, reason %q, want ready and a remark", u.State, u.Reason)
	}
	free.Store(1 << 40)
	until(t, "it grows again", func() bool { return tr.Usage().HeldBytes > 2*testSegment })
	mustStore(t, tr, 1000, 65_536)
}

// TestOpenOnFullDisk is an error, not a wait.
func TestOpenOnFullDisk(t *testing.T) {
	if !inChild(t) {
		return
	}
	mem := vfs.NewCrashableMem()
	index := &faultyIndex{}
	cfg := memConfig(mem, nil)
	cfg.index = errorfs.Wrap(mem, index)
	p, _ := mustStore(t, mustOpen(t, cfg), 1, 4096)
	mem = mem.CrashClone(vfs.CrashCloneCfg{})
	cfg = memConfig(mem, nil)
	cfg.index = errorfs.Wrap(mem, index)
	index.set(unix.ENOSPC)
	if _, err := Open(cfg); !errors.Is(err, paging.ErrNoSpace) && !errors.Is(err, paging.ErrIO) {
		t.Errorf("open on a full disk: %v, want %v", err, paging.ErrNoSpace)
	}
	index.set(nil)
	again, found := reopen(t, cfg)
	mustLoad(t, again, 1, p, found[p])
}

// TestSmallFileSystem fills a real one: the tier works with what there is, and
// with more once there is more.
func TestSmallFileSystem(t *testing.T) {
	mnt := t.TempDir()
	if err := unix.Mount("kvtier-test", mnt, "tmpfs", 0, "size=24m"); err != nil {
		t.Skipf("cannot mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(mnt, unix.MNT_DETACH) })
	ballast := filepath.Join(mnt, "ballast")
	write(t, ballast, strings.Repeat("x", 12<<20))
	cfg := Config{Dir: filepath.Join(mnt, "tier"), BudgetBytes: 64 << 20, SegmentBytes: 1 << 20, roomBytes: 4 << 20, growWait: time.Millisecond, keepEvery: 5 * time.Millisecond}
	tr := mustOpen(t, cfg)
	t.Cleanup(func() { tr.Close() })
	small := fill(t, tr, 0, 65_536)
	if len(small) == 0 {
		t.Fatal("nothing stored")
	}
	if u := tr.Usage(); u.State != tier.Ready || !strings.Contains(u.Reason, "cannot grow") || u.HeldBytes > 12<<20 {
		t.Errorf("%+v, want ready with a remark", u)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	held := tr.Usage().HeldBytes
	until(t, "it grows", func() bool { return tr.Usage().HeldBytes > held })
	if more := fill(t, tr, 1000, 65_536); len(more) == 0 {
		t.Error("no room after the ballast went")
	}

	// Now nothing is left even for the index. It goes on in what it has set
	// aside, then the tier is in bypass until there is room.
	write(t, ballast, "")
	fillFile(t, ballast)
	tr.Free(small...)
	last, lastRef := tier.Page{}, tier.Ref(0)
	for n := uint64(1 << 20); tr.Usage().State == tier.Ready; n += 256 {
		p, refs := storeBatch(t, tr, n, 256, 4096)
		if refs[0] == 0 {
			break
		}
		tr.Free(lastRef)
		last, lastRef = p[0], refs[0]
		tr.Free(refs[1:]...)
	}
	wantBypass(t, tr, last, lastRef, "disk full")
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	wantState(t, tr, tier.Ready)
	mustStore(t, tr, 1<<30, 4096)
}

// storeBatch stores pages first to first+n-1; refs are 0 where that failed.
func storeBatch(t *testing.T, tr *Tier, first uint64, n int, bytes uint32) ([]tier.Page, []tier.Ref) {
	t.Helper()
	pages, src := make([]tier.Page, n), make([][]byte, n)
	refs := make([]tier.Ref, n)
	for i := range pages {
		pages[i], src[i] = tiertest.Page(testNS, first+uint64(i), bytes)
	}
	err := tr.Store(t.Context(), pages, src, make([]uint32, n), refs)
	if err != nil && !errors.Is(err, paging.ErrUnavailable) {
		t.Fatal(err)
	}
	if c := tier.Unsettled(err); c != nil {
		<-c
	}
	return pages, refs
}

// fillFile appends until the file system is full.
func fillFile(t *testing.T, name string) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for b := make([]byte, 1<<20); len(b) > 0; {
		if _, err := f.Write(b); err != nil {
			b = b[:len(b)/2]
		}
	}
}

package tier_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// onDisk counts blocks that are on disk.
func (k *kit) onDisk(names []paging.BlockName) (n int) {
	for _, name := range names {
		if _, disk := k.where(name); disk {
			n++
		}
	}
	return n
}

// When blocks are written down: not at once, but after FlushAfter while the disk
// is idle, at the second hit, with a priority of 50, when that was asked for.
func TestWriteBehind(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		quiet, hit, dear, sure := chain(1, 0, 1), chain(2, 0, 1), chain(3, 0, 1), chain(4, 0, 1)
		k.put(quiet, 0, 0, tier.CommitOptions{})
		k.put(hit, 0, 0, tier.CommitOptions{})
		k.put(dear, 0, 0, tier.CommitOptions{Retention: &tier.Retention{Priority: 50}})
		k.put(sure, 0, 0, tier.CommitOptions{Durable: true})
		k.usable(hit)
		time.Sleep(time.Second)
		if got := []int{k.onDisk(quiet), k.onDisk(hit), k.onDisk(dear), k.onDisk(sure)}; !slices.Equal(got, []int{0, 0, 1, 1}) {
			t.Errorf("on disk after a second: %v", got)
		}
		k.usable(hit)
		time.Sleep(time.Second)
		if k.onDisk(hit) != 1 {
			t.Error("not on disk after the second hit")
		}
		time.Sleep(9 * time.Second)
		if k.onDisk(quiet) != 1 {
			t.Error("not on disk after FlushAfter")
		}
		if got := disk.Stores.Load(); got > 4 {
			t.Errorf("%d batches for 4 blocks", got)
		}
	})
}

// An idle flush waits for loads; blocks that somebody needs clean do not.
func TestIdleFlushYieldsToLoads(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		k.toDisk(chain(1, 0, 1))
		k.put(chain(2, 0, 1), 0, 0, tier.CommitOptions{})
		disk.SetLoad(func(context.Context, tier.Page) error { time.Sleep(30 * time.Second); return nil })
		hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: chain(1, 0, 1)})
		hold.Release()
		time.Sleep(20 * time.Second)
		if k.onDisk(chain(2, 0, 1)) != 0 {
			t.Error("flushed beside a load")
		}
		time.Sleep(10 * time.Second)
		if k.onDisk(chain(2, 0, 1)) != 1 {
			t.Error("not flushed after the load")
		}
	})
}

// Writing more than RAM holds goes at the speed of the disk, and loses nothing.
func TestWritePressure(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		disk.SetStore(func(context.Context, []tier.Page) error { time.Sleep(10 * time.Millisecond); return nil })
		names := chain(1, 0, 200)
		for i := 0; i < 200; i += 20 {
			if out := k.put(names[i:i+20], i, 0, tier.CommitOptions{}); !all(out, tier.Committed) {
				t.Fatalf("blocks from %d: %v", i, out)
			}
		}
		time.Sleep(time.Minute)
		if got := k.onDisk(names); got != 200 {
			t.Errorf("%d of 200 blocks on disk", got)
		}
		if m := k.Metrics(); m.EvictedUncopied != 0 || m.StoredBlocks != 200 || m.EvictedBlocks == 0 {
			t.Errorf("evicted %d, %d of them without a copy, stored %d", m.EvictedBlocks, m.EvictedUncopied, m.StoredBlocks)
		}
	})
}

func TestReserveWaitsForCleaningAtMostUntilItsDeadline(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		disk.SetStore(func(context.Context, []tier.Page) error { time.Sleep(time.Minute); return nil })
		k.put(chain(1, 0, ramPages), 0, 0, tier.CommitOptions{})
		began := time.Now()
		a, out, _, err := k.Reserve(within(t, time.Second), tier.ReserveRequest{Namespace: k.id, Names: chain(2, 0, 1), Deadline: time.Now().Add(time.Minute)})
		if err != nil || a != nil || out[0] != tier.WriteNoSpace || time.Since(began) != time.Second {
			t.Errorf("%v, %v after %v", out, err, time.Since(began))
		}
	})
}

// A disk that takes nothing costs copies, not service; it takes part again by itself.
func TestBypass(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		disk.SetStore(func(context.Context, []tier.Page) error { return paging.ErrUnavailable })
		disk.SetUsage(func(u tier.Usage) tier.Usage { u.State = tier.Bypass; return u })
		names := chain(1, 0, 200)
		for i := 0; i < 200; i += 20 {
			if out := k.put(names[i:i+20], i, 0, tier.CommitOptions{Durable: i == 100}); !all(out, map[bool]tier.Outcome{false: tier.Committed, true: tier.NotDurable}[i == 100]) {
				t.Fatalf("blocks from %d: %v", i, out)
			}
		}
		m := k.Metrics()
		if !m.Bypassed || m.EvictedUncopied < 200-ramPages || m.NotDurableBlocks != 20 {
			t.Errorf("bypassed %v, %d evicted without a copy, %d not durable", m.Bypassed, m.EvictedUncopied, m.NotDurableBlocks)
		}
		disk.SetStore(nil)
		disk.SetUsage(nil)
		time.Sleep(30 * time.Second)
		if m := k.Metrics(); m.Bypassed || m.DirtyBytes != 0 || m.StoredBlocks < ramPages-3 {
			t.Errorf("after the disk came back: bypassed %v, %d bytes dirty, %d blocks stored", m.Bypassed, m.DirtyBytes, m.StoredBlocks)
		}
	})
}

// A store that fails is tried again, later.
func TestStoreErrors(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		disk.SetStore(func(context.Context, []tier.Page) error { return paging.ErrIO })
		if out := k.put(chain(1, 0, 3), 0, 0, tier.CommitOptions{Durable: true}); !all(out, tier.NotDurable) {
			t.Errorf("durable on a broken disk: %v", out)
		}
		time.Sleep(30 * time.Second)
		if got := disk.Stores.Load(); got > 200 {
			t.Errorf("%d tries in 30 s", got)
		}
		disk.SetStore(nil)
		time.Sleep(30 * time.Second)
		if got := k.onDisk(chain(1, 0, 3)); got != 3 {
			t.Errorf("%d of 3 blocks on disk once it works", got)
		}
	})
}

// The disk evicts by its own policy; what is in RAM stays there.
func TestDiskEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := &tiertest.Faulty{Durable: tiertest.NewMap(tier.NVMe, 100*pageBytes)}
		defer disk.Close()
		k := open(t, plain(pageBytes), 1<<20, tier.Config{Durable: disk})
		k.toDisk(chain(1, 0, 40))
		kept := k.fetch(t.Context(), tier.FetchRequest{Names: chain(1, 0, 10)})
		for c := 2; c < 6; c++ {
			k.toDisk(chain(c, 0, 40))
		}
		if m := k.Metrics(); m.DiskBytes > 100*pageBytes || m.DiskEvictedBlocks < 60 {
			t.Errorf("%d bytes on disk, %d blocks evicted", m.DiskBytes, m.DiskEvictedBlocks)
		}
		if got := k.onDisk(chain(5, 0, 40)); got != 40 {
			t.Errorf("%d of the newest 40 blocks are on disk", got)
		}
		if got := k.onDisk(chain(1, 10, 30)); got != 0 {
			t.Errorf("%d of the oldest 30 blocks are on disk", got)
		}
		k.verify(kept, chain(1, 0, 10))
		kept.Release()
		if got := k.usable(chain(1, 0, 40)); got != 10 {
			t.Errorf("usable %d of the blocks that were held in RAM, want 10", got)
		}
	})
}

// A block that only the disk let go may leave RAM without a second copy, unless
// it is used again.
func TestShedBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := &tiertest.Faulty{Durable: tiertest.NewMap(tier.NVMe, 10*pageBytes)}
		defer disk.Close()
		k := open(t, plain(pageBytes), 1<<20, tier.Config{Durable: disk})
		k.put(chain(1, 0, 10), 0, 0, tier.CommitOptions{Durable: true})
		k.put(chain(2, 0, 10), 0, 0, tier.CommitOptions{Durable: true})
		time.Sleep(time.Minute)
		if a, b := k.onDisk(chain(1, 0, 10)), k.onDisk(chain(2, 0, 10)); a > 2 || a+b != 10 {
			t.Fatalf("%d and %d blocks on disk, want about 0 and 10", a, b)
		}
		stored := k.Metrics().StoredBlocks
		for range 2 {
			k.usable(chain(1, 0, 10))
		}
		time.Sleep(time.Minute)
		if got := k.Metrics().StoredBlocks - stored; got < 8 || k.onDisk(chain(1, 0, 10)) < 8 {
			t.Errorf("%d of the 10 blocks that were used again were written again", got)
		}
		k.put(chain(3, 0, ramPages-3), 0, 0, tier.CommitOptions{})
		if m := k.Metrics(); m.EvictedUncopied == 0 {
			t.Errorf("nothing left RAM without a copy: %+v", m)
		}
	})
}

// The head of a chain is the last to go.
func TestTailsGoFirst(t *testing.T) {
	inRAM(t, func(t *testing.T, k *kit) {
		k.put(chain(1, 0, 40), 0, 0, tier.CommitOptions{})
		k.put(chain(2, 0, 30), 0, 0, tier.CommitOptions{})
		got := k.usable(chain(1, 0, 40))
		if want := ramPages - 30; got < want-2 || got > want {
			t.Errorf("usable %d of the first chain, want its head of %d", got, want)
		}
	})
}

func TestCloseWritesTheHottestFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pageBytes, batch = 128 << 10, 128 // 16 MiB
		m := tiertest.NewMap(tier.NVMe, 64<<20)
		disk := &tiertest.Faulty{Durable: m}
		arena := openRAM(t, 40<<20, ram.Config{})
		k := &kit{t: t, ns: plain(pageBytes), ram: arena}
		k.start(tier.Config{Arena: arena, Durable: disk, FlushAfter: time.Hour})
		names := chain(1, 0, 240)
		for i := range 6 {
			k.put(names[40*i:40*i+40], 40*i, 0, tier.CommitOptions{})
			time.Sleep(2 * time.Second)
		}
		k.usable(names[:40])
		disk.SetStore(func(_ context.Context, pages []tier.Page) error {
			time.Sleep(time.Second)
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		began := time.Now()
		if err := k.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		if d := time.Since(began); d > 4*time.Second {
			t.Errorf("closed after %v", d)
		}
		if _, err := k.Fetch(t.Context(), tier.FetchRequest{Namespace: k.id, Names: names}); !errors.Is(err, paging.ErrClosed) {
			t.Errorf("fetch after close: %v", err)
		}
		if got := k.onDisk(names[:40]); got != 40 {
			t.Errorf("%d of the 40 hottest blocks are on disk", got)
		}
		if got := k.onDisk(names); got != batch {
			t.Errorf("%d blocks on disk, want those of one batch, %d", got, batch)
		}
	})
}

// After a restart blocks are served from disk, and leave it in the order of
// their last use.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := tiertest.NewMap(tier.NVMe, 100*pageBytes)
		arena := openRAM(t, 1<<20, ram.Config{})
		k := &kit{t: t, ns: plain(pageBytes), ram: arena}
		k.start(tier.Config{Arena: arena, Durable: m})
		for c := range 3 {
			k.put(chain(c, 0, 20), 0, 0, tier.CommitOptions{})
			time.Sleep(20 * time.Second)
		}
		k.put(chain(3, 0, 20), 0, 0, tier.CommitOptions{})
		if err := k.Close(within(t, time.Minute)); err != nil {
			t.Fatal(err)
		}
		m.Close()
		m = m.Reopen()
		defer m.Close()
		k.ram = openRAM(t, 1<<20, ram.Config{})
		k.start(tier.Config{Arena: k.ram, Durable: m})
		if mt := k.Metrics(); mt.Blocks != 80 || mt.DiskBytes != 80*pageBytes {
			t.Fatalf("%d blocks of %d bytes", mt.Blocks, mt.DiskBytes)
		}
		if got := k.usable(chain(3, 0, 20)); got != 20 {
			t.Errorf("usable %d after the restart", got)
		}
		k.toDisk(chain(4, 0, 40))
		for c, want := range []int{0, 20, 20, 20, 40} {
			if got := k.onDisk(chain(c, 0, 40)); got != want {
				t.Errorf("chain %d: %d blocks on disk, want %d", c, got, want)
			}
		}
	})
}

// A namespace registered while the disk took nothing becomes durable with its
// first block.
func TestNamespaceWhileBypassed(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		if err := disk.DropNamespace(k.id); err != nil {
			t.Fatal(err)
		}
		if out := k.put(chain(1, 0, 2), 0, 0, tier.CommitOptions{Durable: true}); !all(out, tier.Committed) {
			t.Errorf("durable commit: %v", out)
		}
	})
}

// A dirty block is passed over as long as clean ones can go, however old it is.
func TestDirtyBlocksStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := tiertest.NewMap(tier.NVMe, 4<<20)
		defer disk.Close()
		k := open(t, plain(pageBytes), 1<<20, tier.Config{Durable: disk, FlushAfter: time.Hour})
		old := chain(1, 0, 5)
		k.put(old, 0, 0, tier.CommitOptions{})
		for c := 2; c < 10; c++ {
			if out := k.put(chain(c, 0, 20), 0, 0, tier.CommitOptions{Durable: true}); !all(out, tier.Committed) {
				t.Fatalf("chain %d: %v", c, out)
			}
		}
		if m := k.Metrics(); m.EvictedUncopied != 0 || m.EvictedBlocks == 0 {
			t.Errorf("%d blocks evicted, %d of them without a copy", m.EvictedBlocks, m.EvictedUncopied)
		}
		if got := k.usable(old); got != 5 {
			t.Errorf("%d of 5 dirty blocks are left", got)
		}
	})
}

// The disk's policy does not see hits that RAM served; it is told when the block
// leaves RAM.
func TestHitsInRAMCountOnDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := tiertest.NewMap(tier.NVMe, 100*pageBytes)
		defer disk.Close()
		k := open(t, plain(pageBytes), 1<<20, tier.Config{Durable: disk, DiskPolicy: "lru_rev"})
		hot := chain(1, 0, 10)
		k.put(hot, 0, 0, tier.CommitOptions{Durable: true})
		k.toDisk(chain(2, 0, 40))
		k.usable(hot)
		if _, err := k.Demote(k.id, hot, tier.RAM); err != nil {
			t.Fatal(err)
		}
		k.toDisk(chain(3, 0, 40))
		k.toDisk(chain(4, 0, 40))
		if a, b := k.onDisk(hot), k.onDisk(chain(2, 0, 40)); a != 10 || b != 10 {
			t.Errorf("on disk are %d of 10 blocks that were hit in RAM, and %d of 40 older ones", a, b)
		}
	})
}

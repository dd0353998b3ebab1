package tier_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/hbm"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// openDevice opens the tier on a host device, as one extent.
func openDevice(t testing.TB, budget int64) *hbm.Arena {
	t.Helper()
	d, err := host.Open(host.Config{MemoryBytes: budget + 1<<20, PageSum: paging.Checksum, Strict: true})
	if err != nil {
		t.Fatal(err)
	}
	budget = max(budget, 1<<20)
	a, err := hbm.Open(t.Context(), hbm.Config{Device: d, BudgetBytes: budget, WorkingBytes: budget/2 - budget/2%4096, MaxPageBytes: 4096, ExtentBytes: budget / 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

const devicePage = 16384

// withDevice runs f on a Hierarchy with a device that holds 32 pages, and RAM for
// 64, in a bubble.
func withDevice(t *testing.T, cfg tier.Config, f func(t *testing.T, k *kit, device *hbm.Arena)) {
	synctest.Test(t, func(t *testing.T) {
		device := openDevice(t, 2*32*devicePage)
		cfg.Device = device
		k := open(t, plain(devicePage), 1<<20+4096*4, cfg)
		f(t, k, device)
		synctest.Wait()
	})
}

func (k *kit) up(names []paging.BlockName) *tier.Hold {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), time.Minute)
	defer cancel()
	return k.fetch(ctx, tier.FetchRequest{Names: names, Wanted: tier.HBM})
}

func (k *kit) served(hold *tier.Hold, want tier.Kind) {
	k.t.Helper()
	for i, got := range hold.Tiers {
		if got != want {
			k.t.Fatalf("row %d was served from %v, want %v", i, got, want)
		}
	}
}

// The first fetch copies to the device and keeps the copy in RAM, the second finds
// the pages there; both kinds of leases are apart.
func TestDevicePromotes(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, device *hbm.Arena) {
		names := chain(1, 0, 8)
		k.put(names, 0, 0, tier.CommitOptions{})
		if near, err := k.Fetch(k.t.Context(), tier.FetchRequest{Namespace: k.id, Names: names, Wanted: tier.HBM, NoWait: true}); near != nil || err != nil {
			t.Fatalf("pages that are in RAM only were granted on the device at once: %v", err)
		}
		first := k.up(names)
		k.served(first, tier.RAM)
		if first.Usable != 8 || first.Slots[0].Extent != device.Extents(k.ns.Tenant)[0].ID {
			t.Fatalf("usable %d, slot %+v", first.Usable, first.Slots[0])
		}
		if m := k.Metrics(); m.FilledPages != 8 || m.DeviceBytes != 8*devicePage || m.DeviceBlocks != 8 || m.LeasedBytes != 0 {
			t.Errorf("after the first: %+v", m)
		}
		near, err := k.Fetch(k.t.Context(), tier.FetchRequest{Namespace: k.id, Names: names, Wanted: tier.HBM, NoWait: true})
		if err != nil || near == nil {
			t.Fatalf("pages on the device were not granted at once: %v", err)
		}
		k.served(near, tier.HBM)
		if ram, _ := k.Resident(paging.BlockID{Namespace: k.id, Name: names[0]}); ram == 0 {
			t.Error("the lower copy went")
		}
		if !first.Release() || !near.Release() {
			t.Error("a slot was reused under its lease")
		}
		if m := k.Metrics(); m.DeviceHitBlocks != 8 || m.RAMHitBlocks != 8 || m.FilledPages != 8 {
			t.Errorf("after the second: %+v", m)
		}
	})
}

// A prefix that is longer than the device is granted from its head, whatever lay
// there before.
func TestDeviceIsSmallerThanThePrefix(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, _ *hbm.Arena) {
		names := chain(1, 0, 50)
		k.put(names, 0, 0, tier.CommitOptions{})
		k.up(names[30:]).Release() // the tail is there
		hold := k.up(names)
		if hold.Usable < 20 || hold.Usable > 32 {
			t.Errorf("%d of 50 blocks on a device for 32", hold.Usable)
		}
		if last := hold.Short[len(hold.Short)-1]; last.Reason != tier.NoSpace {
			t.Errorf("shortfall %+v", last)
		}
		hold.Release()
	})
}

// What the device alone has is copied down before it is evicted there, and a fetch
// to RAM takes it from the device.
func TestDeviceHasTheLastCopy(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, _ *hbm.Arena) {
		names := chain(1, 0, 8)
		k.put(names, 0, 0, tier.CommitOptions{})
		k.up(names).Release()
		k.put(chain(2, 0, 60), 0, 0, tier.CommitOptions{}) // RAM is full of others
		last := slices.IndexFunc(names, func(name paging.BlockName) bool {
			ram, disk := k.Resident(paging.BlockID{Namespace: k.id, Name: name})
			return ram|disk == 0
		})
		if last < 0 || k.OnDevice(paging.BlockID{Namespace: k.id, Name: names[last]}) == 0 {
			t.Fatalf("block %d: RAM is full and every copy is there, or that on the device went too", last)
		}
		hold := k.fetch(k.t.Context(), tier.FetchRequest{Names: names[last : last+1], First: last})
		k.served(hold, tier.HBM)
		if m := k.Metrics(); m.LoweredPages != 1 {
			t.Errorf("%d pages came down", m.LoweredPages)
		}
		hold.Release()
		lowered := k.Metrics().LoweredPages
		k.up(chain(2, 0, 32)).Release() // the device is full of others
		if m := k.Metrics(); m.LoweredPages == lowered {
			t.Error("nothing came down before it was evicted")
		}
		if got := k.usable(names); got != 8 {
			t.Errorf("%d of 8 blocks are left", got)
		}
	})
}

// A page that somebody wrote to on the device is found when it leaves, and another
// copy is taken.
func TestDeviceCopyIsDamaged(t *testing.T) {
	withDevice(t, tier.Config{Durable: tiertest.NewMap(tier.NVMe, 16<<20)}, func(t *testing.T, k *kit, device *hbm.Arena) {
		names := chain(1, 0, 4)
		k.put(names, 0, 0, tier.CommitOptions{Durable: true})
		hold := k.up(names)
		hold.Page(2, 0)[100] ^= 1
		hold.Release()
		if _, err := k.Demote(k.id, names, tier.RAM); err != nil {
			t.Fatal(err)
		}
		down := k.fetch(t.Context(), tier.FetchRequest{Names: names}) // compares every byte
		if down.Usable != 4 {
			t.Errorf("usable %d", down.Usable)
		}
		down.Release()
		if m := k.Metrics(); m.CorruptPages != 1 || m.LoweredPages != 3 || m.LoadedPages != 1 || m.DroppedCopies != 1 {
			t.Errorf("corrupt %d, lowered %d, loaded %d, dropped %d", m.CorruptPages, m.LoweredPages, m.LoadedPages, m.DroppedCopies)
		}
		if k.OnDevice(paging.BlockID{Namespace: k.id, Name: names[2]}) != 0 {
			t.Error("the damaged copy is still there")
		}
	})
}

// Blocks that are dropped or damaged while a lease reads them on the device stay
// until it is released.
func TestDeviceDropUnderLease(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, device *hbm.Arena) {
		names := chain(1, 0, 4)
		k.put(names, 0, 0, tier.CommitOptions{})
		hold := k.up(names)
		out, err := k.Drop(k.id, names)
		if err != nil || out[0] != tier.ItemDeferred {
			t.Errorf("drop of a leased block: %v, %v", out, err)
		}
		if k.usable(names) != 0 {
			t.Error("a dropped block was granted")
		}
		k.verify(hold, names)
		if !hold.Release() {
			t.Error("a slot was reused under its lease")
		}
		if u := device.Usage(); u.Pages != 0 {
			t.Errorf("%d pages stay on the device", u.Pages)
		}
	})
}

// Pages that an engine wrote on the device are committed there: summed, in RAM
// too, and granted on the device without another copy. What the device does not
// know is refused, and the other rows are not.
func TestCommitFromTheDevice(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, device *hbm.Arena) {
		working, err := device.NewWorking(8 * devicePage)
		if err != nil {
			t.Fatal(err)
		}
		memory := k.mapWorking(working)
		names := chain(1, 0, 5)
		a, _, _, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Abort()
		var rows []tier.CommitRow
		for i, name := range names { // each page in two pieces, the second one first
			page := k.content(name, 0)
			half := len(page) / 2
			at := i * devicePage
			copy(memory[at+half:], page[:half])
			copy(memory[at:], page[half:])
			base := working.Addr() + uint64(at)
			rows = append(rows, tier.CommitRow{Row: i, Device: [][]tier.Span{{{Addr: base + uint64(half), Bytes: int64(half)}, {Addr: base, Bytes: int64(half)}}}})
		}
		rows[3].Device[0][0].Addr = 0x1000
		out, err := a.Commit(t.Context(), rows, tier.CommitOptions{})
		if err != nil || out[0] != tier.Committed || out[3] != tier.NotReached || out[4] != tier.Committed {
			t.Fatalf("outcomes %v, %v", out, err)
		}
		rows[3].Device[0][0].Addr = working.Addr() + 3*devicePage + devicePage/2
		if out, err = a.Commit(t.Context(), rows[3:4], tier.CommitOptions{}); err != nil || out[0] != tier.Committed {
			t.Fatalf("again: %v, %v", out, err)
		}
		clear(memory)
		if k.usable(names) != 5 {
			t.Error("not all blocks are in RAM")
		}
		hold := k.up(names)
		k.served(hold, tier.HBM)
		hold.Release()
		if m := k.Metrics(); m.FilledPages != 0 || m.DeviceBlocks != 5 {
			t.Errorf("filled %d pages, %d blocks on the device", m.FilledPages, m.DeviceBlocks)
		}
		if _, err := a.Commit(t.Context(), []tier.CommitRow{{Row: 0, Device: [][]tier.Span{{{Addr: working.Addr(), Bytes: 100}}}}}, tier.CommitOptions{}); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a page of another length: %v", err)
		}
		k.scatter(hold, device, working, memory)
		if err := working.Close(); err != nil {
			t.Error(err)
		}
	})
}

// scatter brings pages back into an engine's memory, from the device and from RAM.
func (k *kit) scatter(_ *tier.Hold, device *hbm.Arena, working tier.Shared, memory []byte) {
	k.t.Helper()
	names := chain(1, 0, 2)
	up := k.up(names[:1])
	down := k.fetch(k.t.Context(), tier.FetchRequest{Names: names[1:], First: 1})
	defer up.Release()
	defer down.Release()
	errs := make([]error, 2)
	to := [][]tier.Span{{{Addr: working.Addr(), Bytes: devicePage}}, {{Addr: working.Addr() + devicePage, Bytes: 100}, {Addr: working.Addr() + 4*devicePage, Bytes: devicePage - 100}}}
	pages := []tier.Page{{Bytes: devicePage, Sum: up.Slots[0].Sum}, {Bytes: devicePage, Sum: down.Slots[0].Sum}}
	device.Scatter(pages, []tier.Ref{up.Ref(0, 0), 0}, [][]byte{nil, down.Page(0, 0)}, to, errs)
	if errs[0] != nil || errs[1] != nil {
		k.t.Fatal(errs)
	}
	want := k.content(names[1], 0)
	if string(memory[:devicePage]) != string(k.content(names[0], 0)) || string(memory[devicePage:][:100]) != string(want[:100]) || string(memory[4*devicePage:][:devicePage-100]) != string(want[100:]) {
		k.t.Error("other bytes in the engine's memory")
	}
}

// mapWorking maps working pages as an engine does.
func (k *kit) mapWorking(s tier.Shared) []byte {
	k.t.Helper()
	m, err := shm.MapReadWrite(s.FD(), s.Bytes())
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() { m.Close() })
	return m.Bytes()
}

// deviceRows are the pages of names in working pages, one after another.
func (k *kit) deviceRows(working tier.Shared, memory []byte, names []paging.BlockName, variant byte) (rows []tier.CommitRow) {
	for i, name := range names {
		page := k.content(name, 0)
		at := copy(memory[i*devicePage:], page) - 1 + i*devicePage
		memory[at] ^= variant
		rows = append(rows, tier.CommitRow{Row: i, Device: [][]tier.Span{{{Addr: working.Addr() + uint64(i*devicePage), Bytes: devicePage}}}})
	}
	return rows
}

func (k *kit) reserveOnDevice(names []paging.BlockName, ttl time.Duration) (*tier.Attempt, []tier.Outcome) {
	k.t.Helper()
	a, out, _, err := k.Reserve(k.t.Context(), tier.ReserveRequest{Namespace: k.id, Names: names, Device: true, Deadline: time.Now().Add(ttl)})
	if err != nil {
		k.t.Fatal(err)
	}
	return a, out
}

// Room on the device is set aside by Reserve: leased copies that fill it are told
// then, and a commit cannot fail for room, whatever comes in between. What was not
// committed goes back when the attempt ends, by itself or at its deadline.
func TestReserveOnTheDevice(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, device *hbm.Arena) {
		working, err := device.NewWorking(8 * devicePage)
		if err != nil {
			t.Fatal(err)
		}
		defer working.Close()
		memory := k.mapWorking(working)
		before := device.Usage().UsedBytes
		names := chain(1, 0, 5)
		a, out := k.reserveOnDevice(names, time.Minute)
		if out[4] != tier.Granted || device.Usage().UsedBytes != before+5*devicePage || k.Metrics().DeviceInFlight != 5*devicePage {
			t.Fatalf("outcomes %v, %d bytes set aside on the device", out, device.Usage().UsedBytes-before)
		}
		others := chain(2, 0, 40)
		k.put(others, 0, 0, tier.CommitOptions{})
		full := k.up(others) // all the rest of the device, leased
		if full.Usable != 32-5 {
			t.Errorf("%d of the 27 pages that are left were granted", full.Usable)
		}
		if none, out := k.reserveOnDevice(chain(3, 0, 1), time.Minute); none != nil || out[0] != tier.WriteNoSpace {
			t.Errorf("reserve on a full device: %v", out)
		}
		rows := k.deviceRows(working, memory, names, 0)
		if _, err := a.Commit(t.Context(), []tier.CommitRow{{Row: 0, Src: [][]byte{memory[:devicePage]}}}, tier.CommitOptions{}); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a page from elsewhere: %v", err)
		}
		good := rows[1].Device[0][0].Addr
		rows[1].Device[0][0].Addr = 0x1000
		if out, err := a.Commit(t.Context(), rows[:3], tier.CommitOptions{}); err != nil || out[0] != tier.Committed || out[1] != tier.NotReached {
			t.Fatalf("commit: %v, %v", out, err)
		}
		rows[1].Device[0][0].Addr = good
		if out, err := a.Commit(t.Context(), rows[1:2], tier.CommitOptions{}); err != nil || out[0] != tier.Committed {
			t.Fatalf("the row that failed, again: %v, %v", out, err)
		}
		hold := k.up(names[:3])
		k.served(hold, tier.HBM)
		hold.Release()
		full.Release()
		a.Abort()
		if m := k.Metrics(); m.DeviceInFlight != 0 || m.FilledPages != 27 {
			t.Errorf("%d bytes stay set aside, %d pages were copied up", m.DeviceInFlight, m.FilledPages)
		}
		late, _ := k.reserveOnDevice(chain(4, 0, 2), time.Second)
		time.Sleep(2 * time.Second)
		if out, err := late.Commit(t.Context(), k.deviceRows(working, memory, chain(4, 0, 2), 0), tier.CommitOptions{}); err != nil || out[0] != tier.Expired {
			t.Errorf("after the deadline: %v, %v", out, err)
		}
		if m := k.Metrics(); m.DeviceInFlight != 0 {
			t.Errorf("%d bytes stay set aside after the deadline", m.DeviceInFlight)
		}
	})
}

// A row on the device that is committed twice is compared with what is stored.
func TestDuplicateFromTheDevice(t *testing.T) {
	withDevice(t, tier.Config{}, func(t *testing.T, k *kit, device *hbm.Arena) {
		working, err := device.NewWorking(8 * devicePage)
		if err != nil {
			t.Fatal(err)
		}
		defer working.Close()
		memory := k.mapWorking(working)
		names := chain(1, 0, 2)
		a, _ := k.reserveOnDevice(names, time.Minute)
		defer a.Abort()
		for i, want := range []tier.Outcome{tier.Committed, tier.Duplicate, tier.DuplicateDivergent} {
			rows := k.deviceRows(working, memory, names, byte(i/2))
			out, err := a.Commit(t.Context(), rows, tier.CommitOptions{})
			if err != nil || out[0] != want || out[1] != want {
				t.Errorf("commit %d: %v, %v, want %v", i, out, err, want)
			}
		}
		if m := k.Metrics(); m.DivergentBlocks != 2 || m.DuplicateBlocks != 2 {
			t.Errorf("%d divergent, %d equal", m.DivergentBlocks, m.DuplicateBlocks)
		}
		hold := k.up(names)
		k.verify(hold, names) // the first bytes stay
		hold.Release()
	})
}

// Demote from the device leaves RAM alone, waits for leases, and brings down what
// is nowhere else.
func TestDemoteFromTheDevice(t *testing.T) {
	withDevice(t, tier.Config{Durable: tiertest.NewMap(tier.NVMe, 16<<20)}, func(t *testing.T, k *kit, _ *hbm.Arena) {
		names := chain(1, 0, 4)
		k.put(names, 0, 0, tier.CommitOptions{Durable: true})
		on := func(i int) paging.PartSet { return k.OnDevice(paging.BlockID{Namespace: k.id, Name: names[i]}) }
		demote := func(from tier.Kind, want tier.ItemOutcome) {
			t.Helper()
			out, err := k.Demote(k.id, names, from)
			if err != nil || slices.ContainsFunc(out, func(o tier.ItemOutcome) bool { return o != want }) {
				t.Errorf("demote from %v: %v, %v, want %v", from, out, err, want)
			}
		}
		hold := k.up(names)
		demote(tier.HBM, tier.ItemDeferred)
		k.verify(hold, names)
		if on(0) == 0 {
			t.Error("a leased copy went")
		}
		hold.Release()
		if ram, _ := k.Resident(paging.BlockID{Namespace: k.id, Name: names[0]}); on(0) != 0 || ram == 0 {
			t.Errorf("after the lease: %#x on the device, %#x in RAM", on(0), ram)
		}
		demote(tier.HBM, tier.ItemAccepted)
		k.up(names).Release()
		demote(tier.RAM, tier.ItemAccepted)
		if ram, _ := k.Resident(paging.BlockID{Namespace: k.id, Name: names[0]}); on(0) == 0 || ram != 0 {
			t.Errorf("demoted from RAM: %#x on the device, %#x in RAM", on(0), ram)
		}
		demote(tier.HBM, tier.ItemAccepted)
		if on(0) != 0 || k.usable(names) != 4 {
			t.Errorf("%#x on the device, usable %d", on(0), k.usable(names))
		}
		if _, err := k.Demote(k.id, names, tier.NVMe); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("demote from the disk: %v", err)
		}
	})
}

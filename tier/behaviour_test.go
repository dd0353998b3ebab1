package tier_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

const pageBytes = 16384

// inBubble runs a test in fake time with a Hierarchy of 1 MiB of RAM, 63 pages,
// over a map as disk that holds four times that.
func inBubble(t *testing.T, test func(t *testing.T, k *kit, disk *tiertest.Faulty)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		disk := &tiertest.Faulty{Durable: tiertest.NewMap(tier.NVMe, 4<<20)}
		t.Cleanup(func() { disk.Close() })
		test(t, open(t, plain(pageBytes), 1<<20, tier.Config{Durable: disk}), disk)
	})
}

// inRAM does the same without a disk.
func inRAM(t *testing.T, test func(t *testing.T, k *kit)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, open(t, plain(pageBytes), 1<<20, tier.Config{})) })
}

const ramPages = 63

// toDisk stores a chain and leaves it on disk only.
func (k *kit) toDisk(names []paging.BlockName) {
	k.t.Helper()
	if out := k.put(names, 0, 0, tier.CommitOptions{Durable: true}); !all(out, tier.Committed) {
		k.t.Fatalf("store: %v", out)
	}
	if _, err := k.Demote(k.id, names, tier.RAM); err != nil {
		k.t.Fatal(err)
	}
	for _, name := range names {
		if ram, disk := k.where(name); ram || !disk {
			k.t.Fatalf("block %x: in RAM %v, on disk %v", number(name), ram, disk)
		}
	}
}

// where tells whether all parts of a block are in RAM and on disk.
func (k *kit) where(name paging.BlockName) (inRAM, onDisk bool) {
	ram, disk := k.Resident(paging.BlockID{Namespace: k.id, Name: name})
	all := k.ns.Layout.AllParts()
	return ram == all, disk == all
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestConcurrentFetchesShareALoad(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		names := chain(1, 0, 4)
		k.toDisk(names)
		disk.SetLoad(func(context.Context, tier.Page) error { time.Sleep(time.Second); return nil })
		before := disk.Loads.Load()
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				hold := k.fetch(within(t, 5*time.Second), tier.FetchRequest{Names: names})
				if hold.Usable != 4 || !slices.Equal(hold.Tiers, []tier.Kind{tier.NVMe, tier.NVMe, tier.NVMe, tier.NVMe}) {
					t.Errorf("usable %d from %v", hold.Usable, hold.Tiers)
				}
				hold.Release()
			})
		}
		wg.Wait()
		if got := disk.Loads.Load() - before; got != 4 {
			t.Errorf("%d loads for 4 pages", got)
		}
	})
}

// What is not loaded in time is a shortfall; the load that runs becomes cache,
// the ones that no worker began give their slots back.
func TestFetchDeadline(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		names := chain(1, 0, 20)
		k.toDisk(names)
		disk.SetLoad(func(context.Context, tier.Page) error { time.Sleep(30 * time.Second); return nil })
		began := time.Now()
		hold := k.fetch(within(t, 2*time.Second), tier.FetchRequest{Names: names})
		if d := time.Since(began); d != 2*time.Second || hold.Usable != 0 {
			t.Errorf("usable %d after %v", hold.Usable, d)
		}
		if want := []tier.Shortfall{{Block: 0, Count: 20, Reason: tier.Timeout}}; !slices.Equal(hold.Short, want) {
			t.Errorf("shortfalls %+v, want %+v", hold.Short, want)
		}
		hold.Release()
		if got, want := k.Metrics().InFlightBytes, int64(8*pageBytes); got != want {
			t.Errorf("%d bytes are in flight, want those of the 8 workers, %d", got, want)
		}
		if out := k.put(chain(2, 0, 5), 0, 0, tier.CommitOptions{}); !all(out, tier.Committed) {
			t.Errorf("other blocks while the disk hangs: %v", out)
		}
		if got := k.usable(chain(2, 0, 5)); got != 5 {
			t.Errorf("%d other blocks are served", got)
		}
		time.Sleep(40 * time.Second)
		hold = k.fetch(t.Context(), tier.FetchRequest{Names: names, Resident: true})
		if hold.Usable != 8 {
			t.Errorf("%d blocks became cache, want 8", hold.Usable)
		}
		hold.Release()
	})
}

func TestExpiredFetchGrantsWhatIsResident(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		names := chain(1, 0, 6)
		k.put(names[:3], 0, 0, tier.CommitOptions{})
		k.toDisk(chain(1, 3, 3))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		hold := k.fetch(ctx, tier.FetchRequest{Names: names})
		if hold.Usable != 3 || len(hold.Short) != 1 || hold.Short[0] != (tier.Shortfall{Block: 3, Count: 3, Reason: tier.Cancelled}) {
			t.Errorf("usable %d, shortfalls %+v", hold.Usable, hold.Short)
		}
		hold.Release()
	})
}

func TestFullOfLeases(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		k.toDisk(chain(9, 0, 1))
		names := chain(1, 0, ramPages)
		if out := k.put(names, 0, 0, tier.CommitOptions{Durable: true}); !all(out, tier.Committed) {
			t.Fatal(out)
		}
		leases := k.fetch(t.Context(), tier.FetchRequest{Names: names})
		began := time.Now()
		hold := k.fetch(within(t, time.Minute), tier.FetchRequest{Names: chain(9, 0, 1)})
		if hold.Usable != 0 || hold.Short[0].Reason != tier.NoSpace {
			t.Errorf("fetch: usable %d, %+v", hold.Usable, hold.Short)
		}
		hold.Release()
		if out := k.put(chain(2, 0, 2), 0, 0, tier.CommitOptions{}); out[0] != tier.WriteNoSpace || out[1] != tier.NotReached {
			t.Errorf("reserve: %v", out)
		}
		if d := time.Since(began); d != 0 {
			t.Errorf("answered after %v, want at once", d)
		}
		k.verify(leases, names)
		if !leases.Release() {
			t.Error("a leased slot was reused")
		}
		if got := k.usable(chain(9, 0, 1)); got != 1 {
			t.Errorf("usable %d once there is room", got)
		}
	})
}

// The head of a prefix that is longer than RAM is granted, whatever of its tail
// is resident.
func TestPrefixLongerThanRAM(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		names := chain(1, 0, 100)
		k.toDisk(names[:50])
		if out := k.put(names[50:], 50, 0, tier.CommitOptions{Durable: true}); !all(out, tier.Committed) {
			t.Fatal(out)
		}
		for range 2 {
			before := disk.Loads.Load()
			hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
			if hold.Usable < ramPages-3 {
				t.Errorf("usable %d of %d that fit RAM: %+v", hold.Usable, ramPages, hold.Short)
			}
			if want := (tier.Shortfall{Block: hold.Usable, Count: 100 - hold.Usable, Reason: tier.NoSpace}); hold.Short[0] != want {
				t.Errorf("shortfalls %+v, want %+v", hold.Short, want)
			}
			hold.Release()
			if got := disk.Loads.Load() - before; got > int64(hold.Usable) {
				t.Errorf("%d loads for %d pages: it thrashes", got, hold.Usable)
			}
		}
	})
}

func TestFailedLoads(t *testing.T) {
	for _, test := range []struct {
		err    error
		reason tier.Reason
		kept   bool
	}{
		{paging.ErrCorrupt, tier.Corrupt, false},
		{paging.ErrIdentity, tier.Identity, false},
		{paging.ErrIO, tier.IOError, false},
		{paging.ErrUnavailable, tier.IOError, true},
	} {
		inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
			names := chain(1, 0, 10)
			k.toDisk(names)
			disk.SetLoad(func(_ context.Context, p tier.Page) error {
				if p.ID.Name == names[6] {
					return test.err
				}
				return nil
			})
			hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
			if hold.Usable != 6 || hold.Short[0] != (tier.Shortfall{Block: 6, Count: 1, Reason: test.reason}) {
				t.Errorf("%v: usable %d, %+v", test.err, hold.Usable, hold.Short)
			}
			hold.Release()
			disk.SetLoad(nil)
			if got, want := k.usable(names), map[bool]int{true: 10, false: 6}[test.kept]; got != want {
				t.Errorf("%v: usable %d afterwards, want %d", test.err, got, want)
			}
			m := k.Metrics()
			if m.CorruptPages+m.IdentityPages+m.LoadErrors != 1 || (m.DroppedCopies == 1) == test.kept {
				t.Errorf("%v: counted %+v", test.err, m)
			}
			if out := k.put(names[6:7], 6, 0, tier.CommitOptions{}); (out[0] == tier.Committed) == test.kept {
				t.Errorf("%v: storing it again: %v", test.err, out)
			}
		})
	}
}

func TestCommitTwice(t *testing.T) {
	inRAM(t, func(t *testing.T, k *kit) {
		names := chain(1, 0, 2)
		a, _, _, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
		rows := []tier.CommitRow{k.row(a, 0, names[0], 1)}
		commit := func(rows []tier.CommitRow) tier.Outcome {
			out, err := a.Commit(t.Context(), rows, tier.CommitOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return out[0]
		}
		other := []tier.CommitRow{{Row: 0, Src: [][]byte{make([]byte, pageBytes)}}}
		for i, want := range []tier.Outcome{tier.Committed, tier.Duplicate, tier.DuplicateDivergent} {
			if got := commit([][]tier.CommitRow{rows, rows, other}[i]); got != want {
				t.Errorf("commit %d: %d, want %d", i, got, want)
			}
		}
		if got := k.usable(names); got != 1 { // with the first bytes
			t.Errorf("usable %d", got)
		}
		_, out, wait, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: append(chain(1, 0, 2), names...), Deadline: time.Now().Add(time.Second)})
		if err != nil || !slices.Equal(out, []tier.Outcome{tier.Exists, tier.BeingWritten, tier.Exists, tier.BeingWritten}) || wait != time.Minute {
			t.Errorf("another attempt: %v, wait %v, %v", out, wait, err)
		}
		if _, err := a.Commit(t.Context(), []tier.CommitRow{{Row: 1, Src: [][]byte{make([]byte, 3)}}}, tier.CommitOptions{}); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a page of the wrong length: %v", err)
		}
		a.Abort()
		a.Abort()
		if out := k.put(append(names[1:2:2], names[1]), 1, 0, tier.CommitOptions{}); !slices.Equal(out, []tier.Outcome{tier.Committed, tier.Repeated}) {
			t.Errorf("after the abort: %v", out)
		}
	})
}

// What an attempt set aside is free at its deadline, without a Tick, and it can
// no longer be committed.
func TestAttemptExpires(t *testing.T) {
	inRAM(t, func(t *testing.T, k *kit) {
		names := chain(1, 0, ramPages)
		reserve := func() (*tier.Attempt, []tier.Outcome) {
			a, out, _, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
			if err != nil {
				t.Fatal(err)
			}
			return a, out
		}
		first, out := reserve()
		if !all(out, tier.Granted) {
			t.Fatal(out)
		}
		if out := k.put(chain(2, 0, 1), 0, 0, tier.CommitOptions{}); out[0] != tier.WriteNoSpace {
			t.Errorf("all is set aside, and yet %v", out)
		}
		late := k.row(first, 0, names[0], 1)
		time.Sleep(time.Minute)
		if out := k.put(chain(2, 0, 1), 0, 0, tier.CommitOptions{}); out[0] != tier.Committed {
			t.Errorf("after the deadline: %v", out)
		}
		second, out := reserve()
		if out[0] != tier.Granted {
			t.Errorf("the same blocks after the deadline: %v", out[:2])
		}
		if out, err := first.Commit(t.Context(), []tier.CommitRow{late}, tier.CommitOptions{}); err != nil || out[0] != tier.Expired {
			t.Errorf("a late commit: %v, %v", out, err)
		}
		second.Abort()
		if m := k.Metrics(); m.InFlightBytes != 0 || m.ExpiredAttempts != 1 {
			t.Errorf("%d bytes in flight, %d attempts expired", m.InFlightBytes, m.ExpiredAttempts)
		}
	})
}

// Parts of one block from two writers make it usable; without the second it is
// dropped a minute after the first.
func TestIncompleteBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := open(t, layouts()["ranks"], 1<<20, tier.Config{})
		commit := func(name paging.BlockName, part int) tier.Outcome {
			parts := paging.PartSet(0).With(part)
			a, out, _, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: []paging.BlockName{name}, Parts: parts, Want: 3, Deadline: time.Now().Add(time.Minute)})
			if err != nil || a == nil {
				t.Fatalf("reserve part %d: %v, %v", part, out, err)
			}
			defer a.Abort()
			got, err := a.Commit(t.Context(), []tier.CommitRow{k.row(a, 0, name, parts)}, tier.CommitOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return got[0]
		}
		names := chain(1, 0, 2)
		commit(names[0], 0)
		commit(names[1], 0)
		time.Sleep(30 * time.Second)
		commit(names[0], 1)
		k.Tick()
		if got := k.usable(names); got != 1 {
			t.Errorf("usable %d with the second part of the first block", got)
		}
		if got := k.fetch(t.Context(), tier.FetchRequest{Names: names, Parts: 1}); got.Usable != 2 {
			t.Errorf("part 0 alone: usable %d", got.Usable)
		} else {
			time.Sleep(31 * time.Second)
			k.Tick()
			k.verify(got, names) // dropped, but leased
			got.Release()
		}
		if m := k.Metrics(); m.IncompleteBlocks != 1 || m.Blocks != 1 || m.IncompleteOpen != 0 {
			t.Errorf("%d incomplete blocks dropped, %d blocks left", m.IncompleteBlocks, m.Blocks)
		}
	})
}

func TestDrop(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		names := chain(1, 0, 3)
		k.put(names, 0, 0, tier.CommitOptions{Durable: true})
		hold := k.fetch(t.Context(), tier.FetchRequest{Names: names[:1]})
		if out, err := k.Drop(k.id, chain(1, 0, 4)); err != nil || !slices.Equal(out, []tier.ItemOutcome{tier.ItemDeferred, tier.ItemAccepted, tier.ItemAccepted, tier.ItemMissing}) {
			t.Errorf("drop: %v, %v", out, err)
		}
		if got := k.usable(names); got != 0 {
			t.Errorf("usable %d after the drop", got)
		}
		if out := k.put(names, 0, 0, tier.CommitOptions{}); !all(out, tier.Committed) {
			t.Errorf("storing them anew while the old is leased: %v", out)
		}
		k.verify(hold, names)
		if !hold.Release() {
			t.Error("the leased slot was reused")
		}
		if m := k.Metrics(); m.Blocks != 3 {
			t.Errorf("%d blocks", m.Blocks)
		}
	})
}

// Demote takes nothing out of RAM that is nowhere else, complete or not.
func TestDemoteOfIncompleteBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := tiertest.NewMap(tier.NVMe, 4<<20)
		defer disk.Close()
		k := open(t, layouts()["ranks"], 1<<20, tier.Config{Durable: disk})
		name := chain(1, 0, 1)
		a, _, _, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: name, Parts: 1, Want: 3, Deadline: time.Now().Add(time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Commit(t.Context(), []tier.CommitRow{k.row(a, 0, name[0], 1)}, tier.CommitOptions{}); err != nil {
			t.Fatal(err)
		}
		a.Abort()
		out, err := k.Demote(k.id, name, tier.RAM)
		outcomes(t, out, err, tier.ItemDeferred)
		synctest.Wait()
		if ram, disk := k.Resident(paging.BlockID{Namespace: k.id, Name: name[0]}); ram != 0 || disk != 1 {
			t.Errorf("parts %b in RAM, %b on disk", ram, disk)
		}
		if hold := k.fetch(t.Context(), tier.FetchRequest{Names: name, Parts: 1}); hold.Usable != 1 {
			t.Errorf("usable %d", hold.Usable)
		} else {
			hold.Release()
		}
	})
}

// A set longer than RAM is granted block by block, as far as there is room.
func TestSetLongerThanRAM(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		names := chain(1, 0, 100)
		k.toDisk(names[:50])
		k.toDisk(chain(1, 50, 50))
		hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: append([]paging.BlockName{{1}}, names...), Mode: tier.ModeSet})
		if hold.Usable < ramPages-3 || hold.Usable > ramPages || len(hold.Tiers) != 101 {
			t.Errorf("%d of %d blocks that fit RAM, %d rows", hold.Usable, ramPages, len(hold.Tiers))
		}
		if hold.Short[0] != (tier.Shortfall{Block: 0, Count: 1, Reason: tier.NotFound}) || hold.Short[1].Reason != tier.NoSpace {
			t.Errorf("shortfalls %+v", hold.Short)
		}
		hold.Release()
	})
}

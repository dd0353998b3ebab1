package tier_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func outcomes(t *testing.T, out []tier.ItemOutcome, err error, want tier.ItemOutcome) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range out {
		if o != want {
			t.Fatalf("item %d: outcome %d, want %d (%v)", i, o, want, out)
		}
	}
}

// Pinned blocks outlive everything else, for their time; a quarter of RAM at most.
func TestPin(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		pinned := chain(1, 0, 10)
		k.put(pinned, 0, 0, tier.CommitOptions{})
		out, err := k.Pin(k.id, pinned, time.Hour)
		outcomes(t, out, err, tier.ItemAccepted)
		k.put(chain(2, 0, 10), 0, 0, tier.CommitOptions{Durable: true})
		out, err = k.Pin(k.id, chain(2, 0, 10), 48*time.Hour)
		if err != nil || !all16(out[:6], tier.ItemClipped) || !all16(out[6:], tier.ItemClipped) {
			t.Errorf("pin beyond the share, and for too long: %v, %v", out, err)
		}
		if got, want := k.Metrics().PinnedBytes, int64(16*pageBytes); got != want {
			t.Errorf("%d bytes pinned, want a quarter of RAM: %d", got, want)
		}
		for c := 3; c < 6; c++ {
			k.put(chain(c, 0, 40), 0, 0, tier.CommitOptions{})
		}
		if hold := k.fetch(t.Context(), tier.FetchRequest{Names: pinned, Resident: true}); hold.Usable != 10 {
			t.Errorf("%d of 10 pinned blocks are in RAM", hold.Usable)
		} else {
			hold.Release()
		}
		out, err = k.Pin(k.id, pinned[:1], 0)
		outcomes(t, out, err, tier.ItemAccepted)
		time.Sleep(time.Hour)
		k.Tick()
		if got, want := k.Metrics().PinnedBytes, int64(6*pageBytes); got != want {
			t.Errorf("%d bytes pinned after an hour, want those of 24 h: %d", got, want)
		}
		time.Sleep(24 * time.Hour)
		k.Tick()
		if m := k.Metrics(); m.PinnedBytes != 0 || m.LeasedBytes != 0 {
			t.Errorf("%d bytes pinned, %d leased in the end", m.PinnedBytes, m.LeasedBytes)
		}
	})
}

// Parts that come to pinned blocks later count against the share, and end the
// pin where there is no room in it.
func TestPinCountsLaterParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := open(t, layouts()["ranks"], 1<<20, tier.Config{})
		names := chain(1, 0, 20)
		k.put(names, 0, 1, tier.CommitOptions{})
		out, err := k.Pin(k.id, names, time.Hour)
		outcomes(t, out, err, tier.ItemAccepted)
		if got := k.Metrics().PinnedBytes; got != 20*8192 {
			t.Errorf("%d bytes pinned of the first parts, want %d", got, 20*8192)
		}
		k.put(names, 0, 2, tier.CommitOptions{})
		got, most := k.Metrics().PinnedBytes, int64(1<<20)/4
		if got > most || got < most-3*8192 || got%(2*8192) != 0 {
			t.Errorf("%d bytes pinned with the second parts, want whole blocks of nearly %d", got, most)
		}
		k.CheckInvariants()
		if out, err = k.Pin(k.id, names, 0); err != nil || !all16(out, tier.ItemAccepted) {
			t.Errorf("unpin: %v, %v", out, err)
		}
		if got := k.Metrics().PinnedBytes; got != 0 {
			t.Errorf("%d bytes pinned in the end", got)
		}
	})
}

func all16(out []tier.ItemOutcome, want tier.ItemOutcome) bool {
	return !slices.ContainsFunc(out, func(o tier.ItemOutcome) bool { return o != want })
}

func TestPinBringsUp(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		k.toDisk(chain(1, 0, 3))
		out, err := k.Pin(k.id, chain(1, 0, 3), time.Minute)
		outcomes(t, out, err, tier.ItemDeferred)
		synctest.Wait()
		if ram, _ := k.where(chain(1, 2, 1)[0]); !ram {
			t.Error("a pinned block was not brought up")
		}
	})
}

// Priorities order eviction; when their time is over they count no more.
func TestRetainOrdersEviction(t *testing.T) {
	inRAM(t, func(t *testing.T, k *kit) {
		dear, passing := chain(1, 0, 10), chain(2, 0, 10)
		k.put(dear, 0, 0, tier.CommitOptions{Retention: &tier.Retention{Priority: 90}})
		k.put(passing, 0, 0, tier.CommitOptions{})
		out, err := k.Retain(k.id, passing, tier.Retention{Priority: 90, TTL: time.Minute})
		outcomes(t, out, err, tier.ItemAccepted)
		for c := 3; c < 6; c++ {
			k.put(chain(c, 0, 40), 0, 0, tier.CommitOptions{})
		}
		if a, b := k.usable(dear), k.usable(passing); a != 10 || b != 10 {
			t.Errorf("usable %d and %d of the retained blocks", a, b)
		}
		time.Sleep(2 * time.Minute)
		for c := 6; c < 9; c++ {
			k.put(chain(c, 0, 40), 0, 0, tier.CommitOptions{})
		}
		if a, b := k.usable(dear), k.usable(passing); a != 10 || b != 0 {
			t.Errorf("usable %d and %d after the time of the second", a, b)
		}
		out, err = k.Retain(k.id, dear, tier.Retention{Priority: 101})
		outcomes(t, out, err, tier.ItemClipped)
		out, err = k.Demote(k.id, dear, tier.RAM)
		outcomes(t, out, err, tier.ItemRejected) // no disk
	})
}

func TestRefreshOnHit(t *testing.T) {
	inRAM(t, func(t *testing.T, k *kit) {
		names := chain(1, 0, 1)
		k.put(names, 0, 0, tier.CommitOptions{Retention: &tier.Retention{Priority: 7, TTL: time.Minute, RefreshOnHit: true}})
		for range 5 {
			time.Sleep(40 * time.Second)
			k.usable(names)
		}
		info, _, err := k.Block(t.Context(), paging.BlockID{Namespace: k.id, Name: names[0]}, false)
		if err != nil || info.Priority != 7 || info.Retained != time.Minute || info.Hits != 5 {
			t.Errorf("%+v, %v", info, err)
		}
	})
}

// A block whose time to live is over is an ordinary one from then on, in RAM and
// on disk: hit again it stays, left alone it goes before those with a priority.
func TestHitAfterTTL(t *testing.T) {
	retained := tier.CommitOptions{Durable: true, Retention: &tier.Retention{Priority: 9, TTL: time.Minute, RefreshOnHit: true}}
	plain := tier.CommitOptions{Durable: true}
	late := func(k *kit, names []paging.BlockName) {
		time.Sleep(2 * time.Minute)
		if got := k.usable(names); got != len(names) {
			k.t.Fatalf("usable %d of %d", got, len(names))
		}
		info, _, err := k.Block(k.t.Context(), paging.BlockID{Namespace: k.id, Name: names[0]}, false)
		if err != nil || info.Priority != 0 || info.Retained != 0 {
			k.t.Errorf("after the hit: %+v, %v", info, err)
		}
	}
	t.Run("ram", func(t *testing.T) {
		inRAM(t, func(t *testing.T, k *kit) {
			hit, other := chain(1, 0, 10), chain(2, 0, 10)
			k.put(hit, 0, 0, retained)
			k.put(other, 0, 0, plain)
			late(k, hit)
			k.put(chain(3, 0, ramPages-12), 0, 0, plain)
			if a, b := k.usable(hit), k.usable(other); a != 10 || b == 10 {
				t.Errorf("usable %d of those that were hit, %d of the others", a, b)
			}
		})
	})
	t.Run("ram without a refresh", func(t *testing.T) {
		inRAM(t, func(t *testing.T, k *kit) {
			old, other := chain(1, 0, 10), chain(2, 0, 10)
			k.put(other, 0, 0, tier.CommitOptions{Retention: &tier.Retention{Priority: 1}})
			k.put(old, 0, 0, retained)
			time.Sleep(2 * time.Minute)
			for c := 3; c < 6; c++ {
				k.put(chain(c, 0, 40), 0, 0, plain)
			}
			if a, b := k.usable(old), k.usable(other); a == 10 || b != 10 {
				t.Errorf("usable %d of those whose time is over, %d of the others", a, b)
			}
		})
	})
	t.Run("disk", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			disk := tiertest.NewMap(tier.NVMe, 40*pageBytes)
			defer disk.Close()
			k := open(t, layouts()["plain"], 1<<20, tier.Config{Durable: disk})
			hit, other := chain(1, 0, 10), chain(2, 0, 10)
			k.put(other, 0, 0, plain)
			k.put(hit, 0, 0, retained)
			for _, names := range [][]paging.BlockName{hit, other} {
				if _, err := k.Demote(k.id, names, tier.RAM); err != nil {
					t.Fatal(err)
				}
			}
			late(k, hit)
			if _, err := k.Demote(k.id, hit, tier.RAM); err != nil { // its hits are told to the disk's policy
				t.Fatal(err)
			}
			k.put(chain(3, 0, 25), 0, 0, plain)
			if a, b := k.onDisk(hit), k.onDisk(other); a != 10 || b == 10 {
				t.Errorf("on disk %d of those that were hit, %d of the others", a, b)
			}
		})
	})
}

func TestDemote(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		clean, dirty, leased := chain(1, 0, 2), chain(2, 0, 2), chain(3, 0, 2)
		k.put(clean, 0, 0, tier.CommitOptions{Durable: true})
		k.put(dirty, 0, 0, tier.CommitOptions{})
		k.put(leased, 0, 0, tier.CommitOptions{Durable: true})
		hold := k.fetch(t.Context(), tier.FetchRequest{Names: leased})
		for _, x := range []struct {
			names []paging.BlockName
			want  tier.ItemOutcome
		}{{clean, tier.ItemAccepted}, {dirty, tier.ItemDeferred}, {leased, tier.ItemDeferred}, {chain(4, 0, 1), tier.ItemMissing}} {
			out, err := k.Demote(k.id, x.names, tier.RAM)
			outcomes(t, out, err, x.want)
		}
		synctest.Wait()
		k.verify(hold, leased)
		hold.Release()
		for _, names := range [][]paging.BlockName{clean, dirty, leased} {
			if ram, disk := k.where(names[1]); ram || !disk {
				t.Errorf("block %x: in RAM %v, on disk %v", number(names[1]), ram, disk)
			}
		}
	})
}

// ready waits for the end of a prefetch.
func ready(t *testing.T, p *tier.Promotion) (rows []int, reason tier.Reason) {
	t.Helper()
	for {
		got, done, why, err := p.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if rows = append(rows, got...); done {
			slices.Sort(rows)
			return rows, why
		}
	}
}

func TestPrefetch(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		names := chain(1, 0, 10)
		k.toDisk(names)
		promote := func(names []paging.BlockName) *tier.Promotion {
			p, err := k.Promote(tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		p := promote(names)
		if rows, reason := ready(t, p); p.Admitted != 10 || len(rows) != 10 || reason != tier.NoReason {
			t.Errorf("admitted %d, ready %v, %v", p.Admitted, rows, reason)
		}
		for c := 2; c < 5; c++ { // what was brought up is still there when it is wanted
			k.put(chain(c, 0, 40), 0, 0, tier.CommitOptions{Durable: true})
		}
		before := disk.Loads.Load()
		if got := k.usable(names); got != 10 || disk.Loads.Load() != before {
			t.Errorf("usable %d with %d loads", got, disk.Loads.Load()-before)
		}
		if m := k.Metrics(); m.PrefetchUseful != 10 || m.PrefetchWasted != 0 || m.ForeseenBytes != 0 {
			t.Errorf("useful %d, wasted %d, held %d", m.PrefetchUseful, m.PrefetchWasted, m.ForeseenBytes)
		}

		k.toDisk(chain(5, 0, 30))
		time.Sleep(time.Minute)
		p = promote(chain(5, 0, 30)) // a quarter of RAM, and no more
		if rows, _ := ready(t, p); p.Admitted != 16 || p.Refused != 14 || len(rows) != 16 {
			t.Errorf("admitted %d, refused %d, ready %d", p.Admitted, p.Refused, len(rows))
		}
		time.Sleep(2 * time.Minute)
		k.Tick()
		if m := k.Metrics(); m.PrefetchWasted != 16 || m.ForeseenBytes != 0 {
			t.Errorf("wasted %d, held %d after the deadline", m.PrefetchWasted, m.ForeseenBytes)
		}
		if _, err := k.Promote(tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now()}); !errors.Is(err, paging.ErrExpired) {
			t.Errorf("a prefetch too late: %v", err)
		}
	})
}

// A prefetch takes no room of blocks in use, and a Fetch overtakes it.
func TestPrefetchGivesWay(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		names := chain(1, 0, 12)
		k.toDisk(names)
		k.put(chain(2, 0, ramPages), 0, 0, tier.CommitOptions{Durable: true})
		req := tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Hour)}
		if p, err := k.Promote(req); err != nil || p.Admitted != 0 || p.Refused != 12 {
			t.Errorf("beside blocks just used: %+v, %v", p, err)
		}
		time.Sleep(11 * time.Second)
		disk.SetLoad(func(context.Context, tier.Page) error { time.Sleep(time.Second); return nil })
		p, err := k.Promote(req)
		if err != nil || p.Admitted != 12 {
			t.Fatalf("beside blocks not used for 11 s: %+v, %v", p, err)
		}
		hold := k.fetch(within(t, 5*time.Second), tier.FetchRequest{Names: names})
		if m := k.Metrics(); hold.Usable != 12 || m.PrefetchBlocks != 12 || m.PrefetchLate != 12 || m.PrefetchUseful+m.PrefetchWasted != 0 {
			t.Errorf("usable %d; prefetched %d, late %d, useful %d, wasted %d", hold.Usable, m.PrefetchBlocks, m.PrefetchLate, m.PrefetchUseful, m.PrefetchWasted)
		} else if m.LoadWaits == 0 || m.LoadWaitTime < time.Second || m.LoadWaitTime > 3*time.Second {
			t.Errorf("a fetch that waited for 12 loads of a second, 8 at a time: %d waits, %v", m.LoadWaits, m.LoadWaitTime)
		}
		hold.Release()
		p.Cancel()
		p.Cancel()
		if _, reason := ready(t, p); reason != tier.NoReason {
			t.Errorf("ended for %v", reason)
		}
	})
}

func TestPrefetchCancel(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		names := chain(1, 0, 12)
		k.toDisk(names)
		disk.SetLoad(func(context.Context, tier.Page) error { time.Sleep(time.Second); return nil })
		p, err := k.Promote(tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Hour)})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		p.Cancel()
		if got, want := k.Metrics().InFlightBytes, int64(8*pageBytes); got != want {
			t.Errorf("%d bytes in flight after the cancel, want those of the 8 workers, %d", got, want)
		}
		if rows, reason := ready(t, p); len(rows) != 0 || reason != tier.Cancelled {
			t.Errorf("ready %v, %v", rows, reason)
		}
		time.Sleep(2 * time.Second)
		if m := k.Metrics(); m.LeasedBytes != 0 || m.ForeseenBytes != 0 || m.PrefetchWasted != 12 {
			t.Errorf("leased %d, held %d, wasted %d", m.LeasedBytes, m.ForeseenBytes, m.PrefetchWasted)
		}
	})
}

// Tenants cannot see each other's blocks, nor exceed their quotas, nor take what
// another has.
func TestTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quotas := map[string]tier.Quota{"a": {RAMBytes: 20 * pageBytes, DiskBytes: 30 * pageBytes}}
		arena, err := ram.Open(t.Context(), ram.Config{BudgetBytes: 4 << 20, StagingBytes: -1, Quotas: map[string]int64{"a": 20 * pageBytes}})
		if err != nil {
			t.Fatal(err)
		}
		defer arena.Close()
		synctest.Wait() // it has grown
		disk := tiertest.NewMap(tier.NVMe, 100*pageBytes)
		defer disk.Close()
		a, b := &kit{t: t, ns: plain(pageBytes), ram: arena}, &kit{t: t, ns: plain(pageBytes), ram: arena}
		a.ns.Tenant, b.ns.Tenant = "a", "b"
		b.start(tier.Config{Arena: arena, Durable: disk, Quotas: quotas})
		a.Hierarchy = b.Hierarchy
		if a.id, err = a.RegisterNamespace(a.ns); err != nil {
			t.Fatal(err)
		}
		b.put(chain(1, 0, 40), 0, 0, tier.CommitOptions{Durable: true})
		if got := a.usable(chain(1, 0, 40)); got != 0 {
			t.Errorf("tenant a sees %d blocks of b", got)
		}
		for c := range 4 {
			if out := a.put(chain(c, 0, 20), 0, 0, tier.CommitOptions{Durable: true}); !all(out, tier.Committed) {
				t.Errorf("chain %d of tenant a: %v", c, out)
			}
		}
		for _, u := range a.Tenants() {
			if q := u.Quota; u.Tenant == "a" && (u.RAMBytes > q.RAMBytes || u.DiskBytes > q.DiskBytes) {
				t.Errorf("over the quota: %+v", u)
			}
		}
		if got := b.usable(chain(1, 0, 40)); got != 40 {
			t.Errorf("tenant b has %d of its 40 blocks", got)
		}
		hold := a.fetch(t.Context(), tier.FetchRequest{Names: chain(3, 0, 20)})
		if out := a.put(chain(9, 0, 1), 0, 0, tier.CommitOptions{}); out[0] != tier.WriteOverQuota {
			t.Errorf("beyond a quota full of leases: %v", out)
		}
		hold.Release()
	})
}

// A namespace that differs from one of the same model says so, in one line; what
// is stored under one is not found under the other.
func TestOtherLayoutOfAModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines bytes.Buffer
		k := open(t, layouts()["plain"], 1<<20, tier.Config{Logger: slog.New(slog.NewTextHandler(&lines, nil))})
		k.put(chain(1, 0, 3), 0, 0, tier.CommitOptions{})
		other := *k.ns
		other.Layout.KVDType = "fp8"
		for range 2 {
			id, err := k.RegisterNamespace(&other)
			if err != nil {
				t.Fatal(err)
			}
			if p, err := k.Lookup(id, chain(1, 0, 3), 0); err != nil || p.Usable != 0 {
				t.Errorf("usable %d under the other layout, %v", p.Usable, err)
			}
		}
		salted := other
		salted.Salt = []byte("s")
		if _, err := k.RegisterNamespace(&salted); err != nil {
			t.Fatal(err)
		}
		if text := lines.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "kv_dtype") || !strings.Contains(text, "fp8") {
			t.Errorf("the log says %q, want one line that names the field", text)
		}
	})
}

// A namespace that nobody uses is forgotten, here and on disk.
func TestNamespacesAreForgotten(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		second := tiertest.Namespace(2)
		id, err := k.RegisterNamespace(second)
		if err != nil {
			t.Fatal(err)
		}
		k.put(chain(1, 0, 1), 0, 0, tier.CommitOptions{Durable: true})
		time.Sleep(25 * time.Hour)
		k.Tick()
		if _, ok := k.Namespace(id); ok || len(disk.Namespaces()) != 1 {
			t.Errorf("the second is known: %v, on disk %d", ok, len(disk.Namespaces()))
		}
		if _, ok := k.Namespace(k.id); !ok {
			t.Error("one that has a block was forgotten")
		}
		if again, err := k.RegisterNamespace(second); err != nil || again != id {
			t.Errorf("registering it again: %v", err)
		}
	})
}

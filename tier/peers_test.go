package tier_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// neighbour is the other node of a cluster of two: its Hierarchy is asked and read
// as a node's would be, without a network in between.
type neighbour struct {
	*kit
	brought atomic.Int64
	// before runs for each page before it is copied; an error is what becomes of it.
	before func(ctx context.Context, p tier.RemotePage) error
}

// Locate implements tier.Peers.
func (n *neighbour) Locate(ns paging.NamespaceID, names []paging.BlockName, elsewhere []paging.PartSet) {
	held, _, err := n.Held(ns, names, 0)
	if err == nil {
		copy(elsewhere, held)
	}
}

// Bring implements tier.Peers.
func (n *neighbour) Bring(ctx context.Context, ns paging.NamespaceID, pages []tier.RemotePage, done func(int, uint64, error)) {
	for i, p := range pages {
		sum, err := n.copy(ctx, ns, p)
		n.brought.Add(1)
		done(i, sum, err)
	}
}

func (n *neighbour) copy(ctx context.Context, ns paging.NamespaceID, p tier.RemotePage) (uint64, error) {
	if n.before != nil {
		if err := n.before(ctx, p); err != nil {
			return 0, err
		}
	}
	s, err := n.Serve(ns, []tier.BlockParts{{Name: p.Name, Parts: paging.PartSet(0).With(p.Part)}})
	if err != nil {
		return 0, err
	}
	defer s.Close()
	b, sum, disk, why := s.Page(0, p.Part)
	switch {
	case disk:
		return s.Load(ctx, 0, p.Part, p.Dst)
	case why != tier.NoReason:
		return 0, paging.ErrNotFound
	}
	copy(p.Dst, b)
	return sum, nil
}

// inPair runs a test in fake time with two nodes as in inBubble; the first reads
// from the second.
func inPair(t *testing.T, test func(t *testing.T, k *kit, far *neighbour)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		node := func(cfg tier.Config) *kit {
			disk := &tiertest.Faulty{Durable: tiertest.NewMap(tier.NVMe, 4<<20)}
			t.Cleanup(func() { disk.Close() })
			cfg.Durable = disk
			k := open(t, plain(pageBytes), 1<<20, cfg)
			k.faulty = disk
			return k
		}
		far := &neighbour{kit: node(tier.Config{})}
		test(t, node(tier.Config{Peers: far, Observed: true}), far)
	})
}

func TestFetchFromAnotherNode(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 8)
		k.put(names[:2], 0, 0, tier.CommitOptions{})
		far.put(names[2:4], 2, 0, tier.CommitOptions{})
		far.toDisk(names[4:6])

		p, err := k.Lookup(k.id, names, 0)
		if err != nil || p.Usable != 6 || !slices.Equal(p.Tiers, []tier.Kind{tier.RAM, tier.RAM, tier.Remote, tier.Remote, tier.Remote, tier.Remote, 0, 0}) {
			t.Fatalf("lookup: %+v, %v", p, err)
		}
		hold := k.fetch(t.Context(), tier.FetchRequest{Names: names})
		if hold.Usable != 6 || !slices.Equal(hold.Tiers, []tier.Kind{tier.RAM, tier.RAM, tier.Remote, tier.Remote, tier.Remote, tier.Remote}) {
			t.Fatalf("usable %d from %v", hold.Usable, hold.Tiers)
		}
		hold.Release()
		if ram, _ := far.where(names[4]); ram {
			t.Error("a page was brought up at its source to be sent")
		}
		hold = k.fetch(t.Context(), tier.FetchRequest{Names: names[:6], Resident: true})
		if hold.Usable != 6 || far.brought.Load() != 4 {
			t.Errorf("the second time: usable %d, %d pages brought in all", hold.Usable, far.brought.Load())
		}
		hold.Release()
		m := k.Metrics()
		if m.RemoteHitBlocks != 4 || m.RemotePages != 4 || m.RemoteBytes != 4*pageBytes ||
			m.RequestedBlocks != m.RAMHitBlocks+m.DiskHitBlocks+m.RemoteHitBlocks+m.MissedBlocks {
			t.Errorf("metrics: %+v", m)
		}
		if s := far.Metrics(); s.ServedPages != 4 || s.Holds != 0 {
			t.Errorf("served %d pages, holds %d", s.ServedPages, s.Holds)
		}
	})
}

func TestLocalFetchAsksNobody(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 2)
		far.put(names, 0, 0, tier.CommitOptions{})
		for _, req := range []tier.FetchRequest{{Names: names, Local: true}, {Names: names, Resident: true}} {
			hold := k.fetch(t.Context(), req)
			hold.Release()
			if hold.Usable != 0 || far.brought.Load() != 0 {
				t.Errorf("%+v: usable %d", req, hold.Usable)
			}
		}
	})
}

func TestShortfallsOfOtherNodes(t *testing.T) {
	for want, err := range map[tier.Reason]error{
		tier.NotFound: paging.ErrNotFound, tier.Corrupt: paging.ErrCorrupt, tier.Unreachable: paging.ErrUnavailable,
		tier.IOError: paging.ErrIO, tier.Stopping: paging.ErrClosed,
	} {
		inPair(t, func(t *testing.T, k *kit, far *neighbour) {
			names := chain(1, 0, 4)
			far.put(names, 0, 0, tier.CommitOptions{})
			far.before = func(_ context.Context, p tier.RemotePage) error {
				if p.Name == names[2] {
					return err
				}
				return nil
			}
			hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
			hold.Release()
			if hold.Usable != 2 || len(hold.Short) == 0 || hold.Short[0].Block != 2 || hold.Short[0].Reason != want {
				t.Errorf("%v: usable %d, short %v", err, hold.Usable, hold.Short)
			}
			if in, _ := k.where(names[3]); !in {
				t.Errorf("%v: the page that came is not kept", err)
			}
		})
	}
}

// The copy on disk is damaged: the block comes from another node, and the damaged
// copy is gone.
func TestDamagedCopyIsReplacedFromAnotherNode(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 3)
		k.toDisk(names)
		far.put(names, 0, 0, tier.CommitOptions{})
		k.faulty.SetLoad(func(_ context.Context, p tier.Page) error {
			if p.ID.Name == names[1] {
				return paging.ErrCorrupt
			}
			return nil
		})
		hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
		hold.Release()
		if hold.Usable != 3 || !slices.Equal(hold.Tiers, []tier.Kind{tier.NVMe, tier.Remote, tier.NVMe}) {
			t.Fatalf("usable %d from %v, short %v", hold.Usable, hold.Tiers, hold.Short)
		}
		if m := k.Metrics(); m.CorruptPages != 1 || m.DroppedCopies != 1 {
			t.Errorf("corrupt %d, dropped %d", m.CorruptPages, m.DroppedCopies)
		}
	})
}

// A disk that does not answer loses nothing that another node has.
func TestDeadDiskIsReplacedByAnotherNode(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 3)
		k.toDisk(names)
		far.put(names, 0, 0, tier.CommitOptions{})
		k.faulty.SetLoad(func(context.Context, tier.Page) error { return paging.ErrUnavailable })
		hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
		hold.Release()
		if hold.Usable != 3 {
			t.Fatalf("usable %d, short %v", hold.Usable, hold.Short)
		}
		if _, onDisk := k.where(names[0]); !onDisk {
			t.Error("the same bytes on disk were given up")
		}
	})
}

// Who waits for a page that somebody else brings, who then gives up, brings it.
func TestBringerGivesUp(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 2)
		far.put(names, 0, 0, tier.CommitOptions{})
		var calls atomic.Int64
		far.before = func(ctx context.Context, _ tier.RemotePage) error {
			if calls.Add(1) > 2 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
			defer hold.Release()
			if hold.Usable != 0 || hold.Short[0].Reason != tier.Timeout {
				t.Errorf("who gave up: usable %d, %v", hold.Usable, hold.Short)
			}
		})
		synctest.Wait()
		wg.Go(func() {
			hold := k.fetch(within(t, time.Minute), tier.FetchRequest{Names: names})
			defer hold.Release()
			if hold.Usable != 2 {
				t.Errorf("who waited: usable %d, %v", hold.Usable, hold.Short)
			}
		})
		wg.Wait()
	})
}

func TestConcurrentFetchesBringOnce(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 4)
		far.put(names, 0, 0, tier.CommitOptions{})
		far.before = func(context.Context, tier.RemotePage) error { time.Sleep(time.Millisecond); return nil }
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names})
				defer hold.Release()
				if hold.Usable != 4 {
					t.Errorf("usable %d, %v", hold.Usable, hold.Short)
				}
			})
		}
		wg.Wait()
		if n := far.brought.Load(); n != 4 {
			t.Errorf("%d pages brought, want 4", n)
		}
	})
}

// A block that is being written here is not brought, and one that is being brought
// is not written a second time.
func TestWritersAndBringersOfOneBlock(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 2)
		far.put(names, 0, 0, tier.CommitOptions{})
		a, out, _, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: names[:1], Deadline: time.Now().Add(time.Minute)})
		if err != nil || out[0] != tier.Granted {
			t.Fatal(out, err)
		}
		hold := k.fetch(within(t, time.Second), tier.FetchRequest{Names: names[:1]})
		hold.Release()
		if hold.Usable != 0 || hold.Short[0].Reason != tier.InFlight {
			t.Errorf("being written: usable %d, %v", hold.Usable, hold.Short)
		}
		a.Abort()

		gate := make(chan struct{})
		far.before = func(context.Context, tier.RemotePage) error { <-gate; return nil }
		var wg sync.WaitGroup
		wg.Go(func() { k.usable(names) })
		synctest.Wait()
		_, out, retry, err := k.Reserve(t.Context(), tier.ReserveRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
		if err != nil || !all(out, tier.BeingWritten) || retry <= 0 {
			t.Errorf("being brought: %v, again in %v, %v", out, retry, err)
		}
		close(gate)
		wg.Wait()
		if got := k.put(names, 0, 0, tier.CommitOptions{}); !all(got, tier.Exists) {
			t.Errorf("brought: %v", got)
		}
	})
}

func TestPrefetchFromAnotherNode(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 4)
		far.put(names, 0, 0, tier.CommitOptions{})
		p, err := k.Promote(tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
		if err != nil || p.Admitted != 4 {
			t.Fatalf("%+v, %v", p, err)
		}
		defer p.Cancel()
		for done := false; !done; {
			var reason tier.Reason
			if _, done, reason, err = p.Next(within(t, time.Second)); err != nil || reason != tier.NoReason {
				t.Fatal(reason, err)
			}
		}
		hold := k.fetch(t.Context(), tier.FetchRequest{Names: names, Resident: true})
		hold.Release()
		if hold.Usable != 4 {
			t.Errorf("usable %d", hold.Usable)
		}
	})
}

// Close ends prefetches that wait for other nodes.
func TestCloseEndsPrefetchesFromOtherNodes(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		names := chain(1, 0, 4)
		far.put(names, 0, 0, tier.CommitOptions{})
		far.before = func(ctx context.Context, _ tier.RemotePage) error { <-ctx.Done(); return ctx.Err() }
		if _, err := k.Promote(tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Hour)}); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := k.Close(within(t, time.Minute)); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("Close took %v", took)
		}
	})
}

// What a node tells of its changes is, in the end, what it holds.
func TestChangesFollowWhatIsHeld(t *testing.T) {
	inPair(t, func(t *testing.T, k *kit, far *neighbour) {
		told := map[paging.BlockName]paging.PartSet{}
		drain := func() {
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			for {
				held, missed, err := k.Changes(ctx, nil)
				if errors.Is(err, context.DeadlineExceeded) {
					return
				}
				if err != nil || missed {
					t.Fatal(missed, err)
				}
				for _, x := range held {
					told[x.ID.Name] = x.Parts
				}
			}
		}
		for round := range 40 {
			k.put(chain(round, 0, 20), 0, 0, tier.CommitOptions{})
			far.put(chain(1000+round, 0, 4), 0, 0, tier.CommitOptions{})
			k.usable(chain(1000+round, 0, 4))
			if round%5 == 0 {
				if _, err := k.Drop(k.id, chain(round, 10, 5)); err != nil {
					t.Fatal(err)
				}
			}
			drain()
		}
		have := map[paging.BlockName]paging.PartSet{}
		k.HeldBlocks(func(x tier.HeldBlock) { have[x.ID.Name] = x.Parts })
		for name, parts := range told {
			if parts != have[name] {
				t.Errorf("block %x: told %v, holds %v", number(name), parts, have[name])
			}
		}
		if len(have) == 0 || len(have) >= len(told) {
			t.Errorf("%d blocks held, %d told: nothing was evicted", len(have), len(told))
		}
		gone, complete, err := k.History(k.id, []paging.BlockName{chain(0, 12, 1)[0], chain(0, 0, 1)[0], chain(9999, 0, 1)[0]})
		if err != nil || !complete || gone[0].Cause != tier.Dropped || gone[1].Cause != tier.Evicted || gone[2].Cause != tier.StillUnknown {
			t.Errorf("history: %v, %v", gone, err)
		}
	})
}

// A node that is asked for what it has no longer, or only in part, says so.
func TestServe(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		names := chain(1, 0, 3)
		k.put(names[:1], 0, 0, tier.CommitOptions{})
		k.toDisk(names[1:2])
		one := paging.PartSet(0).With(0)
		s, err := k.Serve(k.id, []tier.BlockParts{{Name: names[0], Parts: one}, {Name: names[1], Parts: one}, {Name: names[2], Parts: one}})
		if err != nil {
			t.Fatal(err)
		}
		b, sum, disk, why := s.Page(0, 0)
		if disk || why != tier.NoReason || paging.Checksum(b) != sum || string(b) != string(k.content(names[0], 0)) {
			t.Error("the page in RAM is not served right")
		}
		if _, _, disk, why = s.Page(1, 0); !disk || why != tier.NoReason {
			t.Errorf("the page on disk: disk %v, %v", disk, why)
		}
		dst := make([]byte, pageBytes)
		if sum, err = s.Load(t.Context(), 1, 0, dst); err != nil || paging.Checksum(dst) != sum || string(dst) != string(k.content(names[1], 0)) {
			t.Errorf("load: %v", err)
		}
		if _, _, _, why = s.Page(2, 0); why != tier.NotFound {
			t.Errorf("the page that is not there: %v", why)
		}
		s.Close()
		s.Close()
		if _, err := k.Serve(paging.NamespaceID{1}, []tier.BlockParts{{}}); !errors.Is(err, paging.ErrUnknownNamespace) {
			t.Errorf("another namespace: %v", err)
		}
		if _, err := k.Serve(k.id, nil); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("no block: %v", err)
		}
	})
}

// What is read for another node stays on disk until it was read, whoever wants the
// room meanwhile.
func TestServedPagesStayOnDisk(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		names := chain(1, 0, 8)
		k.toDisk(names)
		one := paging.PartSet(0).With(0)
		var blocks []tier.BlockParts
		for _, name := range names {
			blocks = append(blocks, tier.BlockParts{Name: name, Parts: one})
		}
		s, err := k.Serve(k.id, blocks)
		if err != nil {
			t.Fatal(err)
		}
		for c := range 40 { // more than the disk holds
			k.put(chain(100+c, 0, 16), 0, 0, tier.CommitOptions{Durable: true})
		}
		if k.Metrics().DiskEvictedBlocks == 0 {
			t.Fatal("nothing left the disk")
		}
		dst := make([]byte, pageBytes)
		for i, name := range names {
			if _, err := s.Load(t.Context(), i, 0, dst); err != nil || string(dst) != string(k.content(name, 0)) {
				t.Errorf("block %d: %v", i, err)
			}
		}
		s.Close()
		for c := range 40 {
			k.put(chain(200+c, 0, 16), 0, 0, tier.CommitOptions{Durable: true})
		}
		if _, onDisk := k.where(names[0]); onDisk {
			t.Error("it stays for ever")
		}
	})
}

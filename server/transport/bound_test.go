package transport

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
)

func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(100)
		if err := b.acquire(t.Context(), 60); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []int64
		var wg sync.WaitGroup
		take := func(ctx context.Context, n int64) {
			wg.Go(func() {
				if b.acquire(ctx, n) == nil {
					mu.Lock()
					order = append(order, n)
					mu.Unlock()
				}
			})
			synctest.Wait()
		}
		gaveUp, cancel := context.WithCancel(t.Context())
		take(t.Context(), 80)
		take(gaveUp, 90)
		take(t.Context(), 10) // there is room for it, but others were first
		poke := make(chan struct{}, 1)
		if b.tryAcquire(50, poke) {
			t.Error("50 of 40 were given")
		}
		cancel()
		synctest.Wait()
		b.release(60)
		synctest.Wait()
		if !slices.Equal(order, []int64{80, 10}) && !slices.Equal(order, []int64{10, 80}) || b.inUse() != 90 {
			t.Errorf("given: %v, in use: %d", order, b.inUse())
		}
		select {
		case <-poke:
		default:
			t.Error("who tried was not told of the release")
		}
		b.release(90)
		wg.Wait()
		if b.charge(1000) != 100 || b.charge(7) != 7 || !b.tryAcquire(100, poke) {
			t.Error("what is larger than the budget does not take all of it")
		}
	})
}

// TestInFlightIsBounded watches the bytes in flight at each page that arrives.
func TestInFlightIsBounded(t *testing.T) {
	c := newCluster(t, newMemory())
	a, b := c.add(1, nil), c.add(2, nil)
	const page, peer, total = 64 << 10, 300 << 10, 500 << 10
	me := c.add(3, func(_ *MuxConfig, cfg *Config) { cfg.PeerBytes, cfg.TotalBytes = peer, total })
	var pages []WantedPage
	for i := range 60 {
		for _, n := range []*node{a, b} {
			n.src.put(nameOf(i), int(n.id[0]), page, i%7 == 0)
			pages = append(pages, want(i, int(n.id[0]), page, n))
		}
	}
	a.src.put(nameOf(0), 9, 1<<20, false) // longer than both bounds
	tr := newTray(t, append(pages, want(0, 9, 1<<20, a))...)
	var most, mostOfOne atomic.Int64
	tr.arrived = func(int, Result) {
		storeMost(&most, me.Metrics().InFlightBytes)
		for _, p := range me.Peers() {
			storeMost(&mostOfOne, p.InFlightBytes)
		}
	}
	fetch(t, me, tr)
	tr.allGood()
	if most.Load() > total || mostOfOne.Load() > peer {
		t.Errorf("%d bytes in flight, %d of one peer, more than %d and %d", most.Load(), mostOfOne.Load(), total, peer)
	}
	if most.Load() < peer {
		t.Errorf("only %d bytes were ever in flight", most.Load())
	}
}

func storeMost(a *atomic.Int64, n int64) {
	for {
		old := a.Load()
		if n <= old || a.CompareAndSwap(old, n) {
			return
		}
	}
}

// TestServingIsBounded: pins and buffers of a source that many ask for much.
func TestServingIsBounded(t *testing.T) {
	c := newCluster(t, newMemory())
	const page, serve, load = 64 << 10, 200 << 10, 256 << 10
	a := c.add(1, func(_ *MuxConfig, cfg *Config) { cfg.ServeBytes, cfg.LoadBytes = serve, load })
	var mostPinned, mostBuffered, loading, mostLoading atomic.Int64
	a.src.load = func(context.Context, *stored) error {
		storeMost(&mostLoading, loading.Add(1))
		runtime.Gosched()
		m := a.Metrics()
		storeMost(&mostPinned, m.PinnedBytes)
		storeMost(&mostBuffered, m.BufferedBytes)
		loading.Add(-1)
		return nil
	}
	var pages []WantedPage
	for i := range 40 {
		a.src.put(nameOf(i), 0, page-i, true)
		pages = append(pages, want(i, 0, page-i, a))
	}
	var wg sync.WaitGroup
	for id := range byte(3) {
		n := c.add(10+id, func(_ *MuxConfig, cfg *Config) { cfg.PeerBytes = 2 * page })
		wg.Go(func() {
			tr := newTray(t, pages...)
			fetch(t, n, tr)
			tr.allGood()
		})
	}
	wg.Wait()
	if mostPinned.Load() > serve || mostBuffered.Load() > load || mostLoading.Load() > loadWorkers {
		t.Errorf("%d bytes pinned, %d buffered, %d loads at a time, more than %d, %d and %d",
			mostPinned.Load(), mostBuffered.Load(), mostLoading.Load(), serve, load, loadWorkers)
	}
	a.src.put(nameOf(99), 0, 1<<20, true) // longer than all buffers, longer than what may be pinned
	tr := newTray(t, want(99, 0, 1<<20, a), want(1, 0, page-1, a))
	fetch(t, c.add(20, nil), tr)
	tr.allGood()
	waitFor(t, "the source to let go", func() bool { m := a.Metrics(); return m.PinnedBytes == 0 && m.OwedBytes == 0 })
}

// TestSlowDiskReaderHasItsShare: a node that takes nothing holds a share of the
// buffers for pages from disk, and no more.
func TestSlowDiskReaderHasItsShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const page, load = 64 << 10, 512 << 10
		_, a, b, me := inMemory(t, func(_ *MuxConfig, cfg *Config) { cfg.LoadBytes = load })
		var asked [][3]int
		var pages []WantedPage
		for i := range 20 {
			a.src.put(nameOf(i), 0, page, true)
			asked = append(asked, [3]int{i, 0, page})
			pages = append(pages, want(i, 0, page, a))
		}
		slow := rawBulk(t, b, a)
		slow.request(t, 1, requestOf(asked...))
		synctest.Wait()
		if got := a.Metrics(); got.BufferedBytes > load/4 || got.PagesLoaded != load/4/page {
			t.Errorf("%d pages were loaded for a node that takes none, %d bytes are buffered", got.PagesLoaded, got.BufferedBytes)
		}
		start := time.Now()
		tr := newTray(t, pages...)
		fetch(t, me, tr)
		tr.allGood()
		if took := time.Since(start); took != 0 {
			t.Errorf("another node waited %v", took)
		}
	})
}

// TestTooManyRequests: a node that does not keep to the bound of open requests
// loses its connection.
func TestTooManyRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, a, b, _ := inMemory(t, nil)
		a.src.put(nameOf(0), 0, 4096, true)
		a.src.load = func(ctx context.Context, _ *stored) error { <-ctx.Done(); return ctx.Err() }
		greedy := rawBulk(t, b, a)
		for i := range maxOpenLots {
			greedy.request(t, uint64(i), requestOf([3]int{0, 0, 4096}))
		}
		synctest.Wait()
		if got := a.Metrics(); got.Violations != 0 || got.OwedBytes != maxOpenLots*4096 {
			t.Fatalf("%d violations, %d bytes owed", got.Violations, got.OwedBytes)
		}
		greedy.request(t, maxOpenLots, requestOf([3]int{0, 0, 4096}))
		synctest.Wait()
		if got := a.Metrics(); got.Violations != 1 || got.OwedBytes != 0 || a.src.pins.Load() != 0 {
			t.Errorf("%d violations, %d bytes owed, %d pins", got.Violations, got.OwedBytes, a.src.pins.Load())
		}
	})
}

// TestManySmallRequests has more calls at once than a connection takes requests.
func TestManySmallRequests(t *testing.T) {
	c := newCluster(t, newMemory())
	a, me := c.add(1, nil), c.add(2, nil)
	var wg sync.WaitGroup
	for i := range 3 * maxOpenLots {
		a.src.put(nameOf(i), 0, 100+i, i%3 == 0)
		wg.Go(func() {
			tr := newTray(t, want(i, 0, 100+i, a))
			fetch(t, me, tr)
			tr.allGood()
		})
	}
	wg.Wait()
	if got := a.Metrics(); got.Violations != 0 || me.Metrics().PeerFailures != 0 {
		t.Errorf("%d violations", got.Violations)
	}
}

// TestFullOutbox: what does not fit is refused, and nobody waits.
func TestFullOutbox(t *testing.T) {
	o := newOutbox(feedLink(nil), time.Second) // nobody runs it
	argument := make([]byte, MaxCallBytes)
	var err error
	for n := 0; n < 10 && err == nil; n++ {
		err = o.send(header{kind: frameCall}, argument)
	}
	if !errors.Is(err, paging.ErrUnavailable) || len(o.buf) > maxOutboxBytes {
		t.Errorf("%v with %d bytes waiting, want %v", err, len(o.buf), paging.ErrUnavailable)
	}
	o.close()
	if err := o.run(); err != nil {
		t.Error(err)
	}
	if err := o.send(header{kind: framePing}, nil); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("after close: %v", err)
	}
}

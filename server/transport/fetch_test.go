package transport

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

func TestPagesArrive(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		a, b := c.add(1, nil), c.add(2, nil)
		var pages []WantedPage
		for i, bytes := range []int{1, 4096, 65535, 65536, 65537, 256 << 10, 1<<20 + 1, 9 << 20} {
			for part := range 3 {
				if bytes > 8<<20 && part > 0 {
					continue
				}
				a.src.put(nameOf(i), part, bytes+part, part == 1)
				pages = append(pages, want(i, part, bytes+part, a))
			}
		}
		tr := newTray(t, pages...)
		fetch(t, b, tr)
		tr.allGood()
		m, s := b.Metrics(), a.Metrics()
		if m.PagesReceived != int64(len(pages)) || m.InFlightBytes != 0 || s.PagesLoaded != 7 || s.BytesSent != m.BytesReceived {
			t.Errorf("received %+v, sent %+v", m, s)
		}
		waitFor(t, "the source to let go", func() bool { m := a.Metrics(); return m.PinnedBytes == 0 && m.OwedBytes == 0 })
	})
}

// TestManyAtOnce has three nodes fetch from each other, with small windows, so
// that requests wait for budgets, take turns on connections and fall through.
func TestManyAtOnce(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		tight := func(_ *MuxConfig, cfg *Config) {
			cfg.PeerBytes, cfg.TotalBytes, cfg.ServeBytes, cfg.LoadBytes, cfg.BulkConns = 512<<10, 768<<10, 512<<10, 256<<10, 2
		}
		nodes := []*node{c.add(1, tight), c.add(2, tight), c.add(3, tight)}
		const blocks = 40
		for i := range blocks {
			for k, n := range nodes {
				if (i+k)%3 != 0 { // each page is at two of the three
					n.src.put(nameOf(i), 0, 20000+100*i, i%4 == 0)
					n.src.put(nameOf(i), 1, 90000, i%5 == 0)
				}
			}
		}
		var wg sync.WaitGroup
		for k, n := range nodes {
			for round := range 6 {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(uint64(k), uint64(round)))
					var pages []WantedPage
					for _, i := range r.Perm(blocks)[:20] {
						pages = append(pages, want(i, 0, 20000+100*i, nodes...), want(i, 1, 90000, nodes...))
					}
					tr := newTray(t, pages...)
					if err := n.Fetch(t.Context(), tr.req); err != nil {
						t.Error(err)
						return
					}
					for i := range pages {
						if r := tr.result(i); r.Err != nil {
							// The copy that this node has itself is none of a Fetch's: then the
							// page had one source, which is enough.
							t.Errorf("node %d, page %d: %v", k, i, r.Err)
						}
						tr.good(i)
					}
				})
			}
		}
		wg.Wait()
		for _, n := range nodes {
			if m := n.Metrics(); m.InFlightBytes != 0 || m.PeerFailures != 0 || m.PagesCorrupt != 0 {
				t.Errorf("node %s: %+v", n.id.Short(), m)
			}
			waitFor(t, "the source to let go", func() bool { return n.Metrics().PinnedBytes == 0 })
		}
	})
}

func TestWhyPagesDoNotCome(t *testing.T) {
	c := newCluster(t, newMemory())
	a, b, me := c.add(1, nil), c.add(2, nil), c.add(3, nil)
	a.src.put(nameOf(0), 0, 4096, false)
	a.src.put(nameOf(1), 0, 4096, true)
	b.src.put(nameOf(2), 0, 4096, false)
	a.src.load = func(context.Context, *stored) error { return fmt.Errorf("bad sector: %w", paging.ErrIO) }
	nobody := want(10, 0, 4096)
	unknown := want(11, 0, 4096)
	unknown.Owners = []placement.NodeID{{99}}
	self := want(12, 0, 4096, me)
	tr := newTray(t,
		want(5, 0, 4096, a), want(0, 0, 4097, a), want(1, 0, 4096, a), want(2, 0, 4096, a, b), nobody, unknown, self, want(13, 0, 4096, a))
	tr.refuse = func(i int) error {
		if i == 7 {
			return fmt.Errorf("full: %w", paging.ErrNoSpace)
		}
		return nil
	}
	fetch(t, me, tr)
	for i, want := range []struct {
		why  Reason
		is   error
		from *node
	}{
		{NotFound, paging.ErrNotFound, a},
		{Mismatch, paging.ErrUnknownNamespace, a},
		{IOError, paging.ErrIO, a},
		{NoReason, nil, b}, // not at a, but at b
		{Unreachable, paging.ErrUnavailable, nil},
		{Unreachable, paging.ErrUnavailable, nil},
		{Unreachable, paging.ErrUnavailable, nil},
		{NoSpace, paging.ErrNoSpace, nil},
	} {
		r := tr.result(i)
		if want.why == NoReason {
			tr.good(i)
			continue
		}
		var e *PageError
		if !errors.As(r.Err, &e) || e.Reason != want.why || !errors.Is(r.Err, want.is) {
			t.Errorf("page %d: %v, want %v", i, r.Err, want.why)
		}
		if want.from != nil && e.From != want.from.id {
			t.Errorf("page %d: from %s, want %s", i, e.From.Short(), want.from.id.Short())
		}
	}
	other := newTray(t, want(0, 0, 4096, a))
	other.req.Namespace = paging.NamespaceID{9}
	fetch(t, me, other)
	if r := other.result(0); !errors.Is(r.Err, paging.ErrUnknownNamespace) {
		t.Errorf("unknown namespace: %v", r.Err)
	}
	failed := me.Metrics().PagesFailed
	if failed["not_found"] != 1 || failed["unreachable"] != 3 || failed["mismatch"] != 2 || failed["no_space"] != 1 || failed["io_error"] != 1 {
		t.Errorf("counted: %v", failed)
	}
	a.src.open = func() error { return fmt.Errorf("stopping: %w", paging.ErrClosed) }
	stopping := newTray(t, want(0, 0, 4096, a), want(2, 0, 4096, a, b))
	fetch(t, me, stopping)
	if r := stopping.result(0); !errors.Is(r.Err, paging.ErrClosed) {
		t.Errorf("a source that stops: %v", r.Err)
	}
	stopping.good(1)
}

func TestFetchIsValidated(t *testing.T) {
	c := newCluster(t, newMemory())
	n := c.add(1, nil)
	for what, r := range map[string]*FetchRequest{
		"no sink":        {Pages: []WantedPage{want(0, 0, 1)}},
		"part 64":        newTray(t, want(0, 64, 1)).req,
		"a page of 0":    newTray(t, want(0, 0, 0)).req,
		"too long":       newTray(t, want(0, 0, paging.MaxPageBytes+1)).req,
		"too many pages": newTray(t, make([]WantedPage, maxFetchPages+1)...).req,
	} {
		if err := n.Fetch(t.Context(), r); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v, want %v", what, err, paging.ErrInvalid)
		}
	}
	if err := n.Fetch(t.Context(), newTray(t).req); err != nil {
		t.Errorf("no pages: %v", err)
	}
	if _, err := Open(Config{PeerBytes: -1}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("open: %v, want %v", err, paging.ErrInvalid)
	}
}

// TestSpreads asks for many pages that two nodes have: both give some.
func TestSpreads(t *testing.T) {
	c := newCluster(t, newMemory())
	a, b, me := c.add(1, nil), c.add(2, nil), c.add(3, nil)
	var pages []WantedPage
	for i := range 64 {
		a.src.put(nameOf(i), 0, 64<<10, false)
		b.src.put(nameOf(i), 0, 64<<10, false)
		pages = append(pages, want(i, 0, 64<<10, a, b))
	}
	tr := newTray(t, pages...)
	fetch(t, me, tr)
	tr.allGood()
	for _, n := range []*node{a, b} {
		if sent := n.Metrics().PagesSent; sent < 16 {
			t.Errorf("node %s sent %d of 64 pages", n.id.Short(), sent)
		}
	}
}

// TestOneFetchForOnePage: calls that want the same page at the same time ask for
// it once, and the others hear of it.
func TestOneFetchForOnePage(t *testing.T) {
	c := newCluster(t, newMemory())
	a, me := c.add(1, nil), c.add(2, nil)
	a.src.put(nameOf(0), 0, 300000, false)
	const calls = 5
	hold := make(chan struct{})
	a.src.open = func() error { <-hold; return nil }
	trays := make([]*tray, calls)
	var wg sync.WaitGroup
	for i := range trays {
		trays[i] = newTray(t, want(0, 0, 300000, a))
		wg.Go(func() { fetch(t, me, trays[i]) })
	}
	waitFor(t, "the others to join", func() bool { return me.Metrics().PagesJoined == calls-1 })
	close(hold)
	wg.Wait()
	var own int
	for _, tr := range trays {
		tr.good(0)
		if r := tr.result(0); !r.Elsewhere {
			own++
		} else if tr.slots[0] != nil {
			t.Error("a call that only heard of its page set a slot aside")
		}
	}
	waitFor(t, "the source to count", func() bool { return a.Metrics().PagesSent > 0 }) // after its write, which may return late
	if sent := a.Metrics().PagesSent; own != 1 || sent != 1 {
		t.Errorf("%d calls got the page themselves, it was sent %d times", own, sent)
	}
	if len(me.flights.out) != 0 {
		t.Errorf("%d pages are noted as under way", len(me.flights.out))
	}
}

// TestJoinedCallGoesOn: when the call that brings a page gives up, one of those
// who wait brings it; when the page fails for all, all are told.
func TestJoinedCallGoesOn(t *testing.T) {
	c := newCluster(t, newMemory())
	a, me := c.add(1, nil), c.add(2, nil)
	a.src.put(nameOf(0), 0, 300000, true)
	hold := make(chan struct{})
	a.src.load = func(ctx context.Context, _ *stored) error {
		select {
		case <-hold:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	first, second, third := newTray(t, want(0, 0, 300000, a)), newTray(t, want(0, 0, 300000, a)), newTray(t, want(0, 0, 300000, a), want(0, 0, 300000, a))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = me.Fetch(ctx, first.req) })
	waitFor(t, "the first to ask", func() bool { return a.src.opened.Load() == 1 })
	wg.Go(func() { fetch(t, me, second) })
	wg.Go(func() { fetch(t, me, third) })
	waitFor(t, "the others to join", func() bool { return me.Metrics().PagesJoined == 3 })
	cancel()
	waitFor(t, "one of them to ask", func() bool { return a.src.opened.Load() == 2 })
	close(hold)
	wg.Wait()
	if r := first.result(0); !errors.Is(r.Err, context.Canceled) {
		t.Errorf("the first: %v", r.Err)
	}
	second.allGood()
	third.allGood()

	a.src.load = func(context.Context, *stored) error { return paging.ErrIO }
	fourth := newTray(t, want(0, 0, 300000, a), want(0, 0, 300000, a))
	fetch(t, me, fourth)
	for i := range 2 {
		if r := fourth.result(i); !errors.Is(r.Err, paging.ErrIO) {
			t.Errorf("page %d: %v, want %v", i, r.Err, paging.ErrIO)
		}
	}
}

// TestClosedTransport closes it under calls of every kind.
func TestClosedTransport(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		a, me := c.add(1, nil), c.add(2, nil)
		a.src.put(nameOf(0), 0, 300000, true)
		a.src.load = func(ctx context.Context, _ *stored) error { <-ctx.Done(); return ctx.Err() }
		tr := newTray(t, want(0, 0, 300000, a))
		var wg sync.WaitGroup
		wg.Go(func() { fetch(t, me, tr) })
		waitFor(t, "the request", func() bool { return a.src.opened.Load() == 1 })
		for range 2 {
			if err := me.Close(); err != nil {
				t.Fatal(err)
			}
		}
		wg.Wait()
		if r := tr.result(0); !errors.Is(r.Err, paging.ErrClosed) {
			t.Errorf("a fetch under way: %v, want %v", r.Err, paging.ErrClosed)
		}
		if err := me.Fetch(t.Context(), tr.req); !errors.Is(err, paging.ErrClosed) {
			t.Errorf("a fetch after: %v, want %v", err, paging.ErrClosed)
		}
		if _, err := me.Call(t.Context(), a.id, 1, nil); !errors.Is(err, paging.ErrClosed) {
			t.Errorf("a call after: %v, want %v", err, paging.ErrClosed)
		}
		waitFor(t, "the source to let go", func() bool { return a.src.pins.Load() == 0 })
	})
}

package client_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// mapped counts the mappings of test extents in this process, which is client
// and node at once.
func mapped(t testing.TB) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "kvtier-client-test")
}

func TestNodeThatIsAbsentAtOpen(t *testing.T) {
	n := newTestNode(t)
	c := open(t, patient(n))
	if _, err := c.RegisterNamespace(t.Context(), testNamespace()); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("a call without a node: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Ready(ctx); !errors.Is(err, paging.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ready without a node: %v", err)
	}
	n.start(t)
	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	ns := register(t, c)
	write(t, c, ns, chain(1, 2))
}

func TestRestartOfTheNode(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 100) // two extents
	write(t, c, ns, names)
	lease, other := fetch(t, c, ns, names[:1]), fetch(t, c, ns, names)
	view, ok := lease.Page(0, 0)
	if !ok {
		t.Fatal("no view")
	}
	n.stop()
	eventually(t, "calls without a node", func() bool {
		_, err := c.Lookup(t.Context(), ns, names, 0)
		return errors.Is(err, paging.ErrUnavailable)
	})
	eventually(t, "unmapping of what no view needs", func() bool { return mapped(t) == 1 })
	if err := checkPage(names[0], 0, view.Bytes()); err != nil {
		t.Errorf("an open view after the node's end: %v", err)
	}
	for _, l := range []*client.Lease{lease, other} {
		if _, ok := l.Page(0, 0); ok {
			t.Error("a new view on an old extent")
		}
		if err := l.Err(); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("a lease of an ended attachment says %v", err)
		}
	}
	if err := other.Release(t.Context()); err != nil {
		t.Errorf("release answered by the client itself: %v", err)
	}

	n.start(t)
	began := time.Now()
	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("attached again after %v", d)
	}
	write(t, c, ns, chain(2, 10)) // the namespace was registered again
	again := fetch(t, c, ns, chain(2, 10))
	if err := readAll(again, chain(2, 10), 2); err != nil {
		t.Error(err)
	}
	if err := again.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := checkPage(names[0], 0, view.Bytes()); err != nil {
		t.Errorf("an open view beside a new attachment: %v", err)
	}
	before := mapped(t)
	if err := view.Close(); err != nil {
		t.Errorf("close of the old view: %v", err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("release of the old lease: %v", err)
	}
	if got := mapped(t); got != before-1 {
		t.Errorf("%d mappings after the last old view, %d before", got, before)
	}
}

func TestReattachNamesTheAttachmentThatEnded(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	write(t, c, ns, chain(1, 2))
	hellos := func() [][]byte {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.previous
	}
	ended := func() int {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.tethersEnd
	}
	n.cut()
	eventually(t, "second attachment", func() bool { return len(hellos()) == 2 })
	if got := hellos()[1]; len(got) != 16 {
		t.Errorf("no view was left, yet the old attachment is not named: %x", got)
	}
	eventually(t, "end of the first tether", func() bool { return ended() == 1 })

	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	lease := fetch(t, c, ns, chain(1, 2))
	view, ok := lease.Page(0, 0)
	if !ok {
		t.Fatal("no view")
	}
	n.cut()
	eventually(t, "third attachment", func() bool { return len(hellos()) == 3 })
	if got := hellos()[2]; len(got) != 0 {
		t.Errorf("a view is open, yet its attachment is named: %x", got)
	}
	if ended() != 1 {
		t.Error("the tether ended under an open view")
	}
	if err := view.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "end of the second tether", func() bool { return ended() == 2 })
}

func TestRefusingNodeIsAnErrorOfOpen(t *testing.T) {
	n := startTestNode(t)
	n.refuse = fmt.Errorf("uid 7 belongs to no tenant: %w", paging.ErrDenied)
	if c, err := client.Open(t.Context(), patient(n)); !errors.Is(err, paging.ErrDenied) {
		t.Errorf("open: %v", err)
		c.Close()
	}
}

func TestBreaker(t *testing.T) {
	n := startTestNode(t)
	cfg := patient(n)
	cfg.StallTimeout = 0 // the default
	c := open(t, cfg)
	ns, err := registerPatiently(t, c)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "write", func() bool { return tryWrite(t.Context(), c, ns, chain(1, 4)) == nil })
	var lease *client.Lease
	eventually(t, "fetch", func() bool {
		lease, err = c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: chain(1, 4)})
		return err == nil
	})

	n.frozen.close()
	var calls sync.WaitGroup
	for what, call := range map[string]func() error{
		"on the stream": func() error {
			_, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: chain(1, 4)})
			return err
		},
		"unary": func() error { _, err := c.Lookup(t.Context(), ns, chain(1, 4), 0); return err },
	} {
		calls.Go(func() {
			if err := call(); !errors.Is(err, paging.ErrUnavailable) {
				t.Errorf("call %s of a silent node: %v", what, err)
			}
		})
	}
	began := time.Now()
	calls.Wait()
	if d := time.Since(began); d > cfg.CallTimeout/2 { // the true bound is TestStallBoundInTime's: this machine may be busy
		t.Errorf("a silent node held calls up for %v", d)
	}
	began = time.Now()
	for range 1000 {
		if _, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: chain(1, 4)}); !errors.Is(err, paging.ErrUnavailable) {
			t.Fatalf("call while the breaker is open: %v", err)
		}
	}
	if d := time.Since(began) / 1000; d > time.Millisecond {
		t.Errorf("a call while the breaker is open takes %v", d)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("release while the breaker is open: %v", err)
	}
	if got := c.Metrics(); got.Stalls == 0 || got.Unavailable < 1000 {
		t.Errorf("%d stalls, %d unavailable counted", got.Stalls, got.Unavailable)
	}
	n.frozen.open()
	eventually(t, "calls after the node is back", func() bool {
		return c.Renew(t.Context(), 0) == nil
	})
	eventually(t, "release told, and the abandoned fetch given back", func() bool { return n.held() == 0 })
}

func registerPatiently(t *testing.T, c *client.Client) (ns paging.NamespaceID, err error) {
	eventually(t, "register", func() bool {
		ns, err = c.RegisterNamespace(t.Context(), testNamespace())
		return err == nil
	})
	return ns, err
}

func TestFetchThatNobodyWaitsForIsGivenBack(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	write(t, c, ns, chain(1, 4))
	n.frozen.close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: chain(1, 4)})
	if !errors.Is(err, paging.ErrExpired) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("fetch beyond its deadline: %v", err)
	}
	n.frozen.open()
	eventually(t, "the late lease", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.lastLease == 1
	})
	eventually(t, "its release", func() bool { return n.held() == 0 })
}

// A node that answers other calls is not silent: the one that it does not answer
// ends at Config.CallTimeout.
func TestCallWithoutDeadlineEnds(t *testing.T) {
	n := startTestNode(t)
	cfg := patient(n)
	cfg.StallTimeout, cfg.CallTimeout = 300*time.Millisecond, time.Second
	c := open(t, cfg)
	ns := register(t, c)
	n.mute.Store(true)
	_, err := c.Fetch(context.Background(), client.FetchRequest{Namespace: ns, Names: chain(1, 4)})
	if !errors.Is(err, paging.ErrExpired) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if got := c.Metrics().Stalls; got != 0 {
		t.Errorf("%d stalls of a node that answers pings", got)
	}
}

func TestMalformedAnswersAreRefused(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	slot := func(change func(*paging.Slot)) func(*kvtierv1.FetchResponse) {
		return func(r *kvtierv1.FetchResponse) {
			s, err := paging.DecodeSlot(r.GetSlots()[paging.SlotBytes:])
			if err != nil {
				panic(err)
			}
			change(&s)
			copy(r.GetSlots()[paging.SlotBytes:], paging.AppendSlot(nil, s))
		}
	}
	for what, mangle := range map[string]func(*kvtierv1.FetchResponse){
		"offset beyond the extent":    slot(func(s *paging.Slot) { s.Offset = 1 << 40 }),
		"offset that wraps":           slot(func(s *paging.Slot) { s.Offset = ^uint64(0) &^ 4095 }),
		"end beyond the extent":       slot(func(s *paging.Slot) { s.Offset = 1<<20 - 4096; s.Bytes = 4097 }),
		"offset in the table":         slot(func(s *paging.Slot) { s.Offset = 0 }),
		"offset off the grid":         slot(func(s *paging.Slot) { s.Offset += 8 }),
		"length of another part":      slot(func(s *paging.Slot) { s.Bytes = 16 << 10 }),
		"length of 4 GiB":             slot(func(s *paging.Slot) { s.Bytes = 1<<32 - 1 }),
		"a slot in staging":           slot(func(s *paging.Slot) { s.Extent = 1 }),
		"extent that nobody has":      slot(func(s *paging.Slot) { s.Extent = 77 }),
		"half a slot":                 func(r *kvtierv1.FetchResponse) { r.Slots = r.GetSlots()[:48] },
		"no slots":                    func(r *kvtierv1.FetchResponse) { r.Slots = nil },
		"more rows than blocks":       func(r *kvtierv1.FetchResponse) { r.Slots = append(r.GetSlots(), r.GetSlots()...) },
		"fewer tiers than rows":       func(r *kvtierv1.FetchResponse) { r.Tiers = r.GetTiers()[:1] },
		"more usable blocks than row": func(r *kvtierv1.FetchResponse) { r.UsableBlocks = 1000 },
	} {
		n.mu.Lock()
		n.mangle = mangle
		n.mu.Unlock()
		lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
		if !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
		if lease != nil {
			t.Errorf("%s: a lease beside the error", what)
		}
	}
	eventually(t, "what was not accepted is given back", func() bool { return n.held() == 0 })
}

func TestConcurrentReaders(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 200)
	write(t, c, ns, names)
	var readers sync.WaitGroup
	for i := range 32 {
		readers.Go(func() {
			for round := range 30 {
				from := (i*7 + round*13) % 190
				lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[from : from+10], Mode: client.ModeSet})
				if err != nil {
					t.Error(err)
					return
				}
				if err := readAll(lease, names[from:], 2); err != nil {
					t.Error(err)
				}
				switch round % 3 {
				case 0:
					lease.ReleaseAsync()
				case 1:
					err = lease.Release(t.Context())
				case 2:
					ctx, cancel := context.WithCancel(t.Context())
					cancel()
					err = lease.Release(ctx)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	readers.Wait()
	eventually(t, "every release", func() bool { return n.held() == 0 })
	if got := c.Metrics(); got.Leases != 0 || got.Views != 0 {
		t.Errorf("%d leases, %d views left", got.Leases, got.Views)
	}
}

// Everything at once while the node comes and goes: nothing may fault, hang or
// read wrong bytes.
func TestReadersWritersAndRestarts(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 50)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	reads := make([]int, 8)
	for i := range 8 {
		work.Go(func() {
			for ctx.Err() == nil {
				_ = tryWrite(ctx, c, ns, names[i*6:i*6+6])
				lease, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: names, Mode: client.ModeSet})
				if err != nil {
					_ = c.Ready(ctx)
					continue
				}
				for row := range lease.Rows {
					view, ok := lease.Page(row, row%2)
					if !ok {
						continue
					}
					if err := checkPage(names[row], row%2, view.Bytes()); err != nil {
						t.Error(err)
					}
					if err := view.Close(); err != nil {
						t.Error(err)
					}
					reads[i]++
				}
				if err := lease.Release(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 5 {
		eventually(t, "attachment", func() bool { return c.Ready(ctx) == nil && c.Metrics().Fetches > 0 })
		before := c.Metrics().Pages
		eventually(t, "reads", func() bool { return c.Metrics().Pages > before+200 })
		n.stop()
		n.start(t)
	}
	cancel()
	work.Wait()
	for i, got := range reads {
		if got == 0 {
			t.Errorf("reader %d read nothing", i)
		}
	}
}

func TestCloseLeavesNothingBehind(t *testing.T) {
	n := startTestNode(t)
	descriptors := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	names := chain(1, 4)
	first := open(t, patient(n))
	ns := register(t, first)
	write(t, first, ns, names)
	// Extents are mapped when they arrive, which a commit does not wait for: a
	// fetch does. Without it the mapping of first may be missing in the baseline.
	if err := fetch(t, first, ns, names).Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for streamed, cfg := range faces(n) {
		before, maps := descriptors(), mapped(t)
		for range 5 {
			c, err := client.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			register(t, c)
			lease := fetch(t, c, ns, names)
			attempt, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: chain(2, 2)})
			if err != nil {
				t.Fatal(err)
			}
			if lease.Usable != 4 {
				t.Errorf("%d blocks", lease.Usable)
			}
			if err := c.Close(); errors.Is(err, paging.ErrInvalid) == streamed {
				t.Errorf("streamed=%v: close with an attempt open: %v", streamed, err)
			}
			if err := attempt.Abort(t.Context()); err != nil {
				t.Error(err)
			}
		}
		eventually(t, fmt.Sprintf("streamed=%v: descriptors", streamed), func() bool { return descriptors() <= before })
		eventually(t, fmt.Sprintf("streamed=%v: mappings", streamed), func() bool { return mapped(t) <= maps })
	}
}

// Who waits for a silent node is told when it is heard again, although the link is
// still the same.
func TestReadyEndsWhenASilentNodeIsHeardAgain(t *testing.T) {
	n := startTestNode(t)
	cfg := patient(n)
	cfg.StallTimeout = 0 // the default
	c := open(t, cfg)
	ns, err := registerPatiently(t, c)
	if err != nil {
		t.Fatal(err)
	}
	n.frozen.close()
	eventually(t, "the breaker opens", func() bool {
		_, err := c.Lookup(t.Context(), ns, chain(1, 4), 0)
		return errors.Is(err, paging.ErrUnavailable)
	})
	refused := c.Metrics().Unavailable
	ready := make(chan error)
	go func() { ready <- c.Ready(t.Context()) }() // owner: the test; ends with it at the latest
	eventually(t, "somebody waits", func() bool { return c.Metrics().Unavailable > refused })
	n.frozen.open()
	select {
	case err := <-ready:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the node is heard again, and Ready waits")
	}
}

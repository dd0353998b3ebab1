package transport

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
)

var errCutHere = errors.New("cut")

// inMemory is a cluster of three nodes over pipes: two sources with different
// bytes for the same page, both right, and one that fetches.
func inMemory(t *testing.T, change func(*MuxConfig, *Config)) (m *memory, a, b, me *node) {
	m = newMemory()
	c := newCluster(t, m)
	return m, c.add(1, change), c.add(2, change), c.add(3, change)
}

// TestCutMidPage: what one source sent of a page is forgotten when its
// connection ends, and the page comes whole from the other.
func TestCutMidPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, a, b, me := inMemory(t, real)
		const size = 3<<20 + 77
		for i := range 4 {
			a.src.put(nameOf(i), 0, size, false)
			b.src.put(nameOf(i), 0, size, i%2 == 0)
		}
		for _, at := range []int64{welcomeBytes + 1, welcomeBytes + headerBytes + 100000, welcomeBytes + 1<<20 + headerBytes + 20, 3 << 20} {
			m.onRead(func(address string, k *tap, _ []byte) error {
				if address == a.address() && k.kind == Bulk && k.read > at {
					return errCutHere
				}
				return nil
			})
			tr := newTray(t, want(0, 0, size, a, b), want(1, 0, size, a, b), want(2, 0, size, a), want(3, 0, size, b))
			fetch(t, me, tr)
			for _, i := range []int{0, 1, 3} {
				tr.good(i)
			}
			if r := tr.result(2); !errors.Is(r.Err, paging.ErrUnavailable) {
				t.Errorf("cut at %d: page of the broken source alone: %v, want %v", at, r.Err, paging.ErrUnavailable)
			}
			if me.Reachable(a.id) {
				t.Errorf("cut at %d: the broken source is not left out", at)
			}
			m.onRead(nil)
			time.Sleep(10 * time.Second)
			if !me.Reachable(a.id) {
				t.Errorf("cut at %d: the source is not back", at)
			}
		}
	})
}

// TestFlippedBit flips one bit of a page in flight: that copy is not used, its
// source is told, and the page comes from the other.
func TestFlippedBit(t *testing.T) {
	m, a, b, me := inMemory(t, nil)
	const size = 300001
	a.src.put(nameOf(0), 0, size, false)
	a.src.put(nameOf(1), 0, size, false)
	b.src.put(nameOf(1), 0, size, false)
	if _, err := me.Have(t.Context(), a.id, &HaveRequest{Namespace: ns, Names: []paging.BlockName{nameOf(0)}}); err != nil {
		t.Fatal(err) // a control connection, for doubts
	}
	for _, at := range []int64{headerBytes, 65535, 200000, headerBytes + size - 1} {
		flip(m, a, at)
		alone := newTray(t, want(0, 0, size, a))
		fetch(t, me, alone)
		if r := alone.result(0); !errors.Is(r.Err, paging.ErrCorrupt) {
			t.Errorf("bit of byte %d flipped: %v, want %v", at, r.Err, paging.ErrCorrupt)
		}
		if p := <-a.src.doubts; p.Name != nameOf(0) || p.Part != 0 || p.Namespace != ns {
			t.Errorf("the source is told of %+v", p)
		}
		flip(m, a, at)
		both := newTray(t, want(1, 0, size, a, b))
		me.peer(b.id).assigned.Add(1 << 30) // so that the other is chosen first
		fetch(t, me, both)
		me.peer(b.id).assigned.Add(-1 << 30)
		both.good(0)
		if r := both.result(0); r.From != b.id {
			t.Errorf("bit of byte %d flipped: the page came from %s", at, r.From.Short())
		}
		<-a.src.doubts
	}
	if got := me.Metrics(); got.PagesCorrupt != 8 || got.PeerFailures != 0 {
		t.Errorf("%d corrupt copies counted, %d failures of peers, want 8 and 0", got.PagesCorrupt, got.PeerFailures)
	}
	// In a frame's header the same is the end of the connection.
	flip(m, a, 20)
	both := newTray(t, want(1, 0, size, a, b))
	me.peer(b.id).assigned.Add(1 << 30)
	fetch(t, me, both)
	me.peer(b.id).assigned.Add(-1 << 30)
	both.good(0)
	if got := me.Metrics().Violations; got != 1 {
		t.Errorf("%d violations counted, want 1", got)
	}
}

// flip flips a bit of the byte at a position after the beginning of the next
// frame with page bytes that comes from a node.
func flip(m *memory, n *node, at int64) {
	var base int64 = -1
	done := false
	m.onRead(func(address string, k *tap, b []byte) error {
		if address != n.address() || k.kind != Bulk || done {
			return nil
		}
		begin := k.read - int64(len(b))
		if base < 0 && len(b) == headerBytes && b[0] == byte(framePage) { // headers are read by themselves
			base = begin
		}
		if off := base + at - begin; base >= 0 && off >= 0 && off < int64(len(b)) {
			b[off] ^= 4
			done = true
		}
		return nil
	})
}

// TestSourceChanges changes a page while it is being sent.
func TestSourceChanges(t *testing.T) {
	m, a, b, me := inMemory(t, nil)
	const size = 5 << 20
	page := a.src.put(nameOf(0), 0, size, false)
	b.src.put(nameOf(0), 0, size, false)
	var changed atomic.Bool
	m.onRead(func(address string, k *tap, _ []byte) error {
		if address == a.address() && k.kind == Bulk && k.read > 2<<20 && !changed.Swap(true) {
			pattern(page.bytes, 77, nameOf(0), 0) // a pipe copies in the reader's goroutine, this one
		}
		return nil
	})
	alone := newTray(t, want(0, 0, size, a))
	fetch(t, me, alone)
	if r := alone.result(0); !errors.Is(r.Err, paging.ErrCorrupt) {
		t.Errorf("%v, want %v", r.Err, paging.ErrCorrupt)
	}
	both := newTray(t, want(0, 0, size, a, b))
	fetch(t, me, both)
	both.good(0)
}

// rawBulk is a bulk connection of a node that does as the test says.
func rawBulk(t *testing.T, from *node, to *node) *link {
	t.Helper()
	l, err := from.mux.dial(t.Context(), to.id, Bulk)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hangUp(l) })
	return l
}

func (l *link) request(t *testing.T, id uint64, r *PageRequest) {
	t.Helper()
	if _, err := l.Write(appendFrame(nil, header{kind: frameRequest, request: id}, r.encode(time.Minute))); err != nil {
		t.Fatal(err)
	}
}

// TestSlowReaderIsCut: a node that asks and does not take what comes is cut at
// the deadline of a write, its pins end, and others are served meanwhile.
func TestSlowReaderIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, a, b, me := inMemory(t, func(_ *MuxConfig, c *Config) { c.IOTimeout = 5 * time.Second })
		a.src.put(nameOf(0), 0, 1<<20, false)
		a.src.put(nameOf(1), 0, 1<<20, true)
		slow := rawBulk(t, b, a)
		slow.request(t, 1, requestOf([3]int{0, 0, 1 << 20}, [3]int{1, 0, 1 << 20}))
		synctest.Wait()
		if a.src.pins.Load() != 1 {
			t.Fatal("the source has no pins")
		}
		start := time.Now()
		tr := newTray(t, want(0, 0, 1<<20, a), want(1, 0, 1<<20, a))
		fetch(t, me, tr)
		tr.allGood()
		if took := time.Since(start); took != 0 {
			t.Errorf("another node waited %v for the slow one", took)
		}
		// It takes a little now and then, but never 1 MiB in 5 s.
		taken := 0
		for {
			time.Sleep(time.Second)
			n, err := slow.Read(make([]byte, 1000))
			taken += n
			if err != nil {
				break
			}
		}
		if took := time.Since(start); took > 6*time.Second || taken > 6000 {
			t.Errorf("cut after %v and %d bytes", took, taken)
		}
		synctest.Wait()
		if got := a.Metrics(); a.src.pins.Load() != 0 || got.PinnedBytes != 0 || got.OwedBytes != 0 || got.Timeouts != 1 {
			t.Errorf("%d pins, %+v", a.src.pins.Load(), got)
		}
	})
}

// TestCancel ends a call while a page is arriving: it returns at once, its slot
// is not touched any more, the source lets go, and the connection serves on.
func TestCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, a, _, me := inMemory(t, nil)
		const size = 4 << 20
		a.src.put(nameOf(0), 0, size, false)
		a.src.put(nameOf(1), 0, 70000, false)
		ctx, cancel := context.WithCancel(t.Context())
		hold := make(chan struct{})
		var once sync.Once
		m.onRead(func(address string, k *tap, _ []byte) error {
			if address == a.address() && k.kind == Bulk && k.read > 1<<20+300000 {
				once.Do(func() {
					me.mux.running.Go(func() { time.Sleep(time.Second); cancel() })
					<-hold
				})
			}
			return nil
		})
		tr := newTray(t, want(0, 0, size, a))
		var wg sync.WaitGroup
		wg.Go(func() { _ = me.Fetch(ctx, tr.req) })
		time.Sleep(2 * time.Second)
		// The reader stands inside a read into the slot: the call must wait for it.
		tr.mu.Lock()
		early := tr.done[0] != nil
		tr.mu.Unlock()
		if early {
			t.Error("the page was given up while its slot was being written")
		}
		close(hold)
		wg.Wait()
		if r := tr.result(0); !errors.Is(r.Err, context.Canceled) {
			t.Errorf("%v, want %v", r.Err, context.Canceled)
		}
		slot := tr.slots[0]
		for i := range slot {
			slot[i] = 0xee
		}
		synctest.Wait()
		if !bytes.Equal(slot, bytes.Repeat([]byte{0xee}, size)) {
			t.Error("the slot was written after its page was given up")
		}
		if got := me.Metrics(); a.src.pins.Load() != 0 || got.InFlightBytes != 0 {
			t.Errorf("%d pins, %d bytes in flight", a.src.pins.Load(), got.InFlightBytes)
		}
		again := newTray(t, want(1, 0, 70000, a))
		fetch(t, me, again)
		again.allGood()
		if dials := m.dialed(a.address()); dials > 2 { // one bulk, one control
			t.Errorf("%d connections: the cancel cost one", dials)
		}
	})
}

// TestCancelOfSilence ends a call whose source sends nothing in the middle of a
// page: it does not wait for the source.
func TestCancelOfSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, a, _, me := inMemory(t, nil)
		a.src.put(nameOf(0), 0, 4<<20, false)
		m.onRead(func(address string, k *tap, _ []byte) error {
			if k.kind == Bulk && k.read > 1<<20+300000 {
				k.hole.Store(true)
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		tr := newTray(t, want(0, 0, 4<<20, a))
		if err := me.Fetch(ctx, tr.req); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("returned after %v, want 3s", took)
		}
		if r := tr.result(0); !errors.Is(r.Err, paging.ErrExpired) {
			t.Errorf("%v, want %v", r.Err, paging.ErrExpired)
		}
	})
}

// real are the times of a real node.
func real(_ *MuxConfig, c *Config) { c.StallAfter, c.IOTimeout = 0, 0 }

// TestSlowDiskIsNoStall: a source whose disk is slow says that it lives.
func TestSlowDiskIsNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, a, _, me := inMemory(t, real)
		a.src.put(nameOf(0), 0, 70000, true)
		a.src.load = func(context.Context, *stored) error { time.Sleep(20 * time.Second); return nil }
		tr := newTray(t, want(0, 0, 70000, a))
		fetch(t, me, tr)
		tr.allGood()
		if got := me.Metrics(); got.PeerFailures != 0 {
			t.Errorf("%d failures of peers", got.PeerFailures)
		}
	})
}

// TestBlackHole: bytes from a source stop coming in the middle of a page while
// nothing else says that it is gone.
func TestBlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, a, b, me := inMemory(t, real)
		for i := range 10 {
			a.src.put(nameOf(i), 0, 2<<20, false)
			b.src.put(nameOf(i), 0, 2<<20, false)
		}
		m.onRead(func(address string, k *tap, _ []byte) error {
			if address == a.address() && k.kind == Bulk && k.read > 3<<20 {
				k.hole.Store(true)
			}
			return nil
		})
		start := time.Now()
		var pages []WantedPage
		for i := range 10 {
			pages = append(pages, want(i, 0, 2<<20, a, b))
		}
		tr := newTray(t, pages...)
		fetch(t, me, tr)
		tr.allGood()
		if took := time.Since(start); took == 0 || took > 2*time.Second {
			t.Errorf("the pages took %v", took)
		}
		if me.Reachable(a.id) || !me.Reachable(b.id) {
			t.Error("the broken source is not left out, or the other is")
		}
		// Nobody pays for it again, and it is looked for ever more seldom.
		before := m.dialed(a.address())
		start = time.Now()
		for range 60 {
			tr := newTray(t, want(0, 0, 2<<20, a, b), want(1, 0, 2<<20, a))
			fetch(t, me, tr)
			tr.good(0)
			if r := tr.result(1); !errors.Is(r.Err, paging.ErrUnavailable) {
				t.Errorf("%v, want %v", r.Err, paging.ErrUnavailable)
			}
			time.Sleep(time.Second)
		}
		if took := time.Since(start); took != time.Minute {
			t.Errorf("60 calls waited %v in all", took-time.Minute)
		}
		if probes := m.dialed(a.address()) - before; probes > 25 || probes < 5 {
			t.Errorf("%d probes in a minute", probes)
		}
		m.onRead(nil)
		m.hole(a.address()).Store(false)
		time.Sleep(10 * time.Second)
		if !me.Reachable(a.id) {
			t.Error("the source is not back")
		}
		back := newTray(t, want(5, 0, 2<<20, a))
		fetch(t, me, back)
		back.allGood()
	})
}

// TestSilentPeerIsNoticed: nobody fetches from the peer when its port breaks.
func TestSilentPeerIsNoticed(t *testing.T) {
	for _, how := range []string{"black hole", "closed"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, a, _, me := inMemory(t, real)
				a.src.put(nameOf(0), 0, 70000, false)
				tr := newTray(t, want(0, 0, 70000, a))
				fetch(t, me, tr)
				tr.allGood()
				time.Sleep(10 * time.Second)
				if !me.Reachable(a.id) {
					t.Fatal("an idle peer is left out")
				}
				if how == "closed" {
					if err := errors.Join(a.Close(), a.mux.Close()); err != nil {
						t.Fatal(err)
					}
				} else {
					m.hole(a.address()).Store(true)
				}
				time.Sleep(2 * time.Second)
				if me.Reachable(a.id) {
					t.Error("after 2 s it is still named")
				}
				if p := me.Peers(); len(p) != 1 || !p[0].Out || p[0].Failures == 0 || me.Metrics().PeersOut != 1 {
					t.Errorf("peers: %+v", p)
				}
			})
		})
	}
}

// TestReachedButUseless: a source that answers probes but no requests costs one
// stall in five seconds at the most.
func TestReachedButUseless(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, a, _, me := inMemory(t, real)
		a.src.put(nameOf(0), 0, 70000, false)
		m.onRead(func(address string, k *tap, b []byte) error {
			k.deaf = k.kind == Bulk // large packets do not pass
			return nil
		})
		var stalls, calls int
		for start := time.Now(); time.Since(start) < time.Minute; calls++ {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			tr := newTray(t, want(0, 0, 70000, a))
			if err := me.Fetch(ctx, tr.req); err != nil {
				t.Fatal(err)
			}
			cancel()
			if time.Since(began) > 0 {
				stalls++
			}
			time.Sleep(100 * time.Millisecond)
		}
		if stalls > 18 || calls < 200 {
			t.Errorf("%d of %d calls stalled", stalls, calls)
		}
	})
}

// TestIdleConnectionsClose: and the next call makes a new one.
func TestIdleConnectionsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, a, _, me := inMemory(t, real)
		a.src.put(nameOf(0), 0, 70000, false)
		for range 2 {
			tr := newTray(t, want(0, 0, 70000, a))
			fetch(t, me, tr)
			tr.allGood()
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if got := a.mux.Metrics().Conns; got != 1 { // the control connection stays
				t.Errorf("%d connections are open", got)
			}
			time.Sleep(10 * time.Minute)
			if peers := me.Peers(); len(peers) != 0 || a.mux.Metrics().Conns != 0 {
				t.Errorf("a peer that nobody uses is known: %+v", peers)
			}
		}
		if got := me.Metrics().PeerFailures; got != 0 {
			t.Errorf("%d failures of peers", got)
		}
	})
}

// TestRestartOfASource: its connections end, and the next call finds it at its
// new address.
func TestRestartOfASource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newMemory())
		a, me := c.add(1, real), c.add(3, real)
		a.src.put(nameOf(0), 0, 70000, false)
		tr := newTray(t, want(0, 0, 70000, a))
		fetch(t, me, tr)
		tr.allGood()
		if err := errors.Join(a.Close(), a.mux.Close()); err != nil {
			t.Fatal(err)
		}
		again := c.add(1, func(m *MuxConfig, cfg *Config) { real(m, cfg); m.Listen = "10.0.0.77:7441" })
		again.src.put(nameOf(0), 0, 70000, false)
		time.Sleep(2 * time.Second)
		tr = newTray(t, want(0, 0, 70000, again))
		fetch(t, me, tr)
		tr.allGood()
	})
}

package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// waitFor yields until a condition holds that other goroutines bring about.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for !ok() {
		if t.Context().Err() != nil {
			t.Fatalf("gave up waiting for %s", what)
		}
		runtime.Gosched()
	}
}

func TestMuxConfigIsValidated(t *testing.T) {
	_, err := OpenMux(MuxConfig{Cluster: strings.Repeat("x", 256), Listen: "nowhere", MaxConns: -1, TLS: &TLS{}})
	if !errors.Is(err, paging.ErrInvalid) {
		t.Fatalf("%v, want %v", err, paging.ErrInvalid)
	}
	for _, what := range []string{"ID", "256 bytes", "Resolve", "nowhere", "negative", "certificate"} {
		if !strings.Contains(err.Error(), what) {
			t.Errorf("%q is not mentioned in: %v", what, err)
		}
	}
}

// TestRaftConnections carries bytes both ways between what Dial and Accept gave.
func TestRaftConnections(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		a, b := c.add(1, nil), c.add(2, nil)
		var wg sync.WaitGroup
		wg.Go(func() {
			conn, err := a.mux.Accept(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			defer hangUp(conn)
			if _, err := io.CopyN(conn, conn, 5); err != nil {
				t.Error(err)
			}
		})
		conn, err := b.mux.Dial(t.Context(), a.id)
		if err != nil {
			t.Fatal(err)
		}
		defer hangUp(conn)
		if _, err := conn.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		var got [5]byte
		if _, err := io.ReadFull(conn, got[:]); err != nil || string(got[:]) != "hello" {
			t.Errorf("%q, %v", got, err)
		}
		wg.Wait()
		waitFor(t, "the connection to be forgotten", func() bool { return a.mux.Metrics().Conns == 0 })
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := a.mux.Accept(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("accept after its context: %v", err)
		}
	})
}

func TestClosedMux(t *testing.T) {
	c := newCluster(t, newMemory())
	a, b := c.add(1, nil), c.add(2, nil)
	waiting, err := b.mux.Dial(t.Context(), a.id) // nobody accepts it
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := a.mux.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := waiting.Read(make([]byte, 1)); err == nil {
		t.Error("a connection that nobody accepted is open")
	}
	if _, err := a.mux.Accept(t.Context()); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("accept: %v, want %v", err, paging.ErrClosed)
	}
	if _, err := a.mux.Dial(t.Context(), b.id); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("dial: %v, want %v", err, paging.ErrClosed)
	}
	if _, err := b.mux.Dial(t.Context(), a.id); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("dial a closed one: %v, want %v", err, paging.ErrUnavailable)
	}
	if _, err := b.mux.Dial(t.Context(), placement.NodeID{77}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("dial an unknown one: %v, want %v", err, paging.ErrUnavailable)
	}
}

// TestRefusals dials node 1 in every wrong way.
func TestRefusals(t *testing.T) {
	right := hello{kind: Raft, speaks: versions{oldestVersion, Version}, from: placement.NodeID{2}, to: placement.NodeID{1}, cluster: "test"}
	for _, c := range []struct {
		why    Refusal
		change func(h *hello)
		want   error
	}{
		{WrongCluster, func(h *hello) { h.cluster = "another" }, paging.ErrDenied},
		{WrongCluster, func(h *hello) { h.cluster = "" }, paging.ErrDenied},
		{WrongVersion, func(h *hello) { h.speaks = versions{Version + 1, Version + 2} }, paging.ErrIncompatible},
		{WrongVersion, func(h *hello) { h.speaks = versions{} }, paging.ErrIncompatible},
		{WrongNode, func(h *hello) { h.to = placement.NodeID{3} }, paging.ErrDenied},
		{WrongName, func(h *hello) { h.from = placement.NodeID{} }, paging.ErrDenied},
		{WrongName, func(h *hello) { h.from = placement.NodeID{1} }, paging.ErrDenied},
		{WrongKind, func(h *hello) { h.kind = 77 }, paging.ErrUnavailable},
	} {
		cl := newCluster(t, newMemory())
		n := cl.add(1, nil)
		h := right
		c.change(&h)
		conn, err := cl.net.Dial(t.Context(), n.mux.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(h.encode()); err != nil {
			t.Fatal(err)
		}
		w, err := readWelcome(conn)
		if err != nil || w.refusal != c.why {
			t.Errorf("%s: %+v, %v", c.why, w, err)
		}
		if c.why == WrongCluster && w.node != (placement.NodeID{}) {
			t.Errorf("node %s says its name to another cluster", w.node)
		}
		if e := (&RefusedError{Why: w.refusal}); !errors.Is(e, c.want) {
			t.Errorf("%s: %v, want %v", c.why, e, c.want)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Errorf("%s: the connection stays open", c.why)
		}
		waitFor(t, "the refusal to be counted", func() bool { return n.mux.Metrics().Refused[c.why.String()] == 1 })
		hangUp(conn)
	}
}

// TestDialerSeesRefusals: what the dialer makes of a refusal, and that it does
// not take another node for the one it means.
func TestDialerSeesRefusals(t *testing.T) {
	c := newCluster(t, newMemory())
	a := c.add(1, nil)
	stranger := c.add(2, func(m *MuxConfig, _ *Config) { m.Cluster = "another" })
	newer := c.add(3, func(m *MuxConfig, _ *Config) { m.versions = versions{Version + 1, Version + 2} })
	c.place(placement.NodeID{4}, a.mux.Addr().String()) // node 4 is not there: node 1 stands at its address
	b := c.add(5, nil)
	var refused *RefusedError
	if _, err := stranger.mux.Dial(t.Context(), a.id); !errors.As(err, &refused) || refused.Why != WrongCluster || !errors.Is(err, paging.ErrDenied) {
		t.Errorf("another cluster: %v", err)
	}
	if _, err := newer.mux.Dial(t.Context(), a.id); !errors.As(err, &refused) || refused.Why != WrongVersion || !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("another version: %v", err)
	}
	if _, err := b.mux.Dial(t.Context(), placement.NodeID{4}); !errors.As(err, &refused) || refused.Why != WrongNode || !errors.Is(err, paging.ErrDenied) {
		t.Errorf("a stolen address: %v", err)
	}
	waitFor(t, "the refusals to be counted", func() bool {
		got := a.mux.Metrics().Refused
		return got["wrong_cluster"] == 1 && got["wrong_version"] == 1 && got["wrong_node"] == 1
	})
}

// TestForeignBytes sends what is no hello to the peer port: it is closed before
// anything was read beyond the first bytes, counted, and costs no memory.
func TestForeignBytes(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		n := c.add(1, nil)
		counted := "malformed"
		if c.ca != nil {
			counted = "tls"
		}
		network := n.mux.cfg.Network
		r := rand.New(rand.NewPCG(1, 2))
		random := make([]byte, 1<<16)
		for i := range random {
			random[i] = byte(r.Uint32())
		}
		hello := (&hello{kind: Bulk, from: placement.NodeID{2}, to: n.id, cluster: "test"}).encode()
		hello[20] ^= 1
		inputs := [][]byte{random, []byte("GET / HTTP/1.1\r\n\r\n"), []byte("\x80\x04\x95\x10\x00\x00\x00"), hello}
		if c.ca == nil {
			inputs = append(inputs, []byte{0x16, 3, 1, 2, 0, 1}) // the beginning of a TLS handshake, which TLS waits for
		}
		const rounds = 20
		for range rounds {
			for _, in := range inputs {
				conn, err := network.Dial(t.Context(), n.mux.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				_, _ = conn.Write(in) // may end early
				if got, _ := io.ReadAll(conn); len(got) != 0 && c.ca == nil {
					t.Errorf("%.20q is answered with %q", in, got)
				}
				hangUp(conn)
			}
		}
		waitFor(t, "every connection to be counted", func() bool {
			return n.mux.Metrics().Refused[counted] == rounds*int64(len(inputs)) && n.mux.Metrics().Conns == 0
		})
	})
}

// TestSlowHandshake says nothing, or only half of a hello.
func TestSlowHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newMemory())
		n := c.add(1, func(m *MuxConfig, _ *Config) { m.HandshakeTimeout = 3 * time.Second })
		for _, said := range []string{"", "kvtp", "kvtp\x02"} {
			start := time.Now()
			conn, err := c.net.Dial(t.Context(), n.mux.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write([]byte(said)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Error("answered")
			}
			if took := time.Since(start); took != 3*time.Second {
				t.Errorf("%q was given up after %v", said, took)
			}
			hangUp(conn)
		}
		synctest.Wait()
		if got := n.mux.Metrics().Refused["slow"]; got != 3 {
			t.Errorf("%d counted, want 3", got)
		}
	})
}

// TestTooManyConnections overflows the bounds of connections, of handshakes, and
// of connections that Accept did not take.
func TestTooManyConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newMemory())
		n := c.add(1, func(m *MuxConfig, _ *Config) { m.MaxConns = maxHandshakes + 40 })
		open := func(say []byte) net.Conn {
			conn, err := c.net.Dial(t.Context(), n.mux.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { hangUp(conn) })
			if say != nil {
				_, _ = conn.Write(say)
			}
			return conn
		}
		for range maxHandshakes {
			open(nil)
		}
		synctest.Wait()
		open(nil)
		synctest.Wait()
		if got := n.mux.Metrics(); got.Conns != maxHandshakes || got.Refused["overloaded"] != 1 {
			t.Errorf("%d connections in their handshakes, %d refused", got.Conns, got.Refused["overloaded"])
		}
		time.Sleep(n.mux.cfg.HandshakeTimeout)
		synctest.Wait()

		raft := (&hello{kind: Raft, speaks: versions{1, 1}, from: placement.NodeID{2}, to: n.id, cluster: "test"}).encode()
		for range raftBacklog {
			if w, err := readWelcome(open(raft)); err != nil || w.refusal != NotRefused {
				t.Fatalf("%+v, %v", w, err)
			}
			synctest.Wait()
		}
		if w, err := readWelcome(open(raft)); err != nil || w.refusal != WrongKind {
			t.Errorf("one more than Accept has room for: %+v, %v", w, err)
		}
		control := (&hello{kind: Control, speaks: versions{1, 1}, from: placement.NodeID{2}, to: n.id, cluster: "test"}).encode()
		for synctest.Wait(); n.mux.Metrics().Conns < int64(n.mux.cfg.MaxConns); synctest.Wait() {
			if w, err := readWelcome(open(control)); err != nil || w.refusal != NotRefused {
				t.Fatalf("%+v, %v", w, err)
			}
		}
		if got, err := io.ReadAll(open(nil)); err != nil && !errors.Is(err, io.ErrClosedPipe) || len(got) > 0 {
			t.Errorf("one connection too many: %q, %v", got, err)
		}
		if got := n.mux.Metrics().Refused["overloaded"]; got != 2 {
			t.Errorf("%d refused, want 2", got)
		}
	})
}

// TestNextVersion lets a node of version N and one of N-1 do everything with
// each other, both ways.
func TestNextVersion(t *testing.T) {
	c := newCluster(t, newMemory())
	next := func(m *MuxConfig, _ *Config) { m.versions = versions{Version, Version + 1} }
	a, b := c.add(1, next), c.add(2, nil)
	for i, pair := range [][2]*node{{a, b}, {b, a}} {
		from, to := pair[0], pair[1]
		from.src.put(nameOf(i), 0, 300000, false)
		from.src.put(nameOf(i), 1, 70000, true)
		tr := newTray(t, want(i, 0, 300000, from), want(i, 1, 70000, from))
		fetch(t, to, tr)
		tr.allGood()
		held, err := to.Have(t.Context(), from.id, &HaveRequest{Namespace: ns, Names: []paging.BlockName{nameOf(i)}})
		if err != nil || held[0].Parts != 3 {
			t.Errorf("held: %v, %v", held, err)
		}
		l, err := to.mux.dial(t.Context(), from.id, Control)
		if err != nil {
			t.Fatal(err)
		}
		if l.version != Version {
			t.Errorf("they speak version %d, want %d", l.version, Version)
		}
		hangUp(l)
	}
}

// TestHelloIsStable: the encoding that every version must be able to read.
func TestHelloIsStable(t *testing.T) {
	h := hello{kind: Bulk, speaks: versions{1, 2}, from: placement.NodeID{0xaa}, to: placement.NodeID{0xbb}, cluster: "c1"}
	b := h.encode()
	want := append([]byte("kvtp\x03\x02\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00\xaa"), make([]byte, 15)...)
	want = append(append(want, 0xbb), make([]byte, 15)...)
	if !bytes.Equal(b[:48], want) || string(b[helloBytes:]) != "c1" {
		t.Errorf("hello encodes to %x, want %x", b, want)
	}
	w := welcome{refusal: WrongNode, version: 2, node: placement.NodeID{0xcc}}
	if b := w.encode(); string(b[:17]) != "kvtw\x03\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\xcc" || len(b) != welcomeBytes {
		t.Errorf("welcome encodes to %x", b)
	}
}

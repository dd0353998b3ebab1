package member

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/server/placement"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fabric is a network in memory: packets may be dropped, streams are pipes.
type fabric struct {
	mu   sync.Mutex
	at   map[string]*wire
	cut  map[string]bool // addresses that nobody reaches
	free int
}

func newFabric(t *testing.T) *fabric {
	// Runs last: probes that the library left running end by their timeouts.
	t.Cleanup(func() { time.Sleep(2 * streamTimeout) })
	return &fabric{at: map[string]*wire{}, cut: map[string]bool{}}
}

// wire is one node's memberlist.Transport.
type wire struct {
	f       *fabric
	addr    *net.TCPAddr
	packets chan *memberlist.Packet
	streams chan net.Conn
}

func (f *fabric) attach() *wire {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.free++
	w := &wire{
		f: f, addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(f.free)), Port: 7442},
		packets: make(chan *memberlist.Packet, 1024), streams: make(chan net.Conn, 64),
	}
	f.at[w.addr.String()] = w
	return w
}

func (f *fabric) reach(from, to string) *wire {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cut[from] || f.cut[to] {
		return nil
	}
	return f.at[to]
}

func (f *fabric) setCut(addr string, cut bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut[addr] = cut
}

func (w *wire) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return w.addr.IP, w.addr.Port, nil
}
func (w *wire) PacketCh() <-chan *memberlist.Packet { return w.packets }
func (w *wire) StreamCh() <-chan net.Conn           { return w.streams }

func (w *wire) WriteTo(b []byte, to string) (time.Time, error) {
	now := time.Now()
	if peer := w.f.reach(w.addr.String(), to); peer != nil {
		select {
		case peer.packets <- &memberlist.Packet{Buf: bytes.Clone(b), From: w.addr, Timestamp: now}:
		default: // a full socket buffer drops
		}
	}
	return now, nil
}

func (w *wire) DialTimeout(to string, _ time.Duration) (net.Conn, error) {
	peer := w.f.reach(w.addr.String(), to)
	if peer == nil {
		return nil, fmt.Errorf("%s is not reachable", to)
	}
	here, there := net.Pipe()
	select {
	case peer.streams <- there:
		return here, nil
	default:
		return nil, fmt.Errorf("%s does not accept", to)
	}
}

func (w *wire) Shutdown() error {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	delete(w.f.at, w.addr.String())
	return nil
}

func open(t *testing.T, f *fabric, i int, cluster string, incarnation placement.Incarnation, seeds ...string) (*Members, string) {
	t.Helper()
	w := f.attach()
	m, err := Open(Config{
		ID: placement.NodeID{byte(i)}, Incarnation: incarnation, Name: fmt.Sprint("n", i), Cluster: cluster,
		Key: bytes.Repeat([]byte{7}, 32), Bind: "127.0.0.1:7442", PeerAddress: w.addr.String(), Seeds: func(context.Context) []string { return seeds }, transport: w,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return m, w.addr.String()
}

func seen(m *Members) int {
	n := 0
	for _, node := range m.View().Nodes {
		if node.Seen {
			n++
		}
	}
	return n
}

// waitFor waits in fake time and returns how long it took.
func waitFor(t *testing.T, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > within {
			t.Fatalf("no %s within %v", what, within)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return time.Since(start)
}

func TestNodesFindEachOtherAndSeeADeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric(t)
		first, addr := open(t, f, 1, "c", 1)
		all := []*Members{first}
		var last string
		for i := 2; i <= 5; i++ {
			m, at := open(t, f, i, "c", 1, addr)
			all = append(all, m)
			last = at
		}
		waitFor(t, 10*time.Second, "view of five nodes", func() bool { return seen(first) == 5 && seen(all[4]) == 5 })
		f.setCut(last, true)
		took := waitFor(t, 10*time.Second, "view of four nodes", func() bool { return seen(first) == 4 && seen(all[3]) == 4 })
		if took > 5*time.Second {
			t.Errorf("a dead node was seen after %v, more than 5 s", took)
		}
		dead, ok := first.View().Find(placement.NodeID{5})
		if !ok || dead.Left || dead.Seen {
			t.Errorf("the dead node is %+v in the view", dead)
		}
		f.setCut(last, false)
		waitFor(t, 60*time.Second, "healed view", func() bool { return seen(first) == 5 && seen(all[4]) == 5 })
	})
}

func TestLeaveIsToldFromDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric(t)
		first, addr := open(t, f, 1, "c", 1)
		second, _ := open(t, f, 2, "c", 1, addr)
		waitFor(t, 10*time.Second, "view of two", func() bool { return seen(first) == 2 })
		if err := second.Leave(); err != nil {
			t.Fatal(err)
		}
		waitFor(t, 5*time.Second, "a node that left", func() bool {
			n, ok := first.View().Find(placement.NodeID{2})
			return ok && n.Left && !n.Seen
		})
	})
}

// A node killed and started at once on another address under its name is
// routable soon, with its new incarnation.
func TestRestartOnAnotherAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric(t)
		first, addr := open(t, f, 1, "c", 1)
		_, third := open(t, f, 3, "c", 1, addr)
		second, old := open(t, f, 2, "c", 1, addr)
		waitFor(t, 10*time.Second, "view of three", func() bool { return seen(first) == 3 })
		f.setCut(old, true)
		if err := second.Close(); err != nil {
			t.Fatal(err)
		}
		_, now := open(t, f, 2, "c", 2, addr, third)
		waitFor(t, 5*time.Second, "the node at its new address", func() bool {
			n, ok := first.View().Find(placement.NodeID{2})
			return ok && n.Seen && n.Incarnation == 2 && n.PeerAddress == now
		})
	})
}

func TestOtherClusterIsNeverListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric(t)
		a, addrA := open(t, f, 1, "cluster-a", 1)
		b, _ := open(t, f, 2, "cluster-b", 1, addrA)
		time.Sleep(time.Minute)
		if seen(a) != 1 || seen(b) != 1 {
			t.Errorf("clusters with different labels see %d and %d nodes, want 1 and 1", seen(a), seen(b))
		}
	})
}

func TestMetadataFitsOrIsRefused(t *testing.T) {
	for n := range 300 {
		m := meta{id: placement.NodeID{1}, incarnation: 9, name: strings.Repeat("n", n), peer: "[2001:db8::1]:65535", rpc: strings.Repeat("h", n) + ":1"}
		b, err := m.encode()
		if err != nil {
			continue
		}
		if len(b) > maxMetaBytes {
			t.Fatalf("%d bytes of metadata for a name of %d", len(b), n)
		}
		back, err := decodeMeta(b)
		if err != nil || back != m {
			t.Fatalf("%+v came back as %+v: %v", m, back, err)
		}
	}
}

func FuzzDecodeMeta(f *testing.F) {
	m := meta{id: placement.NodeID{1}, incarnation: 9, name: "n", peer: "127.0.0.1:1"}
	b, err := m.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{metaVersion})
	f.Fuzz(func(_ *testing.T, b []byte) {
		if m, err := decodeMeta(b); err == nil {
			if _, err := m.encode(); err != nil {
				panic(err)
			}
		}
	})
}

func TestBadConfigNamesEveryProblem(t *testing.T) {
	_, err := Open(Config{ID: placement.NodeID{1}, Key: []byte{1}, Bind: "localhost:7442"})
	if err == nil {
		t.Fatal("a bad configuration was accepted")
	}
	for _, want := range []string{"cluster id", "gossip key", "gossip address"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error does not name the %s: %v", want, err)
		}
	}
}

package trust

import (
	"crypto/x509"
	"encoding/pem"
	"net"
	"testing"
	"time"

	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/transport"
)

func pemOf(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// port is the peer port of a node.
func port(t *testing.T, id placement.NodeID, s *transport.TLS, resolve map[placement.NodeID]string) *transport.Mux {
	t.Helper()
	m, err := transport.OpenMux(transport.MuxConfig{
		ID: id, Cluster: "c", Listen: "127.0.0.1:0", TLS: s,
		Resolve: func(id placement.NodeID) (string, bool) { a, ok := resolve[id]; return a, ok },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return m
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 10 s", what)
		}
	}
}

// Who shows which certificate on the peer port, in both directions.
func TestPeersAreNodesOfTheCluster(t *testing.T) {
	one, two := placement.NodeID{1}, placement.NodeID{2}
	ca, caPair := newCA(t, "c")
	foreign, _ := newCA(t, "c")
	elsewhere, elsewherePair := newCA(t, "d")
	ours := newFixture(t)
	ours.issue(ca, caPair, Request{Identity: Identity{Kind: Node, Name: "one"}})
	for _, c := range []struct {
		what    string
		by      *Authority
		with    *Pair // the authority that it believes
		request Request
		past    time.Duration // issued so long ago
		refusal transport.Refusal
		dialed  bool // by node one
	}{
		{"a node", ca, caPair, Request{Identity: Identity{Kind: Node, Name: "two"}}, 0, transport.NotRefused, true},
		{"its id", ca, caPair, Request{Identity: Identity{Kind: Node, Name: "two"}, Names: []string{transport.NodeName(two)}}, 0, transport.NotRefused, true},
		{"another's id", ca, caPair, Request{Identity: Identity{Kind: Node, Name: "two"}, Names: []string{transport.NodeName(placement.NodeID{3})}}, 0, transport.WrongName, false},
		{"a client", ca, caPair, Request{Identity: Identity{Kind: Client, Name: "two", Role: RoleOperator}}, 0, transport.WrongName, false},
		{"expired", ca, caPair, Request{Identity: Identity{Kind: Node, Name: "two"}, Life: time.Hour}, 2 * time.Hour, transport.NoTLS, false},
		{"another authority", foreign, caPair, Request{Identity: Identity{Kind: Node, Name: "two"}}, 0, transport.NoTLS, false},
		{"another cluster", elsewhere, elsewherePair, Request{Identity: Identity{Kind: Node, Name: "two"}}, 0, transport.NoTLS, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			f := newFixture(t)
			f.advance(-c.past)
			f.issue(c.by, c.with, c.request)
			theirs, err := Open(f.files, nil)
			if err != nil {
				t.Fatal(err)
			}
			careless := theirs.Peers() // the refusals are to be those of node one
			careless.IsNode = func(*x509.Certificate) error { return nil }
			addresses := map[placement.NodeID]string{}
			a, b := port(t, one, ours.open().Peers(), addresses), port(t, two, careless, addresses)
			addresses[one], addresses[two] = a.Addr().String(), b.Addr().String()
			conn, err := b.Dial(t.Context(), one)
			if (err == nil) != (c.refusal == transport.NotRefused) {
				t.Fatalf("dials: %v", err)
			}
			if err == nil {
				closeAll(t, conn)
			} else {
				eventually(t, "the refusal is counted", func() bool { return a.Metrics().Refused[c.refusal.String()] == 1 })
			}
			conn, err = a.Dial(t.Context(), two)
			if (err == nil) != c.dialed {
				t.Fatalf("is dialed: %v", err)
			}
			if err == nil {
				closeAll(t, conn)
			}
		})
	}
}

func closeAll(t *testing.T, conns ...net.Conn) {
	t.Helper()
	for _, c := range conns {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// One authority may sign for two clusters; a node is of one.
func TestOneAuthorityTwoClusters(t *testing.T) {
	ca, caPair := newCA(t, "c")
	same, err := LoadAuthority(caPair.Cert, caPair.Key)
	if err != nil {
		t.Fatal(err)
	}
	same.cluster = "d"
	f, g := newFixture(t), newFixture(t)
	f.issue(ca, caPair, Request{Identity: Identity{Kind: Node, Name: "one"}})
	g.issue(same, caPair, Request{Identity: Identity{Kind: Node, Name: "two"}})
	addresses := map[placement.NodeID]string{}
	one, two := placement.NodeID{1}, placement.NodeID{2}
	a, b := port(t, one, f.open().Peers(), addresses), port(t, two, g.open().Peers(), addresses)
	addresses[one], addresses[two] = a.Addr().String(), b.Addr().String()
	for _, d := range []struct {
		mux *transport.Mux
		to  placement.NodeID
	}{{a, two}, {b, one}} {
		if conn, err := d.mux.Dial(t.Context(), d.to); err == nil {
			closeAll(t, conn)
			t.Errorf("node %v was reached", d.to)
		}
	}
}

// A cluster changes its authority while its nodes run and are connected: first
// all believe both, then all show the new one, then nobody believes the old one.
func TestAuthorityChangesWhileConnected(t *testing.T) {
	old, oldPair := newCA(t, "c")
	next, nextPair := newCA(t, "c")
	both := &Pair{Cert: append(append([]byte{}, oldPair.Cert...), nextPair.Cert...)}
	ids := []placement.NodeID{{1}, {2}}
	addresses := map[placement.NodeID]string{}
	var files []*fixture
	var ports []*transport.Mux
	for i, id := range ids {
		f := newFixture(t)
		f.issue(old, oldPair, Request{Identity: Identity{Kind: Node, Name: "n" + string(rune('a'+i))}})
		files = append(files, f)
		ports = append(ports, port(t, id, f.open().Peers(), addresses))
	}
	for i, id := range ids {
		addresses[id] = ports[i].Addr().String()
	}
	// connect returns both ends of a connection.
	connect := func() (net.Conn, net.Conn) {
		t.Helper()
		c, err := ports[0].Dial(t.Context(), ids[1])
		if err != nil {
			t.Fatal(err)
		}
		s, err := ports[1].Accept(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c, s
	}
	c0, s0 := connect()
	defer closeAll(t, c0, s0)
	for _, step := range []struct {
		by       *Authority
		believed *Pair
	}{{old, both}, {next, both}, {next, nextPair}} {
		for _, f := range files {
			f.issue(step.by, step.believed, Request{Identity: Identity{Kind: Node, Name: "n"}})
			f.advance(CheckEvery)
		}
		c, s := connect()
		closeAll(t, c, s)
	}
	// What was connected at first still is.
	if _, err := c0.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if err := s0.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := s0.Read(b[:]); err != nil || b[0] != 'x' {
		t.Errorf("the first connection: %q, %v", b, err)
	}
	// A node that was left behind is not let in.
	files[0].issue(old, both, Request{Identity: Identity{Kind: Node, Name: "late"}})
	files[0].advance(CheckEvery)
	if conn, err := ports[0].Dial(t.Context(), ids[1]); err == nil {
		closeAll(t, conn)
		t.Error("a certificate of the old authority was let in")
	}
}

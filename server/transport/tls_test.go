package transport

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// authority signs certificates.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t, pool: x509.NewCertPool()}
	a.cert, a.key = a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, nil)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) sign(cert, parent *x509.Certificate, by *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if parent == nil {
		parent, by = cert, key
	}
	cert.SerialNumber = big.NewInt(time.Now().UnixNano())
	if cert.NotAfter.IsZero() {
		cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	signed, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return signed, key
}

// issue makes the TLS of a node whose certificate has a DNS name.
func (a *authority) issue(name string, change func(*x509.Certificate)) *TLS {
	cert := &x509.Certificate{
		DNSNames: []string{name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(cert)
	}
	signed, key := a.sign(cert, a.cert, a.key)
	own := &tls.Certificate{Certificate: [][]byte{signed.Raw}, PrivateKey: key, Leaf: signed}
	return &TLS{
		Certificate: func() (*tls.Certificate, error) { return own, nil },
		Roots:       func() (*x509.CertPool, error) { return a.pool, nil },
	}
}

// TestCertificates lets a node with good and bad certificates dial and be dialed.
func TestCertificates(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	two := placement.NodeID{2}
	expired := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	}
	onlyServer := func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }
	foreign := other.issue(NodeName(two), nil)
	foreign.Roots = func() (*x509.CertPool, error) { return ca.pool, nil }
	for _, c := range []struct {
		what    string
		tls     *TLS
		refusal Refusal // of node 1, when node 2 dials; NotRefused: taken
		dialed  bool    // node 1 can dial node 2
	}{
		{"good", ca.issue(NodeName(two), nil), NotRefused, true},
		{"another node's", ca.issue(NodeName(placement.NodeID{3}), nil), WrongName, false},
		{"a wildcard", ca.issue("*.node.kvtier", nil), WrongName, false},
		{"expired", ca.issue(NodeName(two), expired), NoTLS, false},
		{"not for clients", ca.issue(NodeName(two), onlyServer), NoTLS, true},
		{"another authority's", foreign, NoTLS, false},
		{"none", nil, NoTLS, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			cl := newCluster(t, nil) // a pipe has no room for the alert that one side writes while the other writes its hello
			a := cl.add(1, func(m *MuxConfig, _ *Config) { m.TLS = ca.issue(NodeName(placement.NodeID{1}), nil) })
			b := cl.add(2, func(m *MuxConfig, _ *Config) { m.TLS = c.tls })
			conn, err := b.mux.Dial(t.Context(), a.id)
			if (err == nil) != (c.refusal == NotRefused) {
				t.Fatalf("dialed: %v", err)
			}
			if err == nil {
				hangUp(conn)
			} else {
				waitFor(t, "the refusal to be counted", func() bool { return a.mux.Metrics().Refused[c.refusal.String()] == 1 })
			}
			conn, err = a.mux.Dial(t.Context(), b.id)
			if (err == nil) != c.dialed {
				t.Fatalf("was dialed: %v", err)
			}
			if err == nil {
				hangUp(conn)
			}
		})
	}
}

// TestCertificatesReload replaces the authority of a running cluster.
func TestCertificatesReload(t *testing.T) {
	c := newCluster(t, newMemory())
	var mu sync.Mutex
	now := newAuthority(t)
	current := func(id placement.NodeID) func() *TLS {
		issued := map[*authority]*TLS{}
		return func() *TLS {
			mu.Lock()
			defer mu.Unlock()
			if issued[now] == nil {
				issued[now] = now.issue(NodeName(id), nil)
			}
			return issued[now]
		}
	}
	tlsOf := func(m *MuxConfig, _ *Config) {
		of := current(m.ID)
		m.TLS = &TLS{
			Certificate: func() (*tls.Certificate, error) { return of().Certificate() },
			Roots:       func() (*x509.CertPool, error) { return of().Roots() },
		}
	}
	a, b := c.add(1, tlsOf), c.add(2, tlsOf)
	for round := range 2 {
		a.src.put(nameOf(round), 0, 100000, false)
		tr := newTray(t, want(round, 0, 100000, a))
		fetch(t, b, tr)
		tr.allGood()
		conn, err := b.mux.Dial(t.Context(), a.id)
		if err != nil {
			t.Fatal(err)
		}
		hangUp(conn)
		mu.Lock()
		now = newAuthority(t)
		mu.Unlock()
	}
}

// TestNothingBeyondThisMachineWithoutTLS: neither listened on nor dialed.
func TestNothingBeyondThisMachineWithoutTLS(t *testing.T) {
	resolve := func(placement.NodeID) (string, bool) { return "192.0.2.1:7441", true }
	for _, listen := range []string{"0.0.0.0:0", ":0", "[::]:0", "192.0.2.1:0", "example.org:0"} {
		cfg := MuxConfig{ID: placement.NodeID{1}, Cluster: "c", Listen: listen, Resolve: resolve}
		if m, err := OpenMux(cfg); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("listen on %s: %v, want %v", listen, err, paging.ErrInvalid)
			if err == nil {
				m.Close()
			}
		}
	}
	m, err := OpenMux(MuxConfig{ID: placement.NodeID{1}, Cluster: "c", Listen: "127.0.0.1:0", Resolve: resolve})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.Dial(t.Context(), placement.NodeID{2}); !errors.Is(err, paging.ErrDenied) {
		t.Errorf("dial: %v, want %v", err, paging.ErrDenied)
	}
	open, err := OpenMux(MuxConfig{ID: placement.NodeID{1}, Cluster: "c", Listen: "0.0.0.0:0", Resolve: resolve, Insecure: true})
	if err != nil {
		t.Fatalf("insecure: %v", err)
	}
	defer open.Close()
}

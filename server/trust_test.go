package server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
	"github.com/kvtier/kvtier/server/trust"
)

// authority signs for a cluster and writes the files of its nodes.
type authority struct {
	t    testing.TB
	ca   *trust.Authority
	pair *trust.Pair
}

func newAuthority(t testing.TB, cluster string) *authority {
	t.Helper()
	ca, pair, err := trust.NewAuthority(cluster, time.Now(), 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, ca, pair}
}

func (a *authority) issue(id trust.Identity, past time.Duration) *trust.Pair {
	a.t.Helper()
	r := trust.Request{Identity: id, Life: time.Hour}
	if id.Kind == trust.Node {
		r.Hosts = []string{"127.0.0.1"}
	}
	pair, err := a.ca.Issue(r, time.Now().Add(-past))
	if err != nil {
		a.t.Fatal(err)
	}
	return pair
}

// node writes the files of a node.
func (a *authority) node(files server.TLS, name string) {
	a.t.Helper()
	pair := a.issue(trust.Identity{Kind: trust.Node, Name: name}, 0)
	err := trust.WriteFiles([]trust.File{{Path: files.Key, Bytes: pair.Key}, {Path: files.Cert, Bytes: pair.Cert}, {Path: files.CA, Bytes: a.pair.Cert}}, true)
	if err != nil {
		a.t.Fatal(err)
	}
}

// creds are those of a client that shows pair; nil: nothing.
func (a *authority) creds(pair *trust.Pair) credentials.TransportCredentials {
	a.t.Helper()
	conf := &tls.Config{RootCAs: x509.NewCertPool()}
	conf.RootCAs.AddCert(a.pair.Leaf)
	if pair != nil {
		cert, err := tls.X509KeyPair(pair.Cert, pair.Key)
		if err != nil {
			a.t.Fatal(err)
		}
		// Shown whoever the node believes: a client that means harm does that.
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	}
	return credentials.NewTLS(conf)
}

func tlsFiles(t testing.TB) server.TLS {
	dir := t.TempDir()
	return server.TLS{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), CA: filepath.Join(dir, "ca")}
}

// Where a certificate is needed, what it names decides, and a token beside it.
func TestWhoIsLetInByCertificate(t *testing.T) {
	ca, foreign, elsewhere := newAuthority(t, "c"), newAuthority(t, "c"), newAuthority(t, "d")
	cfg := twoTenants(t)
	cfg.TLS, cfg.Listen = tlsFiles(t), "127.0.0.1:0"
	cfg.TLS.ClientAuth = true
	ca.node(cfg.TLS, "one")
	n := startNode(t, cfg)
	holder := func(role, tenant string) trust.Identity {
		return trust.Identity{Kind: trust.Client, Name: "x", Role: role, Tenant: tenant}
	}
	engine := holder(trust.RoleEngine, "a")
	for _, c := range []struct {
		name         string
		shown        *trust.Pair
		token        string
		pages, admin error // of a Lookup in a namespace that nobody has, and of status
		refused      bool  // the connection is counted as refused; those that are not come first
	}{
		{"engine", ca.issue(engine, 0), "", paging.ErrUnknownNamespace, paging.ErrDenied, false},
		{"operator", ca.issue(holder(trust.RoleOperator, "a"), 0), "", paging.ErrUnknownNamespace, nil, false},
		{"operator without a tenant", ca.issue(holder(trust.RoleOperator, ""), 0), "", paging.ErrDenied, nil, false},
		{"read-only", ca.issue(holder(trust.RoleReadOnly, "a"), 0), "", paging.ErrDenied, nil, false},
		{"engine with an operator's token", ca.issue(engine, 0), tokenOps, paging.ErrUnknownNamespace, nil, false},
		{"engine with a wrong token", ca.issue(engine, 0), tokenA + "x", paging.ErrDenied, paging.ErrDenied, false},
		{"a node", ca.issue(trust.Identity{Kind: trust.Node, Name: "two"}, 0), "", paging.ErrDenied, paging.ErrDenied, false},
		{"a tenant that is not there", ca.issue(holder(trust.RoleOperator, "z"), 0), tokenOps, paging.ErrDenied, paging.ErrDenied, true},
		{"expired", ca.issue(engine, 2*time.Hour), tokenA, paging.ErrUnavailable, paging.ErrUnavailable, true},
		{"another authority", foreign.issue(engine, 0), tokenA, paging.ErrUnavailable, paging.ErrUnavailable, true},
		{"another cluster", elsewhere.issue(engine, 0), tokenA, paging.ErrUnavailable, paging.ErrUnavailable, true},
		{"none", nil, tokenA, paging.ErrUnavailable, paging.ErrUnavailable, true},
	} {
		before := n.Metrics().RPC.RefusedPeers
		conn := dialTCP(t, n, ca.creds(c.shown), c.token)
		if err := lookupNobody(t, conn); !errors.Is(err, c.pages) {
			t.Errorf("%s: lookup: %v, want %v", c.name, err, c.pages)
		}
		if err := statusOf(t, conn); !errors.Is(err, c.admin) {
			t.Errorf("%s: status: %v, want %v", c.name, err, c.admin)
		}
		// The client hears of it before the node has counted it.
		count := func() uint64 { return n.Metrics().RPC.RefusedPeers }
		if !c.refused && count() != 0 {
			t.Errorf("%s: %d connections refused", c.name, count())
		}
		if c.refused {
			eventually(t, c.name+" is counted", func() bool { return count() > before })
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	if m := n.Metrics(); m.Hierarchy.Namespaces != 0 || m.Attachments != 0 {
		t.Errorf("something was changed: %+v", m)
	}
}

func lookupNobody(t testing.TB, conn *grpc.ClientConn) error {
	_, err := kvtierv1.NewPagesServiceClient(conn).Lookup(t.Context(), &kvtierv1.LookupRequest{NamespaceId: make([]byte, 32), BlockNames: make([]byte, 32)})
	return kvstatus.Err(err)
}

func statusOf(t testing.TB, conn *grpc.ClientConn) error {
	_, err := kvtierv1.NewAdminServiceClient(conn).GetStatus(t.Context(), &kvtierv1.GetStatusRequest{})
	return kvstatus.Err(err)
}

// The files of a node change while clients are connected.
func TestCertificatesAreReloadedWhileConnected(t *testing.T) {
	ca, next := newAuthority(t, "c"), newAuthority(t, "c")
	cfg := twoTenants(t)
	cfg.TLS, cfg.Listen = tlsFiles(t), "127.0.0.1:0"
	cfg.TLS.ClientAuth = true
	ca.node(cfg.TLS, "one")
	n := startNode(t, cfg)
	operator := trust.Identity{Kind: trust.Client, Name: "x", Role: trust.RoleOperator, Tenant: "a"}
	early := dialTCP(t, n, ca.creds(ca.issue(operator, 0)), "")
	if err := statusOf(t, early); err != nil {
		t.Fatal(err)
	}

	if err := os.WriteFile(cfg.TLS.Cert, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the bad file is told", func() bool { return n.Metrics().TLS.Failures == 1 })
	res, err := kvtierv1.NewAdminServiceClient(early).GetStatus(t.Context(), &kvtierv1.GetStatusRequest{})
	if err != nil || !strings.Contains(strings.Join(res.GetProblems(), "\n"), "tls: the files are not used") {
		t.Errorf("problems: %v, %v", res.GetProblems(), err)
	}
	if err := statusOf(t, dialTCP(t, n, ca.creds(ca.issue(operator, 0)), "")); err != nil {
		t.Errorf("with a bad file in place: %v", err)
	}

	next.node(cfg.TLS, "renewed")
	eventually(t, "the new files are taken", func() bool { return n.Metrics().TLS.Reloads == 1 })
	if st := n.Metrics().TLS; st.Identity.Name != "renewed" || st.Reason != "" {
		t.Errorf("%+v", st)
	}
	if err := statusOf(t, dialTCP(t, n, next.creds(next.issue(operator, 0)), "")); err != nil {
		t.Errorf("by the new authority: %v", err)
	}
	if err := statusOf(t, dialTCP(t, n, next.creds(ca.issue(operator, 0)), "")); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("by the old authority: %v", err)
	}
	if err := statusOf(t, early); err != nil {
		t.Errorf("connected before: %v", err)
	}
}

// Noise into a listener with TLS is refused and counted; clients go on.
func TestRandomBytesIntoTLS(t *testing.T) {
	ca := newAuthority(t, "c")
	cfg := twoTenants(t)
	cfg.TLS, cfg.Listen = tlsFiles(t), "127.0.0.1:0"
	ca.node(cfg.TLS, "one")
	n := startNode(t, cfg)
	for _, preface := range []string{"", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"} {
		before := n.Metrics().RPC.RefusedPeers
		rounds := rounds(t, 20)
		intoListener(t, "tcp", n.Addr().String(), preface, rounds)
		eventually(t, "all are counted", func() bool { return n.Metrics().RPC.RefusedPeers == before+uint64(rounds) })
	}
	conn := dialTCP(t, n, ca.creds(nil), "")
	h, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || h.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", h, err)
	}
}

// A cluster whose nodes know each other by certificate, and whose gossip has a key.
func TestClusterByCertificate(t *testing.T) {
	ca, foreign, elsewhere := newAuthority(t, "c"), newAuthority(t, "c"), newAuthority(t, "d")
	key := filepath.Join(t.TempDir(), "gossip.key")
	if err := os.WriteFile(key, []byte(trust.NewGossipKey()), 0o600); err != nil {
		t.Fatal(err)
	}
	config := func(by *authority, name, join string) server.Config {
		cfg := clusterConfig(t, join)
		cfg.TLS, cfg.GossipKey = tlsFiles(t), key
		by.node(cfg.TLS, name)
		return cfg
	}
	first := startNode(t, config(ca, "one", ""))
	second := startNode(t, config(ca, "two", first.PeerAddr()))
	near, far := first.client(t, client.Config{Engine: "test"}), second.client(t, client.Config{Engine: "test"})
	var ns paging.NamespaceID
	for _, c := range []*client.Client{near, far} {
		var err error
		if ns, err = c.RegisterNamespace(t.Context(), testNamespace(100_000, 2)); err != nil {
			t.Fatal(err)
		}
	}
	names := blockNames(0, 10)
	write(t, near, ns, names)
	eventually(t, "the other node sees every block", func() bool { return prefix(t, far, ns, names, 2) == len(names) })

	clientCert := config(ca, "three", first.PeerAddr())
	pair := ca.issue(trust.Identity{Kind: trust.Client, Name: "three", Role: trust.RoleOperator}, 0)
	if err := trust.WriteFiles([]trust.File{{Path: clientCert.TLS.Key, Bytes: pair.Key}, {Path: clientCert.TLS.Cert, Bytes: pair.Cert}}, true); err != nil {
		t.Fatal(err)
	}
	half := config(foreign, "three", first.PeerAddr()) // it believes the right authority, and shows another's certificate
	if err := os.WriteFile(half.TLS.CA, ca.pair.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	bare := clusterConfig(t, first.PeerAddr())
	bare.GossipKey = key
	for what, c := range map[string]struct {
		cfg  server.Config
		want error
	}{
		"another authority": {config(foreign, "three", first.PeerAddr()), nil}, "its certificate alone": {half, nil},
		"another cluster": {config(elsewhere, "three", first.PeerAddr()), nil}, "no certificate": {bare, nil},
		"a client's certificate": {clientCert, paging.ErrInvalid},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		s, err := server.Open(ctx, c.cfg, server.Options{Drivers: servertest.Drivers()})
		cancel()
		if err == nil {
			err = s.Close()
			t.Errorf("%s: joined (%v)", what, err)
		} else if c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	// Certificates are renewed, and the nodes go on.
	ca.node(first.Config.TLS, "one")
	ca.node(second.Config.TLS, "two")
	more := blockNames(100, 10)
	write(t, near, ns, more)
	eventually(t, "the other node sees what came later", func() bool { return prefix(t, far, ns, more, 2) == len(more) })
}

package server_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// certificate makes a certificate for 127.0.0.1 that signs itself.
func certificate(t testing.TB) (server.TLS, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "node"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := server.TLS{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(files.Cert, certPEM, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files.Key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	return files, pool
}

// A client on another machine has the same API: its pages travel in streams.
func TestStreamedClient(t *testing.T) {
	cfg := twoTenants(t)
	files, pool := certificate(t)
	cfg.TLS, cfg.Listen = files, "127.0.0.1:0"
	n := startNode(t, cfg)
	far, err := client.Open(t.Context(), client.Config{Address: n.Addr().String(), TLS: &tls.Config{RootCAs: pool}, Token: tokenA})
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	if err := far.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	layout := testNamespace(1<<20+4096+17, 2) // two chunks a page, the second short
	ns, err := far.RegisterNamespace(t.Context(), layout)
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, 3)
	for i, o := range write(t, far, ns, names) {
		if o != client.OutcomeCommitted {
			t.Errorf("block %d: %v", i, o)
		}
	}
	for i, o := range write(t, far, ns, names) {
		if o != client.OutcomeExists {
			t.Errorf("block %d again: %v", i, o)
		}
	}
	l, err := far.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: append(names, blockNames(50, 1)...)})
	if err != nil || l.Usable != 3 || len(l.Shortfalls) != 1 {
		t.Fatalf("fetch: %+v, %v", l, err)
	}
	checkLease(t, l, names, 2)
	// What was written from afar is read in place here.
	near := n.client(t, client.Config{Token: tokenA})
	if _, err := near.RegisterNamespace(t.Context(), layout); err != nil {
		t.Fatal(err)
	}
	l, err = near.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
	if err != nil || l.Usable != 3 {
		t.Fatalf("fetch in place: %+v, %v", l, err)
	}
	checkLease(t, l, names, 2)
	if m := n.Metrics(); m.Hierarchy.Holds != 0 || m.ReadPageBytes != 3*2*(1<<20+4096+17) {
		t.Errorf("%d holds, %d bytes read", m.Hierarchy.Holds, m.ReadPageBytes)
	}
}

func dialTCP(t testing.TB, n testNode, creds credentials.TransportCredentials, token string) *grpc.ClientConn {
	t.Helper()
	opts := []grpc.DialOption{grpc.WithTransportCredentials(creds)}
	if token != "" {
		opts = append(opts, grpc.WithPerRPCCredentials(bearer(token)))
	}
	conn, err := grpc.NewClient(n.Addr().String(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestWhoIsLetInOverTCP(t *testing.T) {
	cfg := twoTenants(t)
	files, pool := certificate(t)
	cfg.TLS, cfg.Listen = files, "127.0.0.1:0"
	n := startNode(t, cfg)
	secure := credentials.NewTLS(&tls.Config{RootCAs: pool})
	lookup := func(conn *grpc.ClientConn) error {
		_, err := kvtierv1.NewPagesServiceClient(conn).Lookup(t.Context(), &kvtierv1.LookupRequest{NamespaceId: make([]byte, 32), BlockNames: make([]byte, 32)})
		return kvstatus.Err(err)
	}
	status := func(conn *grpc.ClientConn) error {
		_, err := kvtierv1.NewAdminServiceClient(conn).GetStatus(t.Context(), &kvtierv1.GetStatusRequest{})
		return kvstatus.Err(err)
	}
	for _, c := range []struct {
		name  string
		creds credentials.TransportCredentials
		token string
		pages error // of Lookup in a namespace that nobody has
		admin error
	}{
		{"engine", secure, tokenA, paging.ErrUnknownNamespace, paging.ErrDenied},
		{"operator", secure, tokenOps, paging.ErrUnknownNamespace, nil},
		{"read-only", secure, tokenRead, paging.ErrDenied, nil},
		{"no token", secure, "", paging.ErrDenied, paging.ErrDenied},
		{"wrong token", secure, tokenA + "x", paging.ErrDenied, paging.ErrDenied},
		{"no tls", insecure.NewCredentials(), tokenA, paging.ErrUnavailable, paging.ErrUnavailable},
	} {
		conn := dialTCP(t, n, c.creds, c.token)
		if err := lookup(conn); !errors.Is(err, c.pages) {
			t.Errorf("%s: lookup: %v, want %v", c.name, err, c.pages)
		}
		if err := status(conn); !errors.Is(err, c.admin) {
			t.Errorf("%s: status: %v, want %v", c.name, err, c.admin)
		}
	}
	conn := dialTCP(t, n, secure, tokenA)
	s, err := kvtierv1.NewPagesServiceClient(conn).Attach(t.Context())
	if err == nil {
		_, err = s.Recv()
	}
	if err := kvstatus.Err(err); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("attach over TCP: %v", err)
	}
	// Health needs no token: whoever watches the node has none.
	h, err := healthv1.NewHealthClient(dialTCP(t, n, secure, "")).Check(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || h.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", h, err)
	}
}

// A peer that does not read is cut at its deadline, its pages are let go, and
// others do not notice.
func TestSlowReaderIsCutAtItsDeadline(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.Listen = "127.0.0.1:0"
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{StagingBytes: 4 << 20})
	ns := e.register(1<<20, 1)
	names := blockNames(0, 12)
	for at := range names {
		e.put(ns, names[at:at+1])
	}
	conn := dialTCP(t, n, insecure.NewCredentials(), "")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	s, err := kvtierv1.NewPagesServiceClient(conn).ReadPages(ctx, &kvtierv1.ReadPagesRequest{NamespaceId: ns, BlockNames: packNames(names)})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := s.Recv(); err != nil || m.GetHeader().GetUsableBlocks() != 12 {
		t.Fatalf("header: %v, %v", m, err)
	}
	if m := n.Metrics(); m.Hierarchy.Holds != 1 {
		t.Errorf("%d holds while streaming", m.Hierarchy.Holds)
	}
	// It reads nothing more; the engine beside it goes on.
	for range 20 {
		l := e.fetch(ns, names, time.Minute)
		e.release(l.GetLeaseId())
	}
	<-ctx.Done()
	eventually(t, "the pages are let go", func() bool { return n.Metrics().Hierarchy.Holds == 0 })
}

// Streams of writes that are wrong or cut store nothing that is not right.
func TestBrokenUploads(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.Listen = "127.0.0.1:0"
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{})
	const pageBytes = 8192
	ns := e.register(pageBytes, 1)
	pages := kvtierv1.NewPagesServiceClient(dialTCP(t, n, insecure.NewCredentials(), ""))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	chunk := func(block, part uint32, offset uint64, data []byte, sum uint64) *kvtierv1.WritePagesRequest {
		return &kvtierv1.WritePagesRequest{Message: &kvtierv1.WritePagesRequest_Chunk{Chunk: &kvtierv1.PageChunk{
			Block: block, Part: part, Offset: offset, Data: data, PageBytes: pageBytes, Checksum: sum,
		}}}
	}
	upload := func(names []paging.BlockName, chunks ...*kvtierv1.WritePagesRequest) ([]byte, error) {
		s, err := pages.WritePages(ctx)
		if err != nil {
			return nil, err
		}
		header := &kvtierv1.WritePagesHeader{NamespaceId: ns, BlockNames: packNames(names)}
		if err := s.Send(&kvtierv1.WritePagesRequest{Message: &kvtierv1.WritePagesRequest_Header{Header: header}}); err != nil {
			return nil, err
		}
		for _, c := range chunks {
			if err := s.Send(c); err != nil {
				break // the answer says why
			}
		}
		res, err := s.CloseAndRecv()
		return res.GetOutcomes(), kvstatus.Err(err)
	}
	names := blockNames(0, 3)
	good := func(i int) []byte { return wantPage(pageBytes, names[i], 0) }
	sum := func(i int) uint64 { return paging.Checksum(good(i)) }

	got, err := upload(names, chunk(0, 0, 0, good(0), sum(0)), chunk(1, 0, 0, good(1), sum(1)+1), chunk(2, 0, 0, good(2)[:100], sum(2)), chunk(2, 0, 100, good(2)[100:], sum(2)))
	corrupt := byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_CORRUPT)
	if err != nil || !bytes.Equal(got, []byte{committed, corrupt, committed}) {
		t.Errorf("one page with a wrong sum: %v, %v", got, err)
	}
	more := blockNames(10, 2)
	for name, chunks := range map[string][]*kvtierv1.WritePagesRequest{
		"cut page":         {chunk(0, 0, 0, good(0)[:100], 0)},
		"gap":              {chunk(0, 0, 0, good(0)[:100], 0), chunk(0, 0, 200, good(0)[200:], 0)},
		"too long":         {chunk(0, 0, 0, good(0)[:100], 0), chunk(0, 0, 100, good(0), 0)},
		"blocks falling":   {chunk(1, 0, 0, good(1), sum(1)), chunk(0, 0, 0, good(0), sum(0))},
		"unknown block":    {chunk(2, 0, 0, good(0), sum(0))},
		"unknown part":     {chunk(0, 1, 0, good(0), sum(0))},
		"second header":    {{Message: &kvtierv1.WritePagesRequest_Header{Header: &kvtierv1.WritePagesHeader{}}}},
		"empty chunk":      {chunk(0, 0, 0, nil, 0)},
		"starts in middle": {chunk(0, 0, 5, good(0)[5:], 0)},
	} {
		if _, err := upload(more, chunks...); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v, want invalid", name, err)
		}
	}
	if m := n.Metrics(); m.Hierarchy.Attempts != 0 || m.CorruptUploads != 1 {
		t.Errorf("%d attempts open, %d corrupt uploads", m.Hierarchy.Attempts, m.CorruptUploads)
	}
	res, err := e.pages.Lookup(e.ctx, &kvtierv1.LookupRequest{NamespaceId: ns, BlockNames: packNames(append(names, more[0]))})
	if err != nil || !bytes.Equal(res.GetTiers(), []byte{2, 0, 2, 0}) {
		t.Errorf("stored: %v, %v", res.GetTiers(), err)
	}
}

// Random bytes, cut frames and valid prefaces followed by noise into every
// listener: the node goes on serving, with bounded memory.
func TestRandomBytesIntoEveryListener(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.Listen, cfg.HTTPListen = "127.0.0.1:0", "127.0.0.1:0"
	n := startNode(t, cfg)
	for _, target := range []struct{ network, address, preface string }{
		{"unix", n.Config.Socket, ""},
		{"unix", n.Config.Socket, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
		{"tcp", n.Addr().String(), ""},
		{"tcp", n.Addr().String(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
		{"tcp", n.HTTPAddr().String(), ""},
		{"tcp", n.HTTPAddr().String(), "GET /metrics HTTP/1.1\r\nHost: x\r\n"},
		{"unixpacket", n.Config.HandoffSocket, ""},
		{"unixpacket", n.Config.HandoffSocket, "KVTH\x01\x00\x01\x00\x10\x00\x00\x00"},
	} {
		intoListener(t, target.network, target.address, target.preface, rounds(t, 20))
	}
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	if o := e.put(ns, blockNames(0, 1)); !bytes.Equal(o, []byte{committed}) {
		t.Errorf("after the noise: %v", o)
	}
}

// intoListener connects again and again and writes noise of all lengths.
func intoListener(t *testing.T, network, address, preface string, rounds int) {
	t.Helper()
	noise := make([]byte, 64<<10)
	for round := range rounds {
		if _, err := rand.Read(noise); err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial(network, address)
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.SetDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(append([]byte(preface), noise[:1+round*997%len(noise)]...))
		if round%2 == 0 {
			_, _ = io.CopyN(io.Discard, conn, 1<<10)
		}
		conn.Close()
	}
}

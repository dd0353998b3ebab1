package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/kvtier/kvtier/server/placement"
)

// TLS is what a node shows to others and what it believes. Both functions are
// asked at each handshake, so that files may change while the node runs; they
// may be called from many goroutines.
type TLS struct {
	// Certificate is the node's own, for both directions (server and client
	// authentication).
	Certificate func() (*tls.Certificate, error)
	// Roots sign the certificates of the cluster's nodes.
	Roots func() (*x509.CertPool, error)
	// IsNode says whether a certificate that Roots signed is of a node of this
	// cluster: nil if so. A certificate with a DNS name of a node is then of that
	// node only; one without is good for whichever node shows it. Without IsNode a
	// certificate has to have the DNS name NodeName of its node.
	IsNode func(*x509.Certificate) error
}

const nodeDomain = ".node.kvtier"

// NodeName is the DNS name by which a certificate names a node.
func NodeName(id placement.NodeID) string { return id.String() + nodeDomain }

// names reports whether a certificate is a node's; the zero id stands for any node of
// the cluster. Wildcards name nobody.
func (t *TLS) names(cert *x509.Certificate, id placement.NodeID) bool {
	if id == (placement.NodeID{}) && t.IsNode == nil {
		return slices.ContainsFunc(cert.DNSNames, func(name string) bool { return strings.HasSuffix(name, nodeDomain) })
	} else if id == (placement.NodeID{}) {
		return t.IsNode(cert) == nil
	}
	if slices.Contains(cert.DNSNames, NodeName(id)) {
		return t.IsNode == nil || t.IsNode(cert) == nil
	}
	others := slices.ContainsFunc(cert.DNSNames, func(name string) bool { return strings.HasSuffix(name, nodeDomain) })
	return !others && t.IsNode != nil && t.IsNode(cert) == nil
}

// config is the part of both directions. Sessions are not resumed: a resumed
// one would go on with a certificate that was replaced.
func (t *TLS) config() (*tls.Config, *x509.CertPool, error) {
	cert, err := t.Certificate()
	if err != nil {
		return nil, nil, fmt.Errorf("own certificate: %w", err)
	}
	roots, err := t.Roots()
	if err != nil {
		return nil, nil, fmt.Errorf("roots of certificates: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*cert}, SessionTicketsDisabled: true}, roots, nil
}

// accept makes TLS of a connection that came in. The node that dials is named
// by the function that is returned.
func (t *TLS) accept(ctx context.Context, c net.Conn) (net.Conn, func(placement.NodeID) bool, error) {
	conf, roots, err := t.config()
	if err != nil {
		return nil, nil, err
	}
	conf.ClientAuth, conf.ClientCAs = tls.RequireAndVerifyClientCert, roots
	s := tls.Server(&cork{Conn: c}, conf)
	if err := s.HandshakeContext(ctx); err != nil {
		return nil, nil, err
	}
	leaf := s.ConnectionState().PeerCertificates[0]
	return s, func(id placement.NodeID) bool { return t.names(leaf, id) }, nil
}

// errNotNamed: the certificate is good, but another node's.
var errNotNamed = errors.New("its certificate does not name it")

// dial makes TLS of a connection to a node.
func (t *TLS) dial(ctx context.Context, c net.Conn, to placement.NodeID) (net.Conn, error) {
	conf, roots, err := t.config()
	if err != nil {
		return nil, err
	}
	// The library can check the chain only together with a host name. A node is
	// recognised by its identity, whatever address it has, so both are checked here.
	conf.InsecureSkipVerify = true
	conf.VerifyConnection = func(state tls.ConnectionState) error { return t.verify(state.PeerCertificates, roots, to) }
	s := tls.Client(&cork{Conn: c}, conf)
	if err := s.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// verify checks what a node that was dialed shows, before anything is sent to it.
func (t *TLS) verify(chain []*x509.Certificate, roots *x509.CertPool, node placement.NodeID) error {
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err != nil {
		return err
	}
	if !t.names(chain[0], node) {
		return errNotNamed
	}
	return nil
}

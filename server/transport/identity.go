package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/kvtier/kvtier/server/placement"
)

// TLS is what a node shows to others and what it believes. Both functions are
// asked at each handshake, so that files may change while the node runs; they
// may be called from many goroutines.
type TLS struct {
	// Certificate is the node's own, for both directions (server and client
	// authentication). One of its DNS names is NodeName of the node.
	Certificate func() (*tls.Certificate, error)
	// Roots sign the certificates of the cluster's nodes.
	Roots func() (*x509.CertPool, error)
}

// NodeName is the DNS name by which a certificate names a node.
func NodeName(id placement.NodeID) string { return id.String() + ".node.kvtier" }

// names reports whether a certificate names a node. Wildcards name nobody.
func names(cert *x509.Certificate, id placement.NodeID) bool {
	return slices.Contains(cert.DNSNames, NodeName(id))
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
	s := tls.Server(c, conf)
	if err := s.HandshakeContext(ctx); err != nil {
		return nil, nil, err
	}
	leaf := s.ConnectionState().PeerCertificates[0]
	return s, func(id placement.NodeID) bool { return names(leaf, id) }, nil
}

// errNotNamed: the certificate is good, but another node's.
var errNotNamed = errors.New("its certificate does not name it")

// dial makes TLS of a connection to a node.
func (t *TLS) dial(ctx context.Context, c net.Conn, to placement.NodeID) (net.Conn, error) {
	conf, roots, err := t.config()
	if err != nil {
		return nil, err
	}
	conf.RootCAs, conf.ServerName = roots, NodeName(to)
	s := tls.Client(c, conf)
	if err := s.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	if !names(s.ConnectionState().PeerCertificates[0], to) {
		return nil, errNotNamed
	}
	return s, nil
}

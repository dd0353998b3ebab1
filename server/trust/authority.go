package trust

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Lifetimes. Certificates of nodes and clients are renewed while the node runs,
// so theirs may be short; that of the authority is the life of the cluster.
const (
	AuthorityLife   = 10 * 365 * 24 * time.Hour
	CertificateLife = 365 * 24 * time.Hour
	clockSkew       = 5 * time.Minute // valid so much before now: machines differ
)

// Authority signs the certificates of one cluster.
type Authority struct {
	cluster string
	cert    *x509.Certificate
	key     crypto.Signer
}

// Pair is a certificate and its private key, in PEM.
type Pair struct {
	Cert, Key []byte
	Leaf      *x509.Certificate
}

// NewAuthority makes the authority of a cluster, valid from now for life.
// paging.ErrInvalid for a name that Identity does not allow.
func NewAuthority(cluster string, now time.Time, life time.Duration) (*Authority, *Pair, error) {
	if err := (Identity{Cluster: cluster, Kind: Node, Name: "ca"}).Validate(); err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "kvtier " + cluster, Organization: []string{cluster}}, NotBefore: now.Add(-clockSkew), NotAfter: now.Add(life),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, // it signs no other authority
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	pair, err := sign(template, template, key, key)
	if err != nil {
		return nil, nil, err
	}
	return &Authority{cluster, pair.Leaf, key}, pair, nil
}

// LoadAuthority reads an authority back. paging.ErrInvalid if the two do not
// belong together or are no authority of kvtier's.
func LoadAuthority(certPEM, keyPEM []byte) (*Authority, error) {
	certs, err := parseCertificates(certPEM)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(keyPEM)
	if block == nil {
		return nil, wrong("no key in PEM")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("key: %w: %w", err, paging.ErrInvalid)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	cert := certs[0]
	switch {
	case !ok || !key.PublicKey.Equal(cert.PublicKey):
		return nil, wrong("the key is not that of the certificate")
	case !cert.IsCA || len(cert.Subject.Organization) != 1:
		return nil, wrong("the certificate is not an authority of kvtier: make one with \"kvtier cert ca\"")
	}
	return &Authority{cert.Subject.Organization[0], cert, key}, nil
}

// Cluster is the name of the cluster that the authority signs for.
func (a *Authority) Cluster() string { return a.cluster }

// Request is what a certificate is to say.
type Request struct {
	Identity Identity // Cluster is the authority's
	// Hosts are the DNS names and IP addresses that clients reach a node by.
	Hosts []string
	// Names are further DNS names, such as transport.NodeName of the one node that
	// may use it.
	Names []string
	Life  time.Duration // 0: CertificateLife; cut to that of the authority
}

// Issue signs. paging.ErrInvalid for a request that cannot be.
func (a *Authority) Issue(r Request, now time.Time) (*Pair, error) {
	r.Identity.Cluster = a.cluster
	if err := r.Identity.Validate(); err != nil {
		return nil, err
	}
	if r.Life == 0 {
		r.Life = CertificateLife
	}
	if r.Life < time.Minute {
		return nil, wrong("a life of %v: want at least a minute", r.Life)
	}
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: r.Identity.Name, Organization: []string{a.cluster}, OrganizationalUnit: []string{string(r.Identity.Kind)}},
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(r.Life), BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		DNSNames: r.Names,
	}
	template.URIs = append(template.URIs, r.Identity.URI())
	if template.NotAfter.After(a.cert.NotAfter) {
		template.NotAfter = a.cert.NotAfter
	}
	if !template.NotAfter.After(now) {
		return nil, wrong("the authority expired on %s: make another", a.cert.NotAfter.Format(time.DateOnly))
	}
	if r.Identity.Kind == Node {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	} else if len(r.Hosts)+len(r.Names) > 0 {
		return nil, wrong("a client is reached by nobody: hosts are for nodes")
	}
	for _, h := range r.Hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if plainName(h, 253, "-.") {
			template.DNSNames = append(template.DNSNames, strings.ToLower(h))
		} else {
			return nil, wrong("host %q is neither an IP address nor a DNS name", h)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	return sign(template, a.cert, key, a.key)
}

func sign(template, parent *x509.Certificate, key *ecdsa.PrivateKey, by crypto.Signer) (*Pair, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		return nil, fmt.Errorf("sign certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return &Pair{
		Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
		Leaf: leaf,
	}, nil
}

func parseCertificates(b []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate: %w: %w", err, paging.ErrInvalid)
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, wrong("no certificate in PEM")
	}
	return certs, nil
}

// GossipKeyBytes is the length of a gossip key: AES-256.
const GossipKeyBytes = 32

// NewGossipKey is a random gossip key in base64.
func NewGossipKey() string {
	var key [GossipKeyBytes]byte
	_, _ = rand.Read(key[:]) // never fails: crypto/rand aborts the process instead
	return base64.StdEncoding.EncodeToString(key[:])
}

// ParseGossipKey reads a gossip key. paging.ErrInvalid; the error does not show
// what was read.
func ParseGossipKey(s string) ([]byte, error) {
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(s))
	if err != nil || len(key) != GossipKeyBytes {
		return nil, wrong("want %d bytes in base64, as \"kvtier cert gossip-key\" makes them", GossipKeyBytes)
	}
	return key, nil
}

// ReadGossipKey reads a gossip key from a file that nobody else may read.
func ReadGossipKey(path string) ([]byte, error) {
	b, err := readSecret(path)
	if err != nil {
		return nil, err
	}
	key, err := ParseGossipKey(string(b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return key, nil
}

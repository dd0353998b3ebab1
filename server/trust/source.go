package trust

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/transport"
)

// CheckEvery is how often, at most, the files are looked at.
const CheckEvery = time.Second

const maxFileBytes = 1 << 20 // of certificates or a key

// Files are the PEM files of a node.
type Files struct {
	Cert, Key string
	// CA signs the certificates of others. Empty: nobody's certificate is known.
	CA string
}

// material is what the files held at one moment.
type material struct {
	cert     *tls.Certificate
	roots    *x509.CertPool // nil: no CA
	identity Identity       // of the certificate
	sum      [sha256.Size]byte
}

// Source is a node's certificate, key and authority as they are in their files.
type Source struct {
	files Files
	log   *slog.Logger
	clock func() time.Time

	now      atomic.Pointer[material]
	checked  atomic.Int64 // Unix nanoseconds of the last look
	reloads  atomic.Uint64
	failures atomic.Uint64

	mu struct {
		sync.Mutex
		failed  [sha256.Size]byte // what the files held at the last look, if that was no good
		pending bool              // failed is set, and not yet reported
		reason  string            // why the files are not used; "": they are
	}
}

// State is how a Source is.
type State struct {
	Identity Identity
	NotAfter time.Time // of the certificate
	Reloads  uint64    // times that other files were taken
	Failures uint64    // times that other files were no good
	Reason   string    // why what the files hold now is not used; "": it is
}

// Open reads the files. paging.ErrInvalid names the one that is no good. log may
// be nil.
func Open(files Files, log *slog.Logger) (*Source, error) {
	return open(files, log, time.Now)
}

func open(files Files, log *slog.Logger, clock func() time.Time) (*Source, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Source{files: files, log: log, clock: clock}
	b, sum, err := s.read()
	if err != nil {
		return nil, err
	}
	m, err := s.load(b)
	if err != nil {
		return nil, err
	}
	m.sum = sum
	s.now.Store(m)
	s.checked.Store(clock().UnixNano())
	return s, nil
}

type contents struct{ cert, key, ca []byte }

func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(b) > maxFileBytes {
		err = wrong("%s has more than %d bytes", path, maxFileBytes)
	}
	return b, err
}

// read reads all files. Their bytes are compared, not their times: a file may be
// replaced within one tick of a clock.
func (s *Source) read() (c contents, sum [sha256.Size]byte, err error) {
	h := sha256.New()
	for _, f := range [...]struct {
		path string
		to   *[]byte
	}{{s.files.Cert, &c.cert}, {s.files.Key, &c.key}, {s.files.CA, &c.ca}} {
		if f.path != "" {
			if *f.to, err = readSmall(f.path); err != nil {
				return c, sum, err
			}
		}
		part := sha256.Sum256(*f.to)
		h.Write(part[:])
	}
	return c, [sha256.Size]byte(h.Sum(nil)), nil
}

func (s *Source) load(c contents) (*material, error) {
	cert, err := tls.X509KeyPair(c.cert, c.key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s and key %s: %w: %w", s.files.Cert, s.files.Key, err, paging.ErrInvalid)
	}
	m := &material{cert: &cert}
	if m.identity, err = Identify(cert.Leaf); err != nil {
		return nil, fmt.Errorf("%s: %w", s.files.Cert, err)
	}
	if s.files.CA == "" {
		return m, nil
	}
	roots, err := parseCertificates(c.ca)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.files.CA, err)
	}
	m.roots = x509.NewCertPool()
	for _, r := range roots {
		m.roots.AddCert(r)
	}
	return m, nil
}

// current is what is in use, after a look at the files if it is time for one. One
// caller looks; whoever comes meanwhile takes what there is, so that a file
// system that hangs holds up one handshake.
func (s *Source) current() *material {
	now, last := s.clock().UnixNano(), s.checked.Load()
	if now-last >= int64(CheckEvery) || now < last { // the clock was set back
		if s.checked.CompareAndSwap(last, now) {
			s.check()
		}
	}
	return s.now.Load()
}

func (s *Source) check() {
	c, sum, err := s.read()
	old := s.now.Load()
	var m *material
	if err == nil && sum != old.sum {
		m, err = s.load(c)
	}
	if err == nil && m != nil && m.expired(s.clock()) && !old.expired(s.clock()) {
		err = wrong("%s expired on %s", s.files.Cert, m.cert.Leaf.NotAfter.Format(time.RFC3339))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.rejectLocked(sum, err)
		return
	case m != nil:
		m.sum = sum
		s.now.Store(m)
		s.reloads.Add(1)
		s.log.Info("certificates reloaded", "identity", m.identity.String(), "expires", m.cert.Leaf.NotAfter)
	}
	s.mu.failed, s.mu.pending, s.mu.reason = [sha256.Size]byte{}, false, ""
}

// rejectLocked notes files that are no good. They are replaced one after the
// other, so only what is found twice is reported, and once.
func (s *Source) rejectLocked(sum [sha256.Size]byte, err error) {
	if sum != s.mu.failed || !s.mu.pending && s.mu.reason == "" {
		s.mu.failed, s.mu.pending = sum, true
		return
	}
	if !s.mu.pending {
		return
	}
	s.mu.pending, s.mu.reason = false, err.Error()
	s.failures.Add(1)
	s.log.Warn("new certificates are not used", "err", err)
}

func (m *material) expired(now time.Time) bool { return now.After(m.cert.Leaf.NotAfter) }

// State looks at the files, if it is time, and says how things are.
func (s *Source) State() State {
	m := s.current()
	s.mu.Lock()
	defer s.mu.Unlock()
	return State{Identity: m.identity, NotAfter: m.cert.Leaf.NotAfter, Reloads: s.reloads.Load(), Failures: s.failures.Load(), Reason: s.mu.reason}
}

// Identity is who the certificate in use says that this node is.
func (s *Source) Identity() Identity { return s.current().identity }

// Certificate is the certificate in use.
func (s *Source) Certificate() (*tls.Certificate, error) { return s.current().cert, nil }

var errNoCA = errors.New("no file of an authority is configured")

// Roots are who signs the certificates of others.
func (s *Source) Roots() (*x509.CertPool, error) {
	if r := s.current().roots; r != nil {
		return r, nil
	}
	return nil, errNoCA
}

// Server is the configuration of a listener for clients, which speak HTTP/2. Its
// files are those at each handshake. require refuses clients that show no
// certificate; without a CA none is asked for.
func (s *Source) Server(require bool) *tls.Config {
	base := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}, SessionTicketsDisabled: true}
	conf := base.Clone()
	conf.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m, c := s.current(), base.Clone()
		c.Certificates = []tls.Certificate{*m.cert}
		if m.roots != nil {
			c.ClientCAs, c.ClientAuth = m.roots, tls.VerifyClientCertIfGiven
			if require {
				c.ClientAuth = tls.RequireAndVerifyClientCert
			}
		}
		return c, nil
	}
	// The library wants to see a certificate before it asks for another configuration.
	conf.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.Certificate() }
	return conf
}

// Peers is the TLS of the connections between nodes, in both directions: this
// node shows its certificate, and the other side has to be a node of the same
// cluster.
func (s *Source) Peers() *transport.TLS {
	return &transport.TLS{Certificate: s.Certificate, Roots: s.Roots, IsNode: s.isNode}
}

// isNode says whether a verified certificate is a node's of this cluster:
// paging.ErrDenied if not.
func (s *Source) isNode(cert *x509.Certificate) error {
	id, err := Identify(cert)
	if err != nil {
		return fmt.Errorf("%w: %w", err, paging.ErrDenied)
	}
	own := s.Identity()
	switch {
	case own.Kind != Node:
		return fmt.Errorf("own certificate %s is %s, not a node's: %w", s.files.Cert, own, paging.ErrDenied)
	case id.Kind != Node || id.Cluster != own.Cluster:
		return fmt.Errorf("certificate is of %s, not of a node of cluster %s: %w", id, own.Cluster, paging.ErrDenied)
	}
	return nil
}

// ClientIdentity reads who a client of the listener is. Nobody, without an
// error, for a certificate that names nobody; paging.ErrDenied for one of another
// cluster, or of a form that is not known.
func (s *Source) ClientIdentity(cert *x509.Certificate) (Identity, error) {
	id, err := Identify(cert)
	if err != nil {
		return Identity{}, fmt.Errorf("%w: %w", err, paging.ErrDenied)
	}
	if own := s.Identity(); id.Kind != Nobody && id.Cluster != own.Cluster {
		return Identity{}, fmt.Errorf("certificate is of %s, this is a node of cluster %q: %w", id, own.Cluster, paging.ErrDenied)
	}
	return id, nil
}

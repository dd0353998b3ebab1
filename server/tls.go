package server

import (
	"crypto/x509"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/trust"
)

// open reads the files; nil where no certificate is configured.
func (t TLS) open(log *slog.Logger) (*trust.Source, error) {
	if t.Cert == "" {
		return nil, nil
	}
	return trust.Open(trust.Files{Cert: t.Cert, Key: t.Key, CA: t.CA}, log)
}

// holder is whom a client's certificate names, in the words of package rpc.
func holder(s *trust.Source) func(*x509.Certificate) (rpc.Holder, error) {
	return func(cert *x509.Certificate) (rpc.Holder, error) {
		id, err := s.ClientIdentity(cert)
		switch {
		case err != nil || id.Kind == trust.Nobody:
			return rpc.Holder{}, err
		case id.Kind == trust.Node:
			return rpc.Holder{Node: id.Name}, nil
		}
		role, err := rpc.ParseRole(id.Role)
		return rpc.Holder{Tenant: id.Tenant, Role: role, Name: id.Name}, err
	}
}

// expiresSoon is when an expiry is shown as a problem.
const expiresSoon = 14 * 24 * time.Hour

// certificateProblems is what an operator should know of the certificate.
func certificateProblems(s trust.State, now time.Time) []string {
	var out []string
	if s.Reason != "" {
		out = append(out, "tls: the files are not used, what they held before is: "+s.Reason)
	}
	if left := s.NotAfter.Sub(now); left <= 0 {
		out = append(out, fmt.Sprintf("tls: the certificate expired on %s: put a new one in its place", s.NotAfter.Format(time.RFC3339)))
	} else if left < expiresSoon {
		out = append(out, fmt.Sprintf("tls: the certificate expires on %s: put a new one in its place", s.NotAfter.Format(time.RFC3339)))
	}
	return out
}

// expiry is a time as a metric.
func expiry(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.Unix())
}

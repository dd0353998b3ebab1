package rpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/kvtier/kvtier/paging"
)

// peerInfo is what a connection says about its other end. Its caller is worked
// out once, at the handshake, so that a call over the unix socket costs no lookup.
type peerInfo struct {
	credentials.CommonAuthInfo
	caller Caller
	denied error // why its certificate is not accepted: calls are answered with it
}

// AuthType names the scheme.
func (peerInfo) AuthType() string { return "kvtier" }

// ValidateAuthority takes any: the authority of a unix socket says nothing.
func (peerInfo) ValidateAuthority(string) error { return nil }

// transport serves unix connections by their peer credentials and TCP
// connections by TLS, or in the clear where tls is nil.
type transport struct {
	accounts *Accounts
	tls      credentials.TransportCredentials
	identify func(*x509.Certificate) (Holder, error) // nil: certificates name nobody
	refused  *atomic.Uint64                          // connections
}

func newTransport(accounts *Accounts, cfg *tls.Config, identify func(*x509.Certificate) (Holder, error)) *transport {
	t := &transport{accounts: accounts, identify: identify, refused: new(atomic.Uint64)}
	if cfg != nil {
		t.tls = credentials.NewTLS(cfg)
	}
	return t
}

// ServerHandshake recognises the peer.
func (t *transport) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if uc, ok := conn.(*net.UnixConn); ok {
		cred, err := peerCredentials(uc)
		if err != nil {
			return nil, nil, fmt.Errorf("peer credentials: %w", err)
		}
		return conn, peerInfo{
			credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
			t.accounts.local(cred.Uid, cred.Pid), nil,
		}, nil
	}
	info := peerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, t.accounts.remote(), nil}
	if t.tls == nil {
		return conn, info, nil
	}
	secure, auth, err := t.tls.ServerHandshake(conn)
	if err != nil {
		t.refused.Add(1)
		return nil, nil, err
	}
	info.SecurityLevel = credentials.PrivacyAndIntegrity
	if shown, ok := auth.(credentials.TLSInfo); ok && t.identify != nil && len(shown.State.PeerCertificates) > 0 {
		// The library has verified the chain of what is shown.
		holder, err := t.identify(shown.State.PeerCertificates[0])
		if err == nil && holder != (Holder{}) {
			info.caller, err = t.accounts.certified(holder)
		}
		if info.denied = err; err != nil {
			t.refused.Add(1)
		}
	}
	return secure, info, nil
}

// ClientHandshake is not for servers.
func (*transport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("server credentials used by a client")
}

// Info names the scheme.
func (*transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "kvtier"}
}

// Clone returns t, which is immutable.
func (t *transport) Clone() credentials.TransportCredentials { return t }

// OverrideServerName does nothing on a server.
func (*transport) OverrideServerName(string) error { return nil }

func peerCredentials(conn *net.UnixConn) (*syscall.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *syscall.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	return cred, credErr
}

// caller recognises who makes this call.
func (a *Accounts) caller(ctx context.Context) (Caller, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Caller{}, fmt.Errorf("no peer: %w", paging.ErrDenied)
	}
	info, ok := p.AuthInfo.(peerInfo)
	if !ok {
		return Caller{}, fmt.Errorf("unknown transport: %w", paging.ErrDenied)
	}
	if info.denied != nil {
		return Caller{}, info.denied
	}
	if a.open {
		return info.caller, nil
	}
	if header := authorization(ctx); header != "" {
		return a.withToken(info.caller, header)
	}
	return info.caller, nil
}

// Who says who makes this call, for the audit trail.
func (a *Accounts) Who(ctx context.Context) string {
	c, err := a.caller(ctx)
	if err != nil {
		return "unknown"
	}
	return c.String()
}

// engine is the caller of a data call: it needs a tenant and a role that may
// move pages.
func (a *Accounts) engine(ctx context.Context) (Caller, error) {
	c, err := a.caller(ctx)
	if err != nil {
		return c, err
	}
	switch {
	case c.Tenant == "" && c.Local:
		return c, fmt.Errorf("uid %d belongs to no tenant: add it to a tenant's uids or send a token: %w", c.UID, paging.ErrDenied)
	case c.Node != "":
		return c, fmt.Errorf("the certificate is that of node %s: pages of clients need one of a client, or a token: %w", c.Node, paging.ErrDenied)
	case c.Role == RoleReadOnly:
		return c, fmt.Errorf("the caller's role is read-only: %w", paging.ErrDenied)
	case c.Tenant == "":
		return c, fmt.Errorf("a token or a client's certificate with a tenant is needed: %w", paging.ErrDenied)
	}
	return c, nil
}

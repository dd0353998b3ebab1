package rpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/stats"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// handshakeWithin bounds the time that a connection may take to say who it is.
const handshakeWithin = 10 * time.Second

// ioBufferBytes is the size of the read and the write buffer of a connection that
// is busy: page streams run 1.5 times as fast as with gRPC's 32 KiB. An idle
// connection has none.
const ioBufferBytes = 512 << 10

// Flow control windows. Above gRPC's default its estimator is off, which would
// add a ping to each round trip; a stream of pages keeps 2 MiB on the way.
const (
	streamWindowBytes = 2 << 20
	connWindowBytes   = 4 << 20
)

// Config is what a Server needs. All fields are required unless they say so.
type Config struct {
	Node     Node
	Admin    kvtierv1.AdminServiceServer
	Accounts *Accounts
	TLS      *tls.Config   // of TCP listeners; nil: in the clear
	Stats    stats.Handler // tracing; nil: none
	// Identify says whom a client's certificate names, whose chain was verified. An
	// error refuses its calls. nil: certificates name nobody.
	Identify func(*x509.Certificate) (Holder, error)
	// MaxCallsInFlight bounds the calls that run at once, attachment streams apart.
	MaxCallsInFlight int
	// MaxStreamsPerConn bounds the calls of one connection.
	MaxStreamsPerConn uint32
}

// Server serves the gRPC services on any number of listeners.
type Server struct {
	grpc   *grpc.Server
	health *health.Server
	pages  *pagesService
	calls  *calls
	peers  *transport
}

// New makes a server. It touches memory only.
func New(cfg Config) *Server {
	c := newCalls(cfg.MaxCallsInFlight, cfg.Accounts.admin)
	peers := newTransport(cfg.Accounts, cfg.TLS, cfg.Identify)
	opts := []grpc.ServerOption{
		grpc.Creds(peers),
		grpc.KeepaliveParams(kvstatus.ServerKeepalive()),
		grpc.KeepaliveEnforcementPolicy(kvstatus.ServerEnforcement()),
		grpc.MaxConcurrentStreams(cfg.MaxStreamsPerConn),
		grpc.ConnectionTimeout(handshakeWithin),
		grpc.ReadBufferSize(ioBufferBytes),
		grpc.WriteBufferSize(ioBufferBytes),
		grpc.InitialWindowSize(streamWindowBytes),
		grpc.InitialConnWindowSize(connWindowBytes),
		grpc.WaitForHandlers(true),
		grpc.ForceServerCodecV2(pageCodec{encoding.GetCodecV2("proto")}),
		grpc.UnaryInterceptor(c.unary),
		grpc.StreamInterceptor(c.stream),
	}
	if cfg.Stats != nil {
		opts = append(opts, grpc.StatsHandler(cfg.Stats))
	}
	s := &Server{grpc: grpc.NewServer(opts...), health: health.NewServer(), calls: c, peers: peers}
	s.pages = newPagesService(cfg.Node, cfg.Accounts, c)
	kvtierv1.RegisterPagesServiceServer(s.grpc, s.pages)
	kvtierv1.RegisterAdminServiceServer(s.grpc, cfg.Admin)
	kvtierv1.RegisterClusterServiceServer(s.grpc, &clusterService{node: cfg.Node, accounts: cfg.Accounts})
	kvtierv1.RegisterSessionsServiceServer(s.grpc, &sessionsService{node: cfg.Node, accounts: cfg.Accounts})
	healthv1.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	s.SetServing(false)
	return s
}

// SetServing is what the health service answers from now on.
func (s *Server) SetServing(ok bool) {
	status := healthv1.HealthCheckResponse_NOT_SERVING
	if ok {
		status = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", status)
	s.health.SetServingStatus(kvtierv1.PagesService_ServiceDesc.ServiceName, status)
	s.health.SetServingStatus(kvtierv1.AdminService_ServiceDesc.ServiceName, status)
	s.health.SetServingStatus(kvtierv1.ClusterService_ServiceDesc.ServiceName, status)
	s.health.SetServingStatus(kvtierv1.SessionsService_ServiceDesc.ServiceName, status)
}

// Serve accepts connections on l until Stop. It takes ownership of l.
func (s *Server) Serve(l net.Listener) error { return s.grpc.Serve(l) }

// Stop stops accepting, waits for running calls until ctx ends, then cuts them,
// and returns when every handler has returned. Attachment streams end when the
// node ends their attachments: the caller does that first.
func (s *Server) Stop(ctx context.Context) {
	s.health.Shutdown()
	done := make(chan struct{})
	go func() { // owner: this call; exits when all calls have ended, which Stop forces
		defer close(done)
		s.grpc.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
	}
	s.pages.streams.Wait()
}

// InFlight is the number of calls running, attachment streams apart.
func (s *Server) InFlight() int { return int(s.calls.inFlight.Load()) }

// Metrics counts calls since the start.
type Metrics struct {
	Calls    []CallMetrics
	InFlight int    // calls running now
	Refused  uint64 // calls refused because too many were running
	// RefusedPeers counts TLS connections that were refused: no TLS, a certificate
	// of another authority, of another cluster or expired.
	RefusedPeers uint64
}

// Metrics reads the counters.
func (s *Server) Metrics() Metrics {
	return Metrics{Calls: s.calls.metrics(), InFlight: s.InFlight(), Refused: s.calls.refused.Load(), RefusedPeers: s.peers.refused.Load()}
}

// admin lets only operators and those who may read reach the AdminService, and only
// operators change anything.
func (a *Accounts) admin(ctx context.Context, changes bool) error {
	c, err := a.caller(ctx)
	if err != nil {
		return err
	}
	if !c.Admin {
		return fmt.Errorf("the AdminService is for the owner of the socket, root, and tokens or certificates with the role operator or read-only: %w", paging.ErrDenied)
	}
	if changes && c.Role == RoleReadOnly {
		return fmt.Errorf("this changes the cluster: it needs the role operator, the caller's is read-only: %w", paging.ErrDenied)
	}
	return nil
}

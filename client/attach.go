package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Flow control windows above the default turn off the estimator, which would
// add a ping to each round trip; they also hold the largest message.
const (
	localWindow  = 1 << 20
	streamWindow = 2 << 20
	streamBuffer = 512 << 10
)

// defaultTTL stands in where a node names no time to live.
const defaultTTL = 30 * time.Second

// bearer sends a token with each call. Config has made sure that it does not
// cross a network in the clear.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{kvstatus.AuthorizationKey: "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// dial makes a connection that is not used yet. Proxies are not: the node is
// on this machine or named by its address.
func (c *Client) dial() (*grpc.ClientConn, error) {
	opts := []grpc.DialOption{
		grpc.WithKeepaliveParams(kvstatus.ClientKeepalive()),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithIdleTimeout(0),
		grpc.WithNoProxy(),
	}
	if c.cfg.Token != "" {
		opts = append(opts, grpc.WithPerRPCCredentials(bearer(c.cfg.Token)))
	}
	creds := insecure.NewCredentials()
	network, address, target := "tcp", c.cfg.Address, "passthrough:///"+c.cfg.Address
	if c.cfg.Socket != "" {
		network, address, target = "unix", c.cfg.Socket, "passthrough:///kvtier"
		opts = append(opts, grpc.WithInitialWindowSize(localWindow), grpc.WithInitialConnWindowSize(localWindow))
	} else {
		opts = append(opts,
			grpc.WithInitialWindowSize(streamWindow), grpc.WithInitialConnWindowSize(streamWindow),
			grpc.WithReadBufferSize(streamBuffer), grpc.WithWriteBufferSize(streamBuffer),
			experimental.WithBufferPool(c.cfg.pool))
		if c.cfg.TLS != nil {
			creds = credentials.NewTLS(c.cfg.TLS.Clone())
		}
	}
	opts = append(opts, grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, address)
		}))
	return grpc.NewClient(target, opts...)
}

// connect makes a link that is ready for calls: attached, with every namespace
// of this client registered.
func (c *Client) connect(ctx context.Context) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.DialTimeout)
	defer cancel()
	conn, err := c.dial()
	if err != nil {
		return nil, fmt.Errorf("connect: %w (%w)", err, paging.ErrInvalid)
	}
	l := newLink(c, conn)
	if c.cfg.Socket != "" {
		err = l.attach(ctx)
	} else {
		err = l.greet(ctx)
	}
	if err == nil {
		l.start()
		err = c.registerAll(ctx, l)
	}
	if err != nil {
		l.close(err)
		return nil, err
	}
	return l, nil
}

// attach opens the attachment stream and the tether.
func (l *link) attach(ctx context.Context) error {
	c := l.client
	stop := context.AfterFunc(ctx, func() {
		l.fail(fmt.Errorf("attach: %w", errors.Join(paging.ErrUnavailable, context.Cause(ctx))))
	})
	stream, err := l.pages.Attach(l.ctx) //nolint:contextcheck // the stream lives as long as the link; ctx bounds the handshake only
	if err != nil {
		return l.attachError(err)
	}
	hello := c.hello()
	if err := stream.Send(&kvtierv1.AttachRequest{RequestId: 1, Message: &kvtierv1.AttachRequest_Hello{Hello: hello}}); err != nil {
		// The reason why the stream ended comes with Recv.
		_, err = stream.Recv()
		return l.attachError(err)
	}
	msg, err := stream.Recv()
	if err != nil {
		return l.attachError(err)
	}
	if msg.GetError() != nil {
		return l.attachError(kvstatus.FromDetail(msg.GetError()))
	}
	w := msg.GetWelcome()
	switch {
	case w == nil || len(w.GetAttachment()) != kvstatus.AttachmentBytes || w.GetHandoffSocket() == "":
		return fmt.Errorf("attach: the node's welcome is malformed: %w", paging.ErrIncompatible)
	case w.GetProtocolVersion() != kvstatus.ProtocolVersion:
		return fmt.Errorf("attach: the node speaks protocol %d, this client %d: %w", w.GetProtocolVersion(), kvstatus.ProtocolVersion, paging.ErrIncompatible)
	}
	tether, err := shm.DialHandoff(ctx, w.GetHandoffSocket())
	if errors.Is(err, paging.ErrDenied) {
		return fmt.Errorf("attach: %w", err)
	}
	if err != nil {
		return fmt.Errorf("attach: %w: %v", paging.ErrUnavailable, err) //nolint:errorlint // whatever it is, the node cannot be reached
	}
	l.tether = tether
	var pool *poolRange
	if c.cfg.DevicePool {
		if pool, err = newPool(w); err != nil {
			return fmt.Errorf("attach: %w", err)
		}
	}
	l.extents = newExtentSet(pool, func() { _ = tether.Close() })
	if err := tether.SendHello(ctx, shm.AttachmentID(w.GetAttachment())); err != nil {
		return fmt.Errorf("attach: %w: %v", paging.ErrUnavailable, err) //nolint:errorlint // as above
	}
	l.id, l.tenant = w.GetAttachment(), w.GetTenant()
	if l.ttl = w.GetLeaseTtl().AsDuration(); l.ttl <= 0 {
		l.ttl = defaultTTL
	}
	if !stop() {
		return l.cause()
	}
	l.mux = newMux(stream, &l.heard, l.event)
	l.mux.nextID.Store(1)
	if hello.GetPreviousAttachment() != nil {
		c.mu.Lock()
		c.previous = nil
		c.mu.Unlock()
	}
	return nil
}

func (l *link) attachError(err error) error {
	if cause := context.Cause(l.ctx); cause != nil {
		return cause
	}
	return fmt.Errorf("attach: %w", kvstatus.Err(err))
}

// hello says who attaches, and names the attachment that ended if no view of
// it is left.
func (c *Client) hello() *kvtierv1.Hello {
	h := &kvtierv1.Hello{
		ProtocolVersion: kvstatus.ProtocolVersion,
		Engine:          c.cfg.Engine,
		EngineVersion:   c.cfg.EngineVersion,
		GroupId:         c.cfg.Group,
		GroupSecret:     c.cfg.GroupSecret,
		StagingBytes:    uint64(c.cfg.StagingBytes),
		Ranks:           c.cfg.Ranks,
		DevicePool:      c.cfg.DevicePool,
		WorkingBytes:    uint64(c.cfg.WorkingBytes),
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pruneLocked(); c.old == nil {
		h.PreviousAttachment = c.previous
	}
	return h
}

// greet makes sure that a node answers at Config.Address: with an empty Renew,
// which anyone may send whom the node lets in.
func (l *link) greet(ctx context.Context) error {
	l.ttl = defaultTTL
	_, err := l.pages.Renew(ctx, &kvtierv1.RenewRequest{})
	typed := kvstatus.Err(err)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("connect to %s: %w", l.client.cfg.Address, errors.Join(paging.ErrUnavailable, ctx.Err()))
	case !answered(err) || errors.Is(typed, paging.ErrDenied):
		return fmt.Errorf("connect to %s: %w", l.client.cfg.Address, typed)
	}
	return nil
}

// watchConn ends a streamed link with its connection. gRPC hands a new
// connection to calls before it says that it is ready: what comes before the
// first ready is not a loss.
func (l *link) watchConn() {
	ready := false
	for {
		state := l.conn.GetState()
		switch {
		case state == connectivity.Ready:
			ready = true
		case ready || state == connectivity.TransientFailure || state == connectivity.Shutdown:
			l.fail(fmt.Errorf("connection to %s lost: %w", l.client.cfg.Address, paging.ErrUnavailable))
			return
		}
		if !l.conn.WaitForStateChange(l.ctx, state) {
			return
		}
	}
}

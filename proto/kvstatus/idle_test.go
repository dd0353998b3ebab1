package kvstatus

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"
)

// countingListener counts the connections that were made.
type countingListener struct {
	net.Listener
	made atomic.Int32
}

func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.made.Add(1)
	}
	return conn, err
}

// A channel that is idle for 15 minutes, without a stream and with one, is not
// cut for its pings, and serves the next call on the same connection.
func TestIdleChannelStaysUp(t *testing.T) {
	for name, streaming := range map[string]bool{"channel": false, "stream": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { idleChannel(t, streaming) })
		})
	}
}

func idleChannel(t *testing.T, streaming bool) {
	pipes := bufconn.Listen(64 << 10)
	listener := &countingListener{Listener: pipes}
	server := grpc.NewServer(grpc.KeepaliveParams(ServerKeepalive()), grpc.KeepaliveEnforcementPolicy(ServerEnforcement()))
	healthv1.RegisterHealthServer(server, health.NewServer())
	go server.Serve(listener)
	defer server.Stop()
	conn, err := grpc.NewClient("passthrough:///pipe", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(ClientKeepalive()), grpc.WithIdleTimeout(0),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipes.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := healthv1.NewHealthClient(conn)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	check := func(when string) {
		if _, err := client.Check(ctx, &healthv1.HealthCheckRequest{}); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
	}
	check("first call")
	ended := make(chan error, 1)
	if streaming {
		stream, err := client.Watch(ctx, &healthv1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := stream.Recv()
			ended <- err
		}()
	}
	time.Sleep(15 * time.Minute)
	synctest.Wait()
	select {
	case err := <-ended:
		t.Errorf("the stream ended while it was idle: %v", err)
	default:
	}
	check("after 15 minutes")
	if n := listener.made.Load(); n != 1 {
		t.Errorf("%d connections, want the first one only", n)
	}
	cancel()
	if streaming {
		<-ended
	}
}

package server_test

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/servertest"
)

// Spans of calls reach the collector that is configured, at the latest when the
// node stops.
func TestTracesReachTheCollector(t *testing.T) {
	var exports atomic.Int64
	collector := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		if method, _ := grpc.MethodFromServerStream(s); method == "/opentelemetry.proto.collector.trace.v1.TraceService/Export" {
			exports.Add(1)
		}
		var m emptypb.Empty // keeps what it does not know
		if err := s.RecvMsg(&m); err != nil {
			return err
		}
		return s.SendMsg(&emptypb.Empty{})
	}))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- collector.Serve(l) }()
	t.Cleanup(func() {
		collector.Stop()
		<-served
	})
	cfg := servertest.Config(t)
	cfg.OTLPEndpoint = l.Addr().String()
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{})
	e.put(e.register(4096, 1), blockNames(0, 1))
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	if exports.Load() == 0 {
		t.Error("no span reached the collector")
	}
}

// A collector that is not there costs neither the start nor the stop.
func TestNoCollector(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.OTLPEndpoint = "127.0.0.1:1"
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{})
	e.put(e.register(4096, 1), blockNames(0, 1))
	start := time.Now()
	if err := n.Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("the stop took %v", d)
	}
}

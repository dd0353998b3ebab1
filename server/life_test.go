package server_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

func TestReleaseIsIdempotent(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	names := blockNames(0, 8)
	e.put(ns, names)
	l := e.fetch(ns, names, time.Minute)
	for round := range 3 {
		if lost := e.release(l.GetLeaseId()); len(lost) > 0 {
			t.Errorf("release %d: lost %v", round, lost)
		}
		if m := n.Metrics(); m.Leases != 0 || m.LeasedBytes != 0 || m.Hierarchy.LeasedBytes != 0 {
			t.Errorf("release %d: %d leases, %d and %d bytes leased", round, m.Leases, m.LeasedBytes, m.Hierarchy.LeasedBytes)
		}
	}
}

// A lease past its deadline is counted, charged and revoked; its pages stay until
// the client answers.
func TestOverdueLeaseIsRevokedNotFreed(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	names := blockNames(0, 1)
	e.put(ns, names)
	l := e.fetch(ns, names, time.Millisecond)
	var revoked []uint64
	for len(revoked) == 0 {
		m, err := e.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		revoked = m.GetRevocation().GetLeaseIds()
	}
	if m := n.Metrics(); revoked[0] != l.GetLeaseId() || m.OverdueLeases != 1 || m.Leases != 1 || m.Hierarchy.LeasedBytes == 0 {
		t.Errorf("revoked %v of %d; overdue %d, leases %d, leased bytes %d", revoked, l.GetLeaseId(), m.OverdueLeases, m.Leases, m.Hierarchy.LeasedBytes)
	}
	err := e.stream.Send(&kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Revoked{Revoked: &kvtierv1.Revoked{LeaseIds: revoked}}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lease ends", func() bool { m := n.Metrics(); return m.Leases == 0 && m.Hierarchy.LeasedBytes == 0 })
}

// fill writes blocks until RAM has turned over: everything that may be evicted is.
func fill(t testing.TB, e *rawEngine, ns []byte, bytesPerBlock, total int) {
	t.Helper()
	for at := 0; at < total/bytesPerBlock; at += 8 {
		names := blockNames(1<<20+at, 8)
		for len(names) > 0 {
			o := e.put(ns, names)
			done := len(o)
			if i := bytes.IndexByte(o, stagingFull); i >= 0 {
				done = i
			}
			names = names[done:]
		}
	}
}

// An attachment whose stream breaks while its process lives keeps its pages: they
// end with its tether, not with time.
func TestStreamBreaksWhileProcessLives(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e, other := n.raw(t, "", &kvtierv1.Hello{Engine: "broken"}), n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(64<<10, 1)
	names := blockNames(0, 16)
	e.put(ns, names)
	r := e.reserve(ns, blockNames(100, 1), time.Minute)
	l := e.fetch(ns, names, time.Millisecond)
	slots := e.slots(l.GetSlots())
	e.at(slots[0])
	e.conn.Close()
	eventually(t, "the stream's end is seen", func() bool { return n.Metrics().OrphanTethers == 1 })
	if m := n.Metrics(); m.Leases != 1 || m.Attempts != 0 {
		t.Errorf("%d leases and %d attempts in quarantine, want 1 and 0", m.Leases, m.Attempts)
	}
	// Its half-written block is free for others at once.
	if o := other.put(ns, blockNames(100, 1)); !bytes.Equal(o, []byte{committed}) {
		t.Errorf("the block that it was writing: %v", o)
	}
	fill(t, other, ns, 64<<10, 64<<20)
	for i, s := range slots {
		if !bytes.Equal(e.at(s), wantPage(64<<10, names[i], 0)) {
			t.Errorf("page %d changed in quarantine", i)
		}
	}
	// Calls that name it are refused, also over a new connection.
	again := kvtierv1.NewPagesServiceClient(dialRaw(t, n.Config.Socket, ""))
	if _, err := again.Fetch(t.Context(), &kvtierv1.FetchRequest{Attachment: e.id, NamespaceId: ns, BlockNames: packNames(names)}); !errors.Is(kvstatus.Err(err), paging.ErrUnknownAttachment) {
		t.Errorf("fetch by an attachment without stream: %v", err)
	}
	_ = r
	start := time.Now()
	e.tether.Close()
	eventually(t, "the quarantine ends", func() bool { m := n.Metrics(); return m.Leases == 0 && m.OrphanTethers == 0 })
	if d := time.Since(start); d > slack*2*time.Second {
		t.Errorf("the quarantine ended %v after its tether", d)
	}
}

// The same client may end the quarantine of its old attachment when it attaches
// anew; nobody else may.
func TestAttachAnewEndsQuarantine(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.Tenants = []server.Tenant{
		{Name: "a", Tokens: []server.Token{{Secret: tokenA}}},
		{Name: "b", Tokens: []server.Token{{Secret: tokenB}}},
	}
	n := startNode(t, cfg)
	e := n.raw(t, tokenA, &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	e.put(ns, blockNames(0, 1))
	e.fetch(ns, blockNames(0, 1), time.Minute)
	if err := e.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "quarantine", func() bool { return n.Metrics().OrphanTethers == 1 })
	n.raw(t, tokenB, &kvtierv1.Hello{PreviousAttachment: e.id})
	if m := n.Metrics(); m.Leases != 1 {
		t.Errorf("another tenant ended the quarantine: %d leases", m.Leases)
	}
	n.raw(t, tokenA, &kvtierv1.Hello{PreviousAttachment: e.id})
	eventually(t, "the quarantine ends", func() bool { return n.Metrics().Leases == 0 })
}

// A process that lets go of its tether while its stream is held has promised that
// it reads nothing: its attachment ends.
func TestTetherClosedUnderTheStream(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	e.put(ns, blockNames(0, 1))
	e.fetch(ns, blockNames(0, 1), time.Minute)
	e.tether.Close()
	var err error
	for err == nil {
		_, err = e.stream.Recv()
	}
	if err := kvstatus.Err(err); !errors.Is(err, paging.ErrUnknownAttachment) {
		t.Errorf("the stream ended with %v", err)
	}
	eventually(t, "nothing is held", func() bool { m := n.Metrics(); return m.Leases == 0 && m.Attachments == 0 && m.StagingBytes == 0 })
}

// RAM full of leases: Fetch and Reserve say so at once.
func TestRAMFullOfLeases(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{StagingBytes: 4 << 20})
	ns := e.register(256<<10, 1)
	var leases []uint64
	full := false
	for at := 0; !full && at < 1000; at++ {
		names := blockNames(at, 1)
		switch o := e.put(ns, names)[0]; o {
		case committed:
			leases = append(leases, e.fetch(ns, names, time.Minute).GetLeaseId())
		case noSpace:
			full = true
		default:
			t.Fatalf("block %d: outcome %d", at, o)
		}
	}
	if !full {
		t.Fatal("RAM did not fill up")
	}
	for range 5 {
		start := time.Now()
		o := e.reserve(ns, blockNames(5000, 3), time.Minute).GetOutcomes()
		d := time.Since(start)
		if o[0] != noSpace || o[1] != 0 {
			t.Errorf("reserve: %v", o)
		}
		if d > 200*time.Millisecond { // 1 ms on an idle machine; this one runs tests
			t.Errorf("reserve took %v", d)
		}
	}
	e.release(leases...)
	if o := e.put(ns, blockNames(5000, 1)); !bytes.Equal(o, []byte{committed}) {
		t.Errorf("after the leases ended: %v", o)
	}
}

// Stopping is bounded and tells everybody, with engines attached and calls open.
func TestStopIsBounded(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.StopWithin = 4 * time.Second
	cfg.StagingBytes = 64 << 10
	n := startNode(t, cfg)
	var engines []*rawEngine
	for range 60 {
		engines = append(engines, n.raw(t, "", &kvtierv1.Hello{StagingBytes: 4096}))
	}
	start := time.Now()
	if err := n.Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if d := time.Since(start); d > cfg.StopWithin {
		t.Errorf("stopped within %v, want %v", d, cfg.StopWithin)
	}
	for i, e := range engines {
		told := false
		for {
			m, err := e.stream.Recv()
			if err != nil {
				if err := kvstatus.Err(err); !errors.Is(err, paging.ErrUnavailable) {
					t.Errorf("engine %d: stream ended with %v", i, err)
				}
				break
			}
			told = told || m.GetStopping() != nil
		}
		if !told {
			t.Errorf("engine %d was not told", i)
		}
	}
}

// Streams of pages that run when the node stops end with a typed error, within
// the bound, and hold nothing.
func TestStopEndsStreams(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.StopWithin, cfg.Listen = 2*time.Second, "127.0.0.1:0"
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{StagingBytes: 2 << 20})
	ns := e.register(1<<20, 1)
	names := blockNames(0, 10)
	for i := range names {
		e.put(ns, names[i:i+1])
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var streams []grpc.ServerStreamingClient[kvtierv1.ReadPagesResponse]
	for range 10 {
		pages := kvtierv1.NewPagesServiceClient(dialTCP(t, n, insecure.NewCredentials(), ""))
		s, err := pages.ReadPages(ctx, &kvtierv1.ReadPagesRequest{NamespaceId: ns, BlockNames: packNames(names)})
		if err == nil {
			_, err = s.Recv() // and no more: the node waits for room to send
		}
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s)
	}
	start := time.Now()
	if err := n.Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if d := time.Since(start); d > cfg.StopWithin {
		t.Errorf("stopped within %v, want %v", d, cfg.StopWithin)
	}
	for i, s := range streams {
		var err error
		for err == nil {
			_, err = s.Recv()
		}
		if err := kvstatus.Err(err); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("stream %d ended with %v", i, err)
		}
	}
}

// A client of a node that restarts attaches again by itself.
func TestClientSurvivesRestart(t *testing.T) {
	cfg := servertest.Config(t)
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(4096, 1))
	if err != nil {
		t.Fatal(err)
	}
	write(t, c, ns, blockNames(0, 4))
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	again := startNode(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	eventually(t, "the client attaches", func() bool { return again.Metrics().Attachments == 1 })
	if err := c.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	l, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: blockNames(0, 4)})
	if err != nil || l.Usable != 0 {
		t.Errorf("RAM of the node before: %d usable, %v", l.Usable, err)
	}
	write(t, c, ns, blockNames(0, 4))
}

func TestTwoNodesOnOneSocketOrDirectory(t *testing.T) {
	cfg := servertest.Config(t)
	startNode(t, cfg)
	if _, err := server.Open(t.Context(), cfg, server.Options{Drivers: servertest.Drivers()}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("second node on the socket: %v, want unavailable", err)
	}
}

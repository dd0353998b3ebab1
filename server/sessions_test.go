package server_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// A session that an engine opened, appended to and lost to another node: its events,
// what it reads by the session's name there and here, near and streamed.
func TestSessionOfAnEngine(t *testing.T) {
	listens := func(name, join string) server.Config {
		cfg := clusterConfig(t, join)
		cfg.Name, cfg.Listen = name, "127.0.0.1:0"
		return cfg
	}
	first := startNode(t, listens("first", ""))
	second := startNode(t, listens("second", first.PeerAddr()))
	engines := map[string]*client.Client{"first": first.client(t, client.Config{Engine: "test"}), "second": second.client(t, client.Config{Engine: "test"})}
	var ns paging.NamespaceID
	for _, c := range engines {
		var err error
		if ns, err = c.RegisterNamespace(t.Context(), testNamespace(10000, 2)); err != nil {
			t.Fatal(err)
		}
	}
	names := blockNames(0, 300)
	write(t, engines["first"], ns, names[:200])
	s, err := engines["first"].OpenSession(t.Context(), client.SessionOptions{Name: "s", Namespace: ns, Retention: &client.Retention{Priority: 50}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	appendAll(t, s, names[:200])
	eventually(t, "the other node knows of it", func() bool {
		_, err := engines["second"].Fetch(t.Context(), client.FetchRequest{Namespace: ns, Session: "s"})
		return err == nil
	})

	admin, err := client.OpenAdmin(client.Config{Socket: second.Config.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	eventually(t, "both nodes are in the directory", func() bool {
		nodes, err := admin.Nodes(t.Context())
		return err == nil && len(nodes) == 2 && nodes[0].State == "up" && nodes[1].State == "up"
	})
	for _, by := range []client.FetchRequest{{Namespace: ns, Session: "s"}, {Namespace: ns, Session: "s", From: 150, To: 180}} {
		for name, c := range engines {
			l, err := c.Fetch(t.Context(), withTimeout(by))
			if err != nil || l.Rows != max(30, 200-170*min(int(by.To), 1)) {
				t.Fatalf("%s, blocks %d to %d: %v, %v", name, by.From, by.To, l, err)
			}
			checkLease(t, l, names[by.From:], 2)
		}
	}
	if _, err := engines["first"].Fetch(t.Context(), client.FetchRequest{Namespace: ns, Session: "nobody"}); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("a session that is not: %v", err)
	}

	var plan *client.MovePlan
	move, err := admin.MigrateSession(t.Context(), client.MigrateRequest{Session: "s", To: second.Config.Name}, func(p *client.MovePlan, _ *client.MoveProgress) {
		if p != nil {
			plan = p
		}
	})
	if err != nil || !move.Moved() || plan == nil {
		t.Fatalf("%+v, %v", move, err)
	}
	if m := first.Metrics().Cluster.Sessions; m.Known != 1 || m.Appends == 0 || m.AppendedBlocks != 200 || m.MovesDone != 1 || m.MovesAborted != 0 || m.Paused <= 0 {
		t.Errorf("%+v", m)
	}
	eventually(t, "both replicas have it", func() bool {
		return first.Metrics().Cluster.Sessions.Owned == 0 && second.Metrics().Cluster.Sessions.Owned == 1
	})
	write(t, engines["first"], ns, names[200:210])
	taken := s.Append(200, names[200:210])
	if taken != nil && !errors.Is(taken, paging.ErrMoved) {
		t.Fatal(taken)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Wait(ctx); !errors.Is(err, paging.ErrMoved) {
		t.Errorf("an append at the former owner: %v", err)
	}
	moved := false
	for !moved {
		select {
		case e := <-s.Events():
			moved = e.Epoch == 2 && e.OwnerAddress == second.Addr().String()
		case <-ctx.Done():
			t.Fatal("no event tells that it moved")
		}
	}
	at, rest := s.Rest()
	if taken != nil && at == 200 && len(rest) == 0 { // the event was faster than the append
		rest = names[200:210]
	}
	there, err := engines["second"].OpenSession(t.Context(), client.SessionOptions{Name: "s", Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	if err := there.Append(at, rest); err != nil {
		t.Fatal(err)
	}
	if err := there.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	l, err := engines["second"].Fetch(ctx, client.FetchRequest{Namespace: ns, Session: "s", To: 200})
	if err != nil || l.Rows != 200 {
		t.Fatalf("nothing is to be copied or loaded any more: %v, %v", l, err)
	}
	for _, tier := range l.Tiers {
		if tier != client.TierRAM {
			t.Fatalf("a block comes from %v", tier)
		}
	}
	checkLease(t, l, names, 2)
	far := dialFar(t, second)
	if _, err := far.RegisterNamespace(ctx, testNamespace(10000, 2)); err != nil {
		t.Fatal(err)
	}
	if l, err := far.Fetch(ctx, client.FetchRequest{Namespace: ns, Session: "s", From: 190}); err != nil || l.Rows < 10 {
		t.Errorf("streamed: %v, %v", l, err)
	} else {
		checkLease(t, l, names[190:], 2)
	}
	detail, err := admin.Session(ctx, "", "s")
	if err != nil || detail.Blocks != 210 || detail.Epoch != 2 || detail.Moves != 1 || len(detail.Runs) == 0 || len(detail.AtOwner) == 0 {
		t.Errorf("%+v, %v", detail, err)
	}
	if list, more, err := admin.Sessions(ctx, client.SessionFilter{Usage: true, Node: second.Config.Name}); err != nil || len(list) != 1 || more {
		t.Errorf("%+v, %v, %v", list, more, err)
	}
	if err := admin.CloseSession(ctx, "", "s"); err != nil {
		t.Fatal(err)
	}
	if err := there.Append(210, names[210:211]); err != nil && !errors.Is(err, paging.ErrNotFound) {
		t.Fatal(err)
	}
	if err := there.Wait(ctx); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("after it was closed: %v", err)
	}
}

func withTimeout(r client.FetchRequest) client.FetchRequest {
	r.Timeout = 5 * time.Second
	return r
}

func appendAll(t *testing.T, s *client.Session, names []paging.BlockName) {
	t.Helper()
	if err := s.Append(0, names); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

func dialFar(t *testing.T, n testNode) *client.Client {
	t.Helper()
	c, err := client.Open(t.Context(), client.Config{Address: n.Addr().String(), Engine: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// sessionEvent reads events of the attachment until one of a session is as wanted.
func (e *rawEngine) sessionEvent(what string, wanted func(*kvtierv1.SessionEvent) bool) {
	e.t.Helper()
	for {
		m, err := e.stream.Recv()
		if err != nil {
			e.t.Fatalf("%s: %v", what, err)
		}
		if ev := m.GetSession(); ev != nil && wanted(ev) {
			return
		}
	}
}

// An engine that opens a session with its attachment is told of it on its stream; who
// watches is told on that of the watch; a node that stops ends both at once.
func TestSessionFace(t *testing.T) {
	n := startNode(t, clusterConfig(t, ""))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	c := kvtierv1.NewSessionsServiceClient(e.conn)
	if _, err := c.OpenSession(t.Context(), &kvtierv1.OpenSessionRequest{Session: "s", NamespaceId: ns, Attachment: make([]byte, 16)}); !errors.Is(kvstatus.Err(err), paging.ErrUnknownAttachment) {
		t.Errorf("open with nobody's attachment: %v", err)
	}
	a, err := c.OpenSession(t.Context(), &kvtierv1.OpenSessionRequest{Session: "s", NamespaceId: ns, Attachment: e.id})
	if err != nil {
		t.Fatal(err)
	}
	if s := a.GetSession(); s.GetSession() != "s" || s.GetTenant() != "default" || s.GetEpoch() != 1 || s.GetState() != kvtierv1.SessionState_SESSION_STATE_ACTIVE {
		t.Errorf("opened: %v", s)
	}
	e.sessionEvent("how it is", func(ev *kvtierv1.SessionEvent) bool { return ev.GetSession() == "s" && ev.GetEpoch() == 1 })
	watch, err := c.WatchSessions(t.Context(), &kvtierv1.WatchSessionsRequest{Sessions: []string{"s", "other"}})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for range 2 {
		m, err := watch.Recv()
		if err != nil {
			t.Fatal(err)
		}
		seen[m.GetEvent().GetSession()] = m.GetEvent().GetGone()
	}
	if gone, known := seen["s"]; gone || !known || !seen["other"] {
		t.Errorf("first events: %v, want s to be there and other to be gone", seen)
	}
	names := blockNames(0, 40)
	r, err := c.AppendSession(t.Context(), &kvtierv1.AppendSessionRequest{Session: "s", BlockNames: packNames(names), Epoch: 1})
	if err != nil || r.GetBlocks() != 40 || r.GetTokens() != 640 {
		t.Fatalf("append: %v, %v", r, err)
	}
	e.sessionEvent("what was appended", func(ev *kvtierv1.SessionEvent) bool { return ev.GetBlocks() == 40 })
	got, err := c.GetSession(t.Context(), &kvtierv1.GetSessionRequest{Session: "s", FromBlock: 10, ToBlock: 20, Usage: true, Placement: true})
	if err != nil || string(got.GetBlockNames()) != string(packNames(names[10:20])) || got.GetSession().GetAbsentBlocks() != 40 {
		t.Errorf("get: %v, %v", got, err)
	}
	list, err := c.ListSessions(t.Context(), &kvtierv1.ListSessionsRequest{})
	if err != nil || len(list.GetSessions()) != 1 || list.GetSessions()[0].GetBlocks() != 40 {
		t.Errorf("list: %v, %v", list, err)
	}
	if _, err := c.CloseSession(t.Context(), &kvtierv1.CloseSessionRequest{Session: "s"}); err != nil {
		t.Error(err)
	}
	e.sessionEvent("its end", func(ev *kvtierv1.SessionEvent) bool { return ev.GetGone() })

	// Only the node's stop ends a watch of which nothing happens.
	idle, err := c.WatchSessions(t.Context(), &kvtierv1.WatchSessionsRequest{Sessions: []string{"other"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := idle.Recv(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := n.Stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > n.Config.StopWithin/2 {
		t.Errorf("a stop took %v: the watches held it up", took)
	}
	if _, err := idle.Recv(); !errors.Is(kvstatus.Err(err), paging.ErrUnavailable) {
		t.Errorf("a watch of a node that stopped: %v", err)
	}
}

// A node that is of no cluster says so, and how to make it one.
func TestNoSessionsWithoutACluster(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	c := n.client(t, client.Config{Engine: "test"})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(10000, 2))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.OpenSession(t.Context(), client.SessionOptions{Name: "s", Namespace: ns}); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("%v", err)
	}
}

package server_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
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
	write(t, engines["first"], ns, names[200:210])
	if err := s.Append(200, names[200:210]); err != nil && !errors.Is(err, paging.ErrMoved) {
		t.Fatal(err)
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
	if err := there.Append(210, names[210:211]); err != nil {
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

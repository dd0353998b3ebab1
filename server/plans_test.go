package server_test

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// An operator drains a node with a session and blocks of no session over the
// AdminService of the other one, looks at the audit trail, and undrains it.
func TestDrainByAnOperator(t *testing.T) {
	first := startNode(t, clusterConfig(t, ""))
	cfg := clusterConfig(t, first.PeerAddr())
	cfg.Name = "second"
	second := startNode(t, cfg)
	near, far := first.client(t, client.Config{Engine: "test"}), second.client(t, client.Config{Engine: "test"})
	var ns paging.NamespaceID
	for _, c := range []*client.Client{near, far} {
		var err error
		if ns, err = c.RegisterNamespace(t.Context(), testNamespace(10000, 2)); err != nil {
			t.Fatal(err)
		}
	}
	names := blockNames(0, 200)
	write(t, far, ns, names)
	s, err := far.OpenSession(t.Context(), client.SessionOptions{Name: "s", Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	appendAll(t, s, names[:50])

	admin, err := client.OpenAdmin(client.Config{Socket: first.Config.Socket, CallTimeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	eventually(t, "both nodes are up", func() bool {
		nodes, err := admin.Nodes(t.Context())
		return err == nil && len(nodes) == 2 && nodes[0].State == "up" && nodes[1].State == "up" && nodes[0].Claims+nodes[1].Claims >= 200
	})
	if _, err := admin.Drain(t.Context(), "nobody", client.PlanOptions{}, false, func(*client.Proposal, *client.PlanStatus) {}); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("drain of a node that is not there: %v", err)
	}
	var plan *client.Proposal
	for _, dry := range []bool{true, false} {
		last, err := admin.Drain(t.Context(), "second", client.PlanOptions{}, dry, func(p *client.Proposal, _ *client.PlanStatus) {
			if p != nil {
				plan = p
			}
		})
		switch {
		case err != nil:
			t.Fatal(err)
		case len(plan.Steps) == 0 || plan.Steps[0].Kind != "move" || plan.Steps[0].Session != "default/s":
			t.Errorf("proposal: %+v", plan)
		case dry != (last == nil):
			t.Errorf("after a dry run (%v): %+v", dry, last)
		case !dry && (last.State != "done" || last.Moved != 1 || last.CopiedBytes < 150*2*10000):
			t.Errorf("%+v", last)
		}
	}
	if n := prefix(t, near, ns, names, 2); n != 200 {
		t.Errorf("%d of 200 blocks after the drain", n)
	}
	if n := prefix(t, far, ns, names, 2); n != 200 {
		t.Errorf("the node serves %d of 200 blocks when it has left", n)
	}
	records, err := admin.Audit(t.Context(), time.Now().Add(-time.Hour), 0)
	if err != nil {
		t.Fatal(err)
	}
	started := false
	for _, r := range records {
		started = started || r.What == "drain started" && r.Subject == "second" && r.Who == fmt.Sprintf("uid %d", os.Getuid())
	}
	if !started {
		t.Errorf("the trail does not say who drained the node: %+v", records)
	}
	if name, err := admin.Undrain(t.Context(), "second"); err != nil || name != "second" {
		t.Errorf("undrain: %q, %v", name, err)
	}
	eventually(t, "it takes part again", func() bool {
		nodes, err := admin.Nodes(t.Context())
		return err == nil && nodes[0].State == "up" && nodes[1].State == "up"
	})
	if _, err := admin.PlanRebalance(t.Context(), client.RebalanceRequest{Bytes: 1}); err != nil {
		t.Error(err)
	}
	if _, err := admin.Plan(t.Context(), ""); !errors.Is(err, paging.ErrNotFound) {
		t.Errorf("a rebalance that never was: %v", err)
	}
}

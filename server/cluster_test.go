package server_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// clusterConfig is a node of a cluster on this machine; join "" is the first.
func clusterConfig(t testing.TB, join string) server.Config {
	t.Helper()
	cfg := servertest.Config(t)
	cfg.Dir = filepath.Join(filepath.Dir(cfg.Socket), "data")
	cfg.NVMeBytes = 64 << 20
	cfg.PeerListen, cfg.GossipListen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Bootstrap, cfg.Join = join == "", join
	return cfg
}

// prefix fetches a prefix, checks every byte, and returns how long it was.
func prefix(t testing.TB, c *client.Client, ns paging.NamespaceID, names []paging.BlockName, parts int) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	l, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: names, Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	checkLease(t, l, names, parts)
	return l.Rows
}

// Three nodes are one cache: what one of them has, all can fetch, also when it comes
// from the disk of another, and after the node that had it alone was restarted.
func TestThreeNodesAreOneCache(t *testing.T) {
	first := startNode(t, clusterConfig(t, ""))
	nodes := []testNode{first, startNode(t, clusterConfig(t, first.PeerAddr())), startNode(t, clusterConfig(t, first.PeerAddr()))}
	clients := make([]*client.Client, len(nodes))
	var ns paging.NamespaceID
	for i, n := range nodes {
		clients[i] = n.client(t, client.Config{Engine: "test"})
		var err error
		if ns, err = clients[i].RegisterNamespace(t.Context(), testNamespace(10000, 2)); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range clients {
		write(t, c, ns, blockNames(100*i, 20))
	}
	for i, c := range clients {
		for j := range clients {
			names := blockNames(100*j, 20)
			eventually(t, "every node sees every block", func() bool { return prefix(t, c, ns, names, 2) == 20 })
		}
		if m := nodes[i].Metrics(); m.Hierarchy.RemotePages != 80 {
			t.Errorf("node %d: %d pages came from others, want 80", i, m.Hierarchy.RemotePages)
		}
	}

	// The second node alone has these, on its disk.
	own := blockNames(5000, 20)
	write(t, clients[1], ns, own)
	if _, err := clients[1].Demote(t.Context(), ns, own, client.TierRAM); err != nil {
		t.Fatal(err)
	}
	if err := clients[1].Close(); err != nil {
		t.Error(err)
	}
	if err := nodes[1].Stop(); err != nil {
		t.Fatal(err)
	}
	if got := prefix(t, clients[2], ns, own, 2); got != 0 {
		t.Errorf("%d blocks of a node that is stopped", got)
	}
	again := nodes[1].Config
	again.Join = ""
	nodes[1] = startNode(t, again)
	eventually(t, "the blocks of the node are back", func() bool { return prefix(t, clients[2], ns, own, 2) == 20 })
}

func TestJoinFindsNobody(t *testing.T) {
	cfg := clusterConfig(t, "127.0.0.1:1")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := server.Open(ctx, cfg, server.Options{Drivers: servertest.Drivers()}); err == nil {
		t.Fatal("joined nobody")
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, "cluster.json")); !os.IsNotExist(err) {
		t.Errorf("cluster.json: %v", err)
	}
}

package server_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

// asker asks a node what operators ask.
func (n testNode) asker(t testing.TB) *client.Admin {
	t.Helper()
	a, err := client.OpenAdmin(client.Config{Socket: n.Config.Socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// Each reason why a block is a hit, or is not, as a person is told it.
func TestExplain(t *testing.T) {
	first := startNode(t, clusterConfig(t, ""))
	second := startNode(t, clusterConfig(t, first.PeerAddr()))
	c1, c2 := first.client(t, client.Config{Engine: "test"}), second.client(t, client.Config{Engine: "test"})
	ns, err := c1.RegisterNamespace(t.Context(), testNamespace(10000, 2))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c2.RegisterNamespace(t.Context(), testNamespace(10000, 2)); err != nil {
		t.Fatal(err)
	}
	other := testNamespace(10000, 2)
	other.Layout.Model = "another"
	otherNS, err := c2.RegisterNamespace(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, 7)
	write(t, c1, ns, names[:1])
	write(t, c1, ns, names[1:2])
	write(t, c2, ns, names[2:3])
	write(t, c2, ns, names[3:4])
	write(t, c2, otherNS, names[4:5])
	demoted, err := c1.Demote(t.Context(), ns, names[1:2], client.TierRAM)
	if err != nil {
		t.Fatal(demoted, err)
	}
	if _, err := c2.Drop(t.Context(), ns, names[3:4]); err != nil {
		t.Fatal(err)
	}
	if _, err := c1.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names[6:7], Parts: 1}, client.CommitOptions{},
		func(row, part int, dst []byte) error { fillPage(dst, names[6], part); return nil }); err != nil {
		t.Fatal(err)
	}
	a := first.asker(t)
	want := []string{"hit_here", "hit_disk", "hit_remote", "dropped", "layout_differs", "never_stored", "part_missing"}
	eventually(t, "every block is explained", func() bool {
		x, err := a.Explain(t.Context(), client.ExplainRequest{Namespace: ns, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, b := range x.Blocks {
			got = append(got, b.Verdict)
		}
		t.Logf("%v", got)
		return slices.Equal(got, want) && x.Usable == 3
	})
	if _, err := a.Explain(t.Context(), client.ExplainRequest{Tokens: []uint32{1}}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("tokens without a namespace: %v", err)
	}
	nodes, err := a.Nodes(t.Context())
	if err != nil || len(nodes) != 2 {
		t.Fatalf("nodes: %+v, %v", nodes, err)
	}
	for _, n := range nodes {
		if n.State != "up" || !n.Reachable || len(n.Tiers) != 2 || n.Claims == 0 {
			t.Errorf("node %+v", n)
		}
	}
	s, err := a.Status(t.Context())
	if err != nil || s.Cluster == nil || s.Cluster.Leader == "" || s.Cluster.NodesSeen != 2 || s.Cluster.Claims == 0 {
		t.Errorf("status: %+v, %v", s.Cluster, err)
	}
	at, usable, err := c2.Locate(t.Context(), ns, names[:3], false)
	if err != nil || usable != 3 || len(at) != 2 || at[0].Usable != 2 || at[0].Tiers[client.TierRAM] != 1 || at[0].Tiers[client.TierNVMe] != 1 {
		t.Errorf("locate: %+v, %d, %v", at, usable, err)
	}
	if err := c2.Close(); err != nil {
		t.Error(err)
	}
	if err := second.Stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the owner is known to be out of reach", func() bool {
		x, err := a.Explain(t.Context(), client.ExplainRequest{Namespace: ns, Names: names[2:3]})
		if err != nil {
			t.Fatal(err)
		}
		return x.Blocks[0].Verdict == "owner_unreachable" || x.Blocks[0].Verdict == "unknown"
	})
}

// The directory is saved from any node, and restored on the leader; claims that the
// snapshot is behind of are repaired from the inventories.
func TestSnapshotOfTheDirectory(t *testing.T) {
	first := startNode(t, clusterConfig(t, ""))
	second := startNode(t, clusterConfig(t, first.PeerAddr()))
	c1, c2 := first.client(t, client.Config{Engine: "test"}), second.client(t, client.Config{Engine: "test"})
	var ns paging.NamespaceID
	for _, c := range []*client.Client{c1, c2} {
		var err error
		if ns, err = c.RegisterNamespace(t.Context(), testNamespace(10000, 1)); err != nil {
			t.Fatal(err)
		}
	}
	names := blockNames(0, 20)
	write(t, c1, ns, names[:10])
	eventually(t, "the second node sees them", func() bool { return prefix(t, c2, ns, names[:10], 1) == 10 })
	var saved bytes.Buffer
	if n, err := second.asker(t).SaveSnapshot(t.Context(), &saved); err != nil || n == 0 {
		t.Fatal(n, err)
	}
	write(t, c1, ns, names[10:]) // the snapshot does not know of these
	if _, _, err := second.asker(t).RestoreSnapshot(t.Context(), bytes.NewReader(saved.Bytes())); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("restored by a node that does not lead: %v", err)
	}
	damaged := slices.Clone(saved.Bytes())
	damaged[len(damaged)/2] ^= 1
	if _, _, err := first.asker(t).RestoreSnapshot(t.Context(), bytes.NewReader(damaged)); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("restored a damaged one: %v", err)
	}
	nodes, _, err := first.asker(t).RestoreSnapshot(t.Context(), bytes.NewReader(saved.Bytes()))
	if err != nil || nodes == 0 {
		t.Fatal(nodes, err)
	}
	eventually(t, "what the snapshot is behind of is claimed again", func() bool { return prefix(t, c2, ns, names, 1) == 20 })
}

// A replica of one cluster never becomes one of another: without cluster.json the
// node is refused, whether it is to begin a cluster or to join one, and may join when
// the replica is removed as well.
func TestReplicaWithoutItsClusterIsRefused(t *testing.T) {
	other := startNode(t, clusterConfig(t, ""))
	mine := startNode(t, clusterConfig(t, ""))
	if err := mine.Stop(); err != nil {
		t.Fatal(err)
	}
	record, replica := filepath.Join(mine.Config.Dir, "cluster.json"), filepath.Join(mine.Config.Dir, "directory")
	if err := os.Remove(record); err != nil {
		t.Fatal(err)
	}
	for _, join := range []string{"", other.PeerAddr()} {
		cfg := mine.Config
		cfg.Bootstrap, cfg.Join = join == "", join
		if _, err := server.Open(t.Context(), cfg, server.Options{Drivers: servertest.Drivers()}); !errors.Is(err, paging.ErrIncompatible) || !strings.Contains(err.Error(), replica) {
			t.Errorf("join %q: %v", join, err)
		}
		if _, err := os.Stat(record); !os.IsNotExist(err) {
			t.Errorf("join %q: cluster.json: %v", join, err)
		}
	}
	if err := os.RemoveAll(replica); err != nil {
		t.Fatal(err)
	}
	cfg := mine.Config
	cfg.Bootstrap, cfg.Join = false, other.PeerAddr()
	asker := startNode(t, cfg).asker(t)
	eventually(t, "both know both", func() bool {
		nodes, err := asker.Nodes(t.Context())
		return err == nil && len(nodes) == 2 && nodes[0].State == "up" && nodes[1].State == "up"
	})
}

// A start that fails before the node has a replica leaves it of no cluster.
func TestFailedFirstStartIsOfNoCluster(t *testing.T) {
	other := startNode(t, clusterConfig(t, ""))
	cfg := clusterConfig(t, "")
	cfg.PeerListen = other.PeerAddr() // taken
	if _, err := server.Open(t.Context(), cfg, server.Options{Drivers: servertest.Drivers()}); err == nil {
		t.Fatal("two nodes on one peer port")
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, "cluster.json")); !os.IsNotExist(err) {
		t.Errorf("cluster.json: %v", err)
	}
}

// A snapshot may be restored as soon as the node serves: the call waits for a leader.
func TestRestoreRightAfterTheStart(t *testing.T) {
	var saved bytes.Buffer
	if _, err := startNode(t, clusterConfig(t, "")).asker(t).SaveSnapshot(t.Context(), &saved); err != nil {
		t.Fatal(err)
	}
	if _, _, err := startNode(t, clusterConfig(t, "")).asker(t).RestoreSnapshot(t.Context(), &saved); err != nil {
		t.Error(err)
	}
}

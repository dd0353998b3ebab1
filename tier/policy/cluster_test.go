package policy

import (
	"strings"
	"testing"
)

func first(holders []int, _ []int64) int { return holders[0] }

// A cluster of one node is one cache, under every policy.
func TestClusterOfOneIsOneCache(t *testing.T) {
	tr := loadTrace(t, "conversation_500.jsonl")
	tr.BlockTokens = 512
	for _, name := range Names() {
		want, err := Replay(name, 500, tr)
		if err != nil {
			t.Fatal(err)
		}
		for _, source := range []func([]int, []int64) int{nil, first} {
			got, err := ReplayCluster(name, 500, tr, Cluster{Nodes: 1, Route: func(int) int { return 0 }, Source: source})
			if err != nil || got.Result != want || got.LocalHits != want.Hits || got.RemoteHits != 0 {
				t.Errorf("%s: %+v, want %+v (%v)", name, got, want, err)
			}
		}
	}
}

// With room for all, a directory makes many nodes one cache; without one, each
// node finds what it was sent itself.
func TestClusterWithRoomForAll(t *testing.T) {
	tr := loadTrace(t, "conversation_500.jsonl")
	tr.BlockTokens = 512
	want, err := Replay("lru", 1<<40, tr)
	if err != nil {
		t.Fatal(err)
	}
	c := Cluster{Nodes: 7, Route: func(i int) int { return i % 7 }, Source: first}
	got, err := ReplayCluster("lru_rev", 1<<40, tr, c)
	if err != nil || got.Result != want || got.LocalHits+got.RemoteHits != want.Hits || got.RemoteHits == 0 || got.Evicted != 0 {
		t.Errorf("with a directory: %+v, want %+v (%v)", got, want, err)
	}
	c.Source = nil
	alone, err := ReplayCluster("lru_rev", 1<<40, tr, c)
	if err != nil {
		t.Fatal(err)
	}
	hits := int64(0)
	for node := range 7 {
		own := Trace{BlockTokens: 512}
		for i := node; i < len(tr.Requests); i += 7 {
			own.Requests = append(own.Requests, tr.Requests[i])
		}
		r, err := Replay("lru_rev", 1<<40, own)
		if err != nil {
			t.Fatal(err)
		}
		hits += r.Hits
	}
	if alone.Hits != hits || alone.RemoteHits != 0 || hits >= want.Hits {
		t.Errorf("without a directory: %d hits, the nodes by themselves %d, with a directory %d", alone.Hits, hits, want.Hits)
	}
}

// Two nodes with room for two blocks, step by step.
func TestClusterByHand(t *testing.T) {
	tr := Trace{BlockTokens: 1, Requests: []Request{
		{InputTokens: 2, Blocks: []uint64{1, 2}}, // node 0 stores 1 and 2
		{InputTokens: 3, Blocks: []uint64{1, 2, 3}},
		{InputTokens: 1, Blocks: []uint64{4}}, // evicts 2 of node 0, whose use by node 1 is older than that of 1
		{InputTokens: 2, Blocks: []uint64{1, 2}},
	}}
	at := []int{0, 1, 0, 0}
	got, err := ReplayCluster("lru_rev", 2, tr, Cluster{Nodes: 2, Route: func(i int) int { return at[i] }, Source: first})
	if err != nil {
		t.Fatal(err)
	}
	// Request 1 hits 1 and 2 at node 0, and keeps 1 and 2 of its three; request 3
	// has 1 itself and gets 2 of node 1. Evicted: 3 of node 1; of node 0 2, then 1 and 4.
	if got.Hits != 4 || got.LocalHits != 1 || got.RemoteHits != 3 || got.Evicted != 4 || got.Blocks != 8 {
		t.Errorf("%+v", got)
	}
}

func TestClustersThatCannotBe(t *testing.T) {
	route := func(int) int { return 0 }
	for want, run := range map[string]func() error{
		"0 nodes": func() error {
			_, err := ReplayCluster("lru", 1, Trace{BlockTokens: 1}, Cluster{Route: route})
			return err
		},
		"1025 nodes": func() error {
			_, err := ReplayCluster("lru", 1, Trace{BlockTokens: 1}, Cluster{Nodes: 1025, Route: route})
			return err
		},
		"capacity 0": func() error {
			_, err := ReplayCluster("lru", 0, Trace{BlockTokens: 1}, Cluster{Nodes: 1, Route: route})
			return err
		},
		"want one of": func() error {
			_, err := ReplayCluster("x", 1, Trace{BlockTokens: 1}, Cluster{Nodes: 1, Route: route})
			return err
		},
		"of 0 tokens:": func() error { _, err := ReplayCluster("lru", 1, Trace{}, Cluster{Nodes: 1, Route: route}); return err },
	} {
		if err := run(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

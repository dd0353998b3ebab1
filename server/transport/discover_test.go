package transport

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

func TestDiscover(t *testing.T) {
	net := newMemory()
	open := func(at string, gossip func() string) *Mux {
		m, err := OpenMux(MuxConfig{ID: placement.NodeID{1}, Cluster: "the-cluster", Listen: at, Network: net, Gossip: gossip,
			Resolve: func(placement.NodeID) (string, bool) { return "", false }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		return m
	}
	open("one:1", func() string { return "one:2" })
	got, err := Discover(t.Context(), DiscoverConfig{ID: placement.NodeID{9}, Address: "one:1", Network: net})
	if want := (Introduction{"the-cluster", placement.NodeID{1}, "one:2"}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	if _, err := Discover(t.Context(), DiscoverConfig{ID: placement.NodeID{9}, Address: "nobody:1", Network: net}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("nobody there: %v", err)
	}
	if _, err := Discover(t.Context(), DiscoverConfig{ID: placement.NodeID{1}, Address: "one:1", Network: net}); !errors.Is(err, paging.ErrDenied) {
		t.Errorf("the node itself: %v", err)
	}
	open("closed:1", nil)
	if _, err := Discover(t.Context(), DiscoverConfig{ID: placement.NodeID{9}, Address: "closed:1", Network: net}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("nobody can join there: %v", err)
	}
}

func FuzzIntroduction(f *testing.F) {
	n := Introduction{Cluster: "c", Gossip: "127.0.0.1:7442"}
	f.Add(n.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := readIntroduction(bytes.NewReader(b))
		if err == nil && string(got.encode()) != string(b[:len(got.encode())]) {
			t.Errorf("%q reads as %+v", b, got)
		}
	})
}

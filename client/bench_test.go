package client_test

import (
	"testing"

	"github.com/kvtier/kvtier/client"
)

// stored makes a client of a node with one chain of n blocks.
func stored(b testing.TB, blocks int) (*client.Client, client.FetchRequest) {
	b.Helper()
	n := startTestNode(b)
	c := open(b, client.Config{Socket: n.socket})
	ns := register(b, c)
	names := chain(1, blocks)
	write(b, c, ns, names)
	return c, client.FetchRequest{Namespace: ns, Names: names, Parts: 1}
}

// The bound of Fetch: an empty call on the same stream.
func BenchmarkEmptyCall(b *testing.B) {
	c, _ := stored(b, 1)
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Renew(b.Context(), 0); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFetch64(b *testing.B) {
	c, request := stored(b, 64)
	b.ReportAllocs()
	for b.Loop() {
		lease, err := c.Fetch(b.Context(), request)
		if err != nil {
			b.Fatal(err)
		}
		if lease.Usable != 64 {
			b.Fatalf("%d blocks", lease.Usable)
		}
		lease.ReleaseAsync()
	}
}

func BenchmarkFetch64Parallel(b *testing.B) {
	c, request := stored(b, 64)
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			lease, err := c.Fetch(b.Context(), request)
			if err != nil {
				b.Error(err)
				return
			}
			lease.ReleaseAsync()
		}
	})
}

// Opening and closing the view of one page.
func BenchmarkPage(b *testing.B) {
	c, request := stored(b, 64)
	lease, err := c.Fetch(b.Context(), request)
	if err != nil {
		b.Fatal(err)
	}
	defer lease.ReleaseAsync()
	b.ReportAllocs()
	row := 0
	for b.Loop() {
		view, ok := lease.Page(row, 0)
		if !ok {
			b.Fatal("no page")
		}
		if err := view.Close(); err != nil {
			b.Fatal(err)
		}
		row = (row + 1) % 64
	}
}

func TestPageDoesNotAllocate(t *testing.T) {
	c, request := stored(t, 64)
	lease, err := c.Fetch(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.ReleaseAsync()
	allocs := testing.AllocsPerRun(100, func() {
		for row := range 64 {
			view, ok := lease.Page(row, 0)
			if !ok {
				t.Fatal("no page")
			}
			view.Close()
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations for 64 pages", allocs)
	}
}

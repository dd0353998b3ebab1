package client_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
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

// cpu is the processor time that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// streamBench runs move, which moves bytes of pages between a daemon in this
// process and a client over loopback TCP, and reports the processor time of both
// ends per GB beside the rate.
func streamBench(b *testing.B, bytes int64, move func(c *client.Client, ns paging.NamespaceID) error) {
	n := startDaemon(b, func(cfg *server.Config) { cfg.Listen, cfg.RAMBytes = "127.0.0.1:0", 128<<20 })
	c := open(b, daemonFaces(n)[true])
	namespace := testNamespace()
	namespace.Layout.Parts = namespace.Layout.Parts[:1]
	namespace.Layout.Parts[0].PageBytes = 256 << 10
	ns, err := c.RegisterNamespace(b.Context(), namespace)
	if err != nil {
		b.Fatal(err)
	}
	if err := move(c, ns); err != nil { // the first time: the pages are stored
		b.Fatal(err)
	}
	b.SetBytes(bytes)
	b.ReportAllocs()
	before := cpu()
	for b.Loop() {
		if err := move(c, ns); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((cpu()-before).Seconds()/(float64(b.N)*float64(bytes)/1e9), "cpu-s/GB")
}

func BenchmarkStreamedFetch(b *testing.B) {
	names := chain(1, 64)
	streamBench(b, 64*256<<10, func(c *client.Client, ns paging.NamespaceID) error {
		lease, err := c.Fetch(b.Context(), client.FetchRequest{Namespace: ns, Names: names})
		if err != nil {
			return err
		}
		if lease.Usable == 0 {
			return tryWrite(b.Context(), c, ns, names)
		}
		return lease.Release(b.Context())
	})
}

func BenchmarkStreamedWrite(b *testing.B) {
	names := chain(1, 64)
	streamBench(b, 64*256<<10, func(c *client.Client, ns paging.NamespaceID) error {
		if _, err := c.Drop(b.Context(), ns, names); err != nil {
			return err
		}
		return tryWrite(b.Context(), c, ns, names)
	})
}

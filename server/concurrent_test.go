package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/servertest"
)

// rounds is n, or what KVTIER_TORTURE asks for.
func rounds(t testing.TB, n int) int {
	t.Helper()
	if s := os.Getenv("KVTIER_TORTURE"); s != "" {
		more, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("KVTIER_TORTURE: %v", err)
		}
		return max(n, more)
	}
	return n
}

// Clients that write, read and drop the same few blocks at once: whoever gets a
// page gets the right one, and nothing but a miss happens otherwise.
func TestSameBlocksFromManyClients(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	const writers, readers = 6, 6
	names := blockNames(0, 3)
	var all sync.WaitGroup
	errs := make(chan error, writers+readers)
	hits := make(chan int, readers)
	run := func(f func(c *client.Client, ns paging.NamespaceID) error) {
		c := n.client(t, client.Config{StagingBytes: 256 << 10})
		all.Go(func() {
			ns, err := c.RegisterNamespace(t.Context(), testNamespace(16<<10, 2))
			if err == nil {
				err = f(c, ns)
			}
			errs <- err
		})
	}
	many := rounds(t, 60)
	for k := range writers {
		run(func(c *client.Client, ns paging.NamespaceID) error {
			for i := range many {
				_, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{},
					func(row, part int, dst []byte) error { fillPage(dst, names[row], part); return nil })
				if err == nil && k == 0 && i%3 == 0 {
					_, err = c.Drop(t.Context(), ns, names[i%3:])
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	for range readers {
		run(func(c *client.Client, ns paging.NamespaceID) error {
			found := 0
			defer func() { hits <- found }()
			for range many {
				l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
				if err != nil {
					return err
				}
				for row := range l.Rows {
					for part := range 2 {
						v, ok := l.Page(row, part)
						if !ok || !bytes.Equal(v.Bytes(), wantPage(16<<10, names[row], part)) {
							return fmt.Errorf("row %d part %d: wrong page (%w)", row, part, l.Err())
						}
						if err := v.Close(); err != nil {
							return err
						}
						found++
					}
				}
				if err := l.Release(t.Context()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	all.Wait()
	total := 0
	for range writers + readers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for range readers {
		total += <-hits
	}
	if total == 0 {
		t.Error("no reader ever found a page: the test shows nothing")
	}
	if m := n.Metrics(); m.Leases != 0 || m.Attempts != 0 || m.Hierarchy.Holds != 0 || m.Hierarchy.Attempts != 0 || m.Hierarchy.LeasedBytes != 0 {
		t.Errorf("left: %d leases, %d attempts, %d holds", m.Leases, m.Attempts, m.Hierarchy.Holds)
	}
}

// Parallel page streams: every page arrives with the checksum that was announced.
func TestParallelPageStreams(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.Listen = "127.0.0.1:0"
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{StagingBytes: 2 << 20})
	const pageBytes = 300 << 10
	ns := e.register(pageBytes, 1)
	names := blockNames(0, 8)
	for i := range names {
		e.put(ns, names[i:i+1])
	}
	pages := kvtierv1.NewPagesServiceClient(dialTCP(t, n, insecure.NewCredentials(), ""))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	errs := make(chan error, 32)
	for range cap(errs) {
		all.Go(func() {
			s, err := pages.ReadPages(ctx, &kvtierv1.ReadPagesRequest{NamespaceId: ns, BlockNames: packNames(names)})
			if err != nil {
				errs <- err
				return
			}
			errs <- checkStream(s.Recv, len(names), pageBytes)
		})
	}
	all.Wait()
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if m := n.Metrics(); m.Hierarchy.Holds != 0 {
		t.Errorf("%d holds left", m.Hierarchy.Holds)
	}
}

// checkStream receives whole pages and compares each with its checksum.
func checkStream(recv func() (*kvtierv1.ReadPagesResponse, error), pages, pageBytes int) error {
	if m, err := recv(); err != nil || int(m.GetHeader().GetUsableBlocks()) != pages {
		return fmt.Errorf("header %v: %w", m.GetHeader(), err)
	}
	for page := range pages {
		var whole []byte
		var sum uint64
		for len(whole) < pageBytes {
			m, err := recv()
			if err != nil {
				return err
			}
			if c := m.GetChunk(); int(c.GetBlock()) != page || int(c.GetOffset()) != len(whole) {
				return fmt.Errorf("chunk of block %d at %d, want block %d at %d", c.GetBlock(), c.GetOffset(), page, len(whole))
			}
			whole, sum = append(whole, m.GetChunk().GetData()...), m.GetChunk().GetChecksum()
		}
		if paging.Checksum(whole) != sum {
			return fmt.Errorf("page %d does not match its checksum", page)
		}
	}
	return nil
}

// A node that is killed leaves nothing that blocks or enlarges its next start.
func TestNodeKilled(t *testing.T) {
	cfg := servertest.Config(t)
	dir := filepath.Dir(cfg.Socket)
	for round := range rounds(t, 4) {
		node := startChild(t, "node", cfg.Socket)
		c, err := client.Open(t.Context(), client.Config{Socket: cfg.Socket, StallTimeout: 5 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		ns, err := c.RegisterNamespace(t.Context(), testNamespace(4096, 1))
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		write(t, c, ns, blockNames(0, 8))
		node.signal(t, syscall.SIGKILL)
		if err := node.cmd.Wait(); err == nil {
			t.Error("the node was not killed")
		}
		if _, err := c.Lookup(t.Context(), ns, blockNames(0, 1), 0); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("round %d: a call to a node that is gone: %v", round, err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range entries {
			if name := f.Name(); name != "s" && name != "s.lock" && name != "kvtier-fd.sock" {
				t.Errorf("round %d: %s was left behind", round, name)
			}
		}
	}
	if b, err := os.ReadFile("/proc/self/maps"); err != nil || strings.Contains(string(b), "kvtier-ram") {
		t.Errorf("this process has memory of the dead nodes mapped: %v", err)
	}
}

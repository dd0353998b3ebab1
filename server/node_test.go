package server_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// testNode is a node that serves in this process.
type testNode struct{ *servertest.Node }

func startNode(t testing.TB, cfg server.Config) testNode {
	t.Helper()
	return testNode{servertest.Start(t, cfg, servertest.Drivers())}
}

func (n testNode) client(t testing.TB, cfg client.Config) *client.Client {
	t.Helper()
	cfg.Socket = n.Config.Socket
	cfg.StallTimeout = 5 * time.Second // two cores under the race detector
	c, err := client.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close client: %v", err)
		}
	})
	return c
}

func testNamespace(pageBytes uint64, parts int) paging.Namespace {
	ns := paging.Namespace{Layout: paging.Layout{
		Model: "m", KVDType: "bf16", Attention: "gqa", Layers: 2, KVHeads: 2, HeadDim: 8, DType: "bf16",
		EngineLayout: "test/v1", TP: 1, PP: 1, CP: 1, HashAlgorithm: "test/hash", BlockTokens: 16,
	}}
	for i := range parts {
		ns.Layout.Parts = append(ns.Layout.Parts, paging.Part{Name: string(rune('a' + i)), PageBytes: pageBytes, BlocksPerPage: 1})
	}
	return ns
}

func blockNames(from, n int) []paging.BlockName {
	names := make([]paging.BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(from+i)*0x9e3779b97f4a7c15+1)
		names[i][31] = byte(from + i)
	}
	return names
}

// fillPage writes the content that a page of this block and part must have.
func fillPage(dst []byte, name paging.BlockName, part int) {
	seed := binary.LittleEndian.Uint64(name[:]) + uint64(part)*7919
	for i := range dst {
		if i%8 == 0 {
			seed = seed*6364136223846793005 + 1442695040888963407
		}
		dst[i] = byte(seed >> (8 * (i % 8)))
	}
}

func wantPage(n int, name paging.BlockName, part int) []byte {
	b := make([]byte, n)
	fillPage(b, name, part)
	return b
}

func write(t testing.TB, c *client.Client, ns paging.NamespaceID, names []paging.BlockName) []client.Outcome {
	t.Helper()
	outcomes, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{},
		func(row, part int, dst []byte) error {
			fillPage(dst, names[row], part)
			return nil
		})
	if err != nil {
		t.Fatalf("write: %v (%v)", err, outcomes)
	}
	return outcomes
}

// checkLease compares every page of a lease in place and releases it.
func checkLease(t testing.TB, l *client.Lease, names []paging.BlockName, parts int) {
	t.Helper()
	for row := range l.Rows {
		for part := range parts {
			v, ok := l.Page(row, part)
			if !ok {
				t.Fatalf("row %d part %d: no page: %v", row, part, l.Err())
			}
			if want := wantPage(len(v.Bytes()), names[row], part); !bytes.Equal(v.Bytes(), want) {
				t.Errorf("row %d part %d: wrong bytes", row, part)
			}
			if err := v.Close(); err != nil {
				t.Errorf("row %d part %d: %v", row, part, err)
			}
		}
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("release: %v", err)
	}
}

func TestWriteAndReadInPlace(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	c := n.client(t, client.Config{Engine: "test"})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(10000, 2))
	if err != nil {
		t.Fatal(err)
	}
	names := blockNames(0, 64)
	for i, o := range write(t, c, ns, names) {
		if o != client.OutcomeCommitted {
			t.Errorf("block %d: %v", i, o)
		}
	}
	p, err := c.Lookup(t.Context(), ns, names, 0)
	if err != nil || p.Usable != 64 {
		t.Errorf("lookup: %+v, %v", p, err)
	}
	l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
	if err != nil || l.Usable != 64 || l.UsableTokens != 64*16 {
		t.Fatalf("fetch: %+v, %v", l, err)
	}
	if m := n.Metrics(); m.Leases != 1 || m.LeasedBytes != 64*2*10000 || m.Attachments != 1 {
		t.Errorf("metrics while leased: %+v", m)
	}
	checkLease(t, l, names, 2)
	if m := n.Metrics(); m.Leases != 0 || m.LeasedBytes != 0 || m.Attempts != 0 {
		t.Errorf("metrics after release: leases %d, bytes %d, attempts %d", m.Leases, m.LeasedBytes, m.Attempts)
	}
	if _, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: paging.NamespaceID{1}, Names: names}); !errors.Is(err, paging.ErrUnknownNamespace) {
		t.Errorf("fetch from an unknown namespace: %v", err)
	}
}

// scribble overwrites b.
func scribble(b []byte, x byte) {
	for i := range b {
		b[i] = x
	}
}

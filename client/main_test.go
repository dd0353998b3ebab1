package client_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testNamespace has two parts that every block has, so that a reader that mixes
// up columns is caught.
func testNamespace() paging.Namespace {
	return paging.Namespace{Layout: paging.Layout{
		Model: "test/model", DType: "bf16", KVDType: "bf16", Attention: "gqa",
		Layers: 2, KVHeads: 2, HeadDim: 64, EngineLayout: "test/LBNHC",
		TP: 1, PP: 1, CP: 1, HashAlgorithm: "test/counter", BlockTokens: 16,
		Parts: []paging.Part{
			{Name: "kv", PageBytes: 16 << 10, BlocksPerPage: 1},
			{Name: "index", PageBytes: 4096, BlocksPerPage: 1},
		},
	}}
}

// chain names n blocks of the chain with this number.
func chain(number, n int) []paging.BlockName {
	names := make([]paging.BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(number))
		binary.LittleEndian.PutUint64(names[i][8:], uint64(i))
	}
	return names
}

// fillPage writes the content that the page of a block and part must have.
func fillPage(name paging.BlockName, part int, dst []byte) {
	seed := binary.LittleEndian.Uint64(name[:])<<32 ^ binary.LittleEndian.Uint64(name[8:])<<8 ^ uint64(part)
	const period = 1016 // divides neither slots nor pieces of a stream: shifted bytes differ
	for i := 0; i+8 <= min(period, len(dst)); i += 8 {
		seed = seed*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(dst[i:], seed)
	}
	for n := period; n < len(dst); n *= 2 {
		copy(dst[n:], dst[:n])
	}
}

func checkPage(name paging.BlockName, part int, page []byte) error {
	want := make([]byte, len(page))
	fillPage(name, part, want)
	if string(want) != string(page) {
		return fmt.Errorf("page of block %s part %d has other bytes", name.Short(), part)
	}
	return nil
}

// open makes a client of the node's socket that is closed with the test.
func open(t testing.TB, cfg client.Config) *client.Client {
	t.Helper()
	c, err := client.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// patient is a config whose breaker does not take the race detector's slowness
// for silence.
func patient(n *testNode) client.Config {
	return client.Config{Socket: n.socket, Engine: "test", StallTimeout: 2 * time.Second, CallTimeout: 20 * time.Second}
}

func register(t testing.TB, c *client.Client) paging.NamespaceID {
	t.Helper()
	id, err := c.RegisterNamespace(t.Context(), testNamespace())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// write stores blocks and fails the test if one is not stored.
func write(t testing.TB, c *client.Client, ns paging.NamespaceID, names []paging.BlockName) {
	t.Helper()
	if err := tryWrite(t.Context(), c, ns, names); err != nil {
		t.Fatal(err)
	}
}

func tryWrite(ctx context.Context, c *client.Client, ns paging.NamespaceID, names []paging.BlockName) error {
	outcomes, err := c.WriteBlocks(ctx, client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{},
		func(row, part int, dst []byte) error {
			fillPage(names[row], part, dst)
			return nil
		})
	if err != nil {
		return err
	}
	for i, o := range outcomes {
		if !o.Stored() {
			return fmt.Errorf("block %d: %v", i, o)
		}
	}
	return nil
}

func fetch(t testing.TB, c *client.Client, ns paging.NamespaceID, names []paging.BlockName) *client.Lease {
	t.Helper()
	lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// readAll compares every page of the usable prefix with what it must be.
func readAll(lease *client.Lease, names []paging.BlockName, parts int) error {
	for row := range lease.Usable {
		for part := range parts {
			view, ok := lease.Page(row, part)
			if !ok {
				return fmt.Errorf("no page at row %d part %d: %w", row, part, lease.Err())
			}
			err := checkPage(names[row], part, view.Bytes())
			if closeErr := view.Close(); closeErr != nil {
				return closeErr
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// eventually waits for something that another goroutine brings about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(10 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s: not within 10 s", what)
		}
	}
}

package client_test

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// An engine writes the blocks of a prompt that are not stored, and reads them in
// place the next time.
func Example() {
	node, err := makeNode() // stands in for a running daemon
	if err != nil {
		panic(err)
	}
	defer node.remove()
	if err := node.run(); err != nil {
		panic(err)
	}

	ctx := context.Background()
	c, err := client.Open(ctx, client.Config{Socket: node.socket, Engine: "example"})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	ns, err := c.RegisterNamespace(ctx, paging.Namespace{Layout: paging.Layout{
		Model: "example/model", DType: "bf16", KVDType: "bf16", Attention: "gqa", Layers: 2, KVHeads: 2, HeadDim: 64,
		EngineLayout: "example/LBNHC", TP: 1, PP: 1, CP: 1, HashAlgorithm: "vllm/sha256_cbor", BlockTokens: 16,
		Parts: []paging.Part{{Name: "kv", PageBytes: 16 << 10, BlocksPerPage: 1}},
	}})
	if err != nil {
		panic(err)
	}
	names := []paging.BlockName{{1}, {2}, {3}} // the engine's chain hashes

	_, err = c.WriteBlocks(ctx, client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{},
		func(row, _ int, dst []byte) error {
			dst[0] = byte(10 * row) // the engine copies its page here
			return nil
		})
	if err != nil {
		panic(err)
	}

	lease, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: names})
	if err != nil {
		panic(err) // paging.ErrUnavailable is a miss: compute the blocks
	}
	defer lease.ReleaseAsync()
	for row := range lease.Usable {
		view, ok := lease.Page(row, 0)
		if !ok {
			break // revoked meanwhile: a miss
		}
		first := view.Bytes()[0] // the attention kernel reads it in place
		if err := view.Close(); err != nil {
			break // paging.ErrLost: forget what was read
		}
		fmt.Println("block", row, "begins with", first)
	}
	// Output:
	// block 0 begins with 0
	// block 1 begins with 10
	// block 2 begins with 20
}

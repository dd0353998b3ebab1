package bench

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/kvtier/kvtier/paging"
)

// TraceBlock is the name of the block that a trace calls id. Ids of a trace are
// prefix-chained (equal ids mean an equal whole prefix), so the id alone names
// the block.
func TraceBlock(id uint64) paging.BlockName {
	var b [16]byte
	copy(b[:], "trace id")
	binary.LittleEndian.PutUint64(b[8:], id)
	return paging.BlockName(sha256.Sum256(b[:]))
}

// namespaceOf is the namespace of a workload: blocks of so many tokens with one
// part per page length.
func namespaceOf(workload string, tokens int, pageBytes ...int64) paging.Namespace {
	ns := paging.Namespace{Layout: paging.Layout{
		Model: "kvtier/" + workload, DType: "bfloat16", KVDType: "bfloat16", Attention: "gqa",
		Layers: 32, KVHeads: 8, HeadDim: 128, EngineLayout: "kvtier/bench", TP: 1, PP: 1, CP: 1,
		HashAlgorithm: "kvtier/trace", BlockTokens: uint32(tokens),
	}}
	for i, n := range pageBytes {
		ns.Layout.Parts = append(ns.Layout.Parts, paging.Part{
			Name: fmt.Sprintf("kv%d", i), PageBytes: uint64(n), BlocksPerPage: 1,
		})
	}
	return ns
}

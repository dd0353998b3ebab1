package tiertest

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Namespace is a valid namespace for tests; each number gives another.
func Namespace(number int) *paging.Namespace {
	return &paging.Namespace{
		Layout: paging.Layout{
			Model: "tiertest", Revision: strconv.Itoa(number), DType: "bfloat16", KVDType: "bfloat16", Attention: "gqa",
			Layers: 2, KVHeads: 2, HeadDim: 64, EngineLayout: "tiertest", EngineEpoch: 1, TP: 1, PP: 1, CP: 1,
			ISA: "", HashAlgorithm: "sha256_cbor", HashSeed: "0", BlockTokens: 16,
			Parts: []paging.Part{{Name: "kv", PageBytes: 4096, BlocksPerPage: 1}},
		},
		Tenant: "tiertest",
	}
}

// Page makes page number n of a namespace: its identity, and its bytes, which
// derive from ns and n.
func Page(ns paging.NamespaceID, n uint64, bytes uint32) (tier.Page, []byte) {
	b := make([]byte, bytes)
	FillPage(b, ns, n)
	return Identity(ns, n, b), b
}

// Identity describes b as page number n of a namespace.
func Identity(ns paging.NamespaceID, n uint64, b []byte) tier.Page {
	var name paging.BlockName
	binary.LittleEndian.PutUint64(name[:], n)
	return tier.Page{
		ID:    paging.PageID{BlockID: paging.BlockID{Namespace: ns, Name: name}},
		Key:   paging.StorageKey(ns, name, 0),
		Bytes: uint32(len(b)),
		Sum:   paging.Checksum(b),
		Meta:  n * 3,
	}
}

// FillPage writes the bytes of page number n into b: a block of 4 KiB that
// derives from ns and n, repeated, each time with its number in front.
func FillPage(b []byte, ns paging.NamespaceID, n uint64) {
	rng := rand.New(rand.NewPCG(n, binary.LittleEndian.Uint64(ns[:])))
	var block [4096]byte
	for i := 0; i < len(block); i += 8 {
		binary.LittleEndian.PutUint64(block[i:], rng.Uint64())
	}
	for i := uint64(0); len(b) > 0; i++ {
		binary.LittleEndian.PutUint64(block[:], n^i<<32)
		b = b[copy(b, block[:]):]
	}
}

// Rounds is how many rounds a random test runs: n, or n × KVTIER_TORTURE.
func Rounds(n int) int {
	if torture, err := strconv.Atoi(os.Getenv("KVTIER_TORTURE")); err == nil && torture > 0 {
		return n * torture
	}
	return n
}

// Seed is KVTIER_SEED, or another one each time; it is printed if the test fails.
func Seed(t *testing.T) uint64 {
	seed, err := strconv.ParseUint(os.Getenv("KVTIER_SEED"), 10, 64)
	if err != nil || seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("KVTIER_SEED=%d", seed)
		}
	})
	return seed
}

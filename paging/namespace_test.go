package paging

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/bits"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// example is a valid namespace with every field set.
func example() *Namespace {
	return &Namespace{
		Layout: Layout{
			Model: "meta/Llama-3", Revision: "r1", DType: "bfloat16", KVDType: "fp8_e4m3", Attention: "gqa",
			Layers: 32, KVHeads: 8, HeadDim: 128, EngineLayout: "vllm/LBNHC", EngineEpoch: 3, TP: 2, PP: 1, CP: 1,
			ISA: "amx", HashAlgorithm: HashVLLMSHA256, HashSeed: "0", BlockTokens: 16,
			Parts: []Part{
				{Name: "kv.0", PageBytes: 65536, BlocksPerPage: 1, Ranks: []uint32{0}},
				{Name: "kv.1", PageBytes: 65536, BlocksPerPage: 1, Ranks: []uint32{1}},
				{Name: "state", PageBytes: 1 << 20, BlocksPerPage: 4, LastBlocks: 4},
			},
		},
		Tenant: "acme",
		Salt:   []byte("salt"),
	}
}

// plain is a small valid namespace: optional fields are empty.
func plain() *Namespace {
	return &Namespace{
		Layout: Layout{
			Model: "m", KVDType: "float16", Attention: "mla", Layers: 1, EngineLayout: "x", TP: 1, PP: 1, CP: 1,
			HashAlgorithm: HashSGLang, BlockTokens: 64, Parts: []Part{{Name: "kv", PageBytes: 1, BlocksPerPage: 1}},
		},
		Tenant: "default",
	}
}

// TestEveryFieldIsHashed changes each field of a namespace in turn, found by
// reflection: a field that is added and not walked fails here.
func TestEveryFieldIsHashed(t *testing.T) {
	want := example().ID()
	seen := map[NamespaceID]string{want: "nothing"}
	paths := fieldPaths(reflect.ValueOf(example()).Elem(), "")
	for _, p := range paths {
		n := example()
		v := reflect.ValueOf(n).Elem()
		change(t, follow(v, p), p)
		id := n.ID()
		if other, dup := seen[id]; dup {
			t.Errorf("a change of %s gives the id of a change of %s", p, other)
		}
		seen[id] = p
		back, err := DecodeNamespace(EncodeNamespace(n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, back); diff != "" {
			t.Errorf("a change of %s is not decoded (-want +got):\n%s", p, diff)
		}
		inLayout := strings.HasPrefix(p, "Layout.")
		if diff := DiffLayouts(&example().Layout, &n.Layout); (diff != "") != inLayout {
			t.Errorf("a change of %s is told as %q", p, diff)
		}
	}
	if len(paths) < 17+5+2 {
		t.Errorf("only %d fields found: %q", len(paths), paths)
	}
}

// fieldPaths lists the fields below a struct: leaves, lists, and the fields of
// the first element of a list.
func fieldPaths(v reflect.Value, prefix string) []string {
	var paths []string
	for i := range v.NumField() {
		f, path := v.Field(i), prefix+v.Type().Field(i).Name
		switch {
		case f.Kind() == reflect.Struct:
			paths = append(paths, fieldPaths(f, path+".")...)
		case f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct:
			paths = append(paths, path)
			paths = append(paths, fieldPaths(f.Index(0), path+".0.")...)
		default:
			paths = append(paths, path)
		}
	}
	return paths
}

func follow(v reflect.Value, path string) reflect.Value {
	for _, name := range strings.Split(path, ".") {
		if v.Kind() == reflect.Slice {
			v = v.Index(0)
			continue
		}
		v = v.FieldByName(name)
	}
	return v
}

func change(t *testing.T, v reflect.Value, path string) {
	t.Helper()
	switch v.Kind() {
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(v.Uint() + 1)
	case reflect.Slice:
		v.Set(reflect.AppendSlice(v.Slice(0, v.Len()), v.Slice(0, 1)))
	default:
		t.Fatalf("%s is a %s: say here how it is changed", path, v.Kind())
	}
}

// Two namespaces whose concatenated fields are the same are still two.
func TestFieldsDoNotRunIntoEachOther(t *testing.T) {
	a, b := example(), example()
	a.Layout.Model, a.Layout.Revision = "ab", "c"
	b.Layout.Model, b.Layout.Revision = "a", "bc"
	if a.ID() == b.ID() {
		t.Error("model and revision run into each other")
	}
	a, b = example(), example()
	a.Layout.Parts[0].Ranks, a.Layout.Parts[1].Ranks = []uint32{0, 1}, nil
	b.Layout.Parts[0].Ranks, b.Layout.Parts[1].Ranks = []uint32{0}, []uint32{1}
	if a.ID() == b.ID() {
		t.Error("ranks run into each other")
	}
}

type namespaceVectors struct {
	About   string            `json:"about"`
	Vectors []namespaceVector `json:"vectors"`
	Names   []nameVector      `json:"names"`
}

type nameVector struct {
	EngineHash string `json:"engine_hash"`
	Block      string `json:"block_name"`
}

type namespaceVector struct {
	Name      string    `json:"name"`
	Namespace Namespace `json:"namespace"`
	Encoded   string    `json:"encoded_hex"`
	ID        string    `json:"id"`
	Block     string    `json:"block_name"`
	Part      int       `json:"part"`
	Key       string    `json:"storage_key"`
}

func TestNamespaceGolden(t *testing.T) {
	const path = "testdata/namespace_vectors.json"
	got := namespaceVectors{About: "Namespace ids and storage keys. encoded_hex is the canonical encoding; id is BLAKE3-256(\"kvtier namespace\" then encoding); storage_key is BLAKE3-256(\"kvtier page key.\" then id, block name, part as 32 bits little-endian). A block name is the engine's hash if that has 32 bytes, else BLAKE3-256(length as 32 bits little-endian, then hash)."}
	for _, n := range []int{16, 31, 32, 33, 64} {
		name, err := NameFromEngineHash(pattern(n))
		if err != nil {
			t.Fatal(err)
		}
		got.Names = append(got.Names, nameVector{hex.EncodeToString(pattern(n)), name.String()})
	}
	window := plain()
	window.Layout.Attention, window.Layout.Parts[0].LastBlocks = "window", 128
	for i, n := range []*Namespace{example(), plain(), window} {
		name := BlockName{0: byte(i), 31: 0xff}
		id := n.ID()
		got.Vectors = append(got.Vectors, namespaceVector{
			Name: []string{"every field", "only what is needed", "sliding window"}[i], Namespace: *n,
			Encoded: hex.EncodeToString(EncodeNamespace(n)), ID: id.String(),
			Block: name.String(), Part: i, Key: StorageKey(id, name, i).String(),
		})
	}
	if *update {
		writeGolden(t, path, got)
	}
	var want namespaceVectors
	readGolden(t, path, &want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ids changed: stored pages would be lost (-want +got):\n%s", diff)
	}
}

func TestStorageKeysDiffer(t *testing.T) {
	ns, name := example().ID(), BlockName{1}
	seen := map[Key]bool{}
	for part := range MaxParts {
		seen[StorageKey(ns, name, part)] = true
	}
	seen[StorageKey(plain().ID(), name, 0)] = true
	seen[StorageKey(ns, BlockName{2}, 0)] = true
	if len(seen) != MaxParts+2 {
		t.Errorf("%d keys of %d", len(seen), MaxParts+2)
	}
	if got := testing.AllocsPerRun(100, func() { StorageKey(ns, name, 3) }); got != 0 {
		t.Errorf("%v allocations, want 0", got)
	}
}

func TestNameFromEngineHash(t *testing.T) {
	h := pattern(65)
	seen := map[BlockName]int{}
	for n := range 66 {
		name, err := NameFromEngineHash(h[:n])
		if ok := n >= 16 && n <= 64; ok != (err == nil) || !ok && !errors.Is(err, ErrInvalid) {
			t.Errorf("%d bytes: %v", n, err)
		}
		if n == 32 && name != BlockName(h[:32]) {
			t.Error("32 bytes are changed")
		}
		if err == nil {
			seen[name]++
		}
	}
	if len(seen) != 49 {
		t.Errorf("%d names of 49 hashes", len(seen))
	}
	// A shorter hash is not the longer one with zeros behind.
	a, _ := NameFromEngineHash(make([]byte, 16))
	b, _ := NameFromEngineHash(make([]byte, 17))
	if a == b {
		t.Error("the length is not hashed")
	}
}

func TestValidate(t *testing.T) {
	long := strings.Repeat("x", MaxNameBytes+1)
	for _, c := range []struct {
		change func(*Layout)
		field  string // in the error; empty: valid
	}{
		{func(*Layout) {}, ""},
		{func(l *Layout) { l.Revision, l.DType, l.ISA, l.HashSeed = "", "", "", "" }, ""},
		{func(l *Layout) { l.Model = "" }, "model"},
		{func(l *Layout) { l.Model = long }, "model"},
		{func(l *Layout) { l.Model = "\xff" }, "model"},
		{func(l *Layout) { l.Revision = long }, "revision"},
		{func(l *Layout) { l.KVDType = "" }, "kv_dtype"},
		{func(l *Layout) { l.Attention = "" }, "attention"},
		{func(l *Layout) { l.Attention = "GQA" }, "attention"},
		{func(l *Layout) { l.Layers = 0 }, "layers"},
		{func(l *Layout) { l.KVHeads, l.HeadDim = 0, 0 }, ""},
		{func(l *Layout) { l.EngineLayout = "" }, "engine_layout"},
		{func(l *Layout) { l.TP = 0 }, "tensor_parallel"},
		{func(l *Layout) { l.PP = 0 }, "pipeline_parallel"},
		{func(l *Layout) { l.CP = 0 }, "context_parallel"},
		{func(l *Layout) { l.TP, l.PP, l.CP = 1<<31, 1<<31, 1<<31 }, "tensor_parallel"},
		{func(l *Layout) { l.HashAlgorithm = "" }, "hash_algorithm"},
		{func(l *Layout) { l.BlockTokens = 0 }, "block_tokens"},
		{func(l *Layout) { l.Parts = nil }, "parts"},
		{func(l *Layout) { l.Parts = manyParts(MaxParts) }, ""},
		{func(l *Layout) { l.Parts = manyParts(MaxParts + 1) }, "65 parts"},
		{func(l *Layout) { l.Parts[1].Name = "" }, "parts[1].name"},
		{func(l *Layout) { l.Parts[2].Name = "kv.0" }, "parts[2].name"},
		{func(l *Layout) { l.Parts[0].PageBytes = 0 }, "parts[0].page_bytes"},
		{func(l *Layout) { l.Parts[0].PageBytes = MaxPageBytes }, ""},
		{func(l *Layout) { l.Parts[0].PageBytes = MaxPageBytes + 1 }, "parts[0].page_bytes"},
		{func(l *Layout) { l.Parts[0].PageBytes = 1 << 40 }, "parts[0].page_bytes"},
		{func(l *Layout) { l.Parts[2].BlocksPerPage = 0 }, "parts[2].blocks_per_page"},
		{func(l *Layout) { l.Parts[2].BlocksPerPage = 1 << 17 }, "blocks_per_page"},
		{func(l *Layout) { l.Parts[0].BlocksPerPage, l.Parts[1].BlocksPerPage = 257, 256 }, "blocks_per_page"},
		{func(l *Layout) { l.Parts[0].Ranks = []uint32{2} }, "parts[0].ranks"},
		{func(l *Layout) { l.Parts[0].Ranks = []uint32{1, 0} }, "parts[0].ranks"},
		{func(l *Layout) { l.Parts[0].Ranks = []uint32{1, 1} }, "parts[0].ranks"},
	} {
		l := &example().Layout
		c.change(l)
		err := l.Validate()
		if c.field == "" && err != nil {
			t.Errorf("%+v: %v", l, err)
		}
		if c.field != "" && (!errors.Is(err, ErrBadLayout) || !strings.Contains(err.Error(), c.field)) {
			t.Errorf("error %v, want ErrBadLayout naming %s", err, c.field)
		}
	}
	for _, change := range []func(*Namespace){
		func(n *Namespace) { n.Tenant = "" },
		func(n *Namespace) { n.Tenant = strings.Repeat("x", MaxTenantBytes+1) },
		func(n *Namespace) { n.Tenant = "\xff" },
		func(n *Namespace) { n.Salt = make([]byte, MaxSaltBytes+1) },
	} {
		n := example()
		change(n)
		if err := n.Validate(); !errors.Is(err, ErrInvalid) {
			t.Errorf("error %v, want ErrInvalid", err)
		}
	}
	n := plain()
	n.Layout.Model = ""
	if err := n.Validate(); !errors.Is(err, ErrBadLayout) {
		t.Errorf("error %v, want ErrBadLayout", err)
	}
}

func manyParts(n int) []Part {
	parts := make([]Part, n)
	for i := range parts {
		parts[i] = Part{Name: fmt.Sprint(i), PageBytes: 4096, BlocksPerPage: 1}
	}
	return parts
}

func TestDiffLayouts(t *testing.T) {
	a, b := &example().Layout, &example().Layout
	b.HeadDim, b.BlockTokens = 64, 32
	if got, want := DiffLayouts(a, b), "head_dim: 128 and 64"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	b = &example().Layout
	b.Parts = b.Parts[:2]
	if got, want := DiffLayouts(a, b), "number of parts: 3 and 2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	b = &example().Layout
	b.Parts[0].Ranks = []uint32{0, 1}
	if got, want := DiffLayouts(a, b), "number of parts[0].ranks: 1 and 2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestDecodeNamespaceRefuses(t *testing.T) {
	good := EncodeNamespace(example())
	for n := range good {
		if _, err := DecodeNamespace(good[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
	if _, err := DecodeNamespace(append(good[:len(good):len(good)], 0)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a byte more: %v", err)
	}
	next := bytes.Clone(good)
	next[0]++
	if _, err := DecodeNamespace(next); !errors.Is(err, ErrIncompatible) {
		t.Errorf("the next version: %v", err)
	}
	// A length that is not there must not be allocated.
	i := bytes.Index(good, []byte("kv.0")) - 8
	huge := bytes.Clone(good)
	copy(huge[i:], "\xff\xff\xff\xff")
	if _, err := DecodeNamespace(huge); !errors.Is(err, ErrCorrupt) {
		t.Errorf("4 G parts: %v", err)
	}
}

func FuzzDecodeNamespace(f *testing.F) {
	f.Add(EncodeNamespace(example()))
	f.Add(EncodeNamespace(plain()))
	f.Add(EncodeNamespace(&Namespace{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeNamespace(b)
		if err != nil {
			return
		}
		if again := EncodeNamespace(n); !bytes.Equal(again, b) {
			t.Fatalf("%x decodes and encodes to %x", b, again)
		}
		n.Layout.PartsOfRanks([]uint32{1})
		if err := n.Validate(); err == nil && n.Layout.step(n.Layout.AllParts()) > MaxBlocksPerPage {
			t.Fatal("a layout without usable prefixes is valid")
		}
	})
}

func TestPartsOfRanks(t *testing.T) {
	l := &example().Layout
	for _, c := range []struct {
		ranks []uint32
		want  PartSet
	}{{nil, 0b111}, {[]uint32{0}, 0b101}, {[]uint32{1}, 0b110}, {[]uint32{0, 1}, 0b111}, {[]uint32{7}, 0b100}} {
		if got := l.PartsOfRanks(c.ranks); got != c.want {
			t.Errorf("parts of ranks %v: %b, want %b", c.ranks, got, c.want)
		}
	}
	if bits.OnesCount64(uint64(AllParts(MaxParts))) != MaxParts || AllParts(0) != 0 {
		t.Error("AllParts at its bounds")
	}
}

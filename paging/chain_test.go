package paging

import (
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"
)

// hashVector is an entry of testdata/hash_vectors.json.
type hashVector struct {
	Name     string
	Function string
	Algo     string
	Seed     json.RawMessage

	BlockSize   int      `json:"block_size"`
	PageSize    int      `json:"page_size"`
	Tokens      []uint32 `json:"tokens"`
	ExtraKeys   [][]any  `json:"extra_keys_per_block"`
	BlockHash   string   `json:"block_hash_hex"`
	GroupIndex  uint32   `json:"group_index"`
	Input       string   `json:"input_hex"`
	Expected    []string `json:"expected_hex"`
	FirstCBOR   string   `json:"first_block_cbor_hex"`
	EventU64    []string `json:"expected_event_u64"`
	EventI64    []string `json:"expected_event_i64"`
	ExpectedU64 []string `json:"expected_u64"`
	LocalU64    []string `json:"expected_local_u64"`
}

func (v *hashVector) text(t *testing.T) string {
	var s string
	if err := json.Unmarshal(v.Seed, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// blocks are the tokens in runs of n; with partial also the last, shorter one.
func (v *hashVector) blocks(n int, partial bool) [][]uint32 {
	var all [][]uint32
	for rest := v.Tokens; len(rest) > 0; {
		m := min(n, len(rest))
		if m == n || partial {
			all = append(all, rest[:m])
		}
		rest = rest[m:]
	}
	return all
}

func (v *hashVector) extra(t *testing.T, block int) []ExtraKey {
	if block >= len(v.ExtraKeys) {
		return nil
	}
	var keys []ExtraKey
	for _, k := range v.ExtraKeys[block] {
		switch k := k.(type) {
		case string:
			keys = append(keys, ExtraText(k))
		case []any:
			keys = append(keys, ExtraItem(k[0].(string), int64(k[1].(float64))))
		default:
			t.Fatalf("extra key %v", k)
		}
	}
	return keys
}

func (v *hashVector) check(t *testing.T, what string, want []string, got []string) {
	t.Helper()
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%s of %s:\n got %v\nwant %v", what, v.Name, got, want)
	}
}

func TestHashVectors(t *testing.T) {
	var file struct{ Vectors []hashVector }
	readGolden(t, "testdata/hash_vectors.json", &file)
	functions := map[string]func(*testing.T, *hashVector){
		"vllm_none_hash": testVLLMNone, "vllm_block_chain": testVLLMChain, "vllm_group_key": testVLLMGroup,
		"sglang_page_chain": testSGLang, "rfc1403_rolling_hash": testRFC1403, "xxh3_128": testXXH3,
		"sglang_file_backend_suffix": nil, // a file name, no hash
	}
	seen := map[string]int{}
	for i := range file.Vectors {
		v := &file.Vectors[i]
		f, known := functions[v.Function]
		if !known {
			t.Errorf("%s: function %s is not tested", v.Name, v.Function)
		}
		if seen[v.Function]++; f != nil {
			f(t, v)
		}
	}
	for name := range functions {
		if seen[name] == 0 {
			t.Errorf("no vector of %s", name)
		}
	}
}

func testVLLMNone(t *testing.T, v *hashVector) {
	c, err := NewVLLMChain("vllm/"+v.Algo, v.text(t))
	if err != nil {
		t.Fatal(err)
	}
	v.check(t, "hash", v.Expected, []string{hex.EncodeToString(c.Digest())})
}

func testVLLMChain(t *testing.T, v *hashVector) {
	c, err := NewVLLMChain("vllm/"+v.Algo, v.text(t))
	if err != nil {
		t.Fatal(err)
	}
	var hashes, events []string
	for i, tokens := range v.blocks(v.BlockSize, false) {
		digest := c.Next(tokens, v.extra(t, i)...)
		if i == 0 {
			v.check(t, "CBOR", []string{v.FirstCBOR}, []string{hex.EncodeToString(c.cbor)})
		}
		hashes = append(hashes, hex.EncodeToString(digest))
		events = append(events, strconv.FormatUint(VLLMEventHash(digest), 10))
		if name, err := NameFromEngineHash(digest); err != nil || len(digest) == 32 != (name == BlockName(pad(digest))) {
			t.Errorf("%s: block name %s, %v", v.Name, name, err)
		}
	}
	v.check(t, "hashes", v.Expected, hashes)
	v.check(t, "events", v.EventU64, events)
}

func pad(b []byte) []byte { return append(append([]byte(nil), b...), make([]byte, 32)...)[:32] }

func testVLLMGroup(t *testing.T, v *hashVector) {
	digest, err := hex.DecodeString(v.BlockHash)
	if err != nil {
		t.Fatal(err)
	}
	v.check(t, "key", v.Expected, []string{hex.EncodeToString(VLLMGroupKey(digest, v.GroupIndex))})
}

func testSGLang(t *testing.T, v *hashVector) {
	var c SGLangChain
	var hashes, events []string
	for _, tokens := range v.blocks(v.PageSize, true) {
		h := c.Next(tokens)
		hashes = append(hashes, hex.EncodeToString(h[:]))
		events = append(events, strconv.FormatInt(SGLangEventHash(h), 10))
	}
	v.check(t, "hashes", v.Expected, hashes)
	v.check(t, "events", v.EventI64, events)
}

func testRFC1403(t *testing.T, v *hashVector) {
	seed, err := strconv.ParseUint(string(v.Seed), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	c := NewRFC1403Chain(seed)
	var locals, sequences []string
	for _, tokens := range v.blocks(v.BlockSize, false) {
		l, s := c.Next(tokens)
		locals = append(locals, strconv.FormatUint(l, 10))
		sequences = append(sequences, strconv.FormatUint(s, 10))
	}
	v.check(t, "block hashes", v.LocalU64, locals)
	v.check(t, "sequence hashes", v.ExpectedU64, sequences)
}

func testXXH3(t *testing.T, v *hashVector) {
	b, err := hex.DecodeString(v.Input)
	if err != nil {
		t.Fatal(err)
	}
	sum := xxh3.Hash128(b).Bytes()
	v.check(t, "hash", v.Expected, []string{hex.EncodeToString(sum[:])})
}

// Extra keys that no vector has: integers at the borders of their CBOR lengths,
// and the digest of prompt embeddings.
func TestExtraKeys(t *testing.T) {
	for _, c := range []struct {
		key  ExtraKey
		want string
	}{
		{ExtraItem("a", 23), "82616117"},
		{ExtraItem("a", 24), "8261611818"},
		{ExtraItem("a", 255), "82616118ff"},
		{ExtraItem("a", 256), "826161190100"},
		{ExtraItem("a", 65536), "8261611a00010000"},
		{ExtraItem("a", 1<<32), "8261611b0000000100000000"},
		{ExtraItem("a", -1), "82616120"},
		{ExtraItem("a", -1<<63), "8261613b7fffffffffffffff"},
		{ExtraText(""), "60"},
		{ExtraText("ü"), "62c3bc"},
		{ExtraDigest([]byte{1, 2}), "420102"},
	} {
		if got := hex.EncodeToString(c.key.cbor); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
	if _, err := NewVLLMChain("vllm/sha256", ""); err == nil {
		t.Error("the pickle-based hash of vLLM is taken")
	}
}

func TestChainsAllocateNothing(t *testing.T) {
	tokens := make([]uint32, 16)
	vllm, _ := NewVLLMChain(HashVLLMSHA256, VLLMDefaultSeed)
	var sglang SGLangChain
	rfc := NewRFC1403Chain(0)
	next := func() { vllm.Next(tokens); sglang.Next(tokens); rfc.Next(tokens) }
	next()
	if got := testing.AllocsPerRun(100, next); got != 0 {
		t.Errorf("%v allocations per block, want 0", got)
	}
}

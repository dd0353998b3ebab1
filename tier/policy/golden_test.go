package policy

import (
	"compress/gzip"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/paging/check"
)

// traceData is a file of bench/testdata, unpacked.
func traceData(tb testing.TB, name string) []byte {
	tb.Helper()
	f, err := os.Open(filepath.Join("..", "..", "bench", "testdata", name))
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	var r io.Reader = f
	if strings.HasSuffix(name, ".gz") {
		if r, err = gzip.NewReader(f); err != nil {
			tb.Fatal(err)
		}
	}
	data, err := io.ReadAll(r)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

func loadTrace(tb testing.TB, name string) Trace {
	tb.Helper()
	if tr, ok := traces[name]; ok {
		return tr
	}
	reqs, err := ParseTrace(traceData(tb, name))
	if err != nil {
		tb.Fatal(err)
	}
	traces[name] = Trace{Requests: reqs, BlockTokens: 512}
	return traces[name]
}

// traces are those that were loaded; the requests are shared. Tests that load
// one do so before they run in parallel.
var traces = map[string]Trace{}

const conversation = "conversation_trace.jsonl.gz"

// rates is an entry of golden.json; what it leaves out is not compared.
type rates struct {
	Requests *int64
	Blocks   *int64
	Evicted  *int64
	Hit      *float64
	Any      *float64
	Token    *float64 `json:"token_hit"`
	Subblock *float64 `json:"token_hit_subblock"`
}

func (want rates) compare(t *testing.T, r Result) {
	t.Helper()
	compare(t, "requests", want.Requests, r.Requests)
	compare(t, "blocks", want.Blocks, r.Blocks)
	compare(t, "evicted", want.Evicted, r.Evicted)
	compare(t, "hit", want.Hit, Rate(r.Hits, r.Blocks))
	compare(t, "any", want.Any, Rate(r.Any, r.Blocks))
	compare(t, "token_hit", want.Token, Rate(r.HitTokens, r.InputTokens))
	compare(t, "token_hit_subblock", want.Subblock, Rate(r.SubblockTokens, r.InputTokens))
}

func compare[T comparable](t *testing.T, name string, want *T, got T) {
	t.Helper()
	if want != nil && *want != got {
		t.Errorf("%s = %v, want %v", name, got, *want)
	}
}

// TestGolden compares every entry of golden.json exactly. Checked builds are ten
// times slower and leave out the long trace: nothing depends on it there.
func TestGolden(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	var short struct {
		Conversation shortTrace `json:"conversation_500"`
		Synthetic    shortTrace `json:"synthetic_500"`
	}
	var long struct {
		Trace map[string]json.RawMessage `json:"conversation_trace"`
	}
	if err := json.Unmarshal(data, &short); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &long); err != nil {
		t.Fatal(err)
	}
	entries := golden(t, "conversation_500.jsonl", short.Conversation) + golden(t, "synthetic_500.jsonl", short.Synthetic)
	whole := shortTrace{BlockTokens: 512, Capacity: map[string]map[string]rates{}}
	for c, raw := range long.Trace {
		if c == "infinite" {
			if err := json.Unmarshal(raw, &whole.Infinite); err != nil {
				t.Fatal(err)
			}
			continue
		}
		of := map[string]rates{}
		if err := json.Unmarshal(raw, &of); err != nil {
			t.Fatal(err)
		}
		whole.Capacity[c] = of
	}
	if check.Enabled {
		whole.Capacity = nil
	}
	entries += golden(t, conversation, whole)
	if want := 2*(1+2*9) + 1 + 7*len(whole.Capacity); entries != want {
		t.Errorf("compared %d entries, want %d", entries, want)
	}
}

type shortTrace struct {
	BlockTokens int64 `json:"block_tokens"`
	Infinite    rates
	Capacity    map[string]map[string]rates
}

// golden compares the entries of one trace and counts them.
func golden(t *testing.T, file string, g shortTrace) int {
	tr := loadTrace(t, file)
	tr.BlockTokens = g.BlockTokens
	t.Run(file+"/infinite", func(t *testing.T) {
		t.Parallel()
		r, err := Replay("lru", 1<<40, tr)
		if err != nil {
			t.Fatal(err)
		}
		g.Infinite.compare(t, r)
	})
	entries := 1
	for c, of := range g.Capacity {
		capacity, err := strconv.ParseInt(c, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range of {
			entries++
			t.Run(file+"/"+c+"/"+name, func(t *testing.T) {
				t.Parallel()
				if name == "belady" {
					want.compare(t, Optimal(capacity, tr))
					return
				}
				r, err := Replay(name, capacity, tr)
				if err != nil {
					t.Fatal(err)
				}
				want.compare(t, r)
			})
		}
	}
	return entries
}

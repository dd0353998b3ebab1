package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/paging/check"
)

// TestDefaultOnConversation holds the default policy to its goals, and to what
// it reached less .002, so that a change that loses something is seen.
func TestDefaultOnConversation(t *testing.T) {
	tr := loadTrace(t, conversation)
	want := map[int64]float64{1000: .0803, 3000: .1311, 5859: .1890, 10000: .2370, 30000: .3347, 50000: .3565, 100000: .3640}
	if check.Enabled {
		want = map[int64]float64{5859: .1890}
	}
	for capacity, want := range want {
		t.Run(fmt.Sprint(capacity), func(t *testing.T) {
			t.Parallel()
			got := hitRate(t, "default", capacity, tr)
			lru := hitRate(t, "lru_rev", capacity, tr)
			t.Logf("default %.4f, lru_rev %.4f", got, lru)
			if got < want-.002 {
				t.Errorf("hit rate %.4f, want %.4f", got, want)
			}
			if got < lru-.002 {
				t.Errorf("hit rate %.4f, lru_rev has %.4f", got, lru)
			}
		})
	}
}

func hitRate(t *testing.T, name string, capacity int64, tr Trace) float64 {
	t.Helper()
	r, err := Replay(name, capacity, tr)
	if err != nil {
		t.Fatal(err)
	}
	return r.HitRate()
}

// TestDefaultOnShortTraces: where there is little to learn from, the default
// policy is about as good as LRU.
func TestDefaultOnShortTraces(t *testing.T) {
	for _, file := range []string{"conversation_500.jsonl", "synthetic_500.jsonl"} {
		tr := loadTrace(t, file)
		for _, capacity := range []int64{100, 300, 500, 1000, 2000, 4000, 8000} {
			got, lru := hitRate(t, "default", capacity, tr), hitRate(t, "lru_rev", capacity, tr)
			if got < lru-.002 {
				t.Errorf("%s, %d blocks: hit rate %.4f, lru_rev has %.4f", file, capacity, got, lru)
			}
		}
	}
}

// TestTimestampsDoNotMatter: a trace without a useful clock gives the same.
func TestTimestampsDoNotMatter(t *testing.T) {
	tr := loadTrace(t, conversation)
	want, err := Replay("default", 3000, tr)
	if err != nil {
		t.Fatal(err)
	}
	tr.Requests = slices.Clone(tr.Requests)
	for i := range tr.Requests {
		tr.Requests[i].Timestamp = 0
	}
	got, err := Replay("default", 3000, tr)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestParseTrace(t *testing.T) {
	const text = `{"timestamp": 5, "input_length": 1000, "output_length": 0, "hash_ids": [7, 18446744073709551615]}

{"timestamp": 3, "input_length": 512, "output_length": 2, "hash_ids": [900]}
{"timestamp": 5, "input_length": 0, "output_length": 2, "hash_ids": []}
`
	reqs, err := ParseTrace([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var order []int64
	for _, r := range reqs {
		order = append(order, r.InputTokens)
	}
	if len(order) != 3 || order[0] != 512 || order[1] != 1000 || order[2] != 0 {
		t.Errorf("input lengths in order of time: %v, want 512 1000 0", order)
	}
	for _, bad := range []string{"{}\n{\"timestamp\": \"x\"}", "\n{\"input_length\": -1}"} {
		if _, err := ParseTrace([]byte(bad)); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("ParseTrace(%q) = %v, want an error of line 2", bad, err)
		}
	}
}

// TestReplayByHand checks the counts of a replay against a few requests worked
// out by hand.
func TestReplayByHand(t *testing.T) {
	tr := Trace{BlockTokens: 100, Requests: []Request{
		{InputTokens: 250, Blocks: []uint64{1, 2, 3}},
		{InputTokens: 400, Blocks: []uint64{1, 2, 4, 5}},
		{InputTokens: 250, Blocks: []uint64{1, 2, 3}},
		{},
	}}
	r, err := Replay("lru_rev", 5, tr)
	if err != nil {
		t.Fatal(err)
	}
	want := Result{Requests: 4, Blocks: 10, Hits: 5, Any: 5, InputTokens: 900, HitTokens: 200 + 250, SubblockTokens: 250 + 250}
	if r != want {
		t.Errorf("5 blocks: %+v, want %+v", r, want)
	}
	tr.FullOnly = true
	if r, err = Replay("lru", 3, tr); err != nil {
		t.Fatal(err)
	}
	want = Result{Requests: 4, Blocks: 8, Hits: 2, Any: 3, InputTokens: 900, HitTokens: 200, SubblockTokens: 250, Evicted: 3}
	// 1 2, then 1 2 4 5 evicts 1; 2 is there without 1; 1 evicts 2, 2 evicts 4.
	if r != want {
		t.Errorf("3 blocks, full blocks only: %+v, want %+v", r, want)
	}
	if _, err := Replay("clock", 3, tr); err == nil {
		t.Error("unknown policy: no error")
	}
	if _, err := Replay("lru", 0, tr); err == nil {
		t.Error("capacity 0: no error")
	}
	tr.BlockTokens = 0
	if _, err := Replay("lru", 3, tr); err == nil {
		t.Error("blocks of 0 tokens: no error")
	}
}

func TestRate(t *testing.T) {
	for _, c := range []struct {
		part, whole int64
		want        float64
	}{{0, 0, 0}, {1, 3, .3333}, {2, 3, .6667}, {1, 20000, 0}, {3, 20000, .0002}, {5, 20000, .0002}, {1, 1, 1}} {
		if got := Rate(c.part, c.whole); got != c.want {
			t.Errorf("Rate(%d, %d) = %v, want %v", c.part, c.whole, got, c.want)
		}
	}
}

package bench

import "testing"

func TestEmbeddedTraceIsTheFile(t *testing.T) {
	embedded, err := OpenTrace(ShortTrace)
	if err != nil {
		t.Fatal(err)
	}
	file, err := OpenTrace("testdata/conversation_500.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if len(embedded.Requests) != 500 || len(file.Requests) != 500 {
		t.Errorf("%d and %d requests, want 500", len(embedded.Requests), len(file.Requests))
	}
	best, err := embedded.Best(500, DefaultBlockTokens)
	if err != nil || best.HitRate() != .1612 || best.TokenHitRate() != .1639 {
		t.Errorf("the most to hit is %v and %v in tokens, %v", best.HitRate(), best.TokenHitRate(), err)
	}
}

func TestCompressedTrace(t *testing.T) {
	for _, name := range []string{FullTrace, "testdata/conversation_trace.jsonl.gz"} {
		trace, err := OpenTrace(name)
		if err != nil || len(trace.Requests) != 12031 {
			t.Fatalf("%s: %v", name, err)
		}
	}
}

func TestTracesThatCannotBeRead(t *testing.T) {
	for _, file := range []string{"testdata/absent", "testdata", "testdata/README.md", "/dev/null"} {
		if _, err := OpenTrace(file); err == nil {
			t.Errorf("%s: no error", file)
		}
	}
}

package bench

import (
	"compress/gzip"
	"embed"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvtier/kvtier/tier/policy"
)

// embedded holds the conversation trace of kvcache-ai/Mooncake and its first 500
// requests; testdata has the licence.
//
//go:embed testdata/conversation_500.jsonl testdata/conversation_trace.jsonl.gz
var embedded embed.FS

// Names of traces that are part of the program.
const (
	ShortTrace = "conversation_500" // the first 500 requests of FullTrace
	FullTrace  = "conversation"     // 12,031 requests, 288,500 blocks
)

// Trace is a list of requests in the order in which they are played.
type Trace struct {
	Name     string
	Requests []policy.Request
}

// OpenTrace reads a trace: ShortTrace, FullTrace or a file, decompressed if its
// name ends in .gz.
func OpenTrace(name string) (*Trace, error) {
	var f fs.File
	var err error
	file := name
	switch name {
	case ShortTrace:
		f, err = embedded.Open("testdata/conversation_500.jsonl")
	case FullTrace:
		file = "testdata/conversation_trace.jsonl.gz"
		f, err = embedded.Open(file)
	default:
		f, err = os.Open(name)
	}
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	requests, err := readTrace(f, strings.HasSuffix(file, ".gz"))
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", name, err)
	}
	if len(requests) == 0 {
		return nil, fmt.Errorf("trace %s has no request", name)
	}
	return &Trace{Name: filepath.Base(name), Requests: requests}, nil
}

func readTrace(r io.Reader, compressed bool) ([]policy.Request, error) {
	if compressed {
		var err error
		if r, err = gzip.NewReader(r); err != nil {
			return nil, err
		}
	}
	data, err := io.ReadAll(io.LimitReader(r, maxTraceBytes))
	if err != nil {
		return nil, err
	}
	return policy.ParseTrace(data)
}

// maxTraceBytes bounds a trace: the published ones have some tens of MiB.
const maxTraceBytes = 1 << 30

// unlimited is a cache that evicts nothing.
const unlimited = math.MaxInt64 / 2

// Best is the most that any cache could hit in the first n requests.
func (t *Trace) Best(n, blockTokens int) (policy.Result, error) {
	return policy.Replay("lru", unlimited, policy.Trace{Requests: t.Requests[:n], BlockTokens: int64(blockTokens)})
}

// PolicyConfig describes "bench policy".
type PolicyConfig struct {
	Trace       string // as for OpenTrace
	Policy      string
	Capacity    int64 // blocks
	BlockTokens int64
}

// Policy replays a trace through an eviction policy alone.
func Policy(cfg PolicyConfig) (*PolicyReport, error) {
	trace, err := OpenTrace(cfg.Trace)
	if err != nil {
		return nil, err
	}
	workload := policy.Trace{Requests: trace.Requests, BlockTokens: cfg.BlockTokens}
	res, err := policy.Replay(cfg.Policy, cfg.Capacity, workload)
	if err != nil {
		return nil, err
	}
	return &PolicyReport{
		Trace: trace.Name, Policy: cfg.Policy, Capacity: cfg.Capacity, BlockTokens: cfg.BlockTokens,
		Requests: res.Requests, Blocks: res.Blocks, Hit: res.HitRate(), TokenHit: res.TokenHitRate(), Evicted: res.Evicted,
		BestHit: policy.Optimal(cfg.Capacity, workload).HitRate(),
	}, nil
}

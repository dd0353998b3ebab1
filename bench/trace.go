package bench

import (
	"compress/gzip"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvtier/kvtier/tier/policy"
)

// embedded is the first 500 requests of the conversation trace of
// kvcache-ai/Mooncake; testdata holds its licence.
//
//go:embed testdata/conversation_500.jsonl
var embedded []byte

// Trace is a list of requests in the order in which they are played.
type Trace struct {
	Name     string
	Requests []policy.Request
}

// OpenTrace reads a trace file. Empty: the embedded one.
func OpenTrace(file string) (*Trace, error) {
	data, name := embedded, "conversation_500"
	if file != "" {
		var err error
		if data, err = readTrace(file); err != nil {
			return nil, fmt.Errorf("trace: %w", err)
		}
		name = filepath.Base(file)
	}
	requests, err := policy.ParseTrace(data)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", name, err)
	}
	if len(requests) == 0 {
		return nil, fmt.Errorf("trace %s has no request", name)
	}
	return &Trace{Name: name, Requests: requests}, nil
}

// readTrace reads a file, decompressed if its name ends in .gz.
func readTrace(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil || !strings.HasSuffix(file, ".gz") {
		return readAll(f, err)
	}
	defer f.Close()
	return readAll(gzip.NewReader(f))
}

// maxTraceBytes bounds a trace: the published ones have some tens of MiB.
const maxTraceBytes = 1 << 30

func readAll[R io.ReadCloser](r R, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxTraceBytes))
	return data, errors.Join(err, r.Close())
}

// unlimited is a cache that evicts nothing.
const unlimited = math.MaxInt64 / 2

// Best is the most that any cache could hit in the first n requests.
func (t *Trace) Best(n, blockTokens int) (policy.Result, error) {
	return policy.Replay("lru", unlimited, policy.Trace{Requests: t.Requests[:n], BlockTokens: int64(blockTokens)})
}

// PolicyConfig describes "bench policy".
type PolicyConfig struct {
	Trace       string // file; empty: the embedded one
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
	res, err := policy.Replay(cfg.Policy, cfg.Capacity, policy.Trace{Requests: trace.Requests, BlockTokens: cfg.BlockTokens})
	if err != nil {
		return nil, err
	}
	return &PolicyReport{
		Trace: trace.Name, Policy: cfg.Policy, Capacity: cfg.Capacity, BlockTokens: cfg.BlockTokens,
		Requests: res.Requests, Blocks: res.Blocks, Hit: res.HitRate(), TokenHit: res.TokenHitRate(), Evicted: res.Evicted,
	}, nil
}

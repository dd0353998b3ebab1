package bench

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// maxErrors bounds the error texts that a report carries.
const maxErrors = 5

// tally counts what the clients of a run saw. Safe for concurrent use.
type tally struct {
	served, unavailable, failed    atomic.Int64
	blocks, tokens                 atomic.Int64
	hitBlocks, hitTokens           atomic.Int64
	hitTier                        [5]atomic.Int64 // by client.Tier
	wrong, lost, phantom, corrupt  atomic.Int64
	committed, durable, refused    atomic.Int64
	inPlace, staged, read, written atomic.Int64 // bytes
	fetch, commit                  Latency
	decoded, wrongDecodes          atomic.Int64 // requests decoded with attention in place

	mu     sync.Mutex
	first  []string
	relErr float64 // the worst of the decodes
}

// worst keeps the greatest error of a decode; NaN counts as more than any.
func (t *tally) worst(rel float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !(rel <= t.relErr) {
		t.relErr = rel
	}
}

// note keeps the text of an error, if there is room.
func (t *tally) note(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.first) < maxErrors {
		t.first = append(t.first, fmt.Sprintf(format, args...))
	}
}

func (t *tally) errors() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.first...)
}

package cluster

import (
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/dgraph-io/ristretto/v2"

	"github.com/kvtier/kvtier/server/placement"
)

// Times of hints.
const (
	refusedFor = 2 * time.Second  // a node that had not a block is not asked for it again
	askedFor   = 10 * time.Second // a claim of this node that was found wrong
	wrongAfter = 2 * time.Second  // it takes less for a release to be seen everywhere
	maxHints   = 1 << 16
)

// hints are what may be forgotten at any time: the cache drops entries in bursts
// and has no read-your-writes. A hint that is lost costs one question.
type hints struct {
	mu      sync.RWMutex // use of a cache while it is closed panics
	closed  bool
	refused *ristretto.Cache[uint64, struct{}]  // by block and node
	asked   *ristretto.Cache[uint64, time.Time] // by block: when this node was first asked for what it has not
}

func newHints() (*hints, error) {
	refused, err := ristretto.NewCache(&ristretto.Config[uint64, struct{}]{NumCounters: 10 * maxHints, MaxCost: maxHints, BufferItems: 64, IgnoreInternalCost: true})
	if err != nil {
		return nil, fmt.Errorf("hints: %w", err)
	}
	asked, err := ristretto.NewCache(&ristretto.Config[uint64, time.Time]{NumCounters: 10 * maxHints, MaxCost: maxHints, BufferItems: 64, IgnoreInternalCost: true})
	if err != nil {
		refused.Close()
		return nil, fmt.Errorf("hints: %w", err)
	}
	return &hints{refused: refused, asked: asked}, nil
}

func (h *hints) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return
	}
	h.closed = true
	h.refused.Close()
	h.asked.Close()
}

func hintKey(k placement.BlockKey, node placement.NodeID) uint64 {
	return binary.LittleEndian.Uint64(k[:]) ^ binary.LittleEndian.Uint64(node[:])*0x9e3779b97f4a7c15
}

// refuse notes that a node had not a block.
func (h *hints) refuse(k placement.BlockKey, node placement.NodeID) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.closed {
		return
	}
	h.refused.SetWithTTL(hintKey(k, node), struct{}{}, 1, refusedFor)
}

func (h *hints) refuses(k placement.BlockKey, node placement.NodeID) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.closed {
		return false
	}
	_, no := h.refused.Get(hintKey(k, node))
	return no
}

// absent notes that this node was asked for a block that it has not, and reports
// whether it has been asked for long enough for its claim to be wrong.
func (h *hints) absent(k placement.BlockKey, now time.Time) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.closed {
		return false
	}
	key := binary.LittleEndian.Uint64(k[:])
	since, ok := h.asked.Get(key)
	if !ok {
		h.asked.SetWithTTL(key, now, 1, askedFor)
		return false
	}
	return now.Sub(since) >= wrongAfter
}

package directory

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// timed knows which calls of the stores have not ended, and since when.
type timed struct {
	mu struct {
		sync.Mutex
		next  uint64
		since map[uint64]time.Time
	}
}

func newTimed() *timed {
	t := &timed{}
	t.mu.since = map[uint64]time.Time{}
	return t
}

func (t *timed) begin() (end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := t.mu.next
	t.mu.next++
	t.mu.since[id] = time.Now()
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.mu.since, id)
	}
}

// oldest is how long the oldest call has taken so far; 0: none runs.
func (t *timed) oldest() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	var longest time.Duration
	for _, since := range t.mu.since {
		longest = max(longest, time.Since(since))
	}
	return longest
}

// timedLog times the writes of a log store. Reads come from its cache.
type timedLog struct {
	raft.LogStore
	timed *timed
}

// StoreLog implements raft.LogStore.
func (s timedLog) StoreLog(l *raft.Log) error {
	defer s.timed.begin()()
	return s.LogStore.StoreLog(l)
}

// StoreLogs implements raft.LogStore.
func (s timedLog) StoreLogs(l []*raft.Log) error {
	defer s.timed.begin()()
	return s.LogStore.StoreLogs(l)
}

// DeleteRange implements raft.LogStore.
func (s timedLog) DeleteRange(low, high uint64) error {
	defer s.timed.begin()()
	return s.LogStore.DeleteRange(low, high)
}

// IsMonotonic implements raft.MonotonicLogStore.
func (s timedLog) IsMonotonic() bool {
	m, ok := s.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// timedStable times the writes of a stable store.
type timedStable struct {
	raft.StableStore
	timed *timed
}

// Set implements raft.StableStore.
func (s timedStable) Set(key, val []byte) error {
	defer s.timed.begin()()
	return s.StableStore.Set(key, val)
}

// SetUint64 implements raft.StableStore.
func (s timedStable) SetUint64(key []byte, val uint64) error {
	defer s.timed.begin()()
	return s.StableStore.SetUint64(key, val)
}

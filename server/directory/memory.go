package directory

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/kvtier/kvtier/paging"
)

// Memory is where a replica that has no disk keeps its log, its term and its last
// snapshot: it outlives the replica and ends with the process, so that whole
// clusters run in one process with restarts, and without a file. Its writes can be
// made to hang, as those of a bad disk do. All methods may be called at the same
// time from many goroutines.
type Memory struct {
	mu       sync.Mutex
	first    uint64
	entries  []raft.Log // from first on
	values   map[string][]byte
	numbers  map[string]uint64
	snapshot *memorySnapshot // the last that was finished; nil: none
	hang     chan struct{}   // not nil: writes wait until it is closed
}

// NewMemory returns an empty Memory.
func NewMemory() *Memory {
	return &Memory{values: map[string][]byte{}, numbers: map[string]uint64{}}
}

// Hang makes writes wait from now on, until it is called with false.
func (m *Memory) Hang(hang bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case hang && m.hang == nil:
		m.hang = make(chan struct{})
	case !hang && m.hang != nil:
		close(m.hang)
		m.hang = nil
	}
}

func (m *Memory) stores() *stores {
	return &stores{log: m, stable: m, snapshots: memorySnapshots{m}, close: func() error { return nil }}
}

// lockToWrite locks once writes do not hang.
func (m *Memory) lockToWrite() {
	m.mu.Lock()
	for m.hang != nil {
		hang := m.hang
		m.mu.Unlock()
		<-hang
		m.mu.Lock()
	}
}

// FirstIndex implements raft.LogStore.
func (m *Memory) FirstIndex() (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.entries) == 0 {
		return 0, nil
	}
	return m.first, nil
}

// LastIndex implements raft.LogStore.
func (m *Memory) LastIndex() (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.entries) == 0 {
		return 0, nil
	}
	return m.first + uint64(len(m.entries)) - 1, nil
}

// GetLog implements raft.LogStore.
func (m *Memory) GetLog(index uint64, l *raft.Log) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if index < m.first || index-m.first >= uint64(len(m.entries)) {
		return raft.ErrLogNotFound
	}
	*l = m.entries[index-m.first]
	return nil
}

// StoreLog implements raft.LogStore.
func (m *Memory) StoreLog(l *raft.Log) error { return m.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore.
func (m *Memory) StoreLogs(logs []*raft.Log) error {
	m.lockToWrite()
	defer m.mu.Unlock()
	for _, l := range logs {
		if len(m.entries) == 0 {
			m.first = l.Index
		}
		if l.Index != m.first+uint64(len(m.entries)) {
			return fmt.Errorf("log entry %d after %d: %w", l.Index, m.first+uint64(len(m.entries))-1, paging.ErrInvalid)
		}
		m.entries = append(m.entries, *l)
	}
	return nil
}

// DeleteRange implements raft.LogStore, for ranges at either end of the log.
func (m *Memory) DeleteRange(low, high uint64) error {
	m.lockToWrite()
	defer m.mu.Unlock()
	if len(m.entries) == 0 {
		return nil
	}
	last := m.first + uint64(len(m.entries)) - 1
	low, high = max(low, m.first), min(high, last)
	switch {
	case low > high:
	case high == last:
		m.entries = slices.Clone(m.entries[:low-m.first])
	case low == m.first:
		m.entries = slices.Clone(m.entries[high+1-m.first:])
		m.first = high + 1
	default:
		return fmt.Errorf("log entries %d to %d are in the middle: %w", low, high, paging.ErrInvalid)
	}
	return nil
}

// IsMonotonic implements raft.MonotonicLogStore.
func (m *Memory) IsMonotonic() bool { return true }

// Set implements raft.StableStore.
func (m *Memory) Set(key, value []byte) error {
	m.lockToWrite()
	defer m.mu.Unlock()
	m.values[string(key)] = slices.Clone(value)
	return nil
}

// Get implements raft.StableStore: empty for a key that was never set.
func (m *Memory) Get(key []byte) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.values[string(key)], nil
}

// SetUint64 implements raft.StableStore.
func (m *Memory) SetUint64(key []byte, value uint64) error {
	m.lockToWrite()
	defer m.mu.Unlock()
	m.numbers[string(key)] = value
	return nil
}

// GetUint64 implements raft.StableStore: 0 for a key that was never set.
func (m *Memory) GetUint64(key []byte) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.numbers[string(key)], nil
}

// memorySnapshots are the snapshots of a Memory: one becomes the last when it is
// finished.
type memorySnapshots struct{ m *Memory }

type memorySnapshot struct {
	m       *Memory
	meta    raft.SnapshotMeta
	content bytes.Buffer
}

// Create implements raft.SnapshotStore.
func (s memorySnapshots) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration, configurationIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	return &memorySnapshot{m: s.m, meta: raft.SnapshotMeta{
		Version: version, ID: fmt.Sprintf("%d-%d", term, index), Index: index, Term: term, Configuration: configuration, ConfigurationIndex: configurationIndex,
	}}, nil
}

// List implements raft.SnapshotStore.
func (s memorySnapshots) List() ([]*raft.SnapshotMeta, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.snapshot == nil {
		return nil, nil
	}
	meta := s.m.snapshot.meta
	return []*raft.SnapshotMeta{&meta}, nil
}

// Open implements raft.SnapshotStore.
func (s memorySnapshots) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	last := s.m.snapshot
	if last == nil || last.meta.ID != id {
		return nil, nil, fmt.Errorf("snapshot %s: %w", id, paging.ErrNotFound)
	}
	meta := last.meta
	return &meta, io.NopCloser(bytes.NewReader(last.content.Bytes())), nil
}

// Write implements raft.SnapshotSink.
func (s *memorySnapshot) Write(b []byte) (int, error) { return s.content.Write(b) }

// ID implements raft.SnapshotSink.
func (s *memorySnapshot) ID() string { return s.meta.ID }

// Cancel implements raft.SnapshotSink.
func (s *memorySnapshot) Cancel() error { return nil }

// Close implements raft.SnapshotSink: the snapshot is finished.
func (s *memorySnapshot) Close() error {
	s.m.lockToWrite()
	defer s.m.mu.Unlock()
	s.meta.Size = int64(s.content.Len())
	s.m.snapshot = s
	return nil
}

package nvme

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Memory of the index: two memtables, a block cache that only serves the scan
// at start, and the table readers; about 16 MiB in all.
const (
	indexMemtableBytes = 4 << 20
	indexMemtables     = 2
	indexCacheBytes    = 2 << 20
	indexOpenFiles     = 128
	// indexFormat is pinned: a new Pebble must not change a directory by itself.
	indexFormat = pebble.FormatValueSeparation
)

// manifest is the durable list of pages and namespaces, in Pebble. Every call
// into Pebble goes through do: Pebble panics when used after Close, and whoever
// finds that its log cannot be written does not come back.
type manifest struct {
	fs      *indexFS
	log     *slog.Logger
	corrupt *atomic.Int64 // corruptions that Pebble reported

	reason atomic.Pointer[string] // why it is dead

	mu      sync.Mutex
	db      *pebble.DB
	closed  bool
	running int           // operations
	idle    chan struct{} // closed when closed and no operation runs
}

// indexConfig is where an index lies.
type indexConfig struct {
	fs      vfs.FS // nil: the file system of the machine
	dir     string
	create  bool // false: it must exist
	log     *slog.Logger
	written *atomic.Int64 // bytes
	syncs   *atomic.Int64
	corrupt *atomic.Int64
	stall   func() // called when a write begins to wait for room on the disk
}

func openManifest(cfg indexConfig) (*manifest, error) {
	if cfg.fs == nil {
		cfg.fs = vfs.Default
	}
	m := &manifest{
		fs:  &indexFS{FS: cfg.fs, fenced: make(chan struct{}), written: cfg.written, syncs: cfg.syncs, stall: cfg.stall},
		log: cfg.log, corrupt: cfg.corrupt, idle: make(chan struct{}),
	}
	opts := &pebble.Options{
		FS:                          m.fs,
		Logger:                      &indexLogger{m: m},
		ErrorIfNotExists:            !cfg.create,
		FormatMajorVersion:          indexFormat,
		CacheSize:                   indexCacheBytes,
		MaxOpenFiles:                indexOpenFiles,
		MemTableSize:                indexMemtableBytes,
		MemTableStopWritesThreshold: indexMemtables,
		EventListener: &pebble.EventListener{
			DataCorruption: func(info pebble.DataCorruptionInfo) {
				m.corrupt.Add(1)
				m.log.Error("index corruption", "file", info.Path, "error", info.Details)
			},
			BackgroundError: func(err error) { m.log.Warn("index background error", "error", err) },
		},
	}
	// Names and keys are hashes: nothing to compress.
	opts.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionNone })
	var db *pebble.DB
	err := m.guard(nil, func() (err error) {
		db, err = pebble.Open(cfg.dir, opts)
		return err
	})
	if errors.Is(err, pebble.ErrDBDoesNotExist) {
		return nil, fmt.Errorf("index %s is missing beside its segments: %w", cfg.dir, paging.ErrIncompatible)
	}
	if err != nil {
		m.fs.fence()
		return nil, fmt.Errorf("open index %s: %w", cfg.dir, markIndexError(err))
	}
	m.db = db
	m.fs.patient.Store(true)
	return m, nil
}

func markIndexError(err error) error {
	if isDiskFull(err) {
		return fmt.Errorf("%w: %w", err, paging.ErrNoSpace)
	}
	if pebble.IsCorruptionError(err) {
		return fmt.Errorf("%w: %w", err, paging.ErrCorrupt)
	}
	return fmt.Errorf("%w: %w", err, paging.ErrIO)
}

// guard runs op on a goroutine of its own (owner: the caller, which waits; it
// ends with op), as it may be lost in Pebble. errFenced: the index is dead.
// errStopped: stop, if not nil, was closed first; op goes on alone.
func (m *manifest) guard(stop <-chan struct{}, op func() error) error {
	result := make(chan error, 1)
	go func() { result <- op() }()
	select {
	case err := <-result:
		return err
	case <-m.fs.fenced:
		return errFenced
	case <-stop:
		return errStopped
	}
}

var errStopped = errors.New("stopped waiting for the index")

// do runs op with the database. paging.ErrClosed after close; errFenced and
// errStopped as for guard: whether op takes effect is then unknown, and what it
// uses must be left alone.
func (m *manifest) do(stop <-chan struct{}, op func(db *pebble.DB) error) error {
	if m.fs.isFenced() {
		return errFenced
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return paging.ErrClosed
	}
	m.running++
	m.mu.Unlock()
	return m.guard(stop, func() error {
		defer m.release()
		return op(m.db)
	})
}

func (m *manifest) release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.running--; m.running == 0 && m.closed {
		close(m.idle)
	}
}

// dead says why the index cannot be used any more, "" if it can.
func (m *manifest) dead() string {
	if r := m.reason.Load(); r != nil {
		return *r
	}
	return ""
}

// stalled reports whether a write of the index waits for room on the disk.
func (m *manifest) stalled() bool { return m.fs.stalled.Load() > 0 }

// close ends the use of the index within the bound. An index that is dead, or
// does not close in time, is cut off its files and left behind. A second call
// does nothing.
func (m *manifest) close(bound time.Duration) error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	if m.running == 0 {
		close(m.idle)
	}
	m.mu.Unlock()

	if m.fs.isFenced() {
		return fmt.Errorf("index left behind: %s: %w", m.dead(), paging.ErrIO)
	}
	cut := time.AfterFunc(bound, m.fs.fence)
	defer cut.Stop()
	err := m.guard(nil, func() error {
		<-m.idle
		return m.db.Close()
	})
	if errors.Is(err, errFenced) {
		return fmt.Errorf("index does not close within %v: %w", bound, paging.ErrIO)
	}
	m.fs.fence()
	return err
}

// commit makes records durable and removes others, all or nothing, in one
// synced write.
func (m *manifest) commit(put []record, remove []tier.Ref) error {
	return m.do(nil, func(db *pebble.DB) error {
		b := db.NewBatchWithSize(len(put)*(recordBytes+pageKeyBytes+8) + len(remove)*(pageKeyBytes+4) + 64)
		var key [pageKeyBytes]byte
		var value [recordBytes]byte
		for _, r := range remove {
			if err := b.Delete(appendPageKey(key[:0], r), nil); err != nil {
				return err
			}
		}
		for i := range put {
			if err := b.Set(appendPageKey(key[:0], put[i].ref), appendRecord(value[:0], &put[i]), nil); err != nil {
				return err
			}
		}
		return errors.Join(b.Commit(pebble.Sync), b.Close())
	})
}

// scan calls each for every entry that lies under a page key, damaged ones
// too; the slices die at its return. Its error ends the scan and is returned.
func (m *manifest) scan(ctx context.Context, each func(key, value []byte) error) error {
	return m.do(nil, func(db *pebble.DB) error {
		it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{pagePrefix}, UpperBound: []byte{pagePrefix + 1}})
		if err != nil {
			return err
		}
		n := 0
		for ok := it.First(); ok && err == nil; ok = it.Next() {
			var value []byte
			if value, err = it.ValueAndErr(); err == nil {
				err = each(it.Key(), value)
			}
			if n++; n%1024 == 0 && err == nil {
				err = ctx.Err()
			}
		}
		return errors.Join(err, it.Close())
	})
}

// about estimates the number of page records.
func (m *manifest) about() int64 {
	var n uint64
	err := m.do(nil, func(db *pebble.DB) (err error) {
		n, err = db.EstimateDiskUsage([]byte{pagePrefix}, []byte{pagePrefix + 1})
		return err
	})
	if err != nil {
		return 0
	}
	return int64(n / (recordBytes + pageKeyBytes))
}

// namespaces reads all namespaces by number, and the next free number.
func (m *manifest) namespaces() (found map[uint32]*paging.Namespace, next uint32, err error) {
	found = map[uint32]*paging.Namespace{}
	next = 1
	err = m.do(nil, func(db *pebble.DB) error {
		it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{namespacePrefix}, UpperBound: []byte{namespacePrefix + 1}})
		if err != nil {
			return err
		}
		for ok := it.First(); ok; ok = it.Next() {
			ns, err := paging.DecodeNamespace(it.Value())
			if key := it.Key(); err == nil && len(key) == 5 {
				number := binary.BigEndian.Uint32(key[1:])
				found[number] = ns
				next = max(next, number+1)
			} else {
				m.corrupt.Add(1)
			}
		}
		if err := it.Close(); err != nil {
			return err
		}
		value, closer, err := db.Get([]byte(counterKey))
		if errors.Is(err, pebble.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(value) == 4 {
			next = max(next, binary.LittleEndian.Uint32(value))
		}
		return closer.Close()
	})
	return found, next, err
}

// putNamespace makes a namespace durable under a number that was never used.
func (m *manifest) putNamespace(stop <-chan struct{}, number uint32, encoded []byte) error {
	return m.do(stop, func(db *pebble.DB) error {
		b := db.NewBatch()
		err := errors.Join(
			b.Set(appendNamespaceKey(nil, number), encoded, nil),
			b.Set([]byte(counterKey), binary.LittleEndian.AppendUint32(nil, number+1), nil))
		if err != nil {
			return err
		}
		return errors.Join(b.Commit(pebble.Sync), b.Close())
	})
}

func (m *manifest) dropNamespace(stop <-chan struct{}, number uint32) error {
	return m.do(stop, func(db *pebble.DB) error {
		return db.Delete(appendNamespaceKey(nil, number), pebble.Sync)
	})
}

// indexLogger receives what Pebble says.
type indexLogger struct{ m *manifest }

func (l *indexLogger) Infof(string, ...any) {}

func (l *indexLogger) Errorf(format string, args ...any) {
	l.m.log.Warn("index", "message", fmt.Sprintf(format, args...))
}

// Fatalf is called when the log or manifest of the index cannot be written. It
// marks the index dead and does not return.
func (l *indexLogger) Fatalf(format string, args ...any) {
	reason := fmt.Sprintf(format, args...)
	if l.m.reason.CompareAndSwap(nil, &reason) {
		l.m.log.Error("index failed", "reason", reason)
	}
	l.m.fs.fence()
	park()
}

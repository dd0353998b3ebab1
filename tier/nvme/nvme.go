package nvme

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Tier is a tier.Durable on a local disk.
type Tier struct {
	// Constant after Open.
	cfg     Config
	log     *slog.Logger
	vol     volume
	lock    io.Closer
	pace    *pacer
	bounces *bouncePool

	// Goroutines and what they are fed with.
	workers   sync.WaitGroup
	closing   chan struct{} // closed by Close
	closeOnce sync.Once
	closeErr  error
	writes    chan *run
	reads     chan *read
	growNow   chan struct{} // wakes the pre-writer, capacity 1
	keepNow   chan struct{} // wakes the keeper, capacity 1
	busy      []ioClock     // of the writers, the committer and the pre-writer

	counters counters

	queue commitQueue // has its own lock

	mu sync.Mutex
	space
	status
}

var _ tier.Durable = (*Tier)(nil)

// Open opens or creates a tier. On error everything is released. Recover must
// be called before pages can be stored or loaded.
func Open(cfg Config) (*Tier, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	dir, err := openDirectory(cfg.volume, cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open nvme tier: %w", err)
	}
	t := &Tier{
		cfg: cfg, log: cfg.Logger, vol: cfg.volume, lock: dir.lock,
		pace:    newPacer(cfg.WriteBytesPerSecond),
		bounces: cfg.bounces,
		closing: make(chan struct{}),
		writes:  make(chan *run),
		reads:   make(chan *read),
		growNow: make(chan struct{}, 1),
		keepNow: make(chan struct{}, 1),
		busy:    make([]ioClock, writeDepth+2),
	}
	t.queue.init()
	t.space.init(cfg.SegmentBytes)
	t.status.init()
	if err := t.openContents(dir); err != nil {
		return nil, fmt.Errorf("open nvme tier %s: %w", cfg.Dir, errors.Join(err, t.releaseFiles()))
	}
	t.start()
	return t, nil
}

// openContents opens the index and the segments.
func (t *Tier) openContents(dir *directory) error {
	m, err := openManifest(t.indexConfig(dir.fresh))
	if err != nil {
		return err
	}
	t.manifest = m
	if dir.fresh {
		if err := t.vol.Mkdir(segmentDir); err != nil {
			return fmt.Errorf("create segments: %w", err)
		}
	}
	if err := removeLeftovers(t.vol, dir.entries); err != nil {
		return fmt.Errorf("remove unfinished segments: %w", err)
	}
	for _, e := range dir.entries {
		id, ok := segmentNumber(e.name)
		if !ok {
			continue
		}
		f, err := t.vol.Open(filepath.Join(segmentDir, e.name))
		if err != nil {
			return fmt.Errorf("open segment: %w", err)
		}
		t.segments[id] = &segment{id: id, file: f, bytes: f.Bytes() &^ (paging.UnitBytes - 1)}
		t.nextSegment = max(t.nextSegment, id+1)
	}
	found, next, err := m.namespaces()
	if err != nil {
		return fmt.Errorf("read namespaces: %w", err)
	}
	t.setNamespaces(found, next)
	return nil
}

func (t *Tier) indexConfig(create bool) indexConfig {
	return indexConfig{
		fs: t.cfg.index, dir: filepath.Join(t.cfg.Dir, indexName), create: create, log: t.log,
		written: &t.counters.indexBytes, syncs: &t.counters.indexSyncs, corrupt: &t.counters.indexCorrupt,
		stall: func() { t.bypass("disk full: the index cannot be written") },
	}
}

// start starts the goroutines of the tier; all end at Close.
func (t *Tier) start() {
	for range t.cfg.Readers {
		t.workers.Go(t.reader)
	}
	for i := range writeDepth {
		t.workers.Go(func() { t.writer(&t.busy[i]) })
	}
	t.workers.Go(func() { t.committer(&t.busy[writeDepth]) })
	t.workers.Go(func() { t.prewriter(&t.busy[writeDepth+1]) })
	t.workers.Go(t.keeper)
}

// Kind is tier.NVMe.
func (t *Tier) Kind() tier.Kind { return tier.NVMe }

// closeBound is how long Close waits for I/O that runs.
const (
	closeBound   = 10 * time.Second
	stalledBound = time.Second
)

// Close ends running calls with paging.ErrClosed, makes pending removals
// durable and releases everything. If the disk does not answer within 10 s it
// returns an error that is a paging.ErrIO; the directory then stays locked
// until it does answer or the process ends, as a late write may still land.
func (t *Tier) Close() error {
	t.closeOnce.Do(func() { t.closeErr = t.close() })
	return t.closeErr
}

func (t *Tier) close() error {
	t.mu.Lock()
	t.state = tier.Closed
	t.reason = ""
	m := t.manifest
	t.mu.Unlock()
	close(t.closing)
	t.pace.close()
	t.queue.close()

	ended := make(chan struct{})
	go func() { // owner: Close; ends when the last I/O does
		t.workers.Wait()
		close(ended)
	}()
	wait := closeBound
	if m.stalled() {
		wait = stalledBound // the committer ends when the index is cut off
	}
	bound := time.NewTimer(wait)
	defer bound.Stop()
	select {
	case <-ended:
		return errors.Join(m.close(closeBound), t.releaseFiles())
	case <-bound.C:
	}
	indexErr := m.close(stalledBound)
	select {
	case <-ended:
		return errors.Join(indexErr, t.releaseFiles())
	default:
	}
	go func() { // owner: the process; ends when the disk answers
		<-ended
		t.releaseFiles() //nolint:errcheck // nobody is left to be told
	}()
	return errors.Join(fmt.Errorf("the disk does not answer: %w", paging.ErrIO), indexErr)
}

// releaseFiles closes what Open opened, but the index if it was closed before.
func (t *Tier) releaseFiles() error {
	var errs []error
	if t.manifest != nil {
		errs = append(errs, t.manifest.close(closeBound))
	}
	for _, s := range t.segments {
		errs = append(errs, s.file.Close())
	}
	t.bounces.close()
	return errors.Join(append(errs, t.lock.Close())...)
}

// ioClock tells since when a worker has been in one I/O.
type ioClock struct{ since atomic.Int64 } // Unix ns, 0: idle

func (c *ioClock) begin() { c.since.Store(time.Now().UnixNano()) }
func (c *ioClock) end()   { c.since.Store(0) }

// hangs reports whether the I/O has run for longer than d.
func (c *ioClock) hangs(now time.Time, d time.Duration) bool {
	since := c.since.Load()
	return since != 0 && now.UnixNano()-since > int64(d)
}

// mediumError marks an error of a segment file for callers.
func mediumError(verb string, id paging.ExtentID, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s segment %d: the file ends too early: %w", verb, id, paging.ErrCorrupt)
	}
	return fmt.Errorf("%s segment %d: %w: %w", verb, id, err, paging.ErrIO)
}

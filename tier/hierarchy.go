package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier/policy"
)

// Config of a Hierarchy. Zero values mean the documented default.
type Config struct {
	Arena   Arena   // RAM, required; not closed by the Hierarchy
	Durable Durable // disk; nil: RAM only. Not closed by the Hierarchy
	Device  Device  // above RAM; nil: none. Not closed by the Hierarchy
	Peers   Peers   // other nodes; nil: there are none
	// Observed says that somebody calls Changes: what becomes of blocks is noted.
	Observed bool

	RAMPolicy  string // eviction policy of RAM; empty: DefaultPolicy
	DiskPolicy string // eviction policy of the disk; empty: DefaultPolicy

	// Quotas bound tenants; a tenant that is not named, or has 0, has no bound but
	// the tier. The arena has its own copy of the RAM quotas and enforces them.
	Quotas map[string]Quota

	// MaxPageBytes is the longest page that the arena can hold; 0: not checked at
	// RegisterNamespace.
	MaxPageBytes int64
	// MaxNamespaces bounds registered namespaces. 0: 65,536. One without blocks
	// that was not named for 24 h is forgotten.
	MaxNamespaces int

	// FlushAfter is the age at which a block that is only in RAM is written down
	// while the disk is idle. 0: 10 s.
	FlushAfter time.Duration
	// IncompleteAfter is the time within which the wanted parts of a block must
	// follow its first. 0: 60 s.
	IncompleteAfter time.Duration
	// LoadWorkers is the number of pages that are loaded at the same time. 0: 8.
	LoadWorkers int

	Logger *slog.Logger // state changes only; nil: none
	// Progress is told how far the index is loaded at Open. nil: nobody is.
	Progress func(done, about int64)
}

// Quota bounds what a tenant may use of each tier, in bytes of slots. 0: no bound.
type Quota struct {
	RAMBytes    int64
	DiskBytes   int64
	DeviceBytes int64
}

// Defaults of Config that a program may want to show.
const (
	DefaultPolicy     = policy.Default
	DefaultFlushAfter = 10 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	if c.Arena == nil {
		return c, fmt.Errorf("tier: Config.Arena is nil: %w", paging.ErrInvalid)
	}
	if c.FlushAfter < 0 || c.IncompleteAfter < 0 || c.LoadWorkers < 0 || c.MaxNamespaces < 0 {
		return c, fmt.Errorf("tier: a negative time or number in Config: %w", paging.ErrInvalid)
	}
	setDefault(&c.RAMPolicy, DefaultPolicy)
	setDefault(&c.DiskPolicy, DefaultPolicy)
	setDefault(&c.MaxNamespaces, 65536)
	setDefault(&c.FlushAfter, DefaultFlushAfter)
	setDefault(&c.IncompleteAfter, time.Minute)
	setDefault(&c.LoadWorkers, 8)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Hierarchy owns which block lies in which tier, and its one index. See the
// package comment.
//
// All methods may be called at the same time from many goroutines. After Close
// they answer paging.ErrClosed or do nothing.
type Hierarchy struct {
	// Immutable.
	cfg       Config
	log       *slog.Logger
	headFirst bool            // the RAM policy is offered the head of a chain first
	ctx       context.Context // ends with Close; bounds background work on the tiers
	cancel    context.CancelFunc
	intake    context.Context // ends when Close begins
	refuse    context.CancelFunc
	workers   sync.WaitGroup
	wake      chan struct{} // tells the demotion writer that there may be work
	copiers   chan struct{} // a token per goroutine that helps a commit to copy

	fetches sync.Pool // of *fetch

	mu struct {
		indexLock
		closed     bool
		index      *index
		byID       map[paging.NamespaceID]*namespace
		namespaces []*namespace // by number; nil where one was forgotten
		tenants    map[string]*tenant
		tenantList []*tenant

		inflight   map[blockID]*inflight
		incomplete map[blockID]assembly
		retained   map[blockID]retained
		pinned     notes // by Pin
		foreseen   notes // by prefetches
		attempts   map[*Attempt]struct{}
		durable    map[blockID][]*waiter // waiters of durable commits

		loads         loadQueue
		work          *sync.Cond    // a load was queued, or the workers are to end
		urgent        dirtyQueue    // to be written at once
		bypass        bool          // the disk takes nothing at present
		pauseUntil    time.Time     // the writer waits after an error of the disk
		hottest       []blockID     // what Close still has to write down; nil: not worked out yet
		ramBytes      int64         // budget of the arena
		diskBytes     int64         // budget of the durable tier
		ramNodes      policy.Blocks // of the policies of RAM, by frame
		diskNodes     policy.Blocks // of the policies of the disk, by blockID
		frames        frames
		nextIdleCheck uint32
		cleaned       chan struct{} // closed and replaced when blocks became clean or evictable
		metrics       Metrics
		device        deviceState
		changes       changeLog
		history       history
		serving       map[blockID]int // by Served that may read their copies on disk
	}
}

// Open starts a Hierarchy over the given tiers and, with a durable tier, loads
// its index; ctx bounds that. On error nothing runs.
func Open(ctx context.Context, cfg Config) (*Hierarchy, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	h := &Hierarchy{cfg: cfg, log: cfg.Logger, headFirst: policy.HeadFirst(cfg.RAMPolicy), wake: make(chan struct{}, 1), copiers: make(chan struct{}, runtime.GOMAXPROCS(0)-1)}
	h.fetches.New = func() any { return new(fetch) }
	h.mu.settle = h.settleUses
	h.ctx, h.cancel = context.WithCancel(context.WithoutCancel(ctx))
	h.intake, h.refuse = context.WithCancel(h.ctx)
	m := &h.mu
	m.index = newIndex()
	m.byID = make(map[paging.NamespaceID]*namespace)
	m.tenants = make(map[string]*tenant)
	m.inflight = make(map[blockID]*inflight)
	m.incomplete = make(map[blockID]assembly)
	m.retained = make(map[blockID]retained)
	m.pinned.of = make(map[blockID]note)
	m.foreseen.of = make(map[blockID]note)
	m.attempts = make(map[*Attempt]struct{})
	m.durable = make(map[blockID][]*waiter)
	m.serving = make(map[blockID]int)
	m.work = sync.NewCond(&h.mu)
	m.cleaned = make(chan struct{})
	m.changes.signal = make(chan struct{}, 1)
	m.ramBytes = cfg.Arena.Usage().BudgetBytes
	if cfg.Durable != nil {
		m.diskBytes = cfg.Durable.Usage().BudgetBytes
	}
	h.openDevice()
	if err := h.checkPolicies(); err != nil {
		h.cancel()
		return nil, err
	}
	if cfg.Durable == nil {
		h.startMovers()
		return h, nil
	}
	if err := h.recover(ctx); err != nil {
		h.cancel()
		return nil, err
	}
	// Owner: the Hierarchy. Exit: Close. Bound: one writer, LoadWorkers loaders.
	h.startMovers()
	h.workers.Go(h.writeDown)
	for range cfg.LoadWorkers {
		h.workers.Go(h.loadPages)
	}
	return h, nil
}

// Close stops the Hierarchy: new calls are refused, what waits is answered with
// Stopping, and until ctx ends blocks that are only in RAM are written down,
// hottest first. It joins every goroutine. Idempotent. The tiers stay open. An
// error says that holds or attempts were not ended.
func (h *Hierarchy) Close(ctx context.Context) error {
	h.mu.Lock()
	if h.mu.closed {
		h.mu.Unlock()
		h.workers.Wait()
		return nil
	}
	h.mu.closed = true
	h.refuse()
	leaked := h.leaksLocked()
	h.mu.work.Broadcast()
	h.mu.device.work.Broadcast()
	h.broadcastLocked()
	h.mu.Unlock()
	h.wakeWriter()
	stop := context.AfterFunc(ctx, h.cancel)
	h.workers.Wait()
	stop()
	h.cancel()
	return leaked
}

// leaksLocked says what callers still hold. Requires h.mu.
func (h *Hierarchy) leaksLocked() error {
	var errs []error
	if n := h.mu.metrics.Holds; n > 0 {
		errs = append(errs, fmt.Errorf("tier: closed with %d holds that were not released", n))
	}
	if n := len(h.mu.attempts); n > 0 {
		errs = append(errs, fmt.Errorf("tier: closed with %d write attempts that were not ended", n))
	}
	return errors.Join(errs...)
}

// broadcastLocked wakes everybody who waits for room. Requires h.mu.
func (h *Hierarchy) broadcastLocked() {
	close(h.mu.cleaned)
	h.mu.cleaned = make(chan struct{})
}

func (h *Hierarchy) wakeWriter() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// nowSeconds is the time that the index keeps: Unix seconds fit 32 bits until 2106.
func (h *Hierarchy) nowSeconds() uint32 { return uint32(time.Now().Unix()) }

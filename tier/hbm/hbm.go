package hbm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/arena"
)

// Arena implements tier.Device. All methods may be called at the same time from
// many goroutines; what Bytes returned must not be used after Close.
type Arena struct {
	*arena.Arena[*memory]

	// Immutable.
	cfg   Config
	lanes chan *lane // those that are free

	use    sync.RWMutex           // shared by what uses slots, so that Close unmaps under nobody
	closed bool                   // guarded by use
	broken atomic.Pointer[string] // why the device takes nothing any more; nil: it does

	hosts struct {
		sync.RWMutex
		mems []gpu.Mem // registered
	}
}

var _ tier.Device = (*Arena)(nil)

// lanes is how many batches are on their way at a time: while one is waited for,
// the next is copied.
const lanes = 2

// Open makes the streams, creates the first extent and starts to create the
// others. ErrInvalid for a wrong Config, ErrNoSpace if the device or the machine
// has not the memory, ErrUnavailable if the device fails.
func Open(ctx context.Context, cfg Config) (_ *Arena, err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return nil, err
	}
	if !slices.Contains(cfg.Device.Info().Kernels, gpu.PageSumKernel) {
		return nil, fmt.Errorf("hbm tier: %s cannot sum pages: %w", cfg.Device.Info().Name, paging.ErrInvalid)
	}
	a := &Arena{cfg: cfg, lanes: make(chan *lane, lanes)}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.closeLanes())
		}
	}()
	for range lanes {
		l, err := newLane(cfg.Device)
		if err != nil {
			return nil, fmt.Errorf("hbm tier: %w", err)
		}
		a.lanes <- l
	}
	a.Arena, err = arena.Open(ctx, arena.Config[*memory]{
		Kind: tier.HBM, Name: "HBM tier", BudgetBytes: cfg.BudgetBytes, ExtentBytes: cfg.ExtentBytes, ReservedBytes: cfg.WorkingBytes,
		Quotas: cfg.Quotas, Create: cfg.create, Check: cfg.check, ID: extentID, Handed: handed, Added: cfg.Added, Logger: cfg.Logger,
	})
	return a, err
}

// Pool describes the memory to those who map it.
func (a *Arena) Pool() tier.Pool {
	i := a.cfg.Device.Info()
	return tier.Pool{Driver: i.Driver, Name: i.Name, UUID: i.UUID, ExtentBytes: a.cfg.ExtentBytes,
		Places: int((a.cfg.BudgetBytes - a.cfg.WorkingBytes) / a.cfg.ExtentBytes)}
}

// Register makes host memory, of whole pages and from mmap, reachable for copies
// without a detour, until release is called. Where the device refuses it, pages
// in it are copied through memory of the arena's own.
func (a *Arena) Register(b []byte) (release func()) {
	m, err := a.cfg.Device.Register(b)
	if err != nil {
		a.cfg.Logger.Warn("memory is not registered with the device: copies take a detour", "bytes", len(b), "error", err)
		return func() {}
	}
	a.hosts.Lock()
	a.hosts.mems = append(a.hosts.mems, m)
	a.hosts.Unlock()
	return func() {
		a.hosts.Lock()
		a.hosts.mems = slices.DeleteFunc(a.hosts.mems, func(x gpu.Mem) bool { return x == m })
		a.hosts.Unlock()
		if err := m.Free(); err != nil {
			a.cfg.Logger.Error("memory stays registered with the device", "bytes", len(b), "error", err)
		}
	}
}

// addrOf is where the device sees host memory; false: it must take the detour.
func (a *Arena) addrOf(b []byte) (gpu.Addr, bool) {
	a.hosts.RLock()
	defer a.hosts.RUnlock()
	for _, m := range a.hosts.mems {
		if at, ok := gpu.AddrIn(m, b); ok {
			return at, true
		}
	}
	return 0, false
}

// Addr is where the device sees the slot at r.
func (a *Arena) Addr(r tier.Ref) gpu.Addr {
	m, at := a.Memory(r)
	return m.mem.Addr() + gpu.Addr(at)
}

// Bytes implements tier.Arena.
func (a *Arena) Bytes(r tier.Ref, n uint32) []byte {
	m, at := a.Memory(r)
	b := m.mem.Bytes()
	if b == nil {
		return nil
	}
	return b[at : at+int64(n) : at+arena.SlotSize(n)]
}

// Fill implements tier.Device.
func (a *Arena) Fill(pages []tier.Page, src [][]byte, refs []tier.Ref, errs []error) {
	a.use.RLock()
	defer a.use.RUnlock()
	if a.closed {
		for i := range errs {
			errs[i] = paging.ErrClosed
		}
		return
	}
	items := make([]item, len(pages))
	for i, p := range pages {
		items[i] = item{bytes: int64(p.Bytes), want: p.Sum, slot: a.Addr(refs[i]), src: src[i]}
	}
	a.move(context.Background(), items, errs)
}

// LoadAll implements tier.Device.
func (a *Arena) LoadAll(pages []tier.Page, refs []tier.Ref, dst [][]byte, errs []error) {
	a.loadAll(context.Background(), pages, refs, dst, errs)
}

func (a *Arena) loadAll(ctx context.Context, pages []tier.Page, refs []tier.Ref, dst [][]byte, errs []error) {
	a.use.RLock()
	defer a.use.RUnlock()
	items := make([]item, 0, len(pages))
	var at []int
	for i, p := range pages {
		if errs[i] = a.CheckLoad(p, refs[i], dst[i]); errs[i] == nil {
			items = append(items, item{bytes: int64(p.Bytes), want: p.Sum, slot: a.Addr(refs[i]), dst: dst[i]})
			at = append(at, i)
		}
	}
	moved := make([]error, len(items))
	a.move(ctx, items, moved)
	for j, i := range at {
		errs[i] = moved[j]
	}
}

// move has a lane move items and says what became of each. ctx bounds the wait
// for a lane. The arena is in use and not closed.
func (a *Arena) move(ctx context.Context, items []item, errs []error) {
	if len(items) == 0 {
		return
	}
	all := func(err error) {
		for i := range errs {
			errs[i] = err
		}
	}
	if why := a.broken.Load(); why != nil {
		all(fmt.Errorf("%s: %w", *why, paging.ErrUnavailable))
		return
	}
	select {
	case l := <-a.lanes:
		if err := l.run(a.addrOf, items); err != nil { //nolint:contextcheck // bounded by the life of the tier
			if !errors.Is(err, paging.ErrInvalid) { // else an engine named memory that is not its
				a.breakDown(err)
			} else if err := l.sync(); err != nil { //nolint:contextcheck // bounded by the life of the tier: what was queued before
				a.breakDown(err)
			}
			all(err)
		} else {
			for i := range items {
				errs[i] = items[i].err
			}
		}
		a.lanes <- l
	case <-ctx.Done():
		all(fmt.Errorf("%w: %w", paging.ErrExpired, context.Cause(ctx)))
	}
}

// breakDown takes the device out of use.
func (a *Arena) breakDown(err error) {
	why := "the device failed: " + err.Error()
	if a.broken.CompareAndSwap(nil, &why) {
		a.cfg.Logger.Error("HBM tier takes no more pages", "error", err)
	}
}

// Alloc implements tier.Arena. A device that failed has no room.
func (a *Arena) Alloc(tenant string, bytes, owner uint32) (tier.Ref, error) {
	if a.broken.Load() != nil {
		return 0, paging.ErrNoSpace
	}
	return a.Arena.Alloc(tenant, bytes, owner)
}

// Usage implements tier.Tier.
func (a *Arena) Usage() tier.Usage {
	u := a.Arena.Usage()
	if why := a.broken.Load(); why != nil && u.State == tier.Ready {
		u.State, u.Reason = tier.Bypass, *why
	}
	return u
}

// Store implements tier.Tier, for Config.Tenant.
func (a *Arena) Store(ctx context.Context, pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) error {
	if err := arena.CheckStore(pages, src, owners, refs); err != nil {
		return err
	}
	clear(refs)
	a.use.RLock()
	defer a.use.RUnlock()
	var failed error
	var items []item
	var at []int
	for i, p := range pages {
		if ctx.Err() != nil {
			failed = fmt.Errorf("store: %w: %w", context.Cause(ctx), paging.ErrExpired)
			break
		}
		r, err := a.Alloc(a.cfg.Tenant, p.Bytes, owners[i])
		if err != nil {
			failed = err
			continue
		}
		refs[i] = r
		at = append(at, i)
		items = append(items, item{bytes: int64(p.Bytes), want: p.Sum, slot: a.Addr(r), src: src[i]})
	}
	errs := make([]error, len(items))
	a.move(ctx, items, errs)
	for j, i := range at {
		if errs[j] != nil {
			if tier.Unsettled(errs[j]) == nil {
				a.Free(refs[i])
			}
			refs[i], failed = 0, errs[j]
		}
	}
	return failed
}

// Load implements tier.Tier.
func (a *Arena) Load(ctx context.Context, p tier.Page, r tier.Ref, dst []byte) error {
	if ctx.Err() != nil {
		return fmt.Errorf("load: %w: %w", context.Cause(ctx), paging.ErrExpired)
	}
	var errs [1]error
	a.loadAll(ctx, []tier.Page{p}, []tier.Ref{r}, [][]byte{dst}, errs[:])
	return errs[0]
}

// Close implements tier.Tier: it waits for the batches that run. Memory that
// other processes mapped stays theirs.
func (a *Arena) Close() error {
	a.Stop()
	a.use.Lock()
	defer a.use.Unlock()
	a.closed = true
	return errors.Join(a.closeLanes(), a.Arena.Close())
}

// closeLanes ends the lanes, of which none runs. Idempotent.
func (a *Arena) closeLanes() error {
	var errs []error
	for len(a.lanes) > 0 {
		errs = append(errs, (<-a.lanes).close())
	}
	return errors.Join(errs...)
}

package ram

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/tier"
)

// Arena implements tier.Arena. All methods may be called at the same time from
// many goroutines; what Bytes returned must not be used after Close.
type Arena struct {
	// Immutable.
	cfg     Config
	planned int // extents when grown
	cancel  context.CancelFunc
	workers sync.WaitGroup
	grow    chan struct{} // an extent is wanted
	tell    chan struct{} // a tenant got one

	table atomic.Pointer[[]*extent] // by number; what hit paths read
	use   sync.RWMutex              // Store and Load share it, so that Close unmaps under nobody

	mu struct {
		sync.Mutex
		closed  bool
		next    paging.ExtentID
		extents int       // created and not closed, one being created included
		pool    []*extent // of no tenant at present
		doomed  []*extent // out of use, to be unmapped
		tenants map[string]*tenant
		aside   int64
		stopped string // why no extent can be created now
		told    map[string]bool
	}
}

// extent is one memfd.
type extent struct {
	id     paging.ExtentID
	mem    *shm.Memory
	gens   shm.Generations
	table  int64   // bytes before the first slot
	tenant *tenant // whose it is, or was last; nil: nobody's yet. Guarded by Arena.mu.
	slots  int     // in use. Guarded by Arena.mu.
}

// tenant is what one tenant has. Guarded by Arena.mu.
type tenant struct {
	name    string
	quota   int64
	alloc   *paging.Allocator
	used    int64 // bytes of slots in use
	extents []*extent
	tethers int  // processes that may have its extents mapped
	hungry  bool // found the pool empty, and nothing of it came since
}

var _ tier.Arena = (*Arena)(nil)

// Open creates the first extent and starts to create the others. ErrInvalid for
// a wrong Config, ErrNoSpace if the machine has not the memory of the whole
// budget: the text says what is needed and what there is.
func Open(ctx context.Context, cfg Config) (*Arena, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	a := &Arena{cfg: cfg, planned: int((cfg.BudgetBytes - cfg.StagingBytes) / cfg.ExtentBytes),
		grow: make(chan struct{}, 1), tell: make(chan struct{}, 1)}
	a.mu.tenants = map[string]*tenant{}
	a.mu.told = map[string]bool{}
	a.mu.next = 1
	for name, quota := range cfg.Quotas {
		a.mu.tenants[name] = newTenant(name, quota)
	}
	a.table.Store(&[]*extent{nil})
	if err := a.checkMemory(cfg.BudgetBytes); err != nil {
		return nil, err
	}
	a.mu.extents = 1
	if err := a.create(ctx); err != nil {
		return nil, err
	}
	growing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	a.cancel = cancel
	// Owner: the Arena. Exit: Close. Bound: these two.
	a.workers.Go(func() { a.growAll(growing) })
	a.workers.Go(func() { a.tellAll(growing) })
	return a, nil
}

func newTenant(name string, quota int64) *tenant {
	return &tenant{name: name, quota: quota, alloc: paging.NewAllocator(paging.AllocatorConfig{})}
}

// Kind implements tier.Tier.
func (a *Arena) Kind() tier.Kind { return tier.RAM }

// MaxPageBytes is the longest page that an extent holds.
func (a *Arena) MaxPageBytes() int64 { return a.cfg.ExtentBytes - shm.GenTableBytes(a.cfg.ExtentBytes) }

// A Ref is the number of an extent and, in the lower half, the unit at which the
// slot begins in it. Neither is 0: the table lies before the first slot.
func refOf(p paging.Place) tier.Ref {
	return tier.Ref(p.Extent)<<32 | tier.Ref(p.Offset/paging.UnitBytes)
}

func placeOf(r tier.Ref) paging.Place {
	return paging.Place{Extent: paging.ExtentID(r >> 32), Offset: uint64(uint32(r)) * paging.UnitBytes}
}

func (a *Arena) extentOf(r tier.Ref) *extent { return (*a.table.Load())[r>>32] }

// Alloc implements tier.Arena.
func (a *Arena) Alloc(name string, bytes, owner uint32) (tier.Ref, error) {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return 0, paging.ErrClosed
	}
	p, err := a.allocLocked(a.tenantLocked(name), bytes, owner)
	a.mu.Unlock()
	if err != nil {
		return 0, err
	}
	r := refOf(p)
	// No reader knows the slot: nothing of it is published until it is filled.
	if !sabotage.On("reuse-leased-slot") {
		a.extentOf(r).raise(p.Offset, roundUp(bytes))
	}
	return r, nil
}

func roundUp(bytes uint32) int64 {
	return (int64(bytes) + paging.UnitBytes - 1) &^ (paging.UnitBytes - 1)
}

// raise gives all units of a slot a new generation: an old slot of another size
// may have begun at any of them.
func (e *extent) raise(offset uint64, bytes int64) {
	for end := offset + uint64(bytes); offset < end; offset += paging.UnitBytes {
		e.gens.Raise(offset)
	}
}

func (a *Arena) tenantLocked(name string) *tenant {
	t := a.mu.tenants[name]
	if t == nil {
		t = newTenant(name, a.cfg.Quotas[name])
		a.mu.tenants[name] = t
	}
	return t
}

func (a *Arena) allocLocked(t *tenant, bytes, owner uint32) (paging.Place, error) {
	size := roundUp(bytes)
	if t.quota > 0 && t.used+size > t.quota {
		return paging.Place{}, paging.ErrOverQuota
	}
	p, ok := t.alloc.Alloc(uint64(bytes), owner)
	if !ok && int64(bytes) <= a.MaxPageBytes() && a.feedLocked(t) {
		p, ok = t.alloc.Alloc(uint64(bytes), owner)
	}
	if !ok {
		return paging.Place{}, paging.ErrNoSpace
	}
	t.used += size
	(*a.table.Load())[p.Extent].slots++
	return p, nil
}

// Free implements tier.Tier.
func (a *Arena) Free(refs ...tier.Ref) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return
	}
	for _, r := range refs {
		if r != 0 {
			a.freeLocked(r)
		}
	}
}

func (a *Arena) freeLocked(r tier.Ref) {
	e := a.extentOf(r)
	p := placeOf(r)
	e.tenant.used -= int64(e.tenant.alloc.SlotSize(p))
	e.tenant.alloc.Free(p)
	if e.slots--; e.slots == 0 {
		a.recycleLocked()
	}
}

// Bytes implements tier.Arena.
func (a *Arena) Bytes(r tier.Ref, n uint32) []byte {
	at := int64(uint32(r)) * paging.UnitBytes
	return a.extentOf(r).mem.Bytes()[at : at+int64(n) : at+roundUp(n)]
}

// Slot implements tier.Arena.
func (a *Arena) Slot(r tier.Ref, n uint32, sum uint64) paging.Slot {
	offset := uint64(uint32(r)) * paging.UnitBytes
	return paging.Slot{Extent: paging.ExtentID(r >> 32), Bytes: n, Offset: offset, Generation: a.extentOf(r).gens.Load(offset), Sum: sum}
}

// Store implements tier.Tier, for Config.Tenant.
func (a *Arena) Store(ctx context.Context, pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) error {
	n := len(pages)
	if len(src) != n || len(owners) != n || len(refs) != n {
		return fmt.Errorf("store %d pages from %d sources, %d owners, %d refs: %w", n, len(src), len(owners), len(refs), paging.ErrInvalid)
	}
	for i, p := range pages {
		if len(src[i]) != int(p.Bytes) || p.Bytes < paging.MinPageBytes {
			return fmt.Errorf("store a page of %d bytes from %d: %w", p.Bytes, len(src[i]), paging.ErrInvalid)
		}
	}
	clear(refs)
	a.use.RLock()
	defer a.use.RUnlock()
	var failed error
	for i, p := range pages {
		if ctx.Err() != nil {
			return fmt.Errorf("store: %w: %w", context.Cause(ctx), paging.ErrExpired)
		}
		r, err := a.Alloc(a.cfg.Tenant, p.Bytes, owners[i])
		if err != nil {
			failed = err
			continue
		}
		copy(a.Bytes(r, p.Bytes), src[i])
		refs[i] = r
	}
	return failed
}

// Load implements tier.Tier.
func (a *Arena) Load(ctx context.Context, p tier.Page, r tier.Ref, dst []byte) error {
	if len(dst) != int(p.Bytes) {
		return fmt.Errorf("load a page of %d bytes into %d: %w", p.Bytes, len(dst), paging.ErrInvalid)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("load: %w: %w", context.Cause(ctx), paging.ErrExpired)
	}
	a.use.RLock()
	defer a.use.RUnlock()
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return paging.ErrClosed
	}
	size := int64(a.extentOf(r).tenant.alloc.SlotSize(placeOf(r)))
	a.mu.Unlock()
	if size != roundUp(p.Bytes) {
		return fmt.Errorf("load a page of %d bytes from a slot of %d: %w", p.Bytes, size, paging.ErrInvalid)
	}
	if sum := paging.CopyChecksum(dst, a.Bytes(r, p.Bytes)); sum != p.Sum {
		return fmt.Errorf("page at %d has checksum %016x, want %016x: %w", uint64(r), sum, p.Sum, paging.ErrCorrupt)
	}
	return nil
}

// Usage implements tier.Tier.
func (a *Arena) Usage() tier.Usage {
	a.mu.Lock()
	defer a.mu.Unlock()
	u := tier.Usage{State: tier.Ready, BudgetBytes: a.cfg.BudgetBytes, Reason: a.mu.stopped}
	if a.mu.closed {
		u.State, u.Reason = tier.Closed, ""
		return u
	}
	tables := int64(a.mu.extents) * shm.GenTableBytes(a.cfg.ExtentBytes)
	u.HeldBytes = int64(a.mu.extents)*a.cfg.ExtentBytes + a.mu.aside
	u.Growing = a.liveLocked() < a.planned
	u.UsedBytes = tables + a.mu.aside
	for _, t := range a.mu.tenants {
		s := t.alloc.Usage()
		u.UsedBytes += int64(s.UsedBytes)
		u.PageBytes += int64(s.PageBytes)
		u.Pages += int64(s.Slots)
	}
	return u
}

// liveLocked is the number of extents that pages can be put into.
func (a *Arena) liveLocked() (n int) {
	for _, e := range *a.table.Load() {
		if e != nil {
			n++
		}
	}
	return n
}

// Close implements tier.Tier. The memory is unmapped: processes that mapped it
// keep it until they end.
func (a *Arena) Close() error {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return nil
	}
	a.mu.closed = true
	a.mu.Unlock()
	a.cancel()
	a.workers.Wait()
	a.use.Lock()
	defer a.use.Unlock()
	var first error
	for _, e := range slices.Concat(*a.table.Load(), a.mu.doomed) {
		if e != nil {
			if err := e.mem.Close(); err != nil && first == nil {
				first = fmt.Errorf("close extent %d: %w", e.id, err)
			}
		}
	}
	return first
}

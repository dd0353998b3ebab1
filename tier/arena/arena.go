package arena

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/tier"
)

// Memory is what an extent is made of.
type Memory interface {
	// Size is the bytes of the extent, those before its first slot included.
	Size() int64
	// FirstOffset is where its first slot can begin, a multiple of paging.UnitBytes.
	FirstOffset() int64
	// Generations is the table of the extent's slots.
	Generations() shm.Generations
	// Close gives the memory back. Called once, when no slot of it is in use.
	Close() error
}

// Config of an Arena. All of it is required but where it says otherwise.
type Config[M Memory] struct {
	Kind tier.Kind
	Name string // of the tier, for people: "RAM tier"

	// BudgetBytes is the hard bound of extents and of what is set aside.
	BudgetBytes int64
	// ExtentBytes is the length of an extent.
	ExtentBytes int64
	// ReservedBytes is the part of the budget that is kept for SetAside.
	ReservedBytes int64
	// Quotas bound the bytes of slots of tenants; those with a quota are sure of
	// one extent. A tenant that is not named, or has 0, has no bound but the budget.
	Quotas map[string]int64

	// Create makes an extent, which may take a while. place is a number below the
	// number of extents that no other extent has at the time.
	Create func(ctx context.Context, place int) (M, error)
	// Check is asked before each extent whether the machine can give so many bytes.
	Check func(bytes int64) error
	// ID is the number of an extent as others see it, from its number here, which
	// rises with each extent, and its place.
	ID func(number uint32, place int) paging.ExtentID
	// Handed lists what is handed over of an extent, in the order in which it goes.
	Handed func(id paging.ExtentID, m M) []shm.Extent

	// Added is told, from a goroutine of the arena and under no lock, that a
	// tenant got an extent. nil: nobody is.
	Added  func(tenant string)
	Logger *slog.Logger
}

// Arena is the extents of one tier and what lies in them: all of tier.Arena but
// the access to bytes. All methods may be called at the same time from many
// goroutines.
type Arena[M Memory] struct {
	// Immutable.
	cfg     Config[M]
	planned int   // extents when grown
	first   int64 // offset of the first slot of an extent
	cancel  context.CancelFunc
	workers sync.WaitGroup
	grow    chan struct{} // an extent is wanted
	tell    chan struct{} // a tenant got one

	table atomic.Pointer[[]*extent[M]] // by number; what hit paths read

	mu struct {
		sync.Mutex
		closed  bool
		next    uint32
		places  []bool       // which are taken
		extents int          // created and not closed, one being created included
		pool    []*extent[M] // of no tenant at present
		doomed  []*extent[M] // out of use, to be unmapped
		tenants map[string]*tenant[M]
		aside   int64
		stopped string // why no extent can be created now
		told    map[string]bool
	}
}

// extent is one piece of memory.
type extent[M Memory] struct {
	number uint32
	id     paging.ExtentID
	place  int
	mem    M
	gens   shm.Generations
	tenant *tenant[M] // whose it is, or was last; nil: nobody's yet. Guarded by Arena.mu.
	slots  int        // in use. Guarded by Arena.mu.
}

// tenant is what one tenant has. Guarded by Arena.mu.
type tenant[M Memory] struct {
	name    string
	quota   int64
	alloc   *paging.Allocator
	used    int64 // bytes of slots in use
	extents []*extent[M]
	tethers int  // processes that may have its extents mapped
	hungry  bool // found the pool empty, and nothing of it came since
}

// Open creates the first extent and starts to create the others. The error is
// that of Check for the whole budget, or of Create.
func Open[M Memory](ctx context.Context, cfg Config[M]) (*Arena[M], error) {
	a := &Arena[M]{cfg: cfg, planned: int((cfg.BudgetBytes - cfg.ReservedBytes) / cfg.ExtentBytes),
		grow: make(chan struct{}, 1), tell: make(chan struct{}, 1)}
	a.mu.tenants = map[string]*tenant[M]{}
	a.mu.told = map[string]bool{}
	a.mu.next = 1
	a.mu.places = make([]bool, a.planned)
	for name, quota := range cfg.Quotas {
		a.mu.tenants[name] = newTenant[M](name, quota)
	}
	a.table.Store(&[]*extent[M]{nil})
	if err := cfg.Check(cfg.BudgetBytes); err != nil {
		return nil, err
	}
	a.mu.extents = 1
	if err := a.create(ctx); err != nil {
		return nil, err
	}
	a.first = (*a.table.Load())[1].mem.FirstOffset()
	growing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	a.cancel = cancel
	// Owner: the Arena. Exit: Close. Bound: these two.
	a.workers.Go(func() { a.growAll(growing) })
	a.workers.Go(func() { a.tellAll(growing) })
	return a, nil
}

func newTenant[M Memory](name string, quota int64) *tenant[M] {
	return &tenant[M]{name: name, quota: quota, alloc: paging.NewAllocator(paging.AllocatorConfig{})}
}

// Kind implements tier.Tier.
func (a *Arena[M]) Kind() tier.Kind { return a.cfg.Kind }

// MaxPageBytes is the longest page that an extent holds.
func (a *Arena[M]) MaxPageBytes() int64 { return a.cfg.ExtentBytes - a.first }

// A Ref is the number of an extent and, in the lower half, the unit at which the
// slot begins in it. Neither is 0: the table lies before the first slot.
func refOf(p paging.Place) tier.Ref {
	return tier.Ref(p.Extent)<<32 | tier.Ref(p.Offset/paging.UnitBytes)
}

func placeOf(r tier.Ref) paging.Place {
	return paging.Place{Extent: paging.ExtentID(r >> 32), Offset: uint64(uint32(r)) * paging.UnitBytes}
}

func (a *Arena[M]) extentOf(r tier.Ref) *extent[M] { return (*a.table.Load())[r>>32] }

// Alloc implements tier.Arena.
func (a *Arena[M]) Alloc(name string, bytes, owner uint32) (tier.Ref, error) {
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
		a.extentOf(r).raise(p.Offset, SlotSize(bytes))
	}
	return r, nil
}

// raise gives all units of a slot a new generation: an old slot of another size
// may have begun at any of them.
func (e *extent[M]) raise(offset uint64, bytes int64) {
	for end := offset + uint64(bytes); offset < end; offset += paging.UnitBytes {
		e.gens.Raise(offset)
	}
}

func (a *Arena[M]) tenantLocked(name string) *tenant[M] {
	t := a.mu.tenants[name]
	if t == nil {
		t = newTenant[M](name, a.cfg.Quotas[name])
		a.mu.tenants[name] = t
	}
	return t
}

func (a *Arena[M]) allocLocked(t *tenant[M], bytes, owner uint32) (paging.Place, error) {
	size := SlotSize(bytes)
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
func (a *Arena[M]) Free(refs ...tier.Ref) {
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

func (a *Arena[M]) freeLocked(r tier.Ref) {
	e := a.extentOf(r)
	p := placeOf(r)
	e.tenant.used -= int64(e.tenant.alloc.SlotSize(p))
	e.tenant.alloc.Free(p)
	if e.slots--; e.slots == 0 {
		a.recycleLocked()
	}
}

// Slot implements tier.Arena.
func (a *Arena[M]) Slot(r tier.Ref, n uint32, sum uint64) paging.Slot {
	e, offset := a.extentOf(r), uint64(uint32(r))*paging.UnitBytes
	return paging.Slot{Extent: e.id, Bytes: n, Offset: offset, Generation: e.gens.Load(offset), Sum: sum}
}

// Usage implements tier.Tier.
func (a *Arena[M]) Usage() tier.Usage {
	a.mu.Lock()
	defer a.mu.Unlock()
	u := tier.Usage{State: tier.Ready, BudgetBytes: a.cfg.BudgetBytes, Reason: a.mu.stopped}
	if a.mu.closed {
		u.State, u.Reason = tier.Closed, ""
		return u
	}
	tables := int64(a.mu.extents) * a.first
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
func (a *Arena[M]) liveLocked() (n int) {
	for _, e := range *a.table.Load() {
		if e != nil {
			n++
		}
	}
	return n
}

// Stop refuses what comes from now on and ends the goroutines; the memory stays
// until Close. Idempotent.
func (a *Arena[M]) Stop() {
	a.mu.Lock()
	closed := a.mu.closed
	a.mu.closed = true
	a.mu.Unlock()
	if !closed {
		a.cancel()
	}
	a.workers.Wait()
}

// Close gives all memory back, after Stop: processes that mapped it keep it
// until they end. A second call does nothing.
func (a *Arena[M]) Close() error {
	a.mu.Lock()
	all := slices.Concat(*a.table.Load(), a.mu.doomed)
	a.table.Store(&[]*extent[M]{nil})
	a.mu.doomed = nil
	a.mu.Unlock()
	var errs []error
	for _, e := range all {
		if e != nil {
			if err := e.mem.Close(); err != nil {
				errs = append(errs, fmt.Errorf("close extent %d: %w", e.id, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Memory is the extent that r lies in, and the offset of the slot in it.
func (a *Arena[M]) Memory(r tier.Ref) (m M, offset int64) {
	return a.extentOf(r).mem, int64(uint32(r)) * paging.UnitBytes
}

// SlotBytes is the bytes of the slot at r; paging.ErrClosed after Stop.
func (a *Arena[M]) SlotBytes(r tier.Ref) (int64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return 0, paging.ErrClosed
	}
	return int64(a.extentOf(r).tenant.alloc.SlotSize(placeOf(r))), nil
}

// SlotSize is the bytes of the slot of a page.
func SlotSize(bytes uint32) int64 {
	return (int64(bytes) + paging.UnitBytes - 1) &^ (paging.UnitBytes - 1)
}

// CheckStore is what tier.Tier asks of the arguments of Store.
func CheckStore(pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) error {
	n := len(pages)
	if len(src) != n || len(owners) != n || len(refs) != n {
		return fmt.Errorf("store %d pages from %d sources, %d owners, %d refs: %w", n, len(src), len(owners), len(refs), paging.ErrInvalid)
	}
	for i, p := range pages {
		if len(src[i]) != int(p.Bytes) || p.Bytes < paging.MinPageBytes {
			return fmt.Errorf("store a page of %d bytes from %d: %w", p.Bytes, len(src[i]), paging.ErrInvalid)
		}
	}
	return nil
}

// CheckLoad is what tier.Tier asks of the arguments of Load.
func (a *Arena[M]) CheckLoad(p tier.Page, r tier.Ref, dst []byte) error {
	if len(dst) != int(p.Bytes) {
		return fmt.Errorf("load a page of %d bytes into %d: %w", p.Bytes, len(dst), paging.ErrInvalid)
	}
	size, err := a.SlotBytes(r)
	if err != nil {
		return err
	}
	if size != SlotSize(p.Bytes) {
		return fmt.Errorf("load a page of %d bytes from a slot of %d: %w", p.Bytes, size, paging.ErrInvalid)
	}
	return nil
}

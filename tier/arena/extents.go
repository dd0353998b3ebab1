package arena

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
)

// tryAgain is the pause before an extent is tried again for which there was no memory.
const tryAgain = 5 * time.Second

// create creates one extent, which extents counts already.
func (a *Arena[M]) create(ctx context.Context) error {
	a.mu.Lock()
	place := slices.Index(a.mu.places, false) // extents counts one that has none yet
	a.mu.places[place] = true
	a.mu.Unlock()
	m, err := a.make(ctx, place)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		a.mu.extents--
		a.mu.places[place] = false
		return err
	}
	e := &extent[M]{number: a.mu.next, id: a.cfg.ID(a.mu.next, place), place: place, mem: m, gens: m.Generations()}
	a.mu.next++
	table := slices.Clone(*a.table.Load())
	table = append(table, e)
	a.table.Store(&table)
	a.mu.pool = append(a.mu.pool, e)
	a.mu.stopped = ""
	return nil
}

func (a *Arena[M]) make(ctx context.Context, place int) (m M, err error) {
	if err := a.cfg.Check(a.cfg.ExtentBytes); err != nil {
		return m, err
	}
	return a.cfg.Create(ctx, place)
}

// growAll creates the extents of the budget, and later those that replace the
// ones of a tenant that gave some back.
func (a *Arena[M]) growAll(ctx context.Context) {
	for ctx.Err() == nil {
		a.bury()
		a.mu.Lock()
		a.recycleLocked()
		want := a.mu.extents < a.planned
		if want {
			a.mu.extents++
		}
		a.mu.Unlock()
		var pause <-chan time.Time
		if want {
			err := a.create(ctx)
			if err == nil {
				continue
			}
			a.growFailed(ctx, err)
			pause = time.After(tryAgain)
		}
		select {
		case <-pause:
		case <-a.grow:
		case <-ctx.Done():
		}
	}
}

func (a *Arena[M]) growFailed(ctx context.Context, err error) {
	a.mu.Lock()
	again := a.mu.stopped == err.Error()
	a.mu.stopped = err.Error()
	a.mu.Unlock()
	if !again && ctx.Err() == nil {
		a.cfg.Logger.Warn(a.cfg.Name+" does not grow", "error", err)
	}
}

// feedLocked gives a tenant an extent of the pool; false if there is none for it.
func (a *Arena[M]) feedLocked(t *tenant[M]) bool {
	t.hungry = true
	if len(t.extents) > 0 && len(a.mu.pool)+a.planned-a.mu.extents <= a.owedLocked(t) {
		return false
	}
	// Rather one that was its own: others have to be replaced first.
	i := slices.IndexFunc(a.mu.pool, func(e *extent[M]) bool { return e.tenant == t })
	if i < 0 {
		i = slices.IndexFunc(a.mu.pool, func(e *extent[M]) bool { return e.tenant == nil })
	}
	if i < 0 {
		a.recycleLocked()
		return false
	}
	e := a.mu.pool[i]
	if t.alloc.AddExtent(paging.ExtentID(e.number), uint64(a.first), uint64(a.cfg.ExtentBytes-a.first)) != nil {
		return false // its number is in use: cannot be
	}
	a.mu.pool = slices.Delete(a.mu.pool, i, i+1)
	e.tenant = t
	t.extents = append(t.extents, e)
	t.hungry = false
	a.mu.told[t.name] = true
	wake(a.tell)
	return true
}

// owedLocked is the number of extents that have to stay for tenants with a quota
// that have none.
func (a *Arena[M]) owedLocked(t *tenant[M]) (n int) {
	for name := range a.cfg.Quotas {
		if x := a.mu.tenants[name]; x != t && len(x.extents) == 0 {
			n++
		}
	}
	return n
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// recycleLocked replaces empty extents of other tenants while somebody found the
// pool empty: the memory is closed, and growAll creates a new extent. The memory
// of a tenant that still has processes which may have mapped it stays: it would
// not be free.
func (a *Arena[M]) recycleLocked() {
	for _, t := range a.mu.tenants {
		if !t.hungry {
			continue
		}
		if e := a.spareLocked(t); e != nil {
			a.closeLocked(e)
		}
	}
}

// spareLocked is an empty extent of a tenant other than t that can be replaced.
func (a *Arena[M]) spareLocked(t *tenant[M]) *extent[M] {
	if a.mu.extents-len(a.mu.doomed) < a.planned {
		return nil // one is on its way
	}
	for _, e := range a.mu.pool {
		if e.tenant != nil && e.tenant != t && e.tenant.tethers == 0 {
			return e
		}
	}
	for _, x := range a.mu.tenants {
		if x == t || x.tethers > 0 || len(x.extents) <= a.shareLocked() {
			continue
		}
		if i := slices.IndexFunc(x.extents, func(e *extent[M]) bool { return e.slots == 0 }); i >= 0 {
			return x.extents[i]
		}
	}
	return nil
}

// shareLocked is the number of extents that is an equal share.
func (a *Arena[M]) shareLocked() int {
	n := 0
	for _, t := range a.mu.tenants {
		if len(t.extents) > 0 || t.hungry {
			n++
		}
	}
	return a.planned / max(1, n)
}

// closeLocked takes an empty extent out of use; growAll unmaps it, which takes a
// while, and makes a new one in its place.
func (a *Arena[M]) closeLocked(e *extent[M]) {
	if i := slices.Index(a.mu.pool, e); i >= 0 {
		a.mu.pool = slices.Delete(a.mu.pool, i, i+1)
	} else if e.tenant.alloc.RemoveExtent(paging.ExtentID(e.number)) != nil {
		return // not empty: cannot be
	} else {
		e.tenant.extents = slices.DeleteFunc(e.tenant.extents, func(x *extent[M]) bool { return x == e })
	}
	table := slices.Clone(*a.table.Load())
	table[e.number] = nil
	a.table.Store(&table)
	a.mu.doomed = append(a.mu.doomed, e)
	wake(a.grow)
}

// bury unmaps what closeLocked took out of use.
func (a *Arena[M]) bury() {
	a.mu.Lock()
	doomed := a.mu.doomed
	a.mu.doomed = nil
	a.mu.Unlock()
	for _, e := range doomed {
		if err := e.mem.Close(); err != nil {
			a.cfg.Logger.Warn("extent was not unmapped", "extent", uint32(e.id), "error", err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.extents -= len(doomed)
	for _, e := range doomed {
		a.mu.places[e.place] = false
	}
}

// tellAll tells of extents that tenants got.
func (a *Arena[M]) tellAll(ctx context.Context) {
	for {
		select {
		case <-a.tell:
		case <-ctx.Done():
			return
		}
		a.mu.Lock()
		told := a.mu.told
		a.mu.told = map[string]bool{}
		a.mu.Unlock()
		for tenant := range told {
			if a.cfg.Added != nil {
				a.cfg.Added(tenant)
			}
		}
	}
}

// Extents lists the memory of a tenant, by rising number. The descriptors stay
// valid until Close, and belong to the arena.
func (a *Arena[M]) Extents(name string) []shm.Extent {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.mu.tenants[name]
	if t == nil || a.mu.closed {
		return nil
	}
	list := make([]shm.Extent, 0, len(t.extents))
	for _, e := range t.extents {
		list = append(list, a.cfg.Handed(e.id, e.mem)...)
	}
	slices.SortStableFunc(list, func(x, y shm.Extent) int { return cmp.Compare(x.ID, y.ID) })
	return list
}

// Tethered counts the processes that may have mapped extents of a tenant: their
// memory does not go to another tenant, as it would not be free.
func (a *Arena[M]) Tethered(name string, change int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return
	}
	t := a.tenantLocked(name)
	if t.tethers += change; t.tethers == 0 {
		a.recycleLocked()
	}
}

// SetAside takes bytes of the budget for memory that lies elsewhere:
// paging.ErrNoSpace at once if the part kept for that is used up. GiveBack
// returns them.
func (a *Arena[M]) SetAside(bytes int64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	room := a.cfg.BudgetBytes - int64(a.planned)*a.cfg.ExtentBytes - a.mu.aside
	if bytes > room {
		return fmt.Errorf("%d bytes of staging where %d are left of the RAM budget: %w", bytes, room, paging.ErrNoSpace)
	}
	a.mu.aside += bytes
	return nil
}

// GiveBack returns what SetAside took.
func (a *Arena[M]) GiveBack(bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.aside -= bytes
}

// Reclaim implements tier.Arena: room of other page sizes in tenant's own
// extents, else the emptiest extent of the tenant that has most beyond its
// share; that one serves tenant only when it has been replaced.
func (a *Arena[M]) Reclaim(name string, bytes uint32, movable func(owner uint32) bool) ([]uint32, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return nil, false
	}
	t := a.tenantLocked(name)
	if owners, ok := t.alloc.Reclaim(uint64(bytes), movable); ok && len(owners) > 0 {
		return owners, true
	}
	if !t.hungry || len(t.extents) >= a.shareLocked() || a.mu.extents-len(a.mu.doomed) < a.planned {
		return nil, false
	}
	donor := a.donorLocked(t)
	if donor == nil {
		return nil, false
	}
	byUse := slices.Clone(donor.extents)
	slices.SortFunc(byUse, func(x, y *extent[M]) int { return x.slots - y.slots })
	for _, e := range byUse {
		if owners, ok := e.owners(movable); ok {
			return owners, len(owners) > 0
		}
	}
	return nil, false
}

// donorLocked is the tenant that has most extents beyond an equal share.
func (a *Arena[M]) donorLocked(t *tenant[M]) (donor *tenant[M]) {
	most := a.shareLocked()
	for _, x := range a.mu.tenants {
		if x != t && x.tethers == 0 && len(x.extents) > most {
			donor, most = x, len(x.extents)
		}
	}
	return donor
}

// owners lists who has slots in the extent; false if one of them must stay.
func (e *extent[M]) owners(movable func(owner uint32) bool) ([]uint32, bool) {
	seen := map[uint32]bool{}
	var list []uint32
	for at := e.mem.FirstOffset(); at < e.mem.Size(); {
		p := paging.Place{Extent: paging.ExtentID(e.number), Offset: uint64(at)}
		owner, used := e.tenant.alloc.Owner(p)
		if !used {
			at += paging.UnitBytes
			continue
		}
		at += int64(e.tenant.alloc.SlotSize(p))
		if seen[owner] {
			continue
		}
		if !movable(owner) {
			return nil, false
		}
		seen[owner] = true
		list = append(list, owner)
	}
	return list, true
}

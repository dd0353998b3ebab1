package tiertest

import (
	"context"
	"sync/atomic"

	"github.com/kvtier/kvtier/tier"
)

// Faulty wraps a tier with faults. The hooks may be changed at any time with
// the Set methods; a nil hook does nothing.
type Faulty struct {
	tier.Durable
	store atomic.Pointer[func(ctx context.Context, pages []tier.Page) error]
	load  atomic.Pointer[func(ctx context.Context, p tier.Page) error]
	usage atomic.Pointer[func(tier.Usage) tier.Usage]

	// Stores, Loads and Frees count calls, Frees refs.
	Stores, Loads, Frees atomic.Int64
}

// SetStore installs a hook that runs before a Store: its error is the answer
// and nothing is stored. It may block.
func (f *Faulty) SetStore(hook func(ctx context.Context, pages []tier.Page) error) {
	f.store.Store(&hook)
}

// SetLoad installs a hook that runs before a Load: its error is the answer.
func (f *Faulty) SetLoad(hook func(ctx context.Context, p tier.Page) error) { f.load.Store(&hook) }

// SetUsage installs a hook that changes what Usage says.
func (f *Faulty) SetUsage(hook func(tier.Usage) tier.Usage) { f.usage.Store(&hook) }

// Store implements tier.Tier.
func (f *Faulty) Store(ctx context.Context, pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) error {
	f.Stores.Add(1)
	if hook := f.store.Load(); hook != nil && *hook != nil {
		if err := (*hook)(ctx, pages); err != nil {
			clear(refs)
			return err
		}
	}
	return f.Durable.Store(ctx, pages, src, owners, refs)
}

// Load implements tier.Tier.
func (f *Faulty) Load(ctx context.Context, p tier.Page, r tier.Ref, dst []byte) error {
	f.Loads.Add(1)
	if hook := f.load.Load(); hook != nil && *hook != nil {
		if err := (*hook)(ctx, p); err != nil {
			return err
		}
	}
	return f.Durable.Load(ctx, p, r, dst)
}

// Free implements tier.Tier.
func (f *Faulty) Free(refs ...tier.Ref) {
	f.Frees.Add(int64(len(refs)))
	f.Durable.Free(refs...)
}

// Usage implements tier.Tier.
func (f *Faulty) Usage() tier.Usage {
	u := f.Durable.Usage()
	if hook := f.usage.Load(); hook != nil && *hook != nil {
		u = (*hook)(u)
	}
	return u
}

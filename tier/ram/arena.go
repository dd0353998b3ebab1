package ram

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/arena"
)

// Arena implements tier.Arena. All methods may be called at the same time from
// many goroutines; what Bytes returned must not be used after Close.
type Arena struct {
	*arena.Arena[*memory]

	tenant string
	use    sync.RWMutex // Store and Load share it, so that Close unmaps under nobody
}

// memory is one memfd, with the table of generations before the first slot.
type memory struct {
	*shm.Memory
	release func() // of Config.Mapped
}

// FirstOffset implements arena.Memory.
func (m *memory) FirstOffset() int64 { return shm.GenTableBytes(m.Size()) }

// Generations implements arena.Memory.
func (m *memory) Generations() shm.Generations { return shm.Of(m.Bytes()) }

// Close implements arena.Memory.
func (m *memory) Close() error {
	m.release()
	return m.Memory.Close()
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
	inner, err := arena.Open(ctx, arena.Config[*memory]{
		Kind: tier.RAM, Name: "RAM tier", BudgetBytes: cfg.BudgetBytes, ExtentBytes: cfg.ExtentBytes, ReservedBytes: cfg.StagingBytes,
		Quotas: cfg.Quotas, Create: cfg.create, Check: cfg.checkMemory, Added: cfg.Added, Logger: cfg.Logger,
		ID: func(number uint32, _ int) paging.ExtentID { return paging.ExtentID(number) },
		Handed: func(id paging.ExtentID, m *memory) []shm.Extent {
			return []shm.Extent{{ID: id, Kind: shm.KindRAM, Bytes: m.Size(), FD: m.FD()}}
		},
	})
	if err != nil {
		return nil, err
	}
	return &Arena{Arena: inner, tenant: cfg.Tenant}, nil
}

// checkMemory refuses to take bytes that the machine has not.
func (c *Config) checkMemory(bytes int64) error {
	if c.FreeMemory == nil {
		return nil
	}
	free, err := c.FreeMemory()
	if err != nil {
		return fmt.Errorf("ram tier: read how much memory is free: %w: %w", paging.ErrIO, err)
	}
	if bytes > free-c.MarginBytes {
		return fmt.Errorf("ram tier: %d bytes are needed and %d are available (%d free, %d left alone): lower the RAM budget or raise the memory limit: %w",
			bytes, max(0, free-c.MarginBytes), free, c.MarginBytes, paging.ErrNoSpace)
	}
	return nil
}

// create makes an extent and touches it.
func (c *Config) create(ctx context.Context, _ int) (*memory, error) {
	mem, err := shm.CreateExtent("kvtier-ram", c.ExtentBytes, shm.Options{HugePages: c.HugePages, NUMANode: c.NUMANode - 1})
	if err != nil {
		return nil, fmt.Errorf("ram tier: %w", err)
	}
	if err := mem.Populate(ctx); err != nil {
		return nil, fmt.Errorf("ram tier: %w", errors.Join(err, mem.Close()))
	}
	m := &memory{Memory: mem, release: func() {}}
	if c.Mapped != nil {
		m.release = c.Mapped(mem.Bytes())
	}
	return m, nil
}

// Bytes implements tier.Arena.
func (a *Arena) Bytes(r tier.Ref, n uint32) []byte {
	m, at := a.Memory(r)
	return m.Bytes()[at : at+int64(n) : at+arena.SlotSize(n)]
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
	for i, p := range pages {
		if ctx.Err() != nil {
			return fmt.Errorf("store: %w: %w", context.Cause(ctx), paging.ErrExpired)
		}
		r, err := a.Alloc(a.tenant, p.Bytes, owners[i])
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
	if ctx.Err() != nil {
		return fmt.Errorf("load: %w: %w", context.Cause(ctx), paging.ErrExpired)
	}
	a.use.RLock()
	defer a.use.RUnlock()
	if err := a.CheckLoad(p, r, dst); err != nil {
		return err
	}
	if sum := paging.CopyChecksum(dst, a.Bytes(r, p.Bytes)); sum != p.Sum {
		return fmt.Errorf("page at %d has checksum %016x, want %016x: %w", uint64(r), sum, p.Sum, paging.ErrCorrupt)
	}
	return nil
}

// Close implements tier.Tier. The memory is unmapped: processes that mapped it
// keep it until they end.
func (a *Arena) Close() error {
	a.Stop()
	a.use.Lock()
	defer a.use.Unlock()
	return a.Arena.Close()
}

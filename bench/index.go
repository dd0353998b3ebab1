package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/nvme"
	"github.com/kvtier/kvtier/tier/ram"
)

// IndexConfig describes "bench index".
type IndexConfig struct {
	Pages    int
	TempDir  string
	Progress Progress
}

const (
	indexRAM     = 256 << 20
	indexPage    = 4 << 10
	indexChain   = 4096 // blocks of one commit
	indexWriters = 4
)

// Index fills the NVMe tier with pages of 4 KiB, opens everything again and
// measures how long the index takes to load and what memory it takes for each
// page: index, policies and tables of both tiers. What an empty node of the
// same configuration takes is subtracted.
func Index(ctx context.Context, cfg IndexConfig) (_ *IndexReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 2*int64(cfg.Pages)*indexPage)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	b := &indexed{cfg: &cfg, ns: namespaceOf("index", 16, indexPage), page: make([]byte, indexPage)}
	b.ns.Tenant = "default"
	empty, _, _, err := b.reopen(ctx, filepath.Join(work.Dir, "empty"))
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(work.Dir, "full")
	if err := b.fill(ctx, dir); err != nil {
		return nil, err
	}
	full, pages, load, err := b.reopen(ctx, dir)
	if err != nil {
		return nil, err
	}
	if pages == 0 {
		return nil, fmt.Errorf("no page came back: %w", paging.ErrNotFound)
	}
	return &IndexReport{Pages: pages, BytesPerPage: float64(full-empty) / float64(pages), LoadS: load.Seconds(), HeapBytes: full}, nil
}

// indexed is one run.
type indexed struct {
	cfg  *IndexConfig
	ns   paging.Namespace
	page []byte
}

// tiers is a hierarchy over both tiers, without a node around it.
type tiers struct {
	hier *tier.Hierarchy
	ram  *ram.Arena
	nvme *nvme.Tier
}

func (b *indexed) open(ctx context.Context, dir string) (t *tiers, err error) {
	t = &tiers{}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close(ctx))
		}
	}()
	if t.ram, err = ram.Open(ctx, ram.Config{BudgetBytes: indexRAM, StagingBytes: -1}); err != nil {
		return t, err
	}
	budget := int64(b.cfg.Pages)*indexPage*5/4 + 64<<20
	if t.nvme, err = nvme.Open(nvme.Config{Dir: dir, BudgetBytes: budget}); err != nil {
		return t, err
	}
	if t.hier, err = tier.Open(ctx, tier.Config{Arena: t.ram, Durable: t.nvme}); err != nil {
		return t, err
	}
	_, err = t.hier.RegisterNamespace(&b.ns)
	return t, err
}

func (t *tiers) close(ctx context.Context) error {
	var errs []error
	if t.hier != nil {
		errs = append(errs, t.hier.Close(ctx))
	}
	if t.nvme != nil {
		errs = append(errs, t.nvme.Close())
	}
	if t.ram != nil {
		errs = append(errs, t.ram.Close())
	}
	return errors.Join(errs...)
}

// fill stores the pages as durable, in chains.
func (b *indexed) fill(ctx context.Context, dir string) error {
	t, err := b.open(ctx, dir)
	if err != nil {
		return err
	}
	chains := (b.cfg.Pages + indexChain - 1) / indexChain
	steps := stepper(b.cfg.Progress, int64(chains))
	err = parallel(indexWriters, chains, func(_, i int) error {
		err := b.fillChain(ctx, t, i)
		steps()
		return err
	})
	return errors.Join(err, t.close(ctx))
}

func (b *indexed) fillChain(ctx context.Context, t *tiers, i int) error {
	names := make([]paging.BlockName, min(indexChain, b.cfg.Pages-i*indexChain))
	for j := range names {
		names[j] = TraceBlock(uint64(i*indexChain + j))
	}
	for first := 0; first < len(names); {
		a, outcomes, _, err := t.hier.Reserve(ctx, tier.ReserveRequest{
			Namespace: b.ns.ID(), Names: names[first:], First: first, MaxRows: 1024, Deadline: time.Now().Add(time.Minute),
		})
		if err != nil {
			return err
		}
		var rows []tier.CommitRow
		for j, o := range outcomes {
			if o == tier.Granted {
				rows = append(rows, tier.CommitRow{Row: j, Src: [][]byte{b.page}})
			}
		}
		if len(rows) == 0 {
			return fmt.Errorf("block %d of chain %d: %v: %w", first, i, outcomes[0], paging.ErrNoSpace)
		}
		if _, err := a.Commit(ctx, rows, tier.CommitOptions{Durable: true}); err != nil {
			return err
		}
		a.Abort()
		first += len(rows)
	}
	return nil
}

// reopen opens the tiers and returns the heap that they take, the pages on disk,
// and how long it took.
func (b *indexed) reopen(ctx context.Context, dir string) (heap, pages int64, took time.Duration, err error) {
	before := heapBytes()
	start := time.Now()
	t, err := b.open(ctx, dir)
	if err != nil {
		return 0, 0, 0, err
	}
	took = time.Since(start)
	heap, pages = heapBytes()-before, t.nvme.Usage().Pages
	return heap, pages, took, t.close(ctx)
}

// heapBytes is the live heap.
func heapBytes() int64 {
	runtime.GC()
	runtime.GC() // what finalizers of the first held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

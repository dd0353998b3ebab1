package hbm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
)

// memory is one extent: an exported allocation of the device, and the table of
// its generations in shared memory.
type memory struct {
	mem   gpu.Mem
	file  *os.File
	table *shm.Memory
}

// Size implements arena.Memory.
func (m *memory) Size() int64 { return m.mem.Size() }

// FirstOffset implements arena.Memory.
func (m *memory) FirstOffset() int64 { return 0 }

// Generations implements arena.Memory.
func (m *memory) Generations() shm.Generations { return shm.TableOf(m.table.Bytes()) }

// Close implements arena.Memory.
func (m *memory) Close() error {
	return errors.Join(m.file.Close(), m.table.Close(), m.mem.Free())
}

// Extent numbers of a pool lie between those of RAM and those of staging, and
// carry the extent's place.
const poolIDs = paging.ExtentID(1) << 30

func extentID(number uint32, place int) paging.ExtentID {
	return poolIDs | paging.ExtentID(number)<<placeBits&(poolIDs-1) | paging.ExtentID(place)
}

// handed is what an engine gets of an extent. The table comes first: a mapped
// extent can be used.
func handed(id paging.ExtentID, m *memory) []shm.Extent {
	return []shm.Extent{
		{ID: id, Kind: shm.KindPoolTable, Bytes: m.table.Size(), FD: m.table.FD()},
		{ID: id, Kind: shm.KindPool, Bytes: m.mem.Size(), FD: int(m.file.Fd())},
	}
}

// check refuses to take bytes that the machine has not.
func (c *Config) check(bytes int64) error {
	if c.FreeMemory == nil {
		return nil
	}
	free, err := c.FreeMemory()
	if err != nil {
		return fmt.Errorf("hbm tier: read how much memory is free: %w: %w", paging.ErrIO, err)
	}
	if bytes > free-marginBytes {
		return fmt.Errorf("hbm tier: %d bytes are needed and %d are available: lower the HBM budget or raise the memory limit: %w",
			bytes, max(0, free-marginBytes), paging.ErrNoSpace)
	}
	return nil
}

// create makes an extent.
func (c *Config) create(ctx context.Context, _ int) (_ *memory, err error) {
	m := new(memory)
	if m.mem, err = c.Device.Alloc(c.ExtentBytes, gpu.Pool); err != nil {
		return nil, fmt.Errorf("hbm tier: extent of %d bytes on %s: %w", c.ExtentBytes, c.Device.Info().Name, deviceError(err))
	}
	if m.file, err = m.mem.Export(); err != nil {
		return nil, fmt.Errorf("hbm tier: export an extent: %w", errors.Join(deviceError(err), m.mem.Free()))
	}
	if m.table, err = shm.CreateExtent("kvtier-pool-table", shm.GenTableBytes(c.ExtentBytes), shm.Options{NUMANode: -1}); err != nil {
		return nil, fmt.Errorf("hbm tier: %w", errors.Join(err, m.file.Close(), m.mem.Free()))
	}
	err = m.table.Populate(ctx)
	if err == nil {
		err = touch(ctx, m.mem.Bytes())
	}
	if err != nil {
		return nil, fmt.Errorf("hbm tier: %w", errors.Join(err, m.Close()))
	}
	return m, nil
}

// touchStep is how much is touched between two looks at the context.
const touchStep = 16 << 20

// touch has the machine back the memory of a device that is host memory, so that
// the first page in it does not wait for that.
func touch(ctx context.Context, b []byte) error {
	for at := 0; at < len(b); at += paging.UnitBytes {
		if at%touchStep == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		b[at] = 0
	}
	return nil
}

// deviceError is an error of the device in the words of package paging.
func deviceError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, gpu.ErrNoMemory):
		return fmt.Errorf("%w: %w", paging.ErrNoSpace, err)
	case errors.Is(err, gpu.ErrArgument), errors.Is(err, gpu.ErrFault):
		return fmt.Errorf("%w: %w", paging.ErrInvalid, err)
	}
	return fmt.Errorf("%w: %w", paging.ErrUnavailable, err)
}

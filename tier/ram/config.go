package ram

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
)

// Config of an Arena. Zero values mean the documented default.
type Config struct {
	// BudgetBytes is the hard bound of extents, their tables and what is set
	// aside. At least 1 MiB.
	BudgetBytes int64
	// MaxPageBytes is the longest page that must fit an extent. 0: a sixteenth of
	// the budget or paging.MaxPageBytes, whichever is less.
	MaxPageBytes int64
	// ExtentBytes is the length of an extent. 0: 1 GiB, or an eighth of the
	// budget if that is less, but never too short for the longest page.
	ExtentBytes int64
	// StagingBytes is the part of the budget that is kept for SetAside. 0: a
	// quarter of the budget, at most 2 GiB. Negative: nothing.
	StagingBytes int64
	// Quotas bound the bytes of slots of tenants; those with a quota are sure of
	// one extent. A tenant that is not named, or has 0, has no bound but the budget.
	Quotas map[string]int64
	// Tenant is the one that Store, which names none, allocates for. Empty: "default".
	Tenant string

	HugePages bool // 2 MiB pages where the system gives them
	// NUMANode is the node to take memory from, counted from 1. 0: no preference.
	NUMANode int

	// FreeMemory tells how many bytes the machine and the control group can
	// still give. nil: not asked.
	FreeMemory func() (int64, error)
	// MarginBytes of that are left alone. 0: 256 MiB.
	MarginBytes int64

	// Mapped is told of the memory of an extent before anything lies in it; what
	// it returns is called before the memory is unmapped. nil: nobody is told.
	Mapped func(extent []byte) (release func())
	// Added is told, from a goroutine of the arena and under no lock, that a
	// tenant got an extent. nil: nobody is.
	Added func(tenant string)
	// Logger is told of changes of state. nil: nothing is logged.
	Logger *slog.Logger
}

const (
	minBudget     = 1 << 20
	extentBytes   = 1 << 30
	extentsOfAll  = 8 // at least so many extents, while pages fit them
	stagingShare  = 4
	stagingMost   = 2 << 30
	pageShare     = 16
	defaultMargin = 256 << 20
)

func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.BudgetBytes < minBudget {
		bad("BudgetBytes is %d, must be at least %d", c.BudgetBytes, minBudget)
	}
	if c.MaxPageBytes < 0 || c.MaxPageBytes > paging.MaxPageBytes {
		bad("MaxPageBytes is %d, must be 0 to %d", c.MaxPageBytes, paging.MaxPageBytes)
	}
	if c.MaxPageBytes == 0 {
		c.MaxPageBytes = min(c.BudgetBytes/pageShare, paging.MaxPageBytes)
	}
	switch {
	case c.StagingBytes == 0:
		c.StagingBytes = min(c.BudgetBytes/stagingShare, stagingMost)
	case c.StagingBytes < 0:
		c.StagingBytes = 0
	}
	if c.ExtentBytes == 0 {
		c.ExtentBytes = max(min(extentBytes, c.BudgetBytes/extentsOfAll), fileBytes(c.MaxPageBytes))
	}
	c.ExtentBytes &^= paging.UnitBytes - 1
	if c.ExtentBytes < fileBytes(c.MaxPageBytes) || c.ExtentBytes > c.BudgetBytes-c.StagingBytes {
		bad("ExtentBytes is %d, must hold a page of MaxPageBytes (%d) and fit BudgetBytes less StagingBytes (%d)",
			c.ExtentBytes, c.MaxPageBytes, c.BudgetBytes-c.StagingBytes)
	}
	if c.NUMANode < 0 || c.MarginBytes < 0 {
		bad("NUMANode and MarginBytes must not be negative")
	}
	if c.MarginBytes == 0 {
		c.MarginBytes = defaultMargin
	}
	if c.Tenant == "" {
		c.Tenant = "default"
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if len(errs) > 0 {
		return c, fmt.Errorf("ram tier: %w: %w", errors.Join(errs...), paging.ErrInvalid)
	}
	return c, nil
}

// fileBytes is the shortest extent that holds one page of this length.
func fileBytes(page int64) int64 {
	slot := (page + paging.UnitBytes - 1) &^ (paging.UnitBytes - 1)
	n := slot + paging.UnitBytes
	for n-shm.GenTableBytes(n) < slot {
		n += paging.UnitBytes
	}
	return n
}

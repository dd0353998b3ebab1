package hbm

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging"
)

// Config of an Arena. Zero values mean the documented default.
type Config struct {
	// Device holds the pages. Required; borrowed until Close.
	Device gpu.Device
	// BudgetBytes is the hard bound of extents and working pages. At least 1 MiB.
	BudgetBytes int64
	// MaxPageBytes is the longest page that an extent holds. 0: a sixteenth of the
	// budget or paging.MaxPageBytes, whichever is less.
	MaxPageBytes int64
	// ExtentBytes is the length of an extent, rounded up to what the device
	// allocates. 0: 1 GiB, or an eighth of the budget if that is less, but never
	// shorter than the longest page.
	ExtentBytes int64
	// WorkingBytes is the part of the budget that is kept for the working pages of
	// engines. 0: an eighth of the budget. Negative: nothing.
	WorkingBytes int64
	// Quotas bound the bytes of slots of tenants; those with a quota are sure of
	// one extent. A tenant that is not named, or has 0, has no bound but the budget.
	Quotas map[string]int64
	// Tenant is the one that Store, which names none, allocates for. Empty: "default".
	Tenant string
	// FreeMemory tells how many bytes the machine can still give, for a device in
	// host memory. nil: not asked.
	FreeMemory func() (int64, error)
	// Added is told, from a goroutine of the arena and under no lock, that a tenant
	// got an extent. nil: nobody is.
	Added func(tenant string)
	// Logger is told of changes of state. nil: nothing is logged.
	Logger *slog.Logger
}

const (
	minBudget    = 1 << 20
	extentBytes  = 1 << 30
	extentsOfAll = 8 // at least so many extents, while pages fit them
	workingShare = 8
	pageShare    = 16
	marginBytes  = 256 << 20

	// Places of extents are the low bits of their numbers, see extentID.
	placeBits = 10
	maxPlaces = 1 << placeBits
)

func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Device == nil {
		return c, fmt.Errorf("hbm tier: Config.Device is nil: %w", paging.ErrInvalid)
	}
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
	case c.WorkingBytes == 0:
		c.WorkingBytes = c.BudgetBytes / workingShare
	case c.WorkingBytes < 0:
		c.WorkingBytes = 0
	}
	if c.ExtentBytes == 0 {
		c.ExtentBytes = max(min(extentBytes, (c.BudgetBytes-c.WorkingBytes)/extentsOfAll), c.MaxPageBytes)
	}
	granule := max(c.Device.Info().GranuleBytes, paging.UnitBytes)
	c.ExtentBytes = (c.ExtentBytes + granule - 1) / granule * granule
	if c.ExtentBytes < c.MaxPageBytes || c.ExtentBytes > c.BudgetBytes-c.WorkingBytes {
		bad("ExtentBytes is %d, must hold a page of MaxPageBytes (%d) and fit BudgetBytes less WorkingBytes (%d); this device allocates multiples of %d",
			c.ExtentBytes, c.MaxPageBytes, c.BudgetBytes-c.WorkingBytes, granule)
	} else if places := (c.BudgetBytes - c.WorkingBytes) / max(c.ExtentBytes, 1); places > maxPlaces {
		bad("BudgetBytes holds %d extents, at most %d: raise ExtentBytes", places, maxPlaces)
	}
	if c.Tenant == "" {
		c.Tenant = "default"
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if len(errs) > 0 {
		return c, fmt.Errorf("hbm tier: %w: %w", errors.Join(errs...), paging.ErrInvalid)
	}
	return c, nil
}

package nvme

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
)

// Config says where a tier lies and what it may use.
type Config struct {
	// Dir is the directory of the tier; it is created if it does not exist. It
	// must be empty or hold a tier of a known format.
	Dir string
	// BudgetBytes is the hard bound of all segment files together, at least one
	// segment. The index comes on top: about 300 bytes a page and 16 MiB of logs.
	BudgetBytes int64
	// SegmentBytes is the length of new segment files. 0: 256 MiB, or a
	// sixteenth of the budget if that is less, or a 4,096th if that is more (a
	// file stays open for each). It is raised to the largest page in use.
	SegmentBytes int64
	// AheadBytes is how much pre-written empty space is kept ready beyond what
	// is used. 0: a quarter of the budget, at most 1 GiB. Space that stays empty
	// beyond it is given back to the file system.
	AheadBytes int64
	// Readers is how many reads run at once. 0: 16.
	Readers int
	// WriteBytesPerSecond caps what is written to segments, pre-writing
	// included. 0: no cap.
	WriteBytesPerSecond int64
	// HangAfter is how long an I/O may run before the disk is said not to
	// answer. 0: 10 s.
	HangAfter time.Duration
	// Logger is told of changes of state. nil: nothing is logged.
	Logger *slog.Logger

	// Seams of tests.
	volume    volume
	bounces   *bouncePool
	index     vfs.FS
	keepEvery time.Duration // 0: keepInterval
	idleAfter time.Duration // 0: giveBackAfter
	roomBytes int64         // 0: roomReserve
	growWait  time.Duration // 0: firstGrowWait
}

// Defaults and bounds of the configuration.
const (
	defaultSegmentBytes = 256 << 20
	segmentsPerBudget   = 16   // at least, so that one class cannot hold the budget
	maxSegments         = 4096 // open files
	maxAheadBytes       = 1 << 30
	defaultReaders      = 16
	maxReaders          = 256
	defaultHangAfter    = 10 * time.Second
	keepInterval        = 250 * time.Millisecond
	giveBackAfter       = time.Minute
	// roomReserve is left free on the file system when a segment is added: the
	// index needs room to write and compact.
	roomReserve = 32 << 20
)

// withDefaults validates and fills in what is zero. All problems are in one error.
func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Dir == "" && c.volume == nil {
		bad("Dir is empty: name a directory on the local disk")
	}
	if c.BudgetBytes < paging.UnitBytes {
		bad("BudgetBytes is %d, must be at least %d", c.BudgetBytes, paging.UnitBytes)
	}
	if c.SegmentBytes == 0 {
		c.SegmentBytes = max(min(defaultSegmentBytes, c.BudgetBytes/segmentsPerBudget), c.BudgetBytes/maxSegments, paging.UnitBytes)
	}
	c.SegmentBytes &^= paging.UnitBytes - 1
	if c.SegmentBytes < paging.UnitBytes || c.SegmentBytes > max(c.BudgetBytes, paging.UnitBytes) {
		bad("SegmentBytes is %d, must be %d to BudgetBytes (%d)", c.SegmentBytes, paging.UnitBytes, c.BudgetBytes)
	}
	if c.AheadBytes == 0 {
		c.AheadBytes = min(c.BudgetBytes/4, maxAheadBytes)
	}
	if c.Readers == 0 {
		c.Readers = defaultReaders
	}
	if c.Readers < 1 || c.Readers > maxReaders {
		bad("Readers is %d, must be 1 to %d", c.Readers, maxReaders)
	}
	if c.WriteBytesPerSecond < 0 || c.AheadBytes < 0 || c.HangAfter < 0 {
		bad("WriteBytesPerSecond, AheadBytes and HangAfter must not be negative")
	}
	if c.HangAfter == 0 {
		c.HangAfter = defaultHangAfter
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.keepEvery == 0 {
		c.keepEvery = keepInterval
	}
	if c.idleAfter == 0 {
		c.idleAfter = giveBackAfter
	}
	if c.growWait == 0 {
		c.growWait = firstGrowWait
	}
	if c.roomBytes == 0 {
		c.roomBytes = roomReserve
	}
	if c.bounces == nil {
		c.bounces = &bouncePool{}
	}
	if c.volume == nil {
		c.volume = &diskVolume{dir: c.Dir, direct: true, bounces: c.bounces}
	}
	if len(errs) > 0 {
		return c, fmt.Errorf("nvme tier: %w: %w", errors.Join(errs...), paging.ErrInvalid)
	}
	return c, nil
}

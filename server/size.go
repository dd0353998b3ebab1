package server

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/paging"
)

// Size is a number of bytes that is written like "16GiB". It reads from and
// writes to text, YAML and command lines.
type Size int64

var sizeUnits = []struct {
	suffix string
	bytes  float64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
	{"B", 1},
}

// ParseSize reads "16GiB", "1.5 GiB", "500MB" or a plain number of bytes.
func ParseSize(s string) (Size, error) {
	text, unit := strings.TrimSpace(s), 1.0
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			text, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && n >= 0 && float64(n)*unit < math.MaxInt64 {
		return Size(n * int64(unit)), nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(f) || f < 0 || f*unit >= math.MaxInt64 {
		return 0, fmt.Errorf("size %q: write it like 16GiB, 500MB or a number of bytes: %w", s, paging.ErrInvalid)
	}
	return Size(f * unit), nil
}

// String is the shortest exact form with a binary unit.
func (s Size) String() string {
	for i := 3; i >= 0; i-- {
		if unit := int64(sizeUnits[i].bytes); s != 0 && int64(s)%unit == 0 {
			return strconv.FormatInt(int64(s)/unit, 10) + sizeUnits[i].suffix
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}

// UnmarshalText is ParseSize.
func (s *Size) UnmarshalText(b []byte) (err error) {
	*s, err = ParseSize(string(b))
	return err
}

// MarshalText is String.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Set and Type make a Size usable as a command-line flag.
func (s *Size) Set(text string) error { return s.UnmarshalText([]byte(text)) }

// Type names the kind of value in help texts.
func (*Size) Type() string { return "size" }

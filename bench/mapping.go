package bench

import (
	"fmt"
	"os"
	"reflect"
	"strings"
)

// sharedReadOnly tells whether bytes lie in a read-only mapping of shared memory
// that this process was handed: the proof that a page is read in place. It reads
// the table of mappings again when an address is not in what it knows. Not safe
// for concurrent use.
type sharedReadOnly struct {
	ranges []addressRange
}

type addressRange struct{ from, to uint64 }

// holds reports whether all of b lies in one such mapping.
func (s *sharedReadOnly) holds(b []byte) (bool, error) {
	if len(b) == 0 {
		return false, nil
	}
	from := uint64(reflect.ValueOf(b).Pointer())
	if s.covers(from, from+uint64(len(b))) {
		return true, nil
	}
	if err := s.read(); err != nil {
		return false, err
	}
	return s.covers(from, from+uint64(len(b))), nil
}

func (s *sharedReadOnly) covers(from, to uint64) bool {
	for _, r := range s.ranges {
		if r.from <= from && to <= r.to {
			return true
		}
	}
	return false
}

func (s *sharedReadOnly) read() error {
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	s.ranges = s.ranges[:0]
	for line := range strings.Lines(string(text)) {
		var r addressRange
		var perms string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &r.from, &r.to, &perms); err != nil {
			return fmt.Errorf("/proc/self/maps: %q: %w", line, err)
		}
		if perms == "r--s" {
			s.ranges = append(s.ranges, r)
		}
	}
	return nil
}

package nvme

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/paging"
)

// The directory of a tier (docs/formats.md). Created in this order, so that
// each state that a crash leaves is told from a directory of somebody else.
const (
	lockName   = "LOCK"
	formatName = "FORMAT"
	indexName  = "index"
	segmentDir = "segments"
	tmpSuffix  = ".tmp"
	segSuffix  = ".seg"

	formatText = "kvtier-nvme 1\n"
)

// ErrInUse means that another process, or another tier of this one, has the
// directory open. It is also a paging.ErrUnavailable.
var ErrInUse = fmt.Errorf("in use by another process: %w", paging.ErrUnavailable)

// directory is an opened and locked directory.
type directory struct {
	lock    io.Closer
	fresh   bool // the index is still to be created
	entries []entry
}

// openDirectory checks what lies there before it changes anything: a directory
// of an unknown format or with foreign files stays as it is.
func openDirectory(vol volume, path string) (*directory, error) {
	d := new(directory)
	if _, err := d.check(vol, path); err != nil {
		return nil, err
	}
	if err := vol.Mkdir(""); err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	lock, err := vol.Lock(lockName)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	d.lock = lock
	if err := d.read(vol, path); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return d, nil
}

// read looks again, under the lock, as another process may just have created
// the directory, and writes the format if it is new.
func (d *directory) read(vol volume, path string) error {
	formatted, err := d.check(vol, path)
	if err != nil || formatted {
		return err
	}
	if err := vol.PutFile(formatName, []byte(formatText)); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Join(path, formatName), err)
	}
	return nil
}

// check looks at all that can tell a directory of somebody else, and changes
// nothing. formatted: the format is written there already.
func (d *directory) check(vol volume, path string) (formatted bool, err error) {
	if formatted, err = checkDirectory(vol, path); err != nil {
		return false, err
	}
	if d.entries, err = vol.List(segmentDir); err != nil {
		return false, err
	}
	if err := checkSegments(d.entries, path); err != nil {
		return false, err
	}
	root, err := vol.List("")
	if err != nil {
		return false, err
	}
	// The directory of segments is made after the index: if it is there, the
	// index must be too.
	d.fresh = !contains(root, segmentDir)
	if !d.fresh && !contains(root, indexName) {
		return false, fmt.Errorf("%s is missing beside its segments: %w", filepath.Join(path, indexName), paging.ErrIncompatible)
	}
	return formatted, nil
}

func contains(entries []entry, name string) bool {
	return slices.ContainsFunc(entries, func(e entry) bool { return e.name == name })
}

// checkDirectory reports whether the format is written there already.
func checkDirectory(vol volume, path string) (formatted bool, err error) {
	entries, err := vol.List("")
	if err != nil {
		return false, err
	}
	formatted = contains(entries, formatName)
	for _, e := range entries {
		switch e.name {
		case lockName, formatName, formatName + tmpSuffix, "lost+found":
			continue
		case indexName, segmentDir:
			if formatted {
				continue
			}
		}
		return false, fmt.Errorf("%s holds %q, which is not of a kvtier NVMe tier: name an empty directory: %w",
			path, e.name, paging.ErrIncompatible)
	}
	if !formatted {
		return false, nil
	}
	text, err := vol.ReadFile(formatName)
	if err != nil {
		return false, err
	}
	if string(text) != formatText {
		return false, fmt.Errorf("%s has the format %.40q, this version reads %q; it is left as it is: %w",
			filepath.Join(path, formatName), text, formatText, paging.ErrIncompatible)
	}
	return true, nil
}

func checkSegments(entries []entry, path string) error {
	for _, e := range entries {
		if _, ok := segmentNumber(e.name); !ok && !strings.HasSuffix(e.name, tmpSuffix) {
			return fmt.Errorf("%s holds %q, which is not a segment: %w",
				filepath.Join(path, segmentDir), e.name, paging.ErrIncompatible)
		}
	}
	return nil
}

func segmentName(id paging.ExtentID) string {
	return filepath.Join(segmentDir, fmt.Sprintf("%010d%s", uint32(id), segSuffix))
}

func segmentNumber(name string) (paging.ExtentID, bool) {
	digits, ok := strings.CutSuffix(name, segSuffix)
	if !ok || len(digits) != 10 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	return paging.ExtentID(n), err == nil && n > 0
}

// removeLeftovers deletes what an interrupted creation left.
func removeLeftovers(vol volume, entries []entry) error {
	var errs []error
	for _, e := range entries {
		if strings.HasSuffix(e.name, tmpSuffix) {
			if err := vol.Remove(filepath.Join(segmentDir, e.name)); err != nil && !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

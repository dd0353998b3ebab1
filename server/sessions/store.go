package sessions

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// Store keeps the block names of sessions, by session and epoch. Names are kept in
// pieces: full segments of paging.SegmentBlocks names, and after them what was appended
// since. All methods may be called at the same time from many goroutines; Put and Drop
// of one session and epoch only one at a time.
//
// Epoch 0 is of a fork that is not opened yet.
//
// Key: session, 0x00, epoch and position of the first name, both 8 bytes big-endian.
// Value: names, 32 bytes each.
type Store struct{ db *pebble.DB }

// Memory of a Store, which is small beside what a node has: names are read again only
// when a session was not used for long.
const (
	storeCacheBytes = 8 << 20
	storeTableBytes = 4 << 20
)

// errGap: names before the first one are missing.
var errGap = fmt.Errorf("names before these are not kept: %w", paging.ErrNotFound)

// OpenStore opens the store in a directory, which is made if it does not exist. fs: nil
// is the disk.
func OpenStore(dir string, fs vfs.FS) (*Store, error) {
	cache := pebble.NewCache(storeCacheBytes)
	defer cache.Unref()
	db, err := pebble.Open(dir, &pebble.Options{
		FS: fs, Cache: cache, MemTableSize: storeTableBytes, MaxOpenFiles: 64, Logger: quiet{}, FormatMajorVersion: pebble.FormatNewest,
	})
	if err != nil {
		return nil, fmt.Errorf("names of sessions in %s: %w: %w", dir, paging.ErrIO, err)
	}
	return &Store{db: db}, nil
}

// quiet keeps pebble's notes on its own housekeeping out of the log. What fails is
// returned to whoever called.
type quiet struct{}

func (quiet) Infof(string, ...any)      {}
func (quiet) Errorf(string, ...any)     {}
func (quiet) Fatalf(f string, a ...any) { panic(fmt.Sprintf("names of sessions: "+f, a...)) }

// Close closes the store.
func (s *Store) Close() error { return s.db.Close() }

func pieceKey(session string, epoch, first uint64) []byte {
	k := make([]byte, 0, len(session)+17)
	k = append(append(k, session...), 0)
	k = binary.BigEndian.AppendUint64(k, epoch)
	return binary.BigEndian.AppendUint64(k, first)
}

func parseKey(k []byte) (session string, epoch, first uint64, ok bool) {
	at := bytes.IndexByte(k, 0)
	if at < 0 || len(k) != at+17 {
		return "", 0, 0, false
	}
	return string(k[:at]), binary.BigEndian.Uint64(k[at+1:]), binary.BigEndian.Uint64(k[at+9:]), true
}

// Put keeps names from position first on, in place of what was kept from there on, and
// returns when they are on disk. errGap if there are none before them.
func (s *Store) Put(session string, epoch, first uint64, names []paging.BlockName) error {
	if sabotage.On("lose-segment") && first/paging.SegmentBlocks < (first+uint64(len(names)))/paging.SegmentBlocks {
		return nil
	}
	from := first / paging.SegmentBlocks * paging.SegmentBlocks
	head, err := s.read(session, epoch, from, first)
	if err != nil {
		return err
	}
	if uint64(len(head)) != first-from || first > 0 && first == from && !s.has(session, epoch, first-1) {
		return errGap
	}
	b := s.db.NewBatch()
	defer func() { _ = b.Close() }() // of a batch that was committed, or that is given up
	if from+paging.SegmentBlocks > first+uint64(len(names)) {
		from, head = first, nil // no segment becomes full: the pieces before stay as they are
	}
	if over, err := s.any(session, epoch, from); err != nil {
		return err
	} else if over { // else nothing is replaced: a range that is deleted costs every read
		if err := b.DeleteRange(pieceKey(session, epoch, from), pieceKey(session, epoch, math.MaxUint64), nil); err != nil {
			return storeError(session, err)
		}
	}
	all := slices.Concat(head, names)
	for len(all) > 0 {
		n := min(uint64(len(all)), paging.SegmentBlocks-from%paging.SegmentBlocks)
		if err := b.Set(pieceKey(session, epoch, from), packNames(all[:n]), nil); err != nil {
			return storeError(session, err)
		}
		from, all = from+n, all[n:]
	}
	if err := b.Commit(pebble.Sync); err != nil {
		return storeError(session, err)
	}
	return nil
}

// Keep is Put of names that somebody else sends, perhaps late or twice: if they are kept
// already, with others after them, it changes nothing.
func (s *Store) Keep(session string, epoch, first uint64, names []paging.BlockName) error {
	from := first / paging.SegmentBlocks * paging.SegmentBlocks
	kept, err := s.read(session, epoch, from, first+uint64(len(names)))
	if err != nil {
		return err
	}
	if n := uint64(len(kept)); n == first-from+uint64(len(names)) && slices.Equal(kept[first-from:], names) {
		return nil
	}
	return s.Put(session, epoch, first, names)
}

func storeError(session string, err error) error {
	return fmt.Errorf("names of session %q: %w: %w", session, paging.ErrIO, err)
}

// any reports whether a piece begins at a position or after it.
func (s *Store) any(session string, epoch, from uint64) (bool, error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: pieceKey(session, epoch, from), UpperBound: pieceKey(session, epoch, math.MaxUint64)})
	if err != nil {
		return false, storeError(session, err)
	}
	some := it.First()
	if err := it.Close(); err != nil {
		return false, storeError(session, err)
	}
	return some, nil
}

// has reports whether the name at a position is kept.
func (s *Store) has(session string, epoch, at uint64) bool {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: pieceKey(session, epoch, 0), UpperBound: pieceKey(session, epoch, at+1)})
	if err != nil {
		return false
	}
	defer func() { _ = it.Close() }() // it has no error that Last had not
	if !it.Last() {
		return false
	}
	_, _, first, ok := parseKey(it.Key())
	return ok && first+uint64(len(it.Value())/32) > at
}

// Names returns what is kept of a session's names from its first on; none is no error.
func (s *Store) Names(session string, epoch uint64) ([]paging.BlockName, error) {
	return s.read(session, epoch, 0, math.MaxUint64)
}

// read returns the names from position from, which begins a piece, up to to.
func (s *Store) read(session string, epoch, from, to uint64) (names []paging.BlockName, err error) {
	if from == to {
		return nil, nil
	}
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: pieceKey(session, epoch, from), UpperBound: pieceKey(session, epoch, to)})
	if err != nil {
		return nil, storeError(session, err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for ok := it.First(); ok; ok = it.Next() {
		_, _, first, fits := parseKey(it.Key())
		v := it.Value()
		if !fits || len(v)%32 != 0 || first < from || first-from > uint64(len(names)) {
			return names, nil // a piece is missing: what comes after is no use
		}
		names = names[:first-from]
		for ; len(v) > 0; v = v[32:] {
			names = append(names, paging.BlockName(v[:32]))
		}
	}
	if err := it.Error(); err != nil {
		return nil, storeError(session, err)
	}
	return names[:min(uint64(len(names)), to-from)], nil
}

// Truncate forgets the names of a session from position to on.
func (s *Store) Truncate(session string, epoch, to uint64) error {
	from := to / paging.SegmentBlocks * paging.SegmentBlocks
	names, err := s.read(session, epoch, from, to)
	if err != nil {
		return err
	}
	b := s.db.NewBatch()
	defer func() { _ = b.Close() }() // of a batch that was committed, or that is given up
	if err := b.DeleteRange(pieceKey(session, epoch, from), pieceKey(session, epoch, math.MaxUint64), nil); err != nil {
		return storeError(session, err)
	}
	if len(names) > 0 {
		if err := b.Set(pieceKey(session, epoch, from), packNames(names), nil); err != nil {
			return storeError(session, err)
		}
	}
	if err := b.Commit(pebble.Sync); err != nil {
		return storeError(session, err)
	}
	return nil
}

// Epochs returns the epochs of which names of a session are kept, rising.
func (s *Store) Epochs(session string) (epochs []uint64, err error) {
	err = s.each(pieceKey(session, 0, 0), pieceKey(session, math.MaxUint64, math.MaxUint64), func(_ string, epoch uint64) {
		epochs = append(epochs, epoch)
	})
	return epochs, err
}

// Each calls f with each session and epoch of which names are kept.
func (s *Store) Each(f func(session string, epoch uint64)) error { return s.each(nil, nil, f) }

func (s *Store) each(lower, upper []byte, f func(session string, epoch uint64)) (err error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return fmt.Errorf("names of sessions: %w: %w", paging.ErrIO, err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for ok := it.First(); ok; {
		session, epoch, _, fits := parseKey(it.Key())
		if !fits {
			ok = it.Next()
			continue
		}
		f(session, epoch)
		ok = it.SeekGE(pieceKey(session, epoch, math.MaxUint64))
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("names of sessions: %w: %w", paging.ErrIO, err)
	}
	return nil
}

// Drop forgets the names of a session of epochs before one; math.MaxUint64: of all.
func (s *Store) Drop(session string, before uint64) error {
	if err := s.db.DeleteRange(pieceKey(session, 0, 0), pieceKey(session, before, 0), pebble.NoSync); err != nil {
		return storeError(session, err)
	}
	return nil
}

// best returns the names that are kept of a session which prove most of it, and how many.
func (s *Store) best(session string, end paging.SessionEnd) (names []paging.BlockName, proven uint64, err error) {
	epochs, err := s.Epochs(session)
	if err != nil {
		return nil, 0, err
	}
	for _, epoch := range slices.Backward(epochs) {
		kept, err := s.Names(session, epoch)
		if err != nil {
			return nil, 0, err
		}
		if n := paging.ProveSession(kept, end); n > proven {
			names, proven = kept[:n], n
		}
		if proven == end.Blocks {
			break
		}
	}
	return names, proven, nil
}

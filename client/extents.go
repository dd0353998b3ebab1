package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
)

// maxExtents bounds the mappings of one attachment: a node that announces more
// is not believed.
const maxExtents = 1 << 16

// mapping is one extent of the node, or the staging memory, mapped here. Its
// reference count is guarded by its set's mu.
type mapping struct {
	id      paging.ExtentID
	staging bool
	mem     *shm.Memory // nil: memory of a device that is not mapped here
	file    *os.File    // instead of mem
	pool    *poolRange  // that mem lies in; nil: none
	table   *shm.Memory // of generations, if it does not lie in mem
	bytes   []byte
	size    uint64          // of the extent
	gens    shm.Generations // of extents that are read
	first   uint64          // offset of the first slot: behind the generation table
	refs    int
}

// page is the memory of slot s, which check has passed.
func (m *mapping) page(s paging.Slot) []byte {
	if m.bytes == nil {
		return nil // on a device
	}
	end := s.Offset + uint64(s.Bytes)
	return m.bytes[s.Offset:end:end]
}

// extentSet holds the mappings of one attachment. Each has one reference of the
// set until the set is retired, and one of each lease or attempt that uses it.
type extentSet struct {
	byID atomic.Pointer[map[paging.ExtentID]*mapping] // replaced, never changed
	pool *poolRange                                   // nil: none
	idle func()                                       // called once, after retire, when no RAM extent is mapped any more

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
	retired bool
	idled   bool
	readers int                             // RAM and pool extents mapped
	tables  map[paging.ExtentID]*shm.Memory // that came before their extents
}

func newExtentSet(pool *poolRange, idle func()) *extentSet {
	s := &extentSet{pool: pool, idle: idle, changed: make(chan struct{}), tables: map[paging.ExtentID]*shm.Memory{}}
	s.byID.Store(&map[paging.ExtentID]*mapping{})
	return s
}

// add maps a received extent and closes its descriptor. A set that is retired
// drops it.
func (s *extentSet) add(e *shm.Extent) error {
	if e.Kind == shm.KindPoolTable {
		return s.addTable(e)
	}
	m, err := s.open(e)
	if err != nil {
		return fmt.Errorf("map extent %d: %w", e.ID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := *s.byID.Load()
	if s.retired {
		return m.close()
	}
	if _, dup := old[m.id]; dup || len(old) >= maxExtents {
		_ = m.close()
		return fmt.Errorf("extent %d announced twice, or more than %d: %w", m.id, maxExtents, paging.ErrInvalid)
	}
	next := maps.Clone(old)
	next[m.id] = m
	s.byID.Store(&next)
	if !m.staging {
		s.readers++
	}
	s.announce()
	return nil
}

// addTable keeps the generations of a pool extent until that comes.
func (s *extentSet) addTable(e *shm.Extent) error {
	id := e.ID
	table, err := e.Map()
	if err != nil {
		return fmt.Errorf("map the table of extent %d: %w", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.retired {
		return table.Close()
	}
	if s.tables[id] != nil || len(s.tables) >= poolPlaces {
		_ = table.Close()
		return fmt.Errorf("table of extent %d announced twice, or without its extent: %w", id, paging.ErrInvalid)
	}
	s.tables[id] = table
	return nil
}

// open maps an extent as its kind says.
func (s *extentSet) open(e *shm.Extent) (m *mapping, err error) {
	m = &mapping{id: e.ID, staging: e.Kind == shm.KindStaging || e.Kind == shm.KindWorking, refs: 1, size: uint64(e.Bytes)}
	if e.Kind == shm.KindPool {
		return m, s.openPool(m, e)
	}
	if e.Kind == shm.KindWorking && s.pool != nil {
		if err := s.pool.addWorking(m, e); err != nil {
			return nil, err
		}
		if m.mem != nil {
			m.pool, m.bytes = s.pool, m.mem.Bytes()
		}
		return m, nil
	}
	if m.mem, err = e.Map(); err != nil {
		return nil, err
	}
	m.bytes = m.mem.Bytes()
	if !m.staging {
		m.gens = shm.Of(m.bytes)
		m.first = uint64(shm.GenTableBytes(m.mem.Size()))
	}
	return m, nil
}

func (s *extentSet) openPool(m *mapping, e *shm.Extent) error {
	s.mu.Lock()
	m.table = s.tables[e.ID]
	delete(s.tables, e.ID)
	s.mu.Unlock()
	if s.pool == nil || m.table == nil || m.table.Size() < shm.GenTableBytes(e.Bytes) {
		return errors.Join(fmt.Errorf("a pool extent that was not announced, or without its table: %w", paging.ErrInvalid), m.close())
	}
	m.gens = shm.TableOf(m.table.Bytes())
	if err := s.pool.add(m, e); err != nil {
		return errors.Join(err, m.close())
	}
	if m.mem != nil {
		m.pool, m.bytes = s.pool, m.mem.Bytes()
	}
	return nil
}

// close gives back what the mapping took.
func (m *mapping) close() (err error) {
	if m.mem != nil {
		err = m.mem.Close()
	}
	if m.pool != nil {
		m.pool.gone()
	}
	if m.table != nil {
		err = errors.Join(err, m.table.Close())
	}
	if m.file != nil {
		err = errors.Join(err, m.file.Close())
	}
	return err
}

func (s *extentSet) announce() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *extentSet) lookup(id paging.ExtentID) *mapping { return (*s.byID.Load())[id] }

// await returns the mapping, waiting for its descriptor until ctx ends, at most
// extentWait.
func (s *extentSet) await(ctx context.Context, id paging.ExtentID) (*mapping, error) {
	ctx, cancel := context.WithTimeout(ctx, extentWait)
	defer cancel()
	for {
		s.mu.Lock()
		changed, retired := s.changed, s.retired
		s.mu.Unlock()
		if retired {
			return nil, fmt.Errorf("attachment ended: %w", paging.ErrUnavailable)
		}
		if m := s.lookup(id); m != nil {
			return m, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("slot in extent %d, whose descriptor did not come: %w", id, paging.ErrInvalid)
		}
	}
}

// hold adds a reference to each; false: the set was retired meanwhile.
func (s *extentSet) hold(ms []*mapping) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.retired {
		return false
	}
	for _, m := range ms {
		m.refs++
	}
	return true
}

// drop gives back the references of hold.
func (s *extentSet) drop(ms []*mapping) {
	s.mu.Lock()
	s.release(ms)
}

// retire gives back the set's own references: mappings that no lease or attempt
// uses go now, the others with their last user.
func (s *extentSet) retire() {
	s.mu.Lock()
	if s.retired {
		s.mu.Unlock()
		return
	}
	s.retired = true
	all := slices.Collect(maps.Values(*s.byID.Load()))
	s.byID.Store(&map[paging.ExtentID]*mapping{})
	tables := s.tables
	s.tables = nil
	s.announce()
	s.release(all)
	for _, t := range tables {
		_ = t.Close()
	}
	s.pool.close()
}

// release takes one reference off each, with mu held, which it unlocks before
// anything is unmapped.
func (s *extentSet) release(ms []*mapping) {
	var ended []*mapping
	for _, m := range ms {
		if m.refs--; m.refs > 0 {
			continue
		}
		ended = append(ended, m)
		if !m.staging {
			s.readers--
		}
	}
	idle := s.retired && s.readers == 0 && !s.idled
	s.idled = s.idled || idle
	s.mu.Unlock()
	for _, m := range ended {
		_ = m.close()
	}
	if idle {
		s.idle()
	}
}

// isIdle reports whether the set is retired and no RAM extent is mapped.
func (s *extentSet) isIdle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.idled
}

// mappedBytes is the memory mapped and still reachable by new leases.
func (s *extentSet) mappedBytes() int64 {
	var n int64
	for _, m := range *s.byID.Load() {
		n += int64(len(m.bytes))
	}
	return n
}

// slotBytes is the length field of an encoded slot reference.
func slotBytes(ref []byte) uint32 { return binary.LittleEndian.Uint32(ref[4:]) }

// resolve checks a table of slot references, which is untrusted: every slot with
// a page lies inside a mapping of the right kind, aligned, behind the generation
// table. It appends each mapping used, once, to into. Waiting for a descriptor
// that is still on its way is bounded by ctx.
func (s *extentSet) resolve(ctx context.Context, slots []byte, staging bool, into []*mapping) ([]*mapping, error) {
	var last *mapping
	for at := 0; at+paging.SlotBytes <= len(slots); at += paging.SlotBytes {
		ref := slots[at : at+paging.SlotBytes : at+paging.SlotBytes]
		bytes := slotBytes(ref)
		if bytes == 0 {
			continue // no page here
		}
		id := paging.ExtentID(binary.LittleEndian.Uint32(ref))
		if last == nil || last.id != id {
			m := s.lookup(id)
			if m == nil {
				var err error
				if m, err = s.await(ctx, id); err != nil {
					return into, err
				}
			}
			if m.staging != staging {
				return into, fmt.Errorf("slot %d in extent %d, which is of the wrong kind: %w", at/paging.SlotBytes, id, paging.ErrInvalid)
			}
			last = m
			if !slices.Contains(into, m) {
				into = append(into, m)
			}
		}
		offset := binary.LittleEndian.Uint64(ref[8:])
		size := last.size
		if offset%paging.UnitBytes != 0 || offset < last.first || offset > size || uint64(bytes) > size-offset {
			return into, fmt.Errorf("slot %d: %d bytes at %d of extent %d (%d bytes): %w", at/paging.SlotBytes, bytes, offset, id, size, paging.ErrInvalid)
		}
	}
	return into, nil
}

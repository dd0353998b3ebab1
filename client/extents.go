package client

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
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
	mem     *shm.Memory
	bytes   []byte
	gens    shm.Generations // of RAM extents
	first   uint64          // offset of the first slot: behind the generation table
	refs    int
}

// page is the memory of slot s, which check has passed.
func (m *mapping) page(s paging.Slot) []byte {
	end := s.Offset + uint64(s.Bytes)
	return m.bytes[s.Offset:end:end]
}

// extentSet holds the mappings of one attachment. Each has one reference of the
// set until the set is retired, and one of each lease or attempt that uses it.
type extentSet struct {
	byID atomic.Pointer[map[paging.ExtentID]*mapping] // replaced, never changed
	idle func()                                       // called once, after retire, when no RAM extent is mapped any more

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
	retired bool
	idled   bool
	readers int // RAM extents mapped
}

func newExtentSet(idle func()) *extentSet {
	s := &extentSet{idle: idle, changed: make(chan struct{})}
	s.byID.Store(&map[paging.ExtentID]*mapping{})
	return s
}

// add maps a received extent and closes its descriptor. A set that is retired
// drops it.
func (s *extentSet) add(e *shm.Extent) error {
	id, staging := e.ID, e.Kind == shm.KindStaging
	m := &mapping{id: id, staging: staging, refs: 1}
	var err error
	if m.mem, err = e.Map(); err != nil {
		return fmt.Errorf("map extent %d: %w", id, err)
	}
	m.bytes = m.mem.Bytes()
	if !staging {
		m.gens = shm.Of(m.bytes)
		m.first = uint64(shm.GenTableBytes(m.mem.Size()))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := *s.byID.Load()
	if s.retired {
		return m.mem.Close()
	}
	if _, dup := old[id]; dup || len(old) >= maxExtents {
		_ = m.mem.Close()
		return fmt.Errorf("extent %d announced twice, or more than %d: %w", id, maxExtents, paging.ErrInvalid)
	}
	next := maps.Clone(old)
	next[id] = m
	s.byID.Store(&next)
	if !staging {
		s.readers++
	}
	s.announce()
	return nil
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
	s.announce()
	s.release(all)
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
		_ = m.mem.Close()
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
		size := uint64(len(last.bytes))
		if offset%paging.UnitBytes != 0 || offset < last.first || offset > size || uint64(bytes) > size-offset {
			return into, fmt.Errorf("slot %d: %d bytes at %d of extent %d (%d bytes): %w", at/paging.SlotBytes, bytes, offset, id, size, paging.ErrInvalid)
		}
	}
	return into, nil
}

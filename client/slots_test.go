package client

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
)

const (
	fuzzRAM     = paging.ExtentID(1)
	fuzzStaging = paging.ExtentID(2)
	fuzzBytes   = 64 << 10
)

// mapExtent maps real memory, as if it came over the tether.
func mapExtent(t testing.TB, s *extentSet, id paging.ExtentID, kind shm.Kind) {
	t.Helper()
	var mem *shm.Memory
	var err error
	if kind == shm.KindStaging {
		mem, err = shm.CreateStaging("kvtier-slots-test", fuzzBytes)
	} else {
		mem, err = shm.CreateExtent("kvtier-slots-test", fuzzBytes, shm.Options{NUMANode: -1})
	}
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	fd, err := unix.Dup(mem.FD())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.add(&shm.Extent{ID: id, Kind: kind, Bytes: fuzzBytes, FD: fd}); err != nil {
		t.Fatal(err)
	}
}

// FuzzSlots gives the client any table of slot references. What it accepts it
// must be able to read, or to fill, to the last byte: a fault would end the test.
func FuzzSlots(f *testing.F) {
	set := newExtentSet(nil, func() {})
	mapExtent(f, set, fuzzRAM, shm.KindRAM)
	mapExtent(f, set, fuzzStaging, shm.KindStaging)
	f.Cleanup(set.retire)
	ns := &namespace{pageBytes: []uint64{4096, 8192}}
	ns.Layout.Parts = []paging.Part{{PageBytes: 4096, BlocksPerPage: 1}, {PageBytes: 8192, BlocksPerPage: 1}}

	good := paging.AppendSlot(nil, paging.Slot{Extent: fuzzRAM, Bytes: 4096, Offset: 4096})
	good = paging.AppendSlot(good, paging.Slot{Extent: fuzzRAM, Bytes: 8192, Offset: fuzzBytes - 8192, Generation: 3, Sum: 9})
	f.Add(good, byte(3), byte(0), false)
	f.Add(paging.AppendSlot(make([]byte, 32), paging.Slot{Extent: fuzzStaging, Bytes: 100, Offset: 0}), byte(2), byte(1), true)
	f.Add(paging.AppendSlot(nil, paging.Slot{Extent: fuzzRAM, Bytes: 1, Offset: fuzzBytes}), byte(1), byte(1), true)
	f.Add(paging.AppendSlot(nil, paging.Slot{Extent: fuzzRAM, Bytes: 1<<32 - 1, Offset: ^uint64(0) - 4095}), byte(1), byte(0), false)
	f.Add(paging.AppendSlot(nil, paging.Slot{Extent: 9, Bytes: 1, Offset: 4096}), byte(1), byte(0), false)
	f.Add(paging.AppendSlot(nil, paging.Slot{Extent: fuzzRAM, Bytes: 8192, Offset: fuzzBytes - 4096}), byte(1), byte(0), false)
	f.Add(paging.AppendSlot(nil, paging.Slot{Extent: fuzzStaging, Bytes: 8192, Offset: fuzzBytes - 4096}), byte(1), byte(0), false)
	f.Add([]byte{1, 0, 0}, byte(1), byte(0), false)

	past, cancel := context.WithCancel(f.Context())
	cancel() // no descriptor is waited for
	f.Fuzz(func(t *testing.T, table []byte, parts, usable byte, known bool) {
		about := ns
		if !known {
			about = nil
		}
		c := &Client{}
		l := &link{client: c, extents: set, leases: map[uint64]*Lease{}}
		lease := &Lease{ID: 1, Usable: int(usable), Parts: paging.PartSet(parts), slots: table, link: l}
		if err := lease.shape(about, ModeSet, 1024); err != nil {
			mustBeTyped(t, err)
		} else if err := l.holdSlots(past, lease); err != nil {
			mustBeTyped(t, err)
		} else {
			readEverything(t, lease)
			set.drop(lease.maps)
		}

		a := &Attempt{Parts: paging.PartSet(parts), cols: paging.PartSet(parts).Len(), slots: table, link: l, token: make([]byte, 16)}
		maps, err := set.resolve(past, table, true, nil)
		if err != nil || a.cols == 0 || len(table)%(a.cols*paging.SlotBytes) != 0 {
			return
		}
		for range len(table) / (a.cols * paging.SlotBytes) {
			a.blocks, a.open = append(a.blocks, 0), append(a.open, true)
		}
		a.maps = maps
		for row := range a.blocks {
			for part := range paging.MaxParts {
				clear(a.Page(row, part))
			}
		}
	})
}

func mustBeTyped(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, paging.ErrInvalid) && !errors.Is(err, paging.ErrUnknownNamespace) {
		t.Fatalf("untyped error: %v", err)
	}
}

func readEverything(t *testing.T, lease *Lease) {
	t.Helper()
	for row := range lease.Rows {
		for part := range paging.MaxParts {
			view, ok := lease.Page(row, part)
			if !ok {
				continue
			}
			if bytes.Count(view.Bytes(), []byte{0}) == 0 && len(view.Bytes()) == 0 {
				t.Fatal("a view of nothing")
			}
			if err := view.Close(); err != nil && !errors.Is(err, paging.ErrLost) {
				t.Fatal(err)
			}
		}
	}
}

// A receiver may not write what it reads: the memory faults, whatever it tries.
func TestExtentIsReadOnlyHere(t *testing.T) {
	set := newExtentSet(nil, func() {})
	mapExtent(t, set, fuzzRAM, shm.KindRAM)
	defer set.retire()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := w.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	// The kernel tells without a signal: it may not copy into this memory.
	if _, err := r.Read(set.lookup(fuzzRAM).bytes[4096:4097]); !errors.Is(err, unix.EFAULT) {
		t.Errorf("writing into an extent: %v, want EFAULT", err)
	}
}

// The set calls idle once, when it is retired and the last reader is gone; what
// is only staging does not keep it.
func TestExtentSetIdle(t *testing.T) {
	idle := 0
	set := newExtentSet(nil, func() { idle++ })
	mapExtent(t, set, fuzzRAM, shm.KindRAM)
	mapExtent(t, set, fuzzStaging, shm.KindStaging)
	held := []*mapping{set.lookup(fuzzRAM)}
	staged := []*mapping{set.lookup(fuzzStaging)}
	if !set.hold(held) || !set.hold(staged) {
		t.Fatal("not held")
	}
	set.retire()
	set.retire()
	if idle != 0 || set.isIdle() {
		t.Error("idle under a reader")
	}
	if set.hold(held) {
		t.Error("held after retire")
	}
	if _, err := set.await(t.Context(), 7); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("await after retire: %v", err)
	}
	set.drop(held)
	if idle != 1 || !set.isIdle() {
		t.Errorf("idle called %d times after the last reader", idle)
	}
	set.drop(staged)
	if idle != 1 {
		t.Errorf("idle called %d times", idle)
	}
}

//go:build linux

package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

func extent(t *testing.T, bytes int64) *Memory {
	t.Helper()
	m, err := CreateExtent("kvtier-test", bytes, Options{NUMANode: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func TestExtentIsSharedAndReadOnly(t *testing.T) {
	const size = 1 << 20
	m := extent(t, size)
	r, err := MapReadOnly(m.FD(), size)
	mustNil(t, err)
	defer r.Close()
	copy(m.Bytes()[5000:], "written after sealing")
	if got := string(r.Bytes()[5000:5021]); got != "written after sealing" {
		t.Errorf("the reader sees %q", got)
	}
	if r.FD() != -1 || r.Size() != size || m.Size() != size {
		t.Errorf("descriptor %d, sizes %d and %d", r.FD(), r.Size(), m.Size())
	}
	Zero(m.Bytes()[5000:5021])
	if !bytes.Equal(r.Bytes(), make([]byte, size)) {
		t.Error("Zero left something")
	}
}

// The receiver of an extent can neither write it nor make it vanish, whoever it
// is and whatever it tries.
func TestExtentWithstands(t *testing.T) {
	m := extent(t, 1<<20)
	copy(m.Bytes(), "precious")
	f := duplicate(t, m.FD())
	if got := attack(int(f.Fd())); got != "nothing" {
		t.Errorf("in this process: %s", got)
	}
	uids := []int{0}
	if os.Getuid() == 0 {
		uids = append(uids, 65534)
	}
	for _, uid := range uids {
		if got := start(t, "attack", f, uid).said; got != "nothing" {
			t.Errorf("child with uid %d: %s", uid, got)
		}
	}
	if string(m.Bytes()[:8]) != "precious" {
		t.Error("the bytes changed")
	}
	// The attack itself must be able to succeed.
	weak, err := memfd("unsealed", 1<<20, 0)
	mustNil(t, err)
	defer weak.Close()
	if got := attack(int(duplicate(t, weak.FD()).Fd())); got == "nothing" {
		t.Error("the attack fails on unsealed memory too: it proves nothing")
	}
}

func TestStagingIsWritableAndKeepsItsSize(t *testing.T) {
	const size = 256 << 10
	s, err := CreateStaging("kvtier-test-staging", size)
	mustNil(t, err)
	defer s.Close()
	w, err := MapReadWrite(s.FD(), size)
	mustNil(t, err)
	defer w.Close()
	copy(w.Bytes()[size-6:], "filled")
	if got := string(s.Bytes()[size-6:]); got != "filled" {
		t.Errorf("the daemon sees %q", got)
	}
	for _, length := range []int64{0, 4096, 2 * size} {
		if err := unix.Ftruncate(s.FD(), length); !errors.Is(err, unix.EPERM) {
			t.Errorf("resize to %d: %v, want EPERM", length, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(s.FD()), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
		t.Error("the receiver could seal the daemon's staging")
	}
}

func TestMapRefusesWhatCouldChange(t *testing.T) {
	const size = 64 << 10
	m := extent(t, size)
	s, err := CreateStaging("kvtier-test-staging", size)
	mustNil(t, err)
	defer s.Close()
	bare, err := memfd("unsealed", size, 0)
	mustNil(t, err)
	defer bare.Close()
	file, err := os.CreateTemp(t.TempDir(), "")
	mustNil(t, err)
	defer file.Close()
	mustNil(t, file.Truncate(size))
	dir, err := os.Open(t.TempDir())
	mustNil(t, err)
	defer dir.Close()

	before := descriptorsOpen(t)
	for _, c := range []struct {
		what string
		fd   int
		size int64
		do   func(int, int64) (*Memory, error)
		want error
	}{
		{"staging as extent", s.FD(), size, MapReadOnly, paging.ErrIncompatible},
		{"unsealed memory", bare.FD(), size, MapReadOnly, paging.ErrIncompatible},
		{"unsealed memory as staging", bare.FD(), size, MapReadWrite, paging.ErrIncompatible},
		{"a file", int(file.Fd()), size, MapReadOnly, paging.ErrIncompatible},
		{"a directory", int(dir.Fd()), size, MapReadOnly, paging.ErrIncompatible},
		{"larger than said", m.FD(), size - 4096, MapReadOnly, paging.ErrIncompatible},
		{"smaller than said", m.FD(), size + 4096, MapReadOnly, paging.ErrIncompatible},
		{"no size", m.FD(), 0, MapReadOnly, paging.ErrIncompatible},
		{"no descriptor", -1, size, MapReadOnly, paging.ErrInvalid},
		{"an extent as staging", m.FD(), size, MapReadWrite, paging.ErrIO},
	} {
		got, err := c.do(c.fd, c.size)
		wantError(t, c.what, err, c.want)
		if got != nil {
			got.Close()
		}
	}
	if after := descriptorsOpen(t); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}

func TestCreateRefuses(t *testing.T) {
	for _, size := range []int64{-4096, 0, 1, 4095, 4097} {
		_, err := CreateExtent("x", size, Options{NUMANode: -1})
		wantError(t, fmt.Sprintf("%d bytes", size), err, paging.ErrInvalid)
	}
	before := descriptorsOpen(t)
	_, err := CreateExtent("x", 1<<62, Options{NUMANode: -1})
	if err == nil {
		t.Error("an extent of 4 EiB was created")
	}
	_, err = CreateExtent("x", 4096, Options{NUMANode: 5000})
	wantError(t, "NUMA node 5000", err, paging.ErrInvalid)
	if after := descriptorsOpen(t); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}

func TestPopulate(t *testing.T) {
	const size = 40 << 20 // more than two steps
	m := extent(t, size)
	copy(m.Bytes()[size-4:], "kept")
	wantError(t, "populate under an ended context", m.Populate(canceled), context.Canceled)
	mustNil(t, m.Populate(t.Context()))
	if got := resident(t, m); got != size/os.Getpagesize() {
		t.Errorf("%d pages resident of %d", got, size/os.Getpagesize())
	}
	if string(m.Bytes()[size-4:]) != "kept" {
		t.Error("populating changed the contents")
	}
	fresh := extent(t, 1<<20)
	touch(fresh.Bytes())
	if got := resident(t, fresh); got != 1<<20/os.Getpagesize() {
		t.Errorf("touching made %d pages resident", got)
	}
	if !bytes.Equal(fresh.Bytes(), make([]byte, 1<<20)) {
		t.Error("touching changed the contents")
	}
}

// Memory that is populated lies in huge pages at both ends, also where the system
// gives none to shared memory by itself, and sealed as before.
func TestPopulateFindsHugePages(t *testing.T) {
	const size = 20<<20 + 8192 // more than a step, and an end that is less than a huge page
	probe, err := memfd("probe", hugeBytes, 0)
	mustNil(t, err)
	defer probe.Close()
	if !collapse(probe.Bytes()) {
		t.Skip("this kernel puts no huge pages under shared memory on request")
	}
	m := extent(t, size)
	copy(m.Bytes()[hugeBytes+5:], "kept")
	mustNil(t, m.Populate(t.Context()))
	r, err := MapReadOnly(m.FD(), size)
	mustNil(t, err)
	defer r.Close()
	touched := byte(0)
	for off := 0; off < size; off += os.Getpagesize() {
		touched |= r.Bytes()[off]
	}
	if string(r.Bytes()[hugeBytes+5:][:4]) != "kept" || touched != 0 {
		t.Error("populating changed the contents")
	}
	for name, b := range map[string][]byte{"creator": m.Bytes(), "reader": r.Bytes()} {
		if got := hugeMapped(t, b); got != 20<<20 {
			t.Errorf("%s: %d bytes in huge pages", name, got)
		}
	}
	if got := attack(int(duplicate(t, m.FD()).Fd())); got != "nothing" {
		t.Errorf("huge pages: %s", got)
	}
	small := extent(t, size)
	if got := hugeMapped(t, small.Bytes()); got != 0 {
		t.Errorf("%d bytes in huge pages before anything was touched", got)
	}
}

// hugeMapped is how much of a mapping the kernel maps by huge pages.
func hugeMapped(t *testing.T, b []byte) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	mustNil(t, err)
	_, after, ok := strings.Cut("\n"+string(text), fmt.Sprintf("\n%x-", uintptr(unsafe.Pointer(&b[0]))))
	_, after, found := strings.Cut(after, "ShmemPmdMapped:")
	fields := strings.Fields(after)
	if !ok || !found {
		t.Fatal("the mapping is not in smaps")
	}
	kib, err := strconv.Atoi(fields[0])
	mustNil(t, err)
	return kib << 10
}

func resident(t *testing.T, m *Memory) int {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(m.FD(), &st); err != nil {
		t.Fatal(err)
	}
	return int(st.Blocks * 512 / int64(os.Getpagesize()))
}

func TestNUMAPreference(t *testing.T) {
	m, err := CreateExtent("kvtier-test-numa", 1<<20, Options{NUMANode: 0})
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skipf("no memory policy here: %v", err)
	}
	mustNil(t, err)
	defer m.Close()
	mustNil(t, m.Populate(t.Context()))
}

func TestHugePages(t *testing.T) {
	const size = 4 << 20
	m, err := CreateExtent("kvtier-test-huge", size, Options{HugePages: true, NUMANode: -1})
	mustNil(t, err)
	defer m.Close()
	t.Logf("backing: %s", m.Backing())
	mustNil(t, m.Populate(t.Context()))
	copy(m.Bytes(), "precious")
	if got := attack(int(duplicate(t, m.FD()).Fd())); got != "nothing" {
		t.Errorf("%s memory: %s", m.Backing(), got)
	}
	r, err := MapReadOnly(m.FD(), size)
	mustNil(t, err)
	defer r.Close()
	if string(r.Bytes()[:8]) != "precious" {
		t.Error("the reader sees other bytes")
	}
}

func TestCloseTwice(t *testing.T) {
	m := extent(t, 4096)
	fd := m.FD()
	mustNil(t, m.Close())
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("descriptor %s after Close: %v", strconv.Itoa(fd), err)
	}
	mustNil(t, m.Close())
}

func TestGenerations(t *testing.T) {
	const size = 3 << 20
	m := extent(t, size)
	r, err := MapReadOnly(m.FD(), size)
	mustNil(t, err)
	defer r.Close()
	own, theirs := Of(m.Bytes()), Of(r.Bytes())
	first := GenTableBytes(size)
	if first%paging.UnitBytes != 0 || first < size/paging.UnitBytes*8 || first >= size/paging.UnitBytes*8+paging.UnitBytes {
		t.Fatalf("table of %d bytes for %d", first, size)
	}
	for _, off := range []uint64{uint64(first), uint64(first) + 4096, size - 4096} {
		if got := theirs.Load(off); got != 0 {
			t.Errorf("a new slot has generation %d", got)
		}
		if got := own.Raise(off); got != 1 || theirs.Load(off) != 1 || theirs.Load(off+100) != 1 {
			t.Errorf("generation %d, the reader sees %d", got, theirs.Load(off))
		}
	}
	if m.Bytes()[size/4096*8-8] != 1 || m.Bytes()[size/4096*8-7] != 0 {
		t.Error("the table is not little-endian at offset / 4096 * 8")
	}
	for i := first; i < size; i++ {
		if m.Bytes()[i] != 0 {
			t.Fatalf("a slot was written at %d", i)
		}
	}
}

// A reader that copies a slot while it is reused must see another generation
// after its last read.
func TestGenerationsConcurrently(t *testing.T) {
	const size, rounds = 1 << 20, 20000
	m := extent(t, size)
	r, err := MapReadOnly(m.FD(), size)
	mustNil(t, err)
	defer r.Close()
	off := uint64(GenTableBytes(size))
	var wg sync.WaitGroup
	wg.Go(func() { // owner: this test; ends after its rounds
		own := Of(m.Bytes())
		for range rounds {
			own.Raise(off)
		}
	})
	last := paging.Generation(0)
	for last < rounds {
		g := Of(r.Bytes()).Load(off)
		if g < last {
			t.Fatalf("generation went from %d to %d", last, g)
		}
		last = g
		runtime.Gosched()
	}
	wg.Wait()
}

func TestGenTableBytes(t *testing.T) {
	for _, c := range []struct{ bytes, want int64 }{
		{4096, 4096}, {2 << 20, 4096}, {2<<20 + 4096, 8192}, {8 << 20, 16 << 10}, {1 << 30, 2 << 20},
	} {
		if got := GenTableBytes(c.bytes); got != c.want {
			t.Errorf("GenTableBytes(%d) = %d, want %d", c.bytes, got, c.want)
		}
	}
}

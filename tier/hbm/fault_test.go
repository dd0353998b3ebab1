package hbm

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// dying is a device that can be lost: from then on its streams refuse everything.
type dying struct {
	gpu.Device
	lost atomic.Bool
}

type dyingStream struct {
	gpu.Stream
	dev *dying
}

func (d *dying) NewStream() (gpu.Stream, error) {
	s, err := d.Device.NewStream()
	return &dyingStream{s, d}, err
}

func (s *dyingStream) Copy(batch []gpu.Copy) error {
	if s.dev.lost.Load() {
		return gpu.ErrLost
	}
	return s.Stream.Copy(batch)
}

// A device that is lost in the middle of copies takes no more pages: its tier says
// why, has no room, and every page of a batch gets an error.
func TestDeviceLost(t *testing.T) {
	d := &dying{Device: hostDevice(t, false)}
	a := grown(t, open(t, Config{Device: d, BudgetBytes: 64 << 20}))
	b := newBatch(t, a, nil, 65536, 65536, 4096)
	a.Fill(b.pages, b.bytes, b.refs, b.errs)
	b.ok(t, "fill")
	d.lost.Store(true)
	for _, c := range []struct {
		name  string
		pages int
		move  func()
	}{
		{"gather", 1, func() {
			a.Gather(b.pages[:1], [][]tier.Span{{{Addr: uint64(a.Addr(b.refs[0])), Bytes: 65536}}}, []tier.Ref{b.refs[1]}, b.bytes[:1], b.errs[:1])
		}},
		{"fill", 3, func() { a.Fill(b.pages, b.bytes, b.refs, b.errs) }},
		{"load", 3, func() { a.LoadAll(b.pages, b.refs, b.bytes, b.errs) }},
	} {
		clear(b.errs)
		c.move()
		for i, err := range b.errs[:c.pages] {
			if !errors.Is(err, paging.ErrUnavailable) {
				t.Errorf("%s of page %d: %v, want %v", c.name, i, err, paging.ErrUnavailable)
			}
		}
	}
	if u := a.Usage(); u.State != tier.Bypass || u.Reason == "" {
		t.Errorf("state %v, reason %q", u.State, u.Reason)
	}
	if _, err := a.Alloc("default", 4096, 1); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("room on a device that is lost: %v", err)
	}
}

// short is a device whose memory runs out at the nth allocation.
type short struct {
	gpu.Device
	left int
}

func (d *short) Alloc(size int64, use gpu.Use) (gpu.Mem, error) {
	if d.left--; d.left < 0 {
		return nil, gpu.ErrNoMemory
	}
	return d.Device.Alloc(size, use)
}

// Out of memory at each allocation of a start: an error that says so, and nothing
// is left behind (the device, which hostDevice closes, would tell).
func TestOutOfMemoryAtEachAllocation(t *testing.T) {
	for n := range 3 { // the results of two lanes, the first extent
		d := &short{Device: hostDevice(t, false), left: n}
		if _, err := Open(t.Context(), Config{Device: d, BudgetBytes: 64 << 20}); !errors.Is(err, paging.ErrNoSpace) {
			t.Errorf("no memory for allocation %d: %v", n, err)
		}
	}
	// The ones after the first extent stop growth; what there is can be used.
	d := &short{Device: hostDevice(t, false), left: 4}
	a := open(t, Config{Device: d, BudgetBytes: 64 << 20})
	for range 10_000 {
		if a.Usage().Reason != "" {
			break
		}
		wait()
	}
	if u := a.Usage(); u.Reason == "" || u.State != tier.Ready || u.HeldBytes >= u.BudgetBytes {
		t.Errorf("%+v", u)
	}
	if _, err := a.NewWorking(4096); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("working pages without memory: %v", err)
	}
	b := newBatch(t, a, nil, 4096)
	a.Fill(b.pages, b.bytes, b.refs, b.errs)
	b.ok(t, "fill")
}

// Working pages have a bound of their own, and go back with their memory.
func TestWorkingPagesAreBounded(t *testing.T) {
	a := grown(t, open(t, Config{Device: hostDevice(t, false), BudgetBytes: 64 << 20, WorkingBytes: 1 << 20}))
	before := a.Usage().HeldBytes
	w, err := a.NewWorking(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.NewWorking(4096); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("more than the part for working pages: %v", err)
	}
	if u := a.Usage(); u.HeldBytes != before+1<<20 || u.HeldBytes > u.BudgetBytes {
		t.Errorf("held %d of %d, before %d", u.HeldBytes, u.BudgetBytes, before)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if u := a.Usage(); u.HeldBytes != before {
		t.Errorf("held %d after giving back, before %d", u.HeldBytes, before)
	}
}

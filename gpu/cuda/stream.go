//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// maxUnfinished bounds the entries of a stream that are not known to be done; the driver's own queue holds about twice
// as many before it blocks.
const maxUnfinished = 512

// stream implements gpu.Stream. Everything is guarded by dev.mu.
type stream struct {
	dev     *Device
	handle  uintptr
	closed  bool
	queued  int64 // entries ever queued
	done    int64 // entries known to be done
	marks   []mark
	scratch []*scratch
}

// mark is an event recorded when so many entries were queued.
type mark struct {
	at    int64
	event uintptr
}

// poll looks which marks have passed. dev.mu is held.
func (s *stream) poll() {
	for len(s.marks) > 0 {
		first := s.marks[0]
		err := s.dev.try(func() error { return s.dev.lib.call(eventQuery, first.event) })
		if err != nil { // not yet, or lost: try remembers a loss
			return
		}
		s.done = first.at
		s.dev.events = append(s.dev.events, first.event)
		s.marks = s.marks[1:]
	}
}

// mark records an event behind all that is queued, unless there is one. dev.mu is held.
func (s *stream) mark() error {
	if s.done == s.queued || len(s.marks) > 0 && s.marks[len(s.marks)-1].at == s.queued {
		return nil
	}
	return s.dev.try(func() error {
		event, err := s.dev.takeEvent()
		if err != nil {
			return err
		}
		if err := s.dev.lib.call(eventRecord, event, s.handle); err != nil {
			s.dev.events = append(s.dev.events, event)
			return err
		}
		s.marks = append(s.marks, mark{s.queued, event})
		return nil
	})
}

// settle finds out how far the stream is. dev.mu is held.
func (s *stream) settle() {
	if err := s.mark(); err != nil {
		return // done stays where it is
	}
	s.poll()
}

func (d *Device) takeEvent() (event uintptr, err error) {
	if n := len(d.events); n > 0 {
		event = d.events[n-1]
		d.events = d.events[:n-1]
		return event, nil
	}
	return event, d.lib.call(eventCreate, uintptr(unsafe.Pointer(&event)), eventDisableTiming)
}

// room waits until the stream may take another entry, and returns with dev.mu held if err is nil.
func (s *stream) room() error {
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		s.dev.mu.Lock()
		err := s.state()
		if err == nil && s.queued-s.done >= maxUnfinished {
			s.settle()
			err = s.state()
		}
		if err == nil && s.queued-s.done < maxUnfinished {
			return nil
		}
		s.dev.mu.Unlock()
		if err != nil {
			return err
		}
		time.Sleep(pause)
	}
}

func (s *stream) state() error {
	if s.closed || s.dev.closed {
		return gpu.ErrClosed
	}
	return s.dev.lost
}

// submit checks spans and runs queue, which puts one entry into the stream, with the context current.
func (s *stream) submit(op string, spans func(yield func(gpu.Span) bool), queue func() error) error {
	if err := s.room(); err != nil {
		return err
	}
	defer s.dev.mu.Unlock()
	held, err := s.dev.hold(op, spans)
	if err != nil {
		return err
	}
	return s.enter(op, held, queue)
}

// enter queues an entry that names held. dev.mu is held.
func (s *stream) enter(op string, held []*mem, queue func() error) error {
	s.queued++ // also if it fails: part of it may have been queued
	for _, m := range held {
		m.last[s] = s.queued
	}
	if err := s.dev.try(queue); err != nil {
		return fmt.Errorf("gpu/cuda: %s: %w", op, err)
	}
	return nil
}

// Fill implements gpu.Stream.
func (s *stream) Fill(dst gpu.Addr, n int64, value byte) error {
	if n <= 0 {
		return &gpu.ArgError{Op: "fill", Arg: "n", Got: n, Want: "a positive size"}
	}
	return s.submit("fill", one(dst, n, true), func() error {
		return s.dev.lib.call(memsetAsync, uintptr(dst), uintptr(value), uintptr(n), s.handle)
	})
}

// one is a single span.
func one(a gpu.Addr, n int64, write bool) func(yield func(gpu.Span) bool) {
	return func(yield func(gpu.Span) bool) { yield(gpu.Span{Addr: a, Bytes: n, Write: write}) }
}

// Signal implements gpu.Stream.
func (s *stream) Signal(slot gpu.Addr, value uint64) error {
	return s.slot("signal", streamWriteValue, slot, value, 0, true)
}

// Await implements gpu.Stream.
func (s *stream) Await(slot gpu.Addr, value uint64) error {
	return s.slot("await", streamWaitValue, slot, value, waitGreaterOrEqual, false)
}

func (s *stream) slot(op string, e entry, slot gpu.Addr, value uint64, flags uintptr, write bool) error {
	if slot%8 != 0 {
		return &gpu.ArgError{Op: op, Arg: "slot", Got: int64(slot), Want: "a multiple of 8", Err: gpu.ErrAlign}
	}
	return s.submit(op, one(slot, 8, write), func() error {
		return s.dev.lib.call(e, s.handle, uintptr(slot), uintptr(value), flags)
	})
}

// Record implements gpu.Stream.
func (s *stream) Record() (gpu.Fence, error) {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	if err := s.state(); err != nil {
		return nil, err
	}
	if err := s.mark(); err != nil {
		return nil, fmt.Errorf("gpu/cuda: record: %w", err)
	}
	return fence{s, s.queued}, nil
}

// Wait implements gpu.Stream.
func (s *stream) Wait(f gpu.Fence) error {
	h, ok := f.(fence)
	if !ok || h.stream.dev != s.dev {
		return fmt.Errorf("%w: wait for a fence of another device", gpu.ErrArgument)
	}
	if h.stream == s { // the order of the stream is enough
		return nil
	}
	if err := s.room(); err != nil {
		return err
	}
	defer s.dev.mu.Unlock()
	for _, m := range h.stream.marks {
		if m.at >= h.at && h.stream.done < h.at {
			return s.enter("wait", nil, func() error { return s.dev.lib.call(streamWaitEvent, s.handle, m.event, 0) })
		}
	}
	return nil // passed
}

// Close implements gpu.Stream.
func (s *stream) Close() error {
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.closed || d.closed {
		return nil
	}
	if d.lost == nil {
		s.settle()
	}
	if s.done < s.queued && d.lost == nil {
		return fmt.Errorf("%w: %d operations", gpu.ErrBusy, s.queued-s.done)
	}
	delete(d.streams, s)
	if err := d.do(s.destroy); err != nil && d.lost == nil {
		return fmt.Errorf("gpu/cuda: close stream: %w", err)
	}
	return nil
}

// destroy releases what the stream owns. The context is current.
func (s *stream) destroy() error {
	s.closed = true
	var errs []error
	for _, m := range s.marks { // of a lost device
		errs = append(errs, s.dev.lib.call(eventDestroy, m.event))
	}
	for _, x := range s.scratch {
		errs = append(errs, x.release())
	}
	s.marks, s.scratch = nil, nil
	return errors.Join(append(errs, s.dev.lib.call(streamDestroy, s.handle))...)
}

// fence implements gpu.Fence: it is done when its stream has finished that many entries.
type fence struct {
	stream *stream
	at     int64
}

func (f fence) Done() (bool, error) {
	d := f.stream.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if f.stream.done < f.at && !d.closed && d.lost == nil {
		f.stream.poll()
	}
	if f.stream.done >= f.at {
		return true, nil
	}
	if d.closed {
		return false, gpu.ErrClosed
	}
	return false, d.lost
}

// Wait asks again and again, at first every few microseconds: a wait inside the driver could not be left when ctx ends.
func (f fence) Wait(ctx context.Context) error {
	for pause := 2 * time.Microsecond; ; pause = min(2*pause, 500*time.Microsecond) {
		done, err := f.Done()
		if done || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("gpu/cuda: wait for a fence: %w", context.Cause(ctx))
		}
		time.Sleep(pause)
	}
}

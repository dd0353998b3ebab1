package host

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host/attn"
)

// queueLength bounds the work of one stream; a full queue makes callers wait.
const queueLength = 1024

// work is one entry of a stream. It may wait, and must end.
type work struct {
	run  func()
	held []*mem
}

// stream implements gpu.Stream.
type stream struct {
	dev *Device

	mu       sync.Mutex // after dev.mu where both are held
	change   sync.Cond  // of queue, demanded or closed
	queue    []work     // the first may be running
	queued   int64      // entries ever queued
	done     int64      // entries ever finished
	demanded int64      // entries that may run: all of them, unless the device is strict
	closed   bool

	ended chan struct{} // closed when loop has returned
}

func newStream(d *Device) *stream {
	s := &stream{dev: d, ended: make(chan struct{})}
	s.change.L = &s.mu
	if !d.cfg.Strict {
		s.demanded = 1<<63 - 1
	}
	go s.loop() // owner: the stream; ends after stop; one for each stream
	return s
}

func (s *stream) loop() {
	defer close(s.ended)
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for !s.closed && (len(s.queue) == 0 || s.done >= s.demanded) {
			s.change.Wait()
		}
		if s.closed {
			return
		}
		w := s.queue[0]
		s.mu.Unlock()
		w.run()
		s.dev.drop(w.held)
		s.mu.Lock()
		s.queue = s.queue[1:]
		s.done++
		s.dev.unfinished.Add(-1)
		s.change.Broadcast()
	}
}

// put queues w. It waits while the queue is full, and lets a strict stream run then.
func (s *stream) put(w work) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.queue) >= queueLength && !s.closed {
		s.demanded = max(s.demanded, s.queued)
		s.change.Broadcast()
		s.change.Wait()
	}
	if s.closed {
		return gpu.ErrClosed
	}
	s.dev.unfinished.Add(1)
	s.queue = append(s.queue, w)
	s.queued++
	s.change.Broadcast()
	return nil
}

// hold checks spans and queues run, which keeps their memory alive.
func (s *stream) hold(op string, spans func(yield func(gpu.Span) bool), run func(held []*mem) func()) error {
	held, err := s.dev.holdAll(op, spans)
	if err != nil {
		return err
	}
	if err := s.put(work{run(held), held}); err != nil {
		s.dev.drop(held)
		return err
	}
	return nil
}

func (s *stream) demand(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > s.demanded {
		s.demanded = n
		s.change.Broadcast()
	}
}

func (s *stream) demandAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.demanded = max(s.demanded, s.queued)
	s.change.Broadcast()
}

// stop ends the loop of a stream without work. The caller waits for ended without holding a lock.
func (s *stream) stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) > 0 {
		return fmt.Errorf("%w: %d operations", gpu.ErrBusy, len(s.queue))
	}
	s.closed = true
	s.change.Broadcast()
	return nil
}

// Copy implements gpu.Stream.
func (s *stream) Copy(batch []gpu.Copy) error {
	if len(batch) == 0 {
		return nil
	}
	if err := gpu.ValidateCopies(batch); err != nil {
		return err
	}
	batch = slices.Clone(batch)
	spans := func(yield func(gpu.Span) bool) { // destinations first: runs of one memory then cost one hold
		for _, c := range batch {
			if !yield(gpu.Span{Addr: c.Dst, Bytes: c.Bytes, Write: true}) {
				return
			}
		}
		for _, c := range batch {
			if !yield(gpu.Span{Addr: c.Src, Bytes: c.Bytes}) {
				return
			}
		}
	}
	return s.hold("copy", spans, func(held []*mem) func() {
		return func() {
			for _, c := range batch {
				copy(within(held, c.Dst, c.Bytes), within(held, c.Src, c.Bytes))
			}
		}
	})
}

// within is the memory at a, which lies in one of held.
func within(held []*mem, a gpu.Addr, n int64) []byte {
	for _, m := range held {
		if a >= m.Addr() && a < m.end() {
			return m.slice(a, n)
		}
	}
	panic("gpu/host: address was checked and is gone")
}

// Fill implements gpu.Stream.
func (s *stream) Fill(dst gpu.Addr, n int64, value byte) error {
	if n <= 0 {
		return &gpu.ArgError{Op: "fill", Arg: "n", Got: n, Want: "a positive size"}
	}
	span := func(yield func(gpu.Span) bool) { yield(gpu.Span{Addr: dst, Bytes: n, Write: true}) }
	return s.hold("fill", span, func(held []*mem) func() {
		return func() {
			b := held[0].slice(dst, n)
			b[0] = value
			for done := 1; done < len(b); done *= 2 { // copy is faster than a loop over bytes
				copy(b[done:], b[:done])
			}
		}
	})
}

// Launch implements gpu.Stream.
func (s *stream) Launch(k gpu.Kernel) error {
	if err := k.Validate(); err != nil {
		return err
	}
	switch k := k.(type) {
	case *gpu.Attention:
		a := *k
		a.Table, a.SeqLens = slices.Clone(a.Table), slices.Clone(a.SeqLens)
		if a.Batch() == 0 {
			return nil
		}
		return s.hold(a.Name(), a.Spans, func(held []*mem) func() { return func() { s.attention(&a, held) } })
	case *gpu.PageSum:
		if s.dev.cfg.PageSum == nil {
			break
		}
		p := *k
		p.Pages = slices.Clone(p.Pages)
		if len(p.Pages) == 0 {
			return nil
		}
		return s.hold(p.Name(), p.Spans, func(held []*mem) func() { return func() { s.pageSum(&p, held) } })
	}
	return fmt.Errorf("%w: kernel %s", gpu.ErrUnsupported, k.Name())
}

func (s *stream) attention(a *gpu.Attention, held []*mem) {
	q, out := within(held, a.Q, a.QBytes()), within(held, a.Out, a.OutBytes())
	var top int32
	for b, n := range a.SeqLens {
		for _, page := range a.Table[b*a.MaxPages+a.Start(b)/a.Tokens:][:(int(n)+a.Tokens-1)/a.Tokens-a.Start(b)/a.Tokens] {
			top = max(top, page)
		}
	}
	pages := held[len(held)-1] // any memory will do to reach the pool's address from
	pool := pages.reach(a.Pool, a.PoolBytes(int(top)+1))
	attn.Decoder{ISA: attn.Supported()[0], Workers: s.dev.cfg.Workers}.Decode(a, q, pool, out)
}

func (s *stream) pageSum(p *gpu.PageSum, held []*mem) {
	out := within(held, p.Out, int64(len(p.Pages))*8)
	for i, at := range p.Pages {
		sum := s.dev.cfg.PageSum(within(held, at, p.Bytes))
		for b := range 8 {
			out[8*i+b] = byte(sum >> (8 * b))
		}
	}
}

// Signal implements gpu.Stream.
func (s *stream) Signal(slot gpu.Addr, value uint64) error {
	return s.slot("signal", slot, true, func(p *uint64) { atomic.StoreUint64(p, value) })
}

// Await implements gpu.Stream.
func (s *stream) Await(slot gpu.Addr, value uint64) error {
	return s.slot("await", slot, false, func(p *uint64) {
		for pause := 5 * time.Microsecond; atomic.LoadUint64(p) < value; pause = min(2*pause, time.Millisecond) {
			s.dev.demandAll()
			time.Sleep(pause)
		}
	})
}

func (s *stream) slot(op string, slot gpu.Addr, write bool, run func(p *uint64)) error {
	if slot%8 != 0 {
		return &gpu.ArgError{Op: op, Arg: "slot", Got: int64(slot), Want: "a multiple of 8", Err: gpu.ErrAlign}
	}
	span := func(yield func(gpu.Span) bool) { yield(gpu.Span{Addr: slot, Bytes: 8, Write: write}) }
	return s.hold(op, span, func(held []*mem) func() {
		p := (*uint64)(unsafe.Pointer(unsafe.SliceData(held[0].slice(slot, 8))))
		return func() { run(p) }
	})
}

// Record implements gpu.Stream.
func (s *stream) Record() (gpu.Fence, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, gpu.ErrClosed
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
	return s.put(work{run: func() { h.wait(func() bool { return false }) }})
}

// Close implements gpu.Stream.
func (s *stream) Close() error {
	if err := s.stop(); err != nil {
		return err
	}
	<-s.ended
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	delete(s.dev.streams, s)
	return nil
}

// fence implements gpu.Fence: it is done when its stream has finished that many entries.
type fence struct {
	stream *stream
	at     int64
}

func (f fence) Done() (bool, error) {
	f.stream.demand(f.at)
	f.stream.mu.Lock()
	defer f.stream.mu.Unlock()
	return f.stream.done >= f.at, nil
}

func (f fence) Wait(ctx context.Context) error {
	wake := context.AfterFunc(ctx, func() {
		f.stream.mu.Lock()
		defer f.stream.mu.Unlock()
		f.stream.change.Broadcast()
	})
	defer wake()
	f.wait(func() bool { return ctx.Err() != nil })
	if done, _ := f.Done(); !done {
		return fmt.Errorf("gpu/host: wait for a fence: %w", context.Cause(ctx))
	}
	return nil
}

// wait returns when the fence is done or, woken by a change, sees stop.
func (f fence) wait(stop func() bool) {
	f.stream.demand(f.at)
	f.stream.mu.Lock()
	defer f.stream.mu.Unlock()
	for f.stream.done < f.at && !stop() {
		f.stream.change.Wait()
	}
}

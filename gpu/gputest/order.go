package gputest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/gpu"
)

func testStreamOrder(e *env) {
	defer e.done()
	s, a, b := e.stream(), e.alloc(65536, gpu.Private), e.alloc(65536, gpu.Private)
	for i := range 100 {
		e.ok(s.Fill(a.Addr(), 65536, byte(i)))
		e.ok(s.Copy([]gpu.Copy{{Dst: b.Addr(), Src: a.Addr(), Bytes: 65536}}))
	}
	if got := e.get(s, b.Addr(), 65536); !bytes.Equal(got, bytes.Repeat([]byte{99}, 65536)) {
		e.Error("work of one stream ran out of order")
	}
	e.closeAll(s)
	e.free(a, b)
}

func testWaitOrdersStreams(e *env) {
	defer e.done()
	s1, s2 := e.stream(), e.stream()
	a, b := e.alloc(1<<20, gpu.Private), e.alloc(1<<20, gpu.Private)
	for i := range 50 {
		e.ok(s1.Fill(a.Addr(), 1<<20, byte(i)))
		f, err := s1.Record()
		e.ok(err)
		e.ok(s2.Wait(f))
		e.ok(s2.Copy([]gpu.Copy{{Dst: b.Addr(), Src: a.Addr(), Bytes: 1 << 20}}))
		back, err := s2.Record() // s1 must not overwrite a before s2 has read it
		e.ok(err)
		e.ok(s1.Wait(back))
		if i%10 == 9 {
			if got := e.get(s2, b.Addr(), 1<<20); !bytes.Equal(got, bytes.Repeat([]byte{byte(i)}, 1<<20)) {
				e.Fatalf("round %d: the second stream did not wait", i)
			}
		}
	}
	e.sync(s1)
	e.closeAll(s1, s2)
	e.free(a, b)
}

// The wait is what makes the test above pass: without it a lazy device copies the old bytes.
func testForgottenWait(e *env) {
	defer e.done()
	if !e.Lazy {
		return
	}
	s1, s2 := e.stream(), e.stream()
	a, b := e.alloc(4096, gpu.Private), e.alloc(4096, gpu.Private)
	e.put(s1, a.Addr(), bytes.Repeat([]byte{1}, 4096))
	e.ok(s1.Fill(a.Addr(), 4096, 2))
	e.ok(s2.Copy([]gpu.Copy{{Dst: b.Addr(), Src: a.Addr(), Bytes: 4096}}))
	if got := e.get(s2, b.Addr(), 4096)[0]; got != 1 {
		e.Errorf("read %d without a wait: a forgotten wait would go unnoticed", got)
	}
	e.sync(s1)
	e.closeAll(s1, s2)
	e.free(a, b)
}

// An engine computes into a page and the store is issued right behind it: the sum that is taken must be that of the final
// bytes. On a lazy device leaving the wait out must be seen.
func testLateWrites(e *env) {
	defer e.done()
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	engine, store := e.stream(), e.stream()
	page, copied := e.alloc(4096, gpu.Shared), e.alloc(4096, gpu.Pool)
	h := e.host(4096)
	round := func(i int, wait bool) byte {
		e.ok(engine.Fill(page.Addr(), 4096, byte(i)))
		if wait {
			f, err := engine.Record()
			e.ok(err)
			e.ok(store.Wait(f))
		}
		e.ok(store.Copy([]gpu.Copy{{Dst: copied.Addr(), Src: page.Addr(), Bytes: 4096}}))
		e.ok(store.Copy([]gpu.Copy{{Dst: h.Addr(), Src: copied.Addr(), Bytes: 4096}}))
		e.sync(store)
		if bytes.Count(h.b, h.b[:1]) != 4096 {
			e.Fatalf("round %d: a torn page", i)
		}
		got := h.b[0]
		e.sync(engine)
		return got
	}
	for i := range rounds {
		if got := round(i, true); got != byte(i) {
			e.Fatalf("round %d: stored %d", i, got)
		}
	}
	if e.Lazy && round(rounds, false) == byte(rounds) {
		e.Error("without the wait the stored bytes were final all the same")
	}
	e.closeAll(engine, store)
	e.free(page, copied, h)
}

func testFreeUnderWork(e *env) {
	defer e.done()
	s := e.stream()
	slot, a, h := e.alloc(4096, gpu.Shared), e.alloc(4096, gpu.Pool), e.host(4096)
	e.ok(s.Fill(slot.Addr(), 4096, 0))
	e.sync(s)
	e.ok(s.Await(slot.Addr(), 1)) // nothing behind it runs
	e.ok(s.Copy([]gpu.Copy{{Dst: a.Addr(), Src: h.Addr(), Bytes: 4096}}))
	for name, m := range map[string]gpu.Mem{"slot": slot, "destination": a, "source": h.Mem} {
		e.want(m.Free(), gpu.ErrBusy, "Free of the "+name)
	}
	e.want(s.Close(), gpu.ErrBusy, "Close of the stream")
	e.want(e.dev.Close(), gpu.ErrBusy, "Close of the device")
	e.release(slot.Addr(), 1)
	e.sync(s)
	e.closeAll(s)
	e.ok(s.Close())
	e.want(s.Fill(a.Addr(), 1, 1), gpu.ErrClosed, "Fill on a closed stream")
	e.free(slot, a, h)
	_, err := s.Record()
	e.want(err, gpu.ErrClosed, "Record on a closed stream")
}

// release raises a slot from a stream of its own, as the owner does when an engine has died.
func (e *env) release(slot gpu.Addr, value uint64) {
	e.Helper()
	s := e.stream()
	e.ok(s.Signal(slot, value))
	e.sync(s)
	e.closeAll(s)
}

func testFenceContext(e *env) {
	defer e.done()
	s, slot := e.stream(), e.alloc(4096, gpu.Shared)
	e.ok(s.Fill(slot.Addr(), 4096, 0))
	e.sync(s)
	e.ok(s.Await(slot.Addr(), 1))
	f, err := s.Record()
	e.ok(err)
	ctx, cancel := context.WithCancel(e.Context())
	cancel()
	e.want(f.Wait(ctx), context.Canceled, "Wait with a context that ended")
	if done, err := f.Done(); done || err != nil {
		e.Errorf("Done before the slot was raised: %v, %v", done, err)
	}
	e.release(slot.Addr(), 1)
	e.ok(f.Wait(e.Context()))
	if done, err := f.Done(); !done || err != nil {
		e.Errorf("Done after Wait: %v, %v", done, err)
	}
	e.closeAll(s)
	e.ok(f.Wait(e.Context())) // a fence outlives its stream
	e.free(slot)
}

type strangeFence struct{ gpu.Fence }

func testForeignFence(e *env) {
	defer e.done()
	s := e.stream()
	e.want(s.Wait(strangeFence{}), gpu.ErrArgument, "Wait for a fence of something else")
	e.closeAll(s)
}

func testTimeline(e *env) {
	defer e.done()
	s1, s2 := e.stream(), e.stream()
	slots, a, b := e.alloc(4096, gpu.Shared), e.alloc(4096, gpu.Private), e.alloc(4096, gpu.Private)
	e.ok(s1.Fill(slots.Addr(), 4096, 0))
	e.sync(s1)
	ready, read := slots.Addr(), slots.Addr()+8
	for i := uint64(1); i <= 50; i++ { // queued without a single wait of the host
		e.ok(s1.Await(read, i-1))
		e.ok(s1.Fill(a.Addr(), 4096, byte(i)))
		e.ok(s1.Signal(ready, i))
		e.ok(s2.Await(ready, i))
		e.ok(s2.Copy([]gpu.Copy{{Dst: b.Addr(), Src: a.Addr(), Bytes: 4096}}))
		e.ok(s2.Signal(read, i))
	}
	if got := e.get(s2, b.Addr(), 4096); !bytes.Equal(got, bytes.Repeat([]byte{50}, 4096)) {
		e.Errorf("after 50 rounds: %d", got[0])
	}
	e.sync(s1)
	if got := e.get(s1, slots.Addr(), 16); binary.LittleEndian.Uint64(got) != 50 || binary.LittleEndian.Uint64(got[8:]) != 50 {
		e.Errorf("slots: % x", got)
	}
	e.ok(s1.Await(ready, 7)) // at least: long past
	e.sync(s1)
	e.closeAll(s1, s2)
	e.free(slots, a, b)
}

// A wait for an engine that never signals ends when the owner raises the slot.
func testReleaseDeadWaiter(e *env) {
	defer e.done()
	s, slot := e.stream(), e.alloc(4096, gpu.Shared)
	e.ok(s.Fill(slot.Addr(), 4096, 0))
	e.sync(s)
	e.ok(s.Await(slot.Addr(), 1<<63))
	f, err := s.Record()
	e.ok(err)
	if done, err := f.Done(); done || err != nil {
		e.Fatalf("not signalled, but %v, %v", done, err)
	}
	e.release(slot.Addr(), 1<<64-1)
	e.ok(f.Wait(e.Context()))
	e.closeAll(s)
	e.free(slot)
}

// Goroutines with a stream each, side by side on one device.
func testStreams(e *env) {
	defer e.done()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() { // owner: this test; ends after its rounds
			if err := e.oneStream(byte(g + 1)); err != nil {
				e.Error(err)
			}
		})
	}
	wg.Wait()
}

func (e *env) oneStream(id byte) error {
	s, err := e.dev.NewStream()
	if err != nil {
		return err
	}
	b := pages(e.T, 65536)
	h, err := e.dev.Register(b)
	if err != nil {
		return err
	}
	for i := range 20 {
		m, err := e.dev.Alloc(65536, gpu.Use(i%3))
		if err != nil {
			return err
		}
		want := bytes.Repeat([]byte{id ^ byte(i<<3)}, 65536)
		err = errors.Join(s.Fill(m.Addr(), 65536, want[0]), s.Copy([]gpu.Copy{{Dst: h.Addr(), Src: m.Addr(), Bytes: 65536}}), gpu.Sync(e.Context(), s), m.Free())
		if err != nil {
			return err
		}
		if !bytes.Equal(b, want) {
			return errors.New("bytes of another stream")
		}
	}
	return errors.Join(h.Free(), s.Close())
}

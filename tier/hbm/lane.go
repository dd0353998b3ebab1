package hbm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/tier"
)

const (
	// detourBytes is the registered memory through which pages go that lie in
	// memory which is not.
	detourBytes = 4 << 20
	// sumsMost is how many pages are summed by one batch on the device.
	sumsMost = 1024
	// answerWithin is the time that a device may take for one batch: a batch of the
	// longest pages takes a second on a slow bus.
	answerWithin = 30 * time.Second
)

// item is one page on its way into a slot, out of it, or both.
type item struct {
	bytes int64
	slot  gpu.Addr
	want  uint64     // its sum
	any   bool       // it has no sum yet: the one found is the sum
	src   []byte     // copied into the slot first; nil: nothing is
	from  []gpu.Copy // copied in on the device; their Dst is in the slot
	dst   []byte     // copied out of the slot; nil: nothing is
	only  bool       // it has no slot: what comes in goes to dst and is summed there

	scatter []tier.Span // the page goes to these, from src or the slot; then what is at slot is summed
	sum     uint64      // found in the slot
	err     error
}

// lane is a stream with what it needs for batches. Not safe for concurrent use.
type lane struct {
	stream gpu.Stream
	sums   gpu.Mem // results of one batch, on the device
	host   []byte  // the detour, then room for the results
	detour gpu.Mem // host, registered

	life  context.Context // ends with close
	end   context.CancelFunc
	waits sync.WaitGroup
}

func newLane(dev gpu.Device) (_ *lane, err error) {
	l := new(lane)
	l.life, l.end = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(deviceError(err), l.close())
		}
	}()
	if l.stream, err = dev.NewStream(); err != nil {
		return nil, err
	}
	if l.sums, err = dev.Alloc(8*sumsMost, gpu.Private); err != nil {
		return nil, err
	}
	l.host, err = syscall.Mmap(-1, 0, detourBytes+8*sumsMost, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("%w: memory for copies: %w", gpu.ErrNoMemory, err)
	}
	l.detour, err = dev.Register(l.host)
	return l, err
}

// close gives everything back. No batch runs.
func (l *lane) close() error {
	l.end()
	l.waits.Wait()
	var errs []error
	if l.detour != nil {
		errs = append(errs, l.detour.Free())
	}
	if l.host != nil {
		errs = append(errs, syscall.Munmap(l.host))
	}
	if l.sums != nil {
		errs = append(errs, l.sums.Free())
	}
	if l.stream != nil {
		errs = append(errs, l.stream.Close())
	}
	return errors.Join(errs...)
}

// finder is where the device sees host memory, if it is registered.
type finder func(b []byte) (gpu.Addr, bool)

// run moves a batch and says in each item what became of it. An error means that
// the device failed, and is that of all items.
func (l *lane) run(find finder, items []item) error {
	for len(items) > 0 {
		n := min(len(items), sumsMost)
		if err := l.batch(find, items[:n]); err != nil {
			return err
		}
		items = items[n:]
	}
	return nil
}

// batch moves up to sumsMost items: in, summed, out. A page that is damaged is
// not copied out any more where that takes a step of its own.
func (l *lane) batch(find finder, items []item) error {
	if items[0].scatter != nil {
		return l.scatter(find, items)
	}
	if err := l.gatherPlain(items); err != nil {
		return err
	}
	if err := l.copyIn(find, items); err != nil {
		return err
	}
	if err := l.sum(items); err != nil {
		return err
	}
	direct, err := l.copyOut(find, items)
	if err != nil {
		return err
	}
	if err := l.sync(); err != nil {
		return err
	}
	for i := range items {
		it := &items[i]
		if err := l.compare(i, it); err != nil {
			return err
		}
		if it.err == nil && !it.only && it.dst != nil && !direct[i] {
			if err := l.outByDetour(it.dst, it.slot); err != nil {
				return err
			}
		}
	}
	return nil
}

// compare judges item i by the sum that the device found, unless it has no slot.
func (l *lane) compare(i int, it *item) (err error) {
	if it.only {
		return nil
	}
	if summable(it.bytes) {
		it.sum = binary.LittleEndian.Uint64(l.host[detourBytes+8*i:])
	} else if it.sum, err = l.sumByDetour(it); err != nil {
		return err
	}
	if it.any {
		it.want = it.sum
	} else if it.sum != it.want {
		it.err = fmt.Errorf("page on the device has checksum %016x, want %016x: %w", it.sum, it.want, paging.ErrCorrupt)
	}
	return nil
}

// summable says whether the device sums pages of this length.
func summable(bytes int64) bool { return bytes%16 == 0 }

// copyIn queues the copies into the slots.
func (l *lane) copyIn(find finder, items []item) error {
	var batch []gpu.Copy
	for i := range items {
		it := &items[i]
		if it.only {
			continue
		}
		batch = append(batch, it.from...)
		if it.src == nil {
			continue
		}
		if sabotage.On("skip-device-copy") {
			it.any = true
			continue
		}
		if at, ok := find(it.src); ok {
			batch = append(batch, gpu.Copy{Dst: it.slot, Src: at, Bytes: it.bytes})
		} else if err := l.inByDetour(it.slot, it.src); err != nil {
			return err
		}
	}
	for part := range slices.Chunk(batch, gpu.MaxBatch) {
		if err := l.stream.Copy(part); err != nil {
			return deviceError(err)
		}
	}
	return nil
}

// sum queues the sums of what lies in the slots, and their way to the host.
func (l *lane) sum(items []item) error {
	// One launch takes pages of one length; those of a batch mostly have one.
	for from := 0; from < len(items); {
		to := from + 1
		for to < len(items) && items[to].bytes == items[from].bytes && items[to].only == items[from].only {
			to++
		}
		if !items[from].only && summable(items[from].bytes) {
			k := gpu.PageSum{Bytes: items[from].bytes, Out: l.sums.Addr() + gpu.Addr(8*from)}
			for _, it := range items[from:to] {
				k.Pages = append(k.Pages, it.slot)
			}
			if err := l.stream.Launch(&k); err != nil {
				return deviceError(err)
			}
		}
		from = to
	}
	return deviceError(l.stream.Copy([]gpu.Copy{{Dst: l.detour.Addr() + detourBytes, Src: l.sums.Addr(), Bytes: int64(8 * len(items))}}))
}

// copyOut queues the copies out of the slots that need no detour, and says which
// these are.
func (l *lane) copyOut(find finder, items []item) (direct []bool, err error) {
	direct = make([]bool, len(items))
	var batch []gpu.Copy
	for i := range items {
		if it := &items[i]; it.dst != nil && !it.only {
			var at gpu.Addr
			if at, direct[i] = find(it.dst); direct[i] {
				batch = append(batch, gpu.Copy{Dst: at, Src: it.slot, Bytes: it.bytes})
			}
		}
	}
	return direct, deviceError(l.stream.Copy(batch))
}

func (l *lane) inByDetour(slot gpu.Addr, src []byte) error {
	for len(src) > 0 {
		n := copy(l.host[:detourBytes], src)
		if err := l.stream.Copy([]gpu.Copy{{Dst: slot, Src: l.detour.Addr(), Bytes: int64(n)}}); err != nil {
			return deviceError(err)
		}
		if err := l.sync(); err != nil {
			return err
		}
		src, slot = src[n:], slot+gpu.Addr(n)
	}
	return nil
}

func (l *lane) outByDetour(dst []byte, slot gpu.Addr) error {
	return l.pieces(slot, int64(len(dst)), func(b []byte) { dst = dst[copy(dst, b):] })
}

func (l *lane) sumByDetour(it *item) (uint64, error) {
	var h paging.Hasher
	h.Reset()
	err := l.pieces(it.slot, it.bytes, func(b []byte) { _, _ = h.Write(b) }) // never fails
	return h.Sum64(), err
}

// pieces brings n bytes of the device to the host, a piece at a time.
func (l *lane) pieces(at gpu.Addr, n int64, use func(b []byte)) error {
	for n > 0 {
		part := min(n, detourBytes)
		if err := l.stream.Copy([]gpu.Copy{{Dst: l.detour.Addr(), Src: at, Bytes: part}}); err != nil {
			return deviceError(err)
		}
		if err := l.sync(); err != nil {
			return err
		}
		use(l.host[:part])
		at, n = at+gpu.Addr(part), n-part
	}
	return nil
}

// sync waits until the device has done what was queued. If it does not in time,
// the error is not settled until it has.
func (l *lane) sync() error {
	fence, err := l.stream.Record()
	if err != nil {
		return deviceError(err)
	}
	ctx, cancel := context.WithTimeout(l.life, answerWithin)
	defer cancel()
	if err = fence.Wait(ctx); err == nil || ctx.Err() == nil {
		return deviceError(err)
	}
	done := make(chan struct{})
	l.waits.Go(func() { // owner: the lane; exits with the fence or close; one: a device that failed gets no more batches
		if fence.Wait(l.life) == nil {
			close(done)
		}
	})
	return tier.NotSettled(fmt.Errorf("the device did not answer within %v: %w", answerWithin, paging.ErrUnavailable), done)
}

// gatherPlain copies pages that have no slot straight to the host.
func (l *lane) gatherPlain(items []item) error {
	for i := range items {
		it := &items[i]
		if !it.only {
			continue
		}
		dst := it.dst
		for _, c := range it.from {
			if err := l.pieces(c.Src, c.Bytes, func(b []byte) { dst = dst[copy(dst, b):] }); err != nil {
				return err
			}
		}
		it.sum = paging.Checksum(it.dst)
	}
	return nil
}

// scatter copies pages to where engines want them, sums what is at their slots,
// and waits.
func (l *lane) scatter(find finder, items []item) error {
	var batch []gpu.Copy
	for i := range items {
		it := &items[i]
		at, direct := it.slot, true
		if it.src != nil {
			at, direct = find(it.src)
		}
		if direct {
			batch = append(batch, copies(at, it.scatter, false)...)
			continue
		}
		src := it.src
		for _, s := range it.scatter {
			if err := l.inByDetour(gpu.Addr(s.Addr), src[:s.Bytes]); err != nil {
				return err
			}
			src = src[s.Bytes:]
		}
	}
	for part := range slices.Chunk(batch, gpu.MaxBatch) {
		if err := l.stream.Copy(part); err != nil {
			return deviceError(err)
		}
	}
	if err := l.sum(items); err != nil {
		return err
	}
	if err := l.sync(); err != nil {
		return err
	}
	for i := range items {
		if err := l.compare(i, &items[i]); err != nil {
			return err
		}
	}
	return nil
}

package gputest

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/gpu"
)

func testInfo(e *env) {
	defer e.done()
	info := e.dev.Info()
	if info.Driver == "" || info.Name == "" || info.Arch == "" || info.Units < 1 || info.TotalBytes < 64<<20 || info.GranuleBytes < 1 {
		e.Errorf("incomplete: %+v", info)
	}
	if info.UUID == ([16]byte{}) {
		e.Error("no UUID: another process could not name this device")
	}
	if got := e.dev.Info().UUID; got != info.UUID {
		e.Error("the UUID changed")
	}
}

func testAllocAndFree(e *env) {
	defer e.done()
	var mems []gpu.Mem
	for i, use := range []gpu.Use{gpu.Private, gpu.Pool, gpu.Shared, gpu.Private} {
		size := int64(1000 + i)
		m := e.alloc(size, use)
		if m.Size() < size || m.Addr() == 0 || m.Addr()%256 != 0 {
			e.Errorf("use %d: %d bytes at %#x for %d", use, m.Size(), uint64(m.Addr()), size)
		}
		if use != gpu.Private && m.Size()%e.dev.Info().GranuleBytes != 0 {
			e.Errorf("use %d: %d bytes are no multiple of the granule", use, m.Size())
		}
		for _, o := range mems {
			if m.Addr() < o.Addr()+gpu.Addr(o.Size()) && o.Addr() < m.Addr()+gpu.Addr(m.Size()) {
				e.Error("two allocations overlap")
			}
		}
		mems = append(mems, m)
	}
	if s := e.dev.Stats(); s.Mems != 4 || s.MemBytes < 4000 {
		e.Errorf("stats with four allocations: %+v", s)
	}
	for _, m := range mems {
		e.free(m)
		e.want(m.Free(), gpu.ErrClosed, "second Free")
		_, err := m.Export()
		e.want(err, gpu.ErrClosed, "Export after Free")
	}
	for _, size := range []int64{0, -1} {
		_, err := e.dev.Alloc(size, gpu.Pool)
		e.want(err, gpu.ErrArgument, fmt.Sprintf("Alloc(%d)", size))
	}
}

func testOutOfMemory(e *env) {
	defer e.done()
	for _, use := range []gpu.Use{gpu.Private, gpu.Pool, gpu.Shared} {
		for _, size := range []int64{e.dev.Info().TotalBytes + 1, 1<<63 - 1} {
			_, err := e.dev.Alloc(size, use)
			e.want(err, gpu.ErrNoMemory, fmt.Sprintf("Alloc(%d)", size))
		}
	}
	// What is freed can be had again, many times over the size of the device.
	half := min(e.dev.Info().TotalBytes/2, 32<<20)
	rounds := min(50, 3*e.dev.Info().TotalBytes/half)
	for range rounds {
		e.free(e.alloc(half, gpu.Pool))
	}
}

func testRegister(e *env) {
	defer e.done()
	h := e.host(8192)
	if h.Size() != 8192 || e.dev.Stats().Registered != 1 {
		e.Errorf("%d bytes, stats %+v", h.Size(), e.dev.Stats())
	}
	if b := h.Bytes(); len(b) != 8192 || &b[0] != &h.b[0] {
		e.Error("Bytes is not what was registered")
	}
	_, err := h.Export()
	e.want(err, gpu.ErrUnsupported, "export of host memory")
	_, err = e.dev.Register(h.b)
	e.want(err, gpu.ErrArgument, "register twice")
	e.free(h)
	for name, b := range map[string][]byte{"nothing": nil, "half a page": h.b[:2048], "an odd start": h.b[16:4112]} {
		_, err := e.dev.Register(b)
		e.want(err, gpu.ErrArgument, "register "+name)
	}
	again, err := e.dev.Register(h.b)
	e.ok(err)
	e.free(again)
}

func testCopyEverySize(e *env) {
	defer e.done()
	s, r := e.stream(), rng(1, 2)
	a, b := e.alloc(1<<20, gpu.Pool), e.alloc(1<<20, gpu.Private)
	for _, n := range []int{1, 3, 15, 16, 17, 100, 4096, 65536, 65537, 1 << 20} {
		for _, off := range []int{0, 1, 16} {
			if off+n > 1<<20 {
				continue
			}
			want := random(r, n)
			e.put(s, a.Addr()+gpu.Addr(off), want)
			e.ok(s.Copy([]gpu.Copy{{Dst: b.Addr(), Src: a.Addr() + gpu.Addr(off), Bytes: int64(n)}}))
			if got := e.get(s, b.Addr(), n); !bytes.Equal(got, want) {
				e.Fatalf("%d bytes at offset %d arrived differently", n, off)
			}
		}
	}
	e.closeAll(s)
	e.free(a, b)
}

// Pages of every size, gathered in permuted order, next to bytes that must not change.
func testCopyBatches(e *env) {
	defer e.done()
	s, r := e.stream(), rng(3, 4)
	const count = 24
	for _, page := range []int{16, 48, 4096, 16384, 65536, 1 << 18} {
		pool, h := e.alloc(int64(2*count*page), gpu.Pool), e.host(2*count*page)
		e.ok(s.Fill(pool.Addr(), int64(2*count*page), 0x5a))
		copy(h.b, random(r, count*page))
		var in, out []gpu.Copy
		for i, p := range r.Perm(count) {
			at := pool.Addr() + gpu.Addr(2*p*page)
			in = append(in, gpu.Copy{Dst: at, Src: h.Addr() + gpu.Addr(i*page), Bytes: int64(page)})
			out = append(out, gpu.Copy{Dst: h.Addr() + gpu.Addr((count+i)*page), Src: at, Bytes: int64(page)})
		}
		e.ok(s.Copy(in))
		e.ok(s.Copy(out))
		e.sync(s)
		if !bytes.Equal(h.b[:count*page], h.b[count*page:2*count*page]) {
			e.Fatalf("pages of %d bytes came back differently", page)
		}
		all := e.get(s, pool.Addr(), 2*count*page)
		for i := range count {
			if gap := all[(2*i+1)*page:][:page]; bytes.Count(gap, []byte{0x5a}) != page {
				e.Fatalf("a copy of %d bytes wrote beside its page", page)
			}
		}
		e.free(pool, h)
	}
	e.ok(s.Copy(nil))
	e.want(s.Copy(make([]gpu.Copy, gpu.MaxBatch+1)), gpu.ErrArgument, "batch too long")
	e.closeAll(s)
}

func testFill(e *env) {
	defer e.done()
	s, m := e.stream(), e.alloc(4096, gpu.Private)
	want := bytes.Repeat([]byte{1}, 4096)
	e.ok(s.Fill(m.Addr(), 4096, 1))
	for i, f := range [][2]int{{7, 1}, {100, 100}, {3000, 1096}} {
		e.ok(s.Fill(m.Addr()+gpu.Addr(f[0]), int64(f[1]), byte(0xf0+i)))
		copy(want[f[0]:], bytes.Repeat([]byte{byte(0xf0 + i)}, f[1]))
	}
	if got := e.get(s, m.Addr(), 4096); !bytes.Equal(got, want) {
		e.Error("fill wrote something else")
	}
	e.closeAll(s)
	e.free(m)
}

func testFaults(e *env) {
	defer e.done()
	s, m, h := e.stream(), e.alloc(8192, gpu.Private), e.host(8192)
	end, freed := m.Addr()+gpu.Addr(m.Size()), e.alloc(4096, gpu.Pool)
	e.free(freed)
	e.put(s, m.Addr(), bytes.Repeat([]byte{7}, 4096))
	for name, c := range map[string]gpu.Copy{
		"zero address":        {Dst: m.Addr(), Src: 0, Bytes: 1},
		"before the start":    {Dst: m.Addr() - 1, Src: h.Addr(), Bytes: 2},
		"past the end":        {Dst: end - 1, Src: h.Addr(), Bytes: 2},
		"source past the end": {Dst: m.Addr() + 4096, Src: h.Addr() + 8191, Bytes: 2},
		"freed source":        {Dst: m.Addr(), Src: freed.Addr(), Bytes: 16},
		"freed destination":   {Dst: freed.Addr(), Src: h.Addr(), Bytes: 16},
		"wrap around":         {Dst: m.Addr(), Src: h.Addr(), Bytes: 1<<63 - 1},
	} {
		err := s.Copy([]gpu.Copy{{Dst: m.Addr(), Src: h.Addr(), Bytes: 16}, c})
		e.want(err, gpu.ErrFault, name)
		var fault *gpu.FaultError
		if errors.As(err, &fault) && fault.Op == "" {
			e.Errorf("%s: the fault names no operation", name)
		}
	}
	e.want(s.Fill(freed.Addr(), 16, 1), gpu.ErrFault, "fill of freed memory")
	e.want(s.Fill(m.Addr(), 0, 1), gpu.ErrArgument, "fill of nothing")
	e.want(s.Copy([]gpu.Copy{{Dst: m.Addr(), Src: h.Addr(), Bytes: 0}}), gpu.ErrArgument, "copy of nothing")
	e.want(s.Copy([]gpu.Copy{{Dst: m.Addr(), Src: m.Addr() + 8, Bytes: 16}}), gpu.ErrArgument, "copy onto itself")
	e.want(s.Signal(freed.Addr(), 1), gpu.ErrFault, "signal in freed memory")
	e.want(s.Signal(m.Addr()+4, 1), gpu.ErrAlign, "signal at 4")
	e.want(s.Await(m.Addr()+4, 1), gpu.ErrAlign, "await at 4")
	// A refused batch has queued nothing, and the stream works on.
	if got := e.get(s, m.Addr(), 16); !bytes.Equal(got, bytes.Repeat([]byte{7}, 16)) {
		e.Error("a refused batch copied its first entry")
	}
	e.closeAll(s)
	e.free(m, h)
}

func testCloseReportsLeaks(e *env) {
	m, s := e.alloc(4096, gpu.Pool), e.stream()
	err := e.dev.Close()
	e.want(err, gpu.ErrLeak, "Close with memory and a stream")
	e.want(m.Free(), gpu.ErrClosed, "Free after Close")
	e.want(s.Fill(m.Addr(), 1, 1), gpu.ErrClosed, "Fill after Close")
	e.ok(e.dev.Close())
}

func testClosed(e *env) {
	e.ok(e.dev.Close())
	_, err := e.dev.Alloc(4096, gpu.Private)
	e.want(err, gpu.ErrClosed, "Alloc")
	_, err = e.dev.Register(pages(e.T, 4096))
	e.want(err, gpu.ErrClosed, "Register")
	_, err = e.dev.NewStream()
	e.want(err, gpu.ErrClosed, "NewStream")
	if s := e.dev.Stats(); s != (gpu.Stats{}) {
		e.Errorf("stats of a closed device: %+v", s)
	}
}

package gputest

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"

	"github.com/kvtier/kvtier/gpu"
)

// testRandomWork runs random operations on three streams and several allocations, each ordered by fences wherever it
// touches what another stream touched, and compares the bytes with a model that runs them at once.
func testRandomWork(e *env) {
	defer e.done()
	n := e.Operations
	if n == 0 {
		n = 2000
	}
	seed := rand.Uint64()
	e.Logf("seed %d", seed)
	w := &randomWork{env: e, r: rng(seed, 1), h: e.host(regionBytes)}
	for range 3 {
		w.streams = append(w.streams, e.stream())
	}
	for range n {
		w.step()
	}
	for len(w.regions) > 0 {
		w.drop(0)
	}
	for _, s := range w.streams {
		e.sync(s)
	}
	e.closeAll(w.streams...)
	e.free(w.h)
}

const regionBytes = 8192

// region is an allocation, what it must hold, and the stream and fence of its last use.
type region struct {
	gpu.Mem
	model  []byte
	stream int
	fence  gpu.Fence
}

type randomWork struct {
	*env
	r       *rand.Rand
	h       host
	streams []gpu.Stream
	regions []*region
}

func (w *randomWork) step() {
	w.Helper()
	if len(w.regions) == 0 || w.r.IntN(20) == 0 && len(w.regions) < 12 {
		w.add()
		return
	}
	i, s := w.r.IntN(len(w.regions)), w.r.IntN(len(w.streams))
	a := w.regions[i]
	switch w.r.IntN(12) {
	case 0:
		w.drop(i)
	case 1:
		w.read(a, s)
	case 2, 3, 4:
		w.order(s, a)
		off := w.r.IntN(regionBytes)
		n, v := 1+w.r.IntN(regionBytes-off), byte(w.r.Uint32())
		w.ok(w.streams[s].Fill(a.Addr()+gpu.Addr(off), int64(n), v))
		copy(a.model[off:], bytes.Repeat([]byte{v}, n))
		w.used(s, a)
	case 5:
		w.order(s, a)
		v := w.r.Uint64()
		w.ok(w.streams[s].Signal(a.Addr()+64, v))
		binary.LittleEndian.PutUint64(a.model[64:], v)
		w.ok(w.streams[s].Await(a.Addr()+64, v))
		w.used(s, a)
	default:
		b := w.regions[w.r.IntN(len(w.regions))]
		if a != b {
			w.order(s, a)
			w.order(s, b)
			w.copy(s, a, b)
			w.used(s, a)
			w.used(s, b)
		}
	}
}

func (w *randomWork) add() {
	w.Helper()
	m := w.alloc(regionBytes, gpu.Use(w.r.IntN(3)))
	a := &region{Mem: m, model: make([]byte, regionBytes), stream: w.r.IntN(len(w.streams))}
	w.ok(w.streams[a.stream].Fill(m.Addr(), regionBytes, 0))
	w.used(a.stream, a)
	w.regions = append(w.regions, a)
}

// order makes stream s wait for the last use of a.
func (w *randomWork) order(s int, a *region) {
	w.Helper()
	if a.stream != s {
		w.ok(w.streams[s].Wait(a.fence))
	}
}

func (w *randomWork) used(s int, a *region) {
	w.Helper()
	f, err := w.streams[s].Record()
	w.ok(err)
	a.stream, a.fence = s, f
}

// copy moves random pieces of a over b, equal ones of 16 bytes often, as pages are.
func (w *randomWork) copy(s int, a, b *region) {
	w.Helper()
	var batch []gpu.Copy
	at := w.r.IntN(64) * 16
	for range 1 + w.r.IntN(8) {
		n := 16 * (1 + w.r.IntN(16))
		if w.r.IntN(4) == 0 {
			n = 1 + w.r.IntN(500)
		}
		from := w.r.IntN(regionBytes - n)
		if from%2 == 0 {
			from &^= 15
		}
		if at+n > regionBytes {
			break
		}
		batch = append(batch, gpu.Copy{Dst: b.Addr() + gpu.Addr(at), Src: a.Addr() + gpu.Addr(from), Bytes: int64(n)})
		copy(b.model[at:at+n], a.model[from:])
		at += n + w.r.IntN(3)*16
	}
	w.ok(w.streams[s].Copy(batch))
}

func (w *randomWork) read(a *region, s int) {
	w.Helper()
	w.order(s, a)
	w.ok(w.streams[s].Copy([]gpu.Copy{{Dst: w.h.Addr(), Src: a.Addr(), Bytes: regionBytes}}))
	w.sync(w.streams[s])
	if !bytes.Equal(w.h.b, a.model) {
		w.Fatal("device and model differ")
	}
	w.used(s, a)
}

func (w *randomWork) drop(i int) {
	w.Helper()
	a := w.regions[i]
	w.read(a, a.stream)
	w.free(a.Mem)
	w.regions = append(w.regions[:i], w.regions[i+1:]...)
}

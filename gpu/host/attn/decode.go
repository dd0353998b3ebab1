package attn

import (
	"encoding/binary"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// Decoder runs attention with one set of block functions on a number of goroutines.
type Decoder struct {
	ISA     ISA
	Workers int // at least 1
}

// Decode computes what a describes. q, pool and out are the memory at a.Q, a.Pool and a.Out: q and pool are borrowed,
// out is written. a must be valid, pool must reach as far as a.Spans says. It returns when out is complete; the workers
// it starts, at most d.Workers, end before that.
func (d Decoder) Decode(a *gpu.Attention, q, pool, out []byte) {
	units, first := d.units(a)
	parts := make([]*partial, len(units))
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(d.Workers, len(units)) {
		wg.Go(func() { // owner: this call; ends when no unit is left
			w := newWorker(d.ISA, a, q, pool)
			for {
				i := int(next.Add(1)) - 1
				if i >= len(units) {
					return
				}
				u := units[i]
				p := w.run(u.seq, u.from, u.to)
				if first[u.seq+1]-first[u.seq] == 1 {
					w.finish(u.seq, []*partial{p}, out)
				} else {
					parts[i] = p.clone()
				}
			}
		})
	}
	wg.Wait()
	var w *worker
	for b := range a.Batch() {
		if n := first[b+1] - first[b]; n > 1 {
			if w == nil {
				w = newWorker(d.ISA, a, q, pool)
			}
			w.finish(b, parts[first[b]:first[b+1]], out)
		}
	}
}

const (
	minPart = 256  // tokens: a shorter part is not worth its combination
	maxPart = 4096 // tokens: float32 sums over 32,768 tokens were found 3.2e-6 off, in parts of 4,096 1.2e-6
)

// unit is one part of a sequence.
type unit struct{ seq, from, to int }

// units cuts the sequences: as a.Splits says, or to keep all workers busy and the sums short. Those of sequence b are
// first[b] up to first[b+1].
func (d Decoder) units(a *gpu.Attention) (units []unit, first []int) {
	first = make([]int, a.Batch()+1)
	for b := range a.Batch() {
		start, end := a.Start(b), int(a.SeqLens[b])
		n := a.Splits
		if n == 0 {
			busy := (2*d.Workers + a.Batch() - 1) / a.Batch()
			if a.Batch() >= 2*d.Workers {
				busy = 1
			}
			n = min(max(busy, (end-start+maxPart-1)/maxPart), max(1, (end-start)/minPart), gpu.MaxSplits)
		}
		for i := range n {
			from, to := cut(start, end, i, n)
			units = append(units, unit{b, from, to})
		}
		first[b+1] = len(units)
	}
	return units, first
}

// cut is part i of n of the tokens from start to end, on block boundaries.
func cut(start, end, i, n int) (from, to int) {
	size := (end - start + n - 1) / n
	size = (size + blockTokens - 1) / blockTokens * blockTokens
	from = min(end, (start+i*size+blockTokens-1)/blockTokens*blockTokens)
	to = min(end, (start+(i+1)*size+blockTokens-1)/blockTokens*blockTokens)
	if i == 0 {
		from = start
	}
	if i == n-1 {
		to = end
	}
	return from, to
}

// partial is what one part of a sequence contributes: the states of all groups of query heads.
type partial struct {
	states []float32
}

func (p *partial) clone() *partial { return &partial{append([]float32(nil), p.states...)} }

// worker holds the buffers of one goroutine.
type worker struct {
	a           *gpu.Attention
	q, pool     []byte
	fn          func(*block)
	order       [chunk]int
	groups      int     // calls for the query heads of one KV head
	blocks      []block // one for each call of a token block
	query       []float32
	sum         partial
	shortK      []byte // rows of a block of fewer than 16 tokens, the missing ones zero
	shortV      []byte
	capIn, capX float32
}

func newWorker(isa ISA, a *gpu.Attention, q, pool []byte) *worker {
	w := &worker{a: a, q: q, pool: pool, fn: blockFunc(isa, a.Type), order: order(isa, a.Type)}
	w.groups = (a.QHeads/a.KVHeads + groupHeads - 1) / groupHeads
	calls := a.KVHeads * w.groups
	w.blocks = make([]block, calls)
	w.query = aligned(calls * groupHeads * a.HeadDim)
	w.sum.states = aligned(calls * stateFloats(a.ValueDim))
	if a.SoftCap != 0 {
		w.capX = a.SoftCap * math.Log2E
		w.capIn = 1 / w.capX
	}
	return w
}

// aligned returns n zeros that start on a cache line.
func aligned(n int) []float32 {
	b := make([]float32, n+16)
	skip := -uintptr(unsafe.Pointer(&b[0])) % 64 / 4
	return b[skip:][:n]
}

// run attends to tokens from..to of sequence b. The result is valid until the next run.
func (w *worker) run(b, from, to int) *partial {
	w.prepare(b)
	for p := w.place(b, from, to); p.n > 0; {
		next := w.place(b, p.token+p.n, to)
		w.tokens(p, next)
		p = next
	}
	return &w.sum
}

// place is a block of n tokens, and where its rows start from the address of page 0, for KV head 0.
type place struct {
	token, n int
	k, v     int64
}

// place returns the block at token t of sequence b, cut off at to; n is 0 at the end.
func (w *worker) place(b, t, to int) place {
	p := place{token: t, n: min(blockTokens-t%blockTokens, to-t)}
	if p.n > 0 {
		p.k, p.v = w.a.Row(w.a.Table[b*w.a.MaxPages+t/w.a.Tokens], t%w.a.Tokens, 0)
	}
	return p
}

// prepare lays out the query and empties the states.
func (w *worker) prepare(b int) {
	a := w.a
	clear(w.sum.states)
	clear(w.query)
	perKV := a.QHeads / a.KVHeads
	scale := a.ScaleOrDefault() * math.Log2E
	row := make([]float32, a.HeadDim)
	qSize, sSize := groupHeads*a.HeadDim, stateFloats(a.ValueDim)
	for i := range w.blocks {
		query, state := w.query[i*qSize:][:qSize], w.sum.states[i*sSize:][:sSize]
		for m := range 16 {
			state[stateM+m] = noScoreYet
		}
		kvHead, first := i/w.groups, i%w.groups*groupHeads
		for h := first; h < min(first+groupHeads, perKV); h++ {
			a.QType.LoadAll(row, w.q[(b*a.QHeads+kvHead*perKV+h)*a.HeadDim*a.QType.Size():])
			for c := 0; c < len(row); c += chunk {
				to := query[c*groupHeads+(h-first)*chunk:][:chunk]
				for d := range to {
					to[d] = scale * row[c+w.order[d]]
				}
			}
		}
		w.blocks[i] = block{q: unsafe.Pointer(&query[0]), stride: a.TokenStride, kChunks: int64(a.HeadDim / chunk),
			vChunks: int64(a.ValueDim / chunk), state: &state[0], capIn: w.capIn, cap: w.capX}
	}
}

// tokens adds block p to all heads. While one KV head is at work, the rows of the head after it are prefetched; for the
// last head those of the first head in the next block.
func (w *worker) tokens(p, next place) {
	base := unsafe.Pointer(unsafe.SliceData(w.pool))
	for i := range w.blocks {
		c := &w.blocks[i]
		head := i / w.groups
		offset := int64(head) * w.a.HeadStride
		c.k, c.v = unsafe.Add(base, p.k+offset), unsafe.Add(base, p.v+offset)
		switch {
		case i%w.groups > 0 || head+1 == w.a.KVHeads && next.n == 0: // nothing to prefetch, or done by the first group
			c.nextK, c.nextV = c.k, c.v
		case head+1 < w.a.KVHeads:
			c.nextK, c.nextV = unsafe.Add(c.k, w.a.HeadStride), unsafe.Add(c.v, w.a.HeadStride)
		default:
			c.nextK, c.nextV = unsafe.Add(base, next.k), unsafe.Add(base, next.v)
		}
		c.bias, c.stride = &biasFor[p.n], w.a.TokenStride
		if p.n < blockTokens {
			w.short(c, p.n)
		}
		w.fn(c)
	}
}

// short points c at a copy of its n rows with zero rows behind them: the block functions always read 16.
func (w *worker) short(c *block, n int) {
	a := w.a
	k, v := a.HeadDim*a.Type.Size(), a.ValueDim*a.Type.Size()
	if w.shortK == nil {
		w.shortK, w.shortV = make([]byte, blockTokens*k), make([]byte, blockTokens*k)
	}
	clear(w.shortK)
	clear(w.shortV)
	for i := range n {
		at := int64(i) * a.TokenStride
		copy(w.shortK[i*k:], unsafe.Slice((*byte)(unsafe.Add(c.k, at)), k))
		copy(w.shortV[i*k:], unsafe.Slice((*byte)(unsafe.Add(c.v, at)), v))
	}
	c.k, c.v, c.stride = unsafe.Pointer(&w.shortK[0]), unsafe.Pointer(&w.shortV[0]), int64(k)
	c.nextK, c.nextV = c.k, c.v
}

// finish combines the parts of sequence b and writes its output rows.
func (w *worker) finish(b int, parts []*partial, out []byte) {
	a := w.a
	perKV, sSize := a.QHeads/a.KVHeads, stateFloats(a.ValueDim)
	for head := range a.QHeads {
		i := head/perKV*w.groups + head%perKV/groupHeads
		h := head % perKV % groupHeads
		row := out[(b*a.QHeads+head)*a.ValueDim*4:][:a.ValueDim*4]
		w.writeRow(row, parts, i*sSize, h, a.SeqLens[b] == 0)
	}
}

// writeRow writes one query head whose states start at float at of each part.
func (w *worker) writeRow(row []byte, parts []*partial, at, h int, empty bool) {
	if empty {
		clear(row)
		return
	}
	m := float32(math.Inf(-1))
	for _, p := range parts {
		m = max(m, p.states[at+stateM+4*h])
	}
	var weights [gpu.MaxSplits]float32
	var sum float32
	for i, p := range parts {
		s := p.states[at:]
		weights[i] = exp2(s[stateM+4*h] - m)
		l := s[stateL+4*h:]
		sum += weights[i] * (l[0] + l[1] + (l[2] + l[3]))
	}
	var v [chunk]float32
	for c := 0; c < len(row)/4; c += chunk {
		clear(v[:])
		for i, p := range parts {
			acc := p.states[at+stateAcc+c*groupHeads+h*chunk:][:chunk]
			for d := range v {
				v[d] += weights[i] * acc[d]
			}
		}
		to := row[4*c:][:4*chunk]
		for d, from := range w.order {
			binary.LittleEndian.PutUint32(to[4*from:], math.Float32bits(v[d]/sum))
		}
	}
}

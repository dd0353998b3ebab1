package gputest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvtier/kvtier/gpu"
)

// decode is an attention whose pool, query and output lie in device memory.
type decode struct {
	gpu.Attention
	q, pool []byte // copies of what is on the device
	mem     gpu.Mem
}

// newDecode lays out random sequences in permuted pages; all other bytes of the pool are NaN.
func (e *env) newDecode(s gpu.Stream, r *rand.Rand, l gpu.Layout, qHeads int, qType gpu.DType, lens ...int32) *decode {
	e.Helper()
	d := &decode{Attention: gpu.Attention{Layout: l, QHeads: qHeads, QType: qType, SeqLens: lens}}
	for _, n := range lens {
		d.MaxPages = max(d.MaxPages, (int(n)+l.Tokens-1)/l.Tokens)
		d.Pages += (int(n) + l.Tokens - 1) / l.Tokens
	}
	d.Pages += 3
	perm := r.Perm(d.Pages)
	d.pool = bytes.Repeat([]byte{0xff}, int(l.PoolBytes(d.Pages)))
	for b, n := range lens {
		row := make([]int32, d.MaxPages)
		for i := range row {
			row[i] = -1 // never to be read
			if i < (int(n)+l.Tokens-1)/l.Tokens {
				row[i], perm = int32(perm[0]), perm[1:]
			}
		}
		d.Table = append(d.Table, row...)
		for t := range int(n) {
			for h := range l.KVHeads {
				k, v := l.Row(d.Table[b*d.MaxPages+t/l.Tokens], t%l.Tokens, h)
				fillRow(r, l.Type, d.pool[v:], l.ValueDim)
				fillRow(r, l.Type, d.pool[k:], l.HeadDim)
			}
		}
	}
	d.q = make([]byte, d.QBytes())
	fillRow(r, qType, d.q, len(d.q)/qType.Size())
	qBytes, out := int64(len(d.q)+255)&^255, (d.OutBytes()+255)&^255
	d.mem = e.alloc(qBytes+out+int64(len(d.pool)), gpu.Pool)
	d.Q = d.mem.Addr()
	d.Out = d.Q + gpu.Addr(qBytes)
	d.Pool = d.Out + gpu.Addr(out)
	e.put(s, d.Q, d.q)
	e.put(s, d.Pool, d.pool)
	e.ok(s.Fill(d.Out, out, 0xff))
	return d
}

func fillRow(r *rand.Rand, t gpu.DType, b []byte, n int) {
	for i := range n {
		t.Store(b[i*t.Size():], float32(r.NormFloat64()))
	}
}

// check launches d and compares its output with float64.
func (e *env) check(s gpu.Stream, d *decode, name string) {
	e.Helper()
	if err := s.Launch(&d.Attention); err != nil {
		e.Errorf("%s: %v", name, err)
		return
	}
	got := e.get(s, d.Out, int(d.OutBytes()))
	if rel := gpu.RelativeError(got, d.Reference(d.q, d.pool)); !(rel <= e.Tolerance) {
		e.Errorf("%s: relative error %.2g, want <= %.2g", name, rel, e.Tolerance)
	}
}

func testAttention(e *env) {
	defer e.done()
	if !slices.Contains(e.dev.Info().Kernels, gpu.AttentionKernel) {
		e.Fatal("no attention kernel")
	}
	s, r := e.stream(), rng(7, 8)
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP16, gpu.FP32} {
		for i, dim := range []int{64, 96, 128, 256} {
			l := []gpu.Layout{gpu.NHD(typ, 16, 2, dim), gpu.HND(typ, 64, 2, dim), gpu.Packed(typ, 48, 2, dim), gpu.NHD(typ, 256, 1, dim)}[i]
			group := []int{1, 4, 8, 6}[i]
			d := e.newDecode(s, r, l, group*l.KVHeads, []gpu.DType{typ, gpu.FP32}[i%2], 0, 1, 16, 17, 70)
			e.check(s, d, fmt.Sprint(typ, " d", dim, " group ", group))
			d.Window, d.SoftCap, d.Scale, d.Splits = 20, 3, 0.11, 3
			e.check(s, d, fmt.Sprint(typ, " d", dim, " window, cap, scale and splits"))
			e.free(d.mem)
		}
		d := e.newDecode(s, r, gpu.Latent(typ, 64, gpu.LatentRank, gpu.LatentRope), 16, typ, 33, 100)
		d.Scale = 0.07
		e.check(s, d, fmt.Sprint(typ, " latent"))
		d.Splits = 2
		e.check(s, d, fmt.Sprint(typ, " latent, split"))
		e.free(d.mem)
	}
	e.units(s, r)
	e.nonFinite(s, r)
	e.closeAll(s)
}

// units: a block table that counts 4 KiB, as one for slots of a shared pool does.
func (e *env) units(s gpu.Stream, r *rand.Rand) {
	e.Helper()
	const unit = 4096
	d := e.newDecode(s, r, gpu.NHD(gpu.BF16, 16, 2, 128), 8, gpu.BF16, 37, 100)
	perPage := int32(d.PageStride / unit)
	for i, p := range d.Table {
		if p >= 0 {
			d.Table[i] = p * perPage
		}
	}
	d.PageBytes, d.PageStride, d.Pages = d.PageStride, unit, d.Pages*int(perPage)
	e.check(s, d, "table in units")
	e.free(d.mem)
}

// nonFinite: a NaN or an infinity spoils what depends on it and nothing else.
func (e *env) nonFinite(s gpu.Stream, r *rand.Rand) {
	e.Helper()
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, inV := range []bool{false, true} {
			d := e.newDecode(s, r, gpu.NHD(gpu.BF16, 16, 2, 64), 4, gpu.FP32, 37, 20)
			at, val := d.Row(d.Table[1], 3, 1)
			if inV {
				at = val
			}
			d.Type.Store(d.pool[at:], float32(v))
			e.put(s, d.Pool, d.pool)
			e.ok(s.Launch(&d.Attention))
			got, want := e.get(s, d.Out, int(d.OutBytes())), d.Reference(d.q, d.pool)
			for i, w := range want {
				g, finite := float64(gpu.FP32.Load(got[4*i:])), !math.IsNaN(w) && !math.IsInf(w, 0)
				if finite != (!math.IsNaN(g) && !math.IsInf(g, 0)) || finite && math.Abs(g-w) > 1e-4 {
					e.Fatalf("%v, in V %v: element %d is %v, reference %v", v, inV, i, g, w)
				}
			}
			e.free(d.mem)
		}
	}
}

func testAttentionRefusals(e *env) {
	defer e.done()
	s := e.stream()
	d := e.newDecode(s, rng(9, 1), gpu.NHD(gpu.BF16, 16, 2, 64), 4, gpu.FP32, 40)
	for name, c := range map[string]struct {
		spoil func(a *gpu.Attention)
		want  error
	}{
		"block table":     {func(a *gpu.Attention) { a.Table = []int32{0, 1, int32(a.Pages)} }, gpu.ErrTable},
		"wrong stride":    {func(a *gpu.Attention) { a.TokenStride -= 16 }, gpu.ErrStride},
		"misaligned page": {func(a *gpu.Attention) { a.Pool += 8 }, gpu.ErrAlign},
		"long sequence":   {func(a *gpu.Attention) { a.SeqLens = []int32{1000} }, gpu.ErrSeqLen},
		"head dim":        {func(a *gpu.Attention) { a.HeadDim = 72 }, gpu.ErrShape},
		"pool elsewhere":  {func(a *gpu.Attention) { a.Pool = 1 << 20 }, gpu.ErrFault},
		"pool too small":  {func(a *gpu.Attention) { a.Pages = 1 << 20; a.Table = []int32{0, 1, 1<<20 - 1} }, gpu.ErrFault},
		"output missing":  {func(a *gpu.Attention) { a.Out = 0 }, gpu.ErrFault},
	} {
		a := d.Attention
		c.spoil(&a)
		e.want(s.Launch(&a), c.want, name)
	}
	e.check(s, d, "after the refusals")
	a := d.Attention
	a.SeqLens, a.Table = nil, nil
	e.ok(s.Launch(&a))
	e.sync(s)
	e.closeAll(s)
	e.free(d.mem)
}

func testPageSum(e *env) {
	defer e.done()
	if !slices.Contains(e.dev.Info().Kernels, gpu.PageSumKernel) {
		e.Fatal("no page_sum kernel")
	}
	s, r := e.stream(), rng(11, 12)
	for _, n := range []int64{16, 32, 64, 128, 144, 240, 256, 1024, 1040, 4096, 65520, 65536, 65552, 65536 + 240, 1 << 20, 31 << 16, 2<<20 + 16} {
		const count = 3
		m := e.alloc(count*n+64, gpu.Pool)
		want := random(r, int(count*n))
		e.put(s, m.Addr(), want)
		k := &gpu.PageSum{Bytes: n, Out: m.Addr() + gpu.Addr(count*n)}
		for i := range count {
			k.Pages = append(k.Pages, m.Addr()+gpu.Addr(int64(count-1-i)*n))
		}
		e.ok(s.Launch(k))
		got := e.get(s, k.Out, 8*count)
		for i := range count {
			page := want[int64(count-1-i)*n:][:n]
			if sum := binary.LittleEndian.Uint64(got[8*i:]); sum != e.Sum(page) {
				e.Errorf("page of %d bytes: %#x, want %#x", n, sum, e.Sum(page))
			}
		}
		e.free(m)
	}
	e.want(s.Launch(&gpu.PageSum{Pages: []gpu.Addr{64}, Bytes: 4096, Out: 64}), gpu.ErrFault, "page that is not there")
	e.want(s.Launch(&gpu.PageSum{Pages: []gpu.Addr{8}, Bytes: 4096}), gpu.ErrAlign, "page at 8")
	e.ok(s.Launch(&gpu.PageSum{Bytes: 16}))
	e.closeAll(s)
}

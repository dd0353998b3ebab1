package attn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// problem is an attention over Go memory. Bytes of the pool that no sequence uses are NaN.
type problem struct {
	gpu.Attention
	q, pool, out []byte
}

func newProblem(r *rand.Rand, l gpu.Layout, qHeads int, lens ...int32) *problem {
	longest := int32(0)
	total := 0
	for _, n := range lens {
		longest = max(longest, n)
		total += (int(n) + l.Tokens - 1) / l.Tokens
	}
	p := &problem{Attention: gpu.Attention{Layout: l, QHeads: qHeads, QType: gpu.FP32, Pages: total + 2, SeqLens: lens,
		MaxPages: (int(longest) + l.Tokens - 1) / l.Tokens}}
	p.Table = make([]int32, len(lens)*p.MaxPages)
	perm := r.Perm(p.Pages)
	p.pool = make([]byte, l.PoolBytes(p.Pages))
	for i := range p.pool {
		p.pool[i] = 0xff
	}
	for b, n := range lens {
		for i := range p.MaxPages {
			p.Table[b*p.MaxPages+i] = -7 // never to be read
		}
		for i := range (int(n) + l.Tokens - 1) / l.Tokens {
			p.Table[b*p.MaxPages+i] = int32(perm[0])
			perm = perm[1:]
		}
		for t := range int(n) {
			for h := range l.KVHeads {
				p.fillRow(r, b, t, h)
			}
		}
	}
	p.q = make([]byte, p.QBytes())
	for i := range len(p.q) / 4 {
		gpu.FP32.Store(p.q[4*i:], float32(r.NormFloat64()))
	}
	p.out = make([]byte, p.OutBytes())
	return p
}

func (p *problem) fillRow(r *rand.Rand, b, t, h int) {
	k, v := p.rowOf(b, t, h)
	for d := range p.HeadDim {
		p.Type.Store(k[d*p.Type.Size():], float32(r.NormFloat64()))
	}
	if p.ValueDim == p.HeadDim {
		for d := range p.ValueDim {
			p.Type.Store(v[d*p.Type.Size():], float32(r.NormFloat64()))
		}
	}
}

func (p *problem) rowOf(b, t, h int) (k, v []byte) {
	ko, vo := p.Row(p.Table[b*p.MaxPages+t/p.Tokens], t%p.Tokens, h)
	return p.pool[ko:], p.pool[vo:]
}

// run decodes into an output of NaNs, so that an element left out shows.
func (p *problem) run(isa ISA, workers int) {
	for i := range p.out {
		p.out[i] = 0xff
	}
	Decoder{ISA: isa, Workers: workers}.Decode(&p.Attention, p.q, p.pool, p.out)
}

const tolerance = 3e-6

func (p *problem) check(t *testing.T, name string, want []float64) {
	t.Helper()
	if err := p.Validate(); err != nil {
		t.Fatal(name, err)
	}
	for _, isa := range Supported() {
		p.run(isa, 2)
		if got := gpu.RelativeError(p.out, want); !(got <= tolerance) {
			t.Errorf("%s %s: relative error %.2g, want <= %.2g", name, isa, got, tolerance)
		}
	}
}

// The argument of the block functions is read by assembly.
func TestBlockOffsetsAgreeWithAssembly(t *testing.T) {
	var b block
	for name, o := range map[string][2]uintptr{
		"q": {unsafe.Offsetof(b.q), 0}, "k": {unsafe.Offsetof(b.k), 8}, "v": {unsafe.Offsetof(b.v), 16},
		"nextK": {unsafe.Offsetof(b.nextK), 24}, "nextV": {unsafe.Offsetof(b.nextV), 32}, "stride": {unsafe.Offsetof(b.stride), 40},
		"kChunks": {unsafe.Offsetof(b.kChunks), 48}, "vChunks": {unsafe.Offsetof(b.vChunks), 56}, "state": {unsafe.Offsetof(b.state), 64},
		"bias": {unsafe.Offsetof(b.bias), 72}, "capIn": {unsafe.Offsetof(b.capIn), 80}, "cap": {unsafe.Offsetof(b.cap), 84},
	} {
		if o[0] != o[1] {
			t.Errorf("%s at %d, assembly reads %d", name, o[0], o[1])
		}
	}
}

func TestEveryTypeDimensionAndLayout(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP16, gpu.FP32} {
		for _, dim := range []int{64, 96, 128, 256} {
			for name, l := range map[string]gpu.Layout{
				"nhd": gpu.NHD(typ, 16, 2, dim), "hnd": gpu.HND(typ, 64, 2, dim), "packed": gpu.Packed(typ, 48, 2, dim),
			} {
				p := newProblem(r, l, 8, 0, 1, 15, 16, 17, 100)
				p.check(t, fmt.Sprint(typ, dim, name), p.Reference(p.q, p.pool))
			}
		}
		p := newProblem(r, gpu.Latent(typ, 64, 512, 64), 16, 130, 7)
		p.Scale = 1.0 / 13.9
		p.check(t, fmt.Sprint(typ, "latent"), p.Reference(p.q, p.pool))
	}
}

func TestEveryGroupSize(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, g := range []int{1, 2, 3, 4, 5, 7, 8, 16} {
		p := newProblem(r, gpu.NHD(gpu.BF16, 32, 2, 64), 2*g, 77)
		p.check(t, fmt.Sprint("group ", g), p.Reference(p.q, p.pool))
	}
}

func TestWindowCapScaleAndQueryType(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP32} {
		p := newProblem(r, gpu.NHD(typ, 16, 2, 128), 8, 200, 33, 1)
		for _, window := range []int{0, 1, 15, 16, 17, 100, 1000} {
			for _, soft := range []float32{0, 0.3, 5, 50} {
				p.Window, p.SoftCap, p.Scale = window, soft, 0.2
				p.check(t, fmt.Sprint(typ, " window ", window, " cap ", soft), p.Reference(p.q, p.pool))
			}
		}
	}
	p := newProblem(r, gpu.NHD(gpu.BF16, 16, 2, 128), 8, 50)
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP16} {
		p.QType = typ
		p.q = make([]byte, p.QBytes())
		for i := range len(p.q) / 2 {
			typ.Store(p.q[2*i:], float32(r.NormFloat64()))
		}
		p.check(t, fmt.Sprint("query ", typ), p.Reference(p.q, p.pool))
	}
}

func TestSplitsAndLongSequences(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP16, gpu.FP32} {
		p := newProblem(r, gpu.NHD(typ, 64, 1, 128), 4, 4096, 1000, 3)
		want := p.Reference(p.q, p.pool)
		for _, splits := range []int{0, 1, 2, 7, 256} {
			p.Splits = splits
			p.check(t, fmt.Sprint(typ, " splits ", splits), want)
		}
	}
}

// Blocks before the last window would stay -Inf apart from their NaN: an entry that is not used must not be read.
func TestPagesBeforeTheWindowAreNotRead(t *testing.T) {
	p := newProblem(rand.New(rand.NewPCG(9, 9)), gpu.NHD(gpu.FP32, 16, 1, 64), 4, 100)
	p.Window = 20
	for i := range 5 {
		p.Table[i] = -7
	}
	p.check(t, "window", p.Reference(p.q, p.pool))
}

func TestNonFiniteElementsStayWhereTheyBelong(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP16, gpu.FP32} {
		for _, v := range []float32{nan, inf, -inf} {
			for _, inV := range []bool{false, true} {
				for _, token := range []int{0, 20, 36} {
					p := newProblem(rand.New(rand.NewPCG(10, 11)), gpu.NHD(typ, 16, 2, 64), 8, 37, 37)
					k, val := p.rowOf(0, token, 1)
					row := k
					if inV {
						row = val
					}
					typ.Store(row[5*typ.Size():], v)
					p.checkNonFinite(t, fmt.Sprint(typ, " ", v, " in V ", inV, " token ", token))
				}
			}
		}
	}
}

// checkNonFinite compares element by element: not finite where the reference is not, close to it elsewhere.
func (p *problem) checkNonFinite(t *testing.T, name string) {
	t.Helper()
	want := p.Reference(p.q, p.pool)
	bad := 0
	for _, isa := range Supported() {
		p.run(isa, 1)
		for i, w := range want {
			g := float64(gpu.FP32.Load(p.out[4*i:]))
			finite := !math.IsNaN(w) && !math.IsInf(w, 0)
			if finite != (!math.IsNaN(g) && !math.IsInf(g, 0)) || finite && math.Abs(g-w) > 1e-5 {
				t.Fatalf("%s %s: element %d is %v, reference %v", name, isa, i, g, w)
			}
			if !finite {
				bad++
			}
		}
	}
	if bad == 0 && !containsInf(p) {
		t.Fatalf("%s: nothing was affected, so nothing was tested", name)
	}
}

// containsInf: an infinite key may only push its score to minus infinity, which hides the token.
func containsInf(p *problem) bool {
	for i := 0; i+p.Type.Size() <= len(p.pool); i += p.Type.Size() {
		if math.IsInf(float64(p.Type.Load(p.pool[i:])), 0) {
			return true
		}
	}
	return false
}

// A sequence whose scores so far were all -Inf must recover with the first finite one, and be NaN if there is none.
func TestScoresOfMinusInfinity(t *testing.T) {
	for _, n := range []int32{32, 40} {
		p := newProblem(rand.New(rand.NewPCG(12, 13)), gpu.NHD(gpu.FP32, 16, 1, 64), 4, n)
		for i := range len(p.q) / 4 {
			gpu.FP32.Store(p.q[4*i:], 1)
		}
		for token := range 32 {
			k, _ := p.rowOf(0, token, 0)
			gpu.FP32.Store(k, float32(math.Inf(-1)))
		}
		p.checkNonFinite(t, fmt.Sprint("-Inf for 32 of ", n))
	}
}

func TestNoSequencesIsNothing(t *testing.T) {
	p := newProblem(rand.New(rand.NewPCG(1, 1)), gpu.NHD(gpu.FP32, 16, 1, 64), 4)
	for _, isa := range Supported() {
		p.run(isa, 4)
	}
}

func TestReadsSeeEveryByte(t *testing.T) {
	b := make([]byte, 4096)
	for _, isa := range Supported() {
		for i := range b {
			b[i] = 0x80
			if got := readAll(isa, b); got != 0x80<<(8*(i%8)) {
				t.Fatalf("%s: byte %d: or is %#x", isa, i, got)
			}
			b[i] = 0
		}
	}
}

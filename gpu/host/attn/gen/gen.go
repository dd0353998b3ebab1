//go:build ignore

// Command gen writes the assembly of gpu/host/attn. It is a module of its own, so that avo stays out of kvtier's:
//
//	go run gen.go avx512.go avx2.go -out ../block_amd64.s -stubs ../block_amd64.go -pkg attn
//
// One block function exists per instruction set and element type. It takes 4 query heads over 16 tokens of one KV head:
// scores, online softmax, weighted values. The argument and the state behind it are described in ../block.go; offsets
// here and there must agree, which ../block_test.go checks.
//
// The shape is decided by memory, not by arithmetic: the caller walks 16-token blocks in the outer loop and heads in the
// inner one, and while a block is worked on the same rows of the next block are prefetched into the second-level cache.
// bf16 rows are split into even and odd elements by a shift and a mask, which costs no shuffle; the caller stores the
// query, and reads the result, in that order.
package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets in the block argument.
const (
	offQ, offK, offV, offNextK, offNextV = 0, 8, 16, 24, 32
	offStride, offKChunks, offVChunks    = 40, 48, 56
	offState, offBias, offCapIn, offCap  = 64, 72, 80, 84
)

// Offsets in the state.
const (
	stM, stL, stCorr, stP, stAcc = 0, 64, 128, 192, 448
)

const (
	chunk = 32 // elements of a row taken per step
	heads = 4
)

var types = []string{"BF16", "FP16", "FP32"}

func main() {
	ConstraintExpr("amd64")
	for _, t := range types {
		block512(t)
		block256(t)
	}
	read512()
	read256()
	Generate()
}

func elemBytes(t string) int {
	if t == "FP32" {
		return 4
	}
	return 2
}

var consts = map[uint32]Mem{}

// constant is a float in memory, broadcast where it is used. avo prints F32(1) as an integer, hence the bits.
func constant(v float64) Mem { return constantBits(math.Float32bits(float32(v))) }

func constantBits(bits uint32) Mem {
	m, ok := consts[bits]
	if !ok {
		m = GLOBL(fmt.Sprintf("c%08x", bits), RODATA|NOPTR)
		DATA(0, U32(bits))
		consts[bits] = m
	}
	return m
}

// exp2Poly approximates 2^x on [-1/2, 1/2]: interpolation at the seven Chebyshev nodes, relative error 2e-9.
var exp2Poly = chebyshev(6)

func chebyshev(deg int) []float64 {
	n := deg + 1
	x, dd := make([]float64, n), make([]float64, n)
	for i := range x {
		x[i] = 0.5 * math.Cos(math.Pi*(float64(i)+0.5)/float64(n))
		dd[i] = math.Exp2(x[i])
	}
	for k := 1; k < n; k++ {
		for i := n - 1; i >= k; i-- {
			dd[i] = (dd[i] - dd[i-1]) / (x[i] - x[i-k])
		}
	}
	c := make([]float64, n) // Newton form to powers
	for i := n - 1; i >= 0; i-- {
		for j := n - 1; j > 0; j-- {
			c[j] = c[j-1] - x[i]*c[j]
		}
		c[0] = dd[i] - x[i]*c[0]
	}
	return c
}

// tanhPoly is Cephes' tanhf for |x| < 0.625: x + x^3 P(x^2).
var tanhPoly = []float64{-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3}

const (
	tanhSmall = 0.625
	log2e     = 1.4426950408889634
	floor512  = -200 // 2^-200 is 0 in float32, and -200 - round(-200) is a number where -Inf - -Inf is not
	floor256  = -125
)

// rows walks 4 rows at a time: cur is the first of them, next the row to prefetch for it.
type rows struct {
	cur, next, stride, stride3 reg.GPVirtual
}

// loadRows loads the pointers at off and offNext and the stride of the argument at arg.
func loadRows(arg reg.Register, off, offNext int) rows {
	r := rows{GP64(), GP64(), GP64(), GP64()}
	MOVQ(Mem{Base: arg, Disp: off}, r.cur)
	MOVQ(Mem{Base: arg, Disp: offNext}, r.next)
	MOVQ(Mem{Base: arg, Disp: offStride}, r.stride)
	LEAQ(Mem{Base: r.stride, Index: r.stride, Scale: 2}, r.stride3)
	return r
}

// at is the address of byte off in row t of the four from base.
func (r rows) at(base reg.Register, t, off int) Mem {
	m := Mem{Base: base, Disp: off}
	switch t {
	case 1:
		m.Index, m.Scale = r.stride, 1
	case 2:
		m.Index, m.Scale = r.stride, 2
	case 3:
		m.Index, m.Scale = r.stride3, 1
	}
	return m
}

// forward moves both pointers on by 4 rows.
func (r rows) forward(cur, next reg.GPVirtual) {
	LEAQ(Mem{Base: cur, Index: r.stride, Scale: 4}, cur)
	LEAQ(Mem{Base: next, Index: r.stride, Scale: 4}, next)
}

// prefetch asks for bytes of row t of the four from next.
func (r rows) prefetch(next reg.Register, t, bytes int) {
	for b := 0; b < bytes; b += 64 {
		PREFETCHT1(r.at(next, t, b))
	}
}

// loop runs body with a counter from the argument or a constant down to zero.
func loop(label string, count Op, body func()) {
	n := GP64()
	MOVQ(count, n)
	Label(label)
	body()
	DECQ(n)
	JNZ(LabelRef(label))
}

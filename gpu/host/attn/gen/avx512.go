//go:build ignore

package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// block512 emits the AVX-512 block function for one element type.
func block512(t string) {
	TEXT("block"+t+"AVX512", NOSPLIT, "func(a *byte)")
	Doc("block" + t + "AVX512 adds 16 tokens of one KV head to the state of 4 query heads.")
	Pragma("noescape")
	arg, st := GP64(), GP64()
	Load(Param("a"), arg)
	MOVQ(Mem{Base: arg, Disp: offState}, st)
	scores512(t, arg, st)
	softmax512(arg, st)
	values512(t, arg, st)
	VZEROUPPER()
	RET()
}

// halves512 loads 32 elements as two vectors: even and odd elements for bf16, else the first and the second 16.
func halves512(t string, m Mem, mask reg.VecVirtual) (lo, hi reg.VecVirtual) {
	lo, hi = ZMM(), ZMM()
	switch t {
	case "BF16":
		VMOVDQU32(m, hi)
		VPSLLD(Imm(16), hi, lo)
		VPANDD(mask, hi, hi)
	case "FP16":
		VCVTPH2PS(m, lo)
		VCVTPH2PS(m.Offset(32), hi)
	default:
		VMOVUPS(m, lo)
		VMOVUPS(m.Offset(64), hi)
	}
	return lo, hi
}

func oddMask512(t string) reg.VecVirtual {
	if t != "BF16" {
		return nil
	}
	mask, x := ZMM(), GP32()
	MOVL(U32(0xffff0000), x)
	VPBROADCASTD(x, mask)
	return mask
}

// scores512 stores q.k of 4 heads and 16 tokens as 4 vectors: lane 4h+i of vector r is head h, token 4r+i.
func scores512(t string, arg, st reg.GPVirtual) {
	r := loadRows(arg, offK, offNextK)
	mask := oddMask512(t)
	p := GP64()
	LEAQ(Mem{Base: st, Disp: stP}, p)
	bytes := chunk * elemBytes(t)
	loop("tokens", U32(4), func() {
		acc := [heads][4]reg.VecVirtual{}
		for h := range acc {
			for i := range acc[h] {
				acc[h][i] = ZMM()
				VPXORD(acc[h][i], acc[h][i], acc[h][i])
			}
		}
		q, cur, next := GP64(), GP64(), GP64()
		MOVQ(Mem{Base: arg, Disp: offQ}, q)
		MOVQ(r.cur, cur)
		MOVQ(r.next, next)
		loop("dims", Mem{Base: arg, Disp: offKChunks}, func() {
			var half [2][4]reg.VecVirtual
			for i := range 4 {
				half[0][i], half[1][i] = halves512(t, r.at(cur, i, 0), mask)
				r.prefetch(next, i, bytes)
			}
			for s := range half {
				for h := range heads {
					w := ZMM()
					VMOVUPS(Mem{Base: q, Disp: h*chunk*4 + s*64}, w)
					for i := range 4 {
						VFMADD231PS(w, half[s][i], acc[h][i])
					}
				}
			}
			ADDQ(Imm(uint64(bytes)), cur)
			ADDQ(Imm(uint64(bytes)), next)
			ADDQ(U32(heads*chunk*4), q)
		})
		VMOVUPS(reduce512(acc), Mem{Base: p})
		ADDQ(Imm(64), p)
		r.forward(r.cur, r.next)
	})
}

// reduce512 sums each of 16 vectors; the sum of acc[h][i] lands in lane 4h+i.
func reduce512(acc [heads][4]reg.VecVirtual) reg.VecVirtual {
	var s [heads]reg.VecVirtual
	for h, a := range acc {
		x, y := pairs512(a[0], a[1]), pairs512(a[2], a[3])
		lo, hi := ZMM(), ZMM()
		VUNPCKLPD(y, x, lo)
		VUNPCKHPD(y, x, hi)
		VADDPS(hi, lo, lo)
		s[h] = lo
	}
	return lanes512(lanes512(s[0], s[1], 0x44, 0xee), lanes512(s[2], s[3], 0x44, 0xee), 0x88, 0xdd)
}

func pairs512(a, b reg.VecVirtual) reg.VecVirtual {
	lo, hi := ZMM(), ZMM()
	VUNPCKLPS(b, a, lo)
	VUNPCKHPS(b, a, hi)
	VADDPS(hi, lo, lo)
	return lo
}

// lanes512 adds two choices of two 128-bit lanes from a and two from b.
func lanes512(a, b reg.VecVirtual, first, second uint8) reg.VecVirtual {
	x, y := ZMM(), ZMM()
	VSHUFF32X4(Imm(uint64(first)), b, a, x)
	VSHUFF32X4(Imm(uint64(second)), b, a, y)
	VADDPS(y, x, x)
	return x
}

// softmax512 turns scores into weights and brings m, l and the correction of earlier sums up to date. All four lanes of a
// head hold its maximum; each keeps a sum of its own, which the caller adds at the end.
func softmax512(arg, st reg.GPVirtual) {
	bias := GP64()
	MOVQ(Mem{Base: arg, Disp: offBias}, bias)
	var s [4]reg.VecVirtual
	for r := range s {
		s[r] = ZMM()
		VMOVUPS(Mem{Base: st, Disp: stP + 64*r}, s[r])
	}
	cap512(arg, s)
	for r := range s {
		VADDPS(Mem{Base: bias, Disp: 64 * r}, s[r], s[r])
	}
	old, m := ZMM(), ZMM()
	VMOVUPS(Mem{Base: st, Disp: stM}, old)
	VMOVAPS(old, m)
	for r := range s {
		VMAXPS(m, s[r], m)
	}
	for _, swap := range []uint64{0xb1, 0x4e} { // neighbours, then pairs
		x := ZMM()
		VPERMILPS(Imm(swap), m, x)
		VMAXPS(x, m, m)
	}
	VMOVUPS(m, Mem{Base: st, Disp: stM})
	VSUBPS(m, old, old)
	corr := exp512(old)
	VMOVUPS(corr, Mem{Base: st, Disp: stCorr})
	l := ZMM()
	VMULPS(Mem{Base: st, Disp: stL}, corr, l)
	for r := range s {
		VSUBPS(m, s[r], s[r])
		p := exp512(s[r])
		VMOVUPS(p, Mem{Base: st, Disp: stP + 64*r})
		VADDPS(p, l, l)
	}
	VMOVUPS(l, Mem{Base: st, Disp: stL})
}

// exp512 is 2^x for x <= 0. A NaN stays one: as the first operand here, the last in Intel's order, it wins the maximum.
func exp512(x reg.VecVirtual) reg.VecVirtual {
	n, f, p := ZMM(), ZMM(), ZMM()
	VBROADCASTSS(constant(floor512), n)
	VMAXPS(x, n, x)
	VRNDSCALEPS(Imm(8), x, n)
	VSUBPS(n, x, f)
	VBROADCASTSS(constant(exp2Poly[len(exp2Poly)-1]), p)
	for i := len(exp2Poly) - 2; i >= 0; i-- {
		c := ZMM()
		VBROADCASTSS(constant(exp2Poly[i]), c)
		VFMADD213PS(c, f, p)
	}
	VSCALEFPS(n, p, p)
	return p
}

// cap512 applies the soft cap where there is one: cap * tanh(s / cap), both in units of log2.
func cap512(arg reg.GPVirtual, s [4]reg.VecVirtual) {
	c := GP32()
	MOVL(Mem{Base: arg, Disp: offCap}, c)
	TESTL(c, c)
	JZ(LabelRef("nocap"))
	for _, x := range s {
		VMULPS_BCST(Mem{Base: arg, Disp: offCapIn}, x, x)
		tanh512(x)
		VMULPS_BCST(Mem{Base: arg, Disp: offCap}, x, x)
	}
	Label("nocap")
}

func tanh512(x reg.VecVirtual) {
	sign, ax, g := ZMM(), ZMM(), GP32()
	MOVL(U32(0x80000000), g)
	VPBROADCASTD(g, sign)
	VPANDND(x, sign, ax)
	// Away from zero: (1-e)/(1+e) with e = 2^(-2 log2e |x|).
	e, one, num := ZMM(), ZMM(), ZMM()
	VBROADCASTSS(constant(-2*log2e), e)
	VMULPS(e, ax, e)
	e = exp512(e)
	VBROADCASTSS(constant(1), one)
	VSUBPS(e, one, num)
	VADDPS(e, one, e)
	VDIVPS(e, num, num)
	VPANDD(sign, x, sign)
	VPORD(sign, num, num)
	// Near zero the difference would lose its digits.
	z, p := ZMM(), ZMM()
	VMULPS(x, x, z)
	VBROADCASTSS(constant(tanhPoly[len(tanhPoly)-1]), p)
	for i := len(tanhPoly) - 2; i >= 0; i-- {
		c := ZMM()
		VBROADCASTSS(constant(tanhPoly[i]), c)
		VFMADD213PS(c, z, p)
	}
	VMULPS(z, p, p)
	VFMADD213PS(x, x, p)
	small, limit := K(), ZMM()
	VBROADCASTSS(constant(tanhSmall), limit)
	VCMPPS(Imm(1), limit, ax, small)
	VMOVAPS(num, x)
	VMOVAPS(p, small, x)
}

// values512 adds the weighted V rows to acc, 64 columns at a time and the last 32 alone.
func values512(t string, arg, st reg.GPVirtual) {
	r := loadRows(arg, offV, offNextV)
	mask := oddMask512(t)
	acc, chunks := GP64(), GP64()
	LEAQ(Mem{Base: st, Disp: stAcc}, acc)
	MOVQ(Mem{Base: arg, Disp: offVChunks}, chunks)
	Label("columns")
	CMPQ(chunks, Imm(1))
	JL(LabelRef("done"))
	JE(LabelRef("last"))
	piece512(t, "wide", 2, r, acc, st, mask)
	SUBQ(Imm(2), chunks)
	JMP(LabelRef("columns"))
	Label("last")
	piece512(t, "narrow", 1, r, acc, st, mask)
	Label("done")
}

func piece512(t, label string, width int, r rows, acc, st reg.GPVirtual, mask reg.VecVirtual) {
	bytes := chunk * elemBytes(t)
	sum := make([][2][heads]reg.VecVirtual, width)
	each := func(f func(sum *reg.VecVirtual, h int, m Mem)) {
		for c := range sum {
			for s := range sum[c] {
				for h := range sum[c][s] {
					f(&sum[c][s][h], h, Mem{Base: acc, Disp: (c*heads+h)*chunk*4 + s*64})
				}
			}
		}
	}
	var corr [heads]reg.VecVirtual
	for h := range corr {
		corr[h] = ZMM()
		VBROADCASTSS(Mem{Base: st, Disp: stCorr + 16*h}, corr[h])
	}
	each(func(sum *reg.VecVirtual, h int, m Mem) {
		*sum = ZMM()
		VMULPS(m, corr[h], *sum)
	})
	cur, next, p := GP64(), GP64(), GP64()
	MOVQ(r.cur, cur)
	MOVQ(r.next, next)
	LEAQ(Mem{Base: st, Disp: stP}, p)
	loop(label, U32(4), func() {
		for i := range 4 {
			var w [heads]reg.VecVirtual
			for h := range w {
				w[h] = ZMM()
				VBROADCASTSS(Mem{Base: p, Disp: 16*h + 4*i}, w[h])
			}
			for c := range width {
				lo, hi := halves512(t, r.at(cur, i, c*bytes), mask)
				for h := range w {
					VFMADD231PS(w[h], lo, sum[c][0][h])
					VFMADD231PS(w[h], hi, sum[c][1][h])
				}
			}
			r.prefetch(next, i, width*bytes)
		}
		r.forward(cur, next)
		ADDQ(Imm(64), p)
	})
	each(func(sum *reg.VecVirtual, _ int, m Mem) { VMOVUPS(*sum, m) })
	ADDQ(U32(uint64(width*heads*chunk*4)), acc)
	ADDQ(U32(uint64(width*bytes)), r.cur)
	ADDQ(U32(uint64(width*bytes)), r.next)
}

// read512 emits the sequential read that bandwidth is measured with.
func read512() {
	TEXT("readAVX512", NOSPLIT, "func(p *byte, n int) uint64")
	Doc("readAVX512 reads n bytes, a multiple of 512, and returns the or of all of them.")
	Pragma("noescape")
	p, n := GP64(), GP64()
	Load(Param("p"), p)
	Load(Param("n"), n)
	acc := make([]reg.VecVirtual, 8)
	for i := range acc {
		acc[i] = ZMM()
		VPXORD(acc[i], acc[i], acc[i])
	}
	Label("next")
	CMPQ(n, U32(512))
	JL(LabelRef("done"))
	for i := range acc {
		VPORD(Mem{Base: p, Disp: 64 * i}, acc[i], acc[i])
	}
	ADDQ(U32(512), p)
	SUBQ(U32(512), n)
	JMP(LabelRef("next"))
	Label("done")
	for i := 1; i < len(acc); i++ {
		VPORD(acc[i], acc[0], acc[0])
	}
	y, z := YMM(), YMM()
	VEXTRACTI64X4(Imm(0), acc[0], y) // VPOR and VEXTRACTI128 reach registers 0 to 15 only
	VEXTRACTI64X4(Imm(1), acc[0], z)
	VPOR(z, y, y)
	foldOr(y)
}

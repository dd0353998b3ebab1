//go:build ignore

package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// block256 emits the AVX2 block function for one element type. The state has the same form as that of the AVX-512
// function; only the order of elements in a bf16 chunk differs (even and odd within 16, not within 32).
func block256(t string) {
	TEXT("block"+t+"AVX2", NOSPLIT, "func(a *byte)")
	Doc("block" + t + "AVX2 adds 16 tokens of one KV head to the state of 4 query heads.")
	Pragma("noescape")
	arg, st := GP64(), GP64()
	Load(Param("a"), arg)
	MOVQ(Mem{Base: arg, Disp: offState}, st)
	scores256(t, arg, st)
	softmax256(arg, st)
	values256(t, arg, st)
	VZEROUPPER()
	RET()
}

// halves256 loads 16 elements as two vectors of 8.
func halves256(t string, m Mem, mask reg.VecVirtual) (lo, hi reg.VecVirtual) {
	lo, hi = YMM(), YMM()
	switch t {
	case "BF16":
		VMOVDQU(m, hi)
		VPSLLD(Imm(16), hi, lo)
		VPAND(mask, hi, hi)
	case "FP16":
		VCVTPH2PS(m, lo)
		VCVTPH2PS(m.Offset(16), hi)
	default:
		VMOVUPS(m, lo)
		VMOVUPS(m.Offset(32), hi)
	}
	return lo, hi
}

func oddMask256(t string) reg.VecVirtual {
	if t != "BF16" {
		return nil
	}
	mask := YMM()
	VPBROADCASTD(constantBits(0xffff0000), mask)
	return mask
}

// scores256 takes two tokens at a time; the sums land where those of scores512 do.
func scores256(t string, arg, st reg.GPVirtual) {
	r := loadRows(arg, offK, offNextK)
	mask := oddMask256(t)
	p := GP64()
	LEAQ(Mem{Base: st, Disp: stP}, p)
	bytes := chunk * elemBytes(t)
	loop("tokens", U32(4), func() {
		for pair := range 2 {
			acc := [heads][2]reg.VecVirtual{}
			for h := range acc {
				for i := range acc[h] {
					acc[h][i] = YMM()
					VXORPS(acc[h][i], acc[h][i], acc[h][i])
				}
			}
			q, cur, next := GP64(), GP64(), GP64()
			MOVQ(Mem{Base: arg, Disp: offQ}, q)
			MOVQ(r.cur, cur)
			MOVQ(r.next, next)
			loop([]string{"dims", "dims2"}[pair], Mem{Base: arg, Disp: offKChunks}, func() {
				for part := range 2 {
					var half [2][2]reg.VecVirtual
					for i := range 2 {
						half[0][i], half[1][i] = halves256(t, r.at(cur, 2*pair+i, part*bytes/2), mask)
					}
					for s := range half {
						for h := range heads {
							w := YMM()
							VMOVUPS(Mem{Base: q, Disp: h*chunk*4 + part*64 + s*32}, w)
							for i := range 2 {
								VFMADD231PS(w, half[s][i], acc[h][i])
							}
						}
					}
				}
				for i := range 2 {
					r.prefetch(next, 2*pair+i, bytes)
				}
				ADDQ(Imm(uint64(bytes)), cur)
				ADDQ(Imm(uint64(bytes)), next)
				ADDQ(U32(heads*chunk*4), q)
			})
			sum := reduce256(acc)
			high := XMM()
			VEXTRACTF128(Imm(1), sum, high)
			for i, x := range []reg.Register{sum.AsX(), high} {
				VMOVLPS(x, Mem{Base: p, Disp: 32*i + 8*pair})
				VMOVHPS(x, Mem{Base: p, Disp: 32*i + 16 + 8*pair})
			}
		}
		ADDQ(Imm(64), p)
		r.forward(r.cur, r.next)
	})
}

// reduce256 sums each of 8 vectors into lane 2h+i.
func reduce256(acc [heads][2]reg.VecVirtual) reg.VecVirtual {
	var pair [heads]reg.VecVirtual
	for h, a := range acc {
		pair[h] = YMM()
		VHADDPS(a[1], a[0], pair[h])
	}
	lo, hi := YMM(), YMM()
	VHADDPS(pair[1], pair[0], lo)
	VHADDPS(pair[3], pair[2], hi)
	first, second := YMM(), YMM()
	VPERM2F128(Imm(0x20), hi, lo, first)
	VPERM2F128(Imm(0x31), hi, lo, second)
	VADDPS(second, first, first)
	return first
}

// softmax256 does what softmax512 does, for heads 0 and 1 and then for heads 2 and 3.
func softmax256(arg, st reg.GPVirtual) {
	bias, capped := GP64(), GP32()
	MOVQ(Mem{Base: arg, Disp: offBias}, bias)
	MOVL(Mem{Base: arg, Disp: offCap}, capped)
	for _, side := range []int{0, 32} {
		p := func(r int) Mem { return Mem{Base: st, Disp: stP + 64*r + side} }
		label := []string{"nocap", "nocap2"}[side/32]
		TESTL(capped, capped)
		JZ(LabelRef(label))
		for r := range 4 {
			cap256(arg, p(r))
		}
		Label(label)
		old, m := YMM(), YMM()
		VMOVUPS(Mem{Base: st, Disp: stM + side}, old)
		VMOVAPS(old, m)
		var s [4]reg.VecVirtual
		for r := range s {
			s[r] = YMM()
			VMOVUPS(p(r), s[r])
			VADDPS(Mem{Base: bias, Disp: 64*r + side}, s[r], s[r])
			VMAXPS(m, s[r], m)
		}
		for _, swap := range []uint64{0xb1, 0x4e} {
			x := YMM()
			VPERMILPS(Imm(swap), m, x)
			VMAXPS(x, m, m)
		}
		VMOVUPS(m, Mem{Base: st, Disp: stM + side})
		VSUBPS(m, old, old)
		corr := exp256(old)
		VMOVUPS(corr, Mem{Base: st, Disp: stCorr + side})
		l := YMM()
		VMULPS(Mem{Base: st, Disp: stL + side}, corr, l)
		for r := range s {
			VSUBPS(m, s[r], s[r])
			w := exp256(s[r])
			VMOVUPS(w, p(r))
			VADDPS(w, l, l)
		}
		VMOVUPS(l, Mem{Base: st, Disp: stL + side})
	}
}

// exp256 is 2^x for x <= 0, and 0 below 2^-125, where the exponent can no longer be added as an integer.
func exp256(x reg.VecVirtual) reg.VecVirtual {
	low, keep := YMM(), YMM()
	VBROADCASTSS(constant(floor256), low)
	VCMPPS(Imm(0x15), low, x, keep) // not less than, or a NaN
	VMAXPS(x, low, x)
	n, f, p := YMM(), YMM(), YMM()
	VROUNDPS(Imm(8), x, n)
	VSUBPS(n, x, f)
	VBROADCASTSS(constant(exp2Poly[len(exp2Poly)-1]), p)
	for i := len(exp2Poly) - 2; i >= 0; i-- {
		c := YMM()
		VBROADCASTSS(constant(exp2Poly[i]), c)
		VFMADD213PS(c, f, p)
	}
	VCVTPS2DQ(n, n)
	VPSLLD(Imm(23), n, n)
	VPADDD(n, p, p)
	VANDPS(keep, p, p)
	return p
}

func cap256(arg reg.GPVirtual, at Mem) {
	x, f := YMM(), YMM()
	VBROADCASTSS(Mem{Base: arg, Disp: offCapIn}, f)
	VMULPS(at, f, x)
	sign, ax := YMM(), YMM()
	VBROADCASTSS(constantBits(0x80000000), sign)
	VANDNPS(x, sign, ax)
	e, one, num := YMM(), YMM(), YMM()
	VBROADCASTSS(constant(-2*log2e), e)
	VMULPS(e, ax, e)
	e = exp256(e)
	VBROADCASTSS(constant(1), one)
	VSUBPS(e, one, num)
	VADDPS(e, one, e)
	VDIVPS(e, num, num)
	VANDPS(sign, x, sign)
	VORPS(sign, num, num)
	z, p := YMM(), YMM()
	VMULPS(x, x, z)
	VBROADCASTSS(constant(tanhPoly[len(tanhPoly)-1]), p)
	for i := len(tanhPoly) - 2; i >= 0; i-- {
		c := YMM()
		VBROADCASTSS(constant(tanhPoly[i]), c)
		VFMADD213PS(c, z, p)
	}
	VMULPS(z, p, p)
	VFMADD213PS(x, x, p)
	limit := YMM()
	VBROADCASTSS(constant(tanhSmall), limit)
	VCMPPS(Imm(1), limit, ax, limit)
	VBLENDVPS(limit, p, num, num)
	VBROADCASTSS(Mem{Base: arg, Disp: offCap}, f)
	VMULPS(f, num, num)
	VMOVUPS(num, at)
}

// values256 adds the weighted V rows to acc, 16 columns at a time.
func values256(t string, arg, st reg.GPVirtual) {
	r := loadRows(arg, offV, offNextV)
	mask := oddMask256(t)
	acc := GP64()
	LEAQ(Mem{Base: st, Disp: stAcc}, acc)
	bytes := chunk * elemBytes(t)
	loop("columns", Mem{Base: arg, Disp: offVChunks}, func() {
		for part := range 2 {
			piece256(t, part, r, acc, st, mask)
		}
		ADDQ(U32(heads*chunk*4), acc)
		ADDQ(U32(uint64(bytes)), r.cur)
		ADDQ(U32(uint64(bytes)), r.next)
	})
}

func piece256(t string, part int, r rows, acc, st reg.GPVirtual, mask reg.VecVirtual) {
	bytes := chunk * elemBytes(t)
	var sum [2][heads]reg.VecVirtual
	at := func(s, h int) Mem { return Mem{Base: acc, Disp: h*chunk*4 + part*64 + s*32} }
	for h := range heads {
		corr := YMM()
		VBROADCASTSS(Mem{Base: st, Disp: stCorr + 16*h}, corr)
		for s := range sum {
			sum[s][h] = YMM()
			VMULPS(at(s, h), corr, sum[s][h])
		}
	}
	cur, next, p := GP64(), GP64(), GP64()
	MOVQ(r.cur, cur)
	MOVQ(r.next, next)
	LEAQ(Mem{Base: st, Disp: stP}, p)
	loop([]string{"low", "high"}[part], U32(4), func() {
		for i := range 4 {
			lo, hi := halves256(t, r.at(cur, i, part*bytes/2), mask)
			for h := range heads {
				w := YMM()
				VBROADCASTSS(Mem{Base: p, Disp: 16*h + 4*i}, w)
				VFMADD231PS(w, lo, sum[0][h])
				VFMADD231PS(w, hi, sum[1][h])
			}
			if part == 0 {
				r.prefetch(next, i, bytes)
			}
		}
		r.forward(cur, next)
		ADDQ(Imm(64), p)
	})
	for s := range sum {
		for h := range heads {
			VMOVUPS(sum[s][h], at(s, h))
		}
	}
}

// read256 emits the sequential read for processors without AVX-512.
func read256() {
	TEXT("readAVX2", NOSPLIT, "func(p *byte, n int) uint64")
	Doc("readAVX2 reads n bytes, a multiple of 512, and returns the or of all of them.")
	Pragma("noescape")
	p, n := GP64(), GP64()
	Load(Param("p"), p)
	Load(Param("n"), n)
	acc := make([]reg.VecVirtual, 8)
	for i := range acc {
		acc[i] = YMM()
		VPXOR(acc[i], acc[i], acc[i])
	}
	Label("next")
	CMPQ(n, U32(512))
	JL(LabelRef("done"))
	for half := range 2 {
		for i := range acc {
			VPOR(Mem{Base: p, Disp: 256*half + 32*i}, acc[i], acc[i])
		}
	}
	ADDQ(U32(512), p)
	SUBQ(U32(512), n)
	JMP(LabelRef("next"))
	Label("done")
	for i := 1; i < len(acc); i++ {
		VPOR(acc[i], acc[0], acc[0])
	}
	foldOr(acc[0])
}

// foldOr returns the or of the four words of y.
func foldOr(y reg.VecVirtual) {
	x, lo, hi := XMM(), GP64(), GP64()
	VEXTRACTI128(Imm(1), y, x)
	VPOR(y.AsX(), x, x)
	VMOVQ(x, lo)
	VPEXTRQ(Imm(1), x, hi)
	ORQ(hi, lo)
	VZEROUPPER()
	Store(lo, ReturnIndex(0))
	RET()
}

package attn

import (
	"math"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

const (
	blockTokens = 16
	groupHeads  = 4 // query heads of one call
	chunk       = 32
)

// block is the argument of a block function, read by assembly at fixed offsets.
type block struct {
	q            unsafe.Pointer // [chunk of HeadDim][4 heads][32] float32, scaled, in the order of the function
	k, v         unsafe.Pointer // row of the first of 16 tokens
	nextK, nextV unsafe.Pointer // the same rows of the block to prefetch
	stride       int64          // bytes from token to token
	kChunks      int64          // HeadDim / 32
	vChunks      int64          // ValueDim / 32
	state        *float32       // see the offsets below
	bias         *[64]float32   // added to the scores: 0, or -Inf for a token that is not there
	capIn, cap   float32        // soft cap in units of log2, and 1 / cap; cap 0 means none
}

// The state of 4 query heads, as offsets in float32. m, l and correction have 4 lanes for each head, of which lane i
// belongs to tokens i, i+4, i+8 and i+12 of a block; a head's lanes of m are equal, those of l are added at the end.
const (
	stateM     = 0  // largest score so far
	stateL     = 16 // sum of weights
	stateCorr  = 32 // what the last block multiplied l and acc by
	stateP     = 48 // scores, then weights: [4 rounds][4 heads][4 tokens]
	stateAcc   = 112
	noScoreYet = -1e30 // finite: -Inf - -Inf would be NaN for a sequence that starts with scores of -Inf
)

func stateFloats(valueDim int) int { return stateAcc + groupHeads*valueDim }

// biasFor holds, for n = 0 to 16 tokens, the bias that hides the others.
var biasFor = func() (b [blockTokens + 1][64]float32) {
	for n := range b {
		for i := range b[n] {
			if token := i/16*4 + i%4; token >= n {
				b[n][i] = float32(math.Inf(-1))
			}
		}
	}
	return b
}()

// ISA is a set of block functions.
type ISA uint8

// Sets of block functions.
const (
	Portable ISA = iota // Go
	AVX2                // with FMA and F16C
	AVX512              // F, BW, DQ and VL
)

func (i ISA) String() string { return [...]string{"portable", "avx2", "avx512"}[i] }

// order is the element of a 32-element chunk that stands at each position of q and acc: bf16 vectors are split into
// even and odd elements, within 32 of them with AVX-512, within 16 with AVX2.
func order(isa ISA, t gpu.DType) (o [chunk]int) {
	width := 0
	if t == gpu.BF16 {
		width = [...]int{0, 16, 32}[isa]
	}
	for i := range o {
		o[i] = i
		if width > 0 {
			in, half := i%width, width/2
			o[i] = i - in + 2*(in%half) + in/half
		}
	}
	return o
}

// blockPortable is the block function in Go.
func blockPortable[T element](b *block) {
	state := unsafe.Slice(b.state, stateFloats(int(b.vChunks)*chunk))
	q := unsafe.Slice((*float32)(b.q), int(b.kChunks)*chunk*groupHeads)
	for token := range blockTokens {
		row := unsafe.Slice((*T)(unsafe.Add(b.k, int64(token)*b.stride)), b.kChunks*chunk)
		for h := range groupHeads {
			var sum [4]float32
			for d := 0; d < len(row); d += 4 {
				w := q[d/chunk*chunk*groupHeads+h*chunk+d%chunk:]
				for i := range sum {
					sum[i] += w[i] * row[d+i].float()
				}
			}
			state[stateP+token/4*16+h*4+token%4] = sum[0] + sum[1] + (sum[2] + sum[3])
		}
	}
	softmaxPortable(b, state)
	acc := state[stateAcc:]
	for i := range acc {
		acc[i] *= state[stateCorr+i/chunk%groupHeads*4]
	}
	for token := range blockTokens {
		row := unsafe.Slice((*T)(unsafe.Add(b.v, int64(token)*b.stride)), b.vChunks*chunk)
		for h := range groupHeads {
			p := state[stateP+token/4*16+h*4+token%4]
			for d := range row {
				acc[d/chunk*chunk*groupHeads+h*chunk+d%chunk] += p * row[d].float()
			}
		}
	}
}

func softmaxPortable(b *block, state []float32) {
	scores := state[stateP : stateP+64]
	for i := range scores {
		if b.cap != 0 {
			scores[i] = b.cap * float32(math.Tanh(float64(scores[i]*b.capIn)))
		}
		scores[i] += b.bias[i]
	}
	for h := range groupHeads {
		m := state[stateM+4*h]
		for i := range blockTokens {
			if s := scores[i/4*16+h*4+i%4]; s > m {
				m = s
			}
		}
		for lane := range 4 {
			at := 4*h + lane
			corr := exp2(state[stateM+at] - m)
			state[stateM+at], state[stateCorr+at] = m, corr
			l := state[stateL+at] * corr
			for r := range 4 {
				p := exp2(scores[r*16+at] - m)
				scores[r*16+at] = p
				l += p
			}
			state[stateL+at] = l
		}
	}
}

func exp2(x float32) float32 { return float32(math.Exp2(float64(x))) }

// element is a K or V element in memory.
type element interface {
	bf16 | fp16 | fp32
	float() float32
}

type (
	bf16 uint16
	fp16 uint16
	fp32 float32
)

func (x bf16) float() float32 { return math.Float32frombits(uint32(x) << 16) }
func (x fp32) float() float32 { return float32(x) }
func (x fp16) float() float32 {
	return gpu.FP16.Load([]byte{byte(x), byte(x >> 8)})
}

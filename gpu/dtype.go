package gpu

import (
	"encoding/binary"
	"math"
)

// DType is the element type of a tensor. The zero value is invalid.
type DType uint8

// Element types.
const (
	BF16 DType = iota + 1
	FP16
	FP32
)

func (t DType) String() string {
	switch t {
	case BF16:
		return "bf16"
	case FP16:
		return "fp16"
	case FP32:
		return "fp32"
	}
	return "invalid"
}

// Size is the bytes of one element; 0 for an invalid type.
func (t DType) Size() int {
	switch t {
	case BF16, FP16:
		return 2
	case FP32:
		return 4
	}
	return 0
}

// Load reads the element at the start of b.
func (t DType) Load(b []byte) float32 {
	switch t {
	case BF16:
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16)
	case FP16:
		return halfToFloat(binary.LittleEndian.Uint16(b))
	default:
		return math.Float32frombits(binary.LittleEndian.Uint32(b))
	}
}

// LoadAll reads len(dst) elements from the start of b.
func (t DType) LoadAll(dst []float32, b []byte) {
	switch t {
	case BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16)
		}
	case FP16:
		for i := range dst {
			dst[i] = halfToFloat(binary.LittleEndian.Uint16(b[2*i:]))
		}
	default:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
		}
	}
}

// Store writes v at the start of b, rounded to nearest even.
func (t DType) Store(b []byte, v float32) {
	switch t {
	case BF16:
		binary.LittleEndian.PutUint16(b, floatToBF16(v))
	case FP16:
		binary.LittleEndian.PutUint16(b, floatToHalf(v))
	default:
		binary.LittleEndian.PutUint32(b, math.Float32bits(v))
	}
}

func floatToBF16(v float32) uint16 {
	u := math.Float32bits(v)
	if u&0x7fffffff > 0x7f800000 { // a NaN stays one even if its low bits were all it had
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

func halfToFloat(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	case 0: // zero or subnormal: frac * 2^-24 is exact in float32
		f := math.Float32bits(float32(frac) * (1.0 / (1 << 24)))
		return math.Float32frombits(sign | f)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
}

func floatToHalf(v float32) uint16 {
	u := math.Float32bits(v)
	sign := uint16(u >> 16 & 0x8000)
	a := u & 0x7fffffff
	switch {
	case a > 0x7f800000:
		return sign | 0x7e00
	case a >= 0x477ff000: // rounds to 2^16 or more
		return sign | 0x7c00
	case a < 0x38800000: // below 2^-14: a multiple of 2^-24
		f := math.Float32frombits(a)
		return sign | uint16(math.RoundToEven(float64(f)*(1<<24)))
	}
	return sign | uint16((a-0x38000000+0xfff+a>>13&1)>>13)
}

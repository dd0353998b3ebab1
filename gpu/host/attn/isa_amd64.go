package attn

import (
	"unsafe"

	"golang.org/x/sys/cpu"

	"github.com/kvtier/kvtier/gpu"
)

// Supported lists the sets that this processor runs, the fastest first.
func Supported() []ISA {
	var s []ISA
	if x := cpu.X86; x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL {
		s = append(s, AVX512)
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA { // each processor with both has F16C, which x/sys/cpu does not report
		s = append(s, AVX2)
	}
	return append(s, Portable)
}

func blockFunc(isa ISA, t gpu.DType) func(*block) {
	asm := map[ISA]map[gpu.DType]func(*byte){
		AVX512: {gpu.BF16: blockBF16AVX512, gpu.FP16: blockFP16AVX512, gpu.FP32: blockFP32AVX512},
		AVX2:   {gpu.BF16: blockBF16AVX2, gpu.FP16: blockFP16AVX2, gpu.FP32: blockFP32AVX2},
	}
	if f := asm[isa][t]; f != nil {
		return func(b *block) { f((*byte)(unsafe.Pointer(b))) }
	}
	return portableFunc(t)
}

func readAll(isa ISA, b []byte) uint64 {
	switch n := len(b) &^ 511; {
	case n == 0:
		return 0
	case isa == AVX512:
		return readAVX512(&b[0], n)
	case isa == AVX2:
		return readAVX2(&b[0], n)
	}
	return readPortable(b)
}

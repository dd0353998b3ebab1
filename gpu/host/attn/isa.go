package attn

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/gpu"
)

//go:generate go run -C gen gen.go avx512.go avx2.go -out ../block_amd64.s -stubs ../block_amd64.go -pkg attn

func portableFunc(t gpu.DType) func(*block) {
	switch t {
	case gpu.BF16:
		return blockPortable[bf16]
	case gpu.FP16:
		return blockPortable[fp16]
	}
	return blockPortable[fp32]
}

func readPortable(b []byte) (or uint64) {
	for ; len(b) >= 32; b = b[32:] {
		or |= binary.LittleEndian.Uint64(b) | binary.LittleEndian.Uint64(b[8:]) |
			binary.LittleEndian.Uint64(b[16:]) | binary.LittleEndian.Uint64(b[24:])
	}
	return or
}

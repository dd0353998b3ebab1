//go:build !amd64

package attn

import "github.com/kvtier/kvtier/gpu"

// Supported lists the sets that this processor runs, the fastest first.
func Supported() []ISA { return []ISA{Portable} }

func blockFunc(_ ISA, t gpu.DType) func(*block) { return portableFunc(t) }

func readAll(_ ISA, b []byte) uint64 { return readPortable(b) }

// Package kernels holds the CUDA kernels as PTX 7.8 for sm_80, compiled from the .cu files here by build.sh and checked
// in, so that building kvtier needs no CUDA compiler. The driver translates them for the device it finds.
//
// The sources compile three ways: clang makes the PTX, nvcc may be used to compare, and g++ makes the code that the stub
// driver in ../testdata/stub runs on the CPU.
package kernels

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io"
)

//go:embed *.ptx.gz
var files embed.FS

// Modules are the names that PTX takes.
var Modules = []string{"pages", "decode_bf16", "decode_fp16", "decode_fp32"}

// PTX returns the text of a module, with a zero byte at its end as the driver wants it.
func PTX(module string) ([]byte, error) {
	packed, err := files.ReadFile(module + ".ptx.gz")
	if err != nil {
		return nil, fmt.Errorf("kernels: %w", err)
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("kernels: %s: %w", module, err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("kernels: %s: %w", module, err)
	}
	return append(text, 0), nil
}

//go:build nocuda || !linux || !(amd64 || arm64)

package cuda

import (
	"fmt"

	"github.com/kvtier/kvtier/gpu"
)

// Open answers gpu.ErrNoDevice: this binary was built without CUDA.
func Open(Config) (gpu.Device, error) {
	return nil, fmt.Errorf("%w: built without CUDA", gpu.ErrNoDevice)
}

// Probe answers gpu.ErrNoDevice: this binary was built without CUDA.
func Probe(string) (Report, error) {
	return Report{}, fmt.Errorf("%w: built without CUDA", gpu.ErrNoDevice)
}

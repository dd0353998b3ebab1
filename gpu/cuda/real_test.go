//go:build linux && amd64 && !nocuda

package cuda

import (
	"os"
	"testing"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/gputest"
)

// TestRealDevice runs the suite on the driver of this machine: part of what "make
// gpu-check" prepares for a machine with a GPU.
func TestRealDevice(t *testing.T) {
	if os.Getenv("KVTIER_GPU") == "" {
		t.Skip("KVTIER_GPU is not set: the suite runs on the stub driver only")
	}
	gputest.Run(t, gputest.Target{Sum: pageSum, Tolerance: 1e-4, Operations: 2000, Open: func(t *testing.T) gpu.Device {
		d, err := Open(Config{Library: os.Getenv("KVTIER_CUDA_LIBRARY")})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}})
}

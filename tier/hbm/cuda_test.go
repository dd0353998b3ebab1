//go:build linux && amd64 && !nocuda

package hbm

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda"
)

// The suite of tiers on the CUDA driver without a GPU (gpu/cuda/testdata/stub,
// built here by g++).
func TestConformanceOnCUDA(t *testing.T) {
	library := filepath.Join(t.TempDir(), "libcuda.so.1")
	build := exec.Command("testdata/stub/build.sh", library, "kernels")
	build.Dir = "../../gpu/cuda"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the stub driver (needs g++): %v\n%s", err, out)
	}
	conformance(t, func(t *testing.T) gpu.Device {
		d, err := cuda.Open(cuda.Config{Library: library})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { closeDevice(t, d) })
		return d
	})
}

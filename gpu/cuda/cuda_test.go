//go:build linux && amd64 && !nocuda

package cuda

import (
	"os"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/gputest"
)

// pageSum is the page checksum, written down once more: the kernel is compared with the definition, not with a copy of it.
func pageSum(page []byte) uint64 {
	var sums []byte
	for n := uint64(len(page)); len(page) > 0; {
		chunk := page[:min(gpu.ChunkBytes, len(page))]
		sum := xxh3.Hash(chunk)
		for i := range 8 {
			sums = append(sums, byte(sum>>(8*i)))
		}
		if page = page[len(chunk):]; len(page) == 0 {
			return xxh3.HashSeed(sums, n)
		}
	}
	return 0
}

func TestDeviceOnStub(t *testing.T) {
	target := gputest.Target{Open: asDevice, Sum: pageSum, Lazy: true, Tolerance: 1e-5, Operations: 5000}
	if os.Getenv("KVTIER_TORTURE") != "" {
		target.Operations = 100_000
	}
	gputest.Run(t, target)
}

// The same with a driver that has no batch copies.
func TestDeviceWithoutBatchCopies(t *testing.T) {
	target := gputest.Target{Sum: pageSum, Lazy: true, Tolerance: 1e-5, Operations: 2000}
	target.Open = func(t *testing.T) gpu.Device {
		stubReset()
		stubSet("batch", 0)
		t.Cleanup(func() { checkLeaks(t) })
		d, err := Open(Config{Library: stub.path})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	gputest.Run(t, target)
}

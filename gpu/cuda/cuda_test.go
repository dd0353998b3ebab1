//go:build linux && amd64 && !nocuda

package cuda

import (
	"errors"
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

// The same on a device that exports no descriptors: pools go by the driver's older
// handles.
func TestDeviceWithLegacyHandles(t *testing.T) {
	target := gputest.Target{Sum: pageSum, Lazy: true, Tolerance: 1e-5, Operations: 2000, PoolsEnd: true}
	target.Open = func(t *testing.T) gpu.Device {
		stubReset()
		stubSet("vmm", 0)
		t.Cleanup(func() { checkLeaks(t) })
		d, err := Open(Config{Library: stub.path})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	gputest.Run(t, target)
}

// What is no handle, or one of other memory, is refused.
func TestLegacyHandleRefused(t *testing.T) {
	stubReset()
	stubSet("vmm", 0)
	d, err := Open(Config{Library: stub.path})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Import(f, 2<<20, gpu.ReadOnly); !errors.Is(err, gpu.ErrArgument) {
		t.Errorf("an empty file: %v", err)
	}
	if _, err := f.Write(make([]byte, ipcFileBytes)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Import(f, 2<<20, gpu.ReadOnly); !errors.Is(err, gpu.ErrArgument) {
		t.Errorf("another file: %v", err)
	}
	if err := errors.Join(f.Close(), d.Close()); err != nil {
		t.Error(err)
	}
	checkLeaks(t)
}

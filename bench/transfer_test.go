package bench

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// Small runs: everything is measured and no page is wrong.
func TestTransferWorkloads(t *testing.T) {
	for name, run := range map[string]func(context.Context, TransferConfig) (*TransferReport, error){"remote": Remote, "stream": Stream} {
		t.Run(name, func(t *testing.T) {
			r, err := run(t.Context(), TransferConfig{PageBytes: 64 << 10, Bytes: 16 << 20, Rounds: 2, Node: NodeConfig{Program: program(t)}, TempDir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Err(); err != nil {
				t.Error(err)
			}
			if r.Bytes != 32<<20 || r.BytesPerS <= 0 || r.TCPVerifiedBytesPerS <= 0 || r.RatioToTCP <= 0 || r.CPURatio < 0 {
				t.Errorf("%+v", r)
			}
		})
	}
}

// The plain copy checks what it gets.
func TestPlainCopyChecks(t *testing.T) {
	c, err := newTCPCopy(t.Context(), Content{}, 100_000, 1_000_000) // neither is a multiple of a chunk
	if err != nil {
		t.Fatal(err)
	}
	if err := c.run(); err != nil {
		t.Error(err)
	}
	c.src[70_000] ^= 1
	if err := c.run(); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("a changed byte: %v, want %v", err, paging.ErrCorrupt)
	}
	if err := c.close(); err != nil {
		t.Error(err)
	}
}

// Processor time of a process is that of its work.
func TestCPUOf(t *testing.T) {
	before, err := cpuOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	own := selfCPU()
	x := uint64(1)
	for selfCPU()-own < 100*time.Millisecond {
		for range 1 << 20 {
			x = mix(x)
		}
	}
	if x == 0 {
		t.Log("kept")
	}
	after, err := cpuOf(os.Getpid())
	if took := after - before; err != nil || took < 80*time.Millisecond || took > 5*time.Second {
		t.Errorf("%v of work, %v (%v)", selfCPU()-own, took, err)
	}
}

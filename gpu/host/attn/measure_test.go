package attn

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/kvtier/kvtier/gpu"
)

func TestMeasureReportsWhatItRan(t *testing.T) {
	m, err := Measure(t.Context(), Measurement{Type: gpu.BF16, Threads: 2, MemoryBytes: 1, Rounds: 1})
	if err != nil {
		t.Fatal(err)
	}
	if m.Sequences != 2 || m.MemoryBytes != 2*16<<20 || !(m.RelErr <= tolerance) || m.BytesPerSec <= 0 || m.ReadBytesPerSec <= 0 || m.PerSequence <= 0 {
		t.Errorf("%+v", m)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Measure(ctx, Measurement{Type: gpu.BF16, Threads: 1, Rounds: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := Measure(t.Context(), Measurement{Threads: 1}); !errors.Is(err, gpu.ErrShape) {
		t.Errorf("no type: %v", err)
	}
}

// The published case: KVTIER_FULL=1 go test -run '^$' -bench Attention ./gpu/host/attn uses 2 GiB, the default 128 MiB.
func BenchmarkAttention(b *testing.B) {
	bytes := int64(128 << 20)
	if os.Getenv("KVTIER_FULL") != "" {
		bytes = 2 << 30
	}
	for _, typ := range []gpu.DType{gpu.BF16, gpu.FP16, gpu.FP32} {
		b.Run(typ.String(), func(b *testing.B) {
			for b.Loop() {
				m, err := Measure(b.Context(), Measurement{Type: typ, Threads: 1, MemoryBytes: bytes, Rounds: 5})
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(m.BytesPerSec/1e9, "GB/s")
				b.ReportMetric(m.ReadBytesPerSec/1e9, "readGB/s")
				b.ReportMetric(m.Ratio, "ratio")
				b.ReportMetric(m.RelErr, "relerr")
				b.ReportMetric(float64(m.PerSequence.Microseconds())/1e3, "ms/seq")
			}
		})
	}
}

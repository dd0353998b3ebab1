package bench

import (
	"testing"
	"time"
)

// A small run of the three processes: everything is measured, nothing is lost.
func TestDirectoryWorkload(t *testing.T) {
	r, err := Directory(t.Context(), DirectoryConfig{Claims: 20_000, More: 10_000, Sights: 6, Failovers: 1, Program: program(t, ""), TempDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	if r.ClaimsPerS <= 0 || r.Lookup512US.P50 <= 0 || r.BytesPerClaim <= 0 || r.VisibleMS.P50 <= 0 || r.GCPauseUS.Max < 0 ||
		r.FailoverMS <= 0 || r.FailoverMS > 10*float64(time.Second/time.Millisecond) {
		t.Errorf("%+v", r)
	}
}

// Keys are the same in every process, and differ by node and number.
func TestDirectoryKeys(t *testing.T) {
	seen := map[[16]byte]bool{}
	for node := 1; node <= directoryNodes; node++ {
		for i := range int64(10_000) {
			seen[benchKey(node, i)] = true
		}
	}
	if len(seen) != directoryNodes*10_000 {
		t.Errorf("%d keys of %d differ", len(seen), directoryNodes*10_000)
	}
}

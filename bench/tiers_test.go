package bench

import "testing"

func TestNVMeIsMeasured(t *testing.T) {
	var done, total int64
	r, err := NVMe(t.Context(), NVMeConfig{Bytes: 64 << 20, Rounds: 2, TempDir: t.TempDir(), Progress: func(d, n int64) { done, total = d, n }})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	for name, v := range map[string]float64{
		"write": r.WriteRatio, "read": r.ReadRatio, "read under write": r.ReadUnderWriteUS.P50,
		"4 readers": r.Read4BytesPerS, "2 MiB write": r.Write2MBytesPerS, "2 MiB read": r.Read2MBytesPerS,
	} {
		if v <= 0 {
			t.Errorf("%s: %v", name, v)
		}
	}
	if r.WriteAmplification < 1 || r.WriteAmplification > 1.15 || r.SpaceAmplification < 1 || r.SpaceAmplification > 2 {
		t.Errorf("write amplification %v, space amplification %v", r.WriteAmplification, r.SpaceAmplification)
	}
	if done != total {
		t.Errorf("progress ended at %d of %d", done, total)
	}
}

func TestIndexIsMeasured(t *testing.T) {
	r, err := Index(t.Context(), IndexConfig{Pages: 20_000, TempDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if r.Pages != 20_000 || r.BytesPerPage <= 0 || r.LoadS <= 0 {
		t.Errorf("%+v", r)
	}
}

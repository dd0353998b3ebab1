package bench

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the key lists anew")

// reports is one of each, filled so that optional parts show.
func reports() map[string]Report {
	return map[string]Report{
		"policy":     &PolicyReport{},
		"simulate":   &SimulateReport{},
		"replay":     &ReplayReport{Kills: 1, FlippedBits: 1, FirstErrors: []string{"x"}},
		"demo":       &DemoReport{ReplayReport{FirstErrors: []string{"x"}}},
		"demo-nodes": &ClusterReport{ReplayReport: ReplayReport{FirstErrors: []string{"x"}}, Outages: []Outage{{}}, Session: &SessionAct{}},
		"local":      &LocalReport{RedisGet64US: &Quantiles{}, RedisDepth: 1},
		"nvme":       &NVMeReport{},
		"commit":     &CommitReport{},
		"index":      &IndexReport{},
		"crash":      &CrashReport{FirstErrors: []string{"x"}},
		"directory":  &DirectoryReport{},
		"attention":  &AttentionReport{},
		"device":     &DeviceReport{Copies: []DeviceCopies{{PageBytes: 4096}}},
		"transfer":   &TransferReport{},
		"migrate":    &MigrateReport{},
	}
}

// keys lists every key of a JSON object with its kind, nested ones by a path.
func keys(prefix string, v any) []string {
	var out []string
	object, ok := v.(map[string]any)
	if !ok {
		return []string{prefix + " " + strings.ReplaceAll(reflect.TypeOf(v).String(), "interface {}", "any")}
	}
	for k, inner := range object {
		path := k
		if prefix != "" {
			path = prefix + "." + k
		}
		out = append(out, keys(path, inner)...)
	}
	slices.Sort(out)
	return out
}

// TestReportKeys holds the keys of every report: others read them. A key may be
// added; one that goes or changes its kind is a break, recorded in the changelog.
func TestReportKeys(t *testing.T) {
	for name, r := range reports() {
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal(data, &v); err != nil {
			t.Fatal(err)
		}
		got := strings.Join(keys("", v), "\n") + "\n"
		file := filepath.Join("testdata", "keys", name+".txt")
		if *rewrite {
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: keys are\n%s\nwant\n%s", name, got, want)
		}
	}
}

// TestPromisedKeys are those that the documentation promises, whatever else a
// report has.
func TestPromisedKeys(t *testing.T) {
	promised := map[string]string{
		"policy": "hit token_hit",
		"replay": "requests blocks hit_blocks hit_by_tier token_hit wrong_pages failed_requests fetch_us commit_us bytes_by_path",
		"local":  "fetch64_us empty_call_us ratio unary_ratio release_us bytes_copied redis_get64_us",
		"nvme": "write_bytes_per_s read_bytes_per_s raw_write_bytes_per_s raw_read_bytes_per_s write_ratio read_ratio " +
			"write_amplification space_amplification read_under_write_us",
		"commit":     "commit_bytes_per_s memcpy_checksum_bytes_per_s ratio",
		"index":      "pages bytes_per_page load_s",
		"attention":  "bf16 fp16 fp32",
		"device":     "driver device copies",
		"demo-nodes": "requests wrong_pages failed_requests unavailable_requests hit_by_tier token_hit recovered_pages fetch_us seconds remote_hit_blocks hit_without_directory recovery_ms",
		"demo":       "requests wrong_pages failed_requests unavailable_requests hit_by_tier token_hit recovered_pages fetch_us seconds decoded_requests wrong_decodes decode_relerr",
	}
	all := reports()
	for name, list := range promised {
		data, err := json.Marshal(all[name])
		if err != nil {
			t.Fatal(err)
		}
		var object map[string]any
		if err := json.Unmarshal(data, &object); err != nil {
			t.Fatal(err)
		}
		for key := range strings.FieldsSeq(list) {
			v, ok := object[key]
			if !ok {
				t.Errorf("%s lacks %s", name, key)
			}
			if strings.HasSuffix(key, "_us") {
				q, _ := v.(map[string]any)
				for _, part := range []string{"p50", "p95", "p99", "max"} {
					if _, ok := q[part]; !ok {
						t.Errorf("%s: %s lacks %s", name, key, part)
					}
				}
			}
		}
	}
}

func TestReplayReportFindsWhatIsWrong(t *testing.T) {
	good := ReplayReport{Requests: 10, ServedRequests: 9, UnavailableRequests: 1, HitBlocks: 3, HitByTier: HitByTier{RAM: 1, NVMe: 2}}
	if err := good.Err(); err != nil {
		t.Fatalf("a good report: %v", err)
	}
	for name, spoil := range map[string]func(*ReplayReport){
		"requests do not add up": func(r *ReplayReport) { r.ServedRequests-- },
		"hits do not add up":     func(r *ReplayReport) { r.HitByTier.RAM++ },
		"wrong page":             func(r *ReplayReport) { r.WrongPages = 1 },
		"lost page":              func(r *ReplayReport) { r.LostPages = 1 },
		"phantom":                func(r *ReplayReport) { r.PhantomBlocks = 1 },
		"durable lost":           func(r *ReplayReport) { r.LostDurableBlocks = 1 },
		"failed":                 func(r *ReplayReport) { r.FailedRequests, r.ServedRequests = 1, 8 },
		"corrupt, not damaged":   func(r *ReplayReport) { r.CorruptPages = 1 },
	} {
		r := good
		spoil(&r)
		if r.Err() == nil {
			t.Errorf("%s: no error", name)
		}
	}
	damaged := good
	damaged.CorruptPages, damaged.FlippedBits = 1, 1
	if err := damaged.Err(); err != nil {
		t.Errorf("corruption that was caused on purpose and found: %v", err)
	}
}

func TestEveryReportHasATable(t *testing.T) {
	for name, r := range reports() {
		var b strings.Builder
		if err := WriteTable(&b, r); err != nil || len(b.String()) < 50 {
			t.Errorf("%s: %q, %v", name, b.String(), err)
		}
	}
}

func TestFormatBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 64 << 20: "64 MiB", 5 << 40: "5 TiB"} {
		if got := FormatBytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

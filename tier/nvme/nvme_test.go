package nvme

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

// childEnv is set in the processes of inChild.
const childEnv = "KVTIER_NVME_TEST_CHILD"

// inChild runs a test in a process of its own, where it may leave a Pebble
// behind that was given up (park). false: this is the parent, and it is done.
func inChild(t *testing.T) bool {
	t.Helper()
	if os.Getenv(childEnv) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// Small dimensions for tests in memory.
const (
	testBudget  = 4 << 20
	testSegment = 256 << 10
)

// memConfig is a tier in memory.
func memConfig(fs vfs.FS, f *faults) Config {
	if f == nil {
		f = &faults{}
	}
	return Config{
		Dir: "tier", BudgetBytes: testBudget, SegmentBytes: testSegment, AheadBytes: 2 * testSegment, Readers: 4,
		volume: &memVolume{fs: fs, dir: "tier", faults: f}, index: fs,
		keepEvery: 5 * time.Millisecond, roomBytes: 1,
	}
}

// mustOpen opens a tier, recovers it and registers namespace 1.
func mustOpen(t testing.TB, cfg Config) *Tier {
	t.Helper()
	tr := mustOpenOnly(t, cfg)
	if err := tr.Recover(t.Context(), func(tier.Record) (uint32, bool) { return 1, true }, nil); err != nil {
		t.Fatal(err)
	}
	return tr
}

func mustOpenOnly(t testing.TB, cfg Config) *Tier {
	t.Helper()
	tr, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	if err := tr.PutNamespace(tiertest.Namespace(1)); err != nil {
		t.Fatal(err)
	}
	return tr
}

var testNS = tiertest.Namespace(1).ID()

// store stores page number n.
func store(ctx context.Context, tr *Tier, n uint64, bytes uint32) (tier.Page, tier.Ref, error) {
	p, b := tiertest.Page(testNS, n, bytes)
	refs := make([]tier.Ref, 1)
	err := tr.Store(ctx, []tier.Page{p}, [][]byte{b}, []uint32{uint32(n)}, refs)
	if c := tier.Unsettled(err); c != nil {
		<-c
	}
	return p, refs[0], err
}

func mustStore(t testing.TB, tr *Tier, n uint64, bytes uint32) (tier.Page, tier.Ref) {
	t.Helper()
	p, r, err := store(t.Context(), tr, n, bytes)
	if err != nil {
		t.Fatalf("store page %d: %v", n, err)
	}
	return p, r
}

func load(ctx context.Context, tr *Tier, p tier.Page, r tier.Ref) ([]byte, error) {
	dst := make([]byte, p.Bytes)
	err := tr.Load(ctx, p, r, dst)
	if c := tier.Unsettled(err); c != nil {
		<-c
	}
	return dst, err
}

func mustLoad(t testing.TB, tr *Tier, n uint64, p tier.Page, r tier.Ref) {
	t.Helper()
	dst, err := load(t.Context(), tr, p, r)
	if err != nil {
		t.Fatalf("load page %d: %v", n, err)
	}
	if tiertest.Identity(testNS, n, dst) != p {
		t.Fatalf("page %d: wrong bytes", n)
	}
}

// until waits for a condition that other goroutines bring about.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited 20 s: %s", what)
		}
	}
}

// TestConformanceInMemory runs the suite on a crashable file system in memory.
func TestConformanceInMemory(t *testing.T) {
	var fs vfs.FS
	budget := int64(0)
	config := func() Config {
		cfg := memConfig(fs, nil)
		cfg.BudgetBytes, cfg.SegmentBytes, cfg.AheadBytes = budget, 0, 0
		return cfg
	}
	tiertest.Run(t, subject(func(_ *testing.T, b int64) { fs, budget = vfs.NewMem(), b }, config))
}

// TestConformanceOnDisk runs the suite on the file system of the temporary
// directory, with direct I/O if it has any.
func TestConformanceOnDisk(t *testing.T) {
	cfg := Config{}
	fresh := func(t *testing.T, b int64) { cfg = Config{Dir: filepath.Join(t.TempDir(), "tier"), BudgetBytes: b} }
	tiertest.Run(t, subject(fresh, func() Config { return cfg }))
}

// TestConformanceBuffered is the same without direct I/O.
func TestConformanceBuffered(t *testing.T) {
	cfg := Config{}
	fresh := func(t *testing.T, b int64) {
		dir, bounces := filepath.Join(t.TempDir(), "tier"), &bouncePool{}
		cfg = Config{Dir: dir, BudgetBytes: b, bounces: bounces, volume: &diskVolume{dir: dir, bounces: bounces}}
	}
	tiertest.Run(t, subject(fresh, func() Config { return cfg }))
}

func subject(fresh func(t *testing.T, budget int64), config func() Config) tiertest.Subject {
	return tiertest.Subject{
		Open: func(t *testing.T, budget int64, namespaces ...*paging.Namespace) tier.Tier {
			fresh(t, budget)
			tr, err := Open(config())
			if err != nil {
				t.Fatal(err)
			}
			for _, ns := range namespaces {
				if err := tr.PutNamespace(ns); err != nil {
					t.Fatal(err)
				}
			}
			if err := tr.Recover(t.Context(), nil, nil); err != nil {
				t.Fatal(err)
			}
			return tr
		},
		Reopen: func(t *testing.T) tier.Durable {
			tr, err := Open(config())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { tr.Close() })
			return tr
		},
	}
}

package nvme

import (
	"archive/zip"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"
)

var writeFixture = flag.Bool("write-fixture", false, "write testdata/format1.zip anew: only if format 1 was never released")

// fixturePages are the lengths of the pages in a fixture, by number.
var fixturePages = []uint32{1, 4095, 4096, 5000, 12_288}

// TestFixtures opens what each format that was ever written looks like.
func TestFixtures(t *testing.T) {
	const name = "testdata/format1.zip"
	if *writeFixture {
		makeFixture(t, name)
	}
	dir := filepath.Join(t.TempDir(), "tier")
	unzip(t, name, dir)
	tr, found := reopen(t, Config{Dir: dir, BudgetBytes: 96 << 10, SegmentBytes: 16 << 10})
	if len(found) != len(fixturePages) || tr.Metrics().RecordsDropped != 0 {
		t.Errorf("%d pages, %d records dropped, want %d and 0", len(found), tr.Metrics().RecordsDropped, len(fixturePages))
	}
	for p, r := range found {
		n := nameNumber(p)
		if n >= uint64(len(fixturePages)) || p.Bytes != fixturePages[n] {
			t.Errorf("page %d of %d bytes is not of the fixture", n, p.Bytes)
		}
		mustLoad(t, tr, n, p, r)
	}
	mustStore(t, tr, 100, 4096)
}

func makeFixture(t *testing.T, name string) {
	t.Helper()
	cfg := Config{Dir: filepath.Join(t.TempDir(), "tier"), BudgetBytes: 96 << 10, SegmentBytes: 16 << 10, AheadBytes: 1}
	tr := mustOpen(t, cfg)
	for n, bytes := range fixturePages {
		mustStore(t, tr, uint64(n), bytes)
	}
	_, gone := mustStore(t, tr, 99, 4096)
	tr.Free(gone)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := zip.NewWriter(f)
	if err := w.AddFS(os.DirFS(cfg.Dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

func unzip(t *testing.T, name, dir string) {
	t.Helper()
	z, err := zip.OpenReader(name)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	for _, f := range z.File {
		if f.FileInfo().IsDir() {
			continue
		}
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, f.Name), string(b))
	}
}

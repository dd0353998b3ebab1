package nvme

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// diskConfig is a small tier in a new directory.
func diskConfig(t testing.TB) Config {
	return Config{Dir: filepath.Join(t.TempDir(), "tier"), BudgetBytes: testBudget, SegmentBytes: testSegment, AheadBytes: testSegment}
}

// onDisk stores n pages of these bytes, closes the tier and returns them with
// their places.
func onDisk(t *testing.T, cfg Config, n int, bytes uint32) ([]tier.Page, []tier.Ref) {
	t.Helper()
	tr := mustOpen(t, cfg)
	pages, refs := make([]tier.Page, n), make([]tier.Ref, n)
	for i := range pages {
		pages[i], refs[i] = mustStore(t, tr, uint64(i), bytes)
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	return pages, refs
}

// editSegment changes the segment file that r lies in, from r on.
func editSegment(t *testing.T, cfg Config, r tier.Ref, edit func(f *os.File, offset int64)) {
	t.Helper()
	p := placeOf(r)
	f, err := os.OpenFile(filepath.Join(cfg.Dir, segmentName(p.Extent)), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	edit(f, int64(p.Offset))
}

// reopen recovers and returns the pages that are there.
func reopen(t *testing.T, cfg Config) (*Tier, map[tier.Page]tier.Ref) {
	t.Helper()
	tr := mustOpenOnly(t, cfg)
	found := map[tier.Page]tier.Ref{}
	err := tr.Recover(t.Context(), func(rec tier.Record) (uint32, bool) {
		found[rec.Page] = rec.Ref
		return 1, true
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tr, found
}

func TestFlippedBit(t *testing.T) {
	cfg := diskConfig(t)
	pages, refs := onDisk(t, cfg, 3, 10_000)
	editSegment(t, cfg, refs[1], func(f *os.File, offset int64) {
		b := make([]byte, 1)
		f.ReadAt(b, offset+5000)
		b[0] ^= 1 << 3
		f.WriteAt(b, offset+5000)
	})
	tr, found := reopen(t, cfg)
	_, err := load(t.Context(), tr, pages[1], found[pages[1]])
	if !errors.Is(err, paging.ErrCorrupt) || errors.Is(err, paging.ErrIdentity) {
		t.Errorf("load of a flipped bit: got %v, want %v", err, paging.ErrCorrupt)
	}
	if m := tr.Metrics(); m.Corrupt != 1 || m.Identity != 0 {
		t.Errorf("counted %d corrupt, %d of other pages, want 1 and 0", m.Corrupt, m.Identity)
	}
	mustLoad(t, tr, 0, pages[0], found[pages[0]])
	mustLoad(t, tr, 2, pages[2], found[pages[2]])
	tr.Free(found[pages[1]])
	if u := tr.Usage(); u.Pages != 2 {
		t.Errorf("%d pages after the damaged one was freed, want 2", u.Pages)
	}
}

func TestExchangedPages(t *testing.T) {
	cfg := diskConfig(t)
	pages, refs := onDisk(t, cfg, 3, 8192)
	var a, b [8192]byte
	editSegment(t, cfg, refs[0], func(f *os.File, offset int64) { f.ReadAt(a[:], offset) })
	editSegment(t, cfg, refs[2], func(f *os.File, offset int64) {
		f.ReadAt(b[:], offset)
		f.WriteAt(a[:], offset)
	})
	editSegment(t, cfg, refs[0], func(f *os.File, offset int64) { f.WriteAt(b[:], offset) })

	tr, found := reopen(t, cfg)
	for _, i := range []int{0, 2} {
		_, err := load(t.Context(), tr, pages[i], found[pages[i]])
		if !errors.Is(err, paging.ErrIdentity) {
			t.Errorf("load of exchanged page %d: got %v, want %v", i, err, paging.ErrIdentity)
		}
	}
	if m := tr.Metrics(); m.Corrupt != 2 || m.Identity != 2 {
		t.Errorf("counted %d corrupt, %d of other pages, want 2 and 2", m.Corrupt, m.Identity)
	}
	mustLoad(t, tr, 1, pages[1], found[pages[1]])
}

func TestTornWrite(t *testing.T) {
	cfg := diskConfig(t)
	pages, refs := onDisk(t, cfg, 2, 20_000)
	editSegment(t, cfg, refs[0], func(f *os.File, offset int64) { f.WriteAt(make([]byte, 4096), offset+8192) })
	tr, found := reopen(t, cfg)
	if _, err := load(t.Context(), tr, pages[0], found[pages[0]]); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("load of a torn page: got %v, want %v", err, paging.ErrCorrupt)
	}
	mustLoad(t, tr, 1, pages[1], found[pages[1]])
}

func TestTruncatedSegment(t *testing.T) {
	cfg := diskConfig(t)
	pages, refs := onDisk(t, cfg, 6, 20_480)
	cut := placeOf(refs[3])
	editSegment(t, cfg, refs[3], func(f *os.File, offset int64) { f.Truncate(offset + 100) })
	tr, found := reopen(t, cfg)
	for i, p := range pages {
		if _, ok := found[p]; ok != (placeOf(refs[i]).Offset < cut.Offset) {
			t.Errorf("page %d at %v of a segment cut at %v: found %v", i, placeOf(refs[i]), cut, ok)
		}
		if r := found[p]; r != 0 {
			mustLoad(t, tr, uint64(i), p, r)
		}
	}
	if m := tr.Metrics(); m.RecordsDropped != int64(len(pages)-len(found)) {
		t.Errorf("counted %d dropped records, want %d", m.RecordsDropped, len(pages)-len(found))
	}
	// The file shrinks while it is in use: a counted miss.
	editSegment(t, cfg, refs[0], func(f *os.File, _ int64) { f.Truncate(0) })
	if _, err := load(t.Context(), tr, pages[0], found[pages[0]]); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("load past the end of a file: got %v, want %v", err, paging.ErrCorrupt)
	}
}

func TestMissingSegment(t *testing.T) {
	cfg := diskConfig(t)
	pages, refs := onDisk(t, cfg, 30, 20_480) // 12 a segment
	gone := placeOf(refs[0]).Extent
	if err := os.Remove(filepath.Join(cfg.Dir, segmentName(gone))); err != nil {
		t.Fatal(err)
	}
	tr, found := reopen(t, cfg)
	for i, p := range pages {
		if _, ok := found[p]; ok != (placeOf(refs[i]).Extent != gone) {
			t.Errorf("page %d of segment %d: found %v", i, placeOf(refs[i]).Extent, ok)
		}
	}
	// The number of the lost segment is not used again.
	more := fill(t, tr, 1000, 20_480)
	for _, r := range more {
		if placeOf(r).Extent == gone {
			t.Fatalf("segment %d came back", gone)
		}
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	_, again := reopen(t, cfg)
	if want := len(found) + len(more); len(again) != want {
		t.Errorf("%d pages after another restart, want %d", len(again), want)
	}
}

// TestForeignRecords puts into the index what no version wrote.
func TestForeignRecords(t *testing.T) {
	mem := vfs.NewMem()
	tr := mustOpen(t, memConfig(mem, nil))
	p, r := mustStore(t, tr, 1, 4096)
	m := tr.manifest
	good := record{ref: refOf(paging.Place{Extent: 1, Offset: 4096}), namespace: 1, bytes: 4096}
	taken, unknown, outside, inside, confused := good, good, good, good, good
	taken.ref, taken.bytes = r+100, 8192 // another size in the same segment
	unknown.namespace, unknown.ref = 99, r+2
	outside.ref = refOf(paging.Place{Extent: 1, Offset: 1 << 30})
	inside.ref, inside.bytes = r+5, 4096*4
	confused.ref, confused.key = r+4, p.Key // the key of another page
	if err := m.commit([]record{taken, unknown, outside, inside, confused}, nil); err != nil {
		t.Fatal(err)
	}
	raw := map[string][]byte{
		"p":                             []byte("short key"),
		"p12345678":                     []byte("no record"),
		string(appendPageKey(nil, r+7)): flipped(appendRecord(nil, &good)), // fails its checksum
		string(appendPageKey(nil, r+8)): appendRecord(nil, &good),          // of another slot
	}
	err := m.do(nil, func(db *pebble.DB) error {
		for k, v := range raw {
			if err := db.Set([]byte(k), v, pebble.Sync); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	again, found := reopen(t, memConfig(mem, nil))
	if len(found) != 1 || found[p] != r {
		t.Errorf("recovered %d pages, want the 1 that was stored", len(found))
	}
	if n := again.Metrics().RecordsDropped; n != 9 {
		t.Errorf("%d records dropped, want 9", n)
	}
	mustLoad(t, again, 1, p, r)
	until(t, "records removed", func() bool { return again.Usage().DeadBytes == 0 })
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	third, _ := reopen(t, memConfig(mem, nil))
	if n := third.Metrics().RecordsDropped; n != 1 { // the key that names no slot stays
		t.Errorf("%d records dropped by the second restart, want 1", n)
	}
}

func flipped(b []byte) []byte {
	b[len(b)/2] ^= 4
	return b
}

// snapshot hashes names, modes and contents of a directory.
func snapshot(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(h, path, info.Mode(), info.Size(), info.ModTime())
		if !d.IsDir() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			h.Write(b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestRefusedDirectories opens what is not a tier of this format: a typed
// refusal, and the directory as before.
func TestRefusedDirectories(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, dir string){
		"newer format": func(t *testing.T, dir string) { write(t, filepath.Join(dir, formatName), "kvtier-nvme 2\n") },
		"no format":    func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, formatName)) },
		"empty format": func(t *testing.T, dir string) { write(t, filepath.Join(dir, formatName), "") },
		"foreign file": func(t *testing.T, dir string) { write(t, filepath.Join(dir, "thesis.doc"), "years of work") },
		"foreign segment": func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, segmentDir, "holiday.jpg"), "sun")
		},
		"missing index": func(t *testing.T, dir string) { os.RemoveAll(filepath.Join(dir, indexName)) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := diskConfig(t)
			onDisk(t, cfg, 3, 5000)
			spoil(t, cfg.Dir)
			if err := os.Remove(filepath.Join(cfg.Dir, lockName)); err != nil { // as in a copy: it is not made anew
				t.Fatal(err)
			}
			before := snapshot(t, cfg.Dir)
			tr, err := Open(cfg)
			if !errors.Is(err, paging.ErrIncompatible) {
				t.Errorf("open: %v, %v, want %v", tr, err, paging.ErrIncompatible)
			}
			if after := snapshot(t, cfg.Dir); after != before {
				t.Error("the refused directory has changed")
			}
		})
	}
	t.Run("never a tier", func(t *testing.T) {
		cfg := diskConfig(t)
		write(t, filepath.Join(cfg.Dir, "index", "000001.sst"), "of another program")
		before := snapshot(t, cfg.Dir)
		if _, err := Open(cfg); !errors.Is(err, paging.ErrIncompatible) {
			t.Errorf("open: %v, want %v", err, paging.ErrIncompatible)
		}
		if after := snapshot(t, cfg.Dir); after != before {
			t.Error("the refused directory has changed")
		}
	})
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestInterruptedCreation opens what a crash leaves of each step of creation.
func TestInterruptedCreation(t *testing.T) {
	for name, files := range map[string][]string{
		"nothing":             {},
		"lock":                {lockName},
		"format half written": {lockName, formatName + tmpSuffix},
		"lost+found":          {"lost+found"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := diskConfig(t)
			for _, f := range files {
				write(t, filepath.Join(cfg.Dir, f), "")
			}
			tr := mustOpen(t, cfg)
			mustStore(t, tr, 1, 4096)
		})
	}
	t.Run("format, no index", func(t *testing.T) {
		cfg := diskConfig(t)
		write(t, filepath.Join(cfg.Dir, formatName), formatText)
		mustStore(t, mustOpen(t, cfg), 1, 4096)
	})
	t.Run("segment half written", func(t *testing.T) {
		cfg := diskConfig(t)
		pages, _ := onDisk(t, cfg, 2, 4096)
		tmp := filepath.Join(cfg.Dir, segmentName(77)+tmpSuffix)
		write(t, tmp, "half")
		tr, found := reopen(t, cfg)
		mustLoad(t, tr, 1, pages[1], found[pages[1]])
		if _, err := os.Stat(tmp); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", tmp, err)
		}
	})
}

func TestTwoOpeners(t *testing.T) {
	cfg := diskConfig(t)
	tr := mustOpen(t, cfg)
	if _, err := Open(cfg); !errors.Is(err, ErrInUse) || !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("a second opener: %v, want %v", err, ErrInUse)
	}
	mustStore(t, tr, 1, 4096)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	if _, found := reopen(t, cfg); len(found) != 1 {
		t.Errorf("after the first has closed: %d pages, want 1", len(found))
	}
}

func TestConfig(t *testing.T) {
	_, err := Open(Config{BudgetBytes: 1, SegmentBytes: 100, Readers: -1, HangAfter: -1})
	if !errors.Is(err, paging.ErrInvalid) {
		t.Fatalf("open: %v, want %v", err, paging.ErrInvalid)
	}
	for _, field := range []string{"Dir", "BudgetBytes", "SegmentBytes", "Readers", "HangAfter"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("the error does not name %s: %v", field, err)
		}
	}
}

// FuzzRecord decodes anything: damage is an error, and what decodes encodes to
// the same bytes.
func FuzzRecord(f *testing.F) {
	page, _ := tiertest.Page(testNS, 3, 5000)
	good := record{ref: 1<<32 | 7, namespace: 2, name: page.ID.Name, part: 5, bytes: 5000, sum: page.Sum, key: page.Key, meta: 9}
	f.Add(appendPageKey(nil, good.ref), appendRecord(nil, &good))
	f.Add([]byte("p"), []byte{recordV1})
	f.Fuzz(func(t *testing.T, key, value []byte) {
		rec, err := decodeRecord(key, value)
		if err != nil {
			if !errors.Is(err, paging.ErrCorrupt) && !errors.Is(err, paging.ErrIncompatible) {
				t.Errorf("error %v is not typed", err)
			}
			return
		}
		if string(appendPageKey(nil, rec.ref)) != string(key) || string(appendRecord(nil, &rec)) != string(value) {
			t.Errorf("%x = %x decodes to %+v, which encodes otherwise", key, value, rec)
		}
	})
}

// TestRecordDamage flips each bit of a record: none goes unnoticed.
func TestRecordDamage(t *testing.T) {
	page, _ := tiertest.Page(testNS, 3, 5000)
	good := record{ref: 1<<32 | 7, namespace: 2, name: page.ID.Name, part: 5, bytes: 5000, sum: page.Sum, key: page.Key, meta: 9}
	key, value := appendPageKey(nil, good.ref), appendRecord(nil, &good)
	if rec, err := decodeRecord(key, value); err != nil || rec != good {
		t.Fatalf("decoded %+v, %v, want %+v", rec, err, good)
	}
	for bit := range 8 * len(value) {
		value[bit/8] ^= 1 << (bit % 8)
		if _, err := decodeRecord(key, value); err == nil {
			t.Errorf("bit %d flipped: no error", bit)
		}
		value[bit/8] ^= 1 << (bit % 8)
	}
	key[5] ^= 1
	if _, err := decodeRecord(key, value); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("under the key of another slot: %v, want %v", err, paging.ErrCorrupt)
	}
}

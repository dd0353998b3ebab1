package bench

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/paging/shm"
)

func TestFlipBits(t *testing.T) {
	dir := t.TempDir()
	segment, manifest := filepath.Join(dir, "1.seg"), filepath.Join(dir, "manifest")
	zeros := make([]byte, 2*damageLeast)
	for file, data := range map[string][]byte{segment: zeros, manifest: zeros[:4096]} {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n, err := flipBits(dir, 100, rand.New(rand.NewPCG(1, 2)))
	if err != nil || n != 100 {
		t.Fatalf("flipped %d bits, %v", n, err)
	}
	got, err := os.ReadFile(segment)
	if err != nil {
		t.Fatal(err)
	}
	ones := 0
	for _, b := range got {
		for ; b != 0; b &= b - 1 {
			ones++
		}
	}
	if ones < 95 || ones > 100 { // two flips of one bit undo each other
		t.Errorf("%d bits differ, want about 100", ones)
	}
	if got, _ := os.ReadFile(manifest); !bytes.Equal(got, zeros[:4096]) {
		t.Error("a file that is no segment was damaged")
	}
	if n, err := flipBits(t.TempDir(), 5, rand.New(rand.NewPCG(1, 2))); n != 0 || err != nil {
		t.Errorf("nothing to damage: %d, %v", n, err)
	}
}

func TestSharedReadOnly(t *testing.T) {
	m, err := shm.CreateExtent("kvtier-test", 1<<20, shm.Options{NUMANode: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ro, err := shm.MapReadOnly(m.FD(), m.Size())
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	var maps sharedReadOnly
	for name, c := range map[string]struct {
		b    []byte
		want bool
	}{
		"mapped read-only": {ro.Bytes()[4096:8192], true},
		"mapped writable":  {m.Bytes()[4096:8192], false},
		"private":          {make([]byte, 4096), false},
		"empty":            {nil, false},
	} {
		if got, err := maps.holds(c.b); err != nil || got != c.want {
			t.Errorf("%s: %v %v, want %v", name, got, err, c.want)
		}
	}
}

//go:build sabotage

package nvme

import (
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func sabotaged(t *testing.T, name string) {
	sabotage.Set(name)
	t.Cleanup(func() { sabotage.Set() })
}

// TestSabotageSkipVerify: a flipped bit reaches the caller.
func TestSabotageSkipVerify(t *testing.T) {
	cfg := diskConfig(t)
	pages, refs := onDisk(t, cfg, 1, 10_000)
	editSegment(t, cfg, refs[0], func(f *os.File, offset int64) { f.WriteAt([]byte("x"), offset+77) })
	sabotaged(t, "skip-verify")
	tr, found := reopen(t, cfg)
	dst, err := load(t.Context(), tr, pages[0], found[pages[0]])
	if err != nil || tiertest.Identity(testNS, 0, dst) == pages[0] {
		t.Errorf("load of a damaged page: %v, and the bytes are right", err)
	}
}

// TestSabotageNeighbourPage: another page's bytes reach the caller.
func TestSabotageNeighbourPage(t *testing.T) {
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	wrong := 0
	sabotaged(t, "neighbour-page")
	for n := range uint64(4) {
		p, r := mustStore(t, tr, n, 4096)
		if dst, err := load(t.Context(), tr, p, r); err == nil && tiertest.Identity(testNS, n, dst) != p {
			wrong++
		}
	}
	if wrong == 0 {
		t.Error("all bytes are right")
	}
}

// TestSabotagePublishFirst: the crash test finds what it is there to find, and
// so does a load that comes at once.
func TestSabotagePublishFirst(t *testing.T) {
	sabotaged(t, "publish-first")
	tr := mustOpen(t, memConfig(vfs.NewMem(), nil))
	p, r := mustStore(t, tr, 1, 20_000)
	if _, err := load(t.Context(), tr, p, r); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("load before the bytes are there: %v, want %v", err, paging.ErrCorrupt)
	}
	c := &crashes{rng: rand.New(rand.NewPCG(tiertest.Seed(t), 0)), fs: vfs.NewCrashableMem(), refs: map[tier.Page]tier.Ref{}}
	problems := 0
	for range 10 {
		problems += len(c.round(t))
	}
	if problems == 0 {
		t.Error("10 crashes show nothing")
	}
}

package nvme

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

const killDirEnv = "KVTIER_NVME_TEST_KILL_DIR"

// TestKill kills a process that stores and frees pages on the real file system,
// again and again: what it had reported as stored, and not as being freed, is
// there; all that is there is right.
func TestKill(t *testing.T) {
	if os.Getenv(killDirEnv) != "" {
		killMe(t)
		return
	}
	seed := tiertest.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	dir := filepath.Join(t.TempDir(), "tier")
	for round := range tiertest.Rounds(4) {
		must := runAndKill(t, dir, uint64(round)<<32, 20+rng.IntN(400))
		tr, found := reopen(t, Config{Dir: dir, BudgetBytes: testBudget, SegmentBytes: testSegment})
		there := map[uint64]bool{}
		for p, r := range found {
			there[nameNumber(p)] = true
			mustLoad(t, tr, nameNumber(p), p, r)
			if nameNumber(p)%3 == 0 {
				tr.Free(r)
			}
		}
		for n := range must {
			if !there[n] {
				t.Errorf("round %d: page %x was stored and is gone", round, n)
			}
		}
		if len(must) == 0 {
			t.Errorf("round %d: nothing was stored", round)
		}
		if err := tr.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seed %d", seed)
}

// runAndKill runs killMe until it has reported so many lines.
func runAndKill(t *testing.T, dir string, first uint64, lines int) map[uint64]bool {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKill$")
	cmd.Env = append(os.Environ(), childEnv+"=1", killDirEnv+"="+dir, fmt.Sprintf("KVTIER_SEED=%d", first+1))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	must := map[uint64]bool{}
	scanner := bufio.NewScanner(out)
	for scanner.Scan() {
		var sign rune
		var n uint64
		if _, err := fmt.Sscanf(scanner.Text(), "%c%d", &sign, &n); err != nil {
			t.Fatalf("the child says %q", scanner.Text())
		}
		if must[n] = true; sign == '-' {
			delete(must, n)
		}
		if lines--; lines == 0 {
			if err := cmd.Process.Kill(); err != nil { // what it still wrote is read on
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil || lines > 0 {
		t.Fatalf("the child ended by itself, %d lines early: %v", lines, err)
	}
	return must
}

// killMe stores and frees pages until it is killed.
func killMe(t *testing.T) {
	tr, found := reopen(t, Config{Dir: os.Getenv(killDirEnv), BudgetBytes: testBudget, SegmentBytes: testSegment, AheadBytes: testSegment})
	var live []tier.Page
	refs := map[tier.Page]tier.Ref{}
	for p, r := range found {
		live, refs[p] = append(live, p), r
	}
	seed := tiertest.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	sizes := [...]uint32{100, 4096, 20_000, 65_536}
	for n := seed; ; n++ {
		if p, r, err := store(t.Context(), tr, n, sizes[rng.IntN(len(sizes))]); err == nil {
			fmt.Printf("+%d\n", n)
			live, refs[p] = append(live, p), r
		}
		for len(live) > 60 {
			i := rng.IntN(len(live))
			p := live[i]
			fmt.Printf("-%d\n", nameNumber(p))
			tr.Free(refs[p])
			delete(refs, p)
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
		}
	}
}

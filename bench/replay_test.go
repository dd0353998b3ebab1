package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// smallReplay is the demo with pages of 4 KiB, fewer requests and tiers in
// proportion.
func smallReplay(t *testing.T) ReplayConfig {
	t.Helper()
	trace, err := OpenTrace(ShortTrace)
	if err != nil {
		t.Fatal(err)
	}
	return ReplayConfig{
		Trace: trace, Requests: 200, BlockBytes: 4 << 10, BlockTokens: DefaultBlockTokens, Clients: 1, Seed: 1,
		Node:    NodeConfig{Program: program(t), RAM: 2 << 20, NVMe: 32 << 20, Args: []string{"--staging", "128KiB"}},
		TempDir: t.TempDir(),
	}
}

// mustReplay plays and fails the test for anything that must not be.
func mustReplay(t *testing.T, cfg ReplayConfig) *ReplayReport {
	t.Helper()
	r, err := Replay(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Errorf("%v\n%+v", err, r)
	}
	if r.HitBlocks == 0 || r.CommittedBlocks == 0 {
		t.Errorf("nothing hit or stored: %+v", r)
	}
	left, err := os.ReadDir(cfg.TempDir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	return r
}

func TestReplayHitsAsMuchAsAnyCache(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	var last, total int64
	cfg.Progress = func(done, of int64) { last, total = done, of }
	r := mustReplay(t, cfg)
	if r.Hit != r.BestHit || r.TokenHit != r.BestTokenHit {
		t.Errorf("the NVMe tier has room for all: hit %v and %v in tokens, want %v and %v", r.Hit, r.TokenHit, r.BestHit, r.BestTokenHit)
	}
	if r.HitByTier.NVMe == 0 || r.BytesByPath.InPlace != r.HitBlocks*cfg.BlockBytes {
		t.Errorf("hits %+v, bytes %+v", r.HitByTier, r.BytesByPath)
	}
	if want := r.HitByTier.NVMe * cfg.BlockBytes; r.BytesByPath.NVMeRead < want || r.BytesByPath.NVMeRead > want+want/10 {
		t.Errorf("the node read %d bytes from disk for hits of %d", r.BytesByPath.NVMeRead, want)
	}
	if last != total || total != int64(cfg.Requests) {
		t.Errorf("progress ended at %d of %d", last, total)
	}
}

func TestReplaySurvivesKills(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	cfg.KillAt, cfg.DurableEvery = []float64{0.3, 0.7}, 4
	r := mustReplay(t, cfg)
	if r.Kills != 2 || r.RecoveredPages == 0 || r.DurableBlocks == 0 || r.UnavailableRequests > 2 {
		t.Errorf("%+v", r)
	}
}

func TestReplayWithManyClients(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	cfg.Clients, cfg.KillAt = 4, []float64{0.5}
	mustReplay(t, cfg)
}

func TestReplayFromAnotherMachine(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	cfg.Stream, cfg.Requests, cfg.KillAt = true, 100, []float64{0.5}
	r := mustReplay(t, cfg)
	if r.BytesByPath.InPlace != 0 || r.BytesByPath.StreamRead == 0 || r.BytesByPath.StreamSent == 0 {
		t.Errorf("%+v", r.BytesByPath)
	}
}

func TestReplayWithoutDisk(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	cfg.Node.NVMe = 0
	r := mustReplay(t, cfg)
	if r.HitByTier.NVMe != 0 || r.Hit >= r.BestHit {
		t.Errorf("hit %v of %v, %+v", r.Hit, r.BestHit, r.HitByTier)
	}
}

// TestReplayFindsDamage flips bits of stored pages: they are found by the node,
// served as misses and counted, and nothing else is lost.
func TestReplayFindsDamage(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	cfg.KillAt, cfg.DamageFlips, cfg.DurableEvery = []float64{0.5}, 400, 1
	r := mustReplay(t, cfg)
	if r.FlippedBits != 400 || r.CorruptPages == 0 {
		t.Errorf("%d bits flipped, %d pages found corrupt", r.FlippedBits, r.CorruptPages)
	}
}

func TestReplayEndsWithItsContext(t *testing.T) {
	t.Parallel()
	cfg := smallReplay(t)
	ctx, cancel := context.WithCancel(t.Context())
	cfg.Progress = func(done, _ int64) {
		if done == 10 {
			cancel()
		}
	}
	if _, err := Replay(ctx, cfg); err == nil {
		t.Error("no error")
	}
	if left, err := os.ReadDir(cfg.TempDir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestDaemonThatCannotStart(t *testing.T) {
	dir := t.TempDir()
	_, err := StartDaemon(t.Context(), NodeConfig{Program: program(t), Dir: dir, RAM: 1, NVMe: 0})
	if err == nil {
		t.Fatal("a node with one byte of RAM started")
	}
	if _, err := StartDaemon(t.Context(), NodeConfig{Program: filepath.Join(dir, "absent"), Dir: dir}); err == nil {
		t.Fatal("a program that does not exist started")
	}
}

// rounds is how many rounds a test of chance makes: few in every run, more in
// torture.
func rounds(t *testing.T, few int) int {
	t.Helper()
	if n, err := strconv.Atoi(os.Getenv("KVTIER_TORTURE")); err == nil && n > 0 {
		return n
	}
	return few
}

func TestCrashRounds(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("KVTIER_SEED"), 10, 64); err == nil && s != 0 {
		seed = s
	}
	t.Logf("KVTIER_SEED=%d", seed)
	r, err := Crash(t.Context(), CrashConfig{Rounds: rounds(t, 20), Seed: seed, Node: NodeConfig{Program: program(t)}, TempDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Errorf("%v\n%+v", err, r)
	}
	if r.DurableBlocks == 0 || r.RecoveredBlocks == 0 {
		t.Errorf("nothing was stored or came back: %+v", r)
	}
}

func TestLocalCopiesNothing(t *testing.T) {
	r, err := Local(t.Context(), LocalConfig{PageBytes: 8 << 10, Chains: 8, Calls: 100, Seed: 1, Node: NodeConfig{Program: program(t)}, TempDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil || r.Fetch64US.P50 == 0 || r.EmptyCallUS.P50 == 0 || r.Ratio == 0 || r.UnaryRatio == 0 {
		t.Errorf("%v %+v", err, r)
	}
}

func TestCommitIsMeasured(t *testing.T) {
	r, err := Commit(t.Context(), CommitConfig{PageBytes: 64 << 10, BatchBytes: 4 << 20, Bytes: 16 << 20, Node: NodeConfig{Program: program(t)}, TempDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if r.Bytes != 16<<20 || r.Ratio <= 0 {
		t.Errorf("%+v", r)
	}
}

func TestNoRoomIsToldBefore(t *testing.T) {
	cfg := smallReplay(t)
	cfg.Node.NVMe = 1 << 60
	if _, err := Replay(t.Context(), cfg); !errors.Is(err, paging.ErrNoSpace) || !strings.Contains(err.Error(), "--temp-dir") {
		t.Errorf("%v", err)
	}
}

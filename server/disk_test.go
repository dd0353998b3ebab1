package server_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// A prefetch whose time is over asks the disk for nothing more.
func TestPrefetchEndsAtItsDeadline(t *testing.T) {
	var disk *tiertest.Faulty
	drivers := servertest.Drivers()
	openDisk := drivers.NVMe
	drivers.NVMe = func(ctx context.Context, cfg server.Config, dir string, log *slog.Logger) (tier.Durable, error) {
		d, err := openDisk(ctx, cfg, dir, log)
		disk = &tiertest.Faulty{Durable: d}
		return disk, err
	}
	n := testNode{servertest.Start(t, twoTiers(t), drivers)}
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 300)
	makeRoom(t, c, ns, names)
	gate := make(chan struct{})
	disk.SetLoad(func(context.Context, tier.Page) error { <-gate; return nil })
	defer close(gate)
	ticket, err := c.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: names[:40], Timeout: 300 * time.Millisecond})
	if err != nil || ticket.Admitted < 10 {
		t.Fatalf("prefetch: %+v, %v", ticket, err)
	}
	if reason, err := ticket.Wait(t.Context()); err != nil || reason != client.ReasonTimeout {
		t.Errorf("ended with %v, %v", reason, err)
	}
	// Those that eight readers had begun go on.
	eventually(t, "the others are given up", func() bool { return n.Metrics().Hierarchy.InFlightBytes <= 8*diskPage })
	if m := n.Metrics().Hierarchy; m.PrefetchWasted != int64(ticket.Admitted) || m.ForeseenBytes != 0 {
		t.Errorf("wasted %d of %d, %d bytes held", m.PrefetchWasted, ticket.Admitted, m.ForeseenBytes)
	}
}

// What the disk does and how long engines waited for it is exported.
func TestDiskMetrics(t *testing.T) {
	cfg := twoTiers(t)
	cfg.HTTPListen = "127.0.0.1:0"
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	ns, names := manyBlocks(t, n, c, 300)
	l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names[:50], Timeout: 10 * time.Second})
	if err != nil || l.Usable != 50 {
		t.Fatalf("fetch: %+v, %v", l, err)
	}
	checkLease(t, l, names[:50], 1)
	res, err := http.Get("http://" + n.HTTPAddr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(res.Body)
	if err := errors.Join(err, res.Body.Close()); err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections()
	values := map[string]float64{}
	for _, m := range regexp.MustCompile(`(?m)^(kvtier_\w+) (\S+)$`).FindAllStringSubmatch(string(text), -1) {
		if values[m[1]], err = strconv.ParseFloat(m[2], 64); err != nil {
			t.Fatal(err)
		}
	}
	for name, least := range map[string]float64{
		"kvtier_nvme_reads_total": 10, "kvtier_nvme_read_bytes_total": 10 * diskPage, "kvtier_nvme_read_seconds_total": 1e-6,
		"kvtier_nvme_writes_total": 1, "kvtier_nvme_written_bytes_total": 300 * diskPage, "kvtier_nvme_write_seconds_total": 1e-6,
		"kvtier_nvme_commits_total": 1, "kvtier_nvme_commit_seconds_total": 1e-6, "kvtier_nvme_segments": 1,
		"kvtier_tier_load_waits_total": 1, "kvtier_tier_load_wait_seconds_total": 1e-6,
	} {
		if values[name] < least {
			t.Errorf("%s is %v, want at least %v", name, values[name], least)
		}
	}
}

// A directory whose disk tier has an unknown format is refused as a whole and
// left byte for byte as it was.
func TestDirectoryOfAnUnknownFormatStaysAsItIs(t *testing.T) {
	cfg := twoTiers(t)
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	manyBlocks(t, n, c, 20)
	if err := n.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cfg.Dir, "nvme", "FORMAT"), []byte("kvtier-nvme 99\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(cfg.Dir, "nvme", "LOCK")); err != nil { // as in a copy: it is not made anew
		t.Fatal(err)
	}
	before := contentOf(t, cfg.Dir)
	for range 2 {
		if _, err := server.Open(t.Context(), cfg, server.Options{Drivers: servertest.Drivers()}); !errors.Is(err, paging.ErrIncompatible) {
			t.Fatalf("got %v, want incompatible", err)
		}
	}
	if !maps.Equal(before, contentOf(t, cfg.Dir)) {
		t.Error("the directory was changed")
	}
}

// contentOf is every file below a directory.
func contentOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		files[path] = string(b)
		return err
	})
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	return files
}

// A disk that takes a write and does not answer holds up a stop no longer than
// its bound and the grace: then the error says so, and the process can end.
func TestStopDoesNotWaitForADiskThatHangs(t *testing.T) {
	cfg := twoTiers(t)
	cfg.StopWithin, cfg.FlushAfter = 200*time.Millisecond, time.Hour
	answer, hangs := make(chan struct{}), make(chan struct{}, 1)
	drivers := servertest.Drivers()
	openDisk := drivers.NVMe
	drivers.NVMe = func(ctx context.Context, cfg server.Config, dir string, log *slog.Logger) (tier.Durable, error) {
		d, err := openDisk(ctx, cfg, dir, log)
		disk := &tiertest.Faulty{Durable: d}
		disk.SetStore(func(context.Context, []tier.Page) error {
			select {
			case hangs <- struct{}{}:
			default:
			}
			<-answer
			return nil
		})
		return disk, err
	}
	s, err := server.Open(t.Context(), cfg, server.Options{Drivers: drivers})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx) }()
	n := testNode{&servertest.Node{Server: s, Config: cfg.WithDefaults()}}
	c := n.client(t, client.Config{})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(diskPage, 1))
	if err != nil {
		t.Fatal(err)
	}
	write(t, c, ns, blockNames(0, 4))
	began := time.Now()
	stop()
	select {
	case err = <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the node did not stop within 20 s")
	}
	if !errors.Is(err, paging.ErrIO) {
		t.Errorf("stop with a disk that hangs: %v, want an I/O error", err)
	}
	if d := time.Since(began); d < cfg.StopWithin {
		t.Errorf("stopped after %v, before its time was over", d)
	}
	select {
	case <-hangs:
	default:
		t.Error("nothing was written: the test shows nothing")
	}
	close(answer) // what hung gives back the rest
	eventually(t, "the directory is free", func() bool {
		again, err := server.Open(t.Context(), cfg, server.Options{Drivers: servertest.Drivers()})
		return err == nil && again.Close() == nil
	})
}

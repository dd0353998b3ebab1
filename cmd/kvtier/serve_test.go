package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lockedBuffer takes what a command prints while it runs; first is closed when
// something was printed.
type lockedBuffer struct {
	mu    sync.Mutex
	b     bytes.Buffer
	once  sync.Once
	first chan struct{}
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.once.Do(func() { close(l.first) })
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startServe runs "serve" until the test ends and returns its socket.
func startServe(t *testing.T, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "k.sock")
	out, errs := &lockedBuffer{first: make(chan struct{})}, &lockedBuffer{first: make(chan struct{})}
	root := newRoot(out, errs)
	root.SetArgs(append([]string{"serve", "--dir", filepath.Join(dir, "data"), "--socket", socket, "--ram", "16MiB", "--nvme", "32MiB", "--http-listen", "off"}, args...))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("serve ended with %v\n%s", err, errs)
		}
	})
	select {
	case <-out.first:
	case err := <-done:
		done <- nil
		t.Fatalf("serve did not start: %v\n%s", err, errs)
	}
	return socket
}

func TestServeAndLook(t *testing.T) {
	socket := startServe(t)
	name := store(t, socket)
	for _, c := range []struct{ args, want string }{
		{"status", "ready"},
		{"status -o json", `"attachment_list"`},
		{"tiers", "nvme"},
		{"tiers -o json", `"budget_bytes": 33554432`},
		{"blocks list", name[:16]},
		{"blocks list --tier ram --limit 1 -o json", `"name": "` + name},
		{"blocks inspect --verify " + name[:8], "kvtier-test"},
		{"blocks inspect --verify -o json " + name, `"verdict": "ok"`},
	} {
		code, stdout, stderr := kvtier(t, append(strings.Fields(c.args), "--socket", socket)...)
		if code != exitOK || !strings.Contains(stdout, c.want) {
			t.Errorf("kvtier %s: exit %d, want %q in\n%s%s", c.args, code, c.want, stdout, stderr)
		}
		if strings.Contains(c.args, "json") && !json.Valid([]byte(stdout)) {
			t.Errorf("kvtier %s: not JSON:\n%s", c.args, stdout)
		}
	}
	if code, _, stderr := kvtier(t, "blocks", "inspect", "0123456789", "--socket", socket); code != exitFailed || !strings.Contains(stderr, "not found") {
		t.Errorf("an absent block: exit %d, %s", code, stderr)
	}
}

// store stores one block and returns its name.
func store(t *testing.T, socket string) string {
	t.Helper()
	c, err := client.Open(t.Context(), client.Config{Socket: socket, Engine: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	ns, err := c.RegisterNamespace(t.Context(), paging.Namespace{Layout: paging.Layout{
		Model: "kvtier-test", KVDType: "bfloat16", Attention: "gqa", Layers: 1, EngineLayout: "test", TP: 1, PP: 1, CP: 1,
		HashAlgorithm: "test", BlockTokens: 16, Parts: []paging.Part{{Name: "kv", PageBytes: 5000, BlocksPerPage: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	name := paging.BlockName{0xab, 0xcd, 0xef, 0x01}
	out, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: []paging.BlockName{name}}, client.CommitOptions{},
		func(_, _ int, dst []byte) error { clear(dst); return nil })
	if err != nil || out[0] != client.OutcomeCommitted {
		t.Fatalf("%v, %v", out, err)
	}
	return name.String()
}

func TestReadyLine(t *testing.T) {
	var out lockedBuffer
	out.first = make(chan struct{})
	root := newRoot(&out, &bytes.Buffer{})
	dir := t.TempDir()
	root.SetArgs([]string{"serve", "-o", "json", "--nvme", "0", "--socket", filepath.Join(dir, "k.sock"), "--ram", "4MiB", "--listen", "127.0.0.1:0", "--http-listen", "off"})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	<-out.first
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	var ready struct {
		State, Socket, Listen, Peers string
		PID                          int
	}
	if err := json.Unmarshal([]byte(out.String()), &ready); err != nil || ready.State != "ready" || ready.PID != os.Getpid() || strings.HasSuffix(ready.Listen, ":0") || ready.Peers != "off" {
		t.Errorf("%s: %v", out.String(), err)
	}
}

func TestPrintConfigShowsOrigins(t *testing.T) {
	t.Setenv("KVTIER_LEASE_TTL", "7s")
	file := writeConfig(t, "nvme: 3GiB\ntenants:\n- name: a\n  uids: [1]\n  tokens:\n  - secret: 0123456789abcdef\n")
	code, stdout, stderr := kvtier(t, "serve", "--print-config", "--config", file, "--ram", "2GiB", "-o", "json")
	if code != exitOK {
		t.Fatal(stderr)
	}
	var got struct{ Settings []printedSetting }
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string][2]string{
		"ram": {"2GiB", originFlag}, "nvme": {"3GiB", originFile}, "lease-ttl": {"7s", originEnv}, "log-level": {"info", originDefault}, "staging": {"64MiB", originDefault},
	}
	for _, s := range got.Settings {
		if w, ok := want[s.Name]; ok && w != [2]string{s.Value, s.Origin} {
			t.Errorf("%+v, want %v", s, w)
		}
		delete(want, s.Name)
	}
	if len(want) > 0 {
		t.Errorf("not printed: %v", want)
	}
	if strings.Contains(stdout, "0123456789abcdef") {
		t.Error("a secret was printed")
	}
}

func TestServeRefusesWhatCannotWork(t *testing.T) {
	dir := t.TempDir()
	code, _, stderr := kvtier(t, "serve", "--dir", dir, "--socket", filepath.Join(dir, "k.sock"), "--ram", "900TiB")
	if code != exitUsage || !strings.Contains(stderr, "memory:") || !strings.Contains(stderr, "lower ram to") {
		t.Errorf("exit %d, %s", code, stderr)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("something was touched: %v, %v", left, err)
	}
}

func TestTwoNodesOnOneDirectory(t *testing.T) {
	socket := startServe(t)
	dir := filepath.Join(filepath.Dir(socket), "data")
	code, _, stderr := kvtier(t, "serve", "--dir", dir, "--socket", socket+"2", "--handoff-socket", socket+"3", "--ram", "16MiB", "--nvme", "32MiB", "--http-listen", "off")
	if code != exitFailed || !strings.Contains(stderr, dir) {
		t.Errorf("exit %d, %s", code, stderr)
	}
}

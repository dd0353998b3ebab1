package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/paging"
)

// kvtier runs a command line and returns its exit code and what it printed.
func kvtier(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(args, &out, &err)
	return code, out.String(), err.String()
}

func TestExitCodes(t *testing.T) {
	t.Setenv("KVTIER_SOCKET", t.TempDir()+"/absent.sock")
	for _, c := range []struct {
		args string
		code int
		want string // in what is printed, either way
	}{
		{"", exitOK, "kvtier demo"},
		{"--version", exitOK, "version"},
		{"bench policy --policy lru --capacity 100", exitOK, "block hit rate"},
		{"bench policy --policy lru --capacity 100 -o json", exitOK, `"token_hit"`},
		{"status", exitFailed, "is a node running at"},
		{"tiers -o json", exitFailed, "absent.sock"},
		{"blocks list", exitFailed, "absent.sock"},
		{"stauts", exitUsage, `did you mean "status"?`},
		{"bench polcy", exitUsage, `did you mean "policy"?`},
		{"zzzzzzzz", exitUsage, "see kvtier --help"},
		{"status now", exitUsage, "takes no argument"},
		{"status --sockt x", exitUsage, "unknown flag"},
		{"status -o xml", exitUsage, "neither table nor json"},
		{"status --socket a --address b", exitUsage, "give one of them"},
		{"status --token @/absent", exitUsage, "--token"},
		{"status --address h:1 --tls-ca /absent", exitUsage, "--tls-ca"},
		{"status --address example.com:1 --token abc", exitUsage, "in the clear"},
		{"blocks inspect", exitUsage, "wants one argument"},
		{"blocks list --tier tape", exitUsage, "none of hbm, ram, nvme"},
		{"blocks list --namespace 12", exitUsage, "64 hex digits"},
		{"blocks list --limit -1", exitUsage, "negative"},
		{"bench policy --policy lfru", exitUsage, "want one of"},
		{"bench policy --capacity 0", exitUsage, "at least 1"},
		{"bench policy --trace /absent", exitUsage, "/absent"},
		{"bench replay --ram lots", exitUsage, "lots"},
		{"bench replay --kill-at 2", exitUsage, "--kill-at"},
		{"bench replay --simulate --trace conversation_500 --nodes 3 -o json", exitOK, `"remote_hit_blocks"`},
		{"bench replay --simulate --ram 1GiB", exitUsage, "--ram means nothing"},
		{"bench replay --nodes 3", exitUsage, "is for --simulate"},
		{"bench replay --simulate --nodes 0", exitUsage, "--nodes"},
		{"bench replay --simulate --route nearest", exitUsage, "want one of random"},
		{"bench replay --simulate --policy lfru", exitUsage, "want one of"},
		{"snapshot inspect ../../server/directory/testdata/v1/snapshot", exitOK, "left"},
		{"snapshot inspect ../../server/directory/testdata/v1/snapshot -o json", exitOK, `"whole": true`},
		{"drain", exitUsage, "wants one argument, a node"},
		{"drain a --deadline -1s", exitUsage, "not negative"},
		{"drain a --max-bandwidth fast", exitUsage, "fast"},
		{"undrain a -o json", exitFailed, "absent.sock"},
		{"audit --limit 0", exitUsage, "at least 1"},
		{"rebalance aply", exitUsage, `did you mean "apply"?`},
		{"rebalance apply /absent", exitUsage, "/absent"},
		{"rebalance plan --bytes -1", exitUsage, "not negative"},
		{"rebalance status", exitFailed, "absent.sock"},
		{"bench remote --page-bytes 1", exitUsage, "--page-bytes"},
		{"snapshot inspect /absent", exitUsage, "/absent"},
		{"snapshot inspect", exitUsage, "wants one argument"},
		{"bench replay --damage 3", exitUsage, "--kill-at"},
		{"bench crash --rounds 0", exitUsage, "at least 1"},
		{"bench commit --page-bytes 1GiB", exitUsage, "--page-bytes"},
		{"serve --config /absent", exitUsage, "/absent"},
		{"serve --ram 1", exitUsage, "ram"},
		{"doctor --ram 1", exitUsage, "ram"},
	} {
		code, stdout, stderr := kvtier(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.want) {
			t.Errorf("kvtier %s: exit %d, want %d with %q\n%s%s", c.args, code, c.code, c.want, stdout, stderr)
		}
		if code != exitOK && stdout != "" {
			t.Errorf("kvtier %s: a failure printed to stdout: %s", c.args, stdout)
		}
	}
}

func TestErrorsAreMappedOnce(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, exitOK},
		{errors.New("x"), exitFailed},
		{paging.ErrInvalid, exitFailed},
		{usagef("x"), exitUsage},
		{fmt.Errorf("around: %w", usagef("x")), exitUsage},
	} {
		var b bytes.Buffer
		if got := exitCode(c.err, &b); got != c.code {
			t.Errorf("%v: exit %d, want %d", c.err, got, c.code)
		}
		if c.err != nil && !strings.HasPrefix(b.String(), "kvtier: ") {
			t.Errorf("%v: printed %q", c.err, b.String())
		}
	}
}

func TestPolicyEqualsTheKnownRates(t *testing.T) {
	// Of the 500 requests, with room for all: no cache can hit more.
	code, stdout, stderr := kvtier(t, "bench", "policy", "--policy", "lru", "--capacity", "1000000", "-o", "json")
	var r struct {
		Hit      float64 `json:"hit"`
		TokenHit float64 `json:"token_hit"`
	}
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK {
		t.Fatalf("exit %d, %v: %s", code, err, stderr)
	}
	if r.Hit != .1612 || r.TokenHit != .1639 {
		t.Errorf("hit %v, token_hit %v, want .1612 and .1639", r.Hit, r.TokenHit)
	}
}

func TestEveryVerbHasHelp(t *testing.T) {
	for _, args := range []string{"serve", "status", "tiers", "blocks", "blocks list", "blocks inspect", "doctor", "demo", "bench",
		"bench policy", "bench replay", "bench local", "bench nvme", "bench commit", "bench index", "bench crash", "bench directory", "bench remote", "bench stream", "cert", "cert ca", "cert issue", "cert gossip-key", "snapshot", "snapshot inspect"} {
		code, stdout, _ := kvtier(t, append(strings.Fields(args), "--help")...)
		if code != exitOK || !strings.Contains(stdout, "Usage:") || !strings.Contains(stdout, "--output") {
			t.Errorf("kvtier %s --help: exit %d\n%s", args, code, stdout)
		}
	}
}

func TestNearest(t *testing.T) {
	for word, want := range map[string]string{"ramm": "ram", "nmve": "nvme", "flush_after": "flush-after", "xyz": "", "soket": "socket"} {
		if got := nearest(word, []string{"ram", "nvme", "flush-after", "socket"}); got != want {
			t.Errorf("%q: %q, want %q", word, got, want)
		}
	}
}

// The certificate must be that of the host, wherever the address came from.
func TestServerNameComesFromTheAddress(t *testing.T) {
	for address, want := range map[string]string{"node1:7440": "node1", "[2001:db8::1]:7440": "2001:db8::1", "127.0.0.1:7440": "127.0.0.1"} {
		t.Setenv("KVTIER_ADDRESS", address)
		cfg, err := (&target{tls: true}).config()
		if err != nil {
			t.Fatal(err)
		}
		if cfg.TLS.ServerName != want {
			t.Errorf("%s: the certificate must name %q, want %q", address, cfg.TLS.ServerName, want)
		}
	}
	t.Setenv("KVTIER_ADDRESS", "node1")
	if _, err := (&target{tls: true}).config(); err == nil {
		t.Error("an address without a port was accepted")
	}
}

// A damaged snapshot is shown as far as it goes, and fails.
func TestDamagedSnapshot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "snapshot")
	b, err := os.ReadFile("../../server/directory/testdata/v1/snapshot")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b[:len(b)-4], 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := kvtier(t, "snapshot", "inspect", file)
	if code != exitFailed || !strings.Contains(stdout, "DAMAGED") || !strings.Contains(stderr, "corrupt") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/server/trust"
)

func TestCert(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "certs")
	made := func(args ...string) certOut {
		t.Helper()
		code, stdout, stderr := kvtier(t, append(args, "--dir", dir, "-o", "json")...)
		var c certOut
		if err := json.Unmarshal([]byte(stdout), &c); err != nil || code != exitOK {
			t.Fatalf("%v: exit %d, %v: %s", args, code, err, stderr)
		}
		return c
	}
	ca := made("cert", "ca", "--cluster", "prod")
	if left := time.Until(ca.NotAfter); left < 9*365*24*time.Hour || ca.Cluster != "prod" {
		t.Errorf("authority: %+v", ca)
	}
	node := made("cert", "issue", "--node", "a", "--host", "a.example.org", "--host", "10.0.0.1", "--valid-for", "48h")
	if left := time.Until(node.NotAfter); node.Identity != "kvtier://prod/node/a" || left > 48*time.Hour || left < 47*time.Hour {
		t.Errorf("node: %+v", node)
	}
	engine := made("cert", "issue", "--client", "vllm", "--tenant", "chat")
	if engine.Identity != "kvtier://prod/client/vllm?role=engine&tenant=chat" {
		t.Errorf("client: %+v", engine)
	}
	// What was made is what a node reads.
	for _, c := range []certOut{node, engine} {
		src, err := trust.Open(trust.Files{Cert: c.Certificate, Key: c.Key, CA: c.CA}, nil)
		if err != nil || src.Identity().String() != c.Identity {
			t.Errorf("%s: %v", c.Certificate, err)
		}
		for _, f := range []string{c.Certificate, c.Key} {
			if info, err := os.Stat(f); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", f, info.Mode(), err)
			}
		}
	}
	before, err := os.ReadFile(node.Key)
	if err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, "gossip.key")
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"cert issue --node a --dir " + dir, exitFailed, "--force replaces it"},
		{"cert ca --dir " + dir, exitFailed, "--force replaces it"},
		{"cert issue --node a --id 00112233445566778899aabbccddeeff --force --dir " + dir, exitOK, "kvtier://prod/node/a"},
		{"cert issue --node b --id 0011 --dir " + dir, exitUsage, "32 hex digits"},
		{"cert issue --dir " + dir, exitUsage, "--client"},
		{"cert issue --node a --client b --dir " + dir, exitUsage, "--client"},
		{"cert issue --node a/b --dir " + dir, exitUsage, "want 1 to 64"},
		{"cert issue --node c --tenant t --dir " + dir, exitUsage, "neither role nor tenant"},
		{"cert issue --client c --dir " + dir, exitUsage, "needs a tenant"},
		{"cert issue --client c --role root --dir " + dir, exitUsage, "role"},
		{"cert issue --node c --dir " + dir + "/absent", exitFailed, "kvtier cert ca"},
		{"cert ca --cluster a.b --dir " + dir, exitUsage, "cluster"},
		{"cert gossip-key --file " + key, exitOK, key},
		{"cert gossip-key --file " + key, exitFailed, "--force replaces it"},
	} {
		code, stdout, stderr := kvtier(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.want) {
			t.Errorf("kvtier %s: exit %d, want %d with %q\n%s%s", c.args, code, c.code, c.want, stdout, stderr)
		}
	}
	if after, err := os.ReadFile(node.Key); err != nil || string(after) == string(before) {
		t.Errorf("--force did not replace the key (%v)", err)
	}
	if k, err := trust.ReadGossipKey(key); err != nil || len(k) != trust.GossipKeyBytes {
		t.Errorf("gossip key: %x, %v", k, err)
	}
}

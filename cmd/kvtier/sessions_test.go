package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares what was printed with a file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s (go test ./cmd/kvtier -update writes it anew)\ngot\n%swant\n%s", path, got, want)
	}
}

func someSessions() []client.SessionInfo {
	opened := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return []client.SessionInfo{
		{Session: "chat-42", Tenant: "blue", Namespace: strings.Repeat("ab", 32), Model: "m", Owner: strings.Repeat("01", 16), OwnerName: "gpu-7", OwnerAddress: "10.0.0.7:7440", OwnerUp: true,
			Epoch: 3, State: "migrating", Target: strings.Repeat("02", 16), TargetName: "gpu-8", SecondName: "gpu-9", Blocks: 62_500, Tokens: 1_000_000, Priority: 50, TTLS: 3600, IdleS: 1.5,
			Opened: opened, Parent: "chat-41", Moves: 2, AtOwner: []client.TierAmount{{Tier: "hbm", Blocks: 500, Bytes: 1 << 30}, {Tier: "ram", Blocks: 60_000, Bytes: 120 << 30}}, AbsentBlocks: 2000},
		{Session: "agent-1", Tenant: "red", Namespace: strings.Repeat("cd", 32), Owner: strings.Repeat("02", 16), OwnerName: "gpu-8", Epoch: 1, State: "active", Blocks: 3, Tokens: 48, Opened: opened, AtOwner: []client.TierAmount{}},
	}
}

// What people and scripts read of sessions and moves stays as it is.
func TestPrintedSessions(t *testing.T) {
	var b bytes.Buffer
	text, js := &output{w: &b}, &output{w: &b, format: "json"}
	take := func(name string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.String())
		b.Reset()
	}
	all := someSessions()
	take("sessions.txt", printSessions(text, all, true))
	take("sessions.json", js.value(map[string]any{"sessions": all, "more": false}))
	one := &sessionOut{SessionDetail: &client.SessionDetail{SessionInfo: all[0], Runs: []client.SessionRun{
		{First: 0, Blocks: 500, Places: []string{"gpu-7 HBM", "gpu-8"}}, {First: 500, Blocks: 60_000, Places: []string{"gpu-7 RAM"}}, {First: 60_500, Blocks: 2000, Places: []string{}}}},
		History: []client.AuditRecord{{Number: 7, Time: time.Unix(1_700_000_000, 0).UTC(), Who: "cluster", What: "session moved", Subject: "blue/chat-42", Outcome: "from gpu-6 to gpu-7, epoch 3"}}}
	take("session.txt", printSession(text, one))
	take("session.json", js.value(one))
	lonely := &sessionOut{SessionDetail: &client.SessionDetail{SessionInfo: all[1]}, History: []client.AuditRecord{}}
	take("session-lonely.txt", printSession(text, lonely))
	plan := &client.MovePlan{Session: all[0], TargetName: "gpu-8", LackingBlocks: 60_000, LackingBytes: 120 << 30, LackingTokens: 960_000, NowhereBlocks: 2000, CopyS: 96, RecomputeS: 40, RecomputeIsCheaper: true}
	printMovePlan(text, plan, true)
	take("migrate-dry-run.txt", nil)
	move := &client.MoveProgress{State: "copying", Round: 2, LackedBytes: 120 << 30, SentBytes: 30 << 30, LeftBytes: 90 << 30, BytesPerSecond: 1 << 30, LeftS: 90}
	b.WriteString(moveLine(move) + "\n")
	take("migrate-line.txt", nil)
	done := &client.MoveProgress{State: "done", Ended: true, Round: 3, LackedBytes: 120 << 30, SentBytes: 120 << 30, PauseMS: 12.5, Owner: all[0].Target, Epoch: 4}
	take("migrate.json", js.value(migrateOut{Plan: plan, Move: done, Moved: done.Moved()}))
	take("top.json", js.value(topOut{
		Nodes:   []client.NodeStatus{{Node: strings.Repeat("01", 16), Name: "gpu-7", State: "up", Seen: true, Reachable: true, Tiers: []client.TierStatus{}}},
		Traffic: topTraffic{FetchesPerS: 10, HitBlocksPerS: 640, HitRate: .5, RemoteBytesPS: 1 << 20, Leases: 3, Attachments: 1}, Moves: all[:1], Problems: []string{},
	}))
}

// The commands about sessions at a real node.
func TestSessionCommands(t *testing.T) {
	socket := startServe(t, "--bootstrap", "--name", "n1", "--peer-listen", "127.0.0.1:0", "--gossip-listen", "127.0.0.1:0")
	c, err := client.Open(t.Context(), client.Config{Socket: socket, Engine: "test", StallTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ns, err := c.RegisterNamespace(t.Context(), paging.Namespace{Layout: paging.Layout{
		Model: "kvtier-test", KVDType: "bfloat16", Attention: "gqa", Layers: 1, EngineLayout: "test", TP: 1, PP: 1, CP: 1,
		HashAlgorithm: "test", BlockTokens: 16, Parts: []paging.Part{{Name: "kv", PageBytes: 5000, BlocksPerPage: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.OpenSession(t.Context(), client.SessionOptions{Name: "chat-42", Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Append(0, []paging.BlockName{{1}, {2}, {3}}); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		args string
		code int
		want string
	}{
		{"sessions", exitOK, "chat-42"},
		{"sessions --node n1 --tenant default --state active --limit 1 -o json", exitOK, `"blocks": 3`},
		{"sessions --tenant nobody", exitOK, "no sessions"},
		{"sessions --idle 24h", exitOK, "no sessions"},
		{"sessions --state molten", exitFailed, "want active, migrating or frozen"},
		{"sessions --node n9", exitFailed, "n1"},
		{"sessions show chat-42", exitOK, "0 to 2"},
		{"sessions show chat-42 -o json", exitOK, `"runs": [`},
		{"sessions show nobody", exitFailed, "is not known"},
		{"migrate chat-42", exitUsage, "--to NODE"},
		{"migrate chat-42 --to n1 --cancel", exitUsage, "--cancel"},
		{"migrate chat-42 --to n1 --tier tape", exitUsage, "ram or hbm"},
		{"migrate chat-42 --to n1 --dry-run", exitFailed, "at node n1 already"},
		{"migrate chat-42 --cancel", exitOK, "sessions show chat-42"},
		{"top --once --every 100ms", exitOK, "n1"},
		{"top --once --every 100ms -o json", exitOK, `"fetches_per_s"`},
		{"top --every 1ms", exitUsage, "at least 100ms"},
		{"sessions close chat-42", exitOK, "is closed"},
		{"sessions -o json", exitOK, `"sessions": []`},
	} {
		args := append(strings.Fields(x.args), "--socket", socket)
		code, stdout, stderr := kvtier(t, args...)
		if code != x.code || !strings.Contains(stdout+stderr, x.want) {
			t.Errorf("kvtier %s: exit %d, want %d with %q\n%s%s", x.args, code, x.code, x.want, stdout, stderr)
		}
		if x.code == exitOK && strings.Contains(x.args, "json") && !json.Valid([]byte(stdout)) {
			t.Errorf("kvtier %s: not JSON:\n%s", x.args, stdout)
		}
	}
}

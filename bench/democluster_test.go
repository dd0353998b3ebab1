package bench

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// clusterTempDir is short: the sockets of nodes lie below it.
func clusterTempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestDemoCluster(t *testing.T) {
	dir := clusterTempDir(t)
	var last, total int64
	r, err := DemoCluster(t.Context(), DemoClusterConfig{
		Nodes: 3, Requests: 240, Node: NodeConfig{Program: program(t)}, TempDir: dir, Progress: func(done, of int64) { last, total = done, of },
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Errorf("%v\n%+v", err, r)
	}
	if r.RemoteHitBlocks == 0 || r.Hit <= r.HitWithoutDirectory || r.HitWithoutDirectory == 0 || r.ServedMeanwhile == 0 {
		t.Errorf("the cluster is no better than its nodes: %+v", r)
	}
	if len(r.Outages) != 2 || !r.Outages[0].Leader || r.Outages[1].Leader || r.Outages[0].Node == r.Outages[1].Node || r.RecoveryMS <= 0 {
		t.Errorf("outages %+v", r.Outages)
	}
	if last != total || total != 2*r.Requests+actSteps {
		t.Errorf("progress ended at %d of %d", last, total)
	}
	if s := r.Session; s == nil || s.BytesCopied < actBytes || s.Bytes < s.BytesCopied || s.Decodes != 4 || s.PauseMS <= 0 || s.DrainedBytes == 0 || s.Fetches == 0 {
		t.Errorf("the session that moves: %+v", s)
	}
	checkClusterReport(t, r)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// checkClusterReport looks for what people and programs are promised.
func checkClusterReport(t *testing.T, r *ClusterReport) {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"requests", "served_requests", "wrong_pages", "hit_by_tier", "remote_hit_blocks", "hit_without_directory", "recovery_ms", "session"} {
		if _, ok := keys[key]; !ok {
			t.Errorf("the report has no %s", key)
		}
	}
	var table strings.Builder
	if err := WriteTable(&table, r); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{"without directory", "from other nodes", "leader killed", "node killed", "wrong pages", "lost durable blocks", "session moved", "pause", "node drained", "failed fetches"} {
		if !strings.Contains(table.String(), row) {
			t.Errorf("the table has no row %q:\n%s", row, &table)
		}
	}
	r.FailedRequests++
	if err := r.Err(); err == nil || !strings.Contains(err.Error(), "failed") {
		t.Errorf("a failed request is no error: %v", err)
	}
}

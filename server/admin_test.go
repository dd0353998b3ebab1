package server_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/servertest"
)

func TestAdmin(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.Origins = map[string]string{"ram": "flag"}
	n := startNode(t, cfg)
	e := n.raw(t, "", &kvtierv1.Hello{Engine: "vllm", EngineVersion: "1.2", GroupId: "g", GroupSecret: secret})
	ns := e.register(4096, 1)
	names := blockNames(0, 30)
	e.put(ns, names)
	l := e.fetch(ns, names[:3], time.Minute)
	admin := kvtierv1.NewAdminServiceClient(e.conn)

	status, err := admin.GetStatus(t.Context(), &kvtierv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if status.GetState() != "ready" || status.GetVersion() != "test" || status.GetAttachments() != 1 || status.GetLeases() != 1 || len(status.GetProblems()) != 0 {
		t.Errorf("status: %v", status)
	}
	if got := status.GetCounters()["kvtier_tier_committed_blocks_total"]; got != 30 {
		t.Errorf("committed blocks %v, want 30", got)
	}
	origin := ""
	for _, c := range status.GetConfig() {
		if c.GetName() == "ram" {
			origin = c.GetValue() + " from " + c.GetOrigin()
		}
	}
	if origin != "32MiB from flag" {
		t.Errorf("ram is %q", origin)
	}
	tiers, err := admin.ListTiers(t.Context(), &kvtierv1.ListTiersRequest{})
	if err != nil || len(tiers.GetTiers()) != 1 || tiers.GetTiers()[0].GetPageBytes() != 30*4096 || tiers.GetTiers()[0].GetLeasedBytes() != 3*4096 || tiers.GetTiers()[0].GetBlocks() != 30 {
		t.Errorf("tiers: %v, %v", tiers, err)
	}

	var listed []*kvtierv1.BlockInfo
	for token, pages := "", 0; pages == 0 || token != ""; pages++ {
		res, err := admin.ListBlocks(t.Context(), &kvtierv1.ListBlocksRequest{PageSize: 8, PageToken: token})
		if err != nil || pages > 5 {
			t.Fatal(pages, err)
		}
		listed = append(listed, res.GetBlocks()...)
		token = res.GetNextPageToken()
	}
	for i, b := range listed {
		if i > 0 && bytes.Compare(listed[i-1].GetName(), b.GetName()) >= 0 {
			t.Errorf("block %d is out of order", i)
		}
	}
	if len(listed) != 30 || !bytes.Equal(listed[0].GetNamespaceId(), ns) || listed[0].GetTenant() != "default" {
		t.Errorf("%d blocks listed, the first %v", len(listed), listed[0])
	}
	block, err := admin.GetBlock(t.Context(), &kvtierv1.GetBlockRequest{Name: names[4].String()[:20], Verify: true})
	if err != nil || len(block.GetPages()) != 1 || block.GetPages()[0].GetVerdict() != "ok" || block.GetBlock().GetPosition() != 4 {
		t.Errorf("block: %v, %v", block, err)
	}
	for name, want := range map[string]error{"abc": paging.ErrInvalid, "zzzzzz": paging.ErrInvalid, strings.Repeat("f", 64): paging.ErrNotFound} {
		if _, err := admin.GetBlock(t.Context(), &kvtierv1.GetBlockRequest{Name: name}); !errors.Is(kvstatus.Err(err), want) {
			t.Errorf("block %s: %v, want %v", name, err, want)
		}
	}
	attachments, err := admin.ListAttachments(t.Context(), &kvtierv1.ListAttachmentsRequest{})
	if err != nil || len(attachments.GetAttachments()) != 1 {
		t.Fatal(attachments, err)
	}
	if a := attachments.GetAttachments()[0]; a.GetEngine() != "vllm 1.2" || a.GetGroup() != "g" || a.GetState() != "attached" || a.GetLeasedBytes() != 3*4096 || a.GetPid() == 0 {
		t.Errorf("attachment: %v", a)
	}
	e.release(l.GetLeaseId())
}

// Ten scripted requests with known overlap: every counter has the value that one
// computes by hand, and at every scrape requested = hits + missed.
func TestCountersObeyTheirIdentities(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.HTTPListen = "127.0.0.1:0"
	n := startNode(t, cfg)
	c := n.client(t, client.Config{})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(4096, 1))
	if err != nil {
		t.Fatal(err)
	}
	requested, hits := 0, 0
	for i := range 10 {
		names := blockNames(0, 4*(i+1)) // each request extends the one before it
		l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
		if err != nil || l.Usable != 4*i {
			t.Fatalf("request %d: %d usable, %v", i, l.Usable, err)
		}
		if l.ID != 0 {
			checkLease(t, l, names, 1)
		}
		requested, hits = requested+len(names), hits+4*i
		write(t, c, ns, names)
		m := scrape(t, "http://"+n.HTTPAddr().String()+"/metrics")
		for name, want := range map[string]int{
			"kvtier_tier_requested_blocks_total":                       requested,
			`kvtier_tier_hit_blocks_total{tier="ram"}`:                 hits,
			"kvtier_tier_missed_blocks_total":                          requested - hits,
			"kvtier_tier_requested_tokens_total":                       16 * requested,
			`kvtier_tier_hit_tokens_total{tier="ram"}`:                 16 * hits,
			"kvtier_tier_missed_tokens_total":                          16 * (requested - hits),
			"kvtier_tier_committed_blocks_total":                       4 * (i + 1),
			"kvtier_server_leases":                                     0,
			"kvtier_server_attempts":                                   0,
			"kvtier_tier_shortfall_blocks_total{reason=\"not_found\"}": requested - hits,
		} {
			if m[name] != fmt.Sprint(want) {
				t.Errorf("request %d: %s is %q, want %d", i, name, m[name], want)
			}
		}
	}
}

// scrape reads Prometheus text into a map.
func scrape(t testing.TB, url string) map[string]string {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v, %v\n%s", url, res.Status, err, b)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && !strings.HasPrefix(line, "#") {
			out[line[:i]] = strings.TrimSpace(line[i+1:])
		}
	}
	return out
}

// Names and units of the metrics are as Prometheus wants them.
func TestMetricNames(t *testing.T) {
	cfg := twoTiers(t)
	cfg.HTTPListen = "127.0.0.1:0"
	n := startNode(t, cfg)
	res, err := http.Get("http://" + n.HTTPAddr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	problems, err := promlint.New(res.Body).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestHealthPages(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.HTTPListen = "127.0.0.1:0"
	n := startNode(t, cfg)
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200, "/": 404} {
		res, err := http.Get("http://" + n.HTTPAddr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%s: %d, want %d", path, res.StatusCode, want)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

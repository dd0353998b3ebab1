package server_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server"
)

// post sends JSON to a node's HTTP face and returns status and answer.
func (n testNode) post(t testing.TB, path string, body any, token string) (int, string) {
	t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+n.HTTPAddr().String()+path, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(answer)
}

// longest reads the longest match of an instance out of an answer.
func longest(t testing.TB, answer, tenant, instance string) uint64 {
	t.Helper()
	var got map[string]map[string]struct {
		Longest uint64            `json:"longest_matched"`
		CPU     uint64            `json:"CPU"`
		DP      map[string]uint64 `json:"DP"`
	}
	if err := json.Unmarshal([]byte(answer), &got); err != nil {
		t.Fatalf("%v: %s", err, answer)
	}
	m := got[tenant][instance]
	if m.Longest != m.CPU {
		t.Errorf("%s: the longest match is in RAM: %s", instance, answer)
	}
	return m.Longest
}

// A router that speaks the conductor's HTTP finds which engine has the longest prefix
// of a prompt, by tokens and by the hashes of the engine's events.
func TestRouterFace(t *testing.T) {
	cfg := clusterConfig(t, "")
	cfg.HTTPListen, cfg.Name = "127.0.0.1:0", "first"
	first := startNode(t, cfg)
	cfg = clusterConfig(t, first.PeerAddr())
	cfg.HTTPListen, cfg.Name = "127.0.0.1:0", "second"
	second := startNode(t, cfg)

	layout := testNamespace(10000, 1)
	layout.Layout.HashAlgorithm = paging.HashVLLMSHA256
	tokens := make([]uint32, 16*6+3)
	for i := range tokens {
		tokens[i] = uint32(i * 7919)
	}
	names, err := paging.NamesOfTokens(&layout.Layout, tokens)
	if err != nil || len(names) != 6 {
		t.Fatal(len(names), err)
	}
	for i, n := range []testNode{first, second} {
		c := n.client(t, client.Config{Engine: "test"})
		ns, err := c.RegisterNamespace(t.Context(), layout)
		if err != nil {
			t.Fatal(err)
		}
		write(t, c, ns, names[:2+2*i])
	}
	register := map[string]any{"endpoint": "tcp://10.0.0.1:5557", "type": "vLLM", "modelname": "m", "instance_id": "vllm-1", "block_size": 16, "dp_rank": 0}
	if status, answer := second.post(t, "/register", register, ""); status != http.StatusOK {
		t.Fatal(status, answer)
	}
	hashes := make([]uint64, len(names))
	for i := range names {
		hashes[i] = paging.VLLMEventHash(names[i][:])
	}
	for path, body := range map[string]map[string]any{
		"/query":         {"model": "m", "token_ids": tokens, "block_size": 16},
		"/query_by_hash": {"model": "m", "seq_hashes": hashes, "block_size": 16},
	} {
		eventually(t, path+" finds both nodes", func() bool {
			_, answer := first.post(t, path, body, "")
			return longest(t, answer, "default", "first") == 32 && longest(t, answer, "default", "vllm-1") == 64
		})
	}
	body := map[string]any{"model": "m", "token_ids": tokens, "block_size": 16, "instance_id": "vllm-1"}
	if _, answer := first.post(t, "/query", body, ""); longest(t, answer, "default", "first") != 0 || longest(t, answer, "default", "vllm-1") != 64 {
		t.Errorf("one instance: %s", answer)
	}
	for _, other := range []map[string]any{
		{"model": "other", "token_ids": tokens}, {"model": "m", "token_ids": tokens, "block_size": 32}, {"model": "m", "token_ids": tokens, "cache_salt": "s"},
	} {
		if status, answer := first.post(t, "/query", other, ""); status != http.StatusOK || longest(t, answer, "default", "first") != 0 {
			t.Errorf("%v: %d %s", other["model"], status, answer)
		}
	}
	if status, _ := first.post(t, "/query", "no object", ""); status != http.StatusBadRequest {
		t.Errorf("a body that is no query: %d", status)
	}
	register["instance_id"] = ""
	if status, _ := first.post(t, "/register", register, ""); status != http.StatusBadRequest {
		t.Errorf("an instance without an id: %d", status)
	}
	register["instance_id"] = "vllm-1"
	if _, answer := second.post(t, "/unregister", register, ""); answer != fmt.Sprintln(`{"removed_instances":["vllm-1|default|0"],"status":"unregistered successfully"}`) {
		t.Errorf("unregister: %s", answer)
	}
}

// Where tenants are configured a router sees those that its token is for.
func TestRouterFaceNeedsAToken(t *testing.T) {
	cfg := clusterConfig(t, "")
	cfg.HTTPListen = "127.0.0.1:0"
	secret := "a-secret-of-sixteen-or-more"
	cfg.Tenants = []server.Tenant{{Name: "a", Tokens: []server.Token{{Secret: secret}}}, {Name: "b"}}
	n := startNode(t, cfg)
	query := map[string]any{"model": "m", "tenant_id": "a", "token_ids": []int{1}}
	if status, _ := n.post(t, "/query", query, ""); status != http.StatusForbidden {
		t.Errorf("without a token: %d", status)
	}
	if status, answer := n.post(t, "/query", query, secret); status != http.StatusOK {
		t.Errorf("with a token: %d %s", status, answer)
	}
	query["tenant_id"] = "b"
	if status, _ := n.post(t, "/query", query, secret); status != http.StatusForbidden {
		t.Errorf("another tenant's: %d", status)
	}
}

package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// The router face answers over HTTP who holds the longest prefix of a prompt, in the
// shape that Mooncake's conductor and Dynamo's indexer have (RFC 1403 of Mooncake).
// Engines register at the node beside them; an answer names the instances of each
// node, or the node where none is registered.

// Bounds of the router face.
const (
	maxRouterBody = 8 << 20
	maxInstances  = 256 // on a node
	maxQueryNames = rpc.MaxLocateBlocks
	defaultTenant = rpc.DefaultTenant
)

// instance is an engine that a router can send requests to.
type instance struct {
	Endpoint   string  `json:"endpoint"`
	Type       string  `json:"type"`
	Model      string  `json:"modelname"`
	LoRA       string  `json:"lora_name"`
	Tenant     string  `json:"tenant_id"`
	ID         string  `json:"instance_id"`
	BlockSize  uint32  `json:"block_size"`
	DPRank     *uint32 `json:"dp_rank"`
	Salt       string  `json:"additionalsalt"`
	ReplayFrom string  `json:"replay_endpoint"`
}

func (x *instance) rank() string {
	if x.DPRank == nil {
		return "0"
	}
	return fmt.Sprint(*x.DPRank)
}

func (x *instance) key() string { return x.ID + "|" + x.Tenant + "|" + x.rank() }

// instances are the engines registered at this node.
type instances struct {
	mu  sync.Mutex
	all map[string]*instance
}

func (r *instances) put(x *instance) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[string]*instance{}
	}
	if _, known := r.all[x.key()]; !known && len(r.all) >= maxInstances {
		return fmt.Errorf("%d instances are registered, no more are taken: unregister those that are gone: %w", len(r.all), paging.ErrNoSpace)
	}
	r.all[x.key()] = x
	return nil
}

func (r *instances) remove(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, known := r.all[key]
	delete(r.all, key)
	return known
}

func (r *instances) list() []*instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*instance, 0, len(r.all))
	for _, x := range r.all {
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b *instance) int { return cmp.Compare(a.key(), b.key()) })
	return out
}

func (n *node) answerInstances(context.Context, placement.NodeID, []byte) ([]byte, error) {
	return json.Marshal(n.instances.list())
}

// routerQuery is the body of /query and /query_by_hash.
type routerQuery struct {
	Model     string   `json:"model"`
	LoRA      string   `json:"lora_name"`
	TokenIDs  []uint32 `json:"token_ids"`
	SeqHashes []uint64 `json:"seq_hashes"`
	OldHashes []uint64 `json:"block_hash"` // the older name of seq_hashes
	Tenant    string   `json:"tenant_id"`
	Instance  string   `json:"instance_id"`
	BlockSize uint32   `json:"block_size"`
	Salt      string   `json:"cache_salt"`
}

// match is what one instance has of a prompt, in tokens.
type match struct {
	Longest uint64            `json:"longest_matched"`
	GPU     uint64            `json:"GPU"`
	CPU     uint64            `json:"CPU"`
	Disk    uint64            `json:"DISK"`
	DP      map[string]uint64 `json:"DP"`
}

// routerFace adds the router's calls to the HTTP face.
func (n *node) routerFace(mux *http.ServeMux) {
	mux.HandleFunc("POST /register", routed(n, func(_ context.Context, c rpc.Caller, x *instance) (any, error) {
		x.Tenant = cmp.Or(x.Tenant, defaultTenant)
		switch {
		case x.ID == "" || x.Model == "" || x.Endpoint == "":
			return nil, wrongRequest("instance_id, modelname and endpoint are needed")
		case x.Type != "vLLM" && x.Type != "SGLang" && x.Type != "Mooncake":
			return nil, wrongRequest("type %q: want vLLM, SGLang or Mooncake", x.Type)
		case x.Tenant != c.Tenant && !c.Admin:
			return nil, fmt.Errorf("tenant_id %q is another tenant: %w", x.Tenant, paging.ErrDenied)
		}
		if err := n.instances.put(x); err != nil {
			return nil, err
		}
		return map[string]string{"status": "registered successfully", "instance_id": x.ID}, nil
	}))
	mux.HandleFunc("POST /unregister", routed(n, func(_ context.Context, c rpc.Caller, x *instance) (any, error) {
		x.Tenant = cmp.Or(x.Tenant, defaultTenant)
		if x.Tenant != c.Tenant && !c.Admin {
			return nil, fmt.Errorf("tenant_id %q is another tenant: %w", x.Tenant, paging.ErrDenied)
		}
		removed := []string{}
		if n.instances.remove(x.key()) {
			removed = append(removed, x.key())
		}
		return map[string]any{"status": "unregistered successfully", "removed_instances": removed}, nil
	}))
	mux.HandleFunc("POST /query", routed(n, func(ctx context.Context, c rpc.Caller, q *routerQuery) (any, error) {
		return n.query(ctx, c, q, false)
	}))
	mux.HandleFunc("POST /query_by_hash", routed(n, func(ctx context.Context, c rpc.Caller, q *routerQuery) (any, error) {
		return n.query(ctx, c, q, true)
	}))
}

// routed reads a body, recognises the caller and writes the answer.
func routed[Q any](n *node, answer func(context.Context, rpc.Caller, *Q) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c, err := n.accounts.Bearer(r.Header.Get("Authorization"))
		var out any
		if err == nil {
			q := new(Q)
			if err = json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRouterBody)).Decode(q); err != nil {
				err = wrongRequest("the body is not the JSON of this call: %v", err)
			} else {
				out, err = answer(r.Context(), c, q)
			}
		}
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			w.WriteHeader(httpStatus(err))
			out = map[string]string{"error": err.Error()}
		}
		_ = json.NewEncoder(w).Encode(out) // the client went away: nothing to tell it
	}
}

func httpStatus(err error) int {
	switch {
	case errors.Is(err, paging.ErrInvalid):
		return http.StatusBadRequest
	case errors.Is(err, paging.ErrDenied):
		return http.StatusForbidden
	case errors.Is(err, paging.ErrNotFound), errors.Is(err, paging.ErrUnknownNamespace):
		return http.StatusNotFound
	case errors.Is(err, paging.ErrNoSpace), errors.Is(err, paging.ErrUnavailable), errors.Is(err, paging.ErrClosed):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// query tells what each instance has of a prompt.
func (n *node) query(ctx context.Context, c rpc.Caller, q *routerQuery, byHash bool) (map[string]map[string]*match, error) {
	q.Tenant = cmp.Or(q.Tenant, defaultTenant)
	if q.Tenant != c.Tenant && !c.Admin {
		return nil, fmt.Errorf("tenant_id %q is another tenant: %w", q.Tenant, paging.ErrDenied)
	}
	byNode := map[rpc.ID]*nodeMatch{}
	for id, ns := range n.namespaces() {
		if ns.Tenant != q.Tenant || ns.Layout.Model != q.Model || string(ns.Salt) != q.Salt || q.BlockSize != 0 && q.BlockSize != ns.Layout.BlockTokens || q.LoRA != "" {
			continue // adapters have namespaces of their own, which are not named so
		}
		nodes, err := n.prefixes(ctx, c, id, ns, q, byHash)
		if err != nil {
			return nil, err
		}
		for _, p := range nodes {
			x := byNode[p.Node]
			if x == nil {
				x = &nodeMatch{name: p.Name}
				byNode[p.Node] = x
			}
			x.best(&p, uint64(ns.Layout.BlockTokens))
		}
	}
	out := map[string]map[string]*match{q.Tenant: {}}
	for id, x := range byNode {
		for _, engine := range n.enginesOf(ctx, placement.NodeID(id), x.name, q) {
			m := out[q.Tenant][engine.ID]
			if m == nil {
				m = &match{DP: map[string]uint64{}}
				out[q.Tenant][engine.ID] = m
			}
			m.Longest, m.GPU, m.CPU, m.Disk = max(m.Longest, x.longest), max(m.GPU, x.hbm), max(m.CPU, x.ram), max(m.Disk, x.nvme)
			m.DP[engine.rank()] = max(m.DP[engine.rank()], x.longest)
		}
	}
	return out, nil
}

// nodeMatch is what one node has of a prompt, in tokens.
type nodeMatch struct {
	name                    string
	longest, hbm, ram, nvme uint64
}

func (x *nodeMatch) best(p *rpc.NodePrefix, tokens uint64) {
	if p.Tokens < x.longest {
		return
	}
	x.longest = p.Tokens
	of := func(k tier.Kind) uint64 { return uint64(p.Tiers[uint8(k)]) * tokens }
	x.hbm, x.ram, x.nvme = of(tier.HBM), of(tier.RAM), of(tier.NVMe)
}

// prefixes tells what each node has of the prompt in one namespace.
func (n *node) prefixes(ctx context.Context, c rpc.Caller, id paging.NamespaceID, ns *paging.Namespace, q *routerQuery, byHash bool) ([]rpc.NodePrefix, error) {
	var names []paging.BlockName
	var err error
	if byHash {
		hashes := q.SeqHashes
		if len(hashes) == 0 {
			hashes = q.OldHashes
		}
		names = n.namesOfHashes(ctx, id, ns, hashes[:min(len(hashes), maxQueryNames)])
	} else if names, err = paging.NamesOfTokens(&ns.Layout, q.TokenIDs); err != nil {
		return nil, err
	}
	names = names[:min(len(names), maxQueryNames)]
	if len(names) == 0 {
		return nil, nil
	}
	res, err := n.Locate(ctx, rpc.Caller{Tenant: ns.Tenant, Admin: c.Admin}, &rpc.LocateRequest{Namespace: id, Names: names})
	return res.Nodes, err
}

// enginesOf are the instances at a node that serve the model; the node itself if none
// is registered there.
func (n *node) enginesOf(ctx context.Context, id placement.NodeID, name string, q *routerQuery) []*instance {
	var all []*instance
	if id == placement.NodeID(n.identity.node) {
		all = n.instances.list()
	} else if n.cluster != nil {
		ctx, cancel := context.WithTimeout(ctx, askWithin)
		defer cancel()
		if b, err := n.cluster.Call(ctx, id, methodInstances, nil); err == nil {
			_ = json.Unmarshal(b, &all) // what cannot be read is no instance
		}
	}
	serving := all[:0:0]
	for _, x := range all {
		if x.Model == q.Model && x.Tenant == q.Tenant {
			serving = append(serving, x)
		}
	}
	if len(serving) == 0 {
		serving = []*instance{{ID: name, Tenant: q.Tenant}}
	}
	return slices.DeleteFunc(serving, func(x *instance) bool { return q.Instance != "" && x.ID != q.Instance })
}

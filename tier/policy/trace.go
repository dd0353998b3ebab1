package policy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
)

// Request is one request of a trace, in the form that kvcache-ai/Mooncake
// publishes: one JSON object a line.
type Request struct {
	Timestamp    int64    `json:"timestamp"` // ms
	InputTokens  int64    `json:"input_length"`
	OutputTokens int64    `json:"output_length"`
	Blocks       []uint64 `json:"hash_ids"` // of the prompt; equal ids mean an equal prefix up to the end of the block
}

// ParseTrace decodes a trace and sorts it by time; requests of one time keep
// their order. The error names the line.
func ParseTrace(data []byte) ([]Request, error) {
	var reqs []Request
	line := 0
	for text := range bytes.Lines(data) {
		line++
		if text = bytes.TrimSpace(text); len(text) == 0 {
			continue
		}
		var r Request
		if err := json.Unmarshal(text, &r); err != nil {
			return nil, fmt.Errorf("policy: trace line %d: %w", line, err)
		}
		if r.InputTokens < 0 || r.OutputTokens < 0 {
			return nil, fmt.Errorf("policy: trace line %d: negative length", line)
		}
		reqs = append(reqs, r)
	}
	slices.SortStableFunc(reqs, func(a, b Request) int { return cmp.Compare(a.Timestamp, b.Timestamp) })
	return reqs, nil
}

// Trace is how a trace is to be read.
type Trace struct {
	Requests    []Request // in order of time, see ParseTrace; not modified
	BlockTokens int64     // tokens of a block, at least 1
	FullOnly    bool      // leave out the last block of a prompt if it is not full
}

// chain is the blocks of a request that count.
func (t *Trace) chain(r *Request) []uint64 {
	n := int64(len(r.Blocks))
	if t.FullOnly && n > 0 && r.InputTokens < n*t.BlockTokens {
		n--
	}
	return r.Blocks[:n]
}

// Result of a replay.
type Result struct {
	Requests       int64
	Blocks         int64 // offered
	Hits           int64 // in the longest cached prefix of their request
	Any            int64 // cached, wherever in their request; 0 from Optimal
	InputTokens    int64
	HitTokens      int64 // of the prefix
	SubblockTokens int64 // with half a block more where the prefix ends inside the request
	Evicted        int64 // 0 from Optimal
}

// count adds a request of which the first hits blocks were cached.
func (r *Result) count(t *Trace, q *Request, chain []uint64, hits int64) {
	r.Requests++
	r.Blocks += int64(len(chain))
	r.Hits += hits
	r.InputTokens += q.InputTokens
	tokens := min(hits*t.BlockTokens, q.InputTokens)
	r.HitTokens += tokens
	if hits > 0 && hits < int64(len(chain)) {
		tokens = min(hits*t.BlockTokens+t.BlockTokens/2, q.InputTokens)
	}
	r.SubblockTokens += tokens
}

// Rate is part/whole, rounded half to even at four decimals; 0 if whole is 0.
func Rate(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	q, r := part*10000/whole, part*10000%whole
	if 2*r > whole || 2*r == whole && q%2 == 1 {
		q++
	}
	return float64(q) / 10000
}

// HitRate is the share of the blocks that were hits.
func (r Result) HitRate() float64 { return Rate(r.Hits, r.Blocks) }

// TokenHitRate is the share of the prompt tokens that need no prefill.
func (r Result) TokenHitRate() float64 { return Rate(r.HitTokens, r.InputTokens) }

// Replay offers a trace to the named policy in a tier of capacity blocks. For
// each request it first looks up how many blocks of the prefix are cached, then
// offers every block once. Equal arguments give equal results. The error is
// that of New, or that the trace has no block length.
func Replay(name string, capacity int64, t Trace) (Result, error) {
	var res Result
	p, err := New(name, capacity, nil)
	if err != nil {
		return res, err
	}
	if t.BlockTokens < 1 {
		return res, fmt.Errorf("policy: blocks of %d tokens: want at least 1", t.BlockTokens)
	}
	c := cache{policy: p, capacity: capacity, ids: make(map[uint64]ID)}
	for i := range t.Requests {
		q := &t.Requests[i]
		chain := t.chain(q)
		hits, prefix := int64(0), true
		for _, name := range chain {
			_, ok := c.ids[name]
			if ok {
				res.Any++
			}
			if prefix = prefix && ok; prefix {
				hits++
			}
		}
		res.count(&t, q, chain, hits)
		for j := range chain {
			if !HeadFirst(name) {
				j = len(chain) - 1 - j
			}
			c.offer(chain[j], Access{Key: chain[j], Weight: 1, Position: int32(j), Length: int32(len(chain))})
		}
	}
	res.Evicted = c.evicted
	return res, nil
}

// cache is a tier without bytes.
type cache struct {
	policy   *Policy
	capacity int64
	ids      map[uint64]ID // of resident blocks
	names    []uint64      // by ID
	free     []ID
	evicted  int64
}

// offer offers a block once, and evicts what no longer fits.
func (c *cache) offer(name uint64, a Access) {
	if id, ok := c.ids[name]; ok {
		c.policy.Hit(id, a)
		return
	}
	var id ID
	if n := len(c.free); n > 0 {
		id, c.free = c.free[n-1], c.free[:n-1]
	} else {
		id = ID(len(c.names))
		c.names = append(c.names, 0)
	}
	c.ids[name], c.names[id] = id, name
	c.policy.Insert(id, a)
	for c.policy.Used() > c.capacity {
		victim, ok := c.policy.Victim(0, nil)
		if !ok {
			break
		}
		c.policy.Evict(victim)
		delete(c.ids, c.names[victim])
		c.free = append(c.free, victim)
		c.evicted++
	}
}

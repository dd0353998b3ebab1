package policy

import "fmt"

// Cluster is how nodes share a trace: each request is served by one node, and
// each node has a tier of its own.
type Cluster struct {
	Nodes int // 1 to 1,024
	// Route says which node serves a request.
	Route func(request int) int
	// Source says which of the holders of a block is asked for it; asked counts, by
	// node, the blocks of this request that were asked of it before. nil: there is
	// no directory, and a node finds what it has itself.
	Source func(holders []int, asked []int64) int
}

// ClusterResult is the outcome of a replay on a cluster. Hits of Result counts
// both kinds.
type ClusterResult struct {
	Result
	LocalHits, RemoteHits int64 // of the prefix: blocks that the serving node had, and others
}

const maxClusterNodes = 1024

// ReplayCluster is Replay on nodes of capacity blocks each. With a directory a
// block is a hit if any node has it: the serving node gets a copy, which it
// keeps like any block, and to the source that is a use whose chain it does not
// know. The directory is exact: claims that are on their way are not modelled.
// Equal arguments give equal results.
func ReplayCluster(name string, capacity int64, t Trace, c Cluster) (ClusterResult, error) {
	var res ClusterResult
	if c.Nodes < 1 || c.Nodes > maxClusterNodes {
		return res, fmt.Errorf("policy: %d nodes: want 1 to %d", c.Nodes, maxClusterNodes)
	}
	if t.BlockTokens < 1 {
		return res, fmt.Errorf("policy: blocks of %d tokens: want at least 1", t.BlockTokens)
	}
	s := clusterReplay{Cluster: c, trace: t, res: &res, headFirst: HeadFirst(name), asked: make([]int64, c.Nodes)}
	for range c.Nodes {
		p, err := New(name, capacity, nil)
		if err != nil {
			return res, err
		}
		s.nodes = append(s.nodes, &cache{policy: p, capacity: capacity, ids: make(map[uint64]ID)})
	}
	for i := range t.Requests {
		s.serve(c.Route(i), &t.Requests[i])
	}
	for _, n := range s.nodes {
		res.Evicted += n.evicted
	}
	return res, nil
}

type clusterReplay struct {
	Cluster
	trace     Trace
	res       *ClusterResult
	headFirst bool
	nodes     []*cache
	asked     []int64
	holders   []int
	sources   []int // by block of the prefix; the serving node for its own
}

func (s *clusterReplay) serve(at int, q *Request) {
	chain := s.trace.chain(q)
	s.sources = s.sources[:0]
	clear(s.asked)
	prefix, local := true, int64(0)
	for _, block := range chain {
		source := s.find(at, block)
		if source >= 0 {
			s.res.Any++
		}
		if prefix = prefix && source >= 0; !prefix {
			continue
		}
		s.sources = append(s.sources, source)
		if source == at {
			local++
		} else {
			s.asked[source]++
		}
	}
	hits := int64(len(s.sources))
	s.res.count(&s.trace, q, chain, hits)
	s.res.LocalHits += local
	s.res.RemoteHits += hits - local
	for i := range chain {
		if !s.headFirst {
			i = len(chain) - 1 - i
		}
		if i < len(s.sources) && s.sources[i] != at {
			source := s.nodes[s.sources[i]]
			source.policy.Hit(source.ids[chain[i]], Access{Position: int32(i)})
		}
	}
	for i := range chain {
		if !s.headFirst {
			i = len(chain) - 1 - i
		}
		s.nodes[at].offer(chain[i], Access{Key: chain[i], Weight: 1, Position: int32(i), Length: int32(len(chain))})
	}
}

// find is the node that a block comes from; -1: it is nowhere.
func (s *clusterReplay) find(at int, block uint64) int {
	if _, ok := s.nodes[at].ids[block]; ok {
		return at
	}
	if s.Source == nil {
		return -1
	}
	s.holders = s.holders[:0]
	for i, n := range s.nodes {
		if _, ok := n.ids[block]; ok {
			s.holders = append(s.holders, i)
		}
	}
	if len(s.holders) == 0 {
		return -1
	}
	return s.Source(s.holders, s.asked)
}

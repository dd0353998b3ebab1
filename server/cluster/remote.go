package cluster

import (
	"context"
	"errors"
	"slices"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/transport"
	"github.com/kvtier/kvtier/tier"
)

// ClaimKey names a block in the directory: the first half of the storage key of its
// first part.
func ClaimKey(ns paging.NamespaceID, name paging.BlockName) placement.BlockKey {
	k := paging.StorageKey(ns, name, 0)
	return placement.BlockKey(k[:16])
}

// reach remembers, within one call, which nodes can be reached.
type reach struct {
	n     *Node
	known map[placement.NodeID]bool
}

func (r *reach) has(id placement.NodeID) bool {
	ok, known := r.known[id]
	if !known {
		ok = id != r.n.cfg.ID && r.n.Reachable(id)
		if r.known == nil {
			r.known = map[placement.NodeID]bool{}
		}
		r.known[id] = ok
	}
	return ok
}

// Reachable reports whether pages of a node can be had now, as far as is known: it
// answers gossip, and did what was last asked of its peer port.
func (n *Node) Reachable(id placement.NodeID) bool {
	if !n.pages.Reachable(id) {
		return false
	}
	info, known := n.members.View().Find(id)
	return known && info.Seen && !info.Left
}

// Locate implements tier.Peers: it reads the local replica of the directory.
func (n *Node) Locate(ns paging.NamespaceID, names []paging.BlockName, elsewhere []paging.PartSet) {
	r := reach{n: n}
	n.holders(ns, names, func(i int, k placement.BlockKey, holders []directory.Holder) {
		for _, h := range holders {
			if r.has(h.Node) && !n.hints.refuses(k, h.Node) {
				elsewhere[i] |= h.Parts
			}
		}
	})
}

// locateStep is how many blocks are looked up between two entries that the directory
// applies.
const locateStep = 512

// holders calls f with those who claim each block.
func (n *Node) holders(ns paging.NamespaceID, names []paging.BlockName, f func(i int, k placement.BlockKey, holders []directory.Holder)) {
	keys := make([]placement.BlockKey, len(names))
	for i := range names {
		keys[i] = ClaimKey(ns, names[i])
	}
	var counts []int
	var all []directory.Holder
	for first := 0; first < len(keys); first += locateStep {
		step := keys[first:min(first+locateStep, len(keys))]
		counts, all = n.replica().Locate(step, counts[:0], all[:0])
		rest := all
		for i, count := range counts {
			f(first+i, step[i], n.expected.with(step[i], rest[:count]))
			rest = rest[count:]
		}
	}
}

// Bring implements tier.Peers.
func (n *Node) Bring(ctx context.Context, ns paging.NamespaceID, pages []tier.RemotePage, done func(i int, sum uint64, err error)) {
	// The pages of a block follow one another: its name is hashed once.
	var names []paging.BlockName
	firsts := make([]int, 0, len(pages)+1) // index of each name's first page
	for i := range pages {
		if i == 0 || pages[i].Name != pages[i-1].Name {
			names, firsts = append(names, pages[i].Name), append(firsts, i)
		}
	}
	firsts = append(firsts, len(pages))
	s := &sink{n: n, pages: pages, keys: make([]placement.BlockKey, len(pages)), done: done}
	req := transport.FetchRequest{Namespace: ns, Pages: make([]transport.WantedPage, len(pages)), Sink: s}
	r := reach{n: n}
	n.holders(ns, names, func(name int, k placement.BlockKey, holders []directory.Holder) {
		holders = slices.DeleteFunc(slices.Clone(holders), func(h directory.Holder) bool { return !r.has(h.Node) || n.hints.refuses(k, h.Node) })
		for i := firsts[name]; i < firsts[name+1]; i++ {
			p := &pages[i]
			s.keys[i] = k
			w := &req.Pages[i]
			*w = transport.WantedPage{Name: p.Name, Part: p.Part, Bytes: uint32(len(p.Dst))}
			for _, h := range holders {
				if h.Parts.Has(p.Part) {
					w.Owners = append(w.Owners, h.Node)
				}
			}
		}
	})
	if err := n.pages.Fetch(ctx, &req); err != nil { // before any page was touched
		for i := range pages {
			done(i, 0, err)
		}
	}
}

// sink is where the pages of one Bring go.
type sink struct {
	n     *Node
	pages []tier.RemotePage
	keys  []placement.BlockKey
	done  func(i int, sum uint64, err error)
}

// Slot implements transport.Sink.
func (s *sink) Slot(i int) ([]byte, error) { return s.pages[i].Dst, nil }

// Done implements transport.Sink.
func (s *sink) Done(i int, r transport.Result) {
	if r.Err == nil && r.Elsewhere { // the Hierarchy asks for a page once at a time
		r.Err = &transport.PageError{Reason: transport.InFlight, From: r.From}
	}
	var why *transport.PageError
	if errors.As(r.Err, &why) && (why.Reason == transport.NotFound || why.Reason == transport.Mismatch) {
		s.n.hints.refuse(s.keys[i], why.From)
	}
	s.done(i, r.Sum, r.Err)
}

package server

import (
	"crypto/subtle"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
)

// maxDecisions bounds the adopt tokens of a group: one per request that the
// engine has scheduled and not yet read.
const maxDecisions = 16384

type groupKey struct{ tenant, name string }

// group is the attachments of one engine. It ends when the last of them has lost
// its stream; a new one of the same name may then have another secret.
type group struct {
	key    groupKey
	secret []byte

	mu        sync.Mutex
	members   int            // attachments whose stream is held
	ranks     map[uint32]int // ranks that members named, and how many did
	decisions map[rpc.ID]*decision
}

// groups are those of a node.
type groups struct {
	mu    sync.Mutex
	byKey map[groupKey]*group
}

// join makes one more member; paging.ErrDenied if the secret is another.
func (gs *groups) join(key groupKey, secret []byte, ranks []uint32) (*group, error) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	g := gs.byKey[key]
	if g == nil {
		g = &group{key: key, secret: append([]byte(nil), secret...), ranks: map[uint32]int{}, decisions: map[rpc.ID]*decision{}}
		if gs.byKey == nil {
			gs.byKey = map[groupKey]*group{}
		}
		gs.byKey[key] = g
	}
	if subtle.ConstantTimeCompare(g.secret, secret) != 1 {
		return nil, fmt.Errorf("group %q has another secret: %w", key.name, paging.ErrDenied)
	}
	g.mu.Lock()
	g.members++
	for _, r := range ranks {
		g.ranks[r]++
	}
	g.mu.Unlock()
	return g, nil
}

// leave takes a member out and drops the group's decisions with the last one.
func (gs *groups) leave(g *group, ranks []uint32) {
	gs.mu.Lock()
	g.mu.Lock()
	g.members--
	for _, r := range ranks {
		if g.ranks[r]--; g.ranks[r] == 0 {
			delete(g.ranks, r)
		}
	}
	var dropped []*decision
	if g.members == 0 {
		delete(gs.byKey, g.key)
		for _, d := range g.decisions {
			dropped = append(dropped, d)
		}
		g.decisions = nil
	}
	g.mu.Unlock()
	gs.mu.Unlock()
	for _, d := range dropped {
		d.pins.Release()
	}
}

// parts are those that the group's members on this node read and write: of the
// ranks they named, or all of the layout if none did.
func (g *group) parts(l *paging.Layout) paging.PartSet {
	g.mu.Lock()
	defer g.mu.Unlock()
	ranks := make([]uint32, 0, len(g.ranks))
	for r := range g.ranks {
		ranks = append(ranks, r)
	}
	return l.PartsOfRanks(ranks)
}

// tokens is the number of adopt tokens.
func (g *group) tokens() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.decisions)
}

// all lists the groups, in no order.
func (gs *groups) all() []*group {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	out := make([]*group, 0, len(gs.byKey))
	for _, g := range gs.byKey {
		out = append(out, g)
	}
	return out
}

package clustertest

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvtier/kvtier/server/placement"
)

// Gossip makes the views of all nodes of a test follow the network: a node is seen
// by those that reach it, if only through others, and what changes is known some
// seconds later, at each node at another time.
type Gossip struct {
	f    *Fabric
	seed uint64

	mu    sync.Mutex
	nodes map[int]placement.NodeInfo // that were ever started
	up    map[int]bool
	fixed bool // views stay as they are
}

// Times of gossip.
const (
	GossipEvery = 200 * time.Millisecond
	LostAfter   = 4 * time.Second // at most
	FoundAfter  = time.Second     // at most
)

// NewGossip returns gossip over a network; seed decides when changes become known.
func NewGossip(f *Fabric, seed uint64) *Gossip {
	return &Gossip{f: f, seed: seed, nodes: map[int]placement.NodeInfo{}, up: map[int]bool{}}
}

// Freeze keeps every view as it is, whatever happens, or lets them follow again.
func (g *Gossip) Freeze(fixed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fixed = fixed
}

func (g *Gossip) set(i int, up bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.up[i] = up
}

// reached is the nodes that a message of node i gets to.
func (g *Gossip) reached(i int) map[int]bool {
	seen := map[int]bool{i: true}
	for todo := []int{i}; len(todo) > 0; todo = todo[1:] {
		for j, up := range g.up {
			if up && !seen[j] && g.f.Joined(todo[0], j) {
				seen[j] = true
				todo = append(todo, j)
			}
		}
	}
	return seen
}

// Member is one node's gossip; it implements cluster.Members.
type Member struct {
	g     *Gossip
	self  int
	rng   *rand.Rand
	stop  chan struct{}
	loop  sync.WaitGroup
	close sync.Once

	mu      sync.Mutex
	view    *placement.View
	changed chan struct{}
	due     map[int]time.Time // when a change of a node becomes known here
}

// Join starts node i's gossip.
func (g *Gossip) Join(i int, info placement.NodeInfo) *Member {
	info.Seen = true
	g.mu.Lock()
	g.nodes[i], g.up[i] = info, true
	g.mu.Unlock()
	m := &Member{
		g: g, self: i, rng: rand.New(rand.NewPCG(g.seed, uint64(i)<<32|uint64(info.Incarnation))), stop: make(chan struct{}),
		view: &placement.View{}, changed: make(chan struct{}), due: map[int]time.Time{},
	}
	m.look()
	m.loop.Go(m.run)
	return m
}

func (m *Member) run() {
	tick := time.NewTicker(GossipEvery)
	defer tick.Stop()
	for {
		select {
		case <-m.stop:
			return
		case <-tick.C:
			m.look()
		}
	}
}

// look lets the view follow.
func (m *Member) look() {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	if m.g.fixed {
		return
	}
	now := time.Now()
	reached := m.g.reached(m.self)
	m.mu.Lock()
	defer m.mu.Unlock()
	next := &placement.View{Version: m.view.Version + 1}
	change := false
	for i := range len(m.g.nodes) + 16 { // numbers are in order of id
		info, known := m.g.nodes[i]
		if !known {
			continue
		}
		before, had := m.view.Find(info.ID)
		info.Seen, info.Since = m.g.up[i] && reached[i], now
		switch {
		case i == m.self && !had:
			change = true
		case had && before.Seen == info.Seen && before.Incarnation == info.Incarnation, !had && !info.Seen:
			delete(m.due, i)
			info = before
		case m.due[i].IsZero():
			most := FoundAfter
			if !info.Seen {
				most = LostAfter
			}
			m.due[i] = now.Add(time.Duration(m.rng.Int64N(int64(most))))
			info = before
		case now.Before(m.due[i]):
			info = before
		default:
			delete(m.due, i)
			change = true
		}
		if info.ID != (placement.NodeID{}) {
			next.Nodes = append(next.Nodes, info)
		}
	}
	if change {
		m.view = next
		close(m.changed)
		m.changed = make(chan struct{})
	}
}

// View implements cluster.Members.
func (m *Member) View() *placement.View {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.view
}

// Changed implements cluster.Members.
func (m *Member) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// Address implements cluster.Members.
func (m *Member) Address() string { return "gossip" }

// Close implements cluster.Members.
func (m *Member) Close() error {
	m.close.Do(func() {
		m.g.set(m.self, false)
		close(m.stop)
		m.loop.Wait()
	})
	return nil
}

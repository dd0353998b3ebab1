package placement

import (
	"slices"
	"strings"
	"testing"
)

// world is a model of a cluster, apart from the planner: what it says is checked
// against this.
type world struct {
	u    *Usage
	node map[NodeID]*NodeUsage
}

func cloneUsage(u *Usage) *Usage {
	c := &Usage{Nodes: slices.Clone(u.Nodes), Sessions: slices.Clone(u.Sessions), Shared: slices.Clone(u.Shared)}
	for i := range c.Shared {
		c.Shared[i].At = slices.Clone(c.Shared[i].At)
	}
	return c
}

func newModel(u *Usage) *world {
	w := &world{u: cloneUsage(u), node: map[NodeID]*NodeUsage{}}
	for i := range w.u.Nodes {
		w.node[w.u.Nodes[i].ID] = &w.u.Nodes[i]
	}
	return w
}

func (w *world) session(id SessionID) *SessionUsage {
	i := slices.IndexFunc(w.u.Sessions, func(s SessionUsage) bool { return s.ID == id })
	return &w.u.Sessions[i]
}

func (w *world) runAt(r int32, node NodeID) int {
	return slices.IndexFunc(w.u.Shared[r].At, func(a RunAt) bool { return a.Node == node })
}

func (w *world) users(r int32, node NodeID) (n int) {
	for i := range w.u.Sessions {
		if s := &w.u.Sessions[i]; s.Owner == node && slices.Contains(s.Shared, r) {
			n++
		}
	}
	return n
}

// lacks is what a node has to be sent of a session.
func (w *world) lacks(s *SessionUsage, to NodeID) (sum int64) {
	sum = s.Bytes.Sum()
	for _, r := range s.Shared {
		if w.runAt(r, to) < 0 && w.runAt(r, s.Owner) >= 0 {
			sum += w.u.Shared[r].Bytes
		}
	}
	return sum
}

// put adds bytes to a node; what gives way is evicted for them.
func (n *NodeUsage) put(b TierBytes) {
	held := n.Used.minus(n.GivesWay).plus(b)
	for t := range b {
		n.Used[t] = min(max(n.Used[t]+b[t], held[t]), max(n.Budget[t], held[t]))
		n.GivesWay[t] = n.Used[t] - held[t]
	}
}

// move does what a move says. Blocks stay where they were as cache that gives way.
func (w *world) move(m *Move) {
	s := w.session(m.Session)
	a, b := w.node[m.From], w.node[m.To]
	left, lands := s.Bytes, m.Lands
	b.put(m.Lands)
	s.Owner, s.Epoch = m.To, s.Epoch+1
	for _, r := range s.Shared {
		x := w.runAt(r, m.From)
		if x >= 0 && w.runAt(r, m.To) < 0 {
			var at TierBytes
			size := w.u.Shared[r].Bytes
			for _, t := range []Tier{NVMe, RAM, HBM} {
				at[t] = min(size, lands[t])
				size -= at[t]
			}
			lands = lands.minus(at)
			w.u.Shared[r].At = append(w.u.Shared[r].At, RunAt{m.To, at})
		}
		if x >= 0 && w.users(r, m.From) == 0 {
			left = left.plus(w.u.Shared[r].At[x].Bytes)
			w.u.Shared[r].At = slices.Delete(w.u.Shared[r].At, x, x+1)
		}
	}
	s.Bytes = lands
	a.GivesWay = a.GivesWay.plus(left)
	a.HitBytesPerSecond -= s.HitBytesPerSecond
	b.HitBytesPerSecond += s.HitBytesPerSecond
}

func applyPlan(u *Usage, p *Plan) *Usage {
	w := newModel(u)
	for i := range p.Moves {
		w.move(&p.Moves[i])
	}
	for _, c := range p.Copies {
		w.node[c.To].put(c.Lands)
		if n := w.node[c.From]; c.Hot {
			n.SoleHotBytes -= c.Bytes
		} else {
			n.SoleColdBytes -= c.Bytes
		}
	}
	for _, d := range p.Drops {
		w.node[d.Node].SoleColdBytes -= d.Bytes
	}
	return w.u
}

// checkPlan carries a plan out step by step and checks each.
func checkPlan(t *testing.T, u *Usage, p *Plan, o Options) {
	t.Helper()
	o = o.withDefaults()
	w := newModel(u)
	oneLine := func(why string) {
		t.Helper()
		if why == "" || strings.Contains(why, "\n") || len(why) > 200 {
			t.Errorf("reason %q", why)
		}
	}
	fits := func(id NodeID, lands TierBytes) {
		t.Helper()
		n := w.node[id]
		if n.Status != Up {
			t.Errorf("%d gets something and is not up", id[0])
		}
		held := n.Used.minus(n.GivesWay).plus(lands)
		for tier, b := range lands {
			if b < 0 || b > 0 && held[tier] > int64(o.Fill*float64(n.Budget[tier])) {
				t.Errorf("tier %d of node %d holds %d of %d", tier, id[0], held[tier], n.Budget[tier])
			}
		}
	}
	var bytes int64
	for i := range p.Moves {
		m := &p.Moves[i]
		s := w.session(m.Session)
		if m.From != s.Owner || m.From == m.To || m.Epoch != s.Epoch {
			t.Fatalf("move %+v of %+v", m, s)
		}
		if want := w.lacks(s, m.To); m.Bytes != want || m.Lands.Sum() != want {
			t.Fatalf("move of %d bytes that land as %v, want %d", m.Bytes, m.Lands, want)
		}
		fits(m.To, m.Lands)
		oneLine(m.Why)
		w.move(m)
		bytes += m.Bytes
	}
	for _, c := range p.Copies {
		if c.Lands.Sum() != c.Bytes || c.Bytes <= 0 || c.From == c.To {
			t.Errorf("copy %+v", c)
		}
		fits(c.To, c.Lands)
		w.node[c.To].put(c.Lands)
		oneLine(c.Why)
		bytes += c.Bytes
	}
	for _, x := range p.Unplaced {
		oneLine(x.Why)
	}
	for _, x := range p.Drops {
		oneLine(x.Why)
	}
	if p.Bytes != bytes {
		t.Errorf("a plan of %d bytes says %d", bytes, p.Bytes)
	}
}

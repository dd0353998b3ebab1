package placement

import (
	"container/heap"
	"fmt"
)

// ledger is the cluster as it will be when what is planned so far is done.
type ledger struct {
	usage *Usage
	opts  Options
	index map[NodeID]int32
	nodes []nodeEntry
	owner []int32             // of each session; -1: a node that is not known
	runs  map[runKey]runEntry // that are somewhere
	order targetHeap

	// Shares are of what the nodes that are up have together. They are taken at the
	// begin of a pass (newPass).
	total struct{ bytes, hot, traffic, budget, speed int64 }
}

type nodeEntry struct {
	usage   *NodeUsage
	target  bool      // it may be given something
	held    TierBytes // that does not give way
	limit   TierBytes // up to which a plan fills
	bytes   int64     // sum of held
	hot     int64
	traffic int64
	load    float64 // above its share: 0.2 is 20 %
	place   int     // in the heap; -1: not there
}

type runKey struct{ run, node int32 }

type runEntry struct {
	users int32
	at    TierBytes
}

func newLedger(u *Usage, o Options) (*ledger, error) {
	l := &ledger{usage: u, opts: o.withDefaults(), index: make(map[NodeID]int32, len(u.Nodes)), runs: map[runKey]runEntry{}}
	l.nodes = make([]nodeEntry, len(u.Nodes))
	for i := range u.Nodes {
		n := &u.Nodes[i]
		if _, twice := l.index[n.ID]; twice {
			return nil, fmt.Errorf("node %s is named twice", n.ID)
		}
		l.index[n.ID] = int32(i)
		e := &l.nodes[i]
		*e = nodeEntry{usage: n, target: n.Status == Up, held: n.Used.minus(n.GivesWay), traffic: n.HitBytesPerSecond, place: -1}
		e.bytes = e.held.Sum()
		for t, b := range n.Budget {
			e.limit[t] = int64(l.opts.Fill * float64(b))
		}
	}
	for r := range u.Shared {
		for _, at := range u.Shared[r].At {
			if i, known := l.index[at.Node]; known {
				l.runs[runKey{int32(r), i}] = runEntry{at: at.Bytes}
			}
		}
	}
	l.owner = make([]int32, len(u.Sessions))
	for i := range u.Sessions {
		if err := l.addSession(i); err != nil {
			return nil, err
		}
	}
	return l, nil
}

func (l *ledger) addSession(i int) error {
	s := &l.usage.Sessions[i]
	n, known := l.index[s.Owner]
	if !known {
		l.owner[i] = -1
		return nil
	}
	l.owner[i] = n
	if l.hot(s) {
		l.nodes[n].hot++
	}
	for _, r := range s.Shared {
		if r < 0 || int(r) >= len(l.usage.Shared) {
			return fmt.Errorf("session %s shares run %d of %d", s.ID, r, len(l.usage.Shared))
		}
		if e, here := l.runs[runKey{r, n}]; here {
			e.users++
			l.runs[runKey{r, n}] = e
		}
	}
	return nil
}

func (l *ledger) hot(s *SessionUsage) bool { return s.Idle < l.opts.HotWithin }

func (l *ledger) name(i int32) string {
	if n := l.nodes[i].usage; n.Name != "" {
		return n.Name
	}
	return l.nodes[i].usage.ID.Short()
}

// newPass takes the shares anew and puts the targets in order.
func (l *ledger) newPass() {
	l.total.bytes, l.total.hot, l.total.traffic, l.total.budget, l.total.speed = 0, 0, 0, 0, 0
	for i := range l.nodes {
		if e := &l.nodes[i]; e.target {
			l.total.bytes += e.bytes
			l.total.hot += e.hot
			l.total.traffic += e.traffic
			l.total.budget += e.usage.Budget.Sum()
			l.total.speed += speedOf(e.usage)
		}
	}
	l.order = targetHeap{l: l, nodes: l.order.nodes[:0]}
	for i := range l.nodes {
		if e := &l.nodes[i]; e.target {
			e.load = l.loadWith(e, e.bytes, e.hot, e.traffic)
			e.place = len(l.order.nodes)
			l.order.nodes = append(l.order.nodes, int32(i))
		}
	}
	heap.Init(&l.order)
}

func speedOf(n *NodeUsage) int64 {
	if n.BytesPerSecond > 0 {
		return n.BytesPerSecond
	}
	return guessBytesPerSecond
}

// Below these a difference from the share is noise: it counts as if the share were so
// large.
const (
	floorFill    = 0.02 // of a node's budget
	floorHot     = 5    // sessions
	floorTraffic = 0.01 // of a node's bandwidth
)

// loadWith is how far a node is above its share with what is given.
func (l *ledger) loadWith(e *nodeEntry, bytes, hot, traffic int64) float64 {
	w := &l.opts.Weights
	budget, speed := float64(e.usage.Budget.Sum()), float64(speedOf(e.usage))
	share, reach := budget/max(1, float64(l.total.budget)), speed/max(1, float64(l.total.speed))
	load := w.Bytes*excess(bytes, float64(l.total.bytes)*share, floorFill*budget) +
		w.HotSessions*excess(hot, float64(l.total.hot)*share, floorHot) +
		w.HitTraffic*excess(traffic, float64(l.total.traffic)*reach, floorTraffic*speed)
	return load / (w.Bytes + w.HotSessions + w.HitTraffic)
}

func excess(amount int64, fair, floor float64) float64 {
	return (float64(amount) - fair) / max(fair, floor, 1)
}

// lacking is what a node lacks of a session, by the tiers that it is read from.
func (l *ledger) lacking(s *SessionUsage, from, to int32) TierBytes {
	b := s.Bytes
	for _, r := range s.Shared {
		if _, there := l.runs[runKey{r, to}]; !there {
			b = b.plus(l.runs[runKey{r, from}].at)
		}
	}
	return b
}

// land says where bytes go on a node: into the tier that they come from, else into a
// slower one, else into RAM. false: they do not fit.
func (e *nodeEntry) land(b TierBytes) (lands TierBytes, ok bool) {
	var over int64
	for t := HBM; t <= NVMe; t++ {
		over += b[t]
		lands[t] = min(over, max(0, e.limit[t]-e.held[t]))
		over -= lands[t]
	}
	more := min(over, max(0, e.limit[RAM]-e.held[RAM]-lands[RAM]))
	lands[RAM] += more
	return lands, over == more
}

func (e *nodeEntry) room() (sum int64) {
	for t := range e.limit {
		sum += max(0, e.limit[t]-e.held[t])
	}
	return sum
}

// move enters that a session moves, and returns where what the target lacks lands.
func (l *ledger) move(i int, to int32, lands TierBytes) {
	s, from := &l.usage.Sessions[i], l.owner[i]
	a, b := &l.nodes[from], &l.nodes[to]
	left := s.Bytes
	rest := lands
	for _, r := range s.Shared {
		here, there := runKey{r, from}, runKey{r, to}
		x, was := l.runs[here]
		y, is := l.runs[there]
		if !is && was {
			y.at = take(&rest, l.usage.Shared[r].Bytes)
		}
		if is || was {
			y.users++
			l.runs[there] = y
		}
		if x.users--; was && x.users <= 0 {
			left = left.plus(x.at)
			delete(l.runs, here)
		} else if was {
			l.runs[here] = x
		}
	}
	l.owner[i] = to
	a.held, a.bytes = a.held.minus(left), a.bytes-left.Sum()
	b.held, b.bytes = b.held.plus(lands), b.bytes+lands.Sum()
	if l.hot(s) {
		a.hot--
		b.hot++
	}
	a.traffic -= s.HitBytesPerSecond
	b.traffic += s.HitBytesPerSecond
	l.changed(from)
	l.changed(to)
}

// take splits so many bytes off, from the slowest tier: the head of a session is its
// coldest part.
func take(from *TierBytes, bytes int64) (b TierBytes) {
	for t := int(NVMe); t >= 0; t-- {
		b[t] = min(bytes, from[t])
		from[t] -= b[t]
		bytes -= b[t]
	}
	return b
}

func (l *ledger) changed(i int32) {
	if e := &l.nodes[i]; e.target {
		e.load = l.loadWith(e, e.bytes, e.hot, e.traffic)
		if e.place >= 0 {
			heap.Fix(&l.order, e.place)
		}
	}
}

// targetHeap has the targets, the least loaded first; the first in the usage of equal
// ones.
type targetHeap struct {
	l     *ledger
	nodes []int32
}

func (h *targetHeap) Len() int { return len(h.nodes) }

func (h *targetHeap) Less(i, j int) bool {
	a, b := h.nodes[i], h.nodes[j]
	if x, y := h.l.nodes[a].load, h.l.nodes[b].load; x != y {
		return x < y
	}
	return a < b
}

func (h *targetHeap) Swap(i, j int) {
	h.nodes[i], h.nodes[j] = h.nodes[j], h.nodes[i]
	h.l.nodes[h.nodes[i]].place, h.l.nodes[h.nodes[j]].place = i, j
}

func (h *targetHeap) Push(x any) {
	i := x.(int32)
	h.l.nodes[i].place = len(h.nodes)
	h.nodes = append(h.nodes, i)
}

func (h *targetHeap) Pop() any {
	i := h.nodes[len(h.nodes)-1]
	h.nodes = h.nodes[:len(h.nodes)-1]
	h.l.nodes[i].place = -1
	return i
}

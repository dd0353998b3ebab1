package policy

// Queues of s3fifo, named in node.queue.
const (
	small uint8 = iota
	main
	entering // not in a queue yet
)

// s3fifo keeps newcomers in a small FIFO; what is used there, or returns soon
// after it left, lives in a larger one that gives second chances. Its rule is to
// make room first and to place the newcomer afterwards, so an inserted block is
// only placed by the operation that follows its evictions.
type s3fifo struct {
	ns       *Blocks
	queues   [2]list
	weight   [2]int64 // hidden members included
	smallCap int64
	entrant  ID
	ghost    ghost
}

func newS3FIFO(ns *Blocks, capacity int64) *s3fifo {
	o := &s3fifo{ns: ns, queues: [2]list{newList(), newList()}, entrant: none}
	o.ghost.at = make(map[uint64]int)
	o.resize(capacity)
	return o
}

func (o *s3fifo) insert(id ID, _ Access) {
	o.settle()
	n := o.ns.at(id)
	n.queue, n.uses = entering, 0
	o.entrant = id
}

// settle places the entrant, now that the evictions it caused are done.
func (o *s3fifo) settle() {
	id := o.entrant
	if id == none {
		return
	}
	o.entrant = none
	q := small
	if o.ghost.take(o.ns.at(id).key) {
		q = main
	}
	o.enter(id, q)
}

func (o *s3fifo) enter(id ID, q uint8) {
	n := o.ns.at(id)
	n.queue, n.uses = q, 0
	o.weight[q] += n.weight
	o.ns.pushNewest(&o.queues[q], id)
}

func (o *s3fifo) exit(id ID) {
	n := o.ns.at(id)
	o.weight[n.queue] -= n.weight
	o.ns.unlink(&o.queues[n.queue], id)
}

func (o *s3fifo) hit(id ID, _ Access) {
	o.settle()
	n := o.ns.at(id)
	n.uses = min(3, n.uses+1)
}

func (o *s3fifo) leave(id ID, evicted bool) {
	if id == o.entrant {
		o.settle()
	}
	n := o.ns.at(id)
	o.exit(id)
	if evicted && n.queue == small {
		o.ghost.put(n.key, n.weight)
	}
}

// next gives second chances until it finds a block without one. Each costs one
// earlier hit, so the work is constant per hit, not per call.
func (o *s3fifo) next() (ID, bool) {
	for {
		if s := &o.queues[small]; !s.empty() && (o.weight[small] >= o.smallCap || o.queues[main].empty()) {
			id := s.oldest
			if o.ns.at(id).uses <= 1 {
				return id, true
			}
			o.exit(id)
			o.enter(id, main)
			continue
		}
		m := &o.queues[main]
		if m.empty() {
			return o.entrant, o.entrant != none
		}
		id := m.oldest
		if o.ns.at(id).uses == 0 {
			return id, true
		}
		o.ns.at(id).uses--
		o.ns.unlink(m, id)
		o.ns.pushNewest(m, id)
	}
}

func (o *s3fifo) hide(id ID) {
	o.settle()
	o.ns.unlink(&o.queues[o.ns.at(id).queue], id)
}

func (o *s3fifo) show(id ID, newest bool) {
	o.settle()
	o.ns.push(&o.queues[o.ns.at(id).queue], id, newest)
}

func (o *s3fifo) resize(capacity int64) {
	o.smallCap = max(1, capacity/10)
	o.ghost.resize(capacity - o.smallCap)
}

// ghost is a FIFO of the keys of evicted blocks, as much as limit weighs.
type ghost struct {
	at     map[uint64]int // key to its number in fifo, counted from the first ever
	fifo   []ghostEntry   // entries taken out of turn are stale: at disagrees
	first  int            // number of fifo[0]
	weight int64
	limit  int64
}

type ghostEntry struct {
	key    uint64
	weight int64
}

func (g *ghost) put(key uint64, weight int64) {
	g.take(key)
	g.at[key] = g.first + len(g.fifo)
	g.fifo = append(g.fifo, ghostEntry{key, weight})
	g.weight += weight
	g.trim()
	if len(g.fifo) > 2*len(g.at)+64 {
		g.compact()
	}
}

func (g *ghost) take(key uint64) bool {
	i, ok := g.at[key]
	if ok {
		g.weight -= g.fifo[i-g.first].weight
		delete(g.at, key)
	}
	return ok
}

func (g *ghost) resize(limit int64) {
	g.limit = limit
	g.trim()
}

func (g *ghost) trim() {
	for g.weight > g.limit && len(g.fifo) > 0 {
		if e := g.fifo[0]; g.live(0) {
			g.weight -= e.weight
			delete(g.at, e.key)
		}
		g.fifo = g.fifo[1:]
		g.first++
	}
}

// live reports whether fifo[i] was not taken.
func (g *ghost) live(i int) bool {
	at, ok := g.at[g.fifo[i].key]
	return ok && at == g.first+i
}

// compact drops the stale entries.
func (g *ghost) compact() {
	live := make([]ghostEntry, 0, 2*len(g.at)+64)
	for i, e := range g.fifo {
		if g.live(i) {
			live = append(live, e)
		}
	}
	g.fifo, g.first = live, 0
	for i, e := range live {
		g.at[e.key] = i
	}
}

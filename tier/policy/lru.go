package policy

// lru evicts the block used longest ago.
type lru struct {
	ns *Blocks
	l  list
}

func newLRU(ns *Blocks) *lru { return &lru{ns: ns, l: newList()} }

func (o *lru) insert(id ID, _ Access) { o.ns.pushNewest(&o.l, id) }

func (o *lru) hit(id ID, _ Access) {
	o.ns.unlink(&o.l, id)
	o.ns.pushNewest(&o.l, id)
}

func (o *lru) leave(id ID, _ bool)     { o.ns.unlink(&o.l, id) }
func (o *lru) next() (ID, bool)        { return o.l.oldest, !o.l.empty() }
func (o *lru) hide(id ID)              { o.ns.unlink(&o.l, id) }
func (o *lru) show(id ID, newest bool) { o.ns.push(&o.l, id, newest) }
func (o *lru) resize(capacity int64)   {}

// Queues of slru, named in node.queue.
const (
	probation uint8 = iota
	protected
)

// slru is a segmented LRU: a hit moves a block from probation to protected,
// which holds four fifths of the capacity and gives its oldest back.
type slru struct {
	ns              *Blocks
	queues          [2]list
	protectedWeight int64 // hidden members included
	protectedCap    int64
}

func newSLRU(ns *Blocks, capacity int64) *slru {
	o := &slru{ns: ns, queues: [2]list{newList(), newList()}}
	o.resize(capacity)
	return o
}

func (o *slru) insert(id ID, _ Access) {
	o.ns.at(id).queue = probation
	o.ns.pushNewest(&o.queues[probation], id)
}

func (o *slru) hit(id ID, _ Access) {
	n := o.ns.at(id)
	o.ns.unlink(&o.queues[n.queue], id)
	if n.queue == probation {
		n.queue = protected
		o.protectedWeight += n.weight
	}
	o.ns.pushNewest(&o.queues[protected], id)
	o.shrinkProtected()
}

// shrinkProtected moves the oldest of protected to the newest end of probation
// while protected is over its size.
func (o *slru) shrinkProtected() {
	for o.protectedWeight > o.protectedCap && !o.queues[protected].empty() {
		id := o.queues[protected].oldest
		n := o.ns.at(id)
		o.ns.unlink(&o.queues[protected], id)
		n.queue = probation
		o.protectedWeight -= n.weight
		o.ns.pushNewest(&o.queues[probation], id)
	}
}

func (o *slru) leave(id ID, _ bool) {
	n := o.ns.at(id)
	o.ns.unlink(&o.queues[n.queue], id)
	if n.queue == protected {
		o.protectedWeight -= n.weight
	}
}

func (o *slru) next() (ID, bool) {
	if !o.queues[probation].empty() {
		return o.queues[probation].oldest, true
	}
	return o.queues[protected].oldest, !o.queues[protected].empty()
}

func (o *slru) hide(id ID) { o.ns.unlink(&o.queues[o.ns.at(id).queue], id) }

func (o *slru) show(id ID, newest bool) {
	o.ns.push(&o.queues[o.ns.at(id).queue], id, newest)
}

func (o *slru) resize(capacity int64) {
	o.protectedCap = int64(.8 * float64(capacity))
	o.shrinkProtected()
}

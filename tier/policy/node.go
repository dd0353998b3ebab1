package policy

// none is the end of a list.
const none = ID(1<<32 - 1)

// place says which list a block is linked in.
type place uint8

const (
	absent  place = iota
	ordered       // in the order
	parked        // was blocked when Victim looked at it; rechecked by later calls
)

// node is all that is kept per resident block: 32 bytes, no pointer. A block is
// in one list at a time, so the order and the parked list share the links.
type node struct {
	key        uint64
	weight     int64
	prev, next ID     // prev is towards the oldest end
	tick       uint32 // reuse: time of last use
	queue      uint8  // the order's list, or the block's class in reuse
	uses       uint8  // s3fifo: counter; reuse: number of uses, saturating
	level      uint8  // retention priority
	place      place
}

// list is a doubly linked list over nodes, oldest end first.
type list struct{ oldest, newest ID }

func newList() list { return list{none, none} }

func (l *list) empty() bool { return l.oldest == none }

const (
	chunkBits = 12 // nodes are allocated 4,096 (128 KiB) at a time: no insert copies what is there
	chunkSize = 1 << chunkBits
)

// Blocks holds what policies keep per block, by ID. It may be shared by the
// policies of several tenants in one tier, since a block is in one of them at a
// time; so the memory is 32 bytes per ID however many tenants there are. Those
// policies are then as unsafe for concurrent use as one.
//
// The zero value is ready.
type Blocks struct{ chunks []*[chunkSize]node }

func (ns *Blocks) at(id ID) *node { return &ns.chunks[id>>chunkBits][id%chunkSize] }

// known returns the node of id, nil if no block had that ID yet.
func (ns *Blocks) known(id ID) *node {
	if c := int(id >> chunkBits); c >= len(ns.chunks) || ns.chunks[c] == nil {
		return nil
	}
	return ns.at(id)
}

// grown returns the node of id and makes room for it.
func (ns *Blocks) grown(id ID) *node {
	c := int(id >> chunkBits)
	for c >= len(ns.chunks) {
		ns.chunks = append(ns.chunks, nil)
	}
	if ns.chunks[c] == nil {
		ns.chunks[c] = new([chunkSize]node)
	}
	return ns.at(id)
}

func (ns *Blocks) pushNewest(l *list, id ID) {
	n := ns.at(id)
	n.prev, n.next = l.newest, none
	if l.newest == none {
		l.oldest = id
	} else {
		ns.at(l.newest).next = id
	}
	l.newest = id
}

func (ns *Blocks) pushOldest(l *list, id ID) {
	n := ns.at(id)
	n.prev, n.next = none, l.oldest
	if l.oldest == none {
		l.newest = id
	} else {
		ns.at(l.oldest).prev = id
	}
	l.oldest = id
}

// push links id at the newest or the oldest end.
func (ns *Blocks) push(l *list, id ID, newest bool) {
	if newest {
		ns.pushNewest(l, id)
	} else {
		ns.pushOldest(l, id)
	}
}

func (ns *Blocks) unlink(l *list, id ID) {
	n := ns.at(id)
	if n.prev == none {
		l.oldest = n.next
	} else {
		ns.at(n.prev).next = n.next
	}
	if n.next == none {
		l.newest = n.prev
	} else {
		ns.at(n.next).prev = n.prev
	}
}

package policy

import "cmp"

// rank is the eviction key of a block in an lfu order, smallest first.
type rank struct {
	major int64  // frequency, plus the age of the cache in lfuda
	seq   uint64 // number of the offer that fixed the key
	minor int32  // −position where depth counts, else 0
	id    ID
}

// lfu evicts the smallest (major, minor, seq). Its three variants differ in what
// the key is made of.
type lfu struct {
	heap    heap[rank]
	members []member // by ID
	seq     uint64
	age     int64 // lfuda: major of the last eviction
	byDepth bool  // among equals the deeper block goes first
	dynamic bool  // lfuda: the age is added to the frequency
}

type member struct {
	rank
	freq int32
	slot int32 // in heap, unless hidden
}

func newLFU(byDepth, dynamic bool) *lfu {
	o := &lfu{byDepth: byDepth, dynamic: dynamic}
	o.heap.before = func(a, b *rank) bool {
		return cmp.Or(cmp.Compare(a.major, b.major), cmp.Compare(a.minor, b.minor), cmp.Compare(a.seq, b.seq)) < 0
	}
	o.heap.moved = func(r *rank, slot int) { o.members[r.id].slot = int32(slot) }
	return o
}

func (o *lfu) insert(id ID, a Access) {
	for int(id) >= len(o.members) {
		o.members = append(o.members, member{})
	}
	o.members[id] = member{rank: rank{id: id}}
	o.heap.push(o.rerank(id, a))
}

func (o *lfu) hit(id ID, a Access) {
	r := o.rerank(id, a)
	o.heap.replace(int(o.members[id].slot), r)
}

// rerank counts an offer and fixes the key of the block.
func (o *lfu) rerank(id ID, a Access) rank {
	m := &o.members[id]
	o.seq++
	m.freq++
	m.seq = o.seq
	m.major = int64(m.freq)
	if o.dynamic {
		m.major += o.age
	}
	if o.byDepth {
		m.minor = -a.Position
	}
	return m.rank
}

func (o *lfu) leave(id ID, evicted bool) {
	if evicted {
		o.age = o.members[id].major
	}
	o.hide(id)
}

func (o *lfu) next() (ID, bool) {
	if len(o.heap.keys) == 0 {
		return none, false
	}
	return o.heap.keys[0].id, true
}

func (o *lfu) hide(id ID)         { o.heap.remove(int(o.members[id].slot)) }
func (o *lfu) show(id ID, _ bool) { o.heap.push(o.members[id].rank) }
func (o *lfu) resize(int64)       {}

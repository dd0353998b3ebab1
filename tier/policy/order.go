package policy

// order ranks resident blocks for eviction. Its nodes are filled in by Policy
// before insert. A hidden block stays a member (its weight and its history
// count) but is not offered by next; hit and leave are called for visible
// blocks only.
type order interface {
	insert(id ID, a Access)
	hit(id ID, a Access)
	leave(id ID, evicted bool)
	next() (ID, bool)
	hide(id ID)
	show(id ID, newest bool) // at the newest or the oldest end of where it was
	resize(capacity int64)
}

// leveled gives retention priorities to an order that has none. The inner order
// holds every block and ranks those of level 0; blocks of a higher level are
// hidden in it, and each level is an LRU list of its own.
type leveled struct {
	order
	ns     *Blocks
	levels [MaxPriority + 1]list
}

func newLeveled(ns *Blocks, inner order) *leveled {
	l := &leveled{order: inner, ns: ns}
	for i := range l.levels {
		l.levels[i] = newList()
	}
	return l
}

func (l *leveled) insert(id ID, a Access) {
	l.order.insert(id, a)
	if level := l.ns.at(id).level; level > 0 {
		l.order.hide(id)
		l.ns.pushNewest(&l.levels[level], id)
	}
}

func (l *leveled) hit(id ID, a Access) {
	level := l.ns.at(id).level
	if level == 0 {
		l.order.hit(id, a)
		return
	}
	l.ns.unlink(&l.levels[level], id)
	l.order.show(id, true)
	l.order.hit(id, a)
	l.order.hide(id)
	l.ns.pushNewest(&l.levels[level], id)
}

func (l *leveled) leave(id ID, evicted bool) {
	if level := l.ns.at(id).level; level > 0 {
		l.ns.unlink(&l.levels[level], id)
		l.order.show(id, false)
	}
	l.order.leave(id, evicted)
}

func (l *leveled) next() (ID, bool) {
	if id, ok := l.order.next(); ok {
		return id, true
	}
	for i := 1; i < len(l.levels); i++ {
		if !l.levels[i].empty() {
			return l.levels[i].oldest, true
		}
	}
	return none, false
}

func (l *leveled) hide(id ID) {
	if level := l.ns.at(id).level; level > 0 {
		l.ns.unlink(&l.levels[level], id)
		return
	}
	l.order.hide(id)
}

func (l *leveled) show(id ID, newest bool) {
	if level := l.ns.at(id).level; level > 0 {
		l.ns.push(&l.levels[level], id, newest)
		return
	}
	l.order.show(id, newest)
}

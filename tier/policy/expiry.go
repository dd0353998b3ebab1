package policy

// expiry finds the block whose TTL ends first. Only blocks with a TTL cost
// memory.
type expiry struct {
	heap heap[deadline]
	slot map[ID]int // in heap
}

type deadline struct {
	at int64
	id ID
}

func newExpiry() *expiry {
	e := &expiry{slot: make(map[ID]int)}
	e.heap.before = func(a, b *deadline) bool { return a.at < b.at || a.at == b.at && a.id < b.id }
	e.heap.moved = func(d *deadline, slot int) { e.slot[d.id] = slot }
	return e
}

// set gives a block its deadline; 0 takes it away.
func (e *expiry) set(id ID, at int64) {
	slot, ok := e.slot[id]
	switch {
	case at == 0 && ok:
		delete(e.slot, id)
		e.heap.remove(slot)
	case at == 0:
	case ok:
		e.heap.replace(slot, deadline{at, id})
	default:
		e.heap.push(deadline{at, id})
	}
}

// passed reports whether a block has a deadline that is over.
func (e *expiry) passed(id ID, now int64) bool {
	slot, ok := e.slot[id]
	return ok && e.heap.keys[slot].at <= now
}

func (e *expiry) first() (deadline, bool) {
	if len(e.heap.keys) == 0 {
		return deadline{}, false
	}
	return e.heap.keys[0], true
}

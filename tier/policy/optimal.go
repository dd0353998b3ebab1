package policy

import "math"

// Optimal is the bound that no policy can pass: a cache that knows the future,
// and after each request keeps the blocks whose next use is soonest; among
// blocks of one request the deeper goes first.
func Optimal(capacity int64, t Trace) Result {
	var res Result
	next := nextUses(&t)
	cached := make(map[uint64]int) // to its slot
	var h heap[use]
	h.before = func(a, b *use) bool {
		if a.next != b.next {
			return a.next > b.next
		}
		if a.position != b.position {
			return a.position > b.position
		}
		return a.name < b.name
	}
	h.moved = func(u *use, slot int) { cached[u.name] = slot }
	i := 0
	for r := range t.Requests {
		q := &t.Requests[r]
		chain := t.chain(q)
		hits, prefix := int64(0), true
		for j, name := range chain {
			u := use{next[i+j], int32(j), name}
			slot, ok := cached[name]
			if ok {
				res.Any++
				h.replace(slot, u)
			} else {
				h.push(u)
			}
			if prefix = prefix && ok; prefix {
				hits++
			}
		}
		i += len(chain)
		res.count(&t, q, chain, hits)
		for int64(len(h.keys)) > capacity {
			delete(cached, h.keys[0].name)
			h.remove(0)
			res.Evicted++
		}
	}
	return res
}

// use is the next use of a cached block: the number of a request.
type use struct {
	next     int32
	position int32
	name     uint64
}

// nextUses is the request of the next use of every block of every request.
func nextUses(t *Trace) []int32 {
	var next []int32
	last := make(map[uint64]int) // to its place in next
	for r := range t.Requests {
		for _, name := range t.chain(&t.Requests[r]) {
			if at, ok := last[name]; ok {
				next[at] = int32(r)
			}
			last[name] = len(next)
			next = append(next, math.MaxInt32)
		}
	}
	return next
}

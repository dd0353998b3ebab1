package gpu

import "slices"

// Ranges is living memory in order of address, for drivers: which of it an address lies in. Not safe for concurrent use.
type Ranges[M interface {
	Addr() Addr
	Size() int64
}] []M

// Find returns the memory that holds n bytes at a.
func (r Ranges[M]) Find(a Addr, n int64) (m M, ok bool) {
	i := r.before(a)
	if i < 0 || n < 0 {
		return m, false
	}
	end := r[i].Addr() + Addr(r[i].Size())
	if a >= end || uint64(n) > uint64(end-a) {
		return m, false
	}
	return r[i], true
}

// Insert adds m, unless it overlaps memory that is there.
func (r *Ranges[M]) Insert(m M) bool {
	i := r.before(m.Addr())
	if i >= 0 && m.Addr() < (*r)[i].Addr()+Addr((*r)[i].Size()) {
		return false
	}
	if i+1 < len(*r) && m.Addr()+Addr(m.Size()) > (*r)[i+1].Addr() {
		return false
	}
	*r = slices.Insert(*r, i+1, m)
	return true
}

// Delete removes the memory that starts at a.
func (r *Ranges[M]) Delete(a Addr) {
	if i := r.before(a); i >= 0 && (*r)[i].Addr() == a {
		*r = slices.Delete(*r, i, i+1)
	}
}

// before is the index of the last memory that starts at or before a, or -1.
func (r Ranges[M]) before(a Addr) int {
	i, exact := slices.BinarySearchFunc(r, a, func(m M, a Addr) int {
		switch {
		case m.Addr() < a:
			return -1
		case m.Addr() > a:
			return 1
		}
		return 0
	})
	if exact {
		return i
	}
	return i - 1
}

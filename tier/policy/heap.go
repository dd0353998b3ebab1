package policy

// heap is a binary min-heap of keys that tells where each key lies, so that any
// key can be changed or removed.
type heap[K any] struct {
	keys   []K
	before func(a, b *K) bool // a total order: equal keys would make the result depend on history
	moved  func(k *K, slot int)
}

func (h *heap[K]) push(k K) {
	h.keys = append(h.keys, k)
	h.moved(&h.keys[len(h.keys)-1], len(h.keys)-1)
	h.up(len(h.keys) - 1)
}

// replace changes the key at a slot.
func (h *heap[K]) replace(slot int, k K) {
	h.keys[slot] = k
	h.moved(&h.keys[slot], slot)
	h.down(h.up(slot))
}

func (h *heap[K]) remove(slot int) {
	last := len(h.keys) - 1
	k := h.keys[last]
	h.keys = h.keys[:last]
	if slot < last {
		h.replace(slot, k)
	}
}

func (h *heap[K]) swap(i, j int) {
	h.keys[i], h.keys[j] = h.keys[j], h.keys[i]
	h.moved(&h.keys[i], i)
	h.moved(&h.keys[j], j)
}

func (h *heap[K]) up(i int) int {
	for i > 0 && h.before(&h.keys[i], &h.keys[(i-1)/2]) {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	return i
}

func (h *heap[K]) down(i int) {
	for {
		c := 2*i + 1
		if c+1 < len(h.keys) && h.before(&h.keys[c+1], &h.keys[c]) {
			c++
		}
		if c >= len(h.keys) || !h.before(&h.keys[c], &h.keys[i]) {
			return
		}
		h.swap(i, c)
		i = c
	}
}

package tier

import "sync"

// maxUses bounds the uses that wait to be told to the policies.
const maxUses = 8192

// use is a block that a Fetch granted and that its policy has not been told of.
type use struct {
	id     blockID
	now    uint32 // when, Unix seconds
	length int32  // blocks in the chain of the request
}

// indexLock is Hierarchy.mu. Telling the policies of a hit costs more than the
// hit, so Fetch only notes it, and whoever takes the lock next tells them first:
// everybody but Fetch and Lookup finds the orders, counts and pins as if each use
// had been told at once. A block with a use that is not told cannot go: it is
// pinned by its Hold, and Release tells first.
type indexLock struct {
	sync.Mutex
	uses   []use
	settle func() // tells the policies of uses
}

// Lock takes the lock with nothing left to tell.
func (l *indexLock) Lock() {
	l.Mutex.Lock()
	if len(l.uses) > 0 {
		l.settle()
	}
}

// lockForHit takes the lock as it is: for those who read the index and pin, and
// touch no order.
func (l *indexLock) lockForHit() { l.Mutex.Lock() }

// settleUses tells the policies of the uses noted. Requires Hierarchy.mu.
func (h *Hierarchy) settleUses() {
	for _, u := range h.mu.uses {
		b := h.mu.index.at(u.id)
		h.touch(u.id, b, h.of(b).tenant, int(u.length), u.now)
	}
	h.mu.uses = h.mu.uses[:0]
}

package tier

import "slices"

// fifo is a first-in first-out queue; its storage is reused.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(v T) {
	if q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

// pop takes the oldest; there must be one.
func (q *fifo[T]) pop() T {
	var zero T
	v := q.items[q.head]
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
	return v
}

// dirtyQueue is a queue of blocks to write down. An entry whose block has gone
// stays until it is popped or the queue is swept; live counts the others. At
// most 2 × live + sweepAt entries.
type dirtyQueue struct {
	fifo[dirtyEntry]
	live int
}

// sweepAt is the number of entries below which stale ones are not looked for.
const sweepAt = 1024

type dirtyEntry struct {
	id    blockID
	epoch uint32
	since uint32 // Unix seconds
}

// oldest is the time of the oldest entry.
func (q *dirtyQueue) oldest() (since uint32, ok bool) {
	if q.len() == 0 {
		return 0, false
	}
	return q.items[q.head].since, true
}

// sweep removes stale entries if there are too many.
func (q *dirtyQueue) sweep(stale func(dirtyEntry) bool) {
	if q.len() > 2*q.live+sweepAt {
		q.items, q.head = slices.DeleteFunc(q.items[q.head:], stale), 0
	}
}

// waiter lets one caller wait for several things that end under Hierarchy.mu.
type waiter struct {
	left int
	ch   chan struct{}
}

func newWaiter() *waiter { return &waiter{ch: make(chan struct{})} }

// done ends one of the things.
func (w *waiter) done() {
	w.left--
	if w.left == 0 {
		close(w.ch)
	}
}

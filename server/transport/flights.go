package transport

import (
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// flights is the pages that are being fetched: the first call that wants a page
// brings it, the others hear of it.
type flights struct {
	mu  sync.Mutex
	out map[flight][]listener
}

// flight is a page and the length that is expected of it.
type flight struct {
	page  paging.PageID
	bytes uint32
}

// listener is a page of a call that waits for another call. The first of a page
// is the one that brings it.
type listener struct {
	c *call
	i int
}

func newFlights() *flights { return &flights{out: map[flight][]listener{}} }

// lead makes page i of c the one that brings the page, or, if another does, has
// c.heard called when that has ended.
func (f *flights) lead(id flight, c *call, i int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	waiting, flying := f.out[id]
	if flying {
		f.out[id] = append(waiting, listener{c, i})
		return false
	}
	f.out[id] = nil
	return true
}

// landed tells those who wait what became of a page that was looked for at
// these owners.
func (f *flights) landed(id flight, owners []placement.NodeID, r Result) {
	f.mu.Lock()
	waiting := f.out[id]
	delete(f.out, id)
	f.mu.Unlock()
	for _, w := range waiting {
		w.c.heard(w.i, owners, r)
	}
}

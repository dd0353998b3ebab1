// Package tier says what a medium that stores KV pages is, and composes media
// into one hierarchy.
//
// # The Hierarchy
//
// New blocks enter RAM; cold ones are written down in the background; hits come
// up, and the lower copy is kept: pages are immutable, so demoting again is
// free. The Hierarchy owns the one index from blocks to pages, the pins, the
// eviction policies and the state of every block in every tier. A tier owns
// bytes and space and knows no keys (Tier, Arena, Durable).
//
// One mutex guards all of that. No I/O is done, no page byte is read, copied or
// summed, nothing is called back and nothing waits while it is held. A Fetch of
// resident blocks takes it once.
//
// A block is used through a Hold (Fetch) or an Attempt (Reserve). Both keep
// what they have where it is, for as long as the caller likes: time never ends
// a Hold, and ends an Attempt only where no copy runs. A page that Fetch grants
// was summed when its bytes were copied to where they lie, or compared with that
// sum after the last copy.
//
// Parts of a block are stored when they come and leave together. A block of
// which parts are wanted and do not come is dropped.
//
// # Failure
//
// A disk copy that cannot be loaded, is damaged, or is another page's, is
// dropped, counted, and a shortfall of that Fetch. A disk that takes nothing is
// bypassed: blocks leave RAM without a copy, counted, until it comes back. RAM
// full of pages that cannot go is an outcome, at once; Reserve and Fetch wait, as
// long as their context allows, only where writing dirty blocks down makes room.
//
// # Goroutines
//
// With a durable tier one demotion writer and Config.LoadWorkers loaders, from
// Open to Close; none without. None per page or call.
package tier

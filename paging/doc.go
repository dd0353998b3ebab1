// Package paging defines the nouns of kvtier: layouts and their parts,
// namespaces, block names, storage keys, slots, page checksums, the slab
// allocator and the hash chains of engines. It is pure: no goroutine, lock,
// clock, randomness, I/O or map-order dependence.
//
// Ownership of bytes: a []byte argument is borrowed until the call returns. It
// is never retained and never modified unless the comment says so.
//
// Nothing here is safe for concurrent use unless its comment says so; values of
// the identifier types are immutable and may be shared freely.
package paging

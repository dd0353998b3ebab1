package paging

import (
	"encoding/hex"
	"math/bits"
)

// NamespaceID names one layout + tenant + salt: the BLAKE3-256 of the canonical
// encoding of a Namespace. Pages of different namespaces are never interchangeable.
type NamespaceID [32]byte

// BlockName names a block inside a namespace: the engine's chain hash, see
// NameFromEngineHash.
type BlockName [32]byte

// Key is the storage key of one page, see StorageKey.
type Key [32]byte

// String is lower-case hex.
func (id NamespaceID) String() string { return hex.EncodeToString(id[:]) }

// String is lower-case hex.
func (n BlockName) String() string { return hex.EncodeToString(n[:]) }

// String is lower-case hex.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// Short is the first 12 hex digits, for people.
func (n BlockName) Short() string { return hex.EncodeToString(n[:6]) }

// Short is the first 12 hex digits, for people.
func (id NamespaceID) Short() string { return hex.EncodeToString(id[:6]) }

// BlockID names a block on a node.
type BlockID struct {
	Namespace NamespaceID
	Name      BlockName
}

// PageID names a page on a node.
type PageID struct {
	BlockID
	Part int // number of the part in the layout
}

// PartSet is a set of part numbers of one layout: bit i stands for part i.
type PartSet uint64

// MaxParts is the most parts that a layout can have.
const MaxParts = 64

// AllParts is the set of the first n parts. n is 0 to MaxParts.
func AllParts(n int) PartSet {
	if n >= MaxParts {
		return ^PartSet(0)
	}
	return PartSet(1)<<n - 1
}

// Has reports whether part i is in the set.
func (s PartSet) Has(i int) bool { return s>>uint(i)&1 == 1 }

// With returns the set with part i.
func (s PartSet) With(i int) PartSet { return s | 1<<uint(i) }

// Without returns the set without part i.
func (s PartSet) Without(i int) PartSet { return s &^ (1 << uint(i)) }

// Len is the number of parts in the set.
func (s PartSet) Len() int { return bits.OnesCount64(uint64(s)) }

// Contains reports whether every part of t is in s.
func (s PartSet) Contains(t PartSet) bool { return t&^s == 0 }

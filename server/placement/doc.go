// Package placement is the vocabulary of a cluster and its pure decisions: who
// the nodes are, what they hold, where things should go. Every part of the
// server may import it; it imports no part.
//
// PlanDrain and PlanRebalance make a Plan from the Usage of a cluster. Who carries it
// out checks each step again: a plan is made from what was true a moment ago.
//
// It has no goroutine, lock, clock, randomness or I/O: time and random numbers
// arrive as arguments.
package placement

import (
	"encoding/hex"
	"fmt"

	"github.com/kvtier/kvtier/paging"
)

// NodeID names a node: 16 bytes that its data directory keeps.
type NodeID [16]byte

// String is lower-case hex.
func (id NodeID) String() string { return hex.EncodeToString(id[:]) }

// Short is the first 8 hex digits, for people.
func (id NodeID) Short() string { return hex.EncodeToString(id[:4]) }

// Incarnation numbers the starts of a node; it rises at each.
type Incarnation uint64

// BlockKey names a block in the directory: the first 16 bytes of its storage key.
type BlockKey [16]byte

// String is lower-case hex.
func (k BlockKey) String() string { return hex.EncodeToString(k[:]) }

// ParseNodeID reads what NodeID.String wrote.
func ParseNodeID(s string) (id NodeID, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("node id %q is not 32 hex digits: %w", s, paging.ErrInvalid)
	}
	return NodeID(b), nil
}

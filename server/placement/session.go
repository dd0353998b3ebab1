package placement

import (
	"encoding/hex"
	"errors"
)

// SessionID is the name of a session.
type SessionID string

// Epoch is the fencing number of a session's ownership: it rises by one with each
// change of the owner, and what is done under an older one changes nothing.
type Epoch uint64

// MoveID names one move of a session.
type MoveID [16]byte

// String is lower-case hex.
func (id MoveID) String() string { return hex.EncodeToString(id[:]) }

// Errors of planning.
var (
	// ErrNoTarget: no node may take what is to be moved.
	ErrNoTarget = errors.New("no node can take it")
	// ErrUnknownNode: the usage does not name the node.
	ErrUnknownNode = errors.New("unknown node")
)

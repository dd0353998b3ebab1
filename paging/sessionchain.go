package paging

import (
	"fmt"

	"github.com/zeebo/blake3"
)

// SegmentBlocks is how many block names a full segment of a session has.
const SegmentBlocks = 1024

// SessionEnd is where the chain of a session ends: what is kept of it where its
// names are not. The zero value is the end of a chain without blocks.
type SessionEnd struct {
	Blocks, Tokens uint64
	Tip            BlockName // of the last block
	Hash           [32]byte  // running BLAKE3 of all names
	SegmentHash    [32]byte  // the same at the end of the last full segment; zero: none is full
}

// SessionChain is the names of a session's blocks in order, and their running hash.
// Not safe for concurrent use; the zero value is not usable, see NewSessionChain.
type SessionChain struct {
	names []BlockName
	hash  *blake3.Hasher
	end   SessionEnd
}

// NewSessionChain returns a chain without blocks.
func NewSessionChain() *SessionChain { return &SessionChain{hash: blake3.New()} }

// Append adds blocks with so many tokens in all and returns the new end.
func (c *SessionChain) Append(names []BlockName, tokens uint64) SessionEnd {
	for i := range names {
		_, _ = c.hash.Write(names[i][:]) // never fails
		c.names = append(c.names, names[i])
		if len(c.names)%SegmentBlocks == 0 {
			c.end.SegmentHash = c.sum()
		}
	}
	if len(names) > 0 {
		c.end.Tip, c.end.Hash = names[len(names)-1], c.sum()
	}
	c.end.Blocks, c.end.Tokens = uint64(len(c.names)), c.end.Tokens+tokens
	return c.end
}

func (c *SessionChain) sum() (sum [32]byte) {
	c.hash.Digest().Read(sum[:]) //nolint:errcheck // never fails
	return sum
}

// End is where the chain ends.
func (c *SessionChain) End() SessionEnd { return c.end }

// Names are the names of blocks from to to. They must not be changed. ErrInvalid for
// a range that is not in the chain.
func (c *SessionChain) Names(from, to uint64) ([]BlockName, error) {
	if from > to || to > uint64(len(c.names)) {
		return nil, fmt.Errorf("blocks %d to %d of a session of %d: %w", from, to, len(c.names), ErrInvalid)
	}
	return c.names[from:to:to], nil
}

// Fork is a chain that begins with the first blocks of c, of so many tokens.
func (c *SessionChain) Fork(blocks, tokens uint64) (*SessionChain, error) {
	names, err := c.Names(0, blocks)
	if err != nil {
		return nil, err
	}
	fork := NewSessionChain()
	fork.Append(names, tokens)
	return fork, nil
}

// ProveSession tells how many of these names are those of a session that ends so: all
// of them up to its end, else up to its last full segment, else none. Names beyond the
// end are not looked at. What it proves may be taken over; the rest is lost.
func ProveSession(names []BlockName, end SessionEnd) (blocks uint64) {
	full := end.Blocks / SegmentBlocks * SegmentBlocks
	c := NewSessionChain()
	if n := uint64(len(names)); full > 0 && n >= full {
		if c.Append(names[:full], 0).Hash != end.SegmentHash {
			return 0
		}
		blocks = full
	} else if full > 0 {
		return 0
	}
	if n := uint64(len(names)); end.Blocks > full && n >= end.Blocks && c.Append(names[full:end.Blocks], 0).Hash == end.Hash {
		blocks = end.Blocks
	}
	return blocks
}

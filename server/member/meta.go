package member

import (
	"encoding/binary"
	"fmt"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// maxMetaBytes is what gossip carries of a node with each of its messages; the
// library panics beyond.
const maxMetaBytes = 512

// metaVersion is the first byte of the encoding.
const metaVersion = 1

// meta is what a node says of itself.
type meta struct {
	id          placement.NodeID
	incarnation placement.Incarnation
	name        string
	peer        string
	rpc         string
	leaving     bool // said before a node leaves: the library does not tell leaving from dying
}

// flags of the second byte.
const flagLeaving = 1

// encode is version, flags, id, incarnation, then name, peer and rpc address with a
// length byte each.
func (m *meta) encode() ([]byte, error) {
	b := []byte{metaVersion, 0}
	if m.leaving {
		b[1] = flagLeaving
	}
	b = append(b, m.id[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.incarnation))
	for _, s := range []string{m.name, m.peer, m.rpc} {
		if len(s) > 255 {
			return nil, fmt.Errorf("node name or address %.40q... has %d bytes, more than 255: %w", s, len(s), paging.ErrInvalid)
		}
		b = append(append(b, byte(len(s))), s...)
	}
	if len(b) > maxMetaBytes {
		return nil, fmt.Errorf("node name and addresses need %d bytes of gossip metadata, more than %d: use shorter ones: %w", len(b), maxMetaBytes, paging.ErrInvalid)
	}
	return b, nil
}

func decodeMeta(b []byte) (meta, error) {
	var m meta
	const fixed = 2 + len(m.id) + 8
	if len(b) < fixed || b[0] != metaVersion {
		return m, fmt.Errorf("gossip metadata of %d bytes: %w", len(b), paging.ErrIncompatible)
	}
	m.leaving = b[1]&flagLeaving != 0
	copy(m.id[:], b[2:])
	m.incarnation = placement.Incarnation(binary.LittleEndian.Uint64(b[2+len(m.id):]))
	rest := b[fixed:]
	for _, s := range []*string{&m.name, &m.peer, &m.rpc} {
		if len(rest) == 0 || len(rest) < 1+int(rest[0]) {
			return m, fmt.Errorf("gossip metadata ends early: %w", paging.ErrIncompatible)
		}
		*s, rest = string(rest[1:1+rest[0]]), rest[1+int(rest[0]):]
	}
	return m, nil
}

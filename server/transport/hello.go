package transport

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Kind is what a connection is for.
type Kind uint8

// Kinds of connections.
const (
	Raft    Kind = 1 // the directory's
	Control Kind = 2
	Bulk    Kind = 3

	discover Kind = 4 // of a node that does not know the cluster yet
)

// String is the name used in metrics.
func (k Kind) String() string {
	switch k {
	case Raft:
		return "raft"
	case Control:
		return "control"
	case Bulk:
		return "bulk"
	case discover:
		return "discover"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Refusal says why a connection was not taken.
type Refusal uint8

// Refusals. Those below Malformed are told to the dialer.
const (
	NotRefused   Refusal = iota
	WrongCluster         // the label is another cluster's
	WrongVersion         // the versions do not meet
	WrongNode            // another node is meant: this one stands at its address
	WrongName            // the certificate does not name the node that dials
	WrongKind            // nothing here takes this kind of connection
	Overloaded           // too many connections
	Malformed            // what came was no hello
	NoTLS                // the TLS handshake failed
	TooSlow              // the handshake did not end in time
	refusals
)

// String is the name used in metrics.
func (r Refusal) String() string {
	names := [refusals]string{"none", "wrong_cluster", "wrong_version", "wrong_node", "wrong_name", "wrong_kind", "overloaded", "malformed", "tls", "slow"}
	if r < refusals {
		return names[r]
	}
	return fmt.Sprintf("refusal(%d)", uint8(r))
}

// RefusedError says that a node did not take a connection. It unwraps to
// paging.ErrIncompatible for versions, to paging.ErrUnavailable if there were too
// many connections or nobody takes the kind, else to paging.ErrDenied.
type RefusedError struct {
	Why  Refusal
	Node placement.NodeID // that refused
}

// Error implements error.
func (e *RefusedError) Error() string {
	return fmt.Sprintf("node %s refused the connection: %s", e.Node.Short(), e.Why)
}

// Unwrap is the sentinel of the refusal.
func (e *RefusedError) Unwrap() error {
	switch e.Why {
	case WrongVersion:
		return paging.ErrIncompatible
	case Overloaded, WrongKind:
		return paging.ErrUnavailable
	}
	return paging.ErrDenied
}

// versions is the range that a node speaks.
type versions struct{ oldest, newest uint16 }

// meet is the newest version that both speak.
func (v versions) meet(w versions) (uint16, bool) {
	n := min(v.newest, w.newest)
	return n, n >= v.oldest && n >= w.oldest && n > 0
}

// hello is how a dialer begins. Its encoding is the same in all versions:
//
//	0 magic, 4 kind, 5 length of the label, 6 oldest and 8 newest version, 10 zeros,
//	16 who dials, 32 who is meant, 48 checksum of the 48 bytes before and the label, 56 label
type hello struct {
	kind     Kind
	speaks   versions
	from, to placement.NodeID
	cluster  string
}

const (
	helloMagic      = "kvtp"
	welcomeMagic    = "kvtw"
	helloBytes      = 56 // without the label
	welcomeBytes    = 40
	maxClusterBytes = 255
)

func (h *hello) encode() []byte {
	b := make([]byte, helloBytes, helloBytes+len(h.cluster))
	copy(b, helloMagic)
	b[4], b[5] = byte(h.kind), byte(len(h.cluster))
	binary.LittleEndian.PutUint16(b[6:], h.speaks.oldest)
	binary.LittleEndian.PutUint16(b[8:], h.speaks.newest)
	copy(b[16:], h.from[:])
	copy(b[32:], h.to[:])
	b = append(b, h.cluster...)
	binary.LittleEndian.PutUint64(b[48:], helloSum(b))
	return b
}

func helloSum(b []byte) uint64 {
	var whole [helloBytes - 8 + maxClusterBytes]byte
	n := copy(whole[:], b[:48])
	n += copy(whole[n:], b[helloBytes:])
	return paging.Checksum(whole[:n])
}

// errNoHello: the other side does not speak this protocol.
var errNoHello = errors.New("no hello of a node")

// readHello reads a hello. It takes four bytes before it decides that this is
// no node, and at most helloBytes and 255 in all.
func readHello(r io.Reader) (hello, error) {
	var buf [helloBytes + maxClusterBytes]byte
	if _, err := io.ReadFull(r, buf[:4]); err != nil {
		return hello{}, err
	}
	if string(buf[:4]) != helloMagic {
		return hello{}, errNoHello
	}
	if _, err := io.ReadFull(r, buf[4:helloBytes]); err != nil {
		return hello{}, err
	}
	b := buf[:helloBytes+int(buf[5])]
	if _, err := io.ReadFull(r, b[helloBytes:]); err != nil {
		return hello{}, err
	}
	if binary.LittleEndian.Uint64(b[48:]) != helloSum(b) {
		return hello{}, errNoHello
	}
	h := hello{
		kind:    Kind(b[4]),
		speaks:  versions{binary.LittleEndian.Uint16(b[6:]), binary.LittleEndian.Uint16(b[8:])},
		cluster: string(b[helloBytes:]),
	}
	copy(h.from[:], b[16:])
	copy(h.to[:], b[32:])
	return h, nil
}

// welcome is how a listener answers. Its encoding is the same in all versions:
//
//	0 magic, 4 refusal, 5 zero, 6 version chosen, 8 zeros, 16 who answers, 32 checksum of the 32 bytes before
//
// To another cluster a node does not say who it is.
type welcome struct {
	refusal Refusal
	version uint16
	node    placement.NodeID
}

func (w *welcome) encode() []byte {
	b := make([]byte, welcomeBytes)
	copy(b, welcomeMagic)
	b[4] = byte(w.refusal)
	binary.LittleEndian.PutUint16(b[6:], w.version)
	copy(b[16:], w.node[:])
	binary.LittleEndian.PutUint64(b[32:], paging.Checksum(b[:32]))
	return b
}

func readWelcome(r io.Reader) (welcome, error) {
	var b [welcomeBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return welcome{}, err
	}
	if !bytes.Equal(b[:4], []byte(welcomeMagic)) || binary.LittleEndian.Uint64(b[32:]) != paging.Checksum(b[:32]) {
		return welcome{}, errNoHello
	}
	return welcome{Refusal(b[4]), binary.LittleEndian.Uint16(b[6:]), placement.NodeID(b[16:32])}, nil
}

// judge is the answer to a hello: what refuses it, or the version to speak.
// named reports whether the certificate of the dialer, if there is TLS, names a node.
func (m *Mux) judge(h *hello, named func(placement.NodeID) bool) welcome {
	w := welcome{node: m.cfg.ID}
	version, meet := m.cfg.versions.meet(h.speaks)
	joins := h.kind == discover && h.cluster == ""
	switch {
	case h.cluster != m.cfg.Cluster && !joins:
		return welcome{refusal: WrongCluster}
	case !meet:
		w.refusal = WrongVersion
	case h.to != m.cfg.ID && !joins:
		w.refusal = WrongNode
	case h.from == m.cfg.ID || h.from == (placement.NodeID{}) || !named(h.from):
		w.refusal = WrongName
	case !m.takes(h.kind):
		w.refusal = WrongKind
	default:
		w.version = version
	}
	return w
}

// greet is the dialer's half of the handshake.
func (m *Mux) greet(c net.Conn, kind Kind, to placement.NodeID) (version uint16, err error) {
	h := hello{kind: kind, speaks: m.cfg.versions, from: m.cfg.ID, to: to, cluster: m.cfg.Cluster}
	if _, err := c.Write(h.encode()); err != nil {
		return 0, err
	}
	w, err := readWelcome(c)
	switch {
	case err != nil:
		return 0, err
	case w.refusal != NotRefused:
		return 0, &RefusedError{Why: w.refusal, Node: to}
	case w.node != to:
		return 0, fmt.Errorf("node %s answers: %w", w.node.Short(), paging.ErrDenied)
	case w.version < m.cfg.versions.oldest || w.version > m.cfg.versions.newest:
		return 0, fmt.Errorf("node %s chose version %d: %w", w.node.Short(), w.version, paging.ErrIncompatible)
	}
	return w.version, nil
}

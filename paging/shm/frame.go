package shm

import (
	"encoding/binary"
	"fmt"

	"github.com/kvtier/kvtier/paging"
)

// MaxExtents is the most extents that one frame names; it stays well under the
// 253 descriptors that the kernel takes in one message.
const MaxExtents = 64

// AttachmentID names an attachment on the hand-off socket.
type AttachmentID [16]byte

// Kind says how the receiver maps memory.
type Kind uint32

// Kinds of memory.
const (
	KindRAM       Kind = 1 // an extent with a generation table; read-only
	KindStaging   Kind = 2 // staging; written by the receiver
	KindPool      Kind = 3 // an extent of a device pool, all of it slots; read-only
	KindPoolTable Kind = 4 // the generation table of the pool extent of the same number; read-only
	KindWorking   Kind = 5 // working pages on a device; written by the receiver
	KindRegion    Kind = 6 // memory of an engine that it hands to the daemon; its number is the engine's choice
)

// Extent is a piece of memory that is handed off.
type Extent struct {
	ID    paging.ExtentID
	Kind  Kind
	Bytes int64 // of the whole descriptor
	FD    int   // sending: borrowed until return; received: owned by the receiver
}

const (
	frameVersion = 1
	headerBytes  = 12
	entryBytes   = 16
	maxFrame     = headerBytes + 8 + MaxExtents*entryBytes
	maxExtent    = 1 << 46
)

var frameMagic = [4]byte{'K', 'V', 'T', 'H'}

type frameKind uint16

const (
	frameHello   frameKind = 1
	frameExtents frameKind = 2
	frameAck     frameKind = 3
)

// frame is one message of the hand-off socket. Which fields are used depends on
// the kind.
type frame struct {
	kind       frameKind
	attachment AttachmentID // hello
	seq        uint32       // extents, ack
	extents    []Extent     // extents, without descriptors
	count      uint32       // ack
}

func appendFrame(b []byte, f *frame) []byte {
	le := binary.LittleEndian
	b = append(b, frameMagic[:]...)
	b = le.AppendUint16(b, frameVersion)
	b = le.AppendUint16(b, uint16(f.kind))
	b = le.AppendUint32(b, 0)
	start := len(b)
	switch f.kind {
	case frameHello:
		b = append(b, f.attachment[:]...)
	case frameExtents:
		b = le.AppendUint32(b, f.seq)
		b = le.AppendUint32(b, uint32(len(f.extents)))
		for _, e := range f.extents {
			b = le.AppendUint32(b, uint32(e.ID))
			b = le.AppendUint32(b, uint32(e.Kind))
			b = le.AppendUint64(b, uint64(e.Bytes))
		}
	case frameAck:
		b = le.AppendUint32(b, f.seq)
		b = le.AppendUint32(b, f.count)
	}
	le.PutUint32(b[start-4:], uint32(len(b)-start))
	return b
}

// decodeFrame decodes a whole packet. ErrIncompatible for another version,
// ErrInvalid for what no version can mean.
func decodeFrame(b []byte) (*frame, error) {
	le := binary.LittleEndian
	if len(b) < headerBytes || [4]byte(b) != frameMagic {
		return nil, fmt.Errorf("%w: hand-off packet of %d bytes is no frame", paging.ErrInvalid, len(b))
	}
	if v := le.Uint16(b[4:]); v != frameVersion {
		return nil, fmt.Errorf("%w: hand-off frame has version %d, want %d", paging.ErrIncompatible, v, frameVersion)
	}
	f := &frame{kind: frameKind(le.Uint16(b[6:]))}
	length, p := le.Uint32(b[8:]), b[headerBytes:]
	if uint64(length) != uint64(len(p)) {
		return nil, fmt.Errorf("%w: hand-off frame says %d bytes and has %d", paging.ErrInvalid, length, len(p))
	}
	switch {
	case f.kind == frameHello && len(p) == len(f.attachment):
		f.attachment = AttachmentID(p)
	case f.kind == frameAck && len(p) == 8:
		f.seq, f.count = le.Uint32(p), le.Uint32(p[4:])
	case f.kind == frameExtents && len(p) >= 8:
		return f, f.decodeExtents(p)
	default:
		return nil, fmt.Errorf("%w: hand-off frame of kind %d with %d bytes", paging.ErrInvalid, f.kind, len(p))
	}
	return f, nil
}

func (f *frame) decodeExtents(p []byte) error {
	le := binary.LittleEndian
	f.seq = le.Uint32(p)
	n := uint64(le.Uint32(p[4:]))
	if p = p[8:]; n == 0 || n > MaxExtents || n*entryBytes != uint64(len(p)) {
		return fmt.Errorf("%w: hand-off frame of %d extents with %d bytes", paging.ErrInvalid, n, len(p))
	}
	f.extents = make([]Extent, n)
	for i := range f.extents {
		e := Extent{ID: paging.ExtentID(le.Uint32(p)), Kind: Kind(le.Uint32(p[4:])), FD: -1}
		bytes := le.Uint64(p[8:])
		if e.Kind < KindRAM || e.Kind > KindRegion {
			return fmt.Errorf("%w: extent %d has kind %d", paging.ErrIncompatible, e.ID, e.Kind)
		}
		if e.ID == 0 || bytes == 0 || bytes > maxExtent || bytes%paging.UnitBytes != 0 {
			return fmt.Errorf("%w: extent %d of %d bytes", paging.ErrInvalid, e.ID, bytes)
		}
		e.Bytes = int64(bytes)
		f.extents[i] = e
		p = p[entryBytes:]
	}
	return nil
}

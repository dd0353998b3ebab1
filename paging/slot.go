package paging

import (
	"encoding/binary"
	"fmt"
)

// UnitBytes is the alignment of slots: it suits O_DIRECT and the page size of
// the machine.
const UnitBytes = 4096

// Bounds of one page.
const (
	MinPageBytes = 1
	MaxPageBytes = 128 << 20
)

// Bounds of one call.
const (
	MaxCallBlocks = 65536
	MaxCallPages  = 65536
)

// ExtentID numbers an extent of a node; unique for one run of the node. 0 is none.
type ExtentID uint32

// Generation counts the uses of a slot. It is raised before the slot is reused.
type Generation uint64

// Slot is a place in an extent that holds one page, as handed to an engine.
type Slot struct {
	Extent     ExtentID
	Bytes      uint32 // length of the page; 0: there is no page here
	Offset     uint64 // byte offset in the extent's descriptor, a multiple of UnitBytes
	Generation Generation
	Sum        uint64 // checksum of the page, 0 for staging
}

// SlotBytes is the length of an encoded Slot.
const SlotBytes = 32

// AppendSlot appends the 32-byte little-endian encoding of s (docs/formats.md).
func AppendSlot(b []byte, s Slot) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(s.Extent))
	b = binary.LittleEndian.AppendUint32(b, s.Bytes)
	b = binary.LittleEndian.AppendUint64(b, s.Offset)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Generation))
	return binary.LittleEndian.AppendUint64(b, s.Sum)
}

// DecodeSlot decodes the first SlotBytes of b. ErrInvalid if b is shorter.
func DecodeSlot(b []byte) (Slot, error) {
	if len(b) < SlotBytes {
		return Slot{}, fmt.Errorf("slot reference of %d bytes, want %d: %w", len(b), SlotBytes, ErrInvalid)
	}
	return Slot{
		Extent:     ExtentID(binary.LittleEndian.Uint32(b)),
		Bytes:      binary.LittleEndian.Uint32(b[4:]),
		Offset:     binary.LittleEndian.Uint64(b[8:]),
		Generation: Generation(binary.LittleEndian.Uint64(b[16:])),
		Sum:        binary.LittleEndian.Uint64(b[24:]),
	}, nil
}

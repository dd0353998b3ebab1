package nvme

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Keys and values of the index (docs/formats.md). The key of a commit record
// is the place of the page, so two records can never claim one slot, a slot's
// record is removed without knowing its page, and records are written in the
// order of the disk. Integers of keys are big-endian, to sort; those of values
// little-endian.
const (
	pagePrefix      = 'p'  // + segment uint32, unit uint32 -> commit record
	namespacePrefix = 'n'  // + number uint32 -> paging.EncodeNamespace
	counterKey      = "cn" // the next namespace number, uint32

	pageKeyBytes = 1 + 4 + 4
	recordBytes  = 108
	recordV1     = 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// record is the content of a commit record.
type record struct {
	ref       tier.Ref
	namespace uint32 // short number
	name      paging.BlockName
	part      uint16
	bytes     uint32
	sum       uint64
	key       paging.Key
	meta      uint64
}

// refOf is the Ref of a place: segment in the upper half, the offset in units
// in the lower. Segments are numbered from 1, so no place is 0.
func refOf(p paging.Place) tier.Ref {
	return tier.Ref(uint64(p.Extent)<<32 | p.Offset/paging.UnitBytes)
}

func placeOf(r tier.Ref) paging.Place {
	return paging.Place{Extent: paging.ExtentID(r >> 32), Offset: uint64(uint32(r)) * paging.UnitBytes}
}

func appendPageKey(b []byte, r tier.Ref) []byte {
	b = append(b, pagePrefix)
	return binary.BigEndian.AppendUint64(b, uint64(r))
}

// refOfKey is the place in the key of a commit record.
func refOfKey(key []byte) (tier.Ref, bool) {
	if len(key) != pageKeyBytes || key[0] != pagePrefix {
		return 0, false
	}
	return tier.Ref(binary.BigEndian.Uint64(key[1:])), true
}

func appendNamespaceKey(b []byte, number uint32) []byte {
	b = append(b, namespacePrefix)
	return binary.BigEndian.AppendUint32(b, number)
}

// appendRecord appends the encoding of r.
func appendRecord(b []byte, r *record) []byte {
	start := len(b)
	b = append(b, recordV1, 0) // version, flags
	b = binary.LittleEndian.AppendUint16(b, r.part)
	b = binary.LittleEndian.AppendUint32(b, r.bytes)
	b = binary.LittleEndian.AppendUint64(b, r.sum)
	b = binary.LittleEndian.AppendUint64(b, uint64(r.ref))
	b = binary.LittleEndian.AppendUint64(b, r.meta)
	b = binary.LittleEndian.AppendUint32(b, r.namespace)
	b = append(b, r.name[:]...)
	b = append(b, r.key[:]...)
	b = binary.LittleEndian.AppendUint32(b, 0) // reserved
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// decodeRecord decodes a commit record and checks it against the key that it
// was found under. Any damage is paging.ErrCorrupt, an unknown version
// paging.ErrIncompatible.
func decodeRecord(key, value []byte) (record, error) {
	var r record
	place, ok := refOfKey(key)
	if !ok {
		return r, fmt.Errorf("record under a key of %d bytes: %w", len(key), paging.ErrCorrupt)
	}
	if len(value) != recordBytes {
		return r, fmt.Errorf("record of %d bytes, want %d: %w", len(value), recordBytes, paging.ErrCorrupt)
	}
	body, sum := value[:recordBytes-4], binary.LittleEndian.Uint32(value[recordBytes-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return r, fmt.Errorf("record fails its checksum: %w", paging.ErrCorrupt)
	}
	if value[0] != recordV1 || value[1] != 0 {
		return r, fmt.Errorf("record version %d flags %#x: %w", value[0], value[1], paging.ErrIncompatible)
	}
	le := binary.LittleEndian
	r.part = le.Uint16(value[2:])
	r.bytes = le.Uint32(value[4:])
	r.sum = le.Uint64(value[8:])
	r.ref = tier.Ref(le.Uint64(value[16:]))
	r.meta = le.Uint64(value[24:])
	r.namespace = le.Uint32(value[32:])
	copy(r.name[:], value[36:])
	copy(r.key[:], value[68:])
	if r.ref != place {
		return r, fmt.Errorf("record of another slot: %w", paging.ErrCorrupt)
	}
	if r.bytes < paging.MinPageBytes || r.bytes > paging.MaxPageBytes || r.part >= paging.MaxParts || le.Uint32(value[100:]) != 0 {
		return r, fmt.Errorf("record of %d bytes, part %d: %w", r.bytes, r.part, paging.ErrCorrupt)
	}
	return r, nil
}

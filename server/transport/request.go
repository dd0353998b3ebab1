package transport

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// BlockParts names some pages of one block.
type BlockParts struct {
	Name  paging.BlockName
	Parts paging.PartSet
}

// PageRequest names pages of one namespace and the length that the node which
// asks expects of them. Pages are numbered block by block, and inside a block in
// the order of their parts. It is immutable.
type PageRequest struct {
	Namespace paging.NamespaceID
	Blocks    []BlockParts

	lengths [paging.MaxParts]uint32 // by part; 0: not asked for
	rows    []uint16                // block of each page
	parts   []uint8                 // part of each page
	bytes   int64                   // sum of the lengths
	timeout time.Duration           // that the node which asks waits
}

// Len is the number of pages.
func (r *PageRequest) Len() int { return len(r.rows) }

// Bytes is the sum of the lengths of all pages.
func (r *PageRequest) Bytes() int64 { return r.bytes }

// At is page i: the index of its block, its part, and its expected length.
func (r *PageRequest) At(i int) (block, part int, length uint32) {
	part = int(r.parts[i])
	return int(r.rows[i]), part, r.lengths[part]
}

// PartBytes is the length expected of pages of a part; 0: none is asked for.
func (r *PageRequest) PartBytes(part int) uint32 { return r.lengths[part] }

// fits reports whether a page can be appended. Pages of one block must follow
// one another, their parts rising, all pages of a part must have one length, and
// more than one page must not have more than lotBytes.
func (r *PageRequest) fits(name paging.BlockName, part int, length uint32, lotBytes int64) bool {
	n := len(r.Blocks)
	same := n > 0 && r.Blocks[n-1].Name == name
	switch {
	case len(r.rows) == 0:
		return true
	case len(r.rows) == maxRequestPages, r.bytes+int64(length) > lotBytes,
		r.lengths[part] != 0 && r.lengths[part] != length,
		same && r.Blocks[n-1].Parts>>uint(part) != 0,
		!same && n == maxRequestBlocks:
		return false
	}
	return true
}

// add appends a page that fits.
func (r *PageRequest) add(name paging.BlockName, part int, length uint32) {
	if n := len(r.Blocks); n == 0 || r.Blocks[n-1].Name != name {
		r.Blocks = append(r.Blocks, BlockParts{Name: name})
	}
	b := &r.Blocks[len(r.Blocks)-1]
	b.Parts = b.Parts.With(part)
	r.lengths[part] = length
	r.rows = append(r.rows, uint16(len(r.Blocks)-1))
	r.parts = append(r.parts, uint8(part))
	r.bytes += int64(length)
}

// Fixed lengths in the encoding of a request.
const (
	requestFixedBytes = 32 + 4 + 2 + 2
	requestPartBytes  = 8
	requestBlockBytes = 32 + 8
)

// encode is: namespace, timeout in milliseconds, number of parts and of blocks;
// per part its number, three zeros, its length; per block its name and the set
// of its parts.
func (r *PageRequest) encode(timeout time.Duration) []byte {
	b := make([]byte, 0, requestFixedBytes+requestPartBytes*4+requestBlockBytes*len(r.Blocks))
	b = append(b, r.Namespace[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(min(max(timeout.Milliseconds(), 1), 1<<31)))
	at := len(b)
	b = binary.LittleEndian.AppendUint32(b, 0)
	var n uint16
	for part, length := range r.lengths {
		if length != 0 {
			b = append(b, byte(part), 0, 0, 0)
			b = binary.LittleEndian.AppendUint32(b, length)
			n++
		}
	}
	binary.LittleEndian.PutUint16(b[at:], n)
	binary.LittleEndian.PutUint16(b[at+2:], uint16(len(r.Blocks)))
	for i := range r.Blocks {
		b = append(b, r.Blocks[i].Name[:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Blocks[i].Parts))
	}
	return b
}

// decodeRequest reads what encode wrote. paging.ErrInvalid for anything else.
func decodeRequest(b []byte) (*PageRequest, error) {
	if len(b) < requestFixedBytes {
		return nil, fmt.Errorf("page request of %d bytes: %w", len(b), paging.ErrInvalid)
	}
	r := &PageRequest{timeout: time.Duration(binary.LittleEndian.Uint32(b[32:])) * time.Millisecond}
	copy(r.Namespace[:], b)
	parts, blocks := int(binary.LittleEndian.Uint16(b[36:])), int(binary.LittleEndian.Uint16(b[38:]))
	b = b[requestFixedBytes:]
	if parts == 0 || parts > paging.MaxParts || blocks == 0 || blocks > maxRequestBlocks ||
		len(b) != parts*requestPartBytes+blocks*requestBlockBytes {
		return nil, fmt.Errorf("page request of %d parts and %d blocks with %d bytes: %w", parts, blocks, len(b), paging.ErrInvalid)
	}
	last := -1
	for ; parts > 0; parts-- {
		part, length := int(b[0]), binary.LittleEndian.Uint32(b[4:])
		if part >= paging.MaxParts || part <= last || b[1]|b[2]|b[3] != 0 || length < paging.MinPageBytes || length > paging.MaxPageBytes {
			return nil, fmt.Errorf("page request with part %d of %d bytes: %w", part, length, paging.ErrInvalid)
		}
		r.lengths[part], last, b = length, part, b[requestPartBytes:]
	}
	return r, r.decodeBlocks(b)
}

func (r *PageRequest) decodeBlocks(b []byte) error {
	var declared, asked paging.PartSet
	for part, length := range r.lengths {
		if length != 0 {
			declared = declared.With(part)
		}
	}
	r.Blocks = make([]BlockParts, 0, len(b)/requestBlockBytes)
	for ; len(b) > 0; b = b[requestBlockBytes:] {
		p := BlockParts{Name: paging.BlockName(b[:32]), Parts: paging.PartSet(binary.LittleEndian.Uint64(b[32:]))}
		if p.Parts == 0 || !declared.Contains(p.Parts) || len(r.rows)+p.Parts.Len() > maxRequestPages {
			return fmt.Errorf("page request with parts %x of %x, %d pages: %w", uint64(p.Parts), uint64(declared), len(r.rows)+p.Parts.Len(), paging.ErrInvalid)
		}
		asked |= p.Parts
		for s := p.Parts; s != 0; s &= s - 1 {
			part := bits.TrailingZeros64(uint64(s))
			r.rows = append(r.rows, uint16(len(r.Blocks)))
			r.parts = append(r.parts, uint8(part))
			r.bytes += int64(r.lengths[part])
		}
		r.Blocks = append(r.Blocks, p)
	}
	if asked != declared || len(r.rows) > 1 && r.bytes > maxLotBytes {
		return fmt.Errorf("page request for %d pages of %d bytes: %w", len(r.rows), r.bytes, paging.ErrInvalid)
	}
	return nil
}

// missingPage is one page that does not come.
type missingPage struct {
	index  uint32
	reason Reason
}

// appendMissing appends the index, the reason and three zeros.
func appendMissing(b []byte, m missingPage) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.index)
	return append(b, byte(m.reason), 0, 0, 0)
}

// eachMissing calls do for the pages of a list. paging.ErrInvalid if it is none.
func eachMissing(b []byte, do func(missingPage) error) error {
	if len(b) == 0 || len(b)%8 != 0 {
		return fmt.Errorf("list of missing pages of %d bytes: %w", len(b), paging.ErrInvalid)
	}
	for ; len(b) > 0; b = b[8:] {
		m := missingPage{binary.LittleEndian.Uint32(b), Reason(b[4])}
		if m.reason == NoReason {
			return fmt.Errorf("missing page without a reason: %w", paging.ErrInvalid)
		}
		if err := do(m); err != nil {
			return err
		}
	}
	return nil
}

// HaveRequest asks which parts of some blocks a node holds.
type HaveRequest struct {
	Namespace paging.NamespaceID
	Names     []paging.BlockName // at most 4,096
	Parts     paging.PartSet     // that matter; 0: all
}

// Held says what a node holds of one block.
type Held struct {
	Parts paging.PartSet
	Tier  uint8 // the slowest tier that they are in, as the wire enum Tier; 0: nothing is held
}

// encode is: namespace, set of parts, the names.
func (q *HaveRequest) encode() []byte {
	b := make([]byte, 0, 40+32*len(q.Names))
	b = append(b, q.Namespace[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(q.Parts))
	for i := range q.Names {
		b = append(b, q.Names[i][:]...)
	}
	return b
}

func decodeHave(b []byte) (*HaveRequest, error) {
	if len(b) <= 40 || (len(b)-40)%32 != 0 {
		return nil, fmt.Errorf("question of %d bytes: %w", len(b), paging.ErrInvalid)
	}
	q := &HaveRequest{Namespace: paging.NamespaceID(b[:32]), Parts: paging.PartSet(binary.LittleEndian.Uint64(b[32:]))}
	b = b[40:]
	q.Names = make([]paging.BlockName, len(b)/32)
	for i := range q.Names {
		q.Names[i] = paging.BlockName(b[32*i:])
	}
	return q, nil
}

// encodeHeld is, per block, the set of parts and the tier.
func encodeHeld(held []Held) []byte {
	b := make([]byte, 0, 9*len(held))
	for _, h := range held {
		b = append(binary.LittleEndian.AppendUint64(b, uint64(h.Parts)), h.Tier)
	}
	return b
}

// decodeHeld appends n answers to held.
func decodeHeld(held []Held, b []byte, n int) ([]Held, error) {
	if len(b) != 9*n {
		return held, fmt.Errorf("answer of %d bytes for %d blocks: %w", len(b), n, paging.ErrInvalid)
	}
	for ; len(b) > 0; b = b[9:] {
		held = append(held, Held{paging.PartSet(binary.LittleEndian.Uint64(b)), b[8]})
	}
	return held, nil
}

// encodeDoubt is namespace, name, part.
func encodeDoubt(p *paging.PageID) []byte {
	b := make([]byte, 0, doubtBytes)
	b = append(append(b, p.Namespace[:]...), p.Name[:]...)
	return binary.LittleEndian.AppendUint64(b, uint64(p.Part))
}

func decodeDoubt(b []byte) (p paging.PageID, err error) {
	if len(b) != doubtBytes || binary.LittleEndian.Uint64(b[64:]) >= paging.MaxParts {
		return p, fmt.Errorf("doubt of %d bytes: %w", len(b), paging.ErrInvalid)
	}
	p.Namespace, p.Name = paging.NamespaceID(b[:32]), paging.BlockName(b[32:64])
	p.Part = int(b[64])
	return p, nil
}

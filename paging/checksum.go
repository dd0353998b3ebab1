package paging

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// ChunkBytes is the length of the chunks that a page checksum is made of, so
// that a page can be summed while it arrives in frames and on a device that
// sums chunks side by side.
const ChunkBytes = 64 << 10

// smallChunks is the number of chunk sums that fit on the stack cheaply.
const smallChunks = 64

// Checksum is the checksum of a page: XXH3-64 over the little-endian XXH3-64
// values of its chunks of ChunkBytes (the last may be shorter), all unseeded, the
// outer sum seeded with the length of the page. It guards against accidents, not
// against an attacker.
func Checksum(page []byte) uint64 {
	if len(page) <= smallChunks*ChunkBytes {
		var sums [8 * smallChunks]byte
		return sumInto(sums[:], page)
	}
	return sumLarge(page)
}

func sumLarge(page []byte) uint64 {
	if len(page) <= MaxPageBytes {
		var sums [8 * MaxPageBytes / ChunkBytes]byte
		return sumInto(sums[:], page)
	}
	return sumInto(make([]byte, 8*((len(page)+ChunkBytes-1)/ChunkBytes)), page)
}

// sumInto sums page with sums as scratch, which must hold 8 bytes a chunk.
func sumInto(sums, page []byte) uint64 {
	n := 0
	for rest := page; len(rest) > 0; n += 8 {
		chunk := rest[:min(ChunkBytes, len(rest))]
		binary.LittleEndian.PutUint64(sums[n:], xxh3.Hash(chunk))
		rest = rest[len(chunk):]
	}
	return xxh3.HashSeed(sums[:n], uint64(len(page)))
}

// CopyChecksum copies src to the start of dst, which must be at least as long,
// and returns the checksum of what dst then holds: the sum is taken over the
// stored bytes, so that a writer that changes src meanwhile cannot make a page
// whose checksum does not match. It is summed piece by piece as it is copied.
func CopyChecksum(dst, src []byte) uint64 {
	dst = dst[:len(src)]
	if len(src) <= smallChunks*ChunkBytes {
		var sums [8 * smallChunks]byte
		return copyInto(sums[:], dst, src)
	}
	return copyLarge(dst, src)
}

func copyLarge(dst, src []byte) uint64 {
	if len(src) <= MaxPageBytes {
		var sums [8 * MaxPageBytes / ChunkBytes]byte
		return copyInto(sums[:], dst, src)
	}
	return copyInto(make([]byte, 8*((len(src)+ChunkBytes-1)/ChunkBytes)), dst, src)
}

// Steps of CopyChecksum. A step of 256 KiB is still in the cache when it is
// summed. From 1 MiB on Go copies with stores that bypass the cache: where that
// nearly doubles the speed of a copy (AMD Zen 4), shorter steps would be a quarter
// slower than a copy of the whole page and a sum; where it gains nothing (Intel
// Sapphire Rapids) they would be up to a sixth faster than these.
const (
	copyStep      = 4 * ChunkBytes
	copyLargeStep = 16 * ChunkBytes
)

// copyInto is sumInto of dst after each step was copied from src.
func copyInto(sums, dst, src []byte) uint64 {
	step := copyStep
	if len(src) >= copyLargeStep {
		step = copyLargeStep
	}
	n := 0
	for off := 0; off < len(src); {
		end := off + step
		if end+step > len(src) { // no short copy at the end
			end = len(src)
		}
		copy(dst[off:end], src[off:end])
		for ; off < end; n += 8 {
			chunk := dst[off:min(off+ChunkBytes, end)]
			binary.LittleEndian.PutUint64(sums[n:], xxh3.Hash(chunk))
			off += len(chunk)
		}
	}
	return xxh3.HashSeed(sums[:n], uint64(len(src)))
}

// Hasher is Checksum for bytes that arrive in pieces. The zero value is ready.
type Hasher struct {
	chunk xxh3.Hasher // of the chunk that is not full
	fill  int         // bytes in it
	sums  []byte      // of the full chunks
	bytes uint64      // written so far
}

// Reset makes h as new, and keeps its memory for the next page.
func (h *Hasher) Reset() {
	h.chunk.Reset()
	h.fill, h.bytes, h.sums = 0, 0, h.sums[:0]
}

// Write adds p to the page. It never fails. Pieces that begin and end at
// multiples of ChunkBytes are the fastest.
func (h *Hasher) Write(p []byte) (int, error) {
	n := len(p)
	h.bytes += uint64(n)
	for len(p) > 0 {
		piece := p[:min(ChunkBytes-h.fill, len(p))]
		p = p[len(piece):]
		if len(piece) == ChunkBytes {
			h.sums = binary.LittleEndian.AppendUint64(h.sums, xxh3.Hash(piece))
			continue
		}
		_, _ = h.chunk.Write(piece) // never fails
		if h.fill += len(piece); h.fill == ChunkBytes {
			h.sums = binary.LittleEndian.AppendUint64(h.sums, h.chunk.Sum64())
			h.chunk.Reset()
			h.fill = 0
		}
	}
	return n, nil
}

// Sum64 is the Checksum of all bytes written so far; more may follow.
func (h *Hasher) Sum64() uint64 {
	sums := h.sums
	if h.fill > 0 {
		sums = binary.LittleEndian.AppendUint64(sums[:len(sums):len(sums)], h.chunk.Sum64())
	}
	return xxh3.HashSeed(sums, h.bytes)
}

package bench

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/paging"
)

// Content makes the bytes of pages: a function of what a page is (namespace,
// block name, part) and of the seed of the run. It does not use the storage
// key, so a fault in how keys are derived is found like any other mix-up.
//
// The zero value is ready. Content is immutable and safe for concurrent use.
type Content struct {
	Seed uint64
	// KV makes every pair of bytes a bf16 number between 1/2 and 1 in size: keys and
	// values that attention can be computed over.
	KV bool
}

// Bits of four bf16 numbers: what stays random (sign and mantissa), and the
// exponent of numbers between 1/2 and 1.
const (
	kvRandom   = 0x807f807f807f807f
	kvExponent = 0x3f003f003f003f00
)

// Multipliers of the word mixer: odd, with well spread bits (splitmix64).
const (
	mixStep = 0x9e3779b97f4a7c15
	mixA    = 0xbf58476d1ce4e5b9
	mixB    = 0x94d049bb133111eb

	mixStep2 = 2 * mixStep & (1<<64 - 1)
	mixStep3 = 3 * mixStep & (1<<64 - 1)
	mixStep4 = 4 * mixStep & (1<<64 - 1)
)

// mix is the finaliser of splitmix64: every input bit reaches every output bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * mixA
	x = (x ^ x>>27) * mixB
	return x ^ x>>31
}

// word is the page's word number i when state is start + i*mixStep: one multiply
// between two shifts, so that filling and checking run at the speed of memory,
// and mask (a second value derived from the page) keeps one page from being a
// shifted copy of another.
func word(state, mask uint64) uint64 {
	state = (state ^ state>>32) * mixB
	return state ^ state>>29 ^ mask
}

// start derives the two values that the words of a page come from.
func (c Content) start(id paging.PageID) (state, mask uint64) {
	h := mix(c.Seed + mixStep)
	for i := 0; i < 32; i += 8 {
		h = mix(h ^ binary.LittleEndian.Uint64(id.Namespace[i:]))
	}
	for i := 0; i < 32; i += 8 {
		h = mix(h ^ binary.LittleEndian.Uint64(id.Name[i:]))
	}
	h = mix(h ^ uint64(id.Part)*mixStep)
	return h, mix(h + mixA)
}

// Fill writes the whole page id into dst; len(dst) is the page's length. A page
// of another length is another page.
func (c Content) Fill(dst []byte, id paging.PageID) {
	state, mask := c.start(id)
	mask ^= uint64(len(dst))
	if c.KV {
		fillKV(dst, state, mask)
		return
	}
	for len(dst) >= 32 {
		b := dst[:32:32]
		binary.LittleEndian.PutUint64(b[0:8], word(state, mask))
		binary.LittleEndian.PutUint64(b[8:16], word(state+mixStep, mask))
		binary.LittleEndian.PutUint64(b[16:24], word(state+mixStep2, mask))
		binary.LittleEndian.PutUint64(b[24:32], word(state+mixStep3, mask))
		dst = dst[32:]
		state += mixStep4
	}
	for ; len(dst) > 0; state += mixStep {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], word(state, mask))
		dst = dst[copy(dst, last[:]):]
	}
}

// Check reports whether src is exactly the page id: -1 if so, else the offset of
// the first 32-byte piece that differs.
func (c Content) Check(src []byte, id paging.PageID) int {
	state, mask := c.start(id)
	mask ^= uint64(len(src))
	if c.KV {
		return checkKV(src, state, mask)
	}
	rest := src
	for len(rest) >= 32 {
		b := rest[:32:32]
		diff := binary.LittleEndian.Uint64(b[0:8]) ^ word(state, mask)
		diff |= binary.LittleEndian.Uint64(b[8:16]) ^ word(state+mixStep, mask)
		diff |= binary.LittleEndian.Uint64(b[16:24]) ^ word(state+mixStep2, mask)
		diff |= binary.LittleEndian.Uint64(b[24:32]) ^ word(state+mixStep3, mask)
		if diff != 0 {
			return len(src) - len(rest)
		}
		rest = rest[32:]
		state += mixStep4
	}
	for at := len(src) - len(rest); len(rest) > 0; state += mixStep {
		var want [8]byte
		binary.LittleEndian.PutUint64(want[:], word(state, mask))
		n := min(len(rest), len(want))
		if string(rest[:n]) != string(want[:n]) {
			return at
		}
		rest = rest[n:]
	}
	return -1
}

func kvWord(state, mask uint64) uint64 { return word(state, mask)&kvRandom | kvExponent }

func fillKV(dst []byte, state, mask uint64) {
	for ; len(dst) >= 8; state += mixStep {
		binary.LittleEndian.PutUint64(dst, kvWord(state, mask))
		dst = dst[8:]
	}
	clear(dst)
}

func checkKV(src []byte, state, mask uint64) int {
	for at := 0; at+8 <= len(src); at += 8 {
		if binary.LittleEndian.Uint64(src[at:]) != kvWord(state, mask) {
			return at
		}
		state += mixStep
	}
	return -1
}

package paging

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Names of the hash algorithms whose chains this package can reproduce, as used
// in Layout.HashAlgorithm.
const (
	HashVLLMSHA256 = "vllm/sha256_cbor"
	HashVLLMXXHash = "vllm/xxhash_cbor"
	HashSGLang     = "sglang/sha256"
)

// VLLMDefaultSeed is the seed of vLLM when PYTHONHASHSEED is not set; else the
// seed is its value.
const VLLMDefaultSeed = "vllm-none-hash"

// VLLMChain reproduces vLLM's chain of block hashes: the hash of the canonical
// CBOR of [parent, tokens, extra keys].
type VLLMChain struct {
	short  bool     // XXH3-128 and not SHA-256
	parent [32]byte // digest of the last block
	cbor   []byte   // scratch
}

// NewVLLMChain returns a chain without blocks. algorithm is HashVLLMSHA256 or
// HashVLLMXXHash, else ErrInvalid.
func NewVLLMChain(algorithm, seed string) (*VLLMChain, error) {
	if algorithm != HashVLLMSHA256 && algorithm != HashVLLMXXHash {
		return nil, fmt.Errorf("%w: hash algorithm %q, want %s or %s", ErrInvalid, algorithm, HashVLLMSHA256, HashVLLMXXHash)
	}
	c := &VLLMChain{short: algorithm == HashVLLMXXHash}
	c.cbor = appendCBORText(c.cbor, seed)
	c.hash()
	return c, nil
}

// Digest is the hash of the last block, at first the one that stands for no
// block: 32 bytes, or 16 for HashVLLMXXHash. Valid until the next call of Next.
func (c *VLLMChain) Digest() []byte {
	if c.short {
		return c.parent[:16]
	}
	return c.parent[:]
}

// Next adds a block of tokens and returns its digest, as Digest does. vLLM hashes
// full blocks only. extra is in vLLM's order: LoRA name, multimodal items, cache
// salt (first block only), digest of prompt embeddings.
func (c *VLLMChain) Next(tokens []uint32, extra ...ExtraKey) []byte {
	const null = 0xf6
	b := appendCBORHead(c.cbor[:0], cborArray, 3)
	b = appendCBORBytes(b, c.Digest())
	b = appendCBORHead(b, cborArray, uint64(len(tokens)))
	for _, t := range tokens {
		b = appendCBORHead(b, cborUint, uint64(t))
	}
	if len(extra) == 0 {
		b = append(b, null)
	} else {
		b = appendCBORHead(b, cborArray, uint64(len(extra)))
		for _, x := range extra {
			b = append(b, x.cbor...)
		}
	}
	c.cbor = b
	c.hash()
	return c.Digest()
}

func (c *VLLMChain) hash() {
	if c.short {
		sum := xxh3.Hash128(c.cbor).Bytes()
		copy(c.parent[:], sum[:])
		return
	}
	c.parent = sha256.Sum256(c.cbor)
}

// ExtraKey is one of the extra keys of a vLLM block.
type ExtraKey struct{ cbor []byte }

// ExtraText is a LoRA name or a cache salt.
func ExtraText(s string) ExtraKey { return ExtraKey{appendCBORText(nil, s)} }

// ExtraItem is a multimodal item and where it begins, relative to the block.
func ExtraItem(identifier string, offset int64) ExtraKey {
	return ExtraKey{appendCBORInt(appendCBORText([]byte{cborArray<<5 | 2}, identifier), offset)}
}

// ExtraDigest is the digest of prompt embeddings.
func ExtraDigest(digest []byte) ExtraKey { return ExtraKey{appendCBORBytes(nil, digest)} }

// VLLMGroupKey is the key of a block in one KV cache group: the digest and the
// group number as 32 bits big-endian.
func VLLMGroupKey(digest []byte, group uint32) []byte {
	return binary.BigEndian.AppendUint32(append(make([]byte, 0, len(digest)+4), digest...), group)
}

// VLLMEventHash is the hash of a block in vLLM's KV events: the last eight bytes
// of the digest, which has at least as many.
func VLLMEventHash(digest []byte) uint64 {
	return binary.BigEndian.Uint64(digest[len(digest)-8:])
}

// SGLangChain reproduces SGLang's chain of page hashes: SHA-256 of the hash
// before, nothing for the first page, and the tokens. The zero value is a chain
// without pages.
type SGLangChain struct {
	parent  [sha256.Size]byte
	started bool
	scratch []byte
}

// Next adds a page of tokens and returns its hash.
func (c *SGLangChain) Next(tokens []uint32) [sha256.Size]byte {
	b := c.scratch[:0]
	if c.started {
		b = append(b, c.parent[:]...)
	}
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	c.scratch, c.started = b, true
	c.parent = sha256.Sum256(b)
	return c.parent
}

// SGLangEventHash is the hash of a page in SGLang's KV events: its first eight
// bytes.
func SGLangEventHash(hash [sha256.Size]byte) int64 {
	return int64(binary.BigEndian.Uint64(hash[:]))
}

// RFC1403Chain is the rolling hash that KV routers index by: XXH3-64 with a seed,
// first of the tokens of a block, then of the hash before and that.
type RFC1403Chain struct {
	seed     uint64
	sequence uint64
	started  bool
	scratch  []byte
}

// NewRFC1403Chain returns a chain without blocks.
func NewRFC1403Chain(seed uint64) *RFC1403Chain { return &RFC1403Chain{seed: seed} }

// Next adds a full block of tokens and returns the hash of the block alone, and
// of the sequence up to it.
func (c *RFC1403Chain) Next(tokens []uint32) (local, sequence uint64) {
	b := c.scratch[:0]
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	local = xxh3.HashSeed(b, c.seed)
	sequence = local
	if c.started {
		b = binary.LittleEndian.AppendUint64(b[:0], c.sequence)
		b = binary.LittleEndian.AppendUint64(b, local)
		sequence = xxh3.HashSeed(b, c.seed)
	}
	c.scratch, c.started, c.sequence = b, true, sequence
	return local, sequence
}

// Major types of CBOR (RFC 8949).
const (
	cborUint     = 0
	cborNegative = 1
	cborBytes    = 2
	cborText     = 3
	cborArray    = 4
)

// appendCBORHead appends a major type and its number in the shortest form, which
// is the canonical one.
func appendCBORHead(b []byte, major byte, n uint64) []byte {
	major <<= 5
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n < 1<<8:
		return append(b, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	case n < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, major|27), n)
}

func appendCBORInt(b []byte, n int64) []byte {
	if n < 0 {
		return appendCBORHead(b, cborNegative, uint64(-1-n))
	}
	return appendCBORHead(b, cborUint, uint64(n))
}

func appendCBORText(b []byte, s string) []byte {
	return append(appendCBORHead(b, cborText, uint64(len(s))), s...)
}

func appendCBORBytes(b, s []byte) []byte {
	return append(appendCBORHead(b, cborBytes, uint64(len(s))), s...)
}

// NamesOfTokens makes the names of the whole blocks of a sequence of tokens, as an
// engine with this layout makes them, without LoRA, multimodal items or salts of the
// engine. ErrInvalid for a hash algorithm that this package cannot reproduce.
func NamesOfTokens(l *Layout, tokens []uint32) (names []BlockName, err error) {
	step := int(l.BlockTokens)
	var next func([]uint32) []byte
	switch l.HashAlgorithm {
	case HashVLLMSHA256, HashVLLMXXHash:
		seed := l.HashSeed
		if seed == "" {
			seed = VLLMDefaultSeed
		}
		c, err := NewVLLMChain(l.HashAlgorithm, seed)
		if err != nil {
			return nil, err
		}
		next = func(t []uint32) []byte { return c.Next(t) }
	case HashSGLang:
		var c SGLangChain
		next = func(t []uint32) []byte { h := c.Next(t); return h[:] }
	default:
		return nil, fmt.Errorf("hash algorithm %q: only %s, %s and %s can be made of tokens here: name the blocks: %w",
			l.HashAlgorithm, HashVLLMSHA256, HashVLLMXXHash, HashSGLang, ErrInvalid)
	}
	for ; step > 0 && len(tokens) >= step; tokens = tokens[step:] {
		name, err := NameFromEngineHash(next(tokens[:step]))
		if err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

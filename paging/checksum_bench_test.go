package paging

import (
	"fmt"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

var benchSizes = []int{4 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 16 << 20}

// ring gives places in memory that is far larger than the caches.
type ring struct {
	b   []byte
	off int
}

func newRing(n int) *ring { return &ring{b: pattern(n)} }

func (r *ring) next(n int) []byte {
	if r.off+n > len(r.b) {
		r.off = 0
	}
	p := r.b[r.off : r.off+n]
	r.off += n
	return p
}

func BenchmarkChecksum(b *testing.B) {
	memory := newRing(512 << 20)
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				Checksum(memory.next(size))
			}
		})
	}
}

// BenchmarkCopyChecksum alternates with copy and one XXH3 over the page, and
// reports how many times as fast it is.
func BenchmarkCopyChecksum(b *testing.B) {
	memory, source := newRing(512<<20), newRing(256<<20)
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			batch := max(1, (2<<20)/size)
			var ours, bound time.Duration
			b.SetBytes(int64(size * batch))
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				start := time.Now()
				for range batch {
					dst := memory.next(size)
					copy(dst, source.next(size))
					xxh3.Hash(dst)
				}
				bound += time.Since(start)
				b.StartTimer()
				start = time.Now()
				for range batch {
					CopyChecksum(memory.next(size), source.next(size))
				}
				ours += time.Since(start)
			}
			b.ReportMetric(float64(bound)/float64(ours), "×copy+xxh3")
		})
	}
}

func BenchmarkHasher(b *testing.B) {
	memory := newRing(512 << 20)
	for _, piece := range []int{ChunkBytes, 100_000} {
		b.Run(fmt.Sprintf("2MiB in pieces of %d", piece), func(b *testing.B) {
			const size = 2 << 20
			b.SetBytes(size)
			b.ReportAllocs()
			var h Hasher
			for b.Loop() {
				h.Reset()
				for rest := memory.next(size); len(rest) > 0; {
					n := min(piece, len(rest))
					_, _ = h.Write(rest[:n])
					rest = rest[n:]
				}
				h.Sum64()
			}
		})
	}
}

func BenchmarkStorageKey(b *testing.B) {
	ns, name := example().ID(), BlockName{1}
	b.ReportAllocs()
	for b.Loop() {
		StorageKey(ns, name, 3)
	}
}

func BenchmarkNamespaceID(b *testing.B) {
	n := example()
	b.ReportAllocs()
	for b.Loop() {
		n.ID()
	}
}

// A block of 512 tokens, as public traces have.
func BenchmarkChains(b *testing.B) {
	tokens := make([]uint32, 512)
	for i := range tokens {
		tokens[i] = uint32(i * 7919 % 152064)
	}
	sha, _ := NewVLLMChain(HashVLLMSHA256, VLLMDefaultSeed)
	xxh, _ := NewVLLMChain(HashVLLMXXHash, VLLMDefaultSeed)
	var sglang SGLangChain
	rfc := NewRFC1403Chain(1337)
	for name, next := range map[string]func(){
		"vllm sha256": func() { sha.Next(tokens) },
		"vllm xxhash": func() { xxh.Next(tokens) },
		"sglang":      func() { sglang.Next(tokens) },
		"rfc1403":     func() { rfc.Next(tokens) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				next()
			}
		})
	}
}

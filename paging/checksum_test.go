package paging

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/xxh3"
)

var update = flag.Bool("update", false, "write the golden files of testdata again")

// pattern is the input of the golden checksums: byte i is the low byte of
// i × 2654435761 shifted right by 13.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(uint64(i) * 2654435761 >> 13)
	}
	return b
}

type checksumVectors struct {
	About   string           `json:"about"`
	Vectors []checksumVector `json:"vectors"`
}

type checksumVector struct {
	Bytes int    `json:"bytes"`
	Sum   string `json:"sum"`
}

func TestChecksumGolden(t *testing.T) {
	const path = "testdata/checksum_vectors.json"
	got := checksumVectors{About: "Page checksums: XXH3-64 over the little-endian XXH3-64 values of the 65,536-byte chunks, the outer sum seeded with the length. Byte i of a page is the low byte of (i * 2654435761) >> 13. Sums are 64-bit numbers in hex."}
	for _, n := range []int{0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 131072, 262144, 1<<20 + 3, 2 << 20, 4<<20 + 1, 16 << 20} {
		got.Vectors = append(got.Vectors, checksumVector{n, fmt.Sprintf("%016x", Checksum(pattern(n)))})
	}
	if *update {
		writeGolden(t, path, got)
	}
	var want checksumVectors
	readGolden(t, path, &want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("checksums changed (-want +got):\n%s", diff)
	}
}

// naiveChecksum is the definition, word for word.
func naiveChecksum(page []byte) uint64 {
	var sums []byte
	for i := 0; i < len(page); i += 65536 {
		sums = binary.LittleEndian.AppendUint64(sums, xxh3.Hash(page[i:min(i+65536, len(page))]))
	}
	return xxh3.HashSeed(sums, uint64(len(page)))
}

func TestChecksumForms(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	sizes := []int{0, 1, 65535, 65536, 65537, smallChunks*ChunkBytes - 1, smallChunks * ChunkBytes, smallChunks*ChunkBytes + 1, MaxPageBytes + 1}
	for range 40 {
		sizes = append(sizes, r.IntN(300_000))
	}
	var h Hasher
	for _, n := range sizes {
		page := pattern(n)
		want := naiveChecksum(page)
		if got := Checksum(page); got != want {
			t.Fatalf("Checksum of %d bytes is %016x, want %016x", n, got, want)
		}
		dst := make([]byte, n+8)
		if got := CopyChecksum(dst, page); got != want || !bytes.Equal(dst[:n], page) {
			t.Fatalf("CopyChecksum of %d bytes is %016x, want %016x and the bytes copied", n, got, want)
		}
		h.Reset()
		for rest := page; len(rest) > 0; {
			m := min(len(rest), 1+r.IntN(200_000))
			if k, err := h.Write(rest[:m]); k != m || err != nil {
				t.Fatalf("Write of %d bytes: %d, %v", m, k, err)
			}
			h.Sum64() // must not disturb what follows
			rest = rest[m:]
		}
		if got := h.Sum64(); got != want {
			t.Fatalf("Hasher over %d bytes is %016x, want %016x", n, got, want)
		}
	}
}

// The sum is that of the stored bytes even if the source changes during the
// copy, here because it lies partly under the destination.
func TestCopyChecksumSumsWhatIsStored(t *testing.T) {
	const n = 2 * ChunkBytes
	b := pattern(n + ChunkBytes)
	dst := b[ChunkBytes:]
	if got, want := CopyChecksum(dst, b[:n]), naiveChecksum(pattern(n)); got != want || got != naiveChecksum(dst) {
		t.Errorf("sum %016x, want %016x; stored is %016x", got, want, naiveChecksum(dst))
	}
}

func TestChecksumSeesEveryChange(t *testing.T) {
	page := pattern(3*ChunkBytes + 5)
	want := Checksum(page)
	for _, i := range []int{0, ChunkBytes - 1, ChunkBytes, 2*ChunkBytes + 7, len(page) - 1} {
		page[i] ^= 0x10
		if Checksum(page) == want {
			t.Errorf("a flipped bit at %d is not seen", i)
		}
		page[i] ^= 0x10
	}
	if Checksum(page[:len(page)-1]) == want || Checksum(append(page, 0)) == want {
		t.Error("another length is not seen")
	}
	if Checksum(make([]byte, ChunkBytes)) == Checksum(make([]byte, 2*ChunkBytes)) {
		t.Error("zero pages of two lengths have one checksum")
	}
}

func TestChecksumAllocatesNothing(t *testing.T) {
	page := pattern(5 << 20)
	dst := make([]byte, len(page))
	for _, n := range []int{4096, 64 << 10, 5 << 20} {
		if got := testing.AllocsPerRun(10, func() { Checksum(page[:n]); CopyChecksum(dst, page[:n]) }); got != 0 {
			t.Errorf("%d bytes: %v allocations, want 0", n, got)
		}
	}
}

func writeGolden(t *testing.T, path string, v any) {
	t.Helper()
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readGolden(t *testing.T, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatal(err)
	}
}

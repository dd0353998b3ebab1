package attn

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvtier/kvtier/gpu"
)

// Measurement says what Measure runs. The shape is fixed: 4096 tokens, 32 query heads over 8 KV heads of 128, pages of 64
// tokens in random order, NHD.
type Measurement struct {
	Type    gpu.DType
	Threads int
	// MemoryBytes is the size of the pool that the sequences rotate over. It should be several times the last-level
	// cache, else cache is measured; at least one sequence is used.
	MemoryBytes int64
	Rounds      int // each reads the whole pool once and decodes every sequence once; the best round of each counts
}

// Measured is what came out.
type Measured struct {
	Type            gpu.DType
	ISA             ISA
	Threads         int
	Sequences       int
	MemoryBytes     int64         // actual size of the pool
	BytesPerSec     float64       // K and V bytes that attention read
	ReadBytesPerSec float64       // sequential read of the same memory, with as many threads, in the same rounds
	Ratio           float64       // of the two
	RelErr          float64       // of one sequence against float64
	PerSequence     time.Duration // decode time of one sequence with all threads
}

const (
	measureTokens  = 4096
	measureQHeads  = 32
	measureKVHeads = 8
	measureDim     = 128
	measurePage    = 64
)

// Measure compares decode attention with the bandwidth of the memory it reads. It allocates m.MemoryBytes and ends early
// with ctx.
func Measure(ctx context.Context, m Measurement) (Measured, error) {
	l := gpu.NHD(m.Type, measurePage, measureKVHeads, measureDim)
	if err := l.Validate(); err != nil {
		return Measured{}, fmt.Errorf("measure attention: %w", err)
	}
	perSeq := measureTokens / measurePage
	n := int(max(1, m.MemoryBytes/(int64(perSeq)*l.PageStride)))
	n = (n + m.Threads - 1) / m.Threads * m.Threads
	r := rand.New(rand.NewPCG(1, uint64(m.Type)))
	a := &gpu.Attention{Layout: l, QHeads: measureQHeads, QType: m.Type, Pages: n * perSeq, MaxPages: perSeq,
		SeqLens: make([]int32, n), Table: make([]int32, 0, n*perSeq)}
	for _, p := range r.Perm(a.Pages) {
		a.Table = append(a.Table, int32(p))
	}
	for b := range a.SeqLens {
		a.SeqLens[b] = measureTokens
	}
	pool, q, out := make([]byte, l.PoolBytes(a.Pages)), make([]byte, a.QBytes()), make([]byte, a.OutBytes())
	fill(r, m.Type, q)
	fill(r, m.Type, pool)

	res := Measured{Type: m.Type, ISA: Supported()[0], Threads: m.Threads, Sequences: n, MemoryBytes: int64(len(pool))}
	read, decode := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	for range m.Rounds {
		if err := ctx.Err(); err != nil {
			return Measured{}, fmt.Errorf("measure attention: %w", err)
		}
		read = min(read, timeRead(res.ISA, pool, m.Threads))
		decode = min(decode, timeDecode(Decoder{res.ISA, m.Threads}, a, q, pool, out))
	}
	res.BytesPerSec = float64(a.KVBytes()) / decode.Seconds()
	res.ReadBytesPerSec = float64(len(pool)) / read.Seconds()
	res.Ratio = res.BytesPerSec / res.ReadBytesPerSec
	res.PerSequence = decode / time.Duration(n) * time.Duration(m.Threads)
	one := sequences(a, 0, 1)
	res.RelErr = gpu.RelativeError(out[:one.OutBytes()], one.Reference(q, pool))
	return res, nil
}

// sequences is the part of a that computes sequences from..to.
func sequences(a *gpu.Attention, from, to int) *gpu.Attention {
	s := *a
	s.SeqLens = a.SeqLens[from:to]
	s.Table = a.Table[from*a.MaxPages : to*a.MaxPages]
	return &s
}

// timeDecode decodes all sequences, as many at a time as there are threads.
func timeDecode(d Decoder, a *gpu.Attention, q, pool, out []byte) time.Duration {
	start := time.Now()
	qRow, outRow := a.QBytes()/int64(a.Batch()), a.OutBytes()/int64(a.Batch())
	for b := 0; b < a.Batch(); b += d.Workers {
		s := sequences(a, b, b+d.Workers)
		s.Splits = 1
		d.Decode(s, q[int64(b)*qRow:], pool, out[int64(b)*outRow:])
	}
	return time.Since(start)
}

// sink keeps the compiler from dropping reads.
var sink struct {
	sync.Mutex
	or uint64
}

func timeRead(isa ISA, b []byte, threads int) time.Duration {
	start := time.Now()
	var wg sync.WaitGroup
	part := len(b) / threads &^ 511
	for i := range threads {
		wg.Go(func() { // owner: this call; ends when its part is read
			or := readAll(isa, b[i*part:][:part])
			sink.Lock()
			sink.or |= or
			sink.Unlock()
		})
	}
	wg.Wait()
	return time.Since(start)
}

// fill writes normally distributed elements: a table of 2^16+1 of them over and over, so that no two pages are equal.
func fill(r *rand.Rand, t gpu.DType, b []byte) {
	table := make([]byte, (1<<16+1)*t.Size())
	for i := 0; i < len(table); i += t.Size() {
		t.Store(table[i:], float32(r.NormFloat64()))
	}
	for len(b) > 0 {
		b = b[copy(b, table):]
	}
}

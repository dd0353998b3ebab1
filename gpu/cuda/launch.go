//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"unsafe"

	"github.com/kvtier/kvtier/gpu"
)

// launch queues a kernel. The driver copies the values behind params before it returns.
func (s *stream) launch(module, name string, grid [3]uint32, threads uint32, params ...unsafe.Pointer) error {
	f, err := s.dev.function(module, name)
	if err != nil {
		return err
	}
	var pin runtime.Pinner // C reads Go pointers out of the list
	defer pin.Unpin()
	for _, p := range params {
		pin.Pin(p)
	}
	return s.dev.lib.call(launchKernel, f, uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]), uintptr(threads), 1, 1, 0, s.handle,
		uintptr(unsafe.Pointer(&params[0])), 0)
}

// Launch implements gpu.Stream.
func (s *stream) Launch(k gpu.Kernel) error {
	if err := k.Validate(); err != nil {
		return err
	}
	switch k := k.(type) {
	case *gpu.Attention:
		if k.Batch() == 0 {
			return nil
		}
		return s.submit(k.Name(), k.Spans, func() error { return s.attention(k) })
	case *gpu.PageSum:
		if len(k.Pages) == 0 {
			return nil
		}
		return s.submit(k.Name(), k.Spans, func() error { return s.pageSum(k) })
	}
	return fmt.Errorf("%w: kernel %s", gpu.ErrUnsupported, k.Name())
}

// attentionArgs is the kernels' struct.
type attentionArgs struct {
	q, pool, table, seqLens, part, out                    uint64
	pageStride, kOff, vOff, tokenStride, headStride       int64
	maxPages, pageTokens, qHeads, kvHeads, splits, window int32
	qType                                                 int32
	scaleLog2e, capIn, capLog2                            float32
}

// The kernels' numbers for element types.
var typeNumber = map[gpu.DType]int32{gpu.BF16: 0, gpu.FP16: 1, gpu.FP32: 2}

const decodeThreads = 128

// tile is how many query heads of a KV head one block takes, and the kernel for them.
func tile(a *gpu.Attention) (heads int, name string) {
	if a.ValueDim != a.HeadDim {
		return 4, fmt.Sprintf("kv_decode_%s_latent_g4", a.Type)
	}
	heads = 8
	switch group := a.QHeads / a.KVHeads; {
	case group == 1:
		heads = 1
	case group <= 4 || a.HeadDim == 96 && a.Type.Size() == 2: // 8 heads of 24 columns per thread do not fit into registers
		heads = 4
	}
	return heads, fmt.Sprintf("kv_decode_%s_d%d_g%d", a.Type, a.HeadDim, heads)
}

// splits is as asked, or enough to give every multiprocessor two blocks, of no fewer than 512 tokens.
func (s *stream) splits(a *gpu.Attention, blocks int) int {
	if a.Splits > 0 {
		return a.Splits
	}
	longest := 0
	for b, n := range a.SeqLens {
		longest = max(longest, int(n)-a.Start(b))
	}
	want := (2*s.dev.info.Units + blocks - 1) / blocks
	return max(1, min(want, longest/512, gpu.MaxSplits))
}

func (s *stream) attention(a *gpu.Attention) error {
	heads, name := tile(a)
	tiles := (a.QHeads/a.KVHeads + heads - 1) / heads
	grid := [3]uint32{1, uint32(a.KVHeads * tiles), uint32(a.Batch())}
	splits := s.splits(a, int(grid[1]*grid[2]))
	grid[0] = uint32(splits)

	tables := 4 * (len(a.Table) + len(a.SeqLens))
	parts := (tables + 255) &^ 255
	size := parts
	if splits > 1 {
		size += 4 * a.Batch() * a.QHeads * splits * (a.ValueDim + 2)
	}
	x, err := s.takeScratch(max(size, 1))
	if err != nil {
		return err
	}
	for i, p := range a.Table {
		binary.LittleEndian.PutUint32(x.host[4*i:], uint32(p))
	}
	lens := 4 * len(a.Table)
	for i, n := range a.SeqLens {
		binary.LittleEndian.PutUint32(x.host[lens+4*i:], uint32(n))
	}
	if err := x.upload(s, tables); err != nil {
		return err
	}
	device := uint64(x.device)
	args := attentionArgs{q: uint64(a.Q), pool: uint64(a.Pool), table: device, seqLens: device + uint64(lens), part: device + uint64(parts), out: uint64(a.Out),
		pageStride: a.PageStride, kOff: a.KOffset, vOff: a.VOffset, tokenStride: a.TokenStride, headStride: a.HeadStride,
		maxPages: int32(a.MaxPages), pageTokens: int32(a.Tokens), qHeads: int32(a.QHeads), kvHeads: int32(a.KVHeads), splits: int32(splits),
		window: int32(a.Window), qType: typeNumber[a.QType], scaleLog2e: a.ScaleOrDefault() * math.Log2E}
	if a.SoftCap != 0 {
		args.capLog2 = a.SoftCap * math.Log2E
		args.capIn = 1 / args.capLog2
	}
	if err := s.launch("decode_"+a.Type.String(), name, grid, decodeThreads, unsafe.Pointer(&args)); err != nil || splits == 1 {
		return err
	}
	n, qHeads, dim := int32(splits), int32(a.QHeads), int32(a.ValueDim)
	return s.launch("decode_bf16", "kv_decode_combine", [3]uint32{uint32(a.QHeads), uint32(a.Batch()), 1}, decodeThreads,
		unsafe.Pointer(&args.part), unsafe.Pointer(&args.out), unsafe.Pointer(&args.seqLens), unsafe.Pointer(&n), unsafe.Pointer(&qHeads), unsafe.Pointer(&dim))
}

// sumPages is how many pages one launch sums: a dimension of the grid ends at 65,535.
const sumPages = 32768

func (s *stream) pageSum(k *gpu.PageSum) error {
	chunks := uint32((k.Bytes + gpu.ChunkBytes - 1) / gpu.ChunkBytes)
	list := 8 * len(k.Pages)
	x, err := s.takeScratch(list + list*int(chunks))
	if err != nil {
		return err
	}
	for i, p := range k.Pages {
		binary.LittleEndian.PutUint64(x.host[8*i:], uint64(p))
	}
	if err := x.upload(s, list); err != nil {
		return err
	}
	bytes := uint64(k.Bytes)
	for from := 0; from < len(k.Pages); from += sumPages {
		n := uint32(min(sumPages, len(k.Pages)-from))
		pages := uint64(x.device) + uint64(8*from)
		sums := uint64(x.device) + uint64(list) + uint64(8*from)*uint64(chunks)
		out := uint64(k.Out) + uint64(8*from)
		err := s.launch("pages", "kv_sum_chunks", [3]uint32{chunks, n, 1}, 128, unsafe.Pointer(&pages), unsafe.Pointer(&bytes), unsafe.Pointer(&sums))
		if err != nil {
			return err
		}
		err = s.launch("pages", "kv_sum_pages", [3]uint32{(n + 31) / 32, 1, 1}, 32, unsafe.Pointer(&sums), unsafe.Pointer(&chunks), unsafe.Pointer(&bytes), unsafe.Pointer(&n), unsafe.Pointer(&out))
		if err != nil {
			return err
		}
	}
	return nil
}

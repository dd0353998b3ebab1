package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// The attention that the demo decodes with: pages of 64 KiB hold the keys and
// values of 16 tokens, 8 heads and 128 elements in bf16, read by 32 query heads.
const (
	decodeTokens  = 16
	decodeKVHeads = 8
	decodeQHeads  = 32
	decodeDim     = 128
	// decodeBlocks is the most blocks of one decode: the reference in float64 takes a
	// millisecond for each.
	decodeBlocks = 24
	// decodeTolerance is the error against float64 up to which a result is right.
	decodeTolerance = 3e-6
)

func decodeLayout() gpu.Layout {
	return gpu.NHD(gpu.BF16, decodeTokens, decodeKVHeads, decodeDim)
}

// decoder is an engine's attention: a device of its process, with the node's pool
// mapped. One goroutine uses it.
type decoder struct {
	device *host.Device
	stream gpu.Stream
	own    gpu.Mem // query, then result
	pool   gpu.Mem // registered; nil: none yet
	rng    *rand.Rand
}

const decoderBytes = 1 << 20

func newDecoder(seed uint64) (*decoder, error) {
	device, err := host.Open(host.Config{MemoryBytes: decoderBytes})
	if err != nil {
		return nil, err
	}
	d := &decoder{device: device, rng: rand.New(rand.NewPCG(seed, 17))}
	if d.stream, err = device.NewStream(); err == nil {
		d.own, err = device.Alloc(decoderBytes, gpu.Private)
	}
	if err != nil {
		return nil, errors.Join(err, device.Close())
	}
	return d, nil
}

func (d *decoder) close() error {
	var err error
	if d.pool != nil {
		err = d.pool.Free()
	}
	return errors.Join(err, d.own.Free(), d.stream.Close(), d.device.Close())
}

// mapPool makes the range that the client maps the pool into known to the device;
// it is another one after each attach.
func (d *decoder) mapPool(p *client.Pool) error {
	if d.pool != nil {
		if at := d.pool.Bytes(); &at[0] == &p.Memory[0] {
			return nil
		}
		if err := d.pool.Free(); err != nil {
			return err
		}
		d.pool = nil
	}
	var err error
	d.pool, err = d.device.Register(p.Memory)
	return err
}

// attention is one token's attention over the first rows blocks of a lease, where
// they lie.
func (d *decoder) attention(p *client.Pool, lease *client.Lease, rows int) (*gpu.Attention, error) {
	if err := d.mapPool(p); err != nil {
		return nil, err
	}
	a := &gpu.Attention{Layout: decodeLayout(), QHeads: decodeQHeads, QType: gpu.FP32,
		Pages: int(int64(len(p.Memory)) / p.UnitBytes), MaxPages: rows, SeqLens: []int32{int32(rows*decodeTokens - 3)}}
	a.PageBytes, a.PageStride = a.PageStride, p.UnitBytes
	for row := range rows {
		slot, ok := lease.Slot(row, 0)
		if !ok {
			return nil, fmt.Errorf("no slot of block %d: %w", row, lease.Err())
		}
		a.Table = append(a.Table, int32(p.Offset(slot)/p.UnitBytes))
	}
	if sabotage.On("wrong-block-table") && rows > 1 {
		a.Table[0] = a.Table[1]
	}
	a.Q, a.Out, a.Pool = d.own.Addr(), d.own.Addr()+decoderBytes/2, d.pool.Addr()
	for i := int64(0); i < a.QBytes(); i += 4 {
		gpu.FP32.Store(d.own.Bytes()[i:], float32(d.rng.NormFloat64()))
	}
	return a, nil
}

// decode runs attention over fetched pages in place and compares it with float64
// over what the pages must hold. It returns the relative error.
func (d *decoder) decode(ctx context.Context, p *client.Pool, lease *client.Lease, rows int, fill func(row int, page []byte)) (float64, error) {
	a, err := d.attention(p, lease, rows)
	if err != nil {
		return 0, err
	}
	if err := errors.Join(d.stream.Launch(a), gpu.Sync(ctx, d.stream)); err != nil {
		return 0, fmt.Errorf("attention: %w", err)
	}
	want := *a
	want.Layout, want.Pages, want.Table = decodeLayout(), rows, make([]int32, rows)
	pages := make([]byte, int64(rows)*want.PageStride)
	for row := range rows {
		want.Table[row] = int32(row)
		fill(row, pages[int64(row)*want.PageStride:][:want.PageStride])
	}
	out := d.own.Bytes()[decoderBytes/2:][:a.OutBytes()]
	return gpu.RelativeError(out, want.Reference(d.own.Bytes()[:a.QBytes()], pages)), nil
}

// decodeLease decodes over what a lease granted and judges the result.
func (e *engine) decodeLease(ctx context.Context, lease *client.Lease, names []paging.BlockName) error {
	rows := min(len(names), decodeBlocks)
	if rows == 0 {
		return nil
	}
	pool, err := e.client.Pool()
	if err != nil {
		return err
	}
	rel, err := e.decoder.decode(ctx, pool, lease, rows, func(row int, page []byte) { e.content.Fill(page, e.page(names[row], 0)) })
	if err != nil {
		return err
	}
	e.tally.decoded.Add(1)
	e.tally.worst(rel)
	if !(rel <= decodeTolerance) {
		e.tally.wrongDecodes.Add(1)
		e.tally.wrong.Add(1)
		e.tally.note("attention over %d blocks in place: relative error %.2g, at most %.0g", rows, rel, decodeTolerance)
	}
	return nil
}

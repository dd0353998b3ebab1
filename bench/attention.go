package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/gpu/host/attn"
	"github.com/kvtier/kvtier/paging"
)

// AttentionConfig describes "bench attention".
type AttentionConfig struct {
	Threads     int
	MemoryBytes int64 // that the sequences rotate over, of each element type
	Rounds      int
	Progress    Progress
}

// AttentionFigures are those of one element type.
type AttentionFigures struct {
	BytesPerS         float64 `json:"bytes_per_s"`
	ReadBandwidth     float64 `json:"read_bandwidth_bytes_per_s"`
	Ratio             float64 `json:"ratio"`
	RelErr            float64 `json:"relerr"`
	MS                float64 `json:"ms"` // decode of one sequence
	Sequences         int     `json:"sequences"`
	WorkingSetBytes   int64   `json:"working_set_bytes"`
	InstructionSet    string  `json:"isa"`
	ToleranceExceeded bool    `json:"tolerance_exceeded"`
}

// AttentionReport is the answer of "bench attention".
type AttentionReport struct {
	Threads int              `json:"threads"`
	BF16    AttentionFigures `json:"bf16"`
	FP16    AttentionFigures `json:"fp16"`
	FP32    AttentionFigures `json:"fp32"`
}

// attentionTolerance is the error against float64 up to which a result is right.
const attentionTolerance = 3e-6

// Attention measures paged decode attention on the CPU (4096 tokens, 32 query
// heads over 8 KV heads of 128, pages of 64 tokens in random order) against
// sequential reads of the same memory with as many threads, alternating.
func Attention(ctx context.Context, cfg AttentionConfig) (*AttentionReport, error) {
	rep := &AttentionReport{Threads: cfg.Threads}
	step := stepper(cfg.Progress, 3)
	for _, x := range []struct {
		t   gpu.DType
		out *AttentionFigures
	}{{gpu.BF16, &rep.BF16}, {gpu.FP16, &rep.FP16}, {gpu.FP32, &rep.FP32}} {
		m, err := attn.Measure(ctx, attn.Measurement{Type: x.t, Threads: cfg.Threads, MemoryBytes: cfg.MemoryBytes, Rounds: cfg.Rounds})
		if err != nil {
			return nil, err
		}
		*x.out = AttentionFigures{BytesPerS: m.BytesPerSec, ReadBandwidth: m.ReadBytesPerSec, Ratio: m.Ratio, RelErr: m.RelErr,
			MS: float64(m.PerSequence.Microseconds()) / 1e3, Sequences: m.Sequences, WorkingSetBytes: m.MemoryBytes,
			InstructionSet: m.ISA.String(), ToleranceExceeded: !(m.RelErr <= attentionTolerance)}
		step()
	}
	return rep, nil
}

// Rows implements Report.
func (r *AttentionReport) Rows() []Row {
	rows := []Row{{"workload", "4096 tokens, 32 query heads over 8 KV heads of 128",
		fmt.Sprintf("pages of 64 tokens, %d threads, %s, beside sequential reads of the same memory", r.Threads, r.BF16.InstructionSet)}}
	for _, x := range []struct {
		name string
		f    *AttentionFigures
	}{{"bf16", &r.BF16}, {"fp16", &r.FP16}, {"fp32", &r.FP32}} {
		rows = append(rows, Row{x.name, formatRate(x.f.BytesPerS),
			fmt.Sprintf("%s of the %s of a read, goal at least 0.80; %.2f ms a sequence; relative error %.1g, at most 3e-06", ratio2(x.f.Ratio), formatRate(x.f.ReadBandwidth), x.f.MS, x.f.RelErr)})
	}
	return rows
}

// Err implements Report.
func (r *AttentionReport) Err() error {
	for _, f := range []*AttentionFigures{&r.BF16, &r.FP16, &r.FP32} {
		if f.ToleranceExceeded {
			return fmt.Errorf("relative error %g against float64, at most %g", f.RelErr, attentionTolerance)
		}
	}
	return nil
}

// DeviceConfig describes "bench device".
type DeviceConfig struct {
	// Device is what pages are copied to and from; Name is its kind. Closed by the
	// caller.
	Device gpu.Device
	// Bytes are copied in each direction and round, for each page size.
	Bytes    int64
	Rounds   int
	Progress Progress
}

// DeviceCopies are the rates of one page size, in the best round.
type DeviceCopies struct {
	PageBytes      int64   `json:"page_bytes"`
	UpBytesPerS    float64 `json:"up_bytes_per_s"`   // from registered host memory to a pool
	DownBytesPerS  float64 `json:"down_bytes_per_s"` // back
	OnBytesPerS    float64 `json:"on_bytes_per_s"`   // between two pools
	MemcpyPerS     float64 `json:"memcpy_bytes_per_s"`
	UpRatio        float64 `json:"up_ratio"`
	DownRatio      float64 `json:"down_ratio"`
	ChecksumsPerS  float64 `json:"page_sum_bytes_per_s"` // sums of pages computed on the device
	WrongChecksums int64   `json:"wrong_checksums"`
}

// DeviceReport is the answer of "bench device".
type DeviceReport struct {
	Driver     string         `json:"driver"`
	Device     string         `json:"device"`
	BatchBytes int64          `json:"batch_bytes"`
	Copies     []DeviceCopies `json:"copies"`
}

// devicePages are the page sizes measured.
var devicePages = []int64{16 << 10, 64 << 10, 256 << 10, 2 << 20}

// Device measures batches of page copies between the host and a device, beside
// copies of the same pages by this process, alternating.
func Device(ctx context.Context, cfg DeviceConfig) (_ *DeviceReport, err error) {
	b := &deviceBench{cfg: &cfg}
	if err := b.open(); err != nil {
		return nil, errors.Join(err, b.close())
	}
	defer func() { err = errors.Join(err, b.close()) }()
	info := cfg.Device.Info()
	rep := &DeviceReport{Driver: info.Driver, Device: info.Name, BatchBytes: cfg.Bytes}
	step := stepper(cfg.Progress, int64(len(devicePages)*cfg.Rounds))
	for _, page := range devicePages {
		c, err := b.measure(ctx, page, step)
		if err != nil {
			return nil, err
		}
		rep.Copies = append(rep.Copies, c)
	}
	return rep, nil
}

type deviceBench struct {
	cfg    *DeviceConfig
	plain  *host.Device // memory of this process that can be registered
	memory gpu.Mem
	host   gpu.Mem // the same, registered with the device
	pools  [2]gpu.Mem
	sums   gpu.Mem
	stream gpu.Stream
	rng    *rand.Rand
}

func (b *deviceBench) open() (err error) {
	b.rng = rand.New(rand.NewPCG(5, 6))
	bytes := b.cfg.Bytes
	if b.plain, err = host.Open(host.Config{MemoryBytes: 3 * bytes}); err != nil {
		return err
	}
	if b.memory, err = b.plain.Alloc(2*bytes, gpu.Private); err != nil {
		return err
	}
	fill := b.memory.Bytes()
	for i := 0; i < len(fill); i += 8 {
		fill[i] = byte(b.rng.Uint64())
	}
	if b.host, err = b.cfg.Device.Register(fill); err != nil {
		return fmt.Errorf("register host memory with the device: %w", err)
	}
	for i := range b.pools {
		if b.pools[i], err = b.cfg.Device.Alloc(bytes, gpu.Pool); err != nil {
			return fmt.Errorf("pool of %s on the device: %w", FormatBytes(bytes), err)
		}
	}
	if b.sums, err = b.cfg.Device.Alloc(8*bytes/devicePages[0], gpu.Private); err != nil {
		return err
	}
	b.stream, err = b.cfg.Device.NewStream()
	return err
}

func (b *deviceBench) close() error {
	var errs []error
	if b.stream != nil {
		errs = append(errs, b.stream.Close())
	}
	for _, m := range []gpu.Mem{b.sums, b.pools[0], b.pools[1], b.host, b.memory} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	if b.plain != nil {
		errs = append(errs, b.plain.Close())
	}
	return errors.Join(errs...)
}

// batch is pages of from, in random order, to places of to in order.
func (b *deviceBench) batch(to, from gpu.Addr, page int64) []gpu.Copy {
	batch := make([]gpu.Copy, 0, b.cfg.Bytes/page)
	for i, p := range b.rng.Perm(int(b.cfg.Bytes / page)) {
		batch = append(batch, gpu.Copy{Dst: to + gpu.Addr(int64(i)*page), Src: from + gpu.Addr(int64(p)*page), Bytes: page})
	}
	return batch
}

func (b *deviceBench) timed(ctx context.Context, work func() error) (time.Duration, error) {
	start := time.Now()
	err := errors.Join(work(), gpu.Sync(ctx, b.stream))
	return time.Since(start), err
}

func (b *deviceBench) measure(ctx context.Context, page int64, step func()) (DeviceCopies, error) {
	c := DeviceCopies{PageBytes: page}
	best := func(rate *float64, took time.Duration) {
		*rate = max(*rate, float64(b.cfg.Bytes/page*page)/took.Seconds())
	}
	src, dst := b.memory.Bytes()[:b.cfg.Bytes], b.memory.Bytes()[b.cfg.Bytes:]
	for range b.cfg.Rounds {
		up, down, on := b.batch(b.pools[0].Addr(), b.host.Addr(), page), b.batch(b.host.Addr()+gpu.Addr(b.cfg.Bytes), b.pools[0].Addr(), page), b.batch(b.pools[1].Addr(), b.pools[0].Addr(), page)
		for _, x := range []struct {
			rate  *float64
			batch []gpu.Copy
		}{{&c.UpBytesPerS, up}, {&c.DownBytesPerS, down}, {&c.OnBytesPerS, on}} {
			took, err := b.timed(ctx, func() error { return b.stream.Copy(x.batch) })
			if err != nil {
				return c, fmt.Errorf("copy pages of %s: %w", FormatBytes(page), err)
			}
			best(x.rate, took)
		}
		start := time.Now()
		for _, x := range down {
			copy(dst[x.Dst-b.host.Addr()-gpu.Addr(b.cfg.Bytes):][:page], src[x.Src-b.pools[0].Addr():][:page])
		}
		best(&c.MemcpyPerS, time.Since(start))
		if err := b.sum(ctx, &c, up, best); err != nil {
			return c, err
		}
		step()
	}
	c.UpRatio, c.DownRatio = c.UpBytesPerS/c.MemcpyPerS, c.DownBytesPerS/c.MemcpyPerS
	return c, nil
}

// sum has the device sum the pages that up brought, and compares a few.
func (b *deviceBench) sum(ctx context.Context, c *DeviceCopies, up []gpu.Copy, best func(*float64, time.Duration)) error {
	k := gpu.PageSum{Bytes: c.PageBytes, Out: b.sums.Addr()}
	for _, x := range up {
		k.Pages = append(k.Pages, x.Dst)
	}
	took, err := b.timed(ctx, func() error { return b.stream.Launch(&k) })
	if err != nil {
		return fmt.Errorf("sum pages of %s: %w", FormatBytes(c.PageBytes), err)
	}
	best(&c.ChecksumsPerS, took)
	n := min(64, len(up))
	back := gpu.Copy{Dst: b.host.Addr() + gpu.Addr(b.cfg.Bytes), Src: b.sums.Addr(), Bytes: int64(8 * n)}
	if _, err := b.timed(ctx, func() error { return b.stream.Copy([]gpu.Copy{back}) }); err != nil {
		return err
	}
	got := b.memory.Bytes()[b.cfg.Bytes:]
	for i := range n {
		want := paging.Checksum(b.memory.Bytes()[up[i].Src-b.host.Addr():][:c.PageBytes])
		for j := range 8 {
			if got[8*i+j] != byte(want>>(8*j)) {
				c.WrongChecksums++
				break
			}
		}
	}
	return nil
}

// Rows implements Report.
func (r *DeviceReport) Rows() []Row {
	rows := []Row{{"device", r.Device, fmt.Sprintf("%s, batches of %s, pages in random order", r.Driver, FormatBytes(r.BatchBytes))}}
	for _, c := range r.Copies {
		rows = append(rows,
			Row{"pages of " + FormatBytes(c.PageBytes), "up " + formatRate(c.UpBytesPerS) + "  down " + formatRate(c.DownBytesPerS) + "  on it " + formatRate(c.OnBytesPerS),
				fmt.Sprintf("%s and %s of memcpy's %s; sums %s, %d wrong", ratio2(c.UpRatio), ratio2(c.DownRatio), formatRate(c.MemcpyPerS), formatRate(c.ChecksumsPerS), c.WrongChecksums)})
	}
	return rows
}

// Err implements Report.
func (r *DeviceReport) Err() error {
	for _, c := range r.Copies {
		if c.WrongChecksums > 0 {
			return fmt.Errorf("%d wrong checksums of pages of %s", c.WrongChecksums, FormatBytes(c.PageBytes))
		}
	}
	return nil
}

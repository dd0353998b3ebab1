// Command check measures and checks one CUDA device, for the folder that "make
// gpu-check" prepares: it needs nothing but the driver. It prints one JSON object
// and exits 1 if something is wrong.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda"
	"github.com/kvtier/kvtier/paging"
)

// result is what is printed. A step that failed has its error in Errors, and the
// others go on.
type result struct {
	Probe         cuda.Report         `json:"probe"`
	Device        gpu.Info            `json:"device"`
	OpenMS        float64             `json:"open_ms"` // context and the first module
	Copies        *bench.DeviceReport `json:"copies,omitempty"`
	Attention     []attention         `json:"attention,omitempty"`
	ForeignReader string              `json:"foreign_reader"` // "ok", or what went wrong
	Torch         json.RawMessage     `json:"torch,omitempty"`
	Conformance   string              `json:"conformance"` // "ok", or what went wrong
	Errors        []string            `json:"errors"`
	Seconds       float64             `json:"seconds"`
}

// attention is one decode.
type attention struct {
	Type      string  `json:"type"`
	Batch     int     `json:"batch"`
	Tokens    int     `json:"tokens"`
	KVBytes   int64   `json:"kv_bytes"`
	FirstMS   float64 `json:"first_ms"` // with the translation of the kernel
	MS        float64 `json:"ms"`       // the best of several
	BytesPerS float64 `json:"bytes_per_s"`
	RelErr    float64 `json:"relerr"` // of a small case of the same shape, against float64
}

// tolerance of attention on hardware, whose exponentials are approximations.
const tolerance = 1e-4

type options struct {
	library string
	ordinal int
	scale   int64 // sizes are divided by it
	dir     string
}

func main() {
	var o options
	flag.StringVar(&o.library, "library", "", "driver library; empty: libcuda.so.1")
	flag.IntVar(&o.ordinal, "device", 0, "number of the device")
	flag.Int64Var(&o.scale, "scale", 1, "divide sizes by this")
	reader := flag.Bool("reader", false, "be the foreign process (internal)")
	flag.Parse()
	if *reader {
		if err := read(o); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if self, err := os.Executable(); err == nil {
		o.dir = filepath.Dir(self)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	r := run(ctx, o)
	cancel()
	out, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(string(out))
	if len(r.Errors) > 0 {
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) *result {
	start := time.Now()
	r := &result{Errors: []string{}}
	defer func() { r.Seconds = time.Since(start).Seconds() }()
	fail := func(what string, err error) {
		if err != nil {
			r.Errors = append(r.Errors, what+": "+err.Error())
		}
	}
	var err error
	r.Probe, err = cuda.Probe(o.library)
	fail("probe", err)
	opening := time.Now()
	d, err := cuda.Open(cuda.Config{Library: o.library, Ordinal: o.ordinal})
	if err != nil {
		fail("open", err)
		return r
	}
	r.OpenMS, r.Device = millis(time.Since(opening)), d.Info()
	r.Copies, err = bench.Device(ctx, bench.DeviceConfig{Device: d, Bytes: (512 << 20) / o.scale &^ (2<<20 - 1), Rounds: 5})
	fail("copies", err)
	if err == nil {
		fail("copies", r.Copies.Err())
	}
	for _, t := range []gpu.DType{gpu.BF16, gpu.FP16, gpu.FP32} {
		a, err := measure(ctx, d, t, o.scale)
		fail("attention "+t.String(), err)
		if err == nil {
			r.Attention = append(r.Attention, *a)
			if !(a.RelErr <= tolerance) {
				fail("attention "+t.String(), fmt.Errorf("relative error %g, at most %g", a.RelErr, tolerance))
			}
		}
	}
	r.ForeignReader = verdict(foreign(ctx, d, o))
	if r.ForeignReader != "ok" {
		fail("foreign reader", errors.New(r.ForeignReader))
	}
	r.Torch, err = torch(ctx, d, o)
	fail("torch", err)
	fail("close", d.Close())
	r.Conformance = verdict(conformance(ctx, o))
	if r.Conformance != "ok" {
		fail("conformance", errors.New(r.Conformance))
	}
	return r
}

func verdict(err error) string {
	if err != nil {
		return err.Error()
	}
	return "ok"
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// decode is an attention with all it needs on a device.
type decode struct {
	gpu.Attention
	mem    gpu.Mem
	stream gpu.Stream
	q      []byte
}

const pageTokens = 64

func newDecode(ctx context.Context, d gpu.Device, t gpu.DType, batch, tokens int) (_ *decode, pool []byte, err error) {
	l := gpu.NHD(t, pageTokens, 8, 128)
	perSeq := (tokens + pageTokens - 1) / pageTokens
	x := &decode{Attention: gpu.Attention{Layout: l, QHeads: 32, QType: t, Pages: batch * perSeq, MaxPages: perSeq}}
	rng := rand.New(rand.NewPCG(1, uint64(t)))
	for range batch {
		x.SeqLens = append(x.SeqLens, int32(tokens))
	}
	for _, p := range rng.Perm(x.Pages) {
		x.Table = append(x.Table, int32(p))
	}
	pool = make([]byte, l.PoolBytes(x.Pages))
	table := make([]byte, 1<<16*t.Size())
	for i := 0; i < len(table); i += t.Size() {
		t.Store(table[i:], float32(rng.NormFloat64()))
	}
	for i := 0; i < len(pool); i += len(table) - 254*t.Size() {
		copy(pool[i:], table)
	}
	x.q = append([]byte(nil), table[:x.QBytes()]...)
	qAt, outAt := int64(0), (x.QBytes()+255)&^255
	poolAt := outAt + (x.OutBytes()+255)&^255
	if x.mem, err = d.Alloc(poolAt+int64(len(pool)), gpu.Pool); err != nil {
		return nil, nil, err
	}
	if x.stream, err = d.NewStream(); err != nil {
		return nil, nil, err
	}
	x.Q, x.Out, x.Pool = x.mem.Addr()+gpu.Addr(qAt), x.mem.Addr()+gpu.Addr(outAt), x.mem.Addr()+gpu.Addr(poolAt)
	err = errors.Join(put(ctx, d, x.stream, x.Q, x.q), put(ctx, d, x.stream, x.Pool, pool))
	return x, pool, err
}

func (x *decode) free() error { return errors.Join(x.mem.Free(), x.stream.Close()) }

// measure decodes a large batch for its time and a small one for its error.
func measure(ctx context.Context, d gpu.Device, t gpu.DType, scale int64) (_ *attention, err error) {
	batch, tokens := 64, int(max(256, 8192/scale))
	if t == gpu.FP32 {
		batch = 32
	}
	batch = int(max(2, int64(batch)/scale))
	x, _, err := newDecode(ctx, d, t, batch, tokens)
	if err != nil {
		return nil, err
	}
	a := &attention{Type: t.String(), Batch: batch, Tokens: tokens, KVBytes: x.KVBytes()}
	for i := range 12 {
		start := time.Now()
		if err := errors.Join(x.stream.Launch(&x.Attention), gpu.Sync(ctx, x.stream)); err != nil {
			return nil, errors.Join(err, x.free())
		}
		took := millis(time.Since(start))
		if i == 0 {
			a.FirstMS, a.MS = took, took
		}
		a.MS = min(a.MS, took)
	}
	a.BytesPerS = float64(a.KVBytes) / a.MS * 1e3
	if err := x.free(); err != nil {
		return nil, err
	}
	small, pool, err := newDecode(ctx, d, t, 2, 300)
	if err != nil {
		return nil, err
	}
	got := make([]byte, small.OutBytes())
	err = errors.Join(small.stream.Launch(&small.Attention), get(ctx, d, small.stream, small.Out, got))
	a.RelErr = gpu.RelativeError(got, small.Reference(small.q, pool))
	return a, errors.Join(err, small.free())
}

// foreign has a process of its own map a pool and read it in place.
func foreign(ctx context.Context, d gpu.Device, o options) error {
	bytes := max(int64(2<<20), d.Info().GranuleBytes)
	pool, err := d.Alloc(bytes, gpu.Pool)
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return errors.Join(err, pool.Free())
	}
	content := make([]byte, pool.Size())
	rng := rand.New(rand.NewPCG(9, 9))
	for i := 0; i < len(content); i += 8 {
		binary.LittleEndian.PutUint64(content[i:], rng.Uint64())
	}
	err = put(ctx, d, s, pool.Addr(), content)
	if err == nil {
		err = withExport(pool, func(f *os.File) error {
			cmd := exec.CommandContext(ctx, os.Args[0], "-reader", "-library", o.library, "-device", fmt.Sprint(o.ordinal))
			cmd.Env = append(os.Environ(), fmt.Sprintf("CHECK_BYTES=%d", pool.Size()))
			cmd.ExtraFiles = []*os.File{f}
			out, err := cmd.CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			if want := fmt.Sprintf("%016x", paging.Checksum(content)); strings.TrimSpace(string(out)) != want {
				return fmt.Errorf("it reads %s, want %s", strings.TrimSpace(string(out)), want)
			}
			return nil
		})
	}
	return errors.Join(err, pool.Free(), s.Close())
}

func withExport(m gpu.Mem, use func(f *os.File) error) error {
	f, err := m.Export()
	if err != nil {
		return err
	}
	return errors.Join(use(f), f.Close())
}

// read is the foreign process: descriptor 3 is the pool.
func read(o options) error {
	var bytes int64
	if _, err := fmt.Sscan(os.Getenv("CHECK_BYTES"), &bytes); err != nil {
		return err
	}
	d, err := cuda.Open(cuda.Config{Library: o.library, Ordinal: o.ordinal})
	if err != nil {
		return err
	}
	pool, err := d.Import(os.NewFile(3, "pool"), bytes, gpu.ReadOnly)
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	b := make([]byte, bytes)
	if err := get(context.Background(), d, s, pool.Addr(), b); err != nil {
		return err
	}
	fmt.Printf("%016x\n", paging.Checksum(b))
	return errors.Join(pool.Free(), s.Close(), d.Close())
}

// conformance runs the suite of devices against this driver.
func conformance(ctx context.Context, o options) error {
	suite := filepath.Join(o.dir, "conformance.test")
	if _, err := os.Stat(suite); err != nil {
		return fmt.Errorf("not run: %w", err)
	}
	cmd := exec.CommandContext(ctx, suite, "-test.run", "^TestRealDevice$", "-test.timeout", "4m")
	cmd.Env = append(os.Environ(), "KVTIER_TEST_STUB="+filepath.Join(o.dir, "libcuda-stub.so"), "KVTIER_GPU=1", "KVTIER_CUDA_LIBRARY="+o.library)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %.4000s", err, out)
	}
	return nil
}

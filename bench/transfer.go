package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// TransferConfig describes "bench remote" and "bench stream".
type TransferConfig struct {
	PageBytes int64
	Bytes     int64 // of a round
	Rounds    int
	Node      NodeConfig
	TempDir   string
	Progress  Progress
}

// transferCall is the most that one Fetch asks for: what an engine waits for at
// once.
const transferCall = 64 << 20

// Remote measures the pages of another daemon through a client's Fetch, in place
// at the end, against a plain TCP copy that checks what it gets, alternating.
func Remote(ctx context.Context, cfg TransferConfig) (*TransferReport, error) {
	return transferRun(ctx, &cfg, func(ctx context.Context, b *transfer, dir string) error {
		// A quarter of the budget is kept for staging, and some of the rest is slack.
		node := cfg.Node
		node.RAM = max(localRAM, 2*cfg.Bytes)
		// A node of a cluster has a disk. At the source all pages are on it after the
		// round that is not counted; at the reader's, none has a reason to be.
		node.NVMe, node.HBM = cfg.Bytes*5/4+64<<20, 0
		first := []string{"--http-listen", "off", "--peer-listen", "127.0.0.1:0", "--gossip-listen", "127.0.0.1:0", "--flush-after", "24h"}
		if err := b.start(ctx, node, filepath.Join(dir, "a"), append(first, "--bootstrap")); err != nil {
			return err
		}
		node.NVMe = 64 << 20
		if err := b.start(ctx, node, filepath.Join(dir, "b"), append(first, "--join", b.daemons[0].Ready("peers"))); err != nil {
			return err
		}
		var err error
		b.reader, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: b.daemons[1].Socket(), Engine: "bench"})
		b.drops = true
		return err
	})
}

// Stream measures the pages of a daemon through the Fetch of a client that is not
// co-located: a gRPC stream into private memory.
func Stream(ctx context.Context, cfg TransferConfig) (*TransferReport, error) {
	return transferRun(ctx, &cfg, func(ctx context.Context, b *transfer, dir string) error {
		node := cfg.Node
		node.RAM, node.NVMe, node.HBM = max(localRAM, 2*cfg.Bytes), 0, 0
		if err := b.start(ctx, node, filepath.Join(dir, "a"), []string{"--http-listen", "off", "--listen", "127.0.0.1:0"}); err != nil {
			return err
		}
		var err error
		b.reader, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Address: b.daemons[0].Ready("listen"), Engine: "bench", PrivateBytes: 2 * transferCall})
		return err
	})
}

// transfer is one run. One goroutine uses it.
type transfer struct {
	cfg     *TransferConfig
	daemons []*Daemon
	writer  *client.Client
	reader  *client.Client
	drops   bool // what was fetched stays at the reader's node: drop it after each round
	ns      paging.NamespaceID
	content Content
	names   []paging.BlockName
	plain   *tcpCopy

	took, plainTook, cpu, plainCPU time.Duration
	iperf                          []float64
	wrong                          int64
}

func transferRun(ctx context.Context, cfg *TransferConfig, open func(context.Context, *transfer, string) error) (_ *TransferReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 2*cfg.Bytes)
	if err != nil {
		return nil, err
	}
	b := &transfer{cfg: cfg}
	defer func() { err = errors.Join(err, b.close(ctx), work.Close()) }()
	if err := open(ctx, b, work.Dir); err != nil {
		return nil, err
	}
	if b.writer, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: b.daemons[0].Socket(), Engine: "bench", StagingBytes: transferCall / 2}); err != nil {
		return nil, err
	}
	for _, d := range b.daemons {
		if err := awaitGrown(ctx, d.Socket()); err != nil {
			return nil, err
		}
	}
	if err := b.fill(ctx); err != nil {
		return nil, err
	}
	if b.plain, err = newTCPCopy(ctx, b.content, cfg.PageBytes, int64(len(b.names))*cfg.PageBytes); err != nil {
		return nil, err
	}
	return b.measure(ctx)
}

func (b *transfer) start(ctx context.Context, cfg NodeConfig, dir string, args []string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	cfg.Dir = dir
	cfg.Args = append(args, cfg.Args...)
	d, err := StartDaemon(ctx, cfg)
	if err != nil {
		return err
	}
	b.daemons = append(b.daemons, d)
	return nil
}

func (b *transfer) close(ctx context.Context) error {
	var errs []error
	for _, c := range []*client.Client{b.reader, b.writer} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	for _, d := range b.daemons {
		errs = append(errs, stopDaemon(ctx, d))
	}
	if b.plain != nil {
		errs = append(errs, b.plain.close())
	}
	return errors.Join(errs...)
}

// fill stores the pages of a round at the first node, and waits until the reader
// knows of them.
func (b *transfer) fill(ctx context.Context) error {
	layout := namespaceOf("transfer", 16, b.cfg.PageBytes)
	for _, c := range []*client.Client{b.writer, b.reader} {
		var err error
		if b.ns, err = c.RegisterNamespace(ctx, layout); err != nil {
			return err
		}
	}
	for i := range b.cfg.Bytes / b.cfg.PageBytes {
		b.names = append(b.names, TraceBlock(uint64(i)))
	}
	outcomes, err := b.writer.WriteBlocks(ctx, client.ReserveRequest{Namespace: b.ns, Names: b.names, Timeout: reserveTime}, client.CommitOptions{},
		func(row, part int, dst []byte) error {
			b.content.Fill(dst, b.page(b.names[row], part))
			return nil
		})
	if err != nil {
		return err
	}
	for i, o := range outcomes {
		if o != client.OutcomeCommitted {
			return fmt.Errorf("block %d: %v: %w", i, o, paging.ErrNoSpace)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, replicaPatience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		known, err := b.reader.Lookup(ctx, b.ns, b.names, 0)
		if err == nil && known.Usable == len(b.names) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the reader's node knows of %d of %d blocks: %w", known.Usable, len(b.names), errors.Join(err, ctx.Err()))
		}
	}
}

func (b *transfer) page(name paging.BlockName, part int) paging.PageID {
	return paging.PageID{BlockID: paging.BlockID{Namespace: b.ns, Name: name}, Part: part}
}

func (b *transfer) measure(ctx context.Context) (*TransferReport, error) {
	step := stepper(b.cfg.Progress, int64(b.cfg.Rounds+1))
	for round := range b.cfg.Rounds + 1 {
		if round == 1 { // the one before it touched all memory
			b.took, b.plainTook, b.cpu, b.plainCPU, b.iperf = 0, 0, 0, 0, nil
		}
		order := []func(context.Context) error{b.fetch, b.copyPlain}
		if round%2 == 1 {
			order[0], order[1] = order[1], order[0]
		}
		for _, do := range order {
			if err := do(ctx); err != nil {
				return nil, err
			}
		}
		rate, err := iperf(ctx)
		if err != nil {
			return nil, err
		}
		b.iperf = append(b.iperf, rate)
		step()
	}
	bytes := float64(len(b.names)) * float64(b.cfg.PageBytes) * float64(b.cfg.Rounds)
	r := &TransferReport{
		PageBytes: b.cfg.PageBytes, Bytes: int64(bytes), Rounds: b.cfg.Rounds, WrongPages: b.wrong,
		BytesPerS: bytes / b.took.Seconds(), TCPVerifiedBytesPerS: bytes / b.plainTook.Seconds(), IPerf3BytesPerS: median(b.iperf),
		CPUSecondsPerGB: b.cpu.Seconds() / bytes * 1e9,
	}
	r.RatioToTCP = r.BytesPerS / r.TCPVerifiedBytesPerS
	r.CPURatio = b.cpu.Seconds() / b.plainCPU.Seconds()
	return r, nil
}

func (b *transfer) copyPlain(context.Context) error {
	cpu, start := selfCPU(), time.Now()
	if err := b.plain.run(); err != nil {
		return err
	}
	b.plainTook += time.Since(start)
	b.plainCPU += selfCPU() - cpu
	return nil
}

// allCPU is the processor time of the daemons and of this process.
func (b *transfer) allCPU() (time.Duration, error) {
	sum := selfCPU()
	for _, d := range b.daemons {
		cpu, err := cpuOf(d.PID())
		if err != nil {
			return 0, err
		}
		sum += cpu
	}
	return sum, nil
}

// callsInFlight is how many calls run at once where what they bring has room: an
// engine has more than one request that waits for pages.
const callsInFlight = 2

// fetch brings all pages over once. What is timed ends when the client has its
// leases; then every byte is checked.
func (b *transfer) fetch(ctx context.Context) error {
	perCall := int(max(1, transferCall/b.cfg.PageBytes))
	if !b.drops { // a stream fills private memory, which has room for a call
		for names := range slices.Chunk(b.names, perCall) {
			if err := b.fetchCalls(ctx, [][]paging.BlockName{names}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := b.fetchCalls(ctx, slices.Collect(slices.Chunk(b.names, perCall))); err != nil {
		return err
	}
	outcomes, err := b.reader.Drop(ctx, b.ns, b.names)
	if err != nil {
		return err
	}
	for i, o := range outcomes {
		if o != client.ItemAccepted {
			return fmt.Errorf("drop of block %d: %v: %w", i, o, paging.ErrInvalid)
		}
	}
	return nil
}

// fetchCalls fetches with callsInFlight calls at once, and checks when all are done.
func (b *transfer) fetchCalls(ctx context.Context, calls [][]paging.BlockName) error {
	cpu, err := b.allCPU()
	if err != nil {
		return err
	}
	leases, errs := make([]*client.Lease, len(calls)), make([]error, len(calls))
	var next atomic.Int64
	var running sync.WaitGroup
	start := time.Now()
	for range min(callsInFlight, len(calls)) {
		running.Go(func() { // owner: this call; exits with the last call
			for i := next.Add(1) - 1; i < int64(len(calls)); i = next.Add(1) - 1 {
				leases[i], errs[i] = b.reader.Fetch(ctx, client.FetchRequest{Namespace: b.ns, Names: calls[i], Mode: client.ModeSet, Timeout: fetchTime})
			}
		})
	}
	running.Wait()
	b.took += time.Since(start)
	after, err := b.allCPU()
	b.cpu += after - cpu
	err = errors.Join(err, errors.Join(errs...))
	for i, lease := range leases {
		if lease != nil {
			err = errors.Join(err, b.check(ctx, lease, calls[i]))
		}
	}
	return err
}

// check compares every byte of a lease and releases it.
func (b *transfer) check(ctx context.Context, lease *client.Lease, names []paging.BlockName) error {
	if len(lease.Shortfalls) > 0 || lease.Rows != len(names) {
		return errors.Join(fmt.Errorf("%d of %d blocks came, the first shortfall: %+v: %w", lease.Rows, len(names), lease.Shortfalls, paging.ErrUnavailable), lease.Release(ctx))
	}
	for row := range lease.Rows {
		v, ok := lease.Page(row, 0)
		if !ok || int64(len(v.Bytes())) != b.cfg.PageBytes || b.content.Check(v.Bytes(), b.page(names[row], 0)) >= 0 {
			b.wrong++
		}
		if ok {
			if err := v.Close(); err != nil {
				b.wrong++
			}
		}
	}
	return lease.Release(ctx)
}

// TransferReport is the answer of "bench remote" and "bench stream". The time
// ends with the client's lease; processor time is that of both ends.
type TransferReport struct {
	PageBytes            int64   `json:"page_bytes"`
	Bytes                int64   `json:"bytes"` // in all rounds
	Rounds               int     `json:"rounds"`
	BytesPerS            float64 `json:"bytes_per_s"`
	TCPVerifiedBytesPerS float64 `json:"tcp_verified_bytes_per_s"` // plain TCP, XXH3 by 64 KiB
	IPerf3BytesPerS      float64 `json:"iperf3_bytes_per_s"`       // 0: not installed
	RatioToTCP           float64 `json:"ratio_to_tcp"`
	CPURatio             float64 `json:"cpu_ratio"`
	CPUSecondsPerGB      float64 `json:"cpu_s_per_gb"`
	WrongPages           int64   `json:"wrong_pages"`
}

// Rows implements Report.
func (r *TransferReport) Rows() []Row {
	rows := []Row{
		{"workload", FormatBytes(r.Bytes), fmt.Sprintf("%d rounds, pages of %s, over loopback", r.Rounds, FormatBytes(r.PageBytes))},
		{"fetched", formatRate(r.BytesPerS), fmt.Sprintf("%.2f CPU s/GB at both ends", r.CPUSecondsPerGB)},
		{"plain TCP and XXH3", formatRate(r.TCPVerifiedBytesPerS), "alternating, in one process"},
	}
	if r.IPerf3BytesPerS > 0 {
		rows = append(rows, Row{"iperf3", formatRate(r.IPerf3BytesPerS), "cubic, nothing checked"})
	}
	return append(rows, []Row{
		{"ratio to plain TCP", ratio2(r.RatioToTCP), "goal at least 0.90 from another node, 0.50 in a gRPC stream"},
		{"CPU ratio", ratio2(r.CPURatio), "goal at most 1.25 from another node"},
		{"wrong pages", fmt.Sprint(r.WrongPages), "must be 0"},
	}...)
}

// Err implements Report.
func (r *TransferReport) Err() error {
	if r.WrongPages != 0 {
		return fmt.Errorf("%d wrong pages", r.WrongPages)
	}
	return nil
}

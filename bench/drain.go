package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// DrainConfig describes "bench drain".
type DrainConfig struct {
	PageBytes int64
	Bytes     int64 // that only the drained node holds, most of them on its disk
	Limit     int64 // bytes a second
	Node      NodeConfig
	TempDir   string
	Progress  Progress
}

// Load beside a drain: so little that it does not copy by itself what the drain is to
// copy.
const (
	drainLoadEvery = 10 * time.Millisecond
	drainBefore    = 2 * time.Second // of load, to compare with
	drainRAM       = 256 << 20       // of each node: the rest of the pages is on disk
	drainWithin    = 10 * time.Minute
)

// Drain empties one of three daemons while a client of another one fetches its blocks,
// stops it, and checks every byte of what it had at the others.
func Drain(ctx context.Context, cfg DrainConfig) (_ *DrainReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 3*cfg.Bytes)
	if err != nil {
		return nil, err
	}
	b := &transfer{cfg: &TransferConfig{PageBytes: cfg.PageBytes, Bytes: cfg.Bytes}}
	defer func() { err = errors.Join(err, b.close(ctx), work.Close()) }()
	node := cfg.Node
	node.RAM, node.NVMe, node.HBM = drainRAM, cfg.Bytes*5/4+64<<20, 0
	first := ""
	for i := range 3 {
		if err := b.start(ctx, node, filepath.Join(work.Dir, nodeName(i)), append([]string{"--http-listen", "off"}, memberArgs(i, first)...)); err != nil {
			return nil, err
		}
		first = b.daemons[0].Ready("peers")
	}
	source := b.daemons[1]
	if b.writer, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: source.Socket(), Engine: "bench", StagingBytes: 16 << 20}); err != nil {
		return nil, err
	}
	if b.reader, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: b.daemons[0].Socket(), Engine: "bench"}); err != nil {
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
	load := startDrainLoad(ctx, b)
	defer load.stop()
	timer := time.NewTimer(drainBefore)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	rep := &DrainReport{Bytes: cfg.Bytes, BandwidthLimit: cfg.Limit}
	before := load.so()
	if err := rep.drain(ctx, b, &cfg); err != nil {
		return nil, err
	}
	during := load.stop()
	rep.FailedFetches, rep.Fetches = during.failed, during.fetches
	rep.HitRateDrop = before.rate() - drainTally{during.fetches - before.fetches, during.failed - before.failed}.rate()
	if err := b.writer.Close(); err != nil {
		return nil, err
	}
	b.writer = nil
	if err := stopDaemon(ctx, source); err != nil {
		return nil, err
	}
	b.daemons = slices.Delete(b.daemons, 1, 2)
	return rep, rep.audit(ctx, b)
}

// drain carries the drain out and measures its bandwidth.
func (r *DrainReport) drain(ctx context.Context, b *transfer, cfg *DrainConfig) error {
	admin, err := client.OpenAdmin(client.Config{Socket: b.daemons[0].Socket()})
	if err != nil {
		return err
	}
	defer admin.Close() //nolint:errcheck // only asked
	type mark struct {
		at    time.Time
		bytes uint64
	}
	var marks []mark
	o := client.PlanOptions{NodeBytesPerSecond: cfg.Limit, Deadline: drainWithin}
	start := time.Now()
	last, err := admin.Drain(ctx, nodeName(1), o, false, func(_ *client.Proposal, p *client.PlanStatus) {
		if p == nil || p.CopiedBytes == 0 || len(marks) > 0 && marks[len(marks)-1].bytes == p.CopiedBytes {
			return
		}
		marks = append(marks, mark{time.Now(), p.CopiedBytes})
		if cfg.Progress != nil {
			cfg.Progress(int64(min(p.CopiedBytes, uint64(cfg.Bytes))), cfg.Bytes) //nolint:gosec // bytes of a machine
		}
	})
	if err != nil {
		return err
	}
	if last == nil || last.State != "done" {
		return fmt.Errorf("the drain did not end well: %+v: %w", last, paging.ErrUnavailable)
	}
	r.Seconds, r.Copied = time.Since(start).Seconds(), int64(last.CopiedBytes) //nolint:gosec // bytes of a machine
	// The last one is seen when the drain has settled, some time after the last byte.
	if n := len(marks) - 1; n > 1 {
		if took := marks[n-1].at.Sub(marks[0].at).Seconds(); took > 0 {
			r.Bandwidth = float64(marks[n-1].bytes-marks[0].bytes) / took
		}
	}
	return nil
}

// audit fetches all blocks from the nodes that are left, and counts what is not there.
func (r *DrainReport) audit(ctx context.Context, b *transfer) error {
	for names := range slices.Chunk(b.names, int(max(1, transferCall/b.cfg.PageBytes/2))) {
		lease, err := b.reader.Fetch(ctx, client.FetchRequest{Namespace: b.ns, Names: names, Mode: client.ModeSet, Timeout: fetchTime})
		if err != nil {
			return err
		}
		if short := int64(len(names) - lease.Rows); short > 0 || len(lease.Shortfalls) > 0 {
			for _, s := range lease.Shortfalls {
				r.LostBlocks += int64(s.Count)
			}
			if err := lease.Release(ctx); err != nil {
				return err
			}
			continue
		}
		if err := b.check(ctx, lease, names); err != nil {
			return err
		}
	}
	r.WrongPages = b.wrong
	return nil
}

// drainTally counts fetches of the load.
type drainTally struct{ fetches, failed int64 }

func (t drainTally) rate() float64 {
	if t.fetches == 0 {
		return 1
	}
	return 1 - float64(t.failed)/float64(t.fetches)
}

// drainLoad fetches blocks one by one at the reader's node.
type drainLoad struct {
	cancel context.CancelFunc
	loop   sync.WaitGroup
	mu     sync.Mutex
	tally  drainTally
}

func startDrainLoad(ctx context.Context, b *transfer) *drainLoad {
	l := &drainLoad{}
	ctx, l.cancel = context.WithCancel(ctx)
	l.loop.Go(func() { // owner: the workload; exit: stop
		tick := time.NewTicker(drainLoadEvery)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			name := b.names[i*7919%len(b.names)] // spread over all of them
			lease, err := b.reader.Fetch(ctx, client.FetchRequest{Namespace: b.ns, Names: []paging.BlockName{name}, Mode: client.ModeSet, Timeout: fetchTime})
			if ctx.Err() != nil {
				if err == nil {
					_ = lease.Release(context.WithoutCancel(ctx)) // the run has ended
				}
				return
			}
			bad := err != nil || len(lease.Shortfalls) > 0
			if err == nil {
				bad = lease.Release(ctx) != nil || bad
			}
			l.mu.Lock()
			l.tally.fetches++
			if bad {
				l.tally.failed++
			}
			l.mu.Unlock()
		}
	})
	return l
}

func (l *drainLoad) so() drainTally {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tally
}

// stop ends the load. Idempotent.
func (l *drainLoad) stop() drainTally {
	l.cancel()
	l.loop.Wait()
	return l.so()
}

// DrainReport is the answer of "bench drain".
type DrainReport struct {
	Bytes          int64   `json:"bytes"`  // that only the node held
	Copied         int64   `json:"copied"` // by the drain; the load copied the rest before
	Seconds        float64 `json:"seconds"`
	Fetches        int64   `json:"fetches"` // of the load
	FailedFetches  int64   `json:"failed_fetches"`
	HitRateDrop    float64 `json:"hit_rate_drop"` // while it was drained, against before
	Bandwidth      float64 `json:"bandwidth"`     // bytes a second, while it copied
	BandwidthLimit int64   `json:"bandwidth_limit"`
	LostBlocks     int64   `json:"lost_blocks"` // that the others have not when it is stopped
	WrongPages     int64   `json:"wrong_pages"`
}

// Rows implements Report.
func (r *DrainReport) Rows() []Row {
	return []Row{
		{"drained", FormatBytes(r.Bytes), fmt.Sprintf("%s copied in %.1f s", FormatBytes(r.Copied), r.Seconds)},
		{"bandwidth", formatRate(r.Bandwidth), "limit " + formatRate(float64(r.BandwidthLimit))},
		{"failed fetches", fmt.Sprint(r.FailedFetches), fmt.Sprintf("of %d, hit rate lower by %s", r.Fetches, rate4(r.HitRateDrop))},
		{"lost blocks", fmt.Sprint(r.LostBlocks), fmt.Sprintf("%d wrong pages, when it was stopped", r.WrongPages)},
	}
}

// Err implements Report.
func (r *DrainReport) Err() error {
	var errs []error
	if r.FailedFetches > 0 {
		errs = append(errs, fmt.Errorf("%d of %d fetches failed while the node was drained", r.FailedFetches, r.Fetches))
	}
	if r.LostBlocks > 0 || r.WrongPages > 0 {
		errs = append(errs, fmt.Errorf("%d blocks are lost and %d pages wrong after the node was stopped", r.LostBlocks, r.WrongPages))
	}
	if r.BandwidthLimit > 0 && r.Bandwidth > 1.05*float64(r.BandwidthLimit) {
		errs = append(errs, fmt.Errorf("%s, more than 1.05 times the limit of %s", formatRate(r.Bandwidth), formatRate(float64(r.BandwidthLimit))))
	}
	return errors.Join(errs...)
}

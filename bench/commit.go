package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// CommitConfig describes "bench commit".
type CommitConfig struct {
	PageBytes  int64
	BatchBytes int64 // of one commit
	Bytes      int64 // in all
	Node       NodeConfig
	TempDir    string
	Progress   func(done, total int64)
}

// Commit measures the commit of filled pages against copying the same bytes and
// then summing them, in this process, alternating. Reserve and fill are outside
// the timed region; both sides copy pages that were just filled into memory
// that was not touched for a while.
func Commit(ctx context.Context, cfg CommitConfig) (_ *CommitReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	cfg.Node.Dir, cfg.Node.NVMe = work.Dir, 0
	cfg.Node.RAM = max(localRAM, 12*cfg.BatchBytes)
	cfg.Node.Args = append([]string{"--http-listen", "off"}, cfg.Node.Args...)
	d, err := StartDaemon(ctx, cfg.Node)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stopDaemon(ctx, d)) }()
	c, err := client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: d.Socket(), Engine: "bench", StagingBytes: cfg.BatchBytes})
	if err != nil {
		return nil, err
	}
	defer c.Close() //nolint:errcheck // the workload is over
	ns, err := c.RegisterNamespace(ctx, namespaceOf("commit", 16, cfg.PageBytes))
	if err != nil {
		return nil, err
	}
	b := &commits{cfg: &cfg, client: c, ns: ns, pages: int(cfg.BatchBytes / cfg.PageBytes)}
	b.src, b.dst = make([]byte, cfg.BatchBytes), make([]byte, 8*cfg.BatchBytes)
	return b.run(ctx)
}

// commits is one run.
type commits struct {
	cfg      *CommitConfig
	client   *client.Client
	ns       paging.NamespaceID
	content  Content
	pages    int    // of a batch
	src, dst []byte // of the bound: filled like staging; rotated through like an arena
	next     uint64 // number of the next block

	committed, copied     time.Duration
	committedBytes, bytes int64
	times                 Latency
	sum                   uint64 // keeps the compiler from dropping the bound
}

// warmBatches are not counted: they touch the memory of both sides.
const warmBatches = 8

func (b *commits) run(ctx context.Context) (*CommitReport, error) {
	rounds := int(max(1, b.cfg.Bytes/b.cfg.BatchBytes))
	step := stepper(b.cfg.Progress, int64(warmBatches+rounds))
	for i := range warmBatches + rounds {
		if i == warmBatches {
			b.committed, b.copied, b.committedBytes, b.bytes = 0, 0, 0, 0
			b.times.Reset()
		}
		if i%2 == 0 {
			b.bound(i)
		}
		if err := b.commit(ctx); err != nil {
			return nil, err
		}
		if i%2 == 1 {
			b.bound(i)
		}
		step()
	}
	r := &CommitReport{
		PageBytes: b.cfg.PageBytes, BatchPages: b.pages, Bytes: b.committedBytes, CommitUS: b.times.Quantiles(),
		CommitBytesPerS:         float64(b.committedBytes) / b.committed.Seconds(),
		MemcpyChecksumBytesPerS: float64(b.bytes) / b.copied.Seconds(),
	}
	r.Ratio = r.CommitBytesPerS / r.MemcpyChecksumBytesPerS
	return r, nil
}

func (b *commits) commit(ctx context.Context) error {
	names := make([]paging.BlockName, b.pages)
	for i := range names {
		names[i] = TraceBlock(b.next)
		b.next++
	}
	a, err := b.client.Reserve(ctx, client.ReserveRequest{Namespace: b.ns, Names: names, Timeout: reserveTime})
	if err != nil {
		return err
	}
	defer a.Abort(context.WithoutCancel(ctx)) //nolint:errcheck // its deadline ends it otherwise
	if a.Rows() == 0 {
		return fmt.Errorf("no block granted (%v): %w", a.Outcomes[0], paging.ErrNoSpace)
	}
	for row := range a.Rows() {
		b.content.Fill(a.Page(row, 0), paging.PageID{BlockID: paging.BlockID{Namespace: b.ns, Name: names[row]}})
	}
	start := time.Now()
	outcomes, err := a.Commit(ctx, client.CommitOptions{})
	took := time.Since(start)
	if err != nil {
		return err
	}
	for i, o := range outcomes {
		if o != client.OutcomeCommitted {
			return fmt.Errorf("commit of row %d: %v: %w", i, o, paging.ErrInvalid)
		}
	}
	b.times.Add(took)
	b.committed += took
	b.committedBytes += int64(a.Rows()) * b.cfg.PageBytes
	return nil
}

// bound copies and then sums the same number of pages.
func (b *commits) bound(round int) {
	n := int(b.cfg.PageBytes)
	for i := range b.pages {
		b.content.Fill(b.src[i*n:][:n], paging.PageID{Part: i})
	}
	dst := b.dst[int64(round%8)*b.cfg.BatchBytes:]
	start := time.Now()
	for i := range b.pages {
		copy(dst[i*n:][:n], b.src[i*n:][:n])
		b.sum += paging.Checksum(dst[i*n:][:n])
	}
	b.copied += time.Since(start)
	b.bytes += int64(b.pages * n)
}

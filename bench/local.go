package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// LocalConfig describes "bench local".
type LocalConfig struct {
	PageBytes int64
	Chains    int // of 64 blocks, all resident
	Calls     int // of each kind
	Seed      uint64
	Node      NodeConfig // its Dir, RAM and NVMe are set by the workload
	TempDir   string
	Progress  func(done, total int64)
}

const (
	fetchPages   = 64
	localRAM     = 256 << 20
	localWarm    = 200 // calls that are not counted
	localVerify  = 64  // every so many calls all pages of the fetch are checked
	redisRepeats = 30
)

// Local measures the fetch of 64 resident pages against an empty call of the
// same kind on the same socket, alternating, on the attachment stream and as
// unary calls. Releases go one-way outside the timed region.
func Local(ctx context.Context, cfg LocalConfig) (_ *LocalReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	cfg.Node.Dir, cfg.Node.NVMe = work.Dir, 0
	// A quarter of the budget is kept for staging, and some of the rest is slack.
	cfg.Node.RAM = max(localRAM, int64(cfg.Chains)*fetchPages*slotBytes(cfg.PageBytes)*3/2)
	cfg.Node.Args = append([]string{"--http-listen", "off"}, cfg.Node.Args...)
	d, err := StartDaemon(ctx, cfg.Node)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stopDaemon(ctx, d)) }()
	idle, err := d.PrivateBytes()
	if err != nil {
		return nil, err
	}
	l := &local{cfg: &cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0))}
	defer l.close()
	if err := l.open(ctx, d.Socket()); err != nil {
		return nil, err
	}
	if err := awaitGrown(ctx, d.Socket()); err != nil {
		return nil, err
	}
	if err := l.fill(ctx); err != nil {
		return nil, err
	}
	before, err := copiedBytes(ctx, d.Socket())
	if err != nil {
		return nil, err
	}
	if err := l.measure(ctx); err != nil {
		return nil, err
	}
	after, err := copiedBytes(ctx, d.Socket())
	if err != nil {
		return nil, err
	}
	rep := l.report()
	rep.BytesCopied, rep.IdleBytes = after-before, idle
	return rep, l.redis(ctx, work.Dir, rep)
}

// slotBytes is the room that a page takes: whole units of memory.
func slotBytes(pageBytes int64) int64 {
	return (pageBytes + paging.UnitBytes - 1) / paging.UnitBytes * paging.UnitBytes
}

// stopDaemon ends a daemon whose workload is over.
func stopDaemon(ctx context.Context, d *Daemon) error {
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), d.Kill())
	}
	ctx, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	return d.Stop(ctx)
}

// local is one run.
type local struct {
	cfg     *LocalConfig
	rng     *rand.Rand
	stream  *client.Client
	unary   *client.Client
	ns      paging.NamespaceID
	content Content
	chains  [][]paging.BlockName
	maps    sharedReadOnly

	fetch, empty, unaryFetch, unaryEmpty, release Latency
	wrong                                         int64
}

func (l *local) open(ctx context.Context, socket string) (err error) {
	l.content = Content{Seed: l.cfg.Seed}
	if l.stream, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: socket, Engine: "bench-stream"}); err != nil {
		return err
	}
	if l.unary, err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: socket, Engine: "bench-unary", UnaryCalls: true}); err != nil {
		return err
	}
	ns := namespaceOf("local", 16, l.cfg.PageBytes)
	if l.ns, err = l.stream.RegisterNamespace(ctx, ns); err != nil {
		return err
	}
	_, err = l.unary.RegisterNamespace(ctx, ns)
	return err
}

func (l *local) close() {
	for _, c := range []*client.Client{l.stream, l.unary} {
		if c != nil {
			c.Close() //nolint:errcheck // the workload is over
		}
	}
}

// fill makes every chain resident.
func (l *local) fill(ctx context.Context) error {
	for i := range l.cfg.Chains {
		names := make([]paging.BlockName, fetchPages)
		for j := range names {
			names[j] = TraceBlock(uint64(i*fetchPages + j))
		}
		l.chains = append(l.chains, names)
		outcomes, err := l.stream.WriteBlocks(ctx, client.ReserveRequest{Namespace: l.ns, Names: names}, client.CommitOptions{},
			func(row, part int, dst []byte) error {
				l.content.Fill(dst, l.page(names[row], part))
				return nil
			})
		if err != nil {
			return fmt.Errorf("store chain %d: %w", i, err)
		}
		for _, o := range outcomes {
			if !o.Stored() {
				return fmt.Errorf("store chain %d: %v: %w", i, o, paging.ErrNoSpace)
			}
		}
	}
	return nil
}

// copyCounters count the bytes of pages that the node copied: to a client that is
// not co-located, from disk, from staging.
var copyCounters = []string{"kvtier_server_read_page_bytes_total", "kvtier_tier_loaded_bytes_total", "kvtier_tier_committed_bytes_total"}

func copiedBytes(ctx context.Context, socket string) (int64, error) {
	return sumOfCounters(ctx, socket, copyCounters...)
}

func (l *local) page(name paging.BlockName, part int) paging.PageID {
	return paging.PageID{BlockID: paging.BlockID{Namespace: l.ns, Name: name}, Part: part}
}

// measure alternates the four calls; which comes first changes with each round,
// so that neither side always finds the caches as the other left them.
func (l *local) measure(ctx context.Context) error {
	steps := []func(context.Context, int) error{
		func(ctx context.Context, i int) error { return l.timedFetch(ctx, l.stream, &l.fetch, i) },
		func(ctx context.Context, _ int) error { return l.timedEmpty(ctx, l.stream, &l.empty) },
		func(ctx context.Context, i int) error { return l.timedFetch(ctx, l.unary, &l.unaryFetch, i) },
		func(ctx context.Context, _ int) error { return l.timedEmpty(ctx, l.unary, &l.unaryEmpty) },
	}
	step := stepper(l.cfg.Progress, int64(localWarm+l.cfg.Calls))
	for i := range localWarm + l.cfg.Calls {
		if i == localWarm {
			for _, times := range []*Latency{&l.fetch, &l.empty, &l.unaryFetch, &l.unaryEmpty, &l.release} {
				times.Reset()
			}
		}
		for s := range steps {
			if err := steps[(s+i)%len(steps)](ctx, i); err != nil {
				return err
			}
		}
		step()
	}
	return nil
}

func (l *local) timedFetch(ctx context.Context, c *client.Client, times *Latency, i int) error {
	names := l.chains[l.rng.IntN(len(l.chains))]
	start := time.Now()
	lease, err := c.Fetch(ctx, client.FetchRequest{Namespace: l.ns, Names: names})
	took := time.Since(start)
	if err != nil {
		return err
	}
	if lease.Usable != fetchPages {
		return fmt.Errorf("%d of %d resident blocks granted: %w", lease.Usable, fetchPages, paging.ErrNotFound)
	}
	times.Add(took)
	if err := l.look(lease, names, i%localVerify == 0); err != nil {
		return err
	}
	start = time.Now()
	lease.ReleaseAsync()
	l.release.Add(time.Since(start))
	return nil
}

// look opens every view and asserts that it lies in the mapping; if asked, it
// also reads every byte.
func (l *local) look(lease *client.Lease, names []paging.BlockName, whole bool) error {
	for row, name := range names {
		view, ok := lease.Page(row, 0)
		if !ok {
			return fmt.Errorf("no view of block %d: %w", row, lease.Err())
		}
		inside, err := l.maps.holds(view.Bytes())
		if err != nil {
			return err
		}
		if !inside {
			return fmt.Errorf("the view of block %d does not lie in shared memory: it was copied: %w", row, paging.ErrInvalid)
		}
		if whole && l.content.Check(view.Bytes(), l.page(name, 0)) >= 0 {
			l.wrong++
		}
		if err := view.Close(); err != nil {
			return err
		}
	}
	return nil
}

func (l *local) timedEmpty(ctx context.Context, c *client.Client, times *Latency) error {
	start := time.Now()
	if err := c.Renew(ctx, 0); err != nil {
		return err
	}
	times.Add(time.Since(start))
	return nil
}

func (l *local) report() *LocalReport {
	r := &LocalReport{
		PageBytes: l.cfg.PageBytes, ResidentBlocks: l.cfg.Chains * fetchPages, Calls: l.cfg.Calls,
		Fetch64US: l.fetch.Quantiles(), EmptyCallUS: l.empty.Quantiles(),
		UnaryFetch64US: l.unaryFetch.Quantiles(), UnaryEmptyCallUS: l.unaryEmpty.Quantiles(),
		ReleaseUS: l.release.Quantiles(), WrongPages: l.wrong,
	}
	r.Ratio = r.Fetch64US.P50 / r.EmptyCallUS.P50
	r.UnaryRatio = r.UnaryFetch64US.P50 / r.UnaryEmptyCallUS.P50
	return r
}

// redisChains bounds what is stored in redis: enough that it does not serve from
// the processor's cache.
const redisChains = 16

// redis measures GETs of the same bytes at the best of several depths. A machine
// without redis-server leaves the figure out.
func (l *local) redis(ctx context.Context, dir string, rep *LocalReport) error {
	chains := l.chains[:min(redisChains, len(l.chains))]
	r, err := startRedis(ctx, dir, int64(len(chains)*fetchPages)*l.cfg.PageBytes*2+64<<20)
	if errors.Is(err, exec.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer r.close()
	page := make([]byte, l.cfg.PageBytes)
	for _, names := range chains {
		for _, name := range names {
			l.content.Fill(page, l.page(name, 0))
			if err := r.set(name[:], page); err != nil {
				return fmt.Errorf("store in redis: %w", err)
			}
		}
	}
	dst := make([]byte, fetchPages*l.cfg.PageBytes)
	for _, depth := range []int{1, 4, 8, 16, 64} {
		q, err := l.redisGets(ctx, r, chains, dst, depth)
		if err != nil {
			return fmt.Errorf("redis GET: %w", err)
		}
		if rep.RedisGet64US == nil || q.P50 < rep.RedisGet64US.P50 {
			rep.RedisGet64US, rep.RedisDepth = &q, depth
		}
	}
	return nil
}

func (l *local) redisGets(ctx context.Context, r *redis, chains [][]paging.BlockName, dst []byte, depth int) (Quantiles, error) {
	var times Latency
	for i := range redisRepeats {
		if ctx.Err() != nil {
			return Quantiles{}, ctx.Err()
		}
		names := chains[i%len(chains)]
		keys := make([][]byte, len(names))
		for j := range names {
			keys[j] = names[j][:]
		}
		start := time.Now()
		if err := r.get(keys, dst, depth); err != nil {
			return Quantiles{}, err
		}
		times.Add(time.Since(start))
		for j, name := range names {
			if l.content.Check(dst[int64(j)*l.cfg.PageBytes:][:l.cfg.PageBytes], l.page(name, 0)) >= 0 {
				return Quantiles{}, fmt.Errorf("value of key %d: %w", j, paging.ErrCorrupt)
			}
		}
	}
	return times.Quantiles(), nil
}

package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// MigrateConfig describes "bench migrate".
type MigrateConfig struct {
	PageBytes int64
	Bytes     int64 // of the session that is moved to and fro
	Rounds    int   // moves of it, after one that is not counted
	Moves     int   // of the sessions whose pause is measured
	MoveBytes int64 // of each of those
	Node      NodeConfig
	TempDir   string
	Progress  Progress
}

// Times of the engine that appends while its session moves.
const (
	appendEvery  = 5 * time.Millisecond
	appendAround = 100 * time.Millisecond // before and after the move
	moveTime     = 2 * time.Minute
)

// migration is one run: three nodes, of which the third only votes. One goroutine uses
// it, beside the engine of a session that moves.
type migration struct {
	transfer // its daemons, its plain copy, its content
	nodes    [2]*client.Client
	admin    *client.Admin
	cfg      *MigrateConfig
	tier     client.Tier // that pages go to; TierNone: RAM

	moveTook, copyTook  time.Duration
	firstTook, nextTook time.Duration // of the first fetch after a move, and of the same again
	sent, lacked        uint64
	pauses, calm        Latency
	failed              int64
}

// Migrate moves a session to and fro between two nodes beside a plain copy of the same
// bytes, and many small ones whose engine goes on appending meanwhile.
func Migrate(ctx context.Context, cfg MigrateConfig) (_ *MigrateReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 2*cfg.Bytes)
	if err != nil {
		return nil, err
	}
	b := &migration{cfg: &cfg, transfer: transfer{cfg: &TransferConfig{PageBytes: cfg.PageBytes, Bytes: cfg.Bytes}}}
	defer func() { err = errors.Join(err, b.close(ctx), work.Close()) }()
	node := cfg.Node
	node.RAM = max(localRAM, 2*cfg.Bytes)
	node.NVMe, node.HBM = cfg.Bytes*5/4+64<<20, 0
	if err := b.open(ctx, work.Dir, node, "migrate"); err != nil {
		return nil, err
	}
	step := stepper(cfg.Progress, int64(cfg.Rounds+1+cfg.Moves))
	if err := b.toAndFro(ctx, step); err != nil {
		return nil, err
	}
	for i := range cfg.Moves {
		if err := b.pause(ctx, i); err != nil {
			return nil, fmt.Errorf("move %d: %w", i, err)
		}
		step()
	}
	return b.report(), nil
}

// open starts two such nodes and a small one.
func (b *migration) open(ctx context.Context, dir string, node NodeConfig, workload string) error {
	device := node.HBM > 0
	first := ""
	for i := range 3 {
		if i == 2 {
			node.RAM, node.NVMe, node.HBM = localRAM/4, 64<<20, 0
		}
		args := append([]string{"--http-listen", "off", "--flush-after", "24h"}, memberArgs(i, first)...)
		if err := b.start(ctx, node, filepath.Join(dir, nodeName(i)), args); err != nil {
			return err
		}
		if i == 0 {
			first = b.daemons[0].Ready("peers")
		}
	}
	layout := namespaceOf(workload, 16, b.cfg.PageBytes)
	for i := range b.nodes {
		var err error
		if b.nodes[i], err = client.Open(ctx, client.Config{StallTimeout: stallTime, Socket: b.daemons[i].Socket(), Engine: "bench", StagingBytes: min(transferCall/2, node.RAM/8), DevicePool: device}); err != nil {
			return err
		}
		if b.ns, err = b.nodes[i].RegisterNamespace(ctx, layout); err != nil {
			return err
		}
		if err := awaitGrown(ctx, b.daemons[i].Socket()); err != nil {
			return err
		}
	}
	b.writer, b.reader = b.nodes[0], b.nodes[1]
	var err error
	if b.admin, err = client.OpenAdmin(client.Config{Socket: b.daemons[2].Socket()}); err != nil {
		return err
	}
	return b.awaitNodes(ctx)
}

// awaitNodes waits until the directory has all nodes.
func (b *migration) awaitNodes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, replicaPatience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		nodes, err := b.admin.Nodes(ctx)
		up := 0
		for _, n := range nodes {
			if n.State == "up" {
				up++
			}
		}
		status, statusErr := b.admin.Status(ctx)
		if err == nil && statusErr == nil && up == 3 && status.Cluster.Voters == 3 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d of 3 nodes are in the directory: %w", up, errors.Join(err, statusErr, ctx.Err()))
		}
	}
}

func (b *migration) close(ctx context.Context) error {
	var err error
	if b.admin != nil {
		err = b.admin.Close()
	}
	return errors.Join(err, b.transfer.close(ctx))
}

// write stores blocks at a node.
func (b *migration) write(ctx context.Context, node int, first int, names []paging.BlockName) error {
	outcomes, err := b.nodes[node].WriteBlocks(ctx, client.ReserveRequest{Namespace: b.ns, Names: names, First: first, Timeout: reserveTime}, client.CommitOptions{},
		func(row, part int, dst []byte) error {
			b.content.Fill(dst, b.page(names[row], part))
			return nil
		})
	if err != nil {
		return err
	}
	for i, o := range outcomes {
		if o != client.OutcomeCommitted && o != client.OutcomeExists {
			return fmt.Errorf("block %d: %v: %w", first+i, o, paging.ErrNoSpace)
		}
	}
	return nil
}

// drop forgets blocks at a node, so that a move has to bring them again.
func (b *migration) drop(ctx context.Context, node int, names []paging.BlockName) error {
	for step := range slices.Chunk(names, 4096) {
		if _, err := b.nodes[node].Drop(ctx, b.ns, step); err != nil {
			return err
		}
	}
	return nil
}

// move moves a session to a node.
func (b *migration) move(ctx context.Context, session string, to int) (*client.MoveProgress, error) {
	ctx, cancel := context.WithTimeout(ctx, moveTime)
	defer cancel()
	p, err := b.admin.MigrateSession(ctx, client.MigrateRequest{Session: session, To: nodeName(to), Tier: b.tier}, func(*client.MovePlan, *client.MoveProgress) {})
	if err != nil {
		return nil, err
	}
	if p == nil || !p.Moved() {
		return nil, fmt.Errorf("session %s did not move: %+v: %w", session, p, paging.ErrUnavailable)
	}
	return p, nil
}

// toAndFro moves one large session, alternating with a plain copy of its bytes.
func (b *migration) toAndFro(ctx context.Context, step func()) error {
	for i := range b.cfg.Bytes / b.cfg.PageBytes {
		b.names = append(b.names, TraceBlock(uint64(i)))
	}
	if err := b.write(ctx, 0, 0, b.names); err != nil {
		return err
	}
	s, err := b.nodes[0].OpenSession(ctx, client.SessionOptions{Name: "large", Namespace: b.ns})
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.Append(0, b.names); err != nil {
		return err
	}
	if err := s.Wait(ctx); err != nil {
		return err
	}
	if b.plain, err = newTCPCopy(ctx, b.content, b.cfg.PageBytes, int64(len(b.names))*b.cfg.PageBytes); err != nil {
		return err
	}
	for round := range b.cfg.Rounds + 1 {
		if round == 1 { // the one before it touched all memory
			b.moveTook, b.copyTook, b.firstTook, b.nextTook, b.sent, b.lacked = 0, 0, 0, 0, 0, 0
		}
		to := 1 - round%2
		start := time.Now()
		p, err := b.move(ctx, "large", to)
		if err != nil {
			return err
		}
		b.moveTook += time.Since(start)
		b.sent, b.lacked = b.sent+p.SentBytes, b.lacked+p.LackedBytes
		if err := b.firstFetch(ctx, to); err != nil {
			return err
		}
		start = time.Now()
		if err := b.plain.run(); err != nil {
			return err
		}
		b.copyTook += time.Since(start)
		if err := b.drop(ctx, 1-to, b.names); err != nil {
			return err
		}
		step()
	}
	return b.admin.CloseSession(ctx, "", "large")
}

// firstFetch reads all of the session where it is now, from RAM alone, twice.
func (b *migration) firstFetch(ctx context.Context, at int) error {
	for _, took := range []*time.Duration{&b.firstTook, &b.nextTook} {
		for names := range slices.Chunk(b.names, int(max(1, transferCall/b.cfg.PageBytes))) {
			start := time.Now()
			lease, err := b.nodes[at].Fetch(ctx, client.FetchRequest{Namespace: b.ns, Names: names, Mode: client.ModeSet})
			if err != nil {
				return err
			}
			*took += time.Since(start)
			if took == &b.nextTook {
				err = lease.Release(ctx)
			} else {
				err = b.check(ctx, lease, names)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// pause moves a small session while its engine appends a block every few milliseconds,
// and notes the longest time between two appends that were accepted.
func (b *migration) pause(ctx context.Context, number int) error {
	ctx, cancel := context.WithTimeout(ctx, moveTime)
	defer cancel()
	e := &movingEngine{b: b, name: fmt.Sprintf("move-%d", number), at: number % 2, chain: uint64(number+1) << 32}
	blocks := int(max(1, b.cfg.MoveBytes/b.cfg.PageBytes))
	if err := e.begin(ctx, blocks); err != nil {
		return err
	}
	defer e.close()
	calm, err := e.appendFor(ctx, nil)
	if err != nil {
		return err
	}
	b.calm.Add(calm)
	var moved atomic.Bool
	done := make(chan error, 1)
	go func() { // owner: pause, which waits for it; ends with the move, or with ctx
		_, err := b.move(ctx, e.name, 1-e.first)
		moved.Store(true)
		done <- err
	}()
	longest, err := e.appendFor(ctx, &moved)
	b.pauses.Add(longest)
	if err = errors.Join(err, <-done); err != nil {
		return err
	}
	return e.verify(ctx)
}

// movingEngine appends to a session, wherever that is.
type movingEngine struct {
	b         *migration
	name      string
	chain     uint64
	first, at int // node where it began, and is
	s         *client.Session
	names     []paging.BlockName
}

func (e *movingEngine) begin(ctx context.Context, blocks int) (err error) {
	e.first = e.at
	for i := range blocks {
		e.names = append(e.names, TraceBlock(e.chain+uint64(i)))
	}
	if err := e.b.write(ctx, e.at, 0, e.names); err != nil {
		return err
	}
	if e.s, err = e.b.nodes[e.at].OpenSession(ctx, client.SessionOptions{Name: e.name, Namespace: e.b.ns}); err != nil {
		return err
	}
	if err := e.s.Append(0, e.names); err != nil {
		return err
	}
	return e.s.Wait(ctx)
}

func (e *movingEngine) close() {
	if e.s != nil {
		e.s.Close()
	}
}

// appendFor appends a block every appendEvery, for appendAround after moved, if given,
// is true, and returns the longest time between two that were accepted.
func (e *movingEngine) appendFor(ctx context.Context, moved *atomic.Bool) (longest time.Duration, err error) {
	tick := time.NewTicker(appendEvery)
	defer tick.Stop()
	last := time.Now()
	end := last.Add(appendAround)
	for waits := moved != nil; waits || time.Now().Before(end); {
		if waits && moved.Load() {
			waits, end = false, time.Now().Add(appendAround)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return longest, ctx.Err()
		}
		if err := e.append(ctx); err != nil {
			return longest, err
		}
		longest = max(longest, time.Since(last))
		last = time.Now()
	}
	return longest, nil
}

// append writes one block and has it appended, at the node that the session moved to
// where it did.
func (e *movingEngine) append(ctx context.Context) error {
	at := len(e.names)
	name := TraceBlock(e.chain + uint64(at))
	e.names = append(e.names, name)
	if err := e.b.write(ctx, e.at, at, e.names[at:]); err != nil {
		return err
	}
	err := e.s.Append(uint64(at), e.names[at:])
	if err == nil {
		err = e.s.Wait(ctx)
	}
	if !errors.Is(err, paging.ErrMoved) {
		return err
	}
	// The engine there goes on: with what was written here and not appended yet.
	e.s.Close()
	e.at = 1 - e.at
	if e.s, err = e.b.nodes[e.at].OpenSession(ctx, client.SessionOptions{Name: e.name, Namespace: e.b.ns}); err != nil {
		return err
	}
	from := int(e.s.Info().Blocks)
	if from > at {
		return nil
	}
	if err := e.b.write(ctx, e.at, from, e.names[from:]); err != nil {
		return err
	}
	if err := e.s.Append(uint64(from), e.names[from:]); err != nil {
		return err
	}
	return e.s.Wait(ctx)
}

// verify reads the session at its new node and drops it everywhere.
func (e *movingEngine) verify(ctx context.Context) error {
	if e.at == e.first {
		return fmt.Errorf("session %s did not move under its engine: %w", e.name, paging.ErrUnavailable)
	}
	lease, err := e.b.nodes[e.at].Fetch(ctx, client.FetchRequest{Namespace: e.b.ns, Session: e.name})
	if err != nil {
		return err
	}
	if lease.Rows != len(e.names) {
		e.b.failed += int64(len(e.names) - lease.Rows)
	}
	if err := e.b.check(ctx, lease, e.names[:lease.Rows]); err != nil {
		return err
	}
	if err := e.b.admin.CloseSession(ctx, "", e.name); err != nil {
		return err
	}
	return errors.Join(e.b.drop(ctx, 0, e.names), e.b.drop(ctx, 1, e.names))
}

// MigrateReport is the answer of "bench migrate".
type MigrateReport struct {
	PageBytes       int64   `json:"page_bytes"`
	Bytes           int64   `json:"bytes"` // of the large session
	Rounds          int     `json:"rounds"`
	Seconds         float64 `json:"seconds"`      // of one move of it
	CopySeconds     float64 `json:"copy_seconds"` // of a plain TCP copy with XXH3 of the same bytes
	RatioToCopy     float64 `json:"ratio_to_copy"`
	FirstFetchRatio float64 `json:"first_fetch_ratio"` // first fetch at the new node over the same again
	Moves           int     `json:"moves"`
	PauseMS         float64 `json:"pause_ms"` // p99 of the longest time between two appends while a session moved
	PauseP50MS      float64 `json:"pause_p50_ms"`
	CalmMS          float64 `json:"calm_ms"` // p99 of the same without a move
	BytesSent       uint64  `json:"bytes_sent"`
	BytesLacking    uint64  `json:"bytes_lacking"`
	AbsentBlocks    int64   `json:"absent_blocks"` // not at the new node after a move
	WrongPages      int64   `json:"wrong_pages"`
}

func (b *migration) report() *MigrateReport {
	pauses, calm := b.pauses.Quantiles(), b.calm.Quantiles()
	r := &MigrateReport{
		PageBytes: b.cfg.PageBytes, Bytes: int64(len(b.names)) * b.cfg.PageBytes, Rounds: b.cfg.Rounds,
		Seconds: b.moveTook.Seconds() / float64(b.cfg.Rounds), CopySeconds: b.copyTook.Seconds() / float64(b.cfg.Rounds),
		Moves: b.cfg.Moves, PauseMS: pauses.P99 / 1e3, PauseP50MS: pauses.P50 / 1e3, CalmMS: calm.P99 / 1e3,
		BytesSent: b.sent, BytesLacking: b.lacked, AbsentBlocks: b.failed, WrongPages: b.wrong,
	}
	r.RatioToCopy = r.Seconds / r.CopySeconds
	r.FirstFetchRatio = b.firstTook.Seconds() / b.nextTook.Seconds()
	return r
}

// Rows implements Report.
func (r *MigrateReport) Rows() []Row {
	return []Row{
		{"workload", FormatBytes(r.Bytes), fmt.Sprintf("%d moves of it, %d of small sessions under appends every %v; pages of %s, three processes on loopback", r.Rounds, r.Moves, appendEvery, FormatBytes(r.PageBytes))},
		{"one move", fmt.Sprintf("%.2f s", r.Seconds), "verified at the target, owned there at the end"},
		{"plain TCP and XXH3", fmt.Sprintf("%.2f s", r.CopySeconds), "alternating, in one process"},
		{"ratio to plain copy", ratio2(r.RatioToCopy), "goal at most 1.15"},
		{"sent", FormatBytes(int64(r.BytesSent)), fmt.Sprintf("of %s that the targets lacked; goal at most 1.05 of it", FormatBytes(int64(r.BytesLacking)))}, //nolint:gosec // bytes of a machine
		{"first fetch there", ratio2(r.FirstFetchRatio), "of the same again, from RAM; goal at most 1.2"},
		{"pause p99", fmt.Sprintf("%.1f ms", r.PauseMS), fmt.Sprintf("between two appends; p50 %.1f ms; %.1f ms without a move; goal at most 50 ms", r.PauseP50MS, r.CalmMS)},
		{"absent blocks", fmt.Sprint(r.AbsentBlocks), "at the new node; must be 0"},
		{"wrong pages", fmt.Sprint(r.WrongPages), "must be 0"},
	}
}

// Err implements Report.
func (r *MigrateReport) Err() error {
	switch {
	case r.WrongPages != 0:
		return fmt.Errorf("%d wrong pages", r.WrongPages)
	case r.AbsentBlocks != 0:
		return fmt.Errorf("%d blocks were not at the node that their session moved to", r.AbsentBlocks)
	case r.BytesSent > r.BytesLacking+r.BytesLacking/20:
		return fmt.Errorf("%d bytes sent for %d that were lacking", r.BytesSent, r.BytesLacking)
	}
	return nil
}

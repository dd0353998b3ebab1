package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// Sizes of the act in which a session moves.
const (
	actBytes = 256 << 20 // of the session
	actRAM   = 448 << 20
	actHBM   = 320 << 20
	actNVMe  = 512 << 20
	actSteps = 5

	actOwnBytes = 96 << 20 // of blocks of no session that the first node alone has
	actFetch    = 64       // blocks of a fetch under load
	drainTime   = time.Minute
)

// SessionAct is what the act of the demo found: an agent's session is decoded on one
// node, moves to another while appends go on, and goes on there; then the first node is
// drained while its blocks are fetched, and leaves.
type SessionAct struct {
	Bytes       uint64  `json:"bytes"`        // of the session when it had moved
	BytesCopied uint64  `json:"bytes_copied"` // to the new node
	Seconds     float64 `json:"seconds"`      // of the move
	PauseMS     float64 `json:"pause_ms"`     // longest time between two appends while it moved
	Decodes     int64   `json:"decodes"`      // by attention over pages in place, on both nodes
	RelErr      float64 `json:"relerr"`       // the worst, against float64
	Recomputed  int64   `json:"recomputed"`   // blocks of the session that were not at the new node
	WrongPages  int64   `json:"wrong_pages"`  // and wrong decodes

	DrainSeconds  float64 `json:"drain_seconds"`
	DrainedBytes  uint64  `json:"drained_bytes"` // of blocks that the node alone had, copied to others
	Fetches       int64   `json:"fetches"`       // of those blocks meanwhile, at another node
	FailedFetches int64   `json:"failed_fetches"`
	AbsentBlocks  int64   `json:"absent_blocks"` // of those blocks, once the node was stopped
}

// act is one run. One goroutine uses it, beside the load.
type act struct {
	migration
	out      SessionAct
	decoders [2]*decoder
}

// playAct plays it in daemons of its own.
func playAct(ctx context.Context, node NodeConfig, tempDir string, step func()) (_ *SessionAct, err error) {
	work, err := NewWorkspace(tempDir, 3*actNVMe)
	if err != nil {
		return nil, err
	}
	cfg := &MigrateConfig{PageBytes: demoBlockBytes, MoveBytes: actBytes}
	a := &act{migration: migration{cfg: cfg, tier: client.TierHBM, transfer: transfer{cfg: &TransferConfig{PageBytes: cfg.PageBytes}, content: Content{Seed: 1, KV: true}}}}
	defer func() { err = errors.Join(err, a.close(ctx), work.Close()) }()
	node.RAM, node.HBM, node.NVMe = actRAM, actHBM, actNVMe
	if err := a.open(ctx, work.Dir, node, "agent"); err != nil {
		return nil, err
	}
	for i := range a.decoders {
		if a.decoders[i], err = newDecoder(uint64(i)); err != nil {
			return nil, err
		}
	}
	step()
	e := &movingEngine{b: &a.migration, name: "agent", chain: 1 << 40}
	defer e.close()
	if err := e.begin(ctx, int(cfg.MoveBytes/cfg.PageBytes)); err != nil {
		return nil, err
	}
	if err := a.decode(ctx, e); err != nil {
		return nil, err
	}
	step()
	if err := a.moveUnderAppends(ctx, e); err != nil {
		return nil, err
	}
	step()
	if err := a.goOn(ctx, e); err != nil {
		return nil, err
	}
	step()
	if err := a.drain(ctx); err != nil {
		return nil, fmt.Errorf("drain: %w", err)
	}
	step()
	a.out.WrongPages += a.wrong
	return &a.out, nil
}

func (a *act) close(ctx context.Context) error {
	var errs []error
	for _, d := range a.decoders {
		if d != nil {
			errs = append(errs, d.close())
		}
	}
	return errors.Join(errors.Join(errs...), a.migration.close(ctx))
}

// decode runs attention over the first and the last blocks of the session, on the
// device of the node where it is, in place.
func (a *act) decode(ctx context.Context, e *movingEngine) error {
	c := a.nodes[e.at]
	for _, names := range [][]paging.BlockName{e.names[:decodeBlocks], e.names[len(e.names)-decodeBlocks:]} {
		lease, err := c.Fetch(ctx, client.FetchRequest{Namespace: a.ns, Names: names, Mode: client.ModeSet, Wanted: client.TierHBM, Timeout: fetchTime})
		if err != nil {
			return err
		}
		if lease.Usable != len(names) {
			return errors.Join(fmt.Errorf("%d of %d blocks to decode over: %+v: %w", lease.Usable, len(names), lease.Shortfalls, paging.ErrUnavailable), lease.Release(ctx))
		}
		pool, err := c.Pool()
		if err != nil {
			return errors.Join(err, lease.Release(ctx))
		}
		rel, err := a.decoders[e.at].decode(ctx, pool, lease, len(names), func(row int, page []byte) { a.content.Fill(page, a.page(names[row], 0)) })
		if err = errors.Join(err, lease.Release(ctx)); err != nil {
			return err
		}
		a.out.Decodes++
		a.out.RelErr = max(a.out.RelErr, rel)
		if !(rel <= decodeTolerance) {
			a.out.WrongPages++
		}
	}
	return nil
}

func (a *act) moveUnderAppends(ctx context.Context, e *movingEngine) error {
	ctx, cancel := context.WithTimeout(ctx, moveTime)
	defer cancel()
	var moved atomic.Bool
	done := make(chan error, 1)
	var p *client.MoveProgress
	start := time.Now()
	go func() { // owner: this call, which waits for it; ends with the move, or with ctx
		var err error
		p, err = a.move(ctx, e.name, 1)
		a.out.Seconds = time.Since(start).Seconds()
		moved.Store(true)
		done <- err
	}()
	longest, err := e.appendFor(ctx, &moved)
	if err = errors.Join(err, <-done); err != nil {
		return err
	}
	if e.at != 1 {
		return fmt.Errorf("the session did not move under its engine: %w", paging.ErrUnavailable)
	}
	a.out.PauseMS, a.out.BytesCopied = float64(longest)/float64(time.Millisecond), p.SentBytes
	return nil
}

// goOn reads all of the session at its new node, which must not need another one's help,
// and decodes there.
func (a *act) goOn(ctx context.Context, e *movingEngine) error {
	a.out.Bytes = uint64(len(e.names)) * uint64(a.cfg.PageBytes)
	const step = 1024
	for first := 0; first < len(e.names); first += step {
		names := e.names[first:min(first+step, len(e.names))]
		lease, err := a.nodes[1].Fetch(ctx, client.FetchRequest{Namespace: a.ns, Names: names, First: first, Mode: client.ModeSet, Timeout: fetchTime})
		if err != nil {
			return err
		}
		a.out.Recomputed += int64(len(names) - lease.Usable)
		for _, t := range lease.Tiers {
			if t == client.TierRemote {
				a.out.Recomputed++
			}
		}
		if lease.Usable < len(names) {
			if err := lease.Release(ctx); err != nil {
				return err
			}
			continue
		}
		if err := a.check(ctx, lease, names); err != nil {
			return err
		}
	}
	if _, err := e.appendFor(ctx, nil); err != nil {
		return err
	}
	return a.decode(ctx, e)
}

// drain takes the first node out while a part of what it alone has is fetched at the second, stops
// it, and reads all of that again.
func (a *act) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	var own []paging.BlockName
	for i := range actOwnBytes / a.cfg.PageBytes {
		own = append(own, TraceBlock(2<<40+uint64(i)))
	}
	if err := a.write(ctx, 0, 0, own); err != nil {
		return err
	}
	loading, stop := context.WithCancel(ctx)
	defer stop()
	loaded := make(chan error, 1)
	go func() { loaded <- a.load(ctx, loading, own[:len(own)/4]) }() // owner: drain, which waits for it; exits with loading
	start := time.Now()
	last, err := a.admin.Drain(ctx, nodeName(0), client.PlanOptions{Deadline: drainTime}, false, func(*client.Proposal, *client.PlanStatus) {})
	a.out.DrainSeconds = time.Since(start).Seconds()
	stop()
	if err = errors.Join(err, <-loaded); err != nil {
		return err
	}
	if last == nil || last.State != "done" {
		return fmt.Errorf("node %s is not empty: %+v: %w", nodeName(0), last, paging.ErrUnavailable)
	}
	a.out.DrainedBytes = last.CopiedBytes
	if err := errors.Join(a.nodes[0].Close(), a.daemons[0].Stop(ctx)); err != nil {
		return err
	}
	a.nodes[0], a.writer = nil, nil
	for names := range slices.Chunk(own, actFetch) {
		lease, err := a.nodes[1].Fetch(ctx, client.FetchRequest{Namespace: a.ns, Names: names, Mode: client.ModeSet, Timeout: fetchTime})
		if err != nil {
			return err
		}
		a.out.AbsentBlocks += int64(len(names) - lease.Usable)
		if err := a.checkSome(ctx, lease, names); err != nil {
			return err
		}
	}
	return nil
}

// load fetches blocks at the second node until loading ends. What is not granted is a
// failed fetch: the blocks are there all the time.
func (a *act) load(ctx, loading context.Context, names []paging.BlockName) error {
	for first := 0; loading.Err() == nil; first = (first + actFetch) % len(names) {
		some := names[first:min(first+actFetch, len(names))]
		lease, err := a.nodes[1].Fetch(ctx, client.FetchRequest{Namespace: a.ns, Names: some, Mode: client.ModeSet, Timeout: fetchTime})
		if err != nil {
			return err
		}
		a.out.Fetches++
		if lease.Usable < len(some) {
			a.out.FailedFetches++
		}
		if err := a.checkSome(ctx, lease, some); err != nil {
			return err
		}
	}
	return nil
}

// checkSome compares every byte of what a lease granted, and releases it.
func (a *act) checkSome(ctx context.Context, lease *client.Lease, names []paging.BlockName) error {
	for row := range lease.Rows {
		v, ok := lease.Page(row, 0)
		if !ok {
			continue
		}
		if a.content.Check(v.Bytes(), a.page(names[row], 0)) >= 0 {
			a.out.WrongPages++
		}
		if err := v.Close(); err != nil {
			a.out.WrongPages++
		}
	}
	return lease.Release(ctx)
}

// rows are the lines of the report about it.
func (s *SessionAct) rows() []Row {
	if s == nil {
		return nil
	}
	return []Row{
		{"session moved", FormatBytes(int64(s.BytesCopied)), fmt.Sprintf("copied of %s held, to the device of the other node, in %.2f s, while its engine went on", FormatBytes(int64(s.Bytes)), s.Seconds)}, //nolint:gosec // bytes of a machine
		{"  pause", fmt.Sprintf("%.1f ms", s.PauseMS), "the longest time between two appends"},
		{"  decoded in place", fmt.Sprint(s.Decodes), fmt.Sprintf("times, before and after; error against float64 at most %.1g", s.RelErr)},
		{"  recomputed blocks", fmt.Sprint(s.Recomputed), "not at the new node; must be 0"},
		{"node drained", FormatBytes(int64(s.DrainedBytes)), fmt.Sprintf("that it alone had, copied in %.2f s; then it was stopped", s.DrainSeconds)}, //nolint:gosec // bytes of a machine
		{"  failed fetches", fmt.Sprint(s.FailedFetches), fmt.Sprintf("of %d meanwhile; must be 0", s.Fetches)},
		{"  absent blocks", fmt.Sprint(s.AbsentBlocks), "without it; must be 0"},
		{"  wrong pages", fmt.Sprint(s.WrongPages), "in all of this; must be 0"},
	}
}

func (s *SessionAct) err() error {
	switch {
	case s == nil:
		return nil
	case s.WrongPages != 0:
		return fmt.Errorf("the session that moved has %d wrong pages", s.WrongPages)
	case s.FailedFetches != 0 || s.AbsentBlocks != 0:
		return fmt.Errorf("the drain made %d fetches fail and lost %d blocks", s.FailedFetches, s.AbsentBlocks)
	case s.Recomputed != 0:
		return fmt.Errorf("%d blocks of the session were not at the node that it moved to", s.Recomputed)
	}
	return nil
}

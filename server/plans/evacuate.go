package plans

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/check/sabotage"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Bounds of an evacuation.
const (
	maxPushBytes  = 64 << 20 // of one call
	pushWithin    = 20 * time.Second
	pushWindow    = 65536 // blocks that are put into calls together
	pushTries     = 60    // of a call, while no target has room
	pushPause     = 250 * time.Millisecond
	claimedWithin = 5 * time.Second // for the targets' claims to be seen here
	claimedEvery  = 50 * time.Millisecond
	maxPasses     = 8 // over what is held
)

// evacuation is one try of this node to copy what no other node holds.
type evacuation struct {
	r       *Runner
	plan    []byte
	attempt uint32
	query   *kvtierv1.EvacuateQuery
	pace    *cluster.Pace
	cancel  context.CancelFunc
	ended   chan struct{}

	mu     sync.Mutex
	answer *kvtierv1.EvacuateAnswer
	sent   map[placement.NodeID]int64
}

// answerEvacuate begins a try, goes on with it, and tells how far it is.
func (r *Runner) answerEvacuate(ctx context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	q := &kvtierv1.EvacuateQuery{}
	if err := unmarshal(argument, q); err != nil {
		return nil, err
	}
	job, err := r.evacuation(ctx, q)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(job.told())
}

// evacuation is the try that is asked for: the one that is known, or a new one, after
// the one before has ended.
func (r *Runner) evacuation(ctx context.Context, q *kvtierv1.EvacuateQuery) (*evacuation, error) { //nolint:contextcheck // the try outlives the call
	if p := r.plan(q.GetPlan()); p == nil || directory.PlanEnded(p) || idOf(p.GetNode()) != r.cfg.Self {
		return nil, fmt.Errorf("this node's replica knows of no drain of it that runs: %w", paging.ErrUnavailable)
	}
	r.mu.Lock()
	job := r.mu.job
	r.mu.Unlock()
	if job != nil {
		if bytes.Equal(job.plan, q.GetPlan()) && job.attempt >= q.GetAttempt() {
			return job, nil
		}
		job.cancel()
		select {
		case <-job.ended:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.job != job { // another call was faster
		return r.mu.job, nil
	}
	job = &evacuation{
		r: r, plan: q.GetPlan(), attempt: q.GetAttempt(), query: q, pace: cluster.NewPace(int64(q.GetBytesPerSecond())), ended: make(chan struct{}),
		answer: &kvtierv1.EvacuateAnswer{}, sent: map[placement.NodeID]int64{},
	}
	run, cancel := context.WithCancel(r.ctx)
	job.cancel = cancel
	r.mu.job = job
	r.loops.Go(func() { // owner: the Runner; exit: its end, that of its plan, or Close; bound: one
		defer close(job.ended)
		defer cancel()
		job.run(run)
	})
	return job, nil
}

func (e *evacuation) told() *kvtierv1.EvacuateAnswer {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := proto.CloneOf(e.answer)
	for id, n := range e.sent {
		a.Targets = append(a.Targets, &kvtierv1.EvacuateTarget{Node: bytes.Clone(id[:]), Bytes: uint64(n)})
	}
	slices.SortFunc(a.Targets, func(x, y *kvtierv1.EvacuateTarget) int { return bytes.Compare(x.GetNode(), y.GetNode()) })
	return a
}

func (e *evacuation) change(f func(a *kvtierv1.EvacuateAnswer)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(e.answer)
}

// wanted reports whether the plan runs still.
func (e *evacuation) wanted() bool {
	p := e.r.plan(e.plan)
	return p != nil && !directory.PlanEnded(p)
}

// run copies until nothing is left that no other node holds, or a pass gets nowhere.
func (e *evacuation) run(ctx context.Context) {
	why := "new blocks kept coming"
	for range maxPasses {
		todo, h := e.inventory(ctx)
		if len(todo) == 0 {
			why = ""
			break
		}
		if len(h.up) == 0 {
			why = "no other node is up"
			break
		}
		copied, problem := e.pass(ctx, todo, h)
		if ctx.Err() != nil || !e.wanted() {
			return
		}
		if copied == 0 {
			why = problem
			break
		}
	}
	e.change(func(a *kvtierv1.EvacuateAnswer) { a.Ended, a.Why = true, why })
}

// inventory is what is to be copied, the hottest first, as the tiers of this node and
// the directory have it now.
func (e *evacuation) inventory(ctx context.Context) ([]soleBlock, *holdings) {
	h := e.r.holdings()
	h.doubt(ctx)
	if sabotage.On("drain-copies-nothing") {
		return nil, h
	}
	var todo []soleBlock
	var left, leftBytes, dropped, droppedBytes uint64
	hot := time.Now().Add(-hotWithin(e.query.GetHotWithinMs())).Unix()
	h.sole(func(b soleBlock) {
		if e.query.GetDropCold() && int64(b.used) < hot {
			dropped++
			droppedBytes += uint64(b.bytes)
			return
		}
		left++
		leftBytes += uint64(b.bytes)
		todo = append(todo, b)
	})
	slices.SortFunc(todo, func(a, b soleBlock) int {
		return cmp.Or(cmp.Compare(b.used, a.used), cmp.Compare(a.at, b.at), bytes.Compare(a.id.Name[:], b.id.Name[:]))
	})
	e.change(func(a *kvtierv1.EvacuateAnswer) {
		a.LeftBlocks, a.LeftBytes, a.DroppedBlocks, a.DroppedBytes = left, leftBytes, dropped, droppedBytes
	})
	return todo, h
}

// call is blocks of which the same parts are copied at once.
type call struct {
	ns     *paging.Namespace
	parts  paging.PartSet
	blocks []soleBlock
	bytes  int64
}

// calls cuts blocks, which are hot first, into calls.
func calls(h *holdings, todo []soleBlock, most int64) (out []call) {
	type kind struct {
		ns    paging.NamespaceID
		parts paging.PartSet
	}
	for window := range slices.Chunk(todo, pushWindow) {
		open := map[kind]int{}
		for _, b := range window {
			k := kind{b.id.Namespace, b.parts}
			i, some := open[k]
			if !some || out[i].bytes+b.bytes > most || len(out[i].blocks) == cluster.MaxPushBlocks {
				i = len(out)
				open[k] = i
				out = append(out, call{ns: h.spaces[b.id.Namespace], parts: b.parts})
			}
			out[i].blocks = append(out[i].blocks, b)
			out[i].bytes += b.bytes
		}
	}
	return out
}

// pass copies blocks, and returns how many arrived and why others did not.
func (e *evacuation) pass(ctx context.Context, todo []soleBlock, h *holdings) (copied int, why string) {
	var arrived []soleBlock
	for _, c := range calls(h, todo, e.pace.Step(maxPushBytes)) {
		if !e.wanted() {
			break
		}
		got, sent, problem := e.push(ctx, c, h)
		if problem != "" {
			why = problem
		}
		arrived = append(arrived, got...)
		if e.pace.Wait(ctx, sent) != nil {
			break
		}
	}
	e.confirm(ctx, arrived)
	return len(arrived), why
}

// push has the target that is best now copy the blocks of a call, and another one where
// it has no room. sent is what travelled: others may have brought some meanwhile.
func (e *evacuation) push(ctx context.Context, c call, h *holdings) (got []soleBlock, sent int64, why string) {
	blocks := make([]cluster.Block, len(c.blocks))
	for i, b := range c.blocks {
		blocks[i] = cluster.Block{Name: b.id.Name, Parts: c.parts, Position: b.at}
	}
	full := map[placement.NodeID]bool{}
	for range pushTries {
		if ctx.Err() != nil || !e.wanted() {
			return got, sent, ""
		}
		to, some := e.target(h, full)
		if !some { // all are full: their disks take up what is written down
			clear(full)
			if !pause(ctx, pushPause) {
				return got, sent, why
			}
			continue
		}
		within, cancel := context.WithTimeout(ctx, pushWithin)
		n, reasons, err := e.r.cluster.Push(within, to, c.ns, blocks, c.parts, tier.RAM)
		cancel()
		if err != nil {
			full[to], why = true, err.Error()
			continue
		}
		sent += n
		room := true
		for i, reason := range reasons {
			switch reason {
			case tier.NoReason:
				got = append(got, c.blocks[i])
			default:
				why = fmt.Sprintf("node %s: %s", to.Short(), reason)
				room = room && reason != tier.NoSpace
			}
		}
		e.mu.Lock()
		e.sent[to] += n
		e.answer.CopiedBytes += uint64(n)
		e.answer.LeftBlocks -= min(e.answer.LeftBlocks, uint64(len(got)))
		e.answer.LeftBytes -= min(e.answer.LeftBytes, uint64(n))
		e.mu.Unlock()
		if len(got) > 0 || room {
			return got, sent, why
		}
		full[to] = true
	}
	return got, sent, why
}

func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// target is the node that lacks most of what it is to take; where all have theirs, the
// one that took least.
func (e *evacuation) target(h *holdings, full map[placement.NodeID]bool) (best placement.NodeID, some bool) {
	wish := map[placement.NodeID]int64{}
	for _, t := range e.query.GetTargets() {
		wish[idOf(t.GetNode())] += int64(t.GetBytes())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var most int64
	for id := range h.up {
		if full[id] || !e.r.cluster.Reachable(id) {
			continue
		}
		lacks := wish[id] - e.sent[id]
		if !some || lacks > most || lacks == most && bytes.Compare(id[:], best[:]) < 0 {
			best, most, some = id, lacks, true
		}
	}
	return best, some
}

// confirm waits until the directory shows that blocks are elsewhere: only that makes
// this node's copy one of several.
func (e *evacuation) confirm(ctx context.Context, arrived []soleBlock) {
	held := make([]tier.HeldBlock, len(arrived))
	for i, b := range arrived {
		held[i] = tier.HeldBlock{ID: b.id, Parts: b.parts, Used: b.used, Position: b.at}
	}
	for until := time.Now().Add(claimedWithin); len(held) > 0 && time.Now().Before(until); {
		h, rest := e.r.holdings(), held[:0]
		for step := range slices.Chunk(held, soleStep) {
			for _, b := range h.lacking(step) {
				rest = append(rest, tier.HeldBlock{ID: b.id, Parts: b.parts, Used: b.used, Position: b.at})
			}
		}
		held = rest
		if len(held) > 0 && !pause(ctx, claimedEvery) {
			return
		}
	}
}

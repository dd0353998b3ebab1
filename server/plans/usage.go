package plans

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// defaultHot is how long after its last use something is hot.
const defaultHot = time.Minute

func hotWithin(ms uint64) time.Duration {
	if ms == 0 {
		return defaultHot
	}
	return time.Duration(ms) * time.Millisecond //nolint:gosec // checked where it is set
}

// traffic is what is known of the hits that this node served.
type traffic struct {
	at             time.Time
	blocks         int64 // hits so far
	bytesPerSecond int64
}

func (r *Runner) sampleTraffic(now time.Time) {
	m := r.tier.Metrics()
	_, used := r.cfg.Tiers()
	hits := m.DeviceHitBlocks + m.RAMHitBlocks + m.DiskHitBlocks
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &r.mu.traffic
	if took := now.Sub(t.at).Seconds(); !t.at.IsZero() && took > 0 && m.Blocks > 0 {
		t.bytesPerSecond = int64(float64(hits-t.blocks) * float64(used.Sum()) / float64(m.Blocks) / took)
	}
	t.at, t.blocks = now, hits
}

// holdings looks at what this node holds that no other node that is up holds.
type holdings struct {
	r      *Runner
	up     map[placement.NodeID]bool // other nodes that take copies
	holds  map[placement.NodeID]bool // other nodes whose claims count
	spaces map[paging.NamespaceID]*paging.Namespace
}

func (r *Runner) holdings() *holdings {
	h := &holdings{r: r, up: map[placement.NodeID]bool{}, holds: map[placement.NodeID]bool{}, spaces: map[paging.NamespaceID]*paging.Namespace{}}
	r.directory().Read(func(s *directory.State) {
		for _, n := range s.Nodes() {
			if n.ID != r.cfg.Self && n.State == nodeUp {
				h.up[n.ID] = true
				h.holds[n.ID] = !n.Gap // else it may have lost them, and has not said so yet
			}
		}
	})
	for _, ns := range r.tier.Namespaces() {
		h.spaces[ns.ID()] = ns
	}
	return h
}

// doubt leaves out the nodes that do not answer now: the directory takes some seconds to
// know that a node is down, and what such a node holds may be lost.
func (h *holdings) doubt(ctx context.Context) {
	var mu sync.Mutex
	var asked sync.WaitGroup
	var silent []placement.NodeID
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for id := range h.up {
		asked.Go(func() { // owner: this call; exits with ctx; bound: the nodes of a cluster
			err := h.r.ask(ctx, id, methodLive, &kvtierv1.PlanLiveQuery{}, &kvtierv1.PlanLive{})
			if err != nil && !errors.Is(err, paging.ErrNotFound) { // it drives no plan of that name, and answers
				mu.Lock()
				defer mu.Unlock()
				silent = append(silent, id)
			}
		})
	}
	asked.Wait()
	for _, id := range silent {
		delete(h.up, id)
		delete(h.holds, id)
	}
}

// soleBlock is a block of which this node has parts that no other node has.
type soleBlock struct {
	id    paging.BlockID
	parts paging.PartSet // those
	used  uint32         // Unix seconds
	at    uint32         // position in its chain
	bytes int64          // of those parts
}

// soleStep is how many blocks are looked up in one go of the directory's lock.
const soleStep = 2048

// sole calls f with every block of which no other node that is up claims all parts.
func (h *holdings) sole(f func(soleBlock)) {
	step := make([]tier.HeldBlock, 0, soleStep)
	flush := func() {
		for _, b := range h.lacking(step) {
			f(b)
		}
		step = step[:0]
	}
	h.r.tier.HeldBlocks(func(b tier.HeldBlock) {
		if step = append(step, b); len(step) == soleStep {
			flush()
		}
	})
	flush()
}

// lacking are those of some blocks of which no other node that is up claims all parts.
func (h *holdings) lacking(blocks []tier.HeldBlock) (out []soleBlock) {
	var holders []directory.Holder
	h.r.directory().Read(func(s *directory.State) {
		for _, b := range blocks {
			ns := h.spaces[b.ID.Namespace]
			if ns == nil {
				continue // came this moment: the next look finds it
			}
			parts := b.Parts
			holders = s.Locate(cluster.ClaimKey(b.ID.Namespace, b.ID.Name), holders[:0])
			for _, x := range holders {
				if h.holds[x.Node] {
					parts &^= x.Parts
				}
			}
			if parts != 0 {
				out = append(out, soleBlock{b.ID, parts, b.Used, b.Position, int64(ns.Layout.BytesOf(ns.Layout.PagesAt(int(b.Position), parts)))})
			}
		}
	})
	return out
}

// answerUsage tells what a planner needs to know of this node.
func (r *Runner) answerUsage(ctx context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	var q kvtierv1.NodeUsageQuery
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	own, err := r.cfg.Mover.SessionUsage(ctx, r.sessionsOf(r.cfg.Self))
	if err != nil {
		return nil, err
	}
	var sessions placement.TierBytes
	for _, u := range own {
		b := tierBytes(u)
		for t := range b {
			sessions[t] += b[t]
		}
	}
	a := &kvtierv1.NodeUsageAnswer{}
	hot := time.Now().Add(-hotWithin(q.GetHotWithinMs())).Unix()
	r.holdings().sole(func(b soleBlock) {
		if int64(b.used) >= hot {
			a.SoleHotBytes += uint64(b.bytes)
		} else {
			a.SoleColdBytes += uint64(b.bytes)
		}
	})
	// What sessions have is moved with them. It is taken from both in proportion.
	if all := a.SoleHotBytes + a.SoleColdBytes; all > 0 {
		rest := 1 - min(1, float64(sessions.Sum())/float64(all))
		a.SoleHotBytes, a.SoleColdBytes = uint64(rest*float64(a.SoleHotBytes)), uint64(rest*float64(a.SoleColdBytes))
	}
	budget, used := r.cfg.Tiers()
	for i, t := range []kvtierv1.Tier{kvtierv1.Tier_TIER_HBM, kvtierv1.Tier_TIER_RAM, kvtierv1.Tier_TIER_NVME} {
		a.Tiers = append(a.Tiers, &kvtierv1.TierUse{Tier: t, BudgetBytes: uint64(budget[i]), UsedBytes: uint64(used[i]), SessionBytes: uint64(sessions[i])})
	}
	r.mu.Lock()
	a.HitBytesPerSecond = uint64(max(0, r.mu.traffic.bytesPerSecond))
	r.mu.Unlock()
	return proto.Marshal(a)
}

func tierIndex(t kvtierv1.Tier) (placement.Tier, bool) {
	switch t {
	case kvtierv1.Tier_TIER_HBM:
		return placement.HBM, true
	case kvtierv1.Tier_TIER_RAM:
		return placement.RAM, true
	case kvtierv1.Tier_TIER_NVME:
		return placement.NVMe, true
	default:
		return 0, false
	}
}

func tierBytes(u *kvtierv1.SessionUsage) (b placement.TierBytes) {
	for _, x := range u.GetTiers() {
		if t, ok := tierIndex(x.GetTier()); ok {
			b[t] += int64(x.GetBytes())
		}
	}
	return b
}

// eachSession calls f with every session, a shard at a time.
func (r *Runner) eachSession(f func(x *directory.Session, now int64)) {
	for shard := range directory.Shards {
		r.directory().Read(func(s *directory.State) {
			s.SessionShard(shard, func(x *directory.Session) bool {
				f(x, s.NowMillis())
				return true
			})
		})
	}
}

// sessionsOf are the sessions that a node owns, in order.
func (r *Runner) sessionsOf(node placement.NodeID) (out []string) {
	r.eachSession(func(x *directory.Session, _ int64) {
		if idOf(x.GetOwner()) == node {
			out = append(out, x.GetSession())
		}
	})
	slices.Sort(out)
	return out
}

// gather asks the nodes for what a plan is made from. Of sessions it knows those of
// the nodes that only names, all if there are none. A node that is up and does not answer
// gives nothing, and is given nothing.
func (r *Runner) gather(ctx context.Context, o *kvtierv1.PlanOptions, only ...placement.NodeID) (*placement.Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, gatherWithin)
	defer cancel()
	var nodes []directory.Node
	r.directory().Read(func(s *directory.State) { nodes = s.Nodes() })
	u := &placement.Usage{}
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, n := range nodes {
		if n.State != nodeUp && n.State != kvtierv1.NodeState_NODE_STATE_DRAINING {
			continue
		}
		asked.Go(func() { // owner: this call; exits with ctx; bound: the nodes of a cluster
			var a kvtierv1.NodeUsageAnswer
			err := r.ask(ctx, n.ID, methodUsage, &kvtierv1.NodeUsageQuery{HotWithinMs: o.GetHotWithinMs()}, &a)
			x := placement.NodeUsage{ID: n.ID, Name: n.Name, Status: placement.NodeStatus(n.State)}
			if err != nil {
				x.Status = placement.Down
			}
			fill(&x, &a)
			mu.Lock()
			defer mu.Unlock()
			u.Nodes = append(u.Nodes, x)
		})
	}
	asked.Wait()
	slices.SortFunc(u.Nodes, func(a, b placement.NodeUsage) int { return slices.Compare(a.ID[:], b.ID[:]) })
	return u, r.gatherSessions(ctx, u, o, only)
}

// fill enters what a node told of itself.
func fill(x *placement.NodeUsage, a *kvtierv1.NodeUsageAnswer) {
	x.SoleHotBytes, x.SoleColdBytes, x.HitBytesPerSecond = int64(a.GetSoleHotBytes()), int64(a.GetSoleColdBytes()), int64(a.GetHitBytesPerSecond())
	hot := x.SoleHotBytes
	for _, use := range a.GetTiers() {
		t, ok := tierIndex(use.GetTier())
		if !ok {
			continue
		}
		x.Budget[t], x.Used[t] = int64(use.GetBudgetBytes()), int64(use.GetUsedBytes())
		// A cache is always full: what no session has gives way, except what is hot and
		// nowhere else.
		free := max(0, x.Used[t]-int64(use.GetSessionBytes()))
		stays := min(free, hot)
		hot -= stays
		x.GivesWay[t] = free - stays
	}
}

func (r *Runner) gatherSessions(ctx context.Context, u *placement.Usage, o *kvtierv1.PlanOptions, only []placement.NodeID) error {
	var names []string
	r.eachSession(func(x *directory.Session, now int64) {
		owner := idOf(x.GetOwner())
		if len(only) > 0 && !slices.Contains(only, owner) || x.GetState() != kvtierv1.SessionState_SESSION_STATE_ACTIVE {
			return
		}
		names = append(names, x.GetSession())
		u.Sessions = append(u.Sessions, placement.SessionUsage{
			ID: placement.SessionID(x.GetSession()), Owner: owner, Epoch: placement.Epoch(x.GetEpoch()), Tokens: int64(x.GetChain().GetTokens()),
			Idle: time.Duration(max(0, now-x.GetUsedUnixMs())) * time.Millisecond, Priority: int(x.GetRetention().GetPriority()),
		})
	})
	usage, err := r.cfg.Mover.SessionUsage(ctx, names)
	if err != nil {
		return fmt.Errorf("where the blocks of sessions are: %w", err)
	}
	slices.SortFunc(u.Sessions, func(a, b placement.SessionUsage) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	shareTraffic(u, usage, hotWithin(o.GetHotWithinMs()))
	return nil
}

// shareTraffic enters the bytes of sessions, and what is fetched of them: nobody counts
// that, so the traffic of a node counts for its hot sessions, by their bytes.
func shareTraffic(u *placement.Usage, usage map[string]*kvtierv1.SessionUsage, hot time.Duration) {
	total := map[placement.NodeID]int64{}
	for i := range u.Sessions {
		x := &u.Sessions[i]
		x.Bytes = tierBytes(usage[string(x.ID)])
		if x.Idle < hot {
			total[x.Owner] += x.Bytes.Sum()
		}
	}
	traffic := map[placement.NodeID]int64{}
	for i := range u.Nodes {
		traffic[u.Nodes[i].ID] = u.Nodes[i].HitBytesPerSecond
	}
	for i := range u.Sessions {
		if x := &u.Sessions[i]; x.Idle < hot && total[x.Owner] > 0 {
			x.HitBytesPerSecond = int64(float64(traffic[x.Owner]) * float64(x.Bytes.Sum()) / float64(total[x.Owner]))
		}
	}
}

package plans

import (
	"context"
	"fmt"
	"log/slog"
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

// Mover moves sessions, which are named "tenant/name", from whichever node owns them.
type Mover interface {
	// BeginMove starts to move a session to a node and returns once it is begun: it goes on
	// by itself and ends within a time. rate 0: no limit.
	BeginMove(ctx context.Context, session string, to placement.NodeID, rate int64, within time.Duration) error
	// MoveProgress tells how its last move is. paging.ErrNotFound: none is remembered.
	MoveProgress(ctx context.Context, session string) (*kvtierv1.MoveProgress, error)
	// CancelMove ends its move, if there is one.
	CancelMove(ctx context.Context, session string) error
	// SessionUsage tells where the blocks of sessions are at their owners. Sessions whose
	// owner does not answer are left out.
	SessionUsage(ctx context.Context, sessions []string) (map[string]*kvtierv1.SessionUsage, error)
}

// Config of a Runner.
type Config struct {
	Self  placement.NodeID
	Mover Mover
	// Tiers tells budget and use of each tier of this node.
	Tiers  func() (budget, used placement.TierBytes)
	Logger *slog.Logger // state changes only; nil: none
}

// Times.
const (
	lookEvery     = 500 * time.Millisecond // for plans that are to be driven
	driveEvery    = 100 * time.Millisecond
	askWithin     = 3 * time.Second // one question to another node
	usageWithin   = 15 * time.Second
	gatherWithin  = 20 * time.Second // all that a plan is made from
	proposeWithin = 5 * time.Second
	sampleEvery   = 10 * time.Second // of the traffic of hits
)

// Runner is a node's part in plans. All methods may be called at the same time from many
// goroutines, those that need the cluster from Start on: before, they answer
// paging.ErrUnavailable.
type Runner struct {
	cfg Config
	log *slog.Logger

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	loops  sync.WaitGroup

	started chan struct{} // closed by Start, after cluster and tier are set
	cluster *cluster.Node
	tier    *tier.Hierarchy

	mu struct {
		sync.Mutex
		drivers map[string]*driver // by plan
		job     *evacuation        // the last one of this node; nil: none
		traffic traffic
	}
}

// New returns a Runner whose Answers can be given to a cluster.
func New(cfg Config) *Runner {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Runner{cfg: cfg, log: cfg.Logger, started: make(chan struct{})}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.mu.drivers = map[string]*driver{}
	return r
}

// Start begins to drive plans whenever this node leads. It is called once.
func (r *Runner) Start(c *cluster.Node, h *tier.Hierarchy) {
	r.cluster, r.tier = c, h
	close(r.started)
	r.loops.Go(r.look) // owner: the Runner; exit: Close
}

// Close ends what runs here: plans go on at the next leader. The Mover and the cluster
// are closed after it. Idempotent.
func (r *Runner) Close() {
	r.cancel()
	r.loops.Wait()
}

func (r *Runner) ready() error {
	select {
	case <-r.started:
	default:
		return fmt.Errorf("this node is starting: %w", paging.ErrUnavailable)
	}
	if r.ctx.Err() != nil {
		return fmt.Errorf("this node stops: %w", paging.ErrClosed)
	}
	return nil
}

func (r *Runner) directory() *directory.Directory { return r.cluster.Directory() }

// Methods of calls between nodes.
const (
	methodUsage = cluster.MethodPlans + iota
	methodEvacuate
	methodLive
)

// Answers are this node's answers to the calls of others about plans.
func (r *Runner) Answers() map[uint8]cluster.Answer {
	return map[uint8]cluster.Answer{methodUsage: r.answerUsage, methodEvacuate: r.answerEvacuate, methodLive: r.answerLive}
}

// look drives the plans that run while this node leads.
func (r *Runner) look() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var sampled time.Time
	for {
		select {
		case <-r.ctx.Done():
			return
		case now := <-tick.C:
			if now.Sub(sampled) >= sampleEvery {
				sampled = now
				r.sampleTraffic(now)
			}
			if r.leads() {
				r.driveAll()
			}
		}
	}
}

func (r *Runner) leads() bool {
	leader, ok := r.directory().Leader()
	return ok && leader == r.cfg.Self
}

// driveAll starts a driver for each plan that runs and has none.
func (r *Runner) driveAll() {
	var running []*directory.Plan
	r.directory().Read(func(s *directory.State) {
		for _, p := range s.Plans() {
			if !directory.PlanEnded(p) {
				running = append(running, p)
			}
		}
	})
	for _, p := range running {
		id := string(p.GetPlan())
		r.mu.Lock()
		if r.mu.drivers[id] == nil {
			d := &driver{r: r, plan: p.GetPlan()}
			r.mu.drivers[id] = d
			r.loops.Go(func() { // owner: the Runner; exit: the end of the plan, of the lead, or Close; bound: the plans of the directory
				d.run()
				r.mu.Lock()
				delete(r.mu.drivers, id)
				r.mu.Unlock()
			})
		}
		r.mu.Unlock()
	}
}

// propose has the directory change a plan; false: it did not, or nobody knows.
func (r *Runner) propose(ctx context.Context, c *kvtierv1.DirectoryCommand) (directory.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeWithin)
	defer cancel()
	return r.directory().Propose(ctx, c)
}

// ask puts a question to a node, this one included.
func (r *Runner) ask(ctx context.Context, node placement.NodeID, method uint8, q, a proto.Message) error {
	b, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	within := askWithin
	if method == methodUsage {
		within = usageWithin // it looks at all that it holds
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if node == r.cfg.Self {
		b, err = r.Answers()[method](ctx, node, b)
	} else {
		b, err = r.cluster.Call(ctx, node, method, b)
	}
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(b, a); err != nil {
		return fmt.Errorf("answer of node %s: %w: %w", node.Short(), paging.ErrIncompatible, err)
	}
	return nil
}

func unmarshal(argument []byte, q proto.Message) error {
	if err := proto.Unmarshal(argument, q); err != nil {
		return fmt.Errorf("call of another node: %w: %w", paging.ErrInvalid, err)
	}
	return nil
}

// plan is a plan as the replica has it; nil: it is not known.
func (r *Runner) plan(id []byte) (p *directory.Plan) {
	r.directory().Read(func(s *directory.State) { p, _ = s.Plan(id) })
	return p
}

func idOf(b []byte) (id placement.NodeID) {
	copy(id[:], b)
	return id
}

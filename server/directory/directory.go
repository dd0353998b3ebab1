package directory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// logCacheEntries is the number of log entries kept in memory for followers.
const logCacheEntries = 512

// Directory is this node's replica. All methods may be called at the same time
// from many goroutines.
type Directory struct {
	cfg    Config
	log    *slog.Logger
	ctx    context.Context // ends with Close; bounds what runs in the background
	cancel context.CancelFunc
	loops  sync.WaitGroup

	// slots bounds proposals that wait for Raft; each holds one goroutine.
	slots chan struct{}

	now     atomic.Pointer[replica]
	stalled atomic.Pointer[string] // why this replica is cut off; nil: it is not
	failed  atomic.Pointer[error]  // why it can never go on; nil: it can

	feed     *SessionFeed
	replaced atomic.Pointer[func()] // told that the state came from a snapshot; nil: nobody is
}

// replica is one run of Raft. When a disk that hung answers again, the replica
// that was cut off is closed and another opened.
type replica struct {
	raft   *raft.Raft
	fsm    *fsm
	link   *link
	stores *stores
	timed  *timed

	// Calls of Raft whose answer somebody waits for.
	calls struct {
		sync.Mutex
		refused bool // no more are begun
		running int
		ended   chan struct{} // closed when the last one has ended after that
	}
}

// begin notes a call of Raft that waits for an answer; false: this run ends.
func (r *replica) begin() bool {
	r.calls.Lock()
	defer r.calls.Unlock()
	if r.calls.refused {
		return false
	}
	r.calls.running++
	return true
}

func (r *replica) end() {
	r.calls.Lock()
	defer r.calls.Unlock()
	if r.calls.running--; r.calls.running == 0 && r.calls.refused {
		close(r.calls.ended)
	}
}

// refuse lets no more calls begin; the channel is closed when the last has ended.
func (r *replica) refuse() <-chan struct{} {
	r.calls.Lock()
	defer r.calls.Unlock()
	if !r.calls.refused {
		r.calls.refused = true
		if r.calls.running == 0 {
			close(r.calls.ended)
		}
	}
	return r.calls.ended
}

// Open starts the replica. On error nothing runs and nothing is held.
func Open(cfg Config) (*Directory, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if cfg.Memory == nil {
		if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
			return nil, fmt.Errorf("directory: %w", err)
		}
	}
	d := &Directory{cfg: cfg, log: cfg.Logger, slots: make(chan struct{}, maxProposals), feed: newSessionFeed()}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	r, err := d.open(cfg.Bootstrap)
	if err != nil {
		d.cancel()
		return nil, err
	}
	d.now.Store(r)
	d.loops.Go(d.watch) // owner: Directory; exits at Close
	d.loops.Go(d.lead)  // owner: Directory; exits at Close
	return d, nil
}

func (d *Directory) open(bootstrap bool) (*replica, error) {
	st, err := d.cfg.openStores(d.cfg.Dir)
	if err != nil {
		return nil, err
	}
	r := &replica{stores: st, timed: newTimed(), link: newLink(&d.cfg)}
	r.calls.ended = make(chan struct{})
	r.fsm = newFSM(d.cfg.MaxClaims, d.fail, d.stateReplaced, d.feed)
	if err := d.start(r, bootstrap); err != nil {
		return nil, errors.Join(fmt.Errorf("directory in %s: %w", d.cfg.Dir, err), r.link.Close(), st.close())
	}
	return r, nil
}

func (d *Directory) start(r *replica, bootstrap bool) error {
	conf := d.cfg.raft()
	cached, err := raft.NewLogCache(logCacheEntries, timedLog{r.stores.log, r.timed})
	if err != nil {
		return err
	}
	stable := timedStable{r.stores.stable, r.timed}
	if bootstrap {
		known, err := raft.HasExistingState(cached, stable, r.stores.snapshots)
		if err != nil {
			return err
		}
		if !known {
			self := raft.Server{ID: conf.LocalID, Address: raft.ServerAddress(conf.LocalID)}
			err := raft.BootstrapCluster(conf, cached, stable, r.stores.snapshots, r.link, raft.Configuration{Servers: []raft.Server{self}})
			if err != nil {
				return err
			}
		}
	}
	r.raft, err = raft.NewRaft(conf, r.fsm, cached, stable, r.stores.snapshots, r.link)
	return err
}

// close stops the run. Raft waits for a call of the store that has not ended. What
// waits for an answer has to get it before: a Raft that is shut down answers
// nothing that is still queued. A leader that reaches nobody gives up in a
// heartbeat or two, which answers them too.
func (r *replica) close(within time.Duration) error {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-r.refuse():
	case <-timer.C:
	}
	stopped := r.raft.Shutdown()
	err := r.link.Close() // what is on the way to another replica ends now, not at its timeout
	return errors.Join(stopped.Error(), err, r.stores.close())
}

// stateReplaced tells who wants to know that the state came from a snapshot.
func (d *Directory) stateReplaced() {
	if told := d.replaced.Load(); told != nil {
		(*told)()
	}
}

// fail notes that this replica cannot follow the log any more.
func (d *Directory) fail(err error) {
	if d.failed.CompareAndSwap(nil, &err) {
		d.log.Error("directory replica stops", "err", err)
		d.now.Load().link.cut.Store(true)
	}
}

// Err is why this replica cannot go on; nil: it can.
func (d *Directory) Err() error {
	if err := d.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Stalled says why this replica is cut off from the others at present; "": it is not.
func (d *Directory) Stalled() string {
	if why := d.stalled.Load(); why != nil {
		return *why
	}
	return ""
}

// Close stops the replica and joins what it started. A log disk that hangs
// delays it by at most StallAfter; then an error says that it was left.
func (d *Directory) Close() error {
	d.cancel()
	done := make(chan error, 1)
	go func() { // owner: Close; exits when the store's last call ends, which nothing can hasten
		d.loops.Wait()
		done <- d.now.Load().close(d.cfg.StallAfter / 2)
	}()
	timer := time.NewTimer(d.cfg.StallAfter)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return fmt.Errorf("directory log in %s does not answer: left open: %w", d.cfg.Dir, paging.ErrIO)
	}
}

const watchEvery = 100 * time.Millisecond

// watch cuts the replica off when its stores hang, and starts it anew when they
// answer again. A leader in particular would otherwise stay leader for ever.
func (d *Directory) watch() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-d.ctx.Done():
			return
		case <-tick.C:
		}
		r := d.now.Load()
		switch took := r.timed.oldest(); {
		case d.Err() != nil:
		case took > d.cfg.StallAfter:
			d.cutOff(fmt.Sprintf("stalled disk: a write to the directory log in %s has not ended for over %v", d.cfg.Dir, d.cfg.StallAfter))
		case d.stalled.Load() != nil && took == 0:
			d.restart(r)
		}
	}
}

// cutOff keeps this replica from the others until its disk answers.
func (d *Directory) cutOff(why string) {
	if d.stalled.CompareAndSwap(nil, &why) {
		d.now.Load().link.cut.Store(true)
		d.log.Error("directory replica is cut off", "why", why)
	}
}

// restart replaces a run that was cut off. Until the new one has caught up its
// state is older; claims are hints.
func (d *Directory) restart(old *replica) {
	err := old.close(d.cfg.StallAfter / 2)
	if err == nil {
		var r *replica
		if r, err = d.open(false); err == nil {
			d.now.Store(r)
			d.stalled.Store(nil)
			d.log.Info("directory replica rejoins: its disk answers again")
			return
		}
	}
	d.fail(fmt.Errorf("restart after a stalled disk: %w", err))
}

// Read calls see with the local state, between two commands. see must be short
// and keep nothing of it. It never waits for the log.
func (d *Directory) Read(see func(*State)) { d.now.Load().fsm.read(see) }

// Locate appends to out, for each key, how many holders it has, and to holders
// the holders one after another. It reads the local replica only.
func (d *Directory) Locate(keys []placement.BlockKey, counts []int, holders []Holder) ([]int, []Holder) {
	d.Read(func(s *State) {
		for _, k := range keys {
			before := len(holders)
			holders = s.Locate(k, holders)
			counts = append(counts, len(holders)-before)
		}
	})
	return counts, holders
}

// Leader is the node that leads; false: nobody that this replica knows of.
func (d *Directory) Leader() (placement.NodeID, bool) {
	_, id := d.now.Load().raft.LeaderWithID()
	if id == "" {
		return placement.NodeID{}, false
	}
	node, err := nodeOf(id)
	return node, err == nil
}

// Status is the state of the replica, for people.
type Status struct {
	Leader    placement.NodeID
	HasLeader bool
	Role      string // "leader", "follower", "candidate" or "shutdown"
	Voter     bool
	Voters    int
	Replicas  int
	Applied   uint64 // last entry applied here
	Behind    uint64 // entries in the log here that are not applied
	Stalled   string
}

// Status reports how the replica is.
func (d *Directory) Status() Status {
	r := d.now.Load()
	s := Status{Role: roleName(r.raft.State()), Applied: r.raft.AppliedIndex(), Stalled: d.Stalled()}
	s.Leader, s.HasLeader = d.Leader()
	if last := r.raft.LastIndex(); last > s.Applied {
		s.Behind = last - s.Applied
	}
	if f := r.raft.GetConfiguration(); f.Error() == nil {
		for _, server := range f.Configuration().Servers {
			s.Replicas++
			if server.Suffrage == raft.Voter {
				s.Voters++
				s.Voter = s.Voter || server.ID == serverID(d.cfg.ID)
			}
		}
	}
	return s
}

func roleName(s raft.RaftState) string {
	switch s {
	case raft.Leader:
		return "leader"
	case raft.Candidate:
		return "candidate"
	case raft.Follower:
		return "follower"
	case raft.Shutdown:
	}
	return "shutdown"
}

package migrate

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvtier/kvtier/server/placement"
)

// cluster is a small model: a directory whose log orders proposals that come late,
// twice or not at all, two nodes with sets of blocks, and a machine at the source that
// may be lost at any moment.
type cluster struct {
	t    *testing.T
	r    *rand.Rand
	seed uint64
	now  time.Time

	record   Record
	owners   map[placement.Epoch]placement.NodeID
	flying   []Action // proposals that are not in the log yet
	quorum   bool
	sourceUp bool
	targetUp bool

	chain  int // blocks of the session
	has    map[int]bool
	asked  *Action
	copies []int // blocks of the copy under way
	copy   Action

	m       Machine
	running bool
	moved   int // blocks that were sent
	lost    bool
}

const blockBytes = 1000

func (c *cluster) do(actions []Action) {
	for _, a := range actions {
		switch a.Kind {
		case Prepare, Freeze, Commit, Abort:
			if a.Kind == Commit && c.lacking() != nil {
				c.t.Fatalf("seed %d: a commit while the target lacks %v", c.seed, c.lacking())
			}
			c.flying = append(c.flying, a)
		case Ask:
			c.asked = &a
		case Copy:
			c.copy, c.copies = a, c.lacking()
		case Stop, Release:
			c.asked, c.copies, c.copy = nil, nil, Action{}
		}
	}
}

func (c *cluster) lacking() (out []int) {
	for b := range c.chain {
		if !c.has[b] {
			out = append(out, b)
		}
	}
	return out
}

// step hands an event to the machine, if its node runs.
func (c *cluster) step(e Event) {
	if c.running {
		e.Now = c.now
		c.do(c.m.Step(e))
	}
}

// apply is the directory: the rules of its state machine.
func (c *cluster) apply(a Action) {
	x := &c.record
	legal := a.Epoch == x.Epoch && x.Owner == nodeA
	switch {
	case !legal:
	case a.Kind == Prepare && (x.Phase == Active || x.Phase == Moving && x.Move == a.Move):
		x.Phase, x.Move, x.Target = Moving, a.Move, a.Target
	case a.Kind == Freeze && x.Phase >= Moving && x.Move == a.Move:
		x.Phase = Frozen
	case a.Kind == Commit && x.Phase == Frozen && x.Move == a.Move:
		*x = Record{Phase: Active, Owner: x.Target, Epoch: x.Epoch + 1}
	case a.Kind == Abort && (x.Phase == Active || x.Move == a.Move):
		*x = Record{Phase: Active, Owner: x.Owner, Epoch: x.Epoch}
	default:
		legal = false
	}
	if was, seen := c.owners[x.Epoch]; seen && was != x.Owner {
		c.t.Fatalf("seed %d: two owners at epoch %d", c.seed, x.Epoch)
	}
	c.owners[x.Epoch] = x.Owner
	switch {
	case c.lost && c.r.IntN(2) == 0: // the answer is
		c.step(Event{Kind: Unsure, Proposal: a.Kind})
	case !legal:
		c.step(Event{Kind: Refused, Proposal: a.Kind, Text: "by the directory"})
	}
	c.step(Event{Kind: Recorded, Record: *x})
}

// restart is what a node does that finds a record of its own.
func (c *cluster) restart() {
	m, actions, ok := Resume(c.record, nodeA, Limits{}, c.now)
	c.m, c.running, c.asked, c.copies, c.copy = m, ok, nil, nil, Action{}
	c.do(actions)
}

// turn lets one thing happen. faults says whether anything may go wrong.
func (c *cluster) turn(faults bool) {
	r := c.r
	c.now = c.now.Add(time.Duration(r.IntN(40)) * time.Millisecond)
	switch n := r.IntN(12); {
	case n < 3 && c.quorum && len(c.flying) > 0:
		k := r.IntN(len(c.flying))
		a := c.flying[k]
		if !faults || r.IntN(4) > 0 { // else it comes again
			c.flying = append(c.flying[:k], c.flying[k+1:]...)
		}
		if !faults || r.IntN(8) > 0 { // else it is lost
			c.apply(a)
		}
	case n < 5 && c.asked != nil:
		a := *c.asked
		c.asked = nil
		if !c.targetUp {
			c.step(Event{Kind: Failed, Number: a.Number, Failure: Unreachable})
			return
		}
		lacks := len(c.lacking())
		c.step(Event{Kind: Answered, Number: a.Number, Blocks: lacks, Bytes: int64(lacks) * blockBytes})
	case n < 8 && len(c.copies) > 0 && c.targetUp:
		for range min(20, len(c.copies)) {
			c.has[c.copies[0]] = true
			c.copies = c.copies[1:]
			c.moved++
		}
		if len(c.copies) == 0 {
			a, sent := c.copy, int64(c.moved)*blockBytes
			c.step(Event{Kind: Copied, Number: a.Number, Bytes: sent - c.m.progress.Sent})
		}
	case n == 8 && c.record.Phase != Frozen && c.record.Owner == nodeA && c.sourceUp && c.quorum:
		c.chain++ // the engine appends; the log takes it
	case n == 9 && faults:
		c.fault()
	default:
		if c.running && c.record.Phase >= Moving && c.record.Move != c.m.id || c.sourceUp && !c.running && c.record.Phase >= Moving && c.record.Owner == nodeA {
			c.restart()
			c.step(Event{Kind: Cancel, Text: "nobody moves it"})
		}
		if c.running && c.m.state.Ended() {
			c.running = false
		}
		c.step(Event{Kind: Tick})
	}
}

func (c *cluster) fault() {
	switch c.r.IntN(8) {
	case 0: // the source is killed
		c.sourceUp, c.running, c.asked, c.copies = false, false, nil, nil
	case 1:
		if !c.sourceUp {
			c.sourceUp = true
			c.restart()
		}
	case 2:
		c.targetUp = !c.targetUp
		if !c.targetUp && c.r.IntN(2) == 0 {
			c.step(Event{Kind: TargetUnfit, Text: "is down"})
		}
	case 3: // the leader is lost: what flies may come later, or not
		c.quorum = !c.quorum
	case 4:
		if c.r.IntN(4) == 0 {
			c.step(Event{Kind: Cancel, Text: "by an operator"})
		}
	case 5: // another node takes over from a dead owner
		if !c.sourceUp && c.quorum && TakesOver(c.record, nodeB, true) {
			c.record = Record{Phase: Active, Owner: nodeB, Epoch: c.record.Epoch + 1}
			c.owners[c.record.Epoch] = nodeB
		}
	case 6: // an answer that is late
		c.step(Event{Kind: []EventKind{Answered, Copied, Failed}[c.r.IntN(3)], Number: c.m.number - 1, Failure: NoRoom})
	case 7:
		c.lost = !c.lost
	}
}

func newCluster(t *testing.T, seed uint64) *cluster {
	c := &cluster{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 3)), now: start, quorum: true, sourceUp: true, targetUp: true,
		owners: map[placement.Epoch]placement.NodeID{1: nodeA}, has: map[int]bool{}, chain: 200, running: true}
	c.record = Record{Phase: Active, Owner: nodeA, Epoch: 1}
	for b := range c.chain {
		c.has[b] = c.r.IntN(3) == 0 // shared with others, or from an earlier move
	}
	var actions []Action
	c.m, actions = Start(placement.MoveID{1}, c.record, nodeB, Limits{}, c.now)
	c.do(actions)
	return c
}

// Whatever is killed, lost, late or doubled: at most one owner an epoch, no commit before
// the target has everything, and once faults end the session is active at the source at
// its epoch or at the target at the next one, within a bound.
func TestRandomMoves(t *testing.T) {
	ends := map[placement.NodeID]int{}
	for seed := range uint64(3000) {
		c := newCluster(t, seed)
		for range c.r.IntN(300) {
			c.turn(true)
		}
		c.quorum, c.targetUp, c.lost = true, true, false
		if !c.sourceUp {
			c.sourceUp = true
			c.restart()
		}
		turns := 0
		for ; turns < 6000 && (c.running || len(c.flying) > 0 || c.record.Phase != Active); turns++ {
			c.turn(false)
		}
		x := c.record
		if x.Phase != Active || c.running || (x.Owner != nodeA || x.Epoch != 1) && (x.Owner != nodeB || x.Epoch != 2) {
			t.Fatalf("seed %d: after %d turns without a fault: %+v, machine %v", seed, turns, x, c.m.Progress())
		}
		ends[x.Owner]++
	}
	if ends[nodeA] < 300 || ends[nodeB] < 300 {
		t.Errorf("ends %v: one of the two is not tested", ends)
	}
}

// Without a fault each byte that the target lacks is sent once.
func TestRandomMovesSendOnce(t *testing.T) {
	done := 0
	for seed := range uint64(300) {
		c := newCluster(t, seed)
		lacked := len(c.lacking())
		first := c.chain
		for turns := 0; c.running && turns < 5000; turns++ {
			c.turn(false)
		}
		p := c.m.Progress()
		lacked += c.chain - first
		if p.State == Done && (c.moved != lacked || p.Sent != int64(lacked)*blockBytes || p.Lacked != p.Sent) {
			t.Errorf("seed %d: %d blocks were lacking, %d were sent; %+v", seed, lacked, c.moved, p)
		}
		if p.State != Done && p.State != Aborted {
			t.Fatalf("seed %d: %+v", seed, p)
		}
		if p.State == Done {
			done++
		}
	}
	if done < 200 {
		t.Errorf("only %d of 300 moves without a fault were done", done)
	}
}

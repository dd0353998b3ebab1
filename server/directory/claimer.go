package directory

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// Inventory is what this node really holds: the truth that its claims follow.
// Its methods are safe for concurrent use.
type Inventory interface {
	// Held calls f with each block of the named buckets that the node holds and
	// wants claimed, and its parts. A block that changes meanwhile may be seen in
	// either state, if Claimer.Set is called for it afterwards.
	Held(buckets *Buckets, f func(placement.BlockKey, paging.PartSet))
}

// ClaimerConfig of a Claimer. Zero values mean the documented default.
type ClaimerConfig struct {
	Directory *Directory
	Self      *kvtierv1.JoinNode // what this node says of itself; its incarnation is this start's
	Inventory Inventory

	// Gather is the time for which changes are gathered into a batch. 0: 5 ms.
	Gather time.Duration
	// CompareEvery is the time after which digests are compared although nothing
	// is known to be missing. 0: 10 min.
	CompareEvery time.Duration
	Logger       *slog.Logger // state changes only; nil: none
}

// Bounds of a Claimer.
const (
	maxPending   = 1 << 20         // changes that wait; beyond it they are dropped and found by comparing
	compareMost  = 5 * time.Second // Suspect compares at most this often
	repairPause  = 50 * time.Millisecond
	proposeFor   = 10 * time.Second
	lookEvery    = 2 * time.Second // at this node's own record
	catchUpEvery = 5 * time.Millisecond
	gapPatience  = time.Second // for the replica to show what this node sent, where it may never
)

// Claimer keeps the directory's claims of this node equal to its inventory. One
// batch is in flight at a time and is proposed again, the same, until its fate
// is known; of a block that changes often only the last state is sent. What was
// missed, by a gap, a new start or an overflow, is found by comparing digests,
// and only the buckets that differ are sent.
//
// Set and Suspect may be called from many goroutines and never wait.
type Claimer struct {
	cfg    ClaimerConfig
	self   placement.NodeID
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	loop   sync.WaitGroup
	wake   chan struct{}

	// Owned by the loop.
	joined   bool
	sequence uint64
	gapped   bool // the directory has not what was sent last: its sequence is to be set
	compared time.Time

	mu      sync.Mutex
	pending map[placement.BlockKey]paging.PartSet
	compare bool // digests are to be compared
	doubt   bool // the directory may hold an older record of this node
	metrics ClaimerMetrics
}

// ClaimerMetrics counts since the start.
type ClaimerMetrics struct {
	Pending         int64 // changes that wait
	Batches         int64 // applied
	Changes         int64 // in them
	Full            int64 // batches of which some claims found no room in the claim budget
	Gaps            int64 // batches that were refused because others were missing
	Compares        int64 // comparisons of digests
	RepairedBuckets int64
	Overflows       int64 // changes that were dropped because too many waited
	Refused         int64 // batches of a start that is not the newest
}

// NewClaimer starts to claim: it makes the node known, then compares.
func NewClaimer(cfg ClaimerConfig) (*Claimer, error) {
	self, ok := toNodeID(cfg.Self.GetNode())
	if !ok || cfg.Self.GetIncarnation() == 0 || cfg.Directory == nil || cfg.Inventory == nil {
		return nil, fmt.Errorf("claimer: a node id, an incarnation, a directory and an inventory are needed: %w", paging.ErrInvalid)
	}
	if cfg.Gather == 0 {
		cfg.Gather = 5 * time.Millisecond
	}
	if cfg.CompareEvery == 0 {
		cfg.CompareEvery = 10 * time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Claimer{cfg: cfg, self: self, wake: make(chan struct{}, 1), pending: map[placement.BlockKey]paging.PartSet{}, compare: true}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	replaced := c.replaced
	cfg.Directory.replaced.Store(&replaced)
	c.loop.Go(c.run) // owner: Claimer; exits at Close
	return c, nil
}

// Close stops claiming; what waits is not sent. Idempotent.
func (c *Claimer) Close() {
	c.cfg.Directory.replaced.Store(nil)
	c.cancel()
	c.loop.Wait()
}

// Set says which parts of a block the node holds now; none: it holds it no more.
func (c *Claimer) Set(k placement.BlockKey, parts paging.PartSet) {
	c.mu.Lock()
	if _, known := c.pending[k]; known || len(c.pending) < maxPending {
		c.pending[k] = parts
	} else {
		c.compare = true
		c.metrics.Overflows++
	}
	c.mu.Unlock()
	c.signal()
}

// Suspect says that a claim of this node turned out wrong: digests are compared
// soon.
func (c *Claimer) Suspect() {
	c.mu.Lock()
	c.compare = true
	c.mu.Unlock()
	c.signal()
}

// replaced says that the directory's state is another, perhaps an older one that
// somebody restored.
func (c *Claimer) replaced() {
	c.mu.Lock()
	c.compare, c.doubt = true, true
	c.mu.Unlock()
	c.signal()
}

// dispel finds out, where there is a doubt, whether the directory still knows what
// this start of the node sent: an empty batch that it takes says so. One that is
// not the next, or of a start that it does not know, shows an older record.
func (c *Claimer) dispel() error {
	c.mu.Lock()
	doubt := c.doubt
	c.doubt = false
	c.mu.Unlock()
	if !doubt || !c.joined {
		return nil
	}
	return c.send(nil, 0)
}

// look notices in the local replica that this node was taken for dead: its claims
// were dropped, or its record removed. A node that has nothing to say would not
// hear of it.
func (c *Claimer) look() {
	if !c.joined {
		return
	}
	removed, dropped := false, false
	c.cfg.Directory.Read(func(s *State) {
		n := s.nodes[c.self]
		removed = n == nil || uint64(n.Incarnation) != c.cfg.Self.GetIncarnation()
		dropped = !removed && n.Gap && n.Sequence == c.sequence // else the replica is behind
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doubt = c.doubt || removed
	if dropped {
		c.gapped, c.compare = true, true
	}
}

// Metrics counts what happened.
func (c *Claimer) Metrics() ClaimerMetrics {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.metrics
	m.Pending = int64(len(c.pending))
	return m
}

func (c *Claimer) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *Claimer) run() {
	for c.ctx.Err() == nil {
		err := c.round()
		switch {
		case err == nil:
			c.await()
		case errors.Is(err, paging.ErrUnavailable):
			c.sleep(retryMost) // no quorum: what waits is kept
		default:
			c.cfg.Logger.Error("claims are not made", "err", err)
			c.sleep(compareMost)
		}
	}
}

// round brings the directory nearer to the inventory until nothing waits.
func (c *Claimer) round() error {
	c.look()
	if err := c.dispel(); err != nil {
		return err
	}
	if !c.joined {
		if err := c.join(); err != nil {
			return err
		}
	}
	for c.ctx.Err() == nil && c.joined {
		if c.compareDue() {
			if err := c.reconcile(); err != nil {
				c.Suspect()
				return err
			}
			continue
		}
		changes, n := c.take()
		if n == 0 {
			return nil
		}
		if err := c.send(changes, n); err != nil {
			return err
		}
	}
	return nil
}

// join makes this start known. Its batches are numbered from 1.
func (c *Claimer) join() error {
	r, err := c.propose(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_JoinNode{JoinNode: c.cfg.Self}})
	if err != nil {
		return err
	}
	if r != OK {
		c.count(func(m *ClaimerMetrics) { m.Refused++ })
		return fmt.Errorf("node %s in incarnation %d is refused by the directory (%v): another process has its identity, or its data directory is older than the cluster's record: %w",
			c.self.Short(), c.cfg.Self.GetIncarnation(), r, paging.ErrDenied)
	}
	c.joined, c.sequence, c.gapped = true, 0, false
	c.Suspect()
	c.compared = time.Time{}
	return nil
}

func (c *Claimer) propose(cmd *kvtierv1.DirectoryCommand) (Result, error) {
	ctx, cancel := context.WithTimeout(c.ctx, proposeFor)
	defer cancel()
	return c.cfg.Directory.Propose(ctx, cmd)
}

func (c *Claimer) count(f func(*ClaimerMetrics)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.metrics)
}

// take moves changes that wait into a batch.
func (c *Claimer) take() (changes []byte, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	changes = make([]byte, 0, min(len(c.pending), MaxBatchChanges)*changeBytes)
	for k, parts := range c.pending {
		if n == MaxBatchChanges {
			break
		}
		changes = AppendChange(changes, k, parts)
		delete(c.pending, k)
		n++
	}
	return changes, n
}

// send proposes a batch until its fate is known.
func (c *Claimer) send(changes []byte, n int) error {
	cmd := &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ClaimBatch{ClaimBatch: &kvtierv1.ClaimBatch{
		Node: c.self[:], Incarnation: c.cfg.Self.GetIncarnation(), Sequence: c.sequence + 1, Changes: changes,
	}}}
	for c.ctx.Err() == nil {
		r, err := c.propose(cmd)
		if errors.Is(err, paging.ErrUnavailable) {
			continue // the same batch again: it may have been applied
		}
		if err != nil {
			return err
		}
		return c.sent(r, n)
	}
	return nil
}

// sent notes what became of an entry with the next sequence.
func (c *Claimer) sent(r Result, n int) error {
	switch r {
	case OK, Full:
		c.sequence++
		c.count(func(m *ClaimerMetrics) {
			m.Batches++
			m.Changes += int64(n)
			if r == Full {
				m.Full++
			}
		})
		return nil
	case Gap:
		c.count(func(m *ClaimerMetrics) { m.Gaps++ })
		c.gapped = true
		c.Suspect() // what was in the batch is in the inventory: comparing finds it
		c.compared = time.Time{}
		return nil
	case Unknown, Stale:
		c.joined = false
		c.signal() // it joins again, and compares
		return nil
	}
	return fmt.Errorf("claims refused by the directory: %v: %w", r, paging.ErrInvalid)
}

// compareDue reports whether digests are to be compared now, and takes the wish.
func (c *Claimer) compareDue() bool {
	since := time.Since(c.compared)
	c.mu.Lock()
	defer c.mu.Unlock()
	if (!c.compare || since < compareMost) && since < c.cfg.CompareEvery {
		return false
	}
	c.compare = false
	// Everything that waits is in the inventory by now.
	clear(c.pending)
	return true
}

// reconcile compares digests and sends the buckets that differ.
func (c *Claimer) reconcile() error {
	theirs, err := c.catchUp()
	if err != nil {
		return err
	}
	c.compared = time.Now()
	c.count(func(m *ClaimerMetrics) { m.Compares++ })
	var all, ours = Buckets{}, [bucketCount]uint64{}
	for i := range all {
		all[i] = true
	}
	c.cfg.Inventory.Held(&all, func(k placement.BlockKey, parts paging.PartSet) {
		bucket, contribution := ClaimDigest(k, parts)
		ours[bucket] ^= contribution
	})
	var differ []int
	for i := range ours {
		if theirs == nil || ours[i] != theirs[i] {
			differ = append(differ, i)
		}
	}
	for (len(differ) > 0 || c.gapped) && c.ctx.Err() == nil && c.joined {
		n, err := c.repair(differ)
		if err != nil {
			return err
		}
		if differ = differ[n:]; len(differ) > 0 {
			c.sleep(repairPause) // a bounded share of what the directory can take
		}
	}
	return nil
}

// catchUp waits until the local replica has applied all that this node sent, and
// returns its digests. A record with a later sequence is one that was removed since:
// the replica has not heard of that yet. nil: the record has a gap, and does not come to
// what was sent: it is an older one that somebody restored, or the replica stays behind,
// so that nothing can be said of any bucket.
func (c *Claimer) catchUp() (*[bucketCount]uint64, error) {
	tick := time.NewTicker(catchUpEvery)
	defer tick.Stop()
	begun := time.Now()
	for time.Since(begun) < proposeFor {
		var digests *[bucketCount]uint64
		gap := false
		c.cfg.Directory.Read(func(s *State) {
			n := s.nodes[c.self]
			if n == nil || uint64(n.Incarnation) != c.cfg.Self.GetIncarnation() {
				return
			}
			if gap = n.Gap; n.Sequence == c.sequence {
				digests, _ = s.Digests(c.self)
			}
		})
		if digests != nil || c.gapped && gap && time.Since(begun) >= gapPatience {
			return digests, nil
		}
		select {
		case <-c.ctx.Done():
			return nil, paging.ErrClosed
		case <-tick.C:
		}
	}
	return nil, fmt.Errorf("the local replica of the directory is behind: %w", paging.ErrUnavailable)
}

// bucketsRead is how many buckets one look at the inventory collects: a look costs
// the same for one as for many, and what it collects has to be kept.
const bucketsRead = 64

// repair sends the claims of some of the first buckets, in as many entries as they
// take, and returns how many buckets those were.
func (c *Claimer) repair(buckets []int) (int, error) {
	buckets = buckets[:min(len(buckets), bucketsRead)]
	var named Buckets
	for _, b := range buckets {
		named[b] = true
	}
	claims := map[int][]byte{}
	c.cfg.Inventory.Held(&named, func(k placement.BlockKey, parts paging.PartSet) {
		b, _ := ClaimDigest(k, parts)
		claims[b] = AppendChange(claims[b], k, parts)
	})
	// What changes after the look waits in pending, and is sent after this.
	for sent := 0; ; c.sleep(repairPause) { // a bounded share of what the directory can take
		n, err := c.repairSome(buckets[sent:], claims)
		if sent += n; err != nil || sent == len(buckets) || !c.joined || c.ctx.Err() != nil {
			return sent, err
		}
	}
}

// repairSome sends the claims of as many of the first buckets as fit into one entry,
// and returns how many those were.
func (c *Claimer) repairSome(buckets []int, perBucket map[int][]byte) (int, error) {
	entry := &kvtierv1.ClaimRepair{Node: c.self[:], Incarnation: c.cfg.Self.GetIncarnation(), Sequence: c.sequence + 1, ResetsSequence: true}
	n := 0
	for _, b := range buckets {
		claims := perBucket[b][:min(len(perBucket[b]), MaxBatchBytes/changeBytes*changeBytes)]
		if n > 0 && len(entry.Claims)+len(claims) > MaxBatchBytes {
			break
		}
		entry.Buckets = binary.LittleEndian.AppendUint16(entry.Buckets, uint16(b))
		entry.Claims = append(entry.Claims, claims...)
		n++
	}
	cmd := &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ClaimRepair{ClaimRepair: entry}}
	for c.ctx.Err() == nil {
		r, err := c.propose(cmd)
		if errors.Is(err, paging.ErrUnavailable) {
			continue
		}
		if err == nil {
			c.gapped = false // it sets the sequence
			err = c.sent(r, len(entry.Claims)/changeBytes)
			c.count(func(m *ClaimerMetrics) { m.RepairedBuckets += int64(n) })
		}
		return n, err
	}
	return n, nil
}

// await waits for something to do, and then for more of it to gather.
func (c *Claimer) await() {
	wait := c.cfg.CompareEvery
	c.mu.Lock()
	if c.compare {
		wait = compareMost
	}
	c.mu.Unlock()
	timer := time.NewTimer(min(max(0, wait-time.Since(c.compared)), lookEvery))
	defer timer.Stop()
	select {
	case <-c.ctx.Done():
	case <-timer.C:
	case <-c.wake:
		c.sleep(c.cfg.Gather)
	}
}

func (c *Claimer) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c.ctx.Done():
	case <-timer.C:
	}
}

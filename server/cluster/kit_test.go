package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/cluster/clustertest"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const pageBytes = 4096

// world is a cluster under test, in fake time.
type world struct {
	t       *testing.T
	f       *clustertest.Fabric
	g       *clustertest.Gossip
	ns      *paging.Namespace // one part
	id      paging.NamespaceID
	tp      *paging.Namespace // two parts, which different nodes write
	tpID    paging.NamespaceID
	nodes   []*machine
	ramMiB  int64
	diskMiB int64
	grace   time.Duration
	down    time.Duration
}

// machine is one node and what outlives its process: its identity, its disk, its
// log.
type machine struct {
	w           *world
	i           int
	id          placement.NodeID
	incarnation placement.Incarnation
	log         *directory.Memory
	disk        *tiertest.Map
	faulty      *tiertest.Faulty
	skew        time.Duration // of its clock; guarded by mu
	ram         *ram.Arena

	mu   sync.Mutex
	h    *tier.Hierarchy
	n    *Node
	up   bool
	ops  *sync.WaitGroup // calls of h that run, and the loop of its Tick
	stop chan struct{}
}

// newWorld makes a cluster of so many nodes, all of them up, and waits until the
// first leads.
func newWorld(t *testing.T, nodes int, change func(*world)) *world {
	t.Helper()
	w := &world{t: t, f: clustertest.NewFabric(), ns: tiertest.Namespace(1), tp: tiertest.Namespace(2), ramMiB: 1, diskMiB: 4}
	w.tp.Layout.TP = 2
	w.tp.Layout.Parts = []paging.Part{{Name: "rank0", PageBytes: pageBytes, BlocksPerPage: 1}, {Name: "rank1", PageBytes: pageBytes, BlocksPerPage: 1}}
	w.id, w.tpID = w.ns.ID(), w.tp.ID()
	if change != nil {
		change(w)
	}
	w.g = clustertest.NewGossip(w.f, 1)
	for i := range nodes {
		w.nodes = append(w.nodes, &machine{
			w: w, i: i, id: placement.NodeID{byte(i + 1)}, log: directory.NewMemory(), disk: tiertest.NewMap(tier.NVMe, w.diskMiB<<20),
		})
	}
	t.Cleanup(func() {
		for _, m := range w.nodes {
			m.log.Hang(false)
			m.crash()
			m.disk.Close()
		}
	})
	for _, m := range w.nodes {
		m.start()
		if m.i == 0 {
			w.eventually(10*time.Second, "a first leader", func() bool { _, ok := m.n.replica().Leader(); return ok })
		}
	}
	return w
}

// inWorld runs a test with a cluster in fake time.
func inWorld(t *testing.T, nodes int, change func(*world), test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nodes, change)
		w.voters(map[int]int{1: 1, 2: 1, 3: 3, 4: 3, 5: 3}[nodes])
		test(t, w)
	})
}

// start runs the node's process.
func (m *machine) start() {
	m.w.t.Helper()
	if m.disk.Usage().State == tier.Closed {
		m.disk = m.disk.Reopen()
	}
	m.log.Hang(false) // a start on a log disk that hangs waits for it
	m.incarnation++
	m.faulty = &tiertest.Faulty{Durable: m.disk}
	budget := m.w.ramMiB << 20
	arena, err := ram.Open(context.Background(), ram.Config{BudgetBytes: budget, ExtentBytes: budget, StagingBytes: -1, MaxPageBytes: pageBytes})
	if err != nil {
		m.w.t.Fatal(err)
	}
	var log *slog.Logger
	if os.Getenv("KVTIER_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("at", m.i)
	}
	address := fmt.Sprintf("10.0.0.%d:7441", m.i+1)
	n, err := New(Config{
		ID: m.id, Incarnation: m.incarnation, Name: fmt.Sprint("node", m.i), Cluster: "test", Bootstrap: m.i == 0, Memory: m.log, Clock: m.now,
		PeerListen: address, Network: m.w.f.Port(m.i), GraceTime: m.w.grace, DownAfter: m.w.down, Logger: log,
		Gossip: func(peer string) (Members, error) {
			return m.w.g.Join(m.i, placement.NodeInfo{ID: m.id, Incarnation: m.incarnation, Name: fmt.Sprint("node", m.i), PeerAddress: peer}), nil
		},
	})
	if err != nil {
		m.w.t.Fatal(err)
	}
	h, err := tier.Open(context.Background(), tier.Config{Arena: arena, Durable: m.faulty, Peers: n, Observed: true})
	if err != nil {
		m.w.t.Fatal(err)
	}
	for _, ns := range []*paging.Namespace{m.w.ns, m.w.tp} {
		if _, err := h.RegisterNamespace(ns); err != nil {
			m.w.t.Fatal(err)
		}
	}
	if err := n.Start(h); err != nil {
		m.w.t.Fatal(err)
	}
	n.Announce(m.w.ns)
	n.Announce(m.w.tp)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ram, m.h, m.n, m.up, m.ops, m.stop = arena, h, n, true, new(sync.WaitGroup), make(chan struct{})
	m.ops.Go(func() { tickLoop(h, m.stop) })
}

func tickLoop(h *tier.Hierarchy, stop <-chan struct{}) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			h.Tick()
		case <-stop:
			return
		}
	}
}

// crash ends the node's process: what is only in RAM is lost.
func (m *machine) crash() { m.end(0) }

// leave ends it in good order: what is only in RAM is written down.
func (m *machine) leave() { m.end(10 * time.Second) }

func (m *machine) end(write time.Duration) {
	m.mu.Lock()
	up := m.up
	m.up = false
	m.mu.Unlock()
	if !up {
		return
	}
	if err := m.n.Close(); err != nil && !errors.Is(err, paging.ErrIO) {
		m.w.t.Errorf("close node %d: %v", m.i, err)
	}
	close(m.stop)
	m.ops.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), write)
	defer cancel()
	if err := m.h.Close(ctx); err != nil {
		m.w.t.Errorf("close the tiers of node %d: %v", m.i, err)
	}
	if err := errors.Join(m.disk.Close(), m.ram.Close()); err != nil {
		m.w.t.Error(err)
	}
}

// enter begins a call of the node's tiers; false: the node is down.
func (m *machine) enter() (h *tier.Hierarchy, leave func(), ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.up {
		return nil, nil, false
	}
	m.ops.Add(1)
	return m.h, m.ops.Done, true
}

func (m *machine) isUp() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.up
}

// now is the node's clock.
func (m *machine) now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Add(m.skew)
}

func (m *machine) setSkew(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.skew = d
}

// eventually waits in fake time.
func (w *world) eventually(within time.Duration, what string, ok func() bool) time.Duration {
	w.t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > within {
			w.t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return time.Since(start)
}

func (w *world) up() (out []*machine) {
	for _, m := range w.nodes {
		if m.isUp() {
			out = append(out, m)
		}
	}
	return out
}

// leader is the node that all who are up follow.
func (w *world) leader(within time.Duration) (leader *machine) {
	w.t.Helper()
	w.eventually(within, "one leader", func() bool {
		leader = nil
		for _, m := range w.up() {
			id, ok := m.n.replica().Leader()
			if !ok || leader != nil && leader.id != id {
				return false
			}
			leader = w.nodes[id[0]-1]
		}
		return leader != nil && leader.isUp()
	})
	return leader
}

// voters waits until so many nodes vote.
func (w *world) voters(n int) {
	w.t.Helper()
	w.eventually(30*time.Second, fmt.Sprint(n, " voters"), func() bool { return w.leader(20*time.Second).n.replica().Status().Voters == n })
}

// differs says in what the directory at a node differs from what another holds; "":
// in nothing.
func (m *machine) differs(owner *machine) (difference string) {
	var held []tier.HeldBlock
	owner.h.HeldBlocks(func(b tier.HeldBlock) { held = append(held, b) })
	m.n.replica().Read(func(s *directory.State) {
		var rec directory.Node
		for _, x := range s.Nodes() {
			if x.ID == owner.id {
				rec = x
			}
		}
		if rec.Claims != int64(len(held)) || rec.Incarnation != owner.incarnation {
			difference = fmt.Sprintf("node %d has %d claims of node %d in incarnation %d, which holds %d in incarnation %d",
				m.i, rec.Claims, owner.i, rec.Incarnation, len(held), owner.incarnation)
			return
		}
		for _, b := range held {
			if claimed := claimOf(s, ClaimKey(b.ID.Namespace, b.ID.Name), owner.id); claimed != b.Parts {
				difference = fmt.Sprintf("node %d has parts %b of block %s claimed by node %d, which holds %b", m.i, claimed, b.ID.Name.Short(), owner.i, b.Parts)
				return
			}
		}
	})
	return difference
}

func claimOf(s *directory.State, k placement.BlockKey, node placement.NodeID) paging.PartSet {
	for _, h := range s.Locate(k, nil) {
		if h.Node == node {
			return h.Parts
		}
	}
	return 0
}

// repairPeriod is the time in which the directory becomes equal to what is held once
// nothing disturbs it: an election, a comparison every 5 s, and gossip.
const repairPeriod = 20 * time.Second

// settle waits until every replica equals what the nodes hold.
func (w *world) settle() {
	w.t.Helper()
	var last string
	start := time.Now()
	for {
		last = ""
		for _, m := range w.up() {
			for _, owner := range w.up() {
				if d := m.differs(owner); d != "" {
					last = d
				}
			}
		}
		if last == "" {
			return
		}
		if time.Since(start) > repairPeriod {
			w.t.Fatalf("the directory does not equal what is held after %v: %s", repairPeriod, last)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// chain names blocks first to first+n of chain c.
func chain(c, first, n int) []paging.BlockName {
	names := make([]paging.BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(c)<<32|uint64(first+i))
		names[i][31] = 1
	}
	return names
}

// page is what a writer's copy of a page holds: every writer computes other bytes,
// and all are right.
func (w *world) page(ns paging.NamespaceID, name paging.BlockName, part, writer int) []byte {
	b := make([]byte, pageBytes)
	tiertest.FillPage(b, ns, pageNumber(name, part, writer))
	return b
}

func pageNumber(name paging.BlockName, part, writer int) uint64 {
	return binary.LittleEndian.Uint64(name[:])<<8 | uint64(part)<<4 | uint64(writer)
}

// right checks that bytes are one writer's whole copy of a page.
func (w *world) right(ns paging.NamespaceID, name paging.BlockName, part int, b []byte) error {
	if len(b) != pageBytes {
		return fmt.Errorf("%d bytes", len(b))
	}
	writer := int(binary.LittleEndian.Uint64(b) & 15)
	if string(b) != string(w.page(ns, name, part, writer)) {
		return fmt.Errorf("wrong bytes of part %d of block %s", part, name.Short())
	}
	return nil
}

// put stores a chain's blocks at a node, by the node itself as their writer. It
// returns how many are stored there now.
func (m *machine) put(ns paging.NamespaceID, names []paging.BlockName, first int, parts paging.PartSet) int {
	h, leave, ok := m.enter()
	if !ok {
		return 0
	}
	defer leave()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	a, out, _, err := h.Reserve(ctx, tier.ReserveRequest{Namespace: ns, Names: names, First: first, Parts: parts, Deadline: time.Now().Add(time.Minute)})
	stored := 0
	for _, o := range out {
		if o == tier.Exists {
			stored++
		}
	}
	if err != nil || a == nil {
		return stored
	}
	defer a.Abort()
	var rows []tier.CommitRow
	for i, o := range out {
		if o != tier.Granted {
			continue
		}
		r := tier.CommitRow{Row: i}
		for part := range 2 {
			if !parts.Has(part) {
				continue
			}
			var b []byte
			if a.Parts(i).Has(part) {
				b = m.w.page(ns, names[i], part, m.i)
			}
			r.Src = append(r.Src, b)
		}
		rows = append(rows, r)
	}
	got, err := a.Commit(ctx, rows, tier.CommitOptions{})
	if err != nil {
		return stored
	}
	for _, o := range got {
		if o == tier.Committed || o == tier.Duplicate || o == tier.DuplicateDivergent {
			stored++
		}
	}
	return stored
}

// fetched is what a fetch gave.
type fetched struct {
	usable int
	tiers  []tier.Kind
	short  []tier.Shortfall
	took   time.Duration
}

// fetch fetches, checks every byte, and gives the pages back. It fails only where
// the node is down.
func (m *machine) fetch(req tier.FetchRequest, within time.Duration) (fetched, bool) {
	h, leave, ok := m.enter()
	if !ok {
		return fetched{}, false
	}
	defer leave()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	start := time.Now()
	hold, err := h.Fetch(ctx, req)
	took := time.Since(start)
	if err != nil {
		if m.isUp() {
			m.w.t.Errorf("a Fetch at node %d failed: %v", m.i, err)
		}
		return fetched{}, false
	}
	defer hold.Release()
	for row := range hold.Tiers {
		col := 0
		for part := range 2 {
			if !hold.Parts.Has(part) {
				continue
			}
			if b := hold.Page(row, col); b != nil {
				if err := m.w.right(req.Namespace, req.Names[row], part, b); err != nil {
					m.w.t.Errorf("node %d, row %d: %v", m.i, row, err)
				}
				if slot := hold.Slots[row*hold.Columns+col]; slot.Sum != paging.Checksum(b) {
					m.w.t.Errorf("node %d, row %d: the slot's checksum is not that of its page", m.i, row)
				}
			}
			col++
		}
	}
	return fetched{hold.Usable, hold.Tiers, hold.Short, took}, true
}

// usable is the prefix that a node gets.
func (m *machine) usable(ns paging.NamespaceID, names []paging.BlockName) int {
	got, _ := m.fetch(tier.FetchRequest{Namespace: ns, Names: names}, 5*time.Second)
	return got.usable
}

// union is the usable prefix over what all nodes hold that are up.
func (w *world) union(ns paging.NamespaceID, names []paging.BlockName, all paging.PartSet) int {
	parts := make([]paging.PartSet, len(names))
	for _, m := range w.up() {
		held, _, err := m.h.Held(ns, names, 0)
		if err != nil {
			w.t.Fatal(err)
		}
		for i := range held {
			parts[i] |= held[i]
		}
	}
	for i := range parts {
		if parts[i] != all {
			return i
		}
	}
	return len(names)
}

// pick is a random one.
func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// sleep lets fake time pass.
func (w *world) sleep(d time.Duration) { time.Sleep(d) }

package plans

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/cluster/clustertest"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/sessions"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	pageBytes = 4096
	ramBytes  = 4 << 20
	diskBytes = 16 << 20
)

// world is a cluster with sessions and plans, in fake time.
type world struct {
	t     *testing.T
	f     *clustertest.Fabric
	g     *clustertest.Gossip
	ns    *paging.Namespace
	id    paging.NamespaceID
	nodes []*machine
}

// machine is one node and what outlives its process.
type machine struct {
	w           *world
	i           int
	id          placement.NodeID
	incarnation placement.Incarnation
	log         *directory.Memory
	disk        *tiertest.Map
	fs          *vfs.MemFS
	up          bool

	ram   *ram.Arena
	h     *tier.Hierarchy
	n     *cluster.Node
	store *sessions.Store
	m     *sessions.Manager
	r     *Runner
}

// inWorld runs a test with a cluster of so many nodes.
func inWorld(t *testing.T, nodes int, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, f: clustertest.NewFabric(), ns: tiertest.Namespace(1)}
		w.ns.Tenant = "t"
		w.id = w.ns.ID()
		w.g = clustertest.NewGossip(w.f, 1)
		for i := range nodes {
			w.nodes = append(w.nodes, &machine{
				w: w, i: i, id: placement.NodeID{byte(i + 1)}, log: directory.NewMemory(), disk: tiertest.NewMap(tier.NVMe, diskBytes), fs: vfs.NewMem(),
			})
		}
		t.Cleanup(func() {
			for _, m := range w.nodes {
				m.crash()
			}
		})
		for _, m := range w.nodes {
			m.start()
			if m.i == 0 {
				w.eventually(10*time.Second, "a first leader", func() bool { _, ok := m.n.Directory().Leader(); return ok })
			}
		}
		voters := map[int]int{1: 1, 2: 1, 3: 3, 4: 3, 5: 3}[nodes]
		w.eventually(30*time.Second, "voters", func() bool { return w.nodes[0].n.Directory().Status().Voters == voters })
		w.eventually(10*time.Second, "all nodes", func() bool {
			for _, m := range w.nodes {
				for _, other := range w.nodes {
					if m.state(other) != nodeUp || m != other && !m.n.Reachable(other.id) {
						return false
					}
				}
			}
			return true
		})
		test(t, w)
	})
}

func (m *machine) start() {
	m.w.t.Helper()
	if m.disk.Usage().State == tier.Closed {
		m.disk = m.disk.Reopen()
	}
	m.incarnation++
	must := func(err error) {
		m.w.t.Helper()
		if err != nil {
			m.w.t.Fatal(err)
		}
	}
	var err error
	m.ram, err = ram.Open(context.Background(), ram.Config{BudgetBytes: ramBytes, ExtentBytes: ramBytes, StagingBytes: -1, MaxPageBytes: pageBytes})
	must(err)
	var log *slog.Logger
	if os.Getenv("KVTIER_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("at", m.i)
	}
	m.store, err = sessions.OpenStore("names", m.fs)
	must(err)
	m.m = sessions.New(sessions.Config{Self: m.id, Store: m.store, Logger: log})
	m.r = New(Config{Self: m.id, Mover: m.m, Logger: log, Tiers: func() (budget, used placement.TierBytes) {
		return placement.TierBytes{0, ramBytes, diskBytes}, placement.TierBytes{0, m.ram.Usage().PageBytes, m.disk.Usage().PageBytes}
	}})
	answers := m.m.Answers()
	for k, a := range m.r.Answers() {
		answers[k] = a
	}
	m.n, err = cluster.New(cluster.Config{
		ID: m.id, Incarnation: m.incarnation, Name: fmt.Sprint("node", m.i), Cluster: "test", Bootstrap: m.i == 0, Memory: m.log,
		PeerListen: fmt.Sprintf("10.0.0.%d:7441", m.i+1), Network: m.w.f.Port(m.i), Answers: answers, Logger: log,
		Gossip: func(peer string) (cluster.Members, error) {
			return m.w.g.Join(m.i, placement.NodeInfo{ID: m.id, Incarnation: m.incarnation, Name: fmt.Sprint("node", m.i), PeerAddress: peer}), nil
		},
	})
	must(err)
	m.h, err = tier.Open(context.Background(), tier.Config{Arena: m.ram, Durable: m.disk, Peers: m.n, Observed: true})
	must(err)
	_, err = m.h.RegisterNamespace(m.w.ns)
	must(err)
	must(m.n.Start(m.h))
	m.n.Announce(m.w.ns)
	m.m.Start(m.n, m.h)
	m.r.Start(m.n, m.h)
	m.up = true
}

// crash ends the node's process: what is only in RAM is lost.
func (m *machine) crash() {
	if !m.up {
		return
	}
	m.up = false
	m.r.Close()
	m.m.Close()
	if err := m.n.Close(); err != nil && !errors.Is(err, paging.ErrIO) {
		m.w.t.Errorf("close node %d: %v", m.i, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := m.h.Close(ctx); err != nil {
		m.w.t.Errorf("close the tiers of node %d: %v", m.i, err)
	}
	if err := errors.Join(m.disk.Close(), m.ram.Close(), m.store.Close()); err != nil {
		m.w.t.Error(err)
	}
}

// eventually waits in fake time.
func (w *world) eventually(within time.Duration, what string, ok func() bool) {
	w.t.Helper()
	for start := time.Now(); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Since(start) > within {
			w.t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// state is how a node has another one.
func (m *machine) state(other *machine) (state kvtierv1.NodeState) {
	m.n.Directory().Read(func(s *directory.State) {
		n, _ := s.Node(other.id)
		state = n.State
	})
	return state
}

func chain(c, n int) []paging.BlockName {
	names := make([]paging.BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(c)<<32|uint64(i))
		names[i][31] = 1
	}
	return names
}

func pageOf(ns paging.NamespaceID, name paging.BlockName) []byte {
	b := make([]byte, pageBytes)
	tiertest.FillPage(b, ns, binary.LittleEndian.Uint64(name[:]))
	return b
}

// put stores a chain at a node, and waits until the others know.
func (m *machine) put(c, n int) {
	m.w.t.Helper()
	names := chain(c, n)
	for first := 0; first < n; first += 256 {
		step := names[first:min(n, first+256)]
		a, out, _, err := m.h.Reserve(context.Background(), tier.ReserveRequest{Namespace: m.w.id, Names: step, First: first, Deadline: time.Now().Add(time.Minute)})
		if err != nil {
			m.w.t.Fatal(err)
		}
		if a == nil {
			continue
		}
		var rows []tier.CommitRow
		for i, o := range out {
			if o == tier.Granted {
				rows = append(rows, tier.CommitRow{Row: i, Src: [][]byte{pageOf(m.w.id, step[i])}})
			}
		}
		if _, err := a.Commit(context.Background(), rows, tier.CommitOptions{}); err != nil {
			m.w.t.Fatal(err)
		}
		a.Abort()
	}
	m.w.eventually(10*time.Second, "claims", func() bool {
		all := true
		for _, other := range m.w.nodes {
			if !other.up {
				continue
			}
			other.n.Directory().Read(func(s *directory.State) {
				for _, name := range names {
					all = all && len(s.Locate(cluster.ClaimKey(m.w.id, name), nil)) > 0
				}
			})
		}
		return all
	})
}

// fetch is how many blocks of a chain a node gets, from wherever they are, every byte of
// them checked.
func (m *machine) fetch(c, n int) int {
	m.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	names := chain(c, n)
	hold, err := m.h.Fetch(ctx, tier.FetchRequest{Namespace: m.w.id, Names: names})
	if err != nil {
		m.w.t.Fatal(err)
	}
	defer hold.Release()
	for row := range hold.Usable {
		if b := hold.Page(row, 0); b != nil && !bytes.Equal(b, pageOf(m.w.id, names[row])) {
			m.w.t.Errorf("node %d: wrong bytes of block %d of chain %d", m.i, row, c)
		}
	}
	return hold.Usable
}

// session opens a session at a node with a chain of its own.
func (m *machine) session(name string, c, n int) {
	m.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	m.put(c, n)
	if _, err := m.m.Open(ctx, &kvtierv1.OpenSessionRequest{Session: name, Tenant: "t", NamespaceId: m.w.id[:]}); err != nil {
		m.w.t.Fatal(err)
	}
	var packed []byte
	for _, x := range chain(c, n) {
		packed = append(packed, x[:]...)
	}
	if _, err := m.m.Append(ctx, &kvtierv1.AppendSessionRequest{Session: name, Tenant: "t", BlockNames: packed}); err != nil {
		m.w.t.Fatal(err)
	}
}

// owner is the node that owns a session, as a node has it.
func (m *machine) owner(name string) *machine {
	at, known := m.r.session("t/" + name)
	if !known {
		return nil
	}
	return m.w.nodes[at.owner[0]-1]
}

// drain begins to empty a node.
func (m *machine) drain(node *machine, o *kvtierv1.PlanOptions) []byte {
	m.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	p, err := m.r.ProposeDrain(ctx, node.id, o)
	if err != nil {
		m.w.t.Fatal(err)
	}
	id, err := m.r.Drain(ctx, node.id, p, o, "operator")
	if err != nil {
		m.w.t.Fatal(err)
	}
	return id
}

// ended waits for the end of a plan as a node has it.
func (m *machine) ended(id []byte, within time.Duration) (p *directory.Plan) {
	m.w.t.Helper()
	start := time.Now()
	for {
		if p = m.r.plan(id); p != nil && directory.PlanEnded(p) {
			return p
		}
		if time.Since(start) > within {
			m.w.t.Fatalf("the plan has not ended within %v: %v", within, p)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (m *machine) mustEnd(id []byte, want kvtierv1.PlanState) *directory.Plan {
	m.w.t.Helper()
	p := m.ended(id, 5*time.Minute)
	if p.GetState() != want {
		m.w.t.Fatalf("the plan ended %v (%s), want %v: %v", p.GetState(), p.GetWhy(), want, p)
	}
	return p
}

// leader is the node that leads.
func (w *world) leader() (leader *machine) {
	w.t.Helper()
	w.eventually(20*time.Second, "one leader", func() bool {
		leader = nil
		for _, m := range w.nodes {
			if !m.up {
				continue
			}
			id, ok := m.n.Directory().Leader()
			if !ok || leader != nil && leader.id != id {
				return false
			}
			leader = w.nodes[id[0]-1]
		}
		return leader.up
	})
	return leader
}

// follower is a node that does not lead.
func (w *world) follower() *machine {
	leader := w.leader()
	for _, m := range w.nodes {
		if m != leader && m.up {
			return m
		}
	}
	w.t.Fatal("no node follows")
	return nil
}

// others are the nodes that are up, but for some.
func (w *world) others(but ...*machine) (out []*machine) {
next:
	for _, m := range w.nodes {
		for _, x := range but {
			if m == x {
				continue next
			}
		}
		if m.up {
			out = append(out, m)
		}
	}
	return out
}

// sleep lets fake time pass.
func (w *world) sleep(d time.Duration) { time.Sleep(d) }

package sessions

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
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const pageBytes = 4096

// world is a cluster with sessions, in fake time.
type world struct {
	t      *testing.T
	f      *clustertest.Fabric
	g      *clustertest.Gossip
	ns     *paging.Namespace
	id     paging.NamespaceID
	nodes  []*machine
	ramMiB int64
	change func(*Config)
}

// machine is one node and what outlives its process: its identity, its disks, its log.
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
	store *Store
	m     *Manager
}

// inWorld runs a test with a cluster of so many nodes, all of which vote.
func inWorld(t *testing.T, nodes int, change func(*world), test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, f: clustertest.NewFabric(), ns: tiertest.Namespace(1), ramMiB: 4}
		w.ns.Tenant = "t"
		w.id = w.ns.ID()
		if change != nil {
			change(w)
		}
		w.g = clustertest.NewGossip(w.f, 1)
		for i := range nodes {
			w.nodes = append(w.nodes, &machine{
				w: w, i: i, id: placement.NodeID{byte(i + 1)}, log: directory.NewMemory(), disk: tiertest.NewMap(tier.NVMe, 16<<20), fs: vfs.NewMem(),
			})
		}
		t.Cleanup(func() {
			for _, m := range w.nodes {
				m.log.Hang(false)
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
					if !m.m.serves(other.id) || m != other && !m.n.Reachable(other.id) {
						return false
					}
				}
			}
			return true
		})
		test(t, w)
	})
}

// start runs the node's process.
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
	budget := m.w.ramMiB << 20
	m.ram, err = ram.Open(context.Background(), ram.Config{BudgetBytes: budget, ExtentBytes: budget, StagingBytes: -1, MaxPageBytes: pageBytes})
	must(err)
	var log *slog.Logger
	if os.Getenv("KVTIER_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("at", m.i)
	}
	m.store, err = OpenStore("names", m.fs)
	must(err)
	cfg := Config{Self: m.id, Store: m.store, Logger: log}
	if m.w.change != nil {
		m.w.change(&cfg)
	}
	m.m = New(cfg)
	address := fmt.Sprintf("10.0.0.%d:7441", m.i+1)
	m.n, err = cluster.New(cluster.Config{
		ID: m.id, Incarnation: m.incarnation, Name: fmt.Sprint("node", m.i), Cluster: "test", Bootstrap: m.i == 0, Memory: m.log,
		PeerListen: address, Network: m.w.f.Port(m.i), Answers: m.m.Answers(), Logger: log,
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
	m.up = true
}

// crash ends the node's process: what is only in RAM is lost.
func (m *machine) crash() {
	if !m.up {
		return
	}
	m.up = false
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
	for start := time.Now(); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > within {
			w.t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// chain names blocks of chain c.
func chain(c, first, n int) []paging.BlockName {
	names := make([]paging.BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(c)<<32|uint64(first+i))
		names[i][31] = 1
	}
	return names
}

func pageOf(ns paging.NamespaceID, name paging.BlockName) []byte {
	b := make([]byte, pageBytes)
	tiertest.FillPage(b, ns, binary.LittleEndian.Uint64(name[:]))
	return b
}

// put stores blocks of a chain at a node.
func (m *machine) put(names []paging.BlockName, first int) {
	m.w.t.Helper()
	for len(names) > 0 {
		step := names[:min(len(names), 256)]
		names = names[len(step):]
		a, out, _, err := m.h.Reserve(context.Background(), tier.ReserveRequest{Namespace: m.w.id, Names: step, First: first, Deadline: time.Now().Add(time.Minute)})
		first += len(step)
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
}

// local is how many of a chain's blocks a node has itself, every byte of them checked.
func (m *machine) local(names []paging.BlockName) int {
	m.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	hold, err := m.h.Fetch(ctx, tier.FetchRequest{Namespace: m.w.id, Names: names, Local: true})
	if err != nil {
		m.w.t.Fatal(err)
	}
	defer hold.Release()
	for row := range hold.Usable {
		if b := hold.Page(row, 0); b != nil && !bytes.Equal(b, pageOf(m.w.id, names[row])) {
			m.w.t.Errorf("node %d: wrong bytes of block %d", m.i, row)
		}
	}
	return hold.Usable
}

// hold leases blocks at a node until it is called.
func (m *machine) hold(names []paging.BlockName) (release func()) {
	m.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	hold, err := m.h.Fetch(ctx, tier.FetchRequest{Namespace: m.w.id, Names: names, Local: true})
	if err != nil {
		m.w.t.Fatal(err)
	}
	return func() { hold.Release() }
}

func (m *machine) open(session string, change func(*kvtierv1.OpenSessionRequest)) (*kvtierv1.OpenSessionResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	r := &kvtierv1.OpenSessionRequest{Session: session, Tenant: "t", NamespaceId: m.w.id[:]}
	if change != nil {
		change(r)
	}
	return m.m.Open(ctx, r)
}

func (m *machine) mustOpen(session string, change func(*kvtierv1.OpenSessionRequest)) *kvtierv1.OpenSessionResponse {
	m.w.t.Helper()
	a, err := m.open(session, change)
	if err != nil {
		m.w.t.Fatal(err)
	}
	return a
}

func (m *machine) append(session string, first int, names []paging.BlockName) (*kvtierv1.AppendSessionResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return m.m.Append(ctx, &kvtierv1.AppendSessionRequest{Session: session, Tenant: "t", FirstBlock: uint64(first), BlockNames: packNames(names)})
}

// grow stores blocks at a node and appends them to a session.
func (m *machine) grow(session string, c, first, n int) {
	m.w.t.Helper()
	names := chain(c, first, n)
	m.put(names, first)
	if a, err := m.append(session, first, names); err != nil || a.GetBlocks() != uint64(first+n) {
		m.w.t.Fatalf("append of blocks %d to %d: %v, %v", first, first+n, a, err)
	}
}

func (m *machine) get(session string) *kvtierv1.SessionInfo {
	m.w.t.Helper()
	a, err := m.m.Get(context.Background(), &kvtierv1.GetSessionRequest{Session: session, Tenant: "t"})
	if err != nil {
		m.w.t.Fatal(err)
	}
	return a.GetSession()
}

// move moves a session to a node and returns how that ended.
func (m *machine) move(session string, to *machine, change func(*kvtierv1.MigrateSessionRequest)) (last *kvtierv1.MoveProgress, plan *kvtierv1.MovePlan, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r := &kvtierv1.MigrateSessionRequest{Session: session, Tenant: "t", To: fmt.Sprint("node", to.i)}
	if change != nil {
		change(r)
	}
	err = m.m.Migrate(ctx, r, func(a *kvtierv1.MigrateSessionResponse) error {
		if p := a.GetPlan(); p != nil {
			plan = p
		} else {
			last = a.GetProgress()
		}
		return nil
	})
	return last, plan, err
}

func (m *machine) mustMove(session string, to *machine) *kvtierv1.MoveProgress {
	m.w.t.Helper()
	p, _, err := m.move(session, to, nil)
	if err != nil || p.GetState() != migrate.Done.String() {
		m.w.t.Fatalf("move of %s to node %d: %v, %v", session, to.i, p, err)
	}
	return p
}

// owners checks that all nodes agree on who owns a session, and returns the epoch.
func (w *world) owner(session string, want *machine) (epoch uint64) {
	w.t.Helper()
	w.eventually(20*time.Second, fmt.Sprintf("node %d owns %s", want.i, session), func() bool {
		for _, m := range w.nodes {
			if !m.up {
				continue
			}
			x := m.m.record("t/" + session)
			if x == nil || ownerOf(x) != want.id || x.GetState() != kvtierv1.SessionState_SESSION_STATE_ACTIVE {
				return false
			}
			epoch = x.GetEpoch()
		}
		return true
	})
	return epoch
}

// sleep lets fake time pass.
func (w *world) sleep(d time.Duration) { time.Sleep(d) }

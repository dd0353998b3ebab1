package client_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

const testTenant = "default"

// testNode is a small working node: it keeps pages in sealed extents, grants
// leases and attempts, and hands descriptors over, as the protocol says. Unlike a
// real one it has no tiers, never evicts, and lets a test break its promises.
type testNode struct {
	kvtierv1.UnimplementedPagesServiceServer

	dir          string
	socket       string
	address      string // of the TCP listener, once it has started
	slotBytes    int64  // of each slot of an extent and of staging
	extentBytes  int64
	stagingBytes int64
	ttl          time.Duration
	mangle       func(*kvtierv1.FetchResponse) // spoils answers
	holdExtents  chan struct{}                 // extents are handed over once it is closed; nil: at once
	refuse       error                         // the answer to hello
	deaf         atomic.Bool                   // reserves grant, but are never answered
	mute         atomic.Bool                   // fetches are not answered, everything else is
	frozen       gate
	sessions     *testSessions // nil: it is of no cluster

	server   *grpc.Server
	handoff  *shm.Listener
	serving  sync.WaitGroup
	base     context.Context
	stopBase context.CancelFunc

	mu          sync.Mutex
	incarnation uint64
	lastExtent  paging.ExtentID
	lastLease   uint64
	lastTicket  uint64
	attachments map[shm.AttachmentID]*testAttachment
	namespaces  map[paging.NamespaceID]*paging.Namespace
	extents     []*testExtent
	pages       map[testKey]*testPage
	conns       []net.Conn
	previous    [][]byte // previous_attachment of each hello
	released    []uint64
	revoked     []uint64 // leases whose revocation was answered
	renewed     []uint64
	tethersEnd  int // tethers at whose end the node saw end-of-file
}

type testKey struct {
	ns   paging.NamespaceID
	name paging.BlockName
	part int
}

type testPage struct {
	slot paging.Slot
	mem  []byte
}

type testExtent struct {
	id   paging.ExtentID
	mem  *shm.Memory
	free []uint64 // offsets
}

type testAttachment struct {
	id      shm.AttachmentID
	node    *testNode
	stream  grpc.BidiStreamingServer[kvtierv1.AttachRequest, kvtierv1.AttachResponse]
	sendMu  sync.Mutex
	tether  *shm.Tether
	staging *testExtent

	// guarded by node.mu
	sent     int // extents of the node handed over
	leases   map[uint64][]testKey
	lost     map[uint64]bool
	attempts map[string]*testAttempt
}

type testAttempt struct {
	keys  [][]testKey // per row
	slots [][]paging.Slot
	open  []bool
	until time.Time
}

// newTestNode makes a node that is not started.
func newTestNode(t testing.TB) *testNode {
	t.Helper()
	n, err := makeNode()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.remove)
	return n
}

func makeNode() (*testNode, error) {
	dir, err := os.MkdirTemp("", "kvc") // short: a socket path has at most 107 bytes
	return &testNode{
		dir: dir, socket: filepath.Join(dir, "s"),
		slotBytes: 16 << 10, extentBytes: 1 << 20, stagingBytes: 1 << 20, ttl: time.Minute,
	}, err
}

func (n *testNode) remove() {
	n.stop()
	os.RemoveAll(n.dir)
}

func startTestNode(t testing.TB) *testNode {
	t.Helper()
	n := newTestNode(t)
	n.start(t)
	return n
}

func (n *testNode) start(t testing.TB) {
	t.Helper()
	if err := n.run(); err != nil {
		t.Fatal(err)
	}
}

// run begins a new run of the node: empty, with a new incarnation.
func (n *testNode) run() error {
	n.mu.Lock()
	n.incarnation++
	n.attachments = map[shm.AttachmentID]*testAttachment{}
	n.namespaces = map[paging.NamespaceID]*paging.Namespace{}
	n.pages = map[testKey]*testPage{}
	n.mu.Unlock()
	n.base, n.stopBase = context.WithCancel(context.Background())
	n.server = grpc.NewServer(
		grpc.KeepaliveParams(kvstatus.ServerKeepalive()), grpc.KeepaliveEnforcementPolicy(kvstatus.ServerEnforcement()),
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(1<<20), grpc.WaitForHandlers(true),
	)
	kvtierv1.RegisterPagesServiceServer(n.server, n)
	if n.sessions != nil {
		kvtierv1.RegisterSessionsServiceServer(n.server, n.sessions)
	}
	unix, err := net.Listen("unix", n.socket)
	if err != nil {
		return err
	}
	tcp, err := net.Listen("tcp", cmp.Or(n.address, "127.0.0.1:0"))
	if err != nil {
		return err
	}
	n.address = tcp.Addr().String()
	if n.handoff, err = shm.ListenHandoff(filepath.Join(n.dir, "fd"), 0o600, -1); err != nil {
		return err
	}
	n.serving.Go(func() { n.server.Serve(testListener{unix, n}) })
	n.serving.Go(func() { n.server.Serve(testListener{tcp, n}) })
	n.serving.Go(n.acceptTethers)
	return nil
}

// stop ends the run as a kill does: every connection breaks at once.
func (n *testNode) stop() {
	if n.server == nil {
		return
	}
	n.frozen.open()
	n.stopBase()
	n.handoff.Close()
	n.server.Stop()
	n.mu.Lock()
	for _, a := range n.attachments {
		if a.tether != nil {
			a.tether.Close()
		}
	}
	n.mu.Unlock()
	n.serving.Wait()
	for _, a := range n.attachments {
		a.staging.mem.Close()
	}
	for _, e := range n.extents {
		e.mem.Close()
	}
	n.extents, n.server = nil, nil
}

func (n *testNode) acceptTethers() {
	for {
		tether, err := n.handoff.Accept()
		if err != nil {
			return
		}
		n.serving.Go(func() { n.serveTether(tether) })
	}
}

func (n *testNode) serveTether(tether *shm.Tether) {
	defer tether.Close()
	id, err := tether.RecvHello(n.base)
	if err != nil {
		return
	}
	n.mu.Lock()
	a := n.attachments[id]
	if a != nil {
		a.tether = tether
	}
	hold := n.holdExtents
	n.mu.Unlock()
	if a == nil {
		return
	}
	staging := shm.Extent{ID: a.staging.id, Kind: shm.KindStaging, Bytes: a.staging.mem.Size(), FD: a.staging.mem.FD()}
	if err := tether.SendExtents(n.base, []shm.Extent{staging}); err != nil {
		return
	}
	if hold != nil {
		select {
		case <-hold:
		case <-n.base.Done():
		}
	}
	n.handOver(a)
	if err := tether.Wait(n.base, nil); err == nil {
		n.mu.Lock()
		n.tethersEnd++
		delete(n.attachments, id)
		a.staging.mem.Close()
		n.mu.Unlock()
	}
}

// handOver sends a the extents that it does not have yet.
func (n *testNode) handOver(a *testAttachment) {
	a.sendMu.Lock()
	defer a.sendMu.Unlock()
	n.mu.Lock()
	var out []shm.Extent
	if a.tether != nil {
		for _, e := range n.extents[a.sent:] {
			out = append(out, shm.Extent{ID: e.id, Kind: shm.KindRAM, Bytes: e.mem.Size(), FD: e.mem.FD()})
		}
		a.sent = len(n.extents)
	}
	n.mu.Unlock()
	if len(out) > 0 {
		a.tether.SendExtents(n.base, out)
	}
}

// allocLocked finds a slot, in a new extent if need be.
func (n *testNode) allocLocked() (*testExtent, uint64, error) {
	for _, e := range n.extents {
		if last := len(e.free) - 1; last >= 0 {
			offset := e.free[last]
			e.free = e.free[:last]
			return e, offset, nil
		}
	}
	mem, err := shm.CreateExtent("kvtier-client-test", n.extentBytes, shm.Options{NUMANode: -1})
	if err != nil {
		return nil, 0, err
	}
	n.lastExtent++
	e := &testExtent{id: n.lastExtent, mem: mem}
	for offset := uint64(shm.GenTableBytes(n.extentBytes)); offset+uint64(n.slotBytes) <= uint64(n.extentBytes); offset += uint64(n.slotBytes) {
		e.free = append(e.free, offset)
	}
	n.extents = append(n.extents, e)
	return n.allocLocked()
}

// reuse gives the slot of a page to something else, as a node may do only when
// nobody reads it.
func (n *testNode) reuse(key testKey) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pages[key]
	e := n.extentOf(p.slot.Extent)
	shm.Of(e.mem.Bytes()).Raise(p.slot.Offset)
	for i := range p.mem {
		p.mem[i] ^= 0xff
	}
	delete(n.pages, key)
	for _, a := range n.attachments {
		for id, keys := range a.leases {
			if slices.Contains(keys, key) {
				a.lost[id] = true
			}
		}
	}
}

func (n *testNode) extentOf(id paging.ExtentID) *testExtent {
	i := slices.IndexFunc(n.extents, func(e *testExtent) bool { return e.id == id })
	return n.extents[i]
}

// Attach holds an attachment.
func (n *testNode) Attach(stream grpc.BidiStreamingServer[kvtierv1.AttachRequest, kvtierv1.AttachResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	h := first.GetHello()
	if n.refuse != nil {
		return kvstatus.Status(n.refuse)
	}
	if h.GetProtocolVersion() != kvstatus.ProtocolVersion {
		return kvstatus.Status(fmt.Errorf("protocol %d: %w", h.GetProtocolVersion(), paging.ErrIncompatible))
	}
	a := &testAttachment{
		node: n, stream: stream,
		leases: map[uint64][]testKey{}, lost: map[uint64]bool{}, attempts: map[string]*testAttempt{},
	}
	rand.Read(a.id[:])
	bytes := n.stagingBytes
	if h.GetStagingBytes() > 0 {
		bytes = int64(h.GetStagingBytes())
	}
	mem, err := shm.CreateStaging("kvtier-client-test", bytes)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.previous = append(n.previous, h.GetPreviousAttachment())
	n.lastExtent++
	a.staging = &testExtent{id: n.lastExtent, mem: mem}
	for offset := uint64(0); offset+uint64(n.slotBytes) <= uint64(bytes); offset += uint64(n.slotBytes) {
		a.staging.free = append(a.staging.free, offset)
	}
	n.attachments[a.id] = a
	welcome := &kvtierv1.Welcome{
		Attachment: a.id[:], ProtocolVersion: kvstatus.ProtocolVersion, Node: make([]byte, 16), Incarnation: n.incarnation,
		HandoffSocket: filepath.Join(n.dir, "fd"), Tenant: testTenant,
		Arenas:        []*kvtierv1.Arena{{Id: 1, Tier: kvtierv1.Tier_TIER_RAM, Device: "host"}},
		StagingExtent: uint32(a.staging.id), StagingBytes: uint64(bytes), LeaseTtl: durationpb.New(n.ttl),
	}
	n.mu.Unlock()
	if err := a.send(&kvtierv1.AttachResponse{RequestId: first.GetRequestId(), Message: &kvtierv1.AttachResponse_Welcome{Welcome: welcome}}); err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := a.serve(m); err != nil {
			return err
		}
	}
}

func (a *testAttachment) send(m *kvtierv1.AttachResponse) error {
	a.sendMu.Lock()
	defer a.sendMu.Unlock()
	return a.stream.Send(m)
}

func (a *testAttachment) serve(m *kvtierv1.AttachRequest) error {
	out := &kvtierv1.AttachResponse{RequestId: m.GetRequestId()}
	var err error
	switch msg := m.GetMessage().(type) {
	case *kvtierv1.AttachRequest_Fetch:
		if a.node.mute.Load() {
			return nil
		}
		var resp *kvtierv1.FetchResponse
		resp, err = a.node.fetch(a, msg.Fetch)
		out.Message = &kvtierv1.AttachResponse_Fetch{Fetch: resp}
	case *kvtierv1.AttachRequest_Adopt:
		err = paging.ErrNotFound
	case *kvtierv1.AttachRequest_Release:
		out.Message = &kvtierv1.AttachResponse_Release{Release: a.release(msg.Release)}
	case *kvtierv1.AttachRequest_Renew:
		out.Message = &kvtierv1.AttachResponse_Renew{Renew: a.renew(msg.Renew)}
	case *kvtierv1.AttachRequest_Abort:
		a.abort(msg.Abort.GetAttempt())
	case *kvtierv1.AttachRequest_Revoked:
		a.node.mu.Lock()
		a.node.revoked = append(a.node.revoked, msg.Revoked.GetLeaseIds()...)
		for _, id := range msg.Revoked.GetLeaseIds() {
			delete(a.leases, id)
		}
		a.node.mu.Unlock()
	default:
		return kvstatus.Status(paging.ErrInvalid)
	}
	if m.GetRequestId() == 0 {
		return nil
	}
	if err != nil {
		out.Message = &kvtierv1.AttachResponse_Error{Error: kvstatus.Detail(err)}
	}
	return a.send(out)
}

// revoke asks every attachment for all its leases.
func (n *testNode) revoke() {
	n.mu.Lock()
	todo := map[*testAttachment][]uint64{}
	for _, a := range n.attachments {
		todo[a] = slices.Collect(maps.Keys(a.leases))
	}
	n.mu.Unlock()
	for a, ids := range todo {
		a.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Revocation{
			Revocation: &kvtierv1.Revocation{LeaseIds: ids, Reason: kvtierv1.RevocationReason_REVOCATION_REASON_OPERATOR},
		}})
	}
}

func (a *testAttachment) release(r *kvtierv1.ReleaseRequest) *kvtierv1.ReleaseResponse {
	a.node.mu.Lock()
	defer a.node.mu.Unlock()
	resp := &kvtierv1.ReleaseResponse{}
	for _, id := range r.GetLeaseIds() {
		if a.lost[id] {
			resp.Lost = append(resp.Lost, id)
		}
		delete(a.leases, id)
		a.node.released = append(a.node.released, id)
	}
	return resp
}

func (a *testAttachment) renew(r *kvtierv1.RenewRequest) *kvtierv1.RenewResponse {
	a.node.mu.Lock()
	defer a.node.mu.Unlock()
	resp := &kvtierv1.RenewResponse{}
	for _, id := range r.GetLeaseIds() {
		if _, held := a.leases[id]; !held {
			resp.Unknown = append(resp.Unknown, id)
		}
		a.node.renewed = append(a.node.renewed, id)
	}
	return resp
}

// held is the number of leases of all attachments.
func (n *testNode) held() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	sum := 0
	for _, a := range n.attachments {
		sum += len(a.leases)
	}
	return sum
}

// gate stops what passes it while it is shut.
type gate struct {
	mu   sync.Mutex
	shut chan struct{} // nil: open
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		g.shut = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

func (g *gate) pass() {
	g.mu.Lock()
	shut := g.shut
	g.mu.Unlock()
	if shut != nil {
		<-shut
	}
}

// testListener makes connections that can be cut, and that hear nothing while
// the gate is shut: to the client the node looks like a stopped process.
type testListener struct {
	net.Listener
	node *testNode
}

func (l testListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.node.frozen.pass()
	l.node.mu.Lock()
	defer l.node.mu.Unlock()
	l.node.conns = append(l.node.conns, conn)
	return frozenConn{conn, &l.node.frozen}, nil
}

// cut breaks every gRPC connection; the tethers stay.
func (n *testNode) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, conn := range n.conns {
		conn.Close()
	}
	n.conns = nil
}

type frozenConn struct {
	net.Conn
	gate *gate
}

func (c frozenConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.gate.pass()
	return n, err
}

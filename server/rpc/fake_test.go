package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeNode is a node whose every block is resident and has one page. Blocks whose
// name begins with 0xff are slow: they come up when slow is closed.
type fakeNode struct {
	Node
	slow chan struct{}

	mu       sync.Mutex
	attached []*fakeAttachment
}

type fakeAttachment struct {
	Attachment
	node     *fakeNode
	events   chan struct{}
	ended    chan struct{}
	detached chan struct{}

	mu       sync.Mutex
	event    Event
	leases   map[uint64]bool
	next     uint64
	released []uint64
}

func (n *fakeNode) Attach(_ context.Context, c Caller, _ *Hello) (Attachment, Welcome, error) {
	a := &fakeAttachment{
		node: n, events: make(chan struct{}, 1), ended: make(chan struct{}), detached: make(chan struct{}), leases: map[uint64]bool{},
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.attached = append(n.attached, a)
	return a, Welcome{Attachment: ID{1}, Tenant: c.Tenant, LeaseTTL: time.Minute}, nil
}

func (n *fakeNode) Attachment(Caller, ID) (Attachment, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.attached) == 0 {
		return nil, paging.ErrUnknownAttachment
	}
	return n.attached[0], nil
}

func (a *fakeAttachment) Events() <-chan struct{} { return a.events }
func (a *fakeAttachment) Ended() <-chan struct{}  { return a.ended }
func (a *fakeAttachment) Err() error              { return fmt.Errorf("ended: %w", paging.ErrUnavailable) }
func (a *fakeAttachment) Detach()                 { close(a.detached) }

func (a *fakeAttachment) Next(ev *Event) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	*ev, a.event = a.event, Event{}
	return len(ev.Extents) > 0 || len(ev.Revoked) > 0 || len(ev.Progress) > 0 || ev.Stopping > 0
}

func (a *fakeAttachment) say(ev Event) {
	a.mu.Lock()
	a.event = ev
	a.mu.Unlock()
	a.events <- struct{}{}
}

func (a *fakeAttachment) FetchResident(r *FetchRequest, res *FetchResult) (bool, error) {
	if r.Names[0][0] == 0xff {
		return false, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next++
	a.leases[a.next] = true
	res.Lease, res.Usable, res.TTL = a.next, len(r.Names), time.Minute
	for i := range r.Names {
		res.Slots = paging.AppendSlot(res.Slots, paging.Slot{Extent: 1, Bytes: 4096, Offset: uint64(i) * 4096, Sum: uint64(r.Names[i][0])})
		res.Tiers = append(res.Tiers, 2)
	}
	return true, nil
}

func (a *fakeAttachment) Fetch(ctx context.Context, r *FetchRequest, res *FetchResult) error {
	select {
	case <-a.node.slow:
	case <-ctx.Done():
		res.Short = []Shortfall{{Count: len(r.Names), Reason: 5}}
		return nil
	}
	names := append([]paging.BlockName(nil), r.Names...)
	names[0][0] = 0
	fast := *r
	fast.Names = names
	_, err := a.FetchResident(&fast, res)
	return err
}

func (a *fakeAttachment) Adopt(token ID, parts paging.PartSet, res *FetchResult) error {
	if token != (ID{7}) {
		return fmt.Errorf("token: %w", paging.ErrNotFound)
	}
	res.Lease, res.Parts, res.Usable = 99, parts, 1
	return nil
}

func (a *fakeAttachment) Release(leases []uint64, _ []ID, lost []uint64) []uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range leases {
		delete(a.leases, id)
		a.released = append(a.released, id)
		if id == 666 {
			lost = append(lost, id)
		}
	}
	return lost
}

func (a *fakeAttachment) Renew(leases []uint64, _ time.Duration, unknown []uint64) []uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range leases {
		if !a.leases[id] {
			unknown = append(unknown, id)
		}
	}
	return unknown
}

func (a *fakeAttachment) Revoked(leases []uint64) { a.Release(leases, nil, nil) }

// serveFake runs a server with a fake node and returns a client of it.
func serveFake(t testing.TB) (*fakeNode, kvtierv1.PagesServiceClient) {
	t.Helper()
	node := &fakeNode{slow: make(chan struct{})}
	s := New(Config{Node: node, Admin: kvtierv1.UnimplementedAdminServiceServer{}, Accounts: NewAccounts(nil, 0), MaxCallsInFlight: 64, MaxStreamsPerConn: 64})
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		s.Stop(ctx)
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return node, kvtierv1.NewPagesServiceClient(conn)
}

type clientStream = grpc.BidiStreamingClient[kvtierv1.AttachRequest, kvtierv1.AttachResponse]

func attachFake(t testing.TB, c kvtierv1.PagesServiceClient) clientStream {
	t.Helper()
	stream, err := c.Attach(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	send(t, stream, 1, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Hello{Hello: &kvtierv1.Hello{ProtocolVersion: 1}}})
	if m := recv(t, stream); m.GetWelcome() == nil || m.GetRequestId() != 1 {
		t.Fatalf("answer to hello: %v", m)
	}
	return stream
}

func send(t testing.TB, s clientStream, id uint64, m *kvtierv1.AttachRequest) {
	t.Helper()
	m.RequestId = id
	if err := s.Send(m); err != nil {
		t.Fatal(err)
	}
}

func recv(t testing.TB, s clientStream) *kvtierv1.AttachResponse {
	t.Helper()
	m, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func fetchMessage(names []byte, timeout time.Duration) *kvtierv1.AttachRequest {
	return &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Fetch{Fetch: &kvtierv1.FetchRequest{
		NamespaceId: make([]byte, 32), BlockNames: names, Timeout: durationpb.New(timeout),
	}}}
}

func slowNames() []byte {
	b := packedNames(2)
	b[0] = 0xff
	return b
}

func TestStreamAnswersEachKindOfMessage(t *testing.T) {
	node, c := serveFake(t)
	s := attachFake(t, c)
	send(t, s, 2, fetchMessage(packedNames(3), 0))
	if got := recv(t, s).GetFetch(); got.GetUsableBlocks() != 3 || len(got.GetSlots()) != 3*paging.SlotBytes || got.GetLeaseTtl().AsDuration() != time.Minute {
		t.Errorf("fetch: %v", got)
	}
	// A shorter answer after a longer one shows nothing of it.
	send(t, s, 3, fetchMessage(packedNames(1), 0))
	if got := recv(t, s).GetFetch(); got.GetLeaseId() != 2 || len(got.GetSlots()) != paging.SlotBytes || len(got.GetTiers()) != 1 {
		t.Errorf("second fetch: %v", got)
	}
	send(t, s, 4, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Renew{Renew: &kvtierv1.RenewRequest{LeaseIds: []uint64{1, 50}}}})
	if got := recv(t, s).GetRenew().GetUnknown(); len(got) != 1 || got[0] != 50 {
		t.Errorf("renew: unknown %v, want [50]", got)
	}
	send(t, s, 0, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Release{Release: &kvtierv1.ReleaseRequest{LeaseIds: []uint64{1}}}})
	send(t, s, 5, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Release{Release: &kvtierv1.ReleaseRequest{LeaseIds: []uint64{2, 666}}}})
	if m := recv(t, s); m.GetRequestId() != 5 || len(m.GetRelease().GetLost()) != 1 {
		t.Errorf("release: %v, want the answer of request 5 with one lost", m)
	}
	send(t, s, 6, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Adopt{Adopt: &kvtierv1.AdoptRequest{AdoptToken: append([]byte{7}, make([]byte, 15)...), Parts: 5}}})
	if got := recv(t, s).GetAdopt(); got.GetLeaseId() != 99 || got.GetParts() != 5 {
		t.Errorf("adopt: %v", got)
	}
	send(t, s, 7, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Adopt{Adopt: &kvtierv1.AdoptRequest{AdoptToken: make([]byte, 16)}}})
	if got := recv(t, s); got.GetRequestId() != 7 || got.GetError().GetCode() != kvtierv1.ErrorCode_ERROR_CODE_NOT_FOUND {
		t.Errorf("adopt of no token: %v", got)
	}
	send(t, s, 8, fetchMessage(packedNames(2)[:33], 0))
	if got := recv(t, s); got.GetError().GetCode() != kvtierv1.ErrorCode_ERROR_CODE_INVALID {
		t.Errorf("cut names: %v", got)
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	<-node.attached[0].detached
	if got := node.attached[0].released; len(got) != 3 || got[0] != 1 {
		t.Errorf("released %v, want 1, 2 and 666", got)
	}
}

func TestSlowFetchDoesNotHoldUpTheStream(t *testing.T) {
	node, c := serveFake(t)
	s := attachFake(t, c)
	send(t, s, 2, fetchMessage(slowNames(), time.Minute))
	send(t, s, 3, fetchMessage(packedNames(2), time.Minute))
	if m := recv(t, s); m.GetRequestId() != 3 {
		t.Errorf("first answer is of request %d, want 3", m.GetRequestId())
	}
	close(node.slow)
	if m := recv(t, s); m.GetRequestId() != 2 || m.GetFetch().GetUsableBlocks() != 2 {
		t.Errorf("slow fetch: %v", m)
	}
}

func TestSlowFetchesAreBoundedAndEndAtTheirTimeout(t *testing.T) {
	_, c := serveFake(t)
	s := attachFake(t, c)
	for i := range maxSlowFetches {
		send(t, s, uint64(2+i), fetchMessage(slowNames(), time.Minute))
	}
	send(t, s, 1000, fetchMessage(slowNames(), time.Minute))
	if m := recv(t, s); m.GetRequestId() != 1000 || m.GetError().GetCode() != kvtierv1.ErrorCode_ERROR_CODE_UNAVAILABLE || m.GetError().GetRetryAfter() == nil {
		t.Errorf("one slow fetch too many: %v", m)
	}

	_, c = serveFake(t)
	s = attachFake(t, c)
	send(t, s, 2, fetchMessage(slowNames(), time.Millisecond))
	if m := recv(t, s); len(m.GetFetch().GetShortfalls()) != 1 || m.GetFetch().GetLeaseId() != 0 {
		t.Errorf("after its timeout: %v", m)
	}
}

func TestEventsAndEnd(t *testing.T) {
	node, c := serveFake(t)
	s := attachFake(t, c)
	a := node.attached[0]
	a.say(Event{Extents: []Extent{{ID: 4, Arena: 1, Bytes: 8192}}, Revoked: []uint64{8}, Progress: []Progress{{Ticket: 3, Ready: []uint32{1, 2}, Done: true}}})
	if e := recv(t, s).GetExtentsAdded().GetExtents(); len(e) != 1 || e[0].GetId() != 4 {
		t.Errorf("extents: %v", e)
	}
	if e := recv(t, s).GetRevocation(); len(e.GetLeaseIds()) != 1 || e.GetReason() != kvtierv1.RevocationReason_REVOCATION_REASON_OVERDUE {
		t.Errorf("revocation: %v", e)
	}
	if e := recv(t, s).GetPrefetch(); e.GetTicket() != 3 || len(e.GetReady()) != 8 || !e.GetDone() {
		t.Errorf("progress: %v", e)
	}
	send(t, s, 0, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Revoked{Revoked: &kvtierv1.Revoked{LeaseIds: []uint64{8}}}})
	// What the node has to say when it ends the attachment is said before the end.
	a.mu.Lock()
	a.event = Event{Stopping: time.Second}
	a.mu.Unlock()
	close(a.ended)
	if e := recv(t, s).GetStopping().GetWithin().AsDuration(); e != time.Second {
		t.Errorf("stopping within %v, want 1s", e)
	}
	if _, err := s.Recv(); err == nil {
		t.Error("the stream goes on after the node ended it")
	}
	<-a.detached
}

func TestBrokenStreams(t *testing.T) {
	hello := func() *kvtierv1.AttachRequest {
		return &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Hello{Hello: &kvtierv1.Hello{ProtocolVersion: 1}}}
	}
	for name, messages := range map[string][]*kvtierv1.AttachRequest{
		"fetch first":   {fetchMessage(packedNames(1), 0)},
		"empty first":   {{}},
		"second hello":  {hello(), hello()},
		"empty later":   {hello(), {}},
		"fetch one-way": {hello(), fetchMessage(packedNames(1), 0)},
	} {
		_, c := serveFake(t)
		s, err := c.Attach(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			if err := s.Send(m); err != nil {
				break // the server ended it already
			}
		}
		var last error
		for last == nil {
			_, last = s.Recv()
		}
		if errors.Is(last, context.Canceled) {
			t.Errorf("%s: %v", name, last)
		}
	}
}

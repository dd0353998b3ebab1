package server_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// rawEngine speaks the protocol message by message, so that tests can do what
// package client never would.
type rawEngine struct {
	t      testing.TB
	token  string
	ctx    context.Context
	conn   *grpc.ClientConn
	pages  kvtierv1.PagesServiceClient
	stream grpc.BidiStreamingClient[kvtierv1.AttachRequest, kvtierv1.AttachResponse]
	id     []byte
	tether *shm.Tether
	mapped map[paging.ExtentID]*shm.Memory
}

func dialRaw(t testing.TB, socket, token string) *grpc.ClientConn {
	t.Helper()
	opts := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if token != "" {
		opts = append(opts, grpc.WithPerRPCCredentials(bearer(token)))
	}
	conn, err := grpc.NewClient("unix:"+socket, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{kvstatus.AuthorizationKey: "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// raw attaches and takes the descriptors.
func (n testNode) raw(t testing.TB, token string, hello *kvtierv1.Hello) *rawEngine {
	t.Helper()
	e := &rawEngine{t: t, token: token, ctx: t.Context(), conn: dialRaw(t, n.Config.Socket, token), mapped: map[paging.ExtentID]*shm.Memory{}}
	e.pages = kvtierv1.NewPagesServiceClient(e.conn)
	hello.ProtocolVersion = kvstatus.ProtocolVersion
	stream, err := e.pages.Attach(e.ctx)
	if err == nil {
		err = stream.Send(&kvtierv1.AttachRequest{RequestId: 1, Message: &kvtierv1.AttachRequest_Hello{Hello: hello}})
	}
	if err != nil {
		t.Fatal(err)
	}
	e.stream = stream
	m, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	e.id = m.GetWelcome().GetAttachment()
	if e.tether, err = shm.DialHandoff(e.ctx, m.GetWelcome().GetHandoffSocket()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.tether.Close()
		for _, mem := range e.mapped {
			mem.Close()
		}
	})
	if err := e.tether.SendHello(e.ctx, shm.AttachmentID(e.id)); err != nil {
		t.Fatal(err)
	}
	e.map1(m.GetWelcome().GetStagingExtent())
	return e
}

// map1 takes descriptors until the extent is mapped.
func (e *rawEngine) map1(id uint32) *shm.Memory {
	e.t.Helper()
	for e.mapped[paging.ExtentID(id)] == nil {
		ctx, cancel := context.WithTimeout(e.ctx, 10*time.Second)
		extents, err := e.tether.RecvExtents(ctx)
		cancel()
		if err != nil {
			e.t.Fatalf("wait for extent %d: %v", id, err)
		}
		for i := range extents {
			mem, err := extents[i].Map()
			if err != nil {
				e.t.Fatal(err)
			}
			e.mapped[extents[i].ID] = mem
		}
	}
	return e.mapped[paging.ExtentID(id)]
}

// slots decodes packed slot references.
func (e *rawEngine) slots(packed []byte) []paging.Slot {
	e.t.Helper()
	var out []paging.Slot
	for at := 0; at < len(packed); at += paging.SlotBytes {
		s, err := paging.DecodeSlot(packed[at:])
		if err != nil {
			e.t.Fatal(err)
		}
		out = append(out, s)
	}
	return out
}

// at is the memory of a slot.
func (e *rawEngine) at(s paging.Slot) []byte {
	e.t.Helper()
	return e.map1(uint32(s.Extent)).Bytes()[s.Offset : s.Offset+uint64(s.Bytes)]
}

func (e *rawEngine) register(pageBytes uint64, parts int) []byte {
	e.t.Helper()
	res, err := e.pages.RegisterNamespace(e.ctx, &kvtierv1.RegisterNamespaceRequest{Layout: wireLayout(pageBytes, parts), Attachment: e.id})
	if err != nil {
		e.t.Fatal(err)
	}
	return res.GetNamespaceId()
}

func wireLayout(pageBytes uint64, parts int) *kvtierv1.Layout {
	l := testNamespace(pageBytes, parts).Layout
	out := &kvtierv1.Layout{
		Model: l.Model, Dtype: l.DType, KvDtype: l.KVDType, Attention: l.Attention, Layers: l.Layers, KvHeads: l.KVHeads, HeadDim: l.HeadDim,
		EngineLayout: l.EngineLayout, TensorParallel: 1, PipelineParallel: 1, ContextParallel: 1,
		HashAlgorithm: l.HashAlgorithm, BlockTokens: l.BlockTokens,
	}
	for _, p := range l.Parts {
		out.Parts = append(out.Parts, &kvtierv1.Part{Name: p.Name, PageBytes: p.PageBytes, BlocksPerPage: p.BlocksPerPage})
	}
	return out
}

func packNames(names []paging.BlockName) []byte {
	var b []byte
	for _, n := range names {
		b = append(b, n[:]...)
	}
	return b
}

func (e *rawEngine) reserve(ns []byte, names []paging.BlockName, ttl time.Duration) *kvtierv1.ReserveResponse {
	e.t.Helper()
	res, err := e.pages.Reserve(e.ctx, &kvtierv1.ReserveRequest{
		Attachment: e.id, NamespaceId: ns, BlockNames: packNames(names), Ttl: durationpb.New(ttl), Timeout: durationpb.New(10 * time.Millisecond),
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return res
}

func (e *rawEngine) commit(attempt []byte) []byte {
	e.t.Helper()
	res, err := e.pages.Commit(e.ctx, &kvtierv1.CommitRequest{Attachment: e.id, Attempt: attempt})
	if err != nil {
		e.t.Fatal(err)
	}
	return res.GetOutcomes()
}

// put writes blocks of one part and returns their outcomes.
func (e *rawEngine) put(ns []byte, names []paging.BlockName) []byte {
	e.t.Helper()
	r := e.reserve(ns, names, time.Minute)
	if len(r.GetAttempt()) == 0 {
		return r.GetOutcomes()
	}
	row := 0
	slots := e.slots(r.GetSlots())
	for i, o := range r.GetOutcomes() {
		if o == byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_GRANTED) {
			fillPage(e.at(slots[row]), names[i], 0)
			row++
		}
	}
	return e.commit(r.GetAttempt())
}

func (e *rawEngine) fetch(ns []byte, names []paging.BlockName, ttl time.Duration) *kvtierv1.FetchResponse {
	e.t.Helper()
	res, err := e.pages.Fetch(e.ctx, &kvtierv1.FetchRequest{Attachment: e.id, NamespaceId: ns, BlockNames: packNames(names), LeaseTtl: durationpb.New(ttl)})
	if err != nil {
		e.t.Fatal(err)
	}
	return res
}

func (e *rawEngine) release(leases ...uint64) []uint64 {
	e.t.Helper()
	res, err := e.pages.Release(e.ctx, &kvtierv1.ReleaseRequest{Attachment: e.id, LeaseIds: leases})
	if err != nil {
		e.t.Fatal(err)
	}
	return res.GetLost()
}

// eventually waits until ok, without assuming how long that takes.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

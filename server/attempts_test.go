package server_test

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/servertest"
)

// Outcomes as they are on the wire.
const (
	granted     = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_GRANTED)
	exists      = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_EXISTS)
	inFlight    = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_IN_FLIGHT)
	stagingFull = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_STAGING_FULL)
	noSpace     = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_NO_SPACE)
	committed   = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_COMMITTED)
	expired     = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_EXPIRED)
	repeated    = byte(kvtierv1.WriteOutcome_WRITE_OUTCOME_REPEATED)
)

func TestCommitAfterDeadline(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	a, b := n.raw(t, "", &kvtierv1.Hello{}), n.raw(t, "", &kvtierv1.Hello{})
	ns := a.register(4096, 1)
	names := blockNames(0, 4)
	r := a.reserve(ns, names, 50*time.Millisecond)
	if o := b.reserve(ns, names, time.Minute); !bytes.Equal(o.GetOutcomes(), bytes.Repeat([]byte{inFlight}, 4)) || o.GetInFlightFor().AsDuration() <= 0 {
		t.Errorf("while another writes: %v, in flight for %v", o.GetOutcomes(), o.GetInFlightFor().AsDuration())
	}
	// What was set aside is free at once: another client can write the blocks.
	eventually(t, "the blocks are free again", func() bool {
		return bytes.Equal(b.put(ns, names), bytes.Repeat([]byte{committed}, 4))
	})
	if got := a.commit(r.GetAttempt()); !bytes.Equal(got, bytes.Repeat([]byte{expired}, 4)) {
		t.Errorf("late commit: %v, want all expired", got)
	}
	if _, err := a.pages.Commit(a.ctx, &kvtierv1.CommitRequest{Attachment: a.id, Attempt: r.GetAttempt()}); !errors.Is(kvstatus.Err(err), paging.ErrNotFound) {
		t.Errorf("the attempt goes on after it was answered: %v", err)
	}
	l := a.fetch(ns, names, time.Minute)
	for i, s := range a.slots(l.GetSlots()) {
		if !bytes.Equal(a.at(s), wantPage(4096, names[i], 0)) {
			t.Errorf("block %d: wrong bytes", i)
		}
	}
	a.release(l.GetLeaseId())
	if m := n.Metrics(); m.AttemptsLate+uint64(m.Hierarchy.ExpiredAttempts) == 0 || m.Attempts != 0 {
		t.Errorf("late attempts %d, open %d", m.AttemptsLate, m.Attempts)
	}
}

func TestCommitByAnotherAttachment(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	a, b := n.raw(t, "", &kvtierv1.Hello{}), n.raw(t, "", &kvtierv1.Hello{})
	ns := a.register(4096, 1)
	r := a.reserve(ns, blockNames(0, 1), time.Minute)
	_, err := b.pages.Commit(b.ctx, &kvtierv1.CommitRequest{Attachment: b.id, Attempt: r.GetAttempt()})
	if !errors.Is(kvstatus.Err(err), paging.ErrNotFound) {
		t.Errorf("commit by another attachment: %v, want not found", err)
	}
	if _, err := b.pages.Abort(b.ctx, &kvtierv1.AbortRequest{Attachment: b.id, Attempt: r.GetAttempt()}); err != nil {
		t.Errorf("abort of an unknown attempt: %v, want success", err)
	}
	if got := a.commit(r.GetAttempt()); !bytes.Equal(got, []byte{committed}) {
		t.Errorf("own commit: %v", got)
	}
}

// A client that writes into its staging while Commit runs and afterwards changes
// nothing of a published page, whose checksum is that of the stored bytes.
func TestWriteIntoStagingDuringAndAfterCommit(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	const pageBytes = 256 << 10
	ns := e.register(pageBytes, 1)
	for round := range 20 {
		names := blockNames(round, 1)
		r := e.reserve(ns, names, time.Minute)
		staging := e.at(e.slots(r.GetSlots())[0])
		stop := make(chan struct{})
		var scribbler sync.WaitGroup
		scribbler.Go(func() {
			for x := byte(0); ; x++ {
				select {
				case <-stop:
					return
				default:
					scribble(staging, x)
				}
			}
		})
		if got := e.commit(r.GetAttempt()); !bytes.Equal(got, []byte{committed}) {
			t.Fatalf("round %d: %v", round, got)
		}
		l := e.fetch(ns, names, time.Minute)
		slot := e.slots(l.GetSlots())[0]
		first := bytes.Clone(e.at(slot))
		close(stop)
		scribbler.Wait()
		scribble(staging, 0xee)
		if sum := paging.Checksum(first); sum != slot.Sum {
			t.Errorf("round %d: the page has checksum %x, announced %x", round, sum, slot.Sum)
		}
		if !bytes.Equal(first, e.at(slot)) {
			t.Errorf("round %d: a published page changed", round)
		}
		e.release(l.GetLeaseId())
	}
}

// Bytes that a client writes late, into staging of an attempt that expired, reach
// no other attempt: the slots are given to nobody until the client ends it.
func TestLateFillOfAnExpiredAttempt(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(64<<10, 1)
	late := e.reserve(ns, blockNames(0, 2), 20*time.Millisecond)
	eventually(t, "the attempt expires", func() bool { return n.Metrics().AttemptsLate == 1 })

	seen := map[paging.Slot]bool{}
	lateSlots := e.slots(late.GetSlots())
	for _, s := range lateSlots {
		seen[s] = true
	}
	for round := 1; round < 30; round++ {
		names := blockNames(10*round, 2)
		r := e.reserve(ns, names, time.Minute)
		for i, s := range e.slots(r.GetSlots()) {
			if seen[s] {
				t.Fatalf("round %d: staging of the expired attempt was given out again", round)
			}
			fillPage(e.at(s), names[i], 0)
		}
		for _, s := range lateSlots { // the late fill
			scribble(e.at(s), byte(round))
		}
		e.commit(r.GetAttempt())
		l := e.fetch(ns, names, time.Minute)
		for i, s := range e.slots(l.GetSlots()) {
			if !bytes.Equal(e.at(s), wantPage(64<<10, names[i], 0)) {
				t.Fatalf("round %d: wrong bytes", round)
			}
		}
		e.release(l.GetLeaseId())
	}
	if got := e.commit(late.GetAttempt()); !bytes.Equal(got, []byte{expired, expired}) {
		t.Errorf("late commit: %v", got)
	}
	// Now that the client ended it the staging is used again.
	var again bool
	for round := 100; round < 130 && !again; round++ {
		r := e.reserve(ns, blockNames(10*round, 16), time.Minute)
		for _, s := range e.slots(r.GetSlots()) {
			again = again || seen[s]
		}
		if _, err := e.pages.Abort(e.ctx, &kvtierv1.AbortRequest{Attachment: e.id, Attempt: r.GetAttempt()}); err != nil {
			t.Fatal(err)
		}
	}
	if !again {
		t.Error("staging of an attempt that the client ended is never used again")
	}
}

// Staging of one page: 8 clients write 1,000 blocks each in rounds of one block,
// most of them shared, and every block is stored once and right.
func TestStagingOfOnePage(t *testing.T) {
	cfg := servertest.Config(t)
	cfg.RAMBytes = 64 << 20
	n := startNode(t, cfg)
	const pageBytes, shared, own, clients = 4096, 800, 200, 8
	var all sync.WaitGroup
	errs := make(chan error, clients)
	for k := range clients {
		c := n.client(t, client.Config{StagingBytes: pageBytes})
		all.Go(func() {
			errs <- writeInRounds(t, c, pageBytes, append(blockNames(0, shared), blockNames(10000*(k+1), own)...))
		})
	}
	all.Wait()
	for range clients {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	c := n.client(t, client.Config{})
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(pageBytes, 1))
	if err != nil {
		t.Fatal(err)
	}
	for k := range clients + 1 {
		names := blockNames(10000*k, own)
		if k == 0 {
			names = blockNames(0, shared)
		}
		l, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
		if err != nil || l.Usable != len(names) {
			t.Fatalf("set %d: %d usable, %v", k, l.Usable, err)
		}
		checkLease(t, l, names, 1)
	}
	if m := n.Metrics(); m.Hierarchy.CommittedBlocks != shared+clients*own || m.Attempts != 0 {
		t.Errorf("%d blocks were committed, want %d; %d attempts open", m.Hierarchy.CommittedBlocks, shared+clients*own, m.Attempts)
	}
}

func writeInRounds(t testing.TB, c *client.Client, pageBytes uint64, names []paging.BlockName) error {
	ns, err := c.RegisterNamespace(t.Context(), testNamespace(pageBytes, 1))
	if err != nil {
		return err
	}
	outcomes, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{},
		func(row, part int, dst []byte) error {
			fillPage(dst, names[row], part)
			return nil
		})
	if err != nil {
		return err
	}
	for i, o := range outcomes {
		switch o {
		case client.OutcomeCommitted, client.OutcomeExists, client.OutcomeInFlight, client.OutcomeDuplicate:
		default:
			return fmt.Errorf("block %d: %v", i, o)
		}
	}
	return nil
}

func TestReserveNamesWhyNot(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{StagingBytes: 32 << 10})
	ns := e.register(4096, 1)
	stored := blockNames(0, 2)
	e.put(ns, stored)
	names := append(append([]paging.BlockName{}, stored...), blockNames(10, 12)...)
	names = append(names[:4], append([]paging.BlockName{names[2]}, names[4:]...)...)
	r := e.reserve(ns, names, time.Minute)
	o := r.GetOutcomes()
	if o[0] != exists || o[1] != exists || o[2] != granted || o[4] != repeated || o[len(o)-1] != stagingFull {
		t.Errorf("outcomes %v", o)
	}
	if got := len(r.GetSlots()) / paging.SlotBytes; got != bytes.Count(o, []byte{granted}) {
		t.Errorf("%d slots for %d granted blocks", got, bytes.Count(o, []byte{granted}))
	}
	// Rows may be committed one by one.
	for row := range len(r.GetSlots()) / paging.SlotBytes {
		res, err := e.pages.Commit(e.ctx, &kvtierv1.CommitRequest{Attachment: e.id, Attempt: r.GetAttempt(), Rows: []byte{byte(row), 0, 0, 0}})
		if err != nil || !bytes.Equal(res.GetOutcomes(), []byte{committed}) {
			t.Fatalf("row %d: %v, %v", row, res.GetOutcomes(), err)
		}
	}
	_, err := e.pages.Commit(e.ctx, &kvtierv1.CommitRequest{Attachment: e.id, Attempt: r.GetAttempt(), Rows: []byte{0, 0, 0, 0}})
	if !errors.Is(kvstatus.Err(err), paging.ErrNotFound) {
		t.Errorf("after the last row: %v (%v), want the attempt over", err, status.Code(err))
	}
}

// A client that lost the answer to Reserve ends the attempt by the token it
// chose, on the stream, with an answer or one-way.
func TestAbortOnTheStream(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(4096, 1)
	token := []byte("0123456789abcdef")
	reserve := func(token []byte) (*kvtierv1.ReserveResponse, error) {
		return e.pages.Reserve(e.ctx, &kvtierv1.ReserveRequest{
			Attachment: e.id, NamespaceId: ns, BlockNames: packNames(blockNames(0, 4)), Attempt: token,
		})
	}
	for request := range uint64(2) {
		if r, err := reserve(token); err != nil || !bytes.Equal(r.GetAttempt(), token) {
			t.Fatalf("reserve with a token of the client: %x, %v", r.GetAttempt(), err)
		}
		other, err := e.pages.Reserve(e.ctx, &kvtierv1.ReserveRequest{
			Attachment: e.id, NamespaceId: ns, BlockNames: packNames(blockNames(9, 1)), Attempt: token,
		})
		if !errors.Is(kvstatus.Err(err), paging.ErrInvalid) {
			t.Errorf("a second attempt of one token: %v, %v", other, err)
		}
		abort := &kvtierv1.AttachRequest{RequestId: request * 7, Message: &kvtierv1.AttachRequest_Abort{Abort: &kvtierv1.AbortRequest{Attempt: token}}}
		if err := e.stream.Send(abort); err != nil {
			t.Fatal(err)
		}
		for request > 0 {
			m, err := e.stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if m.GetRequestId() == 7 && m.GetAbort() != nil {
				break
			}
		}
		eventually(t, "no attempt", func() bool { return n.Metrics().Attempts == 0 })
	}
	if _, err := reserve(token[:15]); !errors.Is(kvstatus.Err(err), paging.ErrInvalid) {
		t.Errorf("a token of 15 bytes: %v", err)
	}
	if got := e.put(ns, blockNames(0, 4)); !bytes.Equal(got, bytes.Repeat([]byte{committed}, 4)) {
		t.Errorf("the blocks afterwards: %v", got)
	}
}

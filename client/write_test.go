package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func reserve(t testing.TB, c *client.Client, r client.ReserveRequest) *client.Attempt {
	t.Helper()
	a, err := c.Reserve(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Abort(context.Background()) })
	return a
}

func fillRow(a *client.Attempt, row int, names []paging.BlockName) {
	for part := range 2 {
		if dst := a.Page(row, part); dst != nil {
			fillPage(names[a.Block(row)], part, dst)
		}
	}
}

func TestAttemptRowByRow(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		t.Run(fmt.Sprintf("streamed=%v", streamed), func(t *testing.T) {
			n := startTestNode(t)
			c := open(t, faces(n)[streamed])
			ns := register(t, c)
			names := chain(1, 6)
			write(t, c, ns, names[2:3])
			a := reserve(t, c, client.ReserveRequest{Namespace: ns, Names: names})
			if a.Rows() != 5 || a.Outcomes[2] != client.OutcomeExists || a.Block(2) != 3 {
				t.Fatalf("%d rows, outcomes %v", a.Rows(), a.Outcomes)
			}
			if got := len(a.Page(0, 0)); got != 16<<10 {
				t.Errorf("page of %d bytes", got)
			}
			if a.Page(5, 0) != nil || a.Page(0, 2) != nil || a.Page(-1, 0) != nil {
				t.Error("memory for a page that was not granted")
			}
			for row := range a.Rows() {
				fillRow(a, row, names)
			}
			outcomes, err := a.Commit(t.Context(), client.CommitOptions{Rows: []int{3, 0}})
			if err != nil || len(outcomes) != 2 || outcomes[0] != client.OutcomeCommitted {
				t.Fatalf("commit: %v, %v", outcomes, err)
			}
			if a.Page(3, 0) != nil {
				t.Error("memory of a committed row")
			}
			for what, rows := range map[string][]int{"committed": {1, 3}, "twice": {1, 1}} {
				if _, err := a.Commit(t.Context(), client.CommitOptions{Rows: rows}); !errors.Is(err, paging.ErrClosed) {
					t.Errorf("commit of a row %s: %v", what, err)
				}
			}
			for what, rows := range map[string][]int{"out of range": {9}, "negative": {-1}, "none": {}} {
				if _, err := a.Commit(t.Context(), client.CommitOptions{Rows: rows}); !errors.Is(err, paging.ErrInvalid) {
					t.Errorf("commit of rows %s: %v", what, err)
				}
			}
			if outcomes, err = a.Commit(t.Context(), client.CommitOptions{}); err != nil || len(outcomes) != 3 {
				t.Fatalf("commit of the rest: %v, %v", outcomes, err)
			}
			if _, err := a.Commit(t.Context(), client.CommitOptions{}); !errors.Is(err, paging.ErrClosed) {
				t.Errorf("commit after the last row: %v", err)
			}
			if err := a.Abort(t.Context()); err != nil {
				t.Errorf("abort after the last row: %v", err)
			}
			lease := fetch(t, c, ns, names)
			if lease.Usable != 6 {
				t.Errorf("%d blocks usable", lease.Usable)
			}
			if err := readAll(lease, names, 2); err != nil {
				t.Error(err)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAbortPublishesNothing(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	a := reserve(t, c, client.ReserveRequest{Namespace: ns, Names: chain(1, 4)})
	if err := a.Abort(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a.Page(0, 0) != nil {
		t.Error("memory of an aborted attempt")
	}
	if _, err := a.Commit(t.Context(), client.CommitOptions{}); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("commit after abort: %v", err)
	}
	if p, err := c.Lookup(t.Context(), ns, chain(1, 4), 0); err != nil || p.Usable != 0 {
		t.Errorf("lookup after abort: %d, %v", p.Usable, err)
	}
}

func TestCommitAfterTheDeadline(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 2)
	a := reserve(t, c, client.ReserveRequest{Namespace: ns, Names: names, TTL: time.Nanosecond})
	outcomes, err := a.Commit(t.Context(), client.CommitOptions{})
	if err != nil || outcomes[0] != client.OutcomeExpired {
		t.Fatalf("commit: %v, %v", outcomes, err)
	}
	n.mu.Lock()
	for _, at := range n.attachments {
		if len(at.attempts) != 1 {
			t.Errorf("%d attempts open: its staging must stay until the client ends it", len(at.attempts))
		}
	}
	n.mu.Unlock()
	if err := a.Abort(t.Context()); err != nil {
		t.Error(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, at := range n.attachments {
		if len(at.attempts) != 0 {
			t.Errorf("%d attempts open after abort", len(at.attempts))
		}
	}
}

func TestAttemptOverARestart(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 2)
	a := reserve(t, c, client.ReserveRequest{Namespace: ns, Names: names})
	n.stop()
	eventually(t, "end of the attachment", func() bool { return c.Renew(t.Context(), 0) != nil && c.Metrics().MappedBytes == 0 })
	fillRow(a, 0, names) // still memory
	if _, err := a.Commit(t.Context(), client.CommitOptions{}); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("commit to a node that is gone: %v", err)
	}
	if err := a.Abort(t.Context()); err != nil {
		t.Errorf("abort: %v", err)
	}
	eventually(t, "unmapping", func() bool { return mapped(t) == 0 })
}

// One page of staging, 1,000 blocks, 8 writers: each round waits for another's.
func TestWritersShareOnePageOfStaging(t *testing.T) {
	n := newTestNode(t)
	n.stagingBytes = n.slotBytes
	n.start(t)
	c := open(t, patient(n))
	namespace := testNamespace()
	namespace.Layout.Parts = namespace.Layout.Parts[:1]
	ns, err := c.RegisterNamespace(t.Context(), namespace)
	if err != nil {
		t.Fatal(err)
	}
	names := chain(1, 1000)
	var writers sync.WaitGroup
	for i := range 8 {
		writers.Go(func() {
			if err := tryWrite(t.Context(), c, ns, names[i*125:(i+1)*125]); err != nil {
				t.Error(err)
			}
		})
	}
	writers.Wait()
	lease := fetch(t, c, ns, names)
	if lease.Usable != 1000 {
		t.Errorf("%d blocks usable", lease.Usable)
	}
	if err := readAll(lease, names, 1); err != nil {
		t.Error(err)
	}
	lease.ReleaseAsync()
}

func TestStagingTooSmallForABlock(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		n := newTestNode(t)
		n.stagingBytes = n.slotBytes // one page, but a block has two
		n.start(t)
		cfg := faces(n)[streamed]
		cfg.StagingBytes = n.slotBytes
		c := open(t, cfg)
		ns := register(t, c)
		if err := tryWrite(t.Context(), c, ns, chain(1, 2)); !errors.Is(err, paging.ErrNoSpace) {
			t.Errorf("streamed=%v: %v", streamed, err)
		}
	}
}

func TestFillThatFailsPublishesNothing(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	broken := errors.New("device lost")
	_, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: chain(1, 4)}, client.CommitOptions{},
		func(row, _ int, _ []byte) error {
			if row == 2 {
				return broken
			}
			return nil
		})
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if p, err := c.Lookup(t.Context(), ns, chain(1, 4), 0); err != nil || p.Usable != 0 {
		t.Errorf("lookup: %d, %v", p.Usable, err)
	}
}

func TestBlockTwiceInOneWrite(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		n := startTestNode(t)
		c := open(t, faces(n)[streamed])
		ns := register(t, c)
		names := append(chain(1, 2), chain(1, 1)...)
		outcomes, err := c.WriteBlocks(t.Context(), client.ReserveRequest{Namespace: ns, Names: names}, client.CommitOptions{},
			func(row, part int, dst []byte) error {
				fillPage(names[row], part, dst)
				return nil
			})
		if err != nil || outcomes[1] != client.OutcomeCommitted || outcomes[2] != client.OutcomeRepeated {
			t.Errorf("streamed=%v: %v, %v", streamed, outcomes, err)
		}
	}
}

// A grant whose answer does not come in time is nobody's: the node is told, and
// its staging is there for the next.
func TestReserveThatIsGivenUp(t *testing.T) {
	n := startTestNode(t)
	c := open(t, patient(n))
	ns := register(t, c)
	names := chain(1, 32) // all of staging
	n.deaf.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := c.Reserve(ctx, client.ReserveRequest{Namespace: ns, Names: names}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("reserve without an answer: %v", err)
	}
	n.deaf.Store(false)
	eventually(t, "staging", func() bool {
		a, err := c.Reserve(t.Context(), client.ReserveRequest{Namespace: ns, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Abort(t.Context())
		return a.Rows() == len(names)
	})
}

// The same of a real node, whose caller gives up at any instant: in the end no
// attempt is open.
func TestDaemonReserveGivenUpAtAnyInstant(t *testing.T) {
	n := startDaemon(t, nil)
	c := open(t, daemonFaces(n)[false])
	ns := register(t, c)
	names := chain(1, 30)
	held := 0
	for i := range 400 {
		ctx, cancel := context.WithCancel(t.Context())
		stop := time.AfterFunc(time.Duration(i)*2*time.Microsecond, cancel)
		a, err := c.Reserve(ctx, client.ReserveRequest{Namespace: ns, Names: names})
		stop.Stop()
		cancel()
		if err == nil {
			held += a.Rows()
			err = a.Abort(t.Context())
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	if held == 0 {
		t.Error("no reserve was answered in time")
	}
	eventually(t, "no attempt left", func() bool { return n.Metrics().Attempts == 0 })
}

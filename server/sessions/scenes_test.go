package sessions

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/migrate"
)

func TestSessionGrows(t *testing.T) {
	inWorld(t, 3, func(w *world) { w.ramMiB = 8 }, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		if got := a.mustOpen("s", nil).GetSession(); got.GetEpoch() != 1 || got.GetBlocks() != 0 || got.GetOwnerName() != "node0" {
			t.Errorf("%v", got)
		}
		a.grow("s", 1, 0, 100)
		a.grow("s", 1, 100, 1000) // a segment becomes full
		if r, err := a.append("s", 50, chain(1, 50, 1100)); err != nil || r.GetBlocks() != 1150 || r.GetTokens() != 1150*uint64(w.ns.Layout.BlockTokens) {
			t.Errorf("an append that overlaps: %v, %v", r, err)
		}
		if r, err := a.append("s", 0, chain(1, 0, 1150)); err != nil || r.GetBlocks() != 1150 {
			t.Errorf("the same again: %v, %v", r, err)
		}
		if _, err := a.append("s", 1151, chain(1, 1151, 1)); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a gap: %v", err)
		}
		if _, err := a.append("s", 1149, chain(2, 1149, 2)); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("another chain: %v", err)
		}
		if _, err := b.append("s", 1150, chain(1, 1150, 1)); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("at another node: %v", err)
		}
		if _, err := b.open("s", nil); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("opened at another node: %v", err)
		}
		w.eventually(time.Second, "the second node is told of", func() bool { return b.get("s").GetSecondName() != "" && b.get("s").GetBlocks() == 1150 })
		if ns, names, err := b.m.Names(t.Context(), "t", "s", 1000, 1100); err != nil || ns != w.id || !slices.Equal(names, chain(1, 1000, 100)) {
			t.Errorf("names at another node: %d, %v", len(names), err)
		}
		got, err := b.m.Get(t.Context(), &kvtierv1.GetSessionRequest{Session: "s", Tenant: "t", Usage: true, Placement: true, FromBlock: 3, ToBlock: 5})
		if err != nil || got.GetSession().GetAbsentBlocks() != 50 || len(got.GetRuns()) != 2 || !slices.Equal(got.GetBlockNames(), packNames(chain(1, 3, 2))) {
			t.Errorf("%v, %v", got, err)
		}
		// A restart finds it, with what was appended last.
		a.crash()
		a.start()
		w.eventually(20*time.Second, "the owner is back", func() bool { return a.m.record("t/s") != nil && a.m.serves(a.id) })
		if got := a.mustOpen("s", nil).GetSession(); got.GetBlocks() != 1150 || got.GetEpoch() != 1 {
			t.Errorf("after a restart: %v", got)
		}
		a.grow("s", 1, 1150, 1)
		if _, err := a.m.CloseSession(t.Context(), &kvtierv1.CloseSessionRequest{Session: "s", Tenant: "t"}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.append("s", 1151, chain(1, 1151, 1)); !errors.Is(err, paging.ErrNotFound) {
			t.Errorf("after it was closed: %v", err)
		}
	})
}

func TestSessionMoves(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", func(r *kvtierv1.OpenSessionRequest) { r.Retention = &kvtierv1.Retention{Priority: 70} })
		a.grow("s", 1, 0, 300)
		b.put(chain(1, 0, 100), 0)
		_, plan, err := w.nodes[2].move("s", b, func(r *kvtierv1.MigrateSessionRequest) { r.DryRun = true })
		if err != nil || plan.GetLackingBlocks() != 200 || plan.GetLackingBytes() != 200*pageBytes {
			t.Fatalf("%v, %v", plan, err)
		}
		p := w.nodes[2].mustMove("s", b)
		if p.GetSentBytes() != 200*pageBytes || p.GetLackedBytes() != p.GetSentBytes() {
			t.Errorf("%v", p)
		}
		if epoch := w.owner("s", b); epoch != 2 {
			t.Errorf("epoch %d", epoch)
		}
		if got := b.local(chain(1, 0, 300)); got != 300 {
			t.Errorf("%d of 300 blocks are at the target", got)
		}
		if _, err := a.append("s", 300, chain(1, 300, 1)); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("a late append at the source: %v", err)
		}
		b.grow("s", 1, 300, 5)
		// And back, with nothing but what is new.
		if p := b.mustMove("s", a); p.GetSentBytes() != 5*pageBytes {
			t.Errorf("back: %v", p)
		}
		a.grow("s", 1, 305, 1)
		if epoch := w.owner("s", a); epoch != 3 {
			t.Errorf("epoch %d", epoch)
		}
		if _, _, err := a.move("s", a, nil); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("to itself: %v", err)
		}
		if _, err := b.open("s", func(r *kvtierv1.OpenSessionRequest) { r.Elsewhere = kvtierv1.Elsewhere_ELSEWHERE_BRING }); err != nil {
			t.Errorf("brought: %v", err)
		}
		w.owner("s", b)
		b.grow("s", 1, 306, 1)
	})
}

// Appends go on while a session moves; those that are refused are tried again, and
// none is lost.
func TestAppendsWhileItMoves(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 200)
		done := make(chan *kvtierv1.MoveProgress)
		go func() { done <- a.mustMove("s", b) }()
		at, n := a, 200
		var longest time.Duration
		last := time.Now()
		for range 200 {
			at.put(chain(1, n, 1), n)
			_, err := at.append("s", n, chain(1, n, 1))
			switch {
			case err == nil:
				n++
				longest = max(longest, time.Since(last))
				last = time.Now()
			case errors.Is(err, paging.ErrMoved):
				at = b
			case !errors.Is(err, paging.ErrFrozen):
				t.Fatal(err)
			}
			w.sleep(5 * time.Millisecond)
		}
		p := <-done
		if at != b {
			t.Fatal("it did not move")
		}
		t.Logf("pause %v, longest time without an append %v", p.GetPause().AsDuration(), longest)
		if longest > 50*time.Millisecond {
			t.Errorf("%v without an append", longest)
		}
		w.owner("s", b)
		if got := b.local(chain(1, 0, n)); got != n {
			t.Errorf("%d of %d blocks", got, n)
		}
	})
}

func TestTakeOver(t *testing.T) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[2], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 1500)
		second := w.nodes[0].get("s").GetSecondName()
		w.eventually(time.Second, "the second node is told of", func() bool { second = w.nodes[0].get("s").GetSecondName(); return second != "" })
		a.crash()
		if _, err := b.open("s", nil); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("while its owner is not known to be down: %v", err)
		}
		w.eventually(30*time.Second, "the owner is down", func() bool { return !b.m.serves(a.id) })
		got := b.mustOpen("s", nil)
		if !got.GetTakenOver() || got.GetLostBlocks() != 0 || got.GetSession().GetBlocks() != 1500 || got.GetSession().GetEpoch() != 2 {
			t.Errorf("%v", got)
		}
		b.grow("s", 1, 1500, 3)
		a.start()
		w.eventually(30*time.Second, "it is back", func() bool { return a.m.record("t/s").GetEpoch() == 2 && b.m.serves(a.id) })
		if _, err := a.append("s", 1500, chain(9, 1500, 1)); !errors.Is(err, paging.ErrMoved) {
			t.Errorf("the former owner: %v", err)
		}
		// Its blocks are still there: what it gives up by moving is not lost.
		if p := b.mustMove("s", a); p.GetSentBytes() > 1503*pageBytes {
			t.Errorf("%v", p)
		}
		a.grow("s", 1, 1503, 1)
	})
}

func TestShare(t *testing.T) {
	inWorld(t, 2, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 30)
		before := a.h.Metrics()
		r, err := b.m.Share(t.Context(), &kvtierv1.ShareSessionRequest{Session: "s", Tenant: "t", Fork: "f", Blocks: 20})
		if err != nil || r.GetSession().GetBlocks() != 20 || r.GetSession().GetParent() != "s" || r.GetSession().GetOwnerName() != "node0" {
			t.Fatalf("%v, %v", r, err)
		}
		a.put(chain(2, 20, 5), 20)
		if got, err := a.append("f", 20, chain(2, 20, 5)); err != nil || got.GetBlocks() != 25 {
			t.Errorf("%v, %v", got, err)
		}
		a.grow("s", 1, 30, 1)
		if after := a.h.Metrics(); after.MovedBlocks != before.MovedBlocks {
			t.Error("blocks were copied")
		}
		// The prefix that both have is sent once.
		if p := a.mustMove("s", b); p.GetSentBytes() != 31*pageBytes {
			t.Errorf("%v", p)
		}
		if p := a.mustMove("f", b); p.GetSentBytes() != 5*pageBytes {
			t.Errorf("%v", p)
		}
	})
}

func TestTimeEnds(t *testing.T) {
	inWorld(t, 2, func(w *world) { w.change = func(c *Config) { c.MaxPerTenant = 2 } }, func(t *testing.T, w *world) {
		a := w.nodes[0]
		a.mustOpen("short", func(r *kvtierv1.OpenSessionRequest) {
			r.Retention = &kvtierv1.Retention{Ttl: durationpb.New(20 * time.Second)}
		})
		a.mustOpen("long", nil)
		if _, err := a.open("more", nil); !errors.Is(err, paging.ErrOverQuota) {
			t.Errorf("more than a tenant may have: %v", err)
		}
		w.owner("short", a)
		watch, err := w.nodes[1].m.Watch("t", []string{"short"})
		if err != nil {
			t.Fatal(err)
		}
		defer watch.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for gone := false; !gone; {
			events, err := watch.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			gone = events[0].GetGone()
		}
		a.mustOpen("more", nil)
		w.owner("more", a)
		list, err := w.nodes[1].m.List(t.Context(), &kvtierv1.ListSessionsRequest{Tenant: "t", PageSize: 1})
		if err != nil || len(list.GetSessions()) != 1 || list.GetSessions()[0].GetSession() != "long" || list.GetNextPageToken() == "" {
			t.Fatalf("%v, %v", list, err)
		}
		list, err = w.nodes[1].m.List(t.Context(), &kvtierv1.ListSessionsRequest{Node: "node0", PageToken: list.GetNextPageToken(), Usage: true})
		if err != nil || len(list.GetSessions()) != 1 || list.GetSessions()[0].GetSession() != "more" || list.GetNextPageToken() != "" {
			t.Fatalf("%v, %v", list, err)
		}
	})
}

func TestMoveIsCancelled(t *testing.T) {
	inWorld(t, 2, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 500)
		if err := a.m.BeginMove(t.Context(), "t/s", b.id, 100*pageBytes, time.Minute); err != nil {
			t.Fatal(err)
		}
		if err := b.m.BeginMove(t.Context(), "t/s", b.id, 0, time.Minute); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a second move of it: %v", err)
		}
		w.sleep(time.Second)
		p, err := b.m.MoveProgress(t.Context(), "t/s")
		if err != nil || p.GetState() != migrate.Copying.String() {
			t.Errorf("%v, %v", p, err)
		}
		if err := b.m.CancelMove(t.Context(), "t/s"); err != nil {
			t.Fatal(err)
		}
		w.eventually(5*time.Second, "it ended", func() bool { p, err = b.m.MoveProgress(t.Context(), "t/s"); return err == nil && p.GetEnded() })
		if p.GetState() != migrate.Aborted.String() || p.GetWhy() != "cancelled" {
			t.Errorf("%v", p)
		}
		w.owner("s", a)
		a.grow("s", 1, 500, 1)
		if p := a.mustMove("s", b); p.GetSentBytes() >= 501*pageBytes {
			t.Errorf("what was copied before is copied again: %v", p)
		}
	})
}

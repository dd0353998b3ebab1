package transport

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

func TestHave(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		a, me := c.add(1, nil), c.add(2, nil)
		const n = maxHaveBlocks + 100
		names := make([]paging.BlockName, n)
		for i := range names {
			names[i] = nameOf(i)
		}
		a.src.put(names[1], 3, 10, false)
		a.src.put(names[n-1], 63, 10, false)
		held, err := me.Have(t.Context(), a.id, &HaveRequest{Namespace: ns, Names: names})
		if err != nil || len(held) != n {
			t.Fatalf("%d answers, %v", len(held), err)
		}
		for i, h := range held {
			want := Held{}
			switch i {
			case 1:
				want = Held{1 << 3, 2}
			case n - 1:
				want = Held{1 << 63, 2}
			}
			if h != want {
				t.Errorf("block %d: %+v, want %+v", i, h, want)
			}
		}
		if _, err := me.Have(t.Context(), a.id, &HaveRequest{Names: names[:1]}); !errors.Is(err, paging.ErrUnknownNamespace) {
			t.Errorf("unknown namespace: %v", err)
		}
		if held, err := me.Have(t.Context(), a.id, &HaveRequest{}); err != nil || len(held) != 0 {
			t.Errorf("no names: %v, %v", held, err)
		}
		if _, err := me.Have(t.Context(), placement.NodeID{88}, &HaveRequest{Names: names[:1]}); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("unknown node: %v", err)
		}
	})
}

// TestCalls: arguments and answers of every length, and every sentinel.
func TestCalls(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		errs := []error{paging.ErrNotFound, paging.ErrDenied, paging.ErrUnavailable, paging.ErrClosed, paging.ErrInvalid, paging.ErrExpired, paging.ErrNoSpace}
		a := c.add(1, func(_ *MuxConfig, cfg *Config) {
			cfg.Answer = func(_ context.Context, from placement.NodeID, method uint8, argument []byte) ([]byte, error) {
				switch {
				case from != placement.NodeID{2}:
					return nil, paging.ErrDenied
				case method == 0:
					return append([]byte("re: "), argument...), nil
				case method == 99:
					return make([]byte, MaxCallBytes+1), nil
				}
				return nil, fmt.Errorf("method %d: %w", method, errs[method-1])
			}
		})
		me := c.add(2, nil)
		for _, n := range []int{0, 1, 5000, MaxCallBytes - 5} {
			argument := strings.Repeat("x", n)
			got, err := me.Call(t.Context(), a.id, 0, []byte(argument))
			if n == MaxCallBytes-5 {
				argument = argument[:min(n, len(argument))]
			}
			if err != nil || string(got) != "re: "+argument {
				t.Errorf("argument of %d bytes: answer of %d bytes, %v", n, len(got), err)
			}
		}
		if _, err := me.Call(t.Context(), a.id, 0, make([]byte, MaxCallBytes-4)); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("argument too long: %v", err)
		}
		if _, err := me.Call(t.Context(), a.id, 99, nil); err == nil {
			t.Error("an answer that is too long arrived")
		}
		for i, want := range errs {
			_, err := me.Call(t.Context(), a.id, uint8(i+1), nil)
			if errors.Is(want, paging.ErrInvalid) {
				want = paging.ErrUnknownNamespace // one code stands for both
			}
			if !errors.Is(err, want) || !strings.Contains(err.Error(), fmt.Sprintf("method %d", i+1)) {
				t.Errorf("method %d: %v, want %v", i+1, err, want)
			}
		}
		if _, err := a.Call(t.Context(), me.id, 0, nil); !errors.Is(err, paging.ErrUnavailable) {
			t.Errorf("a node that answers no calls: %v", err)
		}
	})
}

// TestTooManyCalls: the bound of calls at a time refuses the next, and waits for
// nobody; the caller's patience ends the call at the other node.
func TestTooManyCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newMemory())
		a := c.add(1, func(_ *MuxConfig, cfg *Config) {
			cfg.Answer = func(ctx context.Context, _ placement.NodeID, _ uint8, _ []byte) ([]byte, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})
		me := c.add(2, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for range maxCalls {
			wg.Go(func() {
				if _, err := me.Call(ctx, a.id, 1, nil); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, paging.ErrExpired) {
					t.Errorf("%v", err)
				}
			})
		}
		synctest.Wait()
		start := time.Now()
		if _, err := me.Call(t.Context(), a.id, 1, nil); !errors.Is(err, paging.ErrUnavailable) || time.Since(start) > 0 {
			t.Errorf("%v after %v, want %v at once", err, time.Since(start), paging.ErrUnavailable)
		}
		wg.Wait()
		synctest.Wait()
		if len(a.calls) != 0 {
			t.Errorf("%d calls still run after their callers gave up", len(a.calls))
		}
	})
}

// TestControlIsNotBehindPages: a question is answered while the bulk connection
// of the same two nodes stands still.
func TestControlIsNotBehindPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, a, _, me := inMemory(t, nil)
		a.src.put(nameOf(0), 0, 4<<20, false)
		hold := make(chan struct{})
		m.onRead(func(_ string, k *tap, _ []byte) error {
			if k.kind == Bulk && k.read > 1<<20 {
				<-hold
			}
			return nil
		})
		tr := newTray(t, want(0, 0, 4<<20, a))
		var wg sync.WaitGroup
		wg.Go(func() { fetch(t, me, tr) })
		synctest.Wait()
		start := time.Now()
		held, err := me.Have(t.Context(), a.id, &HaveRequest{Namespace: ns, Names: []paging.BlockName{nameOf(0)}})
		if err != nil || held[0].Parts != 1 || time.Since(start) > 0 {
			t.Errorf("%+v, %v after %v", held, err, time.Since(start))
		}
		m.onRead(nil)
		close(hold)
		wg.Wait()
		tr.allGood()
	})
}

// TestLostConnectionEndsQuestions: they do not wait for their contexts.
func TestLostConnectionEndsQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newMemory())
		a := c.add(1, func(_ *MuxConfig, cfg *Config) {
			cfg.Answer = func(ctx context.Context, _ placement.NodeID, _ uint8, _ []byte) ([]byte, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})
		me := c.add(2, nil)
		me.mux.running.Go(func() { time.Sleep(time.Second); _ = a.Close() })
		start := time.Now()
		if _, err := me.Call(t.Context(), a.id, 1, nil); !errors.Is(err, paging.ErrUnavailable) && !errors.Is(err, paging.ErrClosed) {
			t.Errorf("%v, want %v", err, paging.ErrUnavailable)
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("after %v", took)
		}
	})
}

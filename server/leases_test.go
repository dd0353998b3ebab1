package server

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

type countedHold struct{ released int }

func (h *countedHold) Release() bool { h.released++; return true }

func at(seconds int) time.Time { return time.Unix(1000+int64(seconds), 0) }

func TestLeaseDeadlineCountsAndNeverFrees(t *testing.T) {
	var ls leases
	h := &countedHold{}
	ls.add(7, &lease{hold: h, deadline: at(10), bytes: 100})
	if due := ls.sweep(at(9)); due != nil {
		t.Errorf("before the deadline: due %v", due)
	}
	if due := ls.sweep(at(10)); !slices.Equal(due, []uint64{7}) {
		t.Errorf("at the deadline: due %v, want [7]", due)
	}
	if due := ls.sweep(at(11)); due != nil {
		t.Errorf("an overdue lease is reported twice: %v", due)
	}
	if ls.overdue != 1 || ls.bytes != 100 || h.released != 0 {
		t.Errorf("overdue %d, bytes %d, released %d: want it counted, charged and held", ls.overdue, ls.bytes, h.released)
	}
	if !ls.renew(7, at(20)) || ls.overdue != 0 {
		t.Errorf("renew: overdue %d, want 0", ls.overdue)
	}
	if due := ls.sweep(at(20)); len(due) != 1 {
		t.Errorf("after the renewed deadline: due %v", due)
	}
	got, ok := ls.remove(7)
	if !ok || got != hold(h) || ls.bytes != 0 || ls.overdue != 0 {
		t.Errorf("remove: ok %v, bytes %d, overdue %d", ok, ls.bytes, ls.overdue)
	}
	if _, ok := ls.remove(7); ok || ls.renew(7, at(1)) {
		t.Error("a lease that ended is still held")
	}
}

// Random adds, renewals, removals and sweeps agree with a plain list.
func TestLeasesAgreeWithModel(t *testing.T) {
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, 2))
	var ls leases
	model := map[uint64]int{} // id → deadline
	overdue := map[uint64]bool{}
	next := uint64(0)
	for now := range 2000 {
		switch rnd.IntN(4) {
		case 0, 1:
			next++
			d := now + rnd.IntN(30)
			ls.add(next, &lease{hold: &countedHold{}, deadline: at(d), bytes: 10})
			model[next] = d
		case 2:
			id := uint64(rnd.IntN(int(next) + 1))
			_, held := model[id]
			if _, ok := ls.remove(id); ok != held {
				t.Fatalf("seed %d: remove %d: %v, want %v", seed, id, ok, held)
			}
			delete(model, id)
			delete(overdue, id)
		case 3:
			id, d := uint64(rnd.IntN(int(next)+1)), now+rnd.IntN(30)
			_, held := model[id]
			if ok := ls.renew(id, at(d)); ok != held {
				t.Fatalf("seed %d: renew %d: %v, want %v", seed, id, ok, held)
			}
			if held {
				model[id] = d
				delete(overdue, id)
			}
		}
		for _, id := range ls.sweep(at(now)) {
			if model[id] > now || overdue[id] {
				t.Fatalf("seed %d: lease %d due at %d swept at %d", seed, id, model[id], now)
			}
			overdue[id] = true
		}
		for id, d := range model {
			if d <= now && !overdue[id] {
				t.Fatalf("seed %d: lease %d due at %d not swept at %d", seed, id, d, now)
			}
		}
		if ls.overdue != len(overdue) || ls.bytes != int64(10*len(model)) {
			t.Fatalf("seed %d: overdue %d want %d, bytes %d want %d", seed, ls.overdue, len(overdue), ls.bytes, 10*len(model))
		}
	}
	if holds := ls.removeAll(); len(holds) != len(model) || ls.bytes != 0 {
		t.Errorf("removeAll returned %d holds, want %d", len(holds), len(model))
	}
}

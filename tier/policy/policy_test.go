package policy

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

func newPolicy(tb testing.TB, name string, capacity int64) *Policy {
	tb.Helper()
	p, err := New(name, capacity, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func each(t *testing.T, f func(t *testing.T, name string)) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) { f(t, name) })
	}
}

// model is what a caller knows of its resident blocks.
type model struct {
	weight  map[ID]int64
	level   map[ID]uint8
	expires map[ID]int64
	blocked map[ID]bool
}

func (m *model) used() (sum int64) {
	for _, w := range m.weight {
		sum += w
	}
	return sum
}

// expired reports whether a block's priority no longer counts.
func (m *model) expired(id ID, now int64) bool { return m.expires[id] != 0 && m.expires[id] <= now }

// rank is 0 for a block whose TTL has passed, else its level.
func (m *model) rank(id ID, now int64) int {
	if m.expired(id, now) {
		return 0
	}
	return int(m.level[id])
}

// best is the lowest rank of the blocks that may go, −1 if none may.
func (m *model) best(now int64) int {
	best := -1
	for id := range m.weight {
		if r := m.rank(id, now); !m.blocked[id] && (best < 0 || r < best) {
			best = r
		}
	}
	return best
}

// TestRandom plays random inserts, hits, removals, retentions, pins, resizes and
// evictions of blocks of random weights, and compares with the model.
func TestRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	each(t, func(t *testing.T, name string) {
		t.Parallel()
		for round := range uint64(5) {
			random(t, name, rand.New(rand.NewPCG(seed, round)))
		}
	})
}

func random(t *testing.T, name string, r *rand.Rand) {
	const ids, maxBlocked = 60, 10
	capacity := r.Int64N(200) + 1
	p := newPolicy(t, name, capacity)
	m := model{map[ID]int64{}, map[ID]uint8{}, map[ID]int64{}, map[ID]bool{}}
	now := int64(1)
	leave := func(id ID) {
		delete(m.weight, id)
		delete(m.level, id)
		delete(m.expires, id)
		delete(m.blocked, id)
	}
	retention := func(id ID) (priority uint8, expires int64) {
		if r.IntN(3) == 0 {
			priority = uint8(r.IntN(4) * 33)
		}
		if r.IntN(4) == 0 {
			expires = now + r.Int64N(40)
		}
		m.level[id], m.expires[id] = priority, expires
		return priority, expires
	}
	for range 2000 {
		now += r.Int64N(2)
		id := ID(r.IntN(ids))
		_, resident := m.weight[id]
		switch op := r.IntN(10); {
		case !resident:
			// The same content often comes back, under another ID.
			a := Access{Key: r.Uint64N(2 * ids), Weight: r.Int64N(9) + 1, Position: r.Int32N(30), Length: r.Int32N(31)}
			a.Priority, a.Expires = retention(id)
			m.weight[id] = a.Weight
			p.Insert(id, a)
		case op < 5:
			if m.expired(id, now) {
				m.level[id], m.expires[id] = 0, 0
			}
			p.Hit(id, Access{Now: now, Position: r.Int32N(30), Length: r.Int32N(31)})
		case op == 5:
			priority, expires := retention(id)
			p.Retain(id, priority, expires)
		case op == 6:
			p.Remove(id)
			leave(id)
		case op == 7:
			if m.blocked[id] {
				delete(m.blocked, id)
				if r.IntN(2) == 0 {
					p.Unblock(id)
				}
			} else if len(m.blocked) < maxBlocked {
				m.blocked[id] = true
			}
		case op == 8 && r.IntN(20) == 0:
			capacity = r.Int64N(200) + 1
			p.Resize(capacity)
		}
		for p.Used() > capacity {
			victim, ok := p.Victim(now, func(id ID) bool { return m.blocked[id] })
			best := m.best(now)
			if ok != (best >= 0) {
				t.Fatalf("Victim found one: %v, the model has one: %v", ok, best >= 0)
			}
			if !ok {
				break
			}
			if _, resident := m.weight[victim]; !resident || m.blocked[victim] {
				t.Fatalf("victim %d: resident %v, blocked %v", victim, resident, m.blocked[victim])
			}
			if got := m.rank(victim, now); got != best {
				t.Fatalf("victim %d has rank %d, there is one of rank %d", victim, got, best)
			}
			p.Evict(victim)
			leave(victim)
		}
		if p.Len() != len(m.weight) || p.Used() != m.used() {
			t.Fatalf("Len %d, Used %d; want %d, %d", p.Len(), p.Used(), len(m.weight), m.used())
		}
		audit(t, p, ids)
	}
}

// audit compares the sums that orders keep with their members.
func audit(t *testing.T, p *Policy, ids int) {
	t.Helper()
	sums := map[uint8]int64{}
	members := 0
	for id := range ids {
		if n := p.blocks.known(ID(id)); n != nil && n.place != absent {
			sums[n.queue] += n.weight
			members++
		}
	}
	if r, ok := p.order.(*reuse); ok {
		if r.members != members {
			t.Fatalf("reuse counts %d members, there are %d", r.members, members)
		}
		return
	}
	switch o := p.order.(*leveled).order.(type) {
	case *slru:
		if o.protectedWeight != sums[protected] {
			t.Fatalf("slru: protected weighs %d, its members %d", o.protectedWeight, sums[protected])
		}
	case *s3fifo:
		if o.weight != [2]int64{sums[small], sums[main]} {
			t.Fatalf("s3fifo: queues weigh %v, their members %v", o.weight, sums)
		}
		if o.ghost.weight > o.ghost.limit || len(o.ghost.fifo) > 2*len(o.ghost.at)+65 {
			t.Fatalf("s3fifo: ghost of %d weighs %d, limit %d, with %d entries", len(o.ghost.at), o.ghost.weight, o.ghost.limit, len(o.ghost.fifo))
		}
	case *wtinylfu:
		if o.windowWeight != sums[window] || o.mainWeight != sums[probation]+sums[protected] || o.main.protectedWeight != sums[protected] {
			t.Fatalf("wtinylfu: window %d, main %d, protected %d; members %v", o.windowWeight, o.mainWeight, o.main.protectedWeight, sums)
		}
	}
}

// TestLRUOrder compares whole eviction orders with a slice.
func TestLRUOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	p := newPolicy(t, "lru_rev", 1)
	var want []ID
	for range 5000 {
		id := ID(r.IntN(100))
		i := slices.Index(want, id)
		switch {
		case i < 0:
			p.Insert(id, Access{Key: uint64(id)})
			want = append(want, id)
		case r.IntN(4) == 0:
			p.Remove(id)
			want = slices.Delete(want, i, i+1)
		default:
			p.Hit(id, Access{})
			want = append(slices.Delete(want, i, i+1), id)
		}
	}
	if got := drain(p, 0); !slices.Equal(got, want) {
		t.Errorf("evicted %v, want %v", got, want)
	}
}

// drain evicts everything.
func drain(p *Policy, now int64) (order []ID) {
	for {
		id, ok := p.Victim(now, nil)
		if !ok {
			return order
		}
		p.Evict(id)
		order = append(order, id)
	}
}

// TestPriorityAndTTL: blocks leave by priority, and those whose TTL has passed
// have none: they go with the ordinary blocks, after those that were there.
func TestPriorityAndTTL(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		p := newPolicy(t, name, 100)
		retention := []struct {
			priority uint8
			expires  int64
		}{0: {50, 0}, 1: {0, 0}, 2: {255, 0}, 3: {100, 20}, 4: {1, 10}, 5: {50, 31}, 6: {0, 0}, 7: {0, 30}}
		for id, r := range retention {
			p.Insert(ID(id), Access{Key: uint64(id), Weight: 1, Priority: r.priority, Expires: r.expires})
		}
		p.Retain(6, 70, 0)
		got := drain(p, 30)
		if name == "lru_rev" {
			if want := []ID{1, 7, 4, 3, 0, 5, 6, 2}; !slices.Equal(got, want) {
				t.Errorf("evicted %v, want %v", got, want)
			}
		}
		ordinary := slices.Sorted(slices.Values(got[:4]))
		if want := []ID{1, 3, 4, 7}; !slices.Equal(ordinary, want) {
			t.Errorf("evicted %v first, want %v", got[:4], want)
		}
		if want := []ID{0, 5, 6, 2}; !slices.Equal(got[4:], want) {
			t.Errorf("evicted %v last, want %v", got[4:], want)
		}
	})
}

// TestHitAfterTTL: a block that is used after its TTL is an ordinary one.
func TestHitAfterTTL(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		p := newPolicy(t, name, 100)
		p.Insert(0, Access{Key: 10, Weight: 1, Priority: 90, Expires: 5})
		p.Insert(1, Access{Key: 11, Weight: 1})
		p.Insert(2, Access{Key: 12, Weight: 1, Priority: 1})
		p.Insert(3, Access{Key: 13, Weight: 1, Priority: 90, Expires: 6})
		if id, ok := p.Victim(5, nil); !ok || id > 1 {
			t.Fatalf("Victim = %d, %v; want 1 or 0, whose TTL has passed", id, ok)
		}
		p.Hit(0, Access{Now: 5})
		p.Hit(3, Access{Now: 6}) // no Victim has seen that its TTL passed
		got := drain(p, 6)
		if len(got) != 4 || got[3] != 2 {
			t.Errorf("evicted %v, want 2 with its priority of 1 to be the last", got)
		}
	})
}

// TestRetainedHits: blocks above priority 0 are the least recently used first,
// and come back to where they were in the order.
func TestRetainedHits(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		p := newPolicy(t, name, 100)
		for id := range ID(4) {
			p.Insert(id, Access{Key: uint64(id), Weight: 1, Priority: 5})
		}
		for id := range ID(4) {
			p.Hit(3-id, Access{})
		}
		if name != "default" { // may know better
			if id, _ := p.Victim(0, nil); id != 3 {
				t.Errorf("Victim = %d, want 3", id)
			}
		}
		p.Retain(1, 0, 0)
		if id, _ := p.Victim(0, nil); id != 1 {
			t.Errorf("Victim = %d, want 1, which is no longer retained", id)
		}
		if got := drain(p, 0); len(got) != 4 || p.Len() != 0 || p.Used() != 0 {
			t.Errorf("evicted %v; %d blocks of weight %d are left", got, p.Len(), p.Used())
		}
	})
}

// TestVictimIsBounded: however many blocks are pinned, a call asks about a few,
// and a few calls find the only one that may go.
func TestVictimIsBounded(t *testing.T) {
	const n, most = 5000, scanLimit + 2*recheckLimit + 1
	each(t, func(t *testing.T, name string) {
		p := newPolicy(t, name, n)
		for id := range ID(n) {
			p.Insert(id, Access{Key: uint64(id), Weight: 1, Priority: uint8(id % 3), Position: int32(id % 40), Length: 40})
		}
		free := none
		asked := 0
		blocked := func(id ID) bool { asked++; return id != free }
		for range n {
			asked = 0
			if id, ok := p.Victim(0, blocked); ok {
				t.Fatalf("Victim = %d, but all are blocked", id)
			}
			if asked > most {
				t.Fatalf("asked %d times, want at most %d", asked, most)
			}
		}
		for _, free = range []ID{0, n - 1, n / 2} {
			calls := 1
			for ; calls < n; calls++ {
				if id, ok := p.Victim(0, blocked); ok {
					if id != free {
						t.Fatalf("Victim = %d, want %d", id, free)
					}
					break
				}
			}
			if most := n/recheckLimit + 2; calls > most {
				t.Errorf("found %d after %d calls, want at most %d", free, calls, most)
			}
		}
	})
}

// TestSharedBlocks: the policies of two tenants share their nodes.
func TestSharedBlocks(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		var blocks Blocks
		a, err := New(name, 10, &blocks)
		if err != nil {
			t.Fatal(err)
		}
		b, err := New(name, 10, &blocks)
		if err != nil {
			t.Fatal(err)
		}
		for id := range ID(10000) {
			p := a
			if id%2 == 1 {
				p = b
			}
			p.Insert(id, Access{Key: uint64(id), Weight: 1})
		}
		a.Remove(0)
		b.Insert(0, Access{Key: 0, Weight: 1}) // the ID is used again
		gotA, gotB := drain(a, 0), drain(b, 0)
		if len(gotA) != 4999 || len(gotB) != 5001 {
			t.Errorf("evicted %d and %d, want 4999 and 5001", len(gotA), len(gotB))
		}
		for _, id := range gotA {
			if id%2 == 1 {
				t.Fatalf("tenant a evicted %d, a block of b", id)
			}
		}
	})
}

func TestBrokenCallersPanic(t *testing.T) {
	p := newPolicy(t, "default", 10)
	p.Insert(1, Access{})
	for what, f := range map[string]func(){
		"Insert of a resident block": func() { p.Insert(1, Access{}) },
		"Hit of an absent block":     func() { p.Hit(2, Access{}) },
		"Evict of an unknown block":  func() { p.Evict(1 << 20) },
		"Insert of the last ID":      func() { p.Insert(none, Access{}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", what)
				}
			}()
			f()
		}()
	}
}

func TestNodeSize(t *testing.T) {
	if size := reflect.TypeFor[node]().Size(); size != 32 {
		t.Errorf("a node has %d bytes, want 32", size)
	}
}

func TestHitDoesNotAllocate(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		const n = 10000
		p := newPolicy(t, name, n)
		for id := range ID(n) {
			p.Insert(id, Access{Key: uint64(id), Weight: 1, Position: int32(id % 50), Length: 50})
		}
		id := ID(0)
		hit := func() {
			id = (id + 7919) % n
			p.Hit(id, Access{Position: int32(id % 50), Length: 50})
		}
		for range 1 << 17 { // until the tables of the default policy have their size
			hit()
		}
		if allocs := testing.AllocsPerRun(10000, hit); allocs != 0 {
			t.Errorf("%v allocations a Hit, want 0", allocs)
		}
	})
}

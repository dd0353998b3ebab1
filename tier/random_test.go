package tier_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/hbm"
	"github.com/kvtier/kvtier/tier/nvme"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// The layouts of the random test.
func layouts() map[string]*paging.Namespace {
	plain := plain(16384)
	ranks := tiertest.Namespace(2)
	ranks.Layout.TP = 2
	ranks.Layout.Parts = []paging.Part{
		{Name: "rank0", PageBytes: 8192, BlocksPerPage: 1, Ranks: []uint32{0}},
		{Name: "rank1", PageBytes: 8192, BlocksPerPage: 1, Ranks: []uint32{1}},
	}
	hybrid := tiertest.Namespace(3)
	hybrid.Layout.Parts = []paging.Part{
		{Name: "full", PageBytes: 16384, BlocksPerPage: 1},
		{Name: "window", PageBytes: 8192, BlocksPerPage: 1, LastBlocks: 3},
		{Name: "state", PageBytes: 20000, BlocksPerPage: 2, LastBlocks: 2},
	}
	return map[string]*paging.Namespace{"plain": plain, "ranks": ranks, "hybrid": hybrid}
}

// world is a Hierarchy under random operations, and the model: for each block
// the parts that were committed and not dropped since. What the Hierarchy serves
// must be in it; ample says that it must serve all of it.
type world struct {
	*kit
	rng    *rand.Rand
	ample  bool
	faulty *tiertest.Faulty
	device *hbm.Arena // nil: none
	stored map[paging.BlockName]paging.PartSet
	holds  []held
	tries  []try
	ahead  []*tier.Promotion
}

type held struct {
	hold  *tier.Hold
	names []paging.BlockName
}

type try struct {
	a     *tier.Attempt
	names []paging.BlockName
	out   []tier.Outcome
	parts paging.PartSet
}

const (
	chains   = 6
	chainLen = 24
)

// Budgets of the random test: small holds a third of the blocks.
const small, large = 1 << 20, 16 << 20

func TestRandomOperations(t *testing.T) {
	for name, ns := range layouts() {
		t.Run("ram/"+name, func(t *testing.T) { random(t, ns, small, nil) })
		t.Run("device/"+name, func(t *testing.T) { randomDevice(t, ns, small, small/2, nil) })
		t.Run("device-large/"+name, func(t *testing.T) { randomDevice(t, ns, small, large, nil) })
		t.Run("device-map/"+name, func(t *testing.T) {
			randomDevice(t, ns, small, small/2, func(t *testing.T) tier.Durable { return tiertest.NewMap(tier.NVMe, 3*small/2) })
		})
		t.Run("ample/"+name, func(t *testing.T) { random(t, ns, large, nil) })
		t.Run("map/"+name, func(t *testing.T) {
			random(t, ns, small, func(t *testing.T) tier.Durable { return tiertest.NewMap(tier.NVMe, 3*small/2) })
		})
		t.Run("nvme/"+name, func(t *testing.T) {
			random(t, ns, small, func(t *testing.T) tier.Durable {
				d, err := nvme.Open(nvme.Config{Dir: t.TempDir(), BudgetBytes: 2 * small, SegmentBytes: small / 4})
				if err != nil {
					t.Fatal(err)
				}
				return d
			})
		})
	}
}

func random(t *testing.T, ns *paging.Namespace, budget int64, disk func(*testing.T) tier.Durable) {
	randomDevice(t, ns, budget, 0, disk)
}

// randomDevice is random with a device of so many bytes above RAM; 0: none.
func randomDevice(t *testing.T, ns *paging.Namespace, budget, device int64, disk func(*testing.T) tier.Durable) {
	seed := tiertest.Seed(t)
	synctest.Test(t, func(t *testing.T) {
		w := &world{rng: rand.New(rand.NewPCG(seed, 3)), ample: budget == large, stored: map[paging.BlockName]paging.PartSet{}}
		cfg := tier.Config{IncompleteAfter: time.Hour, FlushAfter: time.Second}
		if disk != nil {
			d := disk(t)
			t.Cleanup(func() { d.Close() })
			w.faulty = &tiertest.Faulty{Durable: d}
			cfg.Durable = w.faulty
		}
		if device > 0 {
			w.device = openDevice(t, device)
			cfg.Device = w.device
		}
		w.kit = open(t, ns, budget, cfg)
		for range tiertest.Rounds(400) {
			w.step()
			synctest.Wait()
			w.CheckInvariants()
		}
		for len(w.holds) > 0 {
			w.release(0)
		}
		for _, x := range w.tries {
			x.a.Abort()
		}
		for _, p := range w.ahead {
			p.Cancel()
		}
		if w.faulty != nil {
			w.mend()
		}
		time.Sleep(time.Minute)
		w.Tick()
		synctest.Wait()
		w.CheckInvariants()
		if m := w.Metrics(); m.Holds != 0 || m.Attempts != 0 || m.LeasedBytes != 0 || m.InFlightBytes != 0 {
			t.Errorf("something is held after everything was given back: %+v", m)
		}
	})
}

// step does one random thing.
func (w *world) step() {
	switch op := w.rng.IntN(100); {
	case op < 25:
		w.store()
	case op < 50:
		w.read()
	case op < 60 && len(w.holds) > 0:
		w.release(w.rng.IntN(len(w.holds)))
	case op < 65:
		w.reserve()
	case op < 75 && len(w.tries) > 0:
		w.finish(w.rng.IntN(len(w.tries)))
	case op < 85:
		w.retention()
	case op < 90:
		w.prefetch()
	case op < 95:
		w.fault()
	default:
		time.Sleep(time.Duration(w.rng.IntN(3000)) * time.Millisecond)
		w.Tick()
	}
}

// pick names a piece of a chain.
func (w *world) pick() (names []paging.BlockName, first int) {
	first = 0
	if w.rng.IntN(3) == 0 {
		first = w.rng.IntN(chainLen)
	}
	return chain(w.rng.IntN(chains), first, 1+w.rng.IntN(chainLen-first)), first
}

func (w *world) someParts() paging.PartSet {
	all := w.ns.Layout.AllParts()
	if w.rng.IntN(2) == 0 {
		return all
	}
	return max(1, paging.PartSet(w.rng.Uint64())&all)
}

func (w *world) store() {
	names, first := w.pick()
	parts := w.someParts()
	out := w.put(names, first, parts, tier.CommitOptions{Durable: w.rng.IntN(4) == 0, Retention: w.someRetention()})
	for i, o := range out {
		w.judge(names[i], first+i, parts, o)
	}
}

// judge takes an outcome of a write into the model.
func (w *world) judge(name paging.BlockName, position int, parts paging.PartSet, o tier.Outcome) {
	w.t.Helper()
	at := w.ns.Layout.PagesAt(position, parts)
	switch o {
	case tier.Committed, tier.NotDurable:
		w.stored[name] |= at
	case tier.Exists:
		if !w.stored[name].Contains(at) {
			w.t.Fatalf("block %x exists with parts %b, stored were %b", number(name), at, w.stored[name])
		}
	case tier.WriteNoSpace, tier.NotReached:
		if w.ample {
			w.t.Fatalf("outcome %d with room for everything", o)
		}
	case tier.BeingWritten:
	default:
		w.t.Fatalf("outcome %d", o)
	}
}

func (w *world) someRetention() *tier.Retention {
	if w.rng.IntN(4) > 0 {
		return nil
	}
	return &tier.Retention{Priority: uint8(w.rng.IntN(101)), TTL: time.Duration(w.rng.IntN(5)) * time.Second, RefreshOnHit: w.rng.IntN(2) == 0}
}

func (w *world) read() {
	names, first := w.pick()
	req := tier.FetchRequest{Names: names, First: first, Parts: w.someParts(), Mode: tier.Mode(w.rng.IntN(2)), Resident: w.rng.IntN(5) == 0}
	if w.device != nil && w.rng.IntN(3) > 0 {
		req.Wanted = tier.HBM
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Duration(w.rng.IntN(100))*time.Millisecond)
	defer cancel()
	hold := w.fetch(ctx, req)
	w.checkGrant(hold, req)
	w.holds = append(w.holds, held{hold, names})
	if len(w.holds) > 8 || w.rng.IntN(2) == 0 {
		w.release(0)
	}
}

// checkGrant compares a grant with the model, and its shortfalls with itself.
func (w *world) checkGrant(hold *tier.Hold, req tier.FetchRequest) {
	w.t.Helper()
	l := &w.ns.Layout
	have := func(i int) paging.PartSet { return w.stored[req.Names[i]] }
	granted := 0
	for row, k := range hold.Tiers {
		if k == tier.None {
			continue
		}
		granted++
		want := l.PagesAt(req.First+row, req.Parts)
		if req.Mode == tier.ModePrefix {
			want = l.Needed(req.First+hold.Usable, req.First+row, req.Parts)
		}
		if !have(row).Contains(want) {
			w.t.Fatalf("granted row %d with parts %b, stored were %b", row, want, have(row))
		}
		col := 0
		for part := range l.Parts {
			if !req.Parts.Has(part) {
				continue
			}
			if got := hold.Page(row, col) != nil; got != want.Has(part) {
				w.t.Fatalf("row %d part %d: page %v, wanted parts %b", row, part, got, want)
			}
			col++
		}
	}
	if granted != hold.Usable {
		w.t.Fatalf("%d rows granted, usable %d", granted, hold.Usable)
	}
	short := 0
	for i, s := range hold.Short {
		if s.Reason == tier.NoReason || s.Count < 1 || i > 0 && s.Block < hold.Short[i-1].Block+hold.Short[i-1].Count {
			w.t.Fatalf("shortfalls %+v", hold.Short)
		}
		short += s.Count
	}
	if short+granted != len(req.Names) {
		w.t.Fatalf("%d rows granted and %d short of %d", granted, short, len(req.Names))
	}
	if w.ample && req.Mode == tier.ModePrefix {
		best := l.UsablePrefix(req.First+len(req.Names), req.Parts, func(b int) paging.PartSet {
			if b < req.First {
				return req.Parts
			}
			return have(b - req.First)
		})
		if best = max(0, best-req.First); hold.Usable != best {
			w.t.Fatalf("usable %d, want %d", hold.Usable, best)
		}
	}
}

// release checks that what was held is still there.
func (w *world) release(i int) {
	w.t.Helper()
	x := w.holds[i]
	w.holds = append(w.holds[:i], w.holds[i+1:]...)
	w.verify(x.hold, x.names)
	for range 2 {
		if !x.hold.Release() {
			w.t.Fatal("a slot was reused while it was held")
		}
	}
}

func (w *world) reserve() {
	names, first := w.pick()
	parts := w.someParts()
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Millisecond)
	defer cancel()
	a, out, _, err := w.Reserve(ctx, tier.ReserveRequest{Namespace: w.id, Names: names, First: first, Parts: parts,
		MaxRows: w.rng.IntN(6), Deadline: time.Now().Add(time.Duration(1+w.rng.IntN(4000)) * time.Millisecond)})
	if err != nil {
		w.t.Fatal(err)
	}
	if a != nil {
		w.tries = append(w.tries, try{a, names, out, parts})
	}
}

// finish commits some rows of an attempt, and then ends it or not.
func (w *world) finish(i int) {
	x := w.tries[i]
	var rows []tier.CommitRow
	for row, o := range x.out {
		switch w.rng.IntN(4) {
		case 0:
			x.a.GiveBack(row)
		case 1:
		default:
			if o == tier.Granted {
				rows = append(rows, w.row(x.a, row, x.names[row], x.parts))
			}
		}
	}
	got, err := x.a.Commit(w.t.Context(), rows, tier.CommitOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for j, o := range got {
		switch name := x.names[rows[j].Row]; o {
		case tier.Committed:
			w.stored[name] |= x.a.Parts(rows[j].Row)
		case tier.Duplicate, tier.Expired, tier.NotReached:
		default:
			w.t.Fatalf("commit: outcome %d", o)
		}
	}
	if w.rng.IntN(2) == 0 {
		x.a.Abort()
		w.tries = append(w.tries[:i], w.tries[i+1:]...)
	}
}

func (w *world) retention() {
	names, _ := w.pick()
	names = names[:1+w.rng.IntN(len(names))]
	var out []tier.ItemOutcome
	var err error
	switch w.rng.IntN(5) {
	case 0:
		if out, err = w.Drop(w.id, names); err == nil {
			for _, name := range names {
				w.dropped(name)
			}
		}
	case 1:
		out, err = w.Demote(w.id, names, []tier.Kind{tier.RAM, tier.HBM}[w.rng.IntN(2)])
	case 2:
		out, err = w.Pin(w.id, names, time.Duration(w.rng.IntN(4))*time.Second)
	case 3:
		out, err = w.Retain(w.id, names, tier.Retention{Priority: uint8(w.rng.IntN(120)), TTL: time.Duration(w.rng.IntN(3)) * time.Second})
	case 4:
		_, err = w.Lookup(w.id, names, 0)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	for i, o := range out {
		if o == tier.ItemMissing && w.ample && w.stored[names[i]] != 0 {
			w.t.Fatalf("block %x is missing", number(names[i]))
		}
	}
}

// dropped takes a block out of the model, except for what open attempts may
// still commit.
func (w *world) dropped(name paging.BlockName) { delete(w.stored, name) }

func (w *world) prefetch() {
	if len(w.ahead) > 4 {
		w.ahead[0].Cancel()
		w.ahead = w.ahead[1:]
	}
	names, first := w.pick()
	p, err := w.Promote(tier.PromoteRequest{Namespace: w.id, Names: names, First: first, Priority: uint8(w.rng.IntN(101)),
		Deadline: time.Now().Add(time.Duration(1+w.rng.IntN(3)) * time.Second)})
	if err != nil {
		w.t.Fatal(err)
	}
	if w.rng.IntN(2) == 0 {
		for ready := 0; ; {
			rows, done, _, err := p.Next(w.t.Context())
			if err != nil {
				w.t.Fatal(err)
			}
			if ready += len(rows); done {
				break
			}
		}
	}
	w.ahead = append(w.ahead, p)
}

var errDisk = errors.New("test: the disk fails")

// fault breaks the disk, or mends it.
func (w *world) fault() {
	if w.faulty == nil {
		return
	}
	w.mend()
	rng := rand.New(rand.NewPCG(w.rng.Uint64(), 0))
	one := func(err error) error {
		if rng.IntN(3) == 0 {
			return err
		}
		return nil
	}
	switch w.rng.IntN(8) {
	case 0:
		w.faulty.SetLoad(func(context.Context, tier.Page) error { return paging.ErrCorrupt })
	case 1:
		w.faulty.SetLoad(func(context.Context, tier.Page) error { time.Sleep(50 * time.Millisecond); return paging.ErrIO })
	case 2:
		w.faulty.SetStore(func(context.Context, []tier.Page) error { return one(errDisk) })
	case 3:
		w.faulty.SetStore(func(context.Context, []tier.Page) error { return paging.ErrUnavailable })
		w.faulty.SetUsage(func(u tier.Usage) tier.Usage { u.State = tier.Bypass; return u })
	case 4:
		w.faulty.SetStore(func(context.Context, []tier.Page) error { time.Sleep(20 * time.Millisecond); return nil })
	}
}

func (w *world) mend() {
	w.faulty.SetLoad(nil)
	w.faulty.SetStore(nil)
	w.faulty.SetUsage(nil)
}

package tier_test

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kit is a Hierarchy under test, and what a client needs to use it.
type kit struct {
	*tier.Hierarchy
	t   testing.TB
	ns  *paging.Namespace
	id  paging.NamespaceID
	ram *ram.Arena

	faulty *tiertest.Faulty // its disk, where a test needs it
	leaky  bool             // slots stay set aside in the end
}

// plain is a namespace with one part of this length.
func plain(pageBytes uint64) *paging.Namespace {
	ns := tiertest.Namespace(1)
	ns.Layout.Parts[0].PageBytes = pageBytes
	return ns
}

// open opens a Hierarchy with budget bytes of RAM. It is closed, and its
// invariants are checked, when the test ends.
func open(t testing.TB, ns *paging.Namespace, budget int64, cfg tier.Config) *kit {
	t.Helper()
	k := &kit{t: t, ns: ns, ram: openRAM(t, budget, ram.Config{})}
	cfg.Arena = k.ram
	k.start(cfg)
	return k
}

// openRAM opens an arena of exactly one extent, so that its size does not
// depend on when it has grown.
func openRAM(t testing.TB, budget int64, cfg ram.Config) *ram.Arena {
	t.Helper()
	cfg.BudgetBytes, cfg.StagingBytes = max(budget, 1<<20), -1
	cfg.MaxPageBytes, cfg.ExtentBytes = 4096, max(budget, 1<<20)
	a, err := ram.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func (k *kit) start(cfg tier.Config) {
	k.t.Helper()
	h, err := tier.Open(k.t.Context(), cfg)
	if err != nil {
		k.t.Fatal(err)
	}
	k.Hierarchy = h
	if k.id, err = h.RegisterNamespace(k.ns); err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() {
		if !k.leaky {
			h.CheckInvariants()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := h.Close(ctx); err != nil && !k.t.Failed() {
			k.t.Error(err)
		}
	})
}

// chain names blocks number first to first+n of chain c.
func chain(c, first, n int) []paging.BlockName {
	names := make([]paging.BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(c)<<32|uint64(first+i))
		names[i][31] = 1
	}
	return names
}

func number(name paging.BlockName) uint64 { return binary.LittleEndian.Uint64(name[:]) }

// content is what the page of a block holds.
func (k *kit) content(name paging.BlockName, part int) []byte {
	b := make([]byte, k.ns.Layout.Parts[part].PageBytes)
	tiertest.FillPage(b, k.id, number(name)<<8|uint64(part))
	return b
}

// put stores blocks and returns the outcome of each.
func (k *kit) put(names []paging.BlockName, first int, parts paging.PartSet, opt tier.CommitOptions) []tier.Outcome {
	k.t.Helper()
	if parts == 0 {
		parts = k.ns.Layout.AllParts()
	}
	ctx, cancel := context.WithTimeout(k.t.Context(), 20*time.Second)
	defer cancel()
	a, out, _, err := k.Reserve(ctx, tier.ReserveRequest{Namespace: k.id, Names: names, First: first, Parts: parts, Deadline: time.Now().Add(time.Minute)})
	if err != nil {
		k.t.Fatal(err)
	}
	if a == nil {
		return out
	}
	defer a.Abort()
	var rows []tier.CommitRow
	for i, o := range out {
		if o == tier.Granted {
			rows = append(rows, k.row(a, i, names[i], parts))
		}
	}
	got, err := a.Commit(ctx, rows, opt)
	if err != nil {
		k.t.Fatal(err)
	}
	for i, r := range rows {
		out[r.Row] = got[i]
	}
	return out
}

// row is row i of an attempt with its right content.
func (k *kit) row(a *tier.Attempt, i int, name paging.BlockName, parts paging.PartSet) tier.CommitRow {
	r := tier.CommitRow{Row: i}
	for part := range k.ns.Layout.Parts {
		if !parts.Has(part) {
			continue
		}
		var b []byte
		if a.Parts(i).Has(part) {
			b = k.content(name, part)
		}
		r.Src = append(r.Src, b)
	}
	return r
}

// fetch fetches, compares every byte that it got, and returns the hold.
func (k *kit) fetch(ctx context.Context, req tier.FetchRequest) *tier.Hold {
	k.t.Helper()
	req.Namespace = k.id
	hold, err := k.Fetch(ctx, req)
	if err != nil {
		k.t.Fatal(err)
	}
	k.verify(hold, req.Names)
	return hold
}

func (k *kit) verify(hold *tier.Hold, names []paging.BlockName) {
	k.t.Helper()
	for row := range hold.Tiers {
		col := 0
		for part := range k.ns.Layout.Parts {
			if !hold.Parts.Has(part) {
				continue
			}
			b := hold.Page(row, col)
			slot := hold.Slots[row*hold.Columns+col]
			col++
			if b == nil {
				continue
			}
			if string(b) != string(k.content(names[row], part)) {
				k.t.Fatalf("row %d part %d: wrong bytes", row, part)
			}
			if paging.Checksum(b) != slot.Sum || int(slot.Bytes) != len(b) {
				k.t.Fatalf("row %d part %d: slot %+v does not describe the page", row, part, slot)
			}
		}
	}
}

// usable fetches a prefix, gives it back and returns its length.
func (k *kit) usable(names []paging.BlockName) int {
	k.t.Helper()
	hold := k.fetch(k.t.Context(), tier.FetchRequest{Names: names})
	defer hold.Release()
	return hold.Usable
}

func all(out []tier.Outcome, want tier.Outcome) bool {
	for _, o := range out {
		if o != want {
			return false
		}
	}
	return true
}

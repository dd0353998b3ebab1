package tiertest

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// survives closes a tier and finds its pages again, twice.
func (s Subject) survives(t *testing.T) {
	h := s.open(t)
	rng := rand.New(rand.NewPCG(Seed(t), 2))
	want := map[tier.Page]uint64{}
	var bytes int64
	sizes := [...]uint32{1, 4096, 20_000, 65_536, 100_000}
	for n := range uint64(60) {
		p, r := h.mustStore(n, sizes[rng.IntN(len(sizes))])
		if n%3 == 0 {
			h.tr.Free(r)
			continue
		}
		want[p] = n
		bytes += int64(p.Bytes)
	}
	for round := range 2 {
		if err := h.tr.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
		d := s.Reopen(t)
		h.tr = d
		refs := recoverAll(t, d, want, func(p tier.Page) bool { return round == 0 || want[p]%2 == 0 })
		if round == 1 {
			for p := range want {
				if want[p]%2 != 0 {
					bytes -= int64(p.Bytes)
					delete(want, p)
				}
			}
		}
		for p, n := range want {
			h.mustLoad(n, p, refs[p])
		}
		h.checkUsage(int64(len(want)), bytes)
		if err := d.Recover(t.Context(), nil, nil); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("a second Recover: got %v, want %v", err, paging.ErrInvalid)
		}
	}
	p, r := h.mustStore(1000, 70_000)
	h.mustLoad(1000, p, r)
}

// recoverAll runs Recover and checks that it finds exactly the pages of want.
func recoverAll(t *testing.T, d tier.Durable, want map[tier.Page]uint64, keep func(tier.Page) bool) map[tier.Page]tier.Ref {
	t.Helper()
	if u := d.Usage(); u.State != tier.Loading {
		t.Errorf("before Recover: state %v, want %v", u.State, tier.Loading)
	}
	p, b := Page(Namespace(1).ID(), 1<<50, 4096)
	if err := d.Store(t.Context(), []tier.Page{p}, [][]byte{b}, []uint32{1}, make([]tier.Ref, 1)); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("store before Recover: got %v, want %v", err, paging.ErrUnavailable)
	}
	refs := map[tier.Page]tier.Ref{}
	var last int64
	err := d.Recover(t.Context(), func(rec tier.Record) (uint32, bool) {
		if _, ok := want[rec.Page]; !ok {
			t.Errorf("recovered a page that should not be there: %+v", rec.Page)
		}
		if refs[rec.Page] != 0 {
			t.Errorf("recovered twice: %+v", rec.Page)
		}
		refs[rec.Page] = rec.Ref
		return uint32(len(refs)), keep(rec.Page)
	}, func(done, about int64) {
		if done < last || about < done {
			t.Errorf("progress %d of %d after %d", done, about, last)
		}
		last = done
	})
	if err != nil {
		t.Fatalf("recover: %v", err)
	}
	if len(refs) != len(want) || last != int64(len(want)) {
		t.Fatalf("recovered %d pages, progress %d, want %d", len(refs), last, len(want))
	}
	return refs
}

func (s Subject) namespaces(t *testing.T) {
	first, second := Namespace(1), Namespace(2)
	second.Salt = []byte{1, 2, 3}
	d, ok := s.Open(t, Budget, first).(tier.Durable)
	if !ok {
		t.Fatal("a tier with Reopen is not Durable")
	}
	t.Cleanup(func() { closeQuietly(d) })
	p, b := Page(second.ID(), 1, 4096)
	refs := make([]tier.Ref, 1)
	if err := d.Store(t.Context(), []tier.Page{p}, [][]byte{b}, []uint32{1}, refs); !errors.Is(err, paging.ErrUnknownNamespace) {
		t.Errorf("store into a namespace nobody put: got %v, want %v", err, paging.ErrUnknownNamespace)
	}
	for range 2 {
		if err := d.PutNamespace(second); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Store(t.Context(), []tier.Page{p}, [][]byte{b}, []uint32{1}, refs); err != nil {
		t.Fatal(err)
	}
	d = s.again(t, d)
	if err := d.Recover(t.Context(), func(tier.Record) (uint32, bool) { return 1, true }, nil); err != nil {
		t.Fatal(err)
	}
	checkNamespaces(t, d, first.ID(), second.ID())
	if err := d.Load(t.Context(), p, refs[0], b); err != nil {
		t.Errorf("load from the second namespace: %v", err)
	}
	d.Free(refs[0])
	if err := d.DropNamespace(second.ID()); err != nil {
		t.Fatal(err)
	}
	d = s.again(t, d)
	checkNamespaces(t, d, first.ID())
}

func (s Subject) again(t *testing.T, d tier.Durable) tier.Durable {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return s.Reopen(t)
}

func checkNamespaces(t *testing.T, d tier.Durable, want ...paging.NamespaceID) {
	t.Helper()
	var got []paging.NamespaceID
	for _, ns := range d.Namespaces() {
		got = append(got, ns.ID())
	}
	order := func(a, b paging.NamespaceID) int { return slices.Compare(a[:], b[:]) }
	slices.SortFunc(got, order)
	slices.SortFunc(want, order)
	if !slices.Equal(got, want) {
		t.Errorf("namespaces %v, want %v", got, want)
	}
}

package tiertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Subject is a tier under test.
type Subject struct {
	// Open returns an empty tier of this budget, in the state Ready, that takes
	// pages of the namespaces given. The suite closes it.
	Open func(t *testing.T, budgetBytes int64, namespaces ...*paging.Namespace) tier.Tier
	// Reopen opens again what the last tier of Open, now closed, left behind:
	// before Recover. nil: the tier does not survive.
	Reopen func(t *testing.T) tier.Durable
}

// Budget is the budget of most tests; a subject may prepare for it.
const Budget = 16 << 20

// Run runs the suite. Every tier passes all of it.
func Run(t *testing.T, s Subject) {
	t.Run("RoundTrip", s.roundTrip)
	t.Run("WrongArguments", s.wrongArguments)
	t.Run("WrongSum", s.wrongSum)
	t.Run("WrongIdentity", s.wrongIdentity)
	t.Run("Full", s.full)
	t.Run("PartOfABatch", s.partOfABatch)
	t.Run("RandomMix", s.randomMix)
	t.Run("Concurrent", s.concurrent)
	t.Run("EndedContext", s.endedContext)
	t.Run("CloseWhileBusy", s.closeWhileBusy)
	t.Run("AfterClose", s.afterClose)
	t.Run("Reclaim", s.reclaim)
	if s.Reopen != nil {
		t.Run("Survives", s.survives)
		t.Run("Namespaces", s.namespaces)
	}
}

// harness is an open tier with one namespace.
type harness struct {
	t  *testing.T
	tr tier.Tier
	ns paging.NamespaceID
}

func (s Subject) open(t *testing.T) *harness {
	t.Helper()
	ns := Namespace(1)
	h := &harness{t: t, tr: s.Open(t, Budget, ns), ns: ns.ID()}
	t.Cleanup(func() { closeQuietly(h.tr) })
	return h
}

// closeQuietly ends what a test that failed, or closed it itself, left behind.
func closeQuietly(tr tier.Tier) { _ = tr.Close() }

// store stores one page and returns where.
func (h *harness) store(p tier.Page, b []byte, owner uint32) (tier.Ref, error) {
	var refs [1]tier.Ref
	err := h.tr.Store(h.t.Context(), []tier.Page{p}, [][]byte{b}, []uint32{owner}, refs[:])
	if (refs[0] != 0) != (err == nil) {
		h.t.Errorf("Store: ref %d with error %v", refs[0], err)
	}
	return refs[0], err
}

func (h *harness) mustStore(n uint64, bytes uint32) (tier.Page, tier.Ref) {
	h.t.Helper()
	p, b := Page(h.ns, n, bytes)
	r, err := h.store(p, b, uint32(n))
	if err != nil {
		h.t.Fatalf("store page %d of %d bytes: %v", n, bytes, err)
	}
	return p, r
}

// mustLoad loads a page and compares every byte.
func (h *harness) mustLoad(n uint64, p tier.Page, r tier.Ref) {
	h.t.Helper()
	dst := make([]byte, p.Bytes)
	if err := h.tr.Load(h.t.Context(), p, r, dst); err != nil {
		h.t.Fatalf("load page %d of %d bytes: %v", n, p.Bytes, err)
	}
	if got := Identity(h.ns, n, dst); got != p {
		h.t.Fatalf("page %d: got %+v, want %+v", n, got, p)
	}
	if _, want := Page(h.ns, n, p.Bytes); string(dst) != string(want) {
		h.t.Fatalf("page %d: wrong bytes", n)
	}
}

// checkUsage checks the identities of Usage and what is stored.
func (h *harness) checkUsage(pages, pageBytes int64) {
	h.t.Helper()
	u := h.tr.Usage()
	if u.PageBytes+u.InFlightBytes+u.DeadBytes > u.UsedBytes || u.UsedBytes > u.HeldBytes || u.HeldBytes > u.BudgetBytes {
		h.t.Errorf("usage breaks its order: %+v", u)
	}
	if pages >= 0 && (u.Pages != pages || u.PageBytes != pageBytes) {
		h.t.Errorf("usage says %d pages of %d bytes, want %d of %d", u.Pages, u.PageBytes, pages, pageBytes)
	}
}

func (s Subject) roundTrip(t *testing.T) {
	h := s.open(t)
	sizes := []uint32{1, 7, 4095, 4096, 4097, 8192, 65535, 65536, 65537, 256 << 10, 1<<20 + 5, 2 << 20, 3<<20 - 4096}
	type stored struct {
		p tier.Page
		r tier.Ref
	}
	var all []stored
	var bytes int64
	for i, size := range sizes {
		p, r := h.mustStore(uint64(i), size)
		all = append(all, stored{p, r})
		bytes += int64(size)
	}
	seen := map[tier.Ref]bool{}
	for i, x := range all {
		if x.r == 0 || seen[x.r] {
			t.Errorf("page %d has the ref %d, which is 0 or of another page", i, x.r)
		}
		seen[x.r] = true
		h.mustLoad(uint64(i), x.p, x.r)
	}
	h.checkUsage(int64(len(all)), bytes)
	for i := len(all) - 1; i >= 0; i-- {
		h.tr.Free(all[i].r, 0)
		bytes -= int64(all[i].p.Bytes)
		h.checkUsage(int64(i), bytes)
		if i > 0 {
			h.mustLoad(uint64(i-1), all[i-1].p, all[i-1].r)
		}
	}
}

func (s Subject) wrongArguments(t *testing.T) {
	h := s.open(t)
	p, b := Page(h.ns, 1, 4096)
	refs := make([]tier.Ref, 1)
	for name, err := range map[string]error{
		"short source":    h.tr.Store(t.Context(), []tier.Page{p}, [][]byte{b[:4095]}, []uint32{1}, refs),
		"no owners":       h.tr.Store(t.Context(), []tier.Page{p}, [][]byte{b}, nil, refs),
		"two sources":     h.tr.Store(t.Context(), []tier.Page{p}, [][]byte{b, b}, []uint32{1}, refs),
		"page of 0 bytes": h.tr.Store(t.Context(), []tier.Page{{ID: p.ID}}, [][]byte{{}}, []uint32{1}, refs),
	} {
		if !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: got %v, want %v", name, err, paging.ErrInvalid)
		}
	}
	if err := h.tr.Store(t.Context(), nil, nil, nil, nil); err != nil {
		t.Errorf("store nothing: %v", err)
	}
	p, r := h.mustStore(2, 4096)
	if err := h.tr.Load(t.Context(), p, r, make([]byte, 4095)); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("load into a short buffer: got %v, want %v", err, paging.ErrInvalid)
	}
	h.checkUsage(1, 4096)
}

func (s Subject) wrongSum(t *testing.T) {
	h := s.open(t)
	p, r := h.mustStore(1, 10000)
	wrong := p
	wrong.Sum++
	if err := h.tr.Load(t.Context(), wrong, r, make([]byte, p.Bytes)); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("load with another checksum: got %v, want %v", err, paging.ErrCorrupt)
	}
	h.mustLoad(1, p, r)
}

func (s Subject) wrongIdentity(t *testing.T) {
	h := s.open(t)
	a, _ := h.mustStore(1, 20000)
	_, r := h.mustStore(2, 20000)
	if err := h.tr.Load(t.Context(), a, r, make([]byte, a.Bytes)); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("load of a page where another lies: got %v, want one that is %v", err, paging.ErrCorrupt)
	}
}

// full stores until there is no room, and again once there is.
func (s Subject) full(t *testing.T) {
	h := s.open(t)
	const size = 1 << 20
	type stored struct {
		p tier.Page
		r tier.Ref
	}
	var all []stored
	for n := uint64(0); ; n++ {
		p, b := Page(h.ns, n, size)
		r, err := h.store(p, b, uint32(n))
		if errors.Is(err, paging.ErrNoSpace) {
			break
		}
		if err != nil || n > Budget/size {
			t.Fatalf("page %d of 1 MiB under %d MiB: %v", n, Budget>>20, err)
		}
		all = append(all, stored{p, r})
	}
	if len(all) < Budget/size*3/4 {
		t.Errorf("%d pages of 1 MiB fit %d MiB", len(all), Budget>>20)
	}
	h.checkUsage(int64(len(all)), int64(len(all))*size)
	for n, x := range all {
		h.mustLoad(uint64(n), x.p, x.r)
	}
	h.tr.Free(all[3].r, all[4].r)
	p5, r5 := h.mustStore(1000, size)
	p6, r6 := h.mustStore(1001, size)
	h.mustLoad(1000, p5, r5)
	h.mustLoad(1001, p6, r6)
	h.mustLoad(5, all[5].p, all[5].r)
	h.checkUsage(int64(len(all)), int64(len(all))*size)
}

// partOfABatch offers one call more than fits.
func (s Subject) partOfABatch(t *testing.T) {
	h := s.open(t)
	const size, n = 1 << 20, 2 * Budget >> 20
	pages, src := make([]tier.Page, n), make([][]byte, n)
	owners, refs := make([]uint32, n), make([]tier.Ref, n)
	for i := range pages {
		pages[i], src[i] = Page(h.ns, uint64(i), size)
		refs[i] = 99
	}
	if err := h.tr.Store(t.Context(), pages, src, owners, refs); !errors.Is(err, paging.ErrNoSpace) {
		t.Fatalf("store %d MiB under %d: got %v, want %v", n, Budget>>20, err, paging.ErrNoSpace)
	}
	stored := int64(0)
	for i, r := range refs {
		if r != 0 {
			stored++
			h.mustLoad(uint64(i), pages[i], r)
		}
	}
	if stored < n/2*3/4 {
		t.Errorf("%d of %d pages stored", stored, n)
	}
	h.checkUsage(stored, stored*size)
	h.tr.Free(refs...)
	h.checkUsage(0, 0)
}

// randomMix stores, loads and frees pages of all sizes against a map.
func (s Subject) randomMix(t *testing.T) {
	h := s.open(t)
	rng := rand.New(rand.NewPCG(Seed(t), 1))
	type stored struct {
		n uint64
		p tier.Page
		r tier.Ref
	}
	var live []stored
	var bytes int64
	for n := range uint64(Rounds(300)) {
		switch op := rng.IntN(10); {
		case op < 6:
			size := uint32(1 + rng.IntN(4096<<rng.IntN(11)))
			p, b := Page(h.ns, n, size)
			r, err := h.store(p, b, uint32(n))
			if err == nil {
				live = append(live, stored{n, p, r})
				bytes += int64(size)
				break
			}
			if !errors.Is(err, paging.ErrNoSpace) {
				t.Fatalf("store page %d: %v", n, err)
			}
			fallthrough
		case op < 8:
			for range min(len(live), 1+rng.IntN(8)) {
				i := rng.IntN(len(live))
				h.tr.Free(live[i].r)
				bytes -= int64(live[i].p.Bytes)
				live[i] = live[len(live)-1]
				live = live[:len(live)-1]
			}
		case len(live) > 0:
			x := live[rng.IntN(len(live))]
			h.mustLoad(x.n, x.p, x.r)
		}
		h.checkUsage(int64(len(live)), bytes)
	}
	for _, x := range live {
		h.mustLoad(x.n, x.p, x.r)
		h.tr.Free(x.r)
	}
	h.checkUsage(0, 0)
}

// concurrent runs many callers, each with pages of its own.
func (s Subject) concurrent(t *testing.T) {
	h := s.open(t)
	seed := Seed(t)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			c := caller{h: h, rng: rand.New(rand.NewPCG(seed, uint64(g))), next: uint64(g) << 32}
			for range Rounds(40) {
				c.step(t)
			}
			for _, x := range c.live {
				h.tr.Free(x.r)
			}
		})
	}
	wg.Wait()
	h.checkUsage(0, 0)
}

type caller struct {
	h    *harness
	rng  *rand.Rand
	next uint64
	live []struct {
		n uint64
		p tier.Page
		r tier.Ref
	}
}

// step stores a batch, then loads and frees some of what is there.
func (c *caller) step(t *testing.T) {
	n := 1 + c.rng.IntN(6)
	pages, src := make([]tier.Page, n), make([][]byte, n)
	owners, refs := make([]uint32, n), make([]tier.Ref, n)
	first := c.next
	for i := range pages {
		pages[i], src[i] = Page(c.h.ns, c.next, uint32(1+c.rng.IntN(200_000)))
		c.next++
	}
	if err := c.h.tr.Store(t.Context(), pages, src, owners, refs); err != nil && !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("store: %v", err)
	}
	for i, r := range refs {
		if r != 0 {
			c.live = append(c.live, struct {
				n uint64
				p tier.Page
				r tier.Ref
			}{first + uint64(i), pages[i], r})
		}
	}
	for len(c.live) > 20 {
		i := c.rng.IntN(len(c.live))
		x := c.live[i]
		dst := make([]byte, x.p.Bytes)
		if err := c.h.tr.Load(t.Context(), x.p, x.r, dst); err != nil {
			t.Errorf("load page %d: %v", x.n, err)
		} else if got := Identity(c.h.ns, x.n, dst); got != x.p {
			t.Errorf("page %d: wrong bytes", x.n)
		}
		c.h.tr.Free(x.r)
		c.live[i] = c.live[len(c.live)-1]
		c.live = c.live[:len(c.live)-1]
	}
}

// endedContext uses a context that has ended: an answer, or ErrExpired.
func (s Subject) endedContext(t *testing.T) {
	h := s.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p, b := Page(h.ns, 1, 4096)
	refs := make([]tier.Ref, 1)
	err := h.tr.Store(ctx, []tier.Page{p}, [][]byte{b}, []uint32{1}, refs)
	if err != nil && !errors.Is(err, paging.ErrExpired) || (err == nil) != (refs[0] != 0) {
		t.Errorf("store: ref %d, error %v", refs[0], err)
	}
	settle(err)
	p, r := h.mustStore(2, 4096)
	err = h.tr.Load(ctx, p, r, b)
	if err != nil && !errors.Is(err, paging.ErrExpired) {
		t.Errorf("load: %v", err)
	}
	settle(err)
	h.mustLoad(2, p, r)
}

// settle waits until the medium has let go of memory.
func settle(err error) {
	if c := tier.Unsettled(err); c != nil {
		<-c
	}
}

// closeWhileBusy closes a tier under load: clean answers, no panic.
func (s Subject) closeWhileBusy(t *testing.T) {
	h := s.open(t)
	p, r := h.mustStore(1, 50_000)
	var wg sync.WaitGroup
	started := make(chan struct{}, 16)
	for g := range 16 {
		wg.Go(func() {
			for n := uint64(0); ; n++ {
				var err error
				if g%2 == 0 {
					err = h.tr.Load(t.Context(), p, r, make([]byte, p.Bytes))
				} else {
					q, b := Page(h.ns, uint64(g)<<32|n, 30_000)
					refs := make([]tier.Ref, 1)
					err = h.tr.Store(t.Context(), []tier.Page{q}, [][]byte{b}, []uint32{7}, refs)
					h.tr.Free(refs...)
				}
				h.tr.Usage()
				if n == 3 {
					started <- struct{}{}
				}
				settle(err)
				if errors.Is(err, paging.ErrClosed) {
					if n < 3 {
						started <- struct{}{}
					}
					return
				}
				if err != nil && !errors.Is(err, paging.ErrNoSpace) {
					t.Errorf("while closing: %v", err)
					return
				}
			}
		})
	}
	for range 16 {
		<-started
	}
	if err := h.tr.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	wg.Wait()
}

func (s Subject) afterClose(t *testing.T) {
	h := s.open(t)
	p, r := h.mustStore(1, 4096)
	for range 2 {
		if err := h.tr.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
	}
	if err := h.tr.Load(t.Context(), p, r, make([]byte, p.Bytes)); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("load: got %v, want %v", err, paging.ErrClosed)
	}
	if _, err := h.store(p, make([]byte, p.Bytes), 1); !errors.Is(err, paging.ErrClosed) {
		t.Errorf("store: got %v, want %v", err, paging.ErrClosed)
	}
	h.tr.Free(r)
	if u := h.tr.Usage(); u.State != tier.Closed {
		t.Errorf("usage: state %v, want %v", u.State, tier.Closed)
	}
}

// reclaim fills a tier with small pages and makes room for a large one.
func (s Subject) reclaim(t *testing.T) {
	h := s.open(t)
	name := func(movable func(uint32) bool) ([]uint32, bool) {
		switch tr := h.tr.(type) {
		case tier.Durable:
			return tr.Reclaim(4<<20, movable)
		case tier.Arena:
			return tr.Reclaim(Namespace(1).Tenant, 4<<20, movable)
		}
		return nil, false
	}
	refs := map[uint32]tier.Ref{}
	for n := uint32(0); ; n++ {
		p, b := Page(h.ns, uint64(n), 256<<10)
		r, err := h.store(p, b, n)
		if errors.Is(err, paging.ErrNoSpace) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		refs[n] = r
	}
	if owners, ok := name(func(uint32) bool { return false }); ok && len(owners) > 0 {
		t.Errorf("reclaim with nothing movable names %d owners", len(owners))
	}
	// Two rounds: a page can also be refused because the space of the first
	// round went to a reserve.
	big, b := Page(h.ns, 1<<40, 4<<20)
	for range 3 {
		owners, ok := name(func(o uint32) bool { return refs[o] != 0 && o%7 != 3 || o > 31 })
		if !ok {
			t.Fatalf("nothing to reclaim among %d pages", len(refs))
		}
		for _, o := range owners {
			if refs[o] == 0 {
				t.Fatalf("owner %d has no page", o)
			}
			h.tr.Free(refs[o])
			delete(refs, o)
		}
		r, err := h.store(big, b, 1)
		if err == nil {
			h.mustLoad(1<<40, big, r)
			return
		}
		if !errors.Is(err, paging.ErrNoSpace) {
			t.Fatal(err)
		}
	}
	t.Errorf("no room for 4 MiB after reclaiming three times")
}

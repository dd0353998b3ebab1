package ram

import (
	"errors"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, cfg Config) *Arena {
	t.Helper()
	a, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

// grown waits until all extents exist.
func grown(t *testing.T, a *Arena) *Arena {
	t.Helper()
	for range 10_000 {
		done := !a.Usage().Growing
		if done {
			return a
		}
		wait()
	}
	t.Fatal("the arena did not grow")
	return nil
}

func TestConformance(t *testing.T) {
	tiertest.Run(t, tiertest.Subject{Open: func(t *testing.T, budget int64, namespaces ...*paging.Namespace) tier.Tier {
		a, err := Open(t.Context(), Config{BudgetBytes: budget, StagingBytes: -1, MaxPageBytes: 4 << 20, Tenant: namespaces[0].Tenant})
		if err != nil {
			t.Fatal(err)
		}
		return grown(t, a)
	}})
}

func TestGenerationsAreRaisedBeforeReuse(t *testing.T) {
	a := open(t, Config{BudgetBytes: 8 << 20, StagingBytes: -1})
	r, err := a.Alloc("x", 64<<10, 1)
	if err != nil {
		t.Fatal(err)
	}
	old := a.Slot(r, 64<<10, 0)
	a.Free(r)
	if got := a.Slot(r, 64<<10, 0).Generation; got != old.Generation {
		t.Errorf("freeing raised the generation from %d to %d: the bytes are still there", old.Generation, got)
	}
	// Slots of another size that cover the old one make it stale too.
	var refs []tier.Ref
	for a.Slot(r, 64<<10, 0).Generation == old.Generation {
		s, err := a.Alloc("x", 12<<10, 1)
		if err != nil {
			t.Fatalf("the extent is full and the old slot still has its generation: %v", err)
		}
		refs = append(refs, s)
	}
	a.Free(refs...)
}

func TestBudget(t *testing.T) {
	free := int64(1 << 30)
	cfg := Config{BudgetBytes: 64 << 20, MarginBytes: 1 << 20, FreeMemory: func() (int64, error) { return free, nil }}
	a := grown(t, open(t, cfg))
	if err := a.SetAside(16 << 20); err != nil {
		t.Errorf("a quarter of the budget for staging: %v", err)
	}
	if err := a.SetAside(4096); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("more than the part for staging: got %v, want %v", err, paging.ErrNoSpace)
	}
	if u := a.Usage(); u.HeldBytes != u.BudgetBytes || u.UsedBytes > u.HeldBytes {
		t.Errorf("held %d, used %d of %d", u.HeldBytes, u.UsedBytes, u.BudgetBytes)
	}
	a.GiveBack(16 << 20)
	if got, want := a.Usage().HeldBytes, int64(48<<20); got != want {
		t.Errorf("held %d after giving back, want %d", got, want)
	}

	free = 32 << 20
	_, err := Open(t.Context(), cfg)
	if !errors.Is(err, paging.ErrNoSpace) || !strings.Contains(err.Error(), "67108864 bytes are needed and 32505856 are available") {
		t.Errorf("a budget of twice the free memory: %v", err)
	}
	for name, bad := range map[string]Config{
		"no budget":      {},
		"long pages":     {BudgetBytes: 8 << 20, MaxPageBytes: 8 << 20},
		"short extents":  {BudgetBytes: 64 << 20, MaxPageBytes: 4 << 20, ExtentBytes: 4 << 20},
		"negative":       {BudgetBytes: 64 << 20, NUMANode: -1},
		"longest page":   {BudgetBytes: 64 << 20, MaxPageBytes: paging.MaxPageBytes + 1},
		"staging is all": {BudgetBytes: 64 << 20, StagingBytes: 64 << 20},
	} {
		if _, err := Open(t.Context(), bad); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: got %v, want %v", name, err, paging.ErrInvalid)
		}
	}
}

func TestLongestPageFits(t *testing.T) {
	a := open(t, Config{BudgetBytes: 64 << 20, MaxPageBytes: 20 << 20, StagingBytes: -1})
	if _, err := a.Alloc("x", 20<<20, 1); err != nil {
		t.Errorf("a page of MaxPageBytes: %v", err)
	}
}

// fill allocates for a tenant until there is no room.
func fill(t *testing.T, a *Arena, tenant string, bytes uint32) (refs []tier.Ref, last error) {
	t.Helper()
	for {
		r, err := a.Alloc(tenant, bytes, uint32(len(refs)+1))
		if err != nil {
			return refs, err
		}
		refs = append(refs, r)
	}
}

func TestQuotaAndGuarantee(t *testing.T) {
	a := grown(t, open(t, Config{BudgetBytes: 64 << 20, StagingBytes: -1, Quotas: map[string]int64{"a": 16 << 20, "b": 32 << 20}}))
	refs, err := fill(t, a, "a", 1<<20)
	if !errors.Is(err, paging.ErrOverQuota) || len(refs) != 16 {
		t.Errorf("tenant a: %d MiB under a quota of 16, then %v", len(refs), err)
	}
	if _, err := fill(t, a, "greedy", 1<<20); !errors.Is(err, paging.ErrNoSpace) {
		t.Errorf("a tenant without quota: %v", err)
	}
	if _, err := a.Alloc("b", 1<<20, 1); err != nil {
		t.Errorf("the extent that tenant b is sure of: %v", err)
	}
	a.Free(refs...)
	if _, err := a.Alloc("a", 1<<20, 1); err != nil {
		t.Errorf("tenant a after it freed everything: %v", err)
	}
}

// What a tenant has beyond its share goes to one that has nothing: emptied, and
// as new memory.
func TestExtentsChangeTenant(t *testing.T) {
	added := make(chan string, 100)
	a := grown(t, open(t, Config{BudgetBytes: 64 << 20, StagingBytes: -1, Added: func(tenant string) { added <- tenant }}))
	refs, _ := fill(t, a, "rich", 1<<20)
	for _, r := range refs {
		copy(a.Bytes(r, 1<<20), "a secret of rich")
	}
	if got := <-added; got != "rich" {
		t.Errorf("told of extents of %q", got)
	}
	a.Tethered("rich", 1)
	if _, err := a.Alloc("poor", 4096, 1); !errors.Is(err, paging.ErrNoSpace) {
		t.Fatalf("the pool is empty: %v", err)
	}
	if owners, ok := a.Reclaim("poor", 4096, func(uint32) bool { return true }); ok {
		t.Fatalf("reclaimed %v although a process may have it mapped", owners)
	}
	a.Tethered("rich", -1)
	owners, ok := a.Reclaim("poor", 4096, func(uint32) bool { return true })
	if !ok || len(owners) == 0 {
		t.Fatal("nothing to reclaim from a tenant that has everything")
	}
	before := a.Extents("rich")
	for _, o := range owners {
		a.Free(refs[o-1])
	}
	var r tier.Ref
	var err error
	for range 10_000 {
		if r, err = a.Alloc("poor", 4096, 1); err == nil {
			break
		}
		wait()
	}
	if err != nil {
		t.Fatalf("no extent came: %v", err)
	}
	if got := len(a.Extents("rich")); got != len(before)-1 {
		t.Errorf("rich has %d extents, want %d", got, len(before)-1)
	}
	for _, e := range before {
		if e.ID == a.Slot(r, 1, 0).Extent {
			t.Errorf("extent %d was handed out to rich before", e.ID)
		}
	}
	m, _ := a.Memory(r)
	for _, b := range m.Bytes()[m.FirstOffset():] {
		if b != 0 {
			t.Fatal("the extent holds bytes of its former tenant")
		}
	}
	if u := a.Usage(); u.HeldBytes > u.BudgetBytes {
		t.Errorf("held %d of %d", u.HeldBytes, u.BudgetBytes)
	}
	if _, ok := a.Reclaim("other", 4096, func(uint32) bool { return false }); ok {
		t.Error("reclaimed what is not movable")
	}
}

func TestGrowthWaitsForMemory(t *testing.T) {
	asked := 0
	a := open(t, Config{BudgetBytes: 64 << 20, StagingBytes: -1, FreeMemory: func() (int64, error) {
		if asked++; asked > 3 {
			return 0, nil
		}
		return 1 << 40, nil
	}})
	for range 10_000 {
		if a.Usage().Reason != "" {
			break
		}
		wait()
	}
	u := a.Usage()
	if !strings.Contains(u.Reason, "lower the RAM budget or raise the memory limit") || u.State != tier.Ready {
		t.Errorf("state %v, reason %q", u.State, u.Reason)
	}
	if u.HeldBytes >= u.BudgetBytes {
		t.Errorf("held %d of %d without memory", u.HeldBytes, u.BudgetBytes)
	}
	if _, err := a.Alloc("x", 4096, 1); err != nil {
		t.Errorf("the first extents are usable: %v", err)
	}
}

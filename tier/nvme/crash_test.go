package nvme

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// TestCrash cuts the power at random points of a random load, again and again
// on what the last crash left: each page is right or absent, each page whose
// Store returned is there, and no space is lost.
func TestCrash(t *testing.T) {
	seed := tiertest.Seed(t)
	c := &crashes{rng: rand.New(rand.NewPCG(seed, 0)), fs: vfs.NewCrashableMem()}
	for round := range tiertest.Rounds(40) {
		for _, problem := range c.round(t) {
			t.Errorf("round %d: %s", round, problem)
		}
		if t.Failed() {
			return
		}
	}
	if c.recovered == 0 || c.stored == 0 {
		t.Errorf("%d pages stored, %d recovered: nothing was tested", c.stored, c.recovered)
	}
	t.Logf("seed %d: %d pages stored, %d recovered", seed, c.stored, c.recovered)
}

type crashes struct {
	rng  *rand.Rand
	fs   *vfs.MemFS
	next uint64

	stored, recovered int64

	mu      sync.Mutex
	durable map[tier.Page]bool // Store has returned
	freeing map[tier.Page]bool // Free was called, or is about to be
	refs    map[tier.Page]tier.Ref
	ops     int
	problem []string
}

func (c *crashes) report(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.problem = append(c.problem, fmt.Sprintf(format, args...))
}

// round opens what is there, checks it against the model, runs a load and
// leaves what a crash in the middle of it leaves.
func (c *crashes) round(t *testing.T) []string {
	c.problem = nil
	tr, err := Open(memConfig(c.fs, nil))
	if err != nil {
		return []string{err.Error()}
	}
	defer tr.Close()
	if err := tr.PutNamespace(tiertest.Namespace(1)); err != nil {
		return []string{err.Error()}
	}
	c.recoverAll(t, tr)
	c.loadAll(t, tr)
	if len(c.problem) > 0 {
		return c.problem
	}

	crashAt := 1 + c.rng.IntN(60)
	crash := make(chan struct{})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	c.ops = 0
	for range 3 {
		rng := rand.New(rand.NewPCG(c.rng.Uint64(), 0))
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c.step(t, tr, rng)
				c.mu.Lock()
				if c.ops++; c.ops == crashAt {
					close(crash)
				}
				c.mu.Unlock()
			}
		})
	}
	<-crash
	before := c.snapshot(c.durable)
	clone := c.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: c.rng.IntN(101), RNG: c.rng})
	freed := c.snapshot(c.freeing)
	close(stop)
	wg.Wait()
	for p := range freed {
		delete(before, p)
	}
	c.fs, c.durable, c.freeing = clone, before, nil
	return c.problem
}

func (c *crashes) snapshot(m map[tier.Page]bool) map[tier.Page]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := make(map[tier.Page]bool, len(m))
	for p := range m {
		s[p] = true
	}
	return s
}

// recoverAll compares what is recovered with the model, then takes it over.
func (c *crashes) recoverAll(t *testing.T, tr *Tier) {
	refs := map[tier.Page]tier.Ref{}
	var dropped []tier.Page
	err := tr.Recover(t.Context(), func(rec tier.Record) (uint32, bool) {
		if _, twice := refs[rec.Page]; twice {
			c.report("page %x recovered twice", rec.ID.Name[:8])
		}
		if c.rng.IntN(10) == 0 {
			dropped = append(dropped, rec.Page)
			return 0, false
		}
		refs[rec.Page] = rec.Ref
		return uint32(len(refs)), true
	}, nil)
	if err != nil {
		c.report("recover: %v", err)
		return
	}
	for _, p := range dropped {
		delete(c.durable, p)
	}
	for p := range c.durable {
		if refs[p] == 0 {
			c.report("durable page %x of %d bytes is gone", p.ID.Name[:8], p.Bytes)
		}
	}
	if n := tr.Metrics().RecordsDropped; n > 0 {
		c.report("%d records dropped", n)
	}
	c.recovered += int64(len(refs))
	c.refs, c.durable, c.freeing = refs, map[tier.Page]bool{}, map[tier.Page]bool{}
	for p := range refs {
		c.durable[p] = true
	}
}

// loadAll checks every page and the count of what is used.
func (c *crashes) loadAll(t *testing.T, tr *Tier) {
	var bytes int64
	for p, r := range c.refs {
		bytes += int64(p.Bytes)
		if dst, err := load(t.Context(), tr, p, r); err != nil {
			c.report("page %x: %v", p.ID.Name[:8], err)
		} else if tiertest.Identity(testNS, nameNumber(p), dst) != p {
			c.report("page %x: wrong bytes", p.ID.Name[:8])
		}
	}
	if u := tr.Usage(); u.Pages != int64(len(c.refs)) || u.PageBytes != bytes || u.HeldBytes > u.BudgetBytes {
		c.report("usage %+v, want %d pages of %d bytes", u, len(c.refs), bytes)
	}
}

// step stores some pages, or frees some.
func (c *crashes) step(t *testing.T, tr *Tier, rng *rand.Rand) {
	if rng.IntN(3) == 0 {
		c.free(tr, rng, 1+rng.IntN(6))
		return
	}
	n := 1 + rng.IntN(5)
	pages, src := make([]tier.Page, n), make([][]byte, n)
	owners, refs := make([]uint32, n), make([]tier.Ref, n)
	c.mu.Lock()
	first := c.next
	c.next += uint64(n)
	c.mu.Unlock()
	sizes := [...]uint32{100, 4096, 20_000, 65_536}
	for i := range pages {
		pages[i], src[i] = tiertest.Page(testNS, first+uint64(i), sizes[rng.IntN(len(sizes))])
	}
	err := tr.Store(t.Context(), pages, src, owners, refs)
	c.mu.Lock()
	for i, r := range refs {
		if r != 0 {
			c.durable[pages[i]] = true
			c.refs[pages[i]] = r
			c.stored++
		}
	}
	c.mu.Unlock()
	if err != nil {
		c.free(tr, rng, 20)
	}
}

func (c *crashes) free(tr *Tier, rng *rand.Rand, n int) {
	c.mu.Lock()
	var refs []tier.Ref
	for p, r := range c.refs {
		if len(refs) == n {
			break
		}
		if rng.IntN(4) > 0 {
			continue
		}
		c.freeing[p] = true
		delete(c.refs, p)
		delete(c.durable, p)
		refs = append(refs, r)
	}
	c.mu.Unlock()
	tr.Free(refs...)
}

// nameNumber is the number that a page of tiertest was made from.
func nameNumber(p tier.Page) uint64 { return p.Meta / 3 }

// TestSpaceAfterCrash fills a tier, cuts the power in the middle of more, and
// finds that everything without a record is free again.
func TestSpaceAfterCrash(t *testing.T) {
	fs := vfs.NewCrashableMem()
	tr := mustOpen(t, memConfig(fs, nil))
	fit := fill(t, tr, 0, 65_536)
	tr.Free(fit...)
	until(t, "slots freed", func() bool { return tr.Usage().UsedBytes == 0 })
	for n := range uint64(7) {
		mustStore(t, tr, 1000+n, 65_536)
	}
	again := mustOpen(t, memConfig(fs.CrashClone(vfs.CrashCloneCfg{}), nil))
	if u := again.Usage(); u.Pages != 7 || u.PageBytes != 7*65_536 || u.DeadBytes != 0 {
		t.Errorf("after the crash: %+v, want 7 pages", u)
	}
	if more := fill(t, again, 2000, 65_536); len(more) != len(fit)-7 {
		t.Errorf("room for %d pages, want %d", len(more), len(fit)-7)
	}
}

// fill stores pages until there is no room.
func fill(t *testing.T, tr *Tier, first uint64, bytes uint32) []tier.Ref {
	t.Helper()
	var refs []tier.Ref
	for n := first; ; n++ {
		_, r, err := store(t.Context(), tr, n, bytes)
		if r == 0 {
			if !isNoSpace(err) {
				t.Fatal(err)
			}
			return refs
		}
		refs = append(refs, r)
	}
}

func isNoSpace(err error) bool { return errors.Is(err, paging.ErrNoSpace) }

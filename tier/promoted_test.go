package tier_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// Fifty long requests over a RAM that holds a few of them, half announced by a
// prefetch, one in five cut short: of the pages that were loaded from disk at least
// nine in ten are granted to somebody before they go.
func TestPromotedPagesAreUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const requests, blocks, page = 50, 60, 4096
		disk := &tiertest.Faulty{Durable: tiertest.NewMap(tier.NVMe, 64<<20)}
		t.Cleanup(func() { disk.Close() })
		k := open(t, plain(page), 256*page, tier.Config{Durable: disk})
		for c := range requests {
			k.toDisk(chain(c, 0, blocks))
		}
		before := k.Metrics()
		for step := range 3 * requests {
			c := step * 17 % requests
			names := chain(c, 0, blocks)
			if step%5 == 4 {
				names = names[:blocks/2]
			}
			if step%2 == 0 {
				p, err := k.Promote(tier.PromoteRequest{Namespace: k.id, Names: names, Deadline: time.Now().Add(time.Minute)})
				if err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				defer p.Cancel()
			}
			hold := k.fetch(within(t, 10*time.Second), tier.FetchRequest{Names: names})
			if hold.Usable != len(names) {
				t.Fatalf("request %d: %d of %d blocks, %v", step, hold.Usable, len(names), hold.Short)
			}
			hold.Release()
		}
		m := k.Metrics()
		loaded := m.LoadedPages - before.LoadedPages
		used := m.DiskHitBlocks - before.DiskHitBlocks + m.PrefetchUseful
		t.Logf("%d pages loaded, %d of them granted", loaded, used)
		if loaded < requests*blocks || float64(used) < 0.9*float64(loaded) {
			t.Errorf("%d of %d loaded pages were granted, want at least 90 %%", used, loaded)
		}
	})
}

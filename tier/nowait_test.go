package tier_test

import (
	"testing"

	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// A Fetch that may not wait answers nothing where something has to be brought
// up, and leaves nothing behind; where all is resident it is like any other.
func TestFetchThatMayNotWait(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, _ *tiertest.Faulty) {
		cold, warm := chain(1, 0, 4), chain(2, 0, 4)
		k.toDisk(cold)
		if out := k.put(warm, 0, 0, tier.CommitOptions{}); !all(out, tier.Committed) {
			t.Fatal(out)
		}
		before := k.Metrics()
		hold, err := k.Fetch(t.Context(), tier.FetchRequest{Namespace: k.id, Names: cold, NoWait: true})
		if hold != nil || err != nil {
			t.Errorf("cold: %+v, %v, want nothing", hold, err)
		}
		if m := k.Metrics(); m.Fetches != before.Fetches || m.Holds != 0 || m.LeasedBytes != 0 || m.LoadedPages != before.LoadedPages {
			t.Errorf("cold: %d fetches, %d holds, %d bytes leased", m.Fetches-before.Fetches, m.Holds, m.LeasedBytes)
		}
		hold, err = k.Fetch(t.Context(), tier.FetchRequest{Namespace: k.id, Names: warm, NoWait: true})
		if err != nil || hold.Usable != 4 {
			t.Fatalf("warm: %+v, %v", hold, err)
		}
		hold.Release()
	})
}

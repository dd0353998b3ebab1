//go:build sabotage

package tier_test

import (
	"bytes"
	"testing"

	"github.com/kvtier/kvtier/paging/check/sabotage"
	"github.com/kvtier/kvtier/tier"
)

// What Release answers and what a reader compares must be able to go wrong: with
// slots reused under a lease, the bytes under it change.
func TestSabotageReusedSlots(t *testing.T) {
	sabotage.Set("reuse-leased-slot")
	defer sabotage.Set()
	inRAM(t, func(t *testing.T, k *kit) {
		names := chain(1, 0, 20)
		k.put(names, 0, 0, tier.CommitOptions{})
		hold := k.fetch(t.Context(), tier.FetchRequest{Names: names})
		for c := 2; c < 6; c++ {
			k.put(chain(c, 0, 40), 0, 0, tier.CommitOptions{})
		}
		wrong := 0
		for i, name := range names {
			if !bytes.Equal(hold.Page(i, 0), k.content(name, 0)) {
				wrong++
			}
		}
		if wrong == 0 {
			t.Error("slots were reused while they were leased, and nobody could tell")
		}
		hold.Release()
	})
}

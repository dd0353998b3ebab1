//go:build sabotage

package plans

import (
	"testing"

	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// TestSabotageIsFound: a drain that copies nothing shows as blocks that nobody has when
// the node is gone.
func TestSabotageIsFound(t *testing.T) {
	sabotage.Set("drain-copies-nothing")
	t.Cleanup(func() { sabotage.Set() })
	inWorld(t, 3, func(t *testing.T, w *world) {
		x := w.follower()
		rest := w.others(x)
		x.put(3, 100)
		rest[0].mustEnd(rest[0].drain(x, nil), done)
		x.crash()
		if got := rest[0].fetch(3, 100); got == 100 {
			t.Error("no block is lost: the switch does nothing, or nothing looks")
		}
	})
}

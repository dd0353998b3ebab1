//go:build sabotage

package sessions

import (
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// TestSabotageIsFound: what is switched off shows as blocks that a session lost.
func TestSabotageIsFound(t *testing.T) {
	t.Cleanup(func() { sabotage.Set() })
	for name, measure := range map[string]func(*testing.T) int{
		"skip-target-check": blocksAbsentAfterMove,
		"lose-segment":      namesLostByTakeOver,
	} {
		sabotage.Set()
		if n := measure(t); n != 0 {
			t.Errorf("%d with nothing switched off", n)
		}
		sabotage.Set(name)
		n := measure(t)
		t.Logf("%s: %d", name, n)
		if n == 0 {
			t.Errorf("%s: 0: the switch does nothing, or nothing looks", name)
		}
	}
}

// blocksAbsentAfterMove counts blocks that a target lacks of a session that it owns.
func blocksAbsentAfterMove(t *testing.T) (n int) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 100)
		a.mustMove("s", b)
		n = 100 - b.local(chain(1, 0, 100))
	})
	return n
}

// namesLostByTakeOver counts the blocks that are lost with an owner.
func namesLostByTakeOver(t *testing.T) (lost int) {
	inWorld(t, 3, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[2], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 600)
		a.grow("s", 1, 600, 600) // a segment becomes full
		a.crash()
		w.eventually(30*time.Second, "the owner is down", func() bool { return !b.m.serves(a.id) })
		lost = int(b.mustOpen("s", nil).GetLostBlocks())
	})
	return lost
}

//go:build sabotage

package transport

import (
	"testing"

	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// TestSabotageSkipReceiveVerify: without the comparison at the receiver a bit
// that flips in flight makes a wrong page.
func TestSabotageSkipReceiveVerify(t *testing.T) {
	m, a, _, me := inMemory(t, nil)
	a.src.put(nameOf(0), 0, 300000, false)
	wrong := func() int {
		flip(m, a, 200000)
		tr := newTray(t, want(0, 0, 300000, a))
		fetch(t, me, tr)
		if tr.result(0).Err == nil && tr.wrong(0) {
			return 1
		}
		return 0
	}
	if n := wrong(); n != 0 {
		t.Errorf("%d wrong pages with nothing switched off", n)
	}
	sabotage.Set("skip-receive-verify")
	t.Cleanup(func() { sabotage.Set() })
	if n := wrong(); n != 1 {
		t.Errorf("%d wrong pages, want 1: the switch does nothing", n)
	}
}

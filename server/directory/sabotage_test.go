//go:build sabotage

package directory

import (
	"testing"

	"github.com/kvtier/kvtier/paging/check/sabotage"
)

// TestSabotageIsFound: what is switched off shows as blocks whose history is not
// linearizable.
func TestSabotageIsFound(t *testing.T) {
	for _, name := range []string{"drop-claim-releases", "apply-older-sequences", "read-cut-off"} {
		t.Run(name, func(t *testing.T) {
			sabotage.Set(name)
			t.Cleanup(func() { sabotage.Set() })
			n := violations(linearHistory(t, linearOps))
			t.Logf("%d of %d blocks are not linearizable", n, linearKeys)
			if n == 0 {
				t.Error("0 violations: the switch does nothing, or nothing looks")
			}
		})
	}
	sabotage.Set()
	if n := violations(linearHistory(t, linearOps/4)); n != 0 {
		t.Errorf("%d violations with nothing switched off", n)
	}
}

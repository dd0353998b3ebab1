package check

import "testing"

func TestThat(t *testing.T) {
	That(true, "never seen")
	defer func() {
		if got := recover() != nil; got != Enabled {
			t.Errorf("a broken invariant panics: %v, want %v", got, Enabled)
		}
	}()
	That(false, "slot %d", 3)
}

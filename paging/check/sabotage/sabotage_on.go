//go:build sabotage

package sabotage

import (
	"os"
	"slices"
	"strings"
	"sync/atomic"
)

var active atomic.Pointer[[]string]

// On reports whether the switch is active.
func On(name string) bool {
	names := active.Load()
	if names == nil {
		list := strings.Split(os.Getenv("KVTIER_SABOTAGE"), ",")
		names = &list
		active.Store(names)
	}
	return slices.Contains(*names, name)
}

// Set replaces the active switches until the next Set, for tests.
func Set(names ...string) { active.Store(&names) }

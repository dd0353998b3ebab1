// Package check holds assertions about the inside of this program. They exist
// only under the build tags race and invariants: a broken invariant panics
// there, and costs nothing elsewhere.
//
// Faults that come from outside (disk, network, another process, an argument)
// are errors, never assertions.
package check

import "fmt"

// That panics with the text if ok is false. On a hot path, or where building the
// arguments costs something, put it under `if check.Enabled`.
func That(ok bool, format string, args ...any) {
	if Enabled && !ok {
		panic("broken invariant: " + fmt.Sprintf(format, args...))
	}
}

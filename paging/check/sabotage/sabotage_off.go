//go:build !sabotage

package sabotage

// On is false: the compiler drops every branch that asks.
func On(string) bool { return false }

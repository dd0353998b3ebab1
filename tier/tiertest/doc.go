// Package tiertest is the conformance suite of tiers, a map that implements
// one, and a wrapper that injects faults.
package tiertest

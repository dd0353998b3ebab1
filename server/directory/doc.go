// Package directory is the replicated directory of a cluster: its nodes, its
// namespaces, and which node claims to hold which block.
//
// State is the pure state machine: commands in, results out; the same commands
// give the same state on every replica, whatever the machine. It has no clock
// (time is a field of a command and never runs backwards), no randomness, no
// I/O, and depends on no map order.
//
// A claim is a hint: its owner validates it when it is used. Nothing here moves
// a page or is on the path of a local hit.
package directory

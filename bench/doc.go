// Package bench holds the workloads behind "kvtier bench" and "kvtier demo":
// trace replay against a real daemon process, the measurements that are printed
// beside their bound, and the crash rounds.
//
// Three rules hold for every workload. The bytes of a page derive from what the
// page is, so any mix-up of pages is found by the reader. What is counted is
// what the client saw and verified, never what the daemon claims; requests =
// served + unavailable + failed is asserted. The two sides of a ratio alternate
// within one run on the same machine.
//
// Workloads start the daemon as a child process (the same binary with "serve"),
// stop it by its own process id, and remove the directories they made, also
// when the context ends. Nothing here is safe for concurrent use unless its
// comment says so.
package bench

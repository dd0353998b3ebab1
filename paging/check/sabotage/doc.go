// Package sabotage breaks, on purpose, what a zero in a result guards: with
// the build tag "sabotage" and KVTIER_SABOTAGE naming switches (separated by
// commas), the demo and the benches must report non-zero counts. Without the
// tag every switch is the constant false and its code is not in the binary.
//
// Switches:
//   - skip-verify: checksums of loaded pages are not compared
//   - neighbour-page: a load answers with the bytes of the slot beside it
//   - publish-first: the commit record is made durable before the bytes
//   - reuse-leased-slot: a slot is reused while a lease holds it
//   - skip-device-copy: pages are not copied to the device, nor their sums compared
//   - wrong-block-table: the demo's attention reads a page in the place of another
//   - skip-receive-verify: checksums of pages from other nodes are not compared
//   - drop-claim-releases: the directory keeps claims that their owner gave up
//   - apply-older-sequences: a claim batch that was applied is applied again
//   - skip-target-check: a session moves without its target being asked what it lacks
//   - lose-segment: names of a full segment of a session are not kept
//   - read-cut-off: a leader answers reads that no quorum confirms
//   - drain-copies-nothing: a drain says that nothing was left to copy
//
// Safe for concurrent use.
package sabotage

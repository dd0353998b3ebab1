// Package policy decides which block leaves a tier next. It is pure: no
// goroutine, lock, clock, randomness, I/O, and no dependence on the order of a
// map; the same calls give the same answers everywhere. It never sees bytes.
//
// # What a caller owes a Policy
//
// A Policy belongs to the blocks of one tenant in one tier. The caller finds
// blocks, owns their bytes and counts them against the budget; the policy is
// told what happens and asked who goes.
//
//  1. A request offers each of its blocks once: Hit if the block is resident,
//     Insert if it enters, in the order that HeadFirst names. Tail first makes
//     the head of a prompt the most recent, so that only leaves leave. Looking
//     at a block, taking another lease on it in the same request or moving it is
//     no offer.
//  2. When the tier is over its budget, or room is wanted for something, call
//     Victim until there is enough, and Evict each answer once it is gone. A
//     victim stays resident until then: one that is being written down, or that
//     may not go, must be blocked, else it is named again.
//  3. Remove tells that a block left for another reason than room. Retain
//     changes priority and TTL without being an offer.
//
// Room may be made before Insert or after it. Replay inserts first and then
// evicts while Used exceeds the capacity, so that the newcomer may be the one
// that goes; a tier with a hard budget makes room first.
//
// # Retention
//
// Priorities are strict: while a block of a lower priority can go, no block of a
// higher one does. When its TTL has passed a block is an ordinary one of priority
// 0, as if Retain had said so then: it gets one more turn in the order of the
// others, as engines that retain for a time expect. Neither ever makes Victim
// fail: if only blocks of priority 100 are left, one of them is the victim.
//
// # The policies
//
// "default" is described at type reuse. The others are the ones of the
// literature, exactly as testdata/README.md states them, so that they can be
// compared on published traces; among their retained blocks the least recently
// used goes first.
//
// Replay and ReplayCluster offer a published trace to one cache, and to the
// caches of several nodes with a directory between them.
//
// Memory: 32 bytes per ID (Blocks). default adds 8 bytes per resident block for
// those that left, and at most 750 KiB in all; 24 bytes for a block with a TTL.
// Hit does not allocate once the tables of default have their size, which they
// reach in steps. All calls take constant time (lfu and TTLs: logarithmic), but
// for s3fifo, whose Victim pays for earlier hits, and wtinylfu, which ages all
// its counts at once.
package policy

// Package nvme keeps pages on a local disk: their bytes in segment files of
// fixed slots, written and read past the page cache straight from and to the
// caller's memory, and one small record per page in a Pebble index.
//
// What holds after a crash at any instant:
//
//   - A page whose Store returned its Ref is there, or its copy fails the
//     checksum at Load because the disk lost it; never other bytes.
//   - A page whose Store did not return is there or absent, never in part.
//   - Space of everything else is free again after Recover.
//
// It follows from the order of writes: bytes are synced before the commit
// record is written; the record of a freed page is removed, synced, before its
// slot is used again; a segment is only listed once it is written in full; and
// a number is never given to two segments while records of the first exist.
//
// The directory, all formats in docs/formats.md:
//
//	LOCK      flock: one opener
//	FORMAT    the version of everything beside it; unknown: refused, untouched
//	index/    Pebble: commit records by place, namespaces by number
//	segments/ NNNNNNNNNN.seg, pre-written
//
// Failure. A write that fails, a full disk, or a disk that does not answer
// puts the tier in bypass: Store answers paging.ErrUnavailable at once, Load
// goes on, and the tier probes until it can write again. A full disk does not
// stop the index for good: its writes wait for room. A page that fails its
// checksum is paging.ErrCorrupt, or paging.ErrIdentity if the bytes are those
// of another page of this tier.
//
// Goroutines, all owned by the Tier and ended by Close: Config.Readers readers,
// eight writers, one committer, one that pre-writes segments, one keeper; those
// of Pebble; one for the duration of each call into Pebble. A read or write
// that hangs keeps its goroutine until the kernel answers.
package nvme

// Package shm holds memory that processes of one machine share, and the socket
// over which its descriptors travel. Linux only.
//
// # Memory that readers cannot corrupt
//
// An extent is a memfd. Its creator maps it writable once and then seals it
// against shrinking, growing, later writable mappings, and further seals. From
// then on the creator's own mapping stays writable, and nobody else can get a
// writable one, whatever descriptor they hold and however they re-open it; the
// memory cannot be truncated under a reader, and no hole can be punched into it.
// Extents are therefore given back whole. (A file on a tmpfs cannot be sealed,
// so huge pages come from hugetlb, or from a kernel that joins the pages of a memfd
// on request: Populate asks, and mappings lie so that both sides profit.)
//
// Staging is a memfd that its receiver may write and that neither side can
// resize: what is copied out of it is summed after the copy.
//
// # Generations
//
// The first bytes of an extent are a table of 64-bit little-endian numbers, one
// for each 4 KiB of the extent, raised by the daemon before a slot is reused. A
// reader compares the number of its slot after its last read.
//
// # The tether
//
// Descriptors travel over a sequenced-packet Unix socket. The receiving process
// keeps that socket open for as long as it, or a process it has forked, may read
// the memory: the kernel closes it when the last of them is gone, and only that
// ends the quarantine of what they could read. It is close-on-exec, as the
// mappings are.
//
// # Frames
//
// A packet is one frame: magic "KVTH", version (16 bits), kind (16 bits), payload
// length (32 bits), payload; all little-endian.
//
//	1 hello    client to daemon  attachment id, 16 bytes
//	2 extents  daemon to client  sequence, count (1 to 64), then for each: id, kind (32 bits each), bytes (64 bits); as many descriptors by SCM_RIGHTS, in that order
//	3 ack      client to daemon  sequence, number of descriptors that arrived
//
// No goroutine is started here. A method says so if it may be called from
// several goroutines at once.
package shm

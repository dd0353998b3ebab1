package tier

import (
	"hash/maphash"
	"math/bits"

	"github.com/kvtier/kvtier/paging"
)

// blockID numbers a block of the index; 0 is none. Tiers know it as the owner
// number of a page. It is reused after the block is gone.
type blockID = uint32

// block is what the index knows of one block. It holds no pointer, so that the
// garbage collector never looks at it.
type block struct {
	name     paging.BlockName
	ram      paging.PartSet // parts resident in the arena
	disk     paging.PartSet // parts on the durable tier
	ns       uint32         // number of its namespace
	run      uint32         // its page records: number of a run; next free block while free
	position uint32         // in its chain
	pins     uint32         // leases, writers and loads that need the RAM copy to stay
	used     uint32         // last use, Unix seconds
	epoch    uint32         // raised when the number is freed, so that queues notice
	frame    uint32         // its number in its tenant's RAM policy; 0: not in it
	flags    flags
	hits     uint8 // hits since it was stored or loaded at start; stays at 255
	priority uint8
}

type flags uint16

const (
	inDiskOrder flags = 1 << iota // in its tenant's disk policy
	queued                        // in the queue of dirty blocks
	hastened                      // in the queue of blocks to write at once
	writing                       // the demotion writer copies it
	busy                          // has an entry in inflight
	dropped                       // out of the index; freed when nothing uses it
	leaveRAM                      // leaves RAM as soon as it is clean and not pinned
	shed                          // left the disk by the disk's policy: may leave RAM without a copy
	incomplete                    // waits for parts; has an entry in Hierarchy.incomplete
	timed                         // has an entry in Hierarchy.retained
	held                          // pinned by a retention Pin; has an entry in Hierarchy.pinned
	foreseen                      // brought up by a prefetch and not used yet
	warm                          // hit while resident
	passedOver                    // the RAM policy passed it over as a victim
	freeBlock                     // not in use
	onDevice                      // has an entry in Hierarchy.device
)

func (f flags) has(g flags) bool { return f&g != 0 }

// page is what the index knows of one page of a block.
type page struct {
	ram  Ref // where it lies in the arena; of a free run: its next
	disk Ref // where it lies on the durable tier
	sum  uint64
}

const (
	chunkBits  = 12 // blocks are allocated 4,096 at a time
	runsBits   = 10 // runs of page records 1,024 at a time
	shardCount = 256
)

// index finds blocks by namespace and name. Tables, blocks and page records
// grow in bounded steps: no insert moves more than one shard of the table.
//
// Not safe for concurrent use.
type index struct {
	seed   maphash.Seed
	shards [shardCount]shard
	chunks []*[1 << chunkBits]block
	free   blockID // head of the list of free blocks
	next   blockID // lowest number never used
	live   int
	runs   [paging.MaxParts + 1]runs // by number of parts
}

// shard is an open-addressing table with linear probing; an entry is the upper
// half of a hash and a block number. Names are compared only where the halves
// agree, so a miss reads no block.
type shard struct {
	entries []uint64
	used    int
}

// runs holds page records in runs of one length.
type runs struct {
	chunks [][]page
	free   uint32 // head of the list of free runs, plus one
	next   uint32
}

func newIndex() *index {
	return &index{seed: maphash.MakeSeed(), next: 1}
}

func (x *index) hash(ns uint32, name *paging.BlockName) uint64 {
	// Names may be chosen by an attacker: the seed is secret.
	h := maphash.Bytes(x.seed, name[:])
	return bits.RotateLeft64(h+uint64(ns)*0x9e3779b97f4a7c15, 29)
}

// at is the block with this number.
func (x *index) at(id blockID) *block {
	return &x.chunks[id>>chunkBits][id&(1<<chunkBits-1)]
}

// find is the block of that name, 0 if there is none.
func (x *index) find(ns uint32, name *paging.BlockName) blockID {
	h := x.hash(ns, name)
	s := &x.shards[h%shardCount]
	if s.used == 0 {
		return 0
	}
	mask := uint32(len(s.entries) - 1)
	for i := uint32(h>>32) & mask; ; i = (i + 1) & mask {
		e := s.entries[i]
		if e == 0 {
			return 0
		}
		if e>>32 != h>>32 {
			continue
		}
		if b := x.at(blockID(e)); b.ns == ns && b.name == *name {
			return blockID(e)
		}
	}
}

// insert adds a block that is not there, with page records for parts pages.
func (x *index) insert(ns uint32, name *paging.BlockName, parts int) blockID {
	id := x.free
	if id != 0 {
		x.free = x.at(id).run
	} else {
		id = x.next
		x.next++
		if int(id>>chunkBits) == len(x.chunks) {
			x.chunks = append(x.chunks, new([1 << chunkBits]block))
		}
	}
	b := x.at(id)
	*b = block{name: *name, ns: ns, run: x.runs[parts].alloc(parts), epoch: b.epoch}
	x.live++
	x.link(id)
	return id
}

func (x *index) link(id blockID) {
	b := x.at(id)
	h := x.hash(b.ns, &b.name)
	s := &x.shards[h%shardCount]
	if (s.used+1)*5 > len(s.entries)*4 {
		s.grow()
	}
	s.put(h>>32<<32 | uint64(id))
	s.used++
}

func (s *shard) grow() {
	old := s.entries
	s.entries = make([]uint64, max(8, 2*len(old)))
	for _, e := range old {
		if e != 0 {
			s.put(e)
		}
	}
}

func (s *shard) put(e uint64) {
	mask := uint32(len(s.entries) - 1)
	i := uint32(e>>32) & mask
	for s.entries[i] != 0 {
		i = (i + 1) & mask
	}
	s.entries[i] = e
}

// unlink makes the block unfindable; its record stays until remove.
func (x *index) unlink(id blockID) {
	b := x.at(id)
	h := x.hash(b.ns, &b.name)
	s := &x.shards[h%shardCount]
	mask := uint32(len(s.entries) - 1)
	i := uint32(h>>32) & mask
	for blockID(s.entries[i]) != id {
		i = (i + 1) & mask
	}
	// Close the gap: move back each entry whose home is not after the gap.
	for j := i; ; {
		j = (j + 1) & mask
		e := s.entries[j]
		if e == 0 {
			break
		}
		if home := uint32(e>>32) & mask; (j-home)&mask >= (j-i)&mask {
			s.entries[i] = e
			i = j
		}
	}
	s.entries[i] = 0
	s.used--
}

// remove forgets an unlinked block; parts as at insert.
func (x *index) remove(id blockID, parts int) {
	b := x.at(id)
	x.runs[parts].release(b.run, parts)
	*b = block{flags: freeBlock, run: x.free, epoch: b.epoch + 1}
	x.free = id
	x.live--
}

// pages is the page records of a block of parts parts.
func (x *index) pages(b *block, parts int) []page {
	c := x.runs[parts].chunks[b.run>>runsBits]
	at := int(b.run&(1<<runsBits-1)) * parts
	return c[at : at+parts : at+parts]
}

func (r *runs) alloc(parts int) uint32 {
	n := r.next
	if r.free != 0 {
		n = r.free - 1
	} else {
		r.next++
		if int(n>>runsBits) == len(r.chunks) {
			r.chunks = append(r.chunks, make([]page, parts<<runsBits))
		}
	}
	at := int(n&(1<<runsBits-1)) * parts
	run := r.chunks[n>>runsBits][at : at+parts]
	if r.free != 0 {
		r.free = uint32(run[0].ram)
	}
	clear(run)
	return n
}

func (r *runs) release(n uint32, parts int) {
	at := int(n&(1<<runsBits-1)) * parts
	r.chunks[n>>runsBits][at].ram = Ref(r.free)
	r.free = n + 1
}

// bytes is the memory that the index holds.
func (x *index) bytes() int64 {
	const blockBytes, pageBytes = 80, 24
	n := int64(len(x.chunks)) * blockBytes << chunkBits
	for i := range x.shards {
		n += int64(len(x.shards[i].entries)) * 8
	}
	for parts := range x.runs {
		n += int64(len(x.runs[parts].chunks)) * int64(parts) * pageBytes << runsBits
	}
	return n
}

// walk calls do for up to step blocks from number at on, and returns where to go
// on; 0 at the end.
func (x *index) walk(at blockID, step int, do func(id blockID, b *block)) blockID {
	for end := min(at+blockID(step), x.next); at < end; at++ {
		if b := x.at(at); !b.flags.has(freeBlock) {
			do(at, b)
		}
	}
	if at >= x.next {
		return 0
	}
	return at
}

// each calls do for every block.
func (x *index) each(do func(id blockID, b *block)) {
	x.walk(1, int(x.next), do)
}

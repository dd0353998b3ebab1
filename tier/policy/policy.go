package policy

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// ID is the caller's handle of a block: dense, from 0, reusable once the block
// has left. 1<<32 − 1 is not a valid ID.
type ID uint32

// Default names the policy that a tier has unless told otherwise.
const Default = "default"

// MaxPriority is the highest retention priority.
const MaxPriority = 100

// Access is what a policy is told about a block that is offered. Position and
// Length are for both Insert and Hit.
type Access struct {
	Position int32 // index of the block in the chain of its request
	Length   int32 // blocks in that chain, the same for all of them; 0: not known

	// For Hit only.
	Now int64 // the caller's clock, as in Victim

	// For Insert only.
	Key      uint64 // names the content, also after the block left and returned under another ID
	Weight   int64  // in units of the capacity, at least 1: bytes of slots, or 1 in a trace
	Expires  int64  // TTL: the time on the caller's clock at which it has passed; 0: never
	Priority uint8  // retention priority; above MaxPriority counts as MaxPriority
}

// Policy chooses which of the blocks of one tenant in one tier leaves next. It
// holds no bytes and evicts nothing itself. See the package comment for the
// calls that a caller owes it.
//
// Not safe for concurrent use. Calling Insert for a resident block, or another
// method for one that is not resident, is a broken caller and panics.
type Policy struct {
	order  order
	blocks *Blocks
	used   int64
	count  int
	parked list // blocked when last looked at, the longest unchecked first
	expiry *expiry
}

// The work of one Victim call. Pins are found by asking, so a call must be
// able to pass them; what it passes it parks, so that the next call does not
// meet it again, and looks back at a few parked ones.
const (
	scanLimit    = 64
	recheckLimit = 16
	lapseLimit   = 64
)

// maker is one row of the table of policies.
type maker struct {
	name      string
	headFirst bool
	order     func(*Blocks, int64) order
}

func classic(inner func(*Blocks, int64) order) func(*Blocks, int64) order {
	return func(b *Blocks, capacity int64) order { return newLeveled(b, inner(b, capacity)) }
}

var makers = []maker{
	{Default, false, func(b *Blocks, _ int64) order { return newReuse(b) }},
	{"lru", true, classic(func(b *Blocks, _ int64) order { return newLRU(b) })},
	{"lru_rev", false, classic(func(b *Blocks, _ int64) order { return newLRU(b) })},
	{"slru_rev", false, classic(func(b *Blocks, c int64) order { return newSLRU(b, c) })},
	{"lfu_rev", false, classic(func(*Blocks, int64) order { return newLFU(false, false) })},
	{"lengthaware", true, classic(func(*Blocks, int64) order { return newLFU(true, false) })},
	{"lfuda_rev", false, classic(func(*Blocks, int64) order { return newLFU(true, true) })},
	{"s3fifo_rev", false, classic(func(b *Blocks, c int64) order { return newS3FIFO(b, c) })},
	{"wtinylfu_rev", false, classic(func(b *Blocks, c int64) order { return newWTinyLFU(b, c) })},
}

func find(name string) (maker, error) {
	i := slices.IndexFunc(makers, func(m maker) bool { return m.name == name })
	if i < 0 {
		return maker{}, fmt.Errorf("policy: %q: want one of %s", name, strings.Join(Names(), ", "))
	}
	return makers[i], nil
}

// Names lists the policies, Default first.
func Names() []string {
	names := make([]string, len(makers))
	for i, m := range makers {
		names[i] = m.name
	}
	return names
}

// HeadFirst reports whether a request's blocks are offered to the named policy
// from the head of the prompt, not from its tail. False for an unknown name.
func HeadFirst(name string) bool {
	m, err := find(name)
	return err == nil && m.headFirst
}

// New returns an empty policy for a tier of this capacity, at least 1. blocks
// may be shared, see Blocks; nil gives the policy its own. The error names the
// policies there are.
func New(name string, capacity int64, blocks *Blocks) (*Policy, error) {
	m, err := find(name)
	if err != nil {
		return nil, err
	}
	if capacity < 1 {
		return nil, fmt.Errorf("policy: capacity %d: want at least 1", capacity)
	}
	if blocks == nil {
		blocks = new(Blocks)
	}
	return &Policy{
		order:  m.order(blocks, min(capacity, maxCapacity)),
		blocks: blocks,
		parked: newList(),
		expiry: newExpiry(),
	}, nil
}

// maxCapacity leaves room for the multiples of the capacity that policies use.
const maxCapacity = math.MaxInt64 / 16

// Len is the number of resident blocks.
func (p *Policy) Len() int { return p.count }

// Used is the weight of all resident blocks.
func (p *Policy) Used() int64 { return p.used }

// Resize tells the policy of a new capacity, at least 1. It evicts nothing.
func (p *Policy) Resize(capacity int64) {
	p.order.resize(min(max(capacity, 1), maxCapacity))
}

// Insert adds a block that was offered and is now resident.
func (p *Policy) Insert(id ID, a Access) {
	if id == none {
		panic("policy: Insert of an invalid ID")
	}
	n := p.blocks.grown(id)
	if n.place != absent {
		panic(fmt.Sprintf("policy: Insert of block %d, which is resident", id))
	}
	*n = node{key: a.Key, weight: max(a.Weight, 1), level: min(a.Priority, MaxPriority), place: ordered}
	p.count++
	p.used += n.weight
	p.expiry.set(id, a.Expires)
	p.order.insert(id, a)
}

// Hit records that a resident block was offered again. If its TTL has passed it
// is an ordinary block of priority 0 from then on.
func (p *Policy) Hit(id ID, a Access) {
	n := p.recall(id)
	if p.expiry.passed(id, a.Now) {
		p.expiry.set(id, 0)
		p.setLevel(id, n, 0)
	}
	p.order.hit(id, a)
}

// Retain replaces the retention of a resident block: its priority, and the time
// on the caller's clock at which its TTL has passed; 0 is never. It is not an
// offer.
func (p *Policy) Retain(id ID, priority uint8, expires int64) {
	n := p.recall(id)
	p.setLevel(id, n, min(priority, MaxPriority))
	p.expiry.set(id, expires)
}

func (p *Policy) setLevel(id ID, n *node, level uint8) {
	if level != n.level {
		p.order.hide(id)
		n.level = level
		p.order.show(id, true)
	}
}

// Evict records that a block left for want of room. Policies remember it.
func (p *Policy) Evict(id ID) { p.leave(id, true) }

// Remove records that a block left for another reason: dropped, corrupt, moved.
func (p *Policy) Remove(id ID) { p.leave(id, false) }

func (p *Policy) leave(id ID, evicted bool) {
	n := p.recall(id)
	p.order.leave(id, evicted)
	p.expiry.set(id, 0)
	n.place = absent
	p.count--
	p.used -= n.weight
}

// Victim names the block to evict next: one of the lowest priority, in the order
// of the policy. A block whose TTL has passed at now has priority 0, and comes
// into that order as one used just then; a call sees to lapseLimit of them. It
// removes nothing: Evict does. Blocks for which blocked answers true are passed over; nil blocks
// none. The work of a call is bounded: it asks at most 97 times. False means that
// none was found by then. The next call goes on from there, so if a block is not
// blocked, one of Len()/16 + 2 calls finds it. blocked must not call the Policy.
func (p *Policy) Victim(now int64, blocked func(ID) bool) (ID, bool) {
	p.lapse(now)
	p.recheck(blocked, recheckLimit)
	for range scanLimit {
		id, ok := p.order.next()
		if !ok {
			break
		}
		if blocked == nil || !blocked(id) {
			return id, true
		}
		p.park(id)
	}
	// What recheck brings back need not be what is first now: where more blocks
	// are blocked than one call looks at, one that nobody was asked about may be.
	if p.recheck(blocked, recheckLimit) {
		if id, ok := p.order.next(); ok && (blocked == nil || !blocked(id)) {
			return id, true
		}
	}
	return none, false
}

// recall brings a resident block back into the order if it was parked.
func (p *Policy) recall(id ID) *node {
	n := p.blocks.known(id)
	if n == nil || n.place == absent {
		panic(fmt.Sprintf("policy: block %d is not resident", id))
	}
	if n.place == parked {
		p.blocks.unlink(&p.parked, id)
		n.place = ordered
		p.order.show(id, true)
	}
	return n
}

// lapse ends the priority of blocks whose TTL has passed.
func (p *Policy) lapse(now int64) {
	for range lapseLimit {
		d, ok := p.expiry.first()
		if !ok || d.at > now {
			return
		}
		p.expiry.set(d.id, 0)
		n := p.blocks.at(d.id)
		if n.place == ordered {
			p.setLevel(d.id, n, 0)
		} else {
			n.level = 0 // shown there when it is no longer blocked
		}
	}
}

func (p *Policy) park(id ID) {
	p.order.hide(id)
	p.blocks.at(id).place = parked
	p.blocks.pushNewest(&p.parked, id)
}

// recheck puts parked blocks that are no longer blocked back where they came
// from, and reports whether there were any.
func (p *Policy) recheck(blocked func(ID) bool, limit int) bool {
	var free [recheckLimit]ID
	n := 0
	for range limit {
		if p.parked.empty() {
			break
		}
		id := p.parked.oldest
		p.blocks.unlink(&p.parked, id)
		if blocked != nil && blocked(id) {
			p.blocks.pushNewest(&p.parked, id)
			continue
		}
		free[n] = id
		n++
	}
	// Each goes to the oldest end, so the one that was parked first goes last.
	for i := n - 1; i >= 0; i-- {
		p.restore(free[i])
	}
	return n > 0
}

// restore puts a block that was parked, and is in no list, at the end that leaves
// first.
func (p *Policy) restore(id ID) {
	p.blocks.at(id).place = ordered
	p.order.show(id, false)
}

// Unblock tells that a resident block which was blocked is so no more, and may
// leave before all others of its priority again if Victim passed it over. It is
// an offer of speed: without it, one of the next calls of Victim finds out. Of
// several blocks, the one that is to leave first is told last.
func (p *Policy) Unblock(id ID) {
	if n := p.blocks.known(id); n != nil && n.place == parked {
		p.blocks.unlink(&p.parked, id)
		p.restore(id)
	}
}

package server

import (
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// minTokenLife is the least time that an adopt token lives: long enough for any
// worker that still wants the decision. Nobody reads pages by a token alone, so
// that its end by time takes no memory from a reader.
const minTokenLife = 10 * time.Minute

// sharedHold is a hold with several owners: the pages go back with the last.
type sharedHold struct {
	*tier.Hold
	owners atomic.Int32
}

// share makes one more owner, who releases once.
func (s *sharedHold) share() *sharedHold {
	s.owners.Add(1)
	return s
}

// Release ends one owner's share.
func (s *sharedHold) Release() (intact bool) {
	intact = s.Intact()
	if s.owners.Add(-1) == 0 {
		s.Hold.Release()
	}
	return intact
}

// decision is what a scheduler's Fetch decided for its group. The token owns one
// share of the pins until every reader of the group has adopted its parts, the
// scheduler drops it, its time is over, or the group ends; each adoption owns
// another until it is released.
type decision struct {
	pins      *sharedHold
	namespace paging.NamespaceID
	layout    *paging.Layout
	first     int // position of the first block
	usable    int
	deadline  time.Time
	left      map[reader]struct{} // who has not adopted yet; guarded by the group's mu
}

// reader is a rank that reads a part. A part that all ranks read is adopted by
// each of them.
type reader struct {
	part int
	rank uint32
}

// anyRank stands for whoever adopts, where no member of a group named its ranks.
const anyRank = ^uint32(0)

// readers are those in the group that read any of the parts.
func (g *group) readersLocked(l *paging.Layout, parts paging.PartSet) map[reader]struct{} {
	left := map[reader]struct{}{}
	if len(g.ranks) == 0 {
		for part := range l.Parts {
			if parts.Has(part) {
				left[reader{part, anyRank}] = struct{}{}
			}
		}
		return left
	}
	for rank := range g.ranks {
		of := l.PartsOfRanks([]uint32{rank}) & parts
		for part := range l.Parts {
			if of.Has(part) {
				left[reader{part, rank}] = struct{}{}
			}
		}
	}
	return left
}

// adopted takes out who has adopted: the ranks of one member, or with none named
// all ranks.
func (d *decision) adopted(parts paging.PartSet, ranks []uint32) {
	for r := range d.left {
		if parts.Has(r.part) && (len(ranks) == 0 || r.rank == anyRank || slices.Contains(ranks, r.rank)) {
			delete(d.left, r)
		}
	}
}

// decide pins a decision for the group and returns its token.
func (g *group) decide(d *decision, parts paging.PartSet) (rpc.ID, error) {
	token := randomID()
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.decisions == nil:
		return rpc.ID{}, fmt.Errorf("the group has ended: %w", paging.ErrUnknownAttachment)
	case len(g.decisions) >= maxDecisions:
		return rpc.ID{}, fmt.Errorf("the group has %d adopt tokens, the most at once: adopt or release some: %w", maxDecisions, paging.ErrUnavailable)
	}
	d.left = g.readersLocked(d.layout, parts)
	g.decisions[token] = d
	return token, nil
}

// find is the decision of a token.
func (g *group) find(token rpc.ID) (*decision, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d, ok := g.decisions[token]
	if !ok {
		return nil, errToken()
	}
	return d, nil
}

func errToken() error {
	return fmt.Errorf("adopt token: its decision was adopted by all, dropped, or is too old: %w", paging.ErrNotFound)
}

// adopt takes a share of the decision for these parts; the last reader's ends
// the token.
func (g *group) adopt(token rpc.ID, parts paging.PartSet, ranks []uint32) (*sharedHold, error) {
	g.mu.Lock()
	d, ok := g.decisions[token]
	if !ok {
		g.mu.Unlock()
		return nil, errToken()
	}
	pins := d.pins.share()
	d.adopted(parts, ranks)
	ended := len(d.left) == 0
	if ended {
		delete(g.decisions, token)
	}
	g.mu.Unlock()
	if ended {
		d.pins.Release()
	}
	return pins, nil
}

// drop ends a token. One that is not known is success.
func (g *group) drop(token rpc.ID) {
	g.mu.Lock()
	d, ok := g.decisions[token]
	delete(g.decisions, token)
	g.mu.Unlock()
	if ok {
		d.pins.Release()
	}
}

// sweep ends the tokens whose time is over.
func (g *group) sweep(now time.Time) (ended int) {
	g.mu.Lock()
	var old []*decision
	for token, d := range g.decisions {
		if !now.Before(d.deadline) {
			old = append(old, d)
			delete(g.decisions, token)
		}
	}
	g.mu.Unlock()
	for _, d := range old {
		d.pins.Release()
	}
	return len(old)
}

// appendColumns packs the slots of the parts asked for out of rows that hold
// those of all parts.
func appendColumns(dst []byte, slots []paging.Slot, all, parts paging.PartSet) []byte {
	columns := all.Len()
	if columns == 0 {
		return dst
	}
	for row := 0; row < len(slots); row += columns {
		column := 0
		for s := all; s != 0; s &= s - 1 {
			if parts.Has(bits.TrailingZeros64(uint64(s))) {
				dst = paging.AppendSlot(dst, slots[row+column])
			}
			column++
		}
	}
	return dst
}

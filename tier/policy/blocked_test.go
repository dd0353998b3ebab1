package policy

import "testing"

// TestVictimIsNeverBlocked lets go of one of some blocks that were passed over
// before more others came than one call of Victim looks at, as leases on long
// prefixes make it: nobody was asked about those, so they are not to be named.
func TestVictimIsNeverBlocked(t *testing.T) {
	const passedOver, unseen = 2 * recheckLimit, 3 * scanLimit
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			for free := range ID(passedOver) {
				p, err := New(name, passedOver+unseen, nil)
				if err != nil {
					t.Fatal(err)
				}
				access := func(id ID) Access {
					return Access{Key: uint64(id), Weight: 1, Position: int32(id), Length: passedOver + unseen}
				}
				for id := range ID(passedOver) { // used twice: another list of the order than those used once
					p.Insert(id, access(id))
					p.Hit(id, access(id))
				}
				p.Victim(0, func(ID) bool { return true })
				for id := ID(passedOver); id < passedOver+unseen; id++ {
					p.Insert(id, access(id))
				}
				id, ok := p.Victim(0, func(id ID) bool { return id != free })
				if ok && id != free {
					t.Fatalf("block %d is blocked and was named; only %d is not", id, free)
				}
			}
		})
	}
}

// TestOrderSurvivesBlocking passes over all blocks and lets go of them again:
// they leave in the order in which they would have left.
func TestOrderSurvivesBlocking(t *testing.T) {
	const blocks = recheckLimit
	for _, told := range []bool{false, true} {
		p, err := New("lru_rev", blocks, nil)
		if err != nil {
			t.Fatal(err)
		}
		for id := range ID(blocks) {
			p.Insert(id, Access{Key: uint64(id), Weight: 1})
		}
		if id, ok := p.Victim(0, func(ID) bool { return true }); ok {
			t.Fatalf("named block %d, which is blocked", id)
		}
		if told {
			for id := range ID(blocks) {
				p.Unblock(blocks - 1 - id)
			}
		}
		for want := range ID(blocks) {
			got, ok := p.Victim(0, nil)
			if !ok || got != want {
				t.Fatalf("told %v: victim %d (%v), want %d", told, got, ok, want)
			}
			p.Evict(got)
		}
	}
}

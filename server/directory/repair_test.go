package directory

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// looked counts how often an inventory is read.
type looked struct {
	*shelf
	looks atomic.Int64
}

func (l *looked) Held(buckets *Buckets, f func(placement.BlockKey, paging.PartSet)) {
	l.looks.Add(1)
	l.shelf.Held(buckets, f)
}

// A node that joins with many blocks reads its inventory once to compare and once for
// every 64 buckets, however many entries these take.
func TestRepairReadsTheInventorySeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 1)
		id := nodeID(1)
		s := &looked{shelf: &shelf{held: map[placement.BlockKey]paging.PartSet{}}}
		for i := range 400_000 {
			s.set(spreadKey(i), 1)
		}
		c, err := NewClaimer(ClaimerConfig{Directory: w.node(id), Inventory: s, Self: join(id, 1, "n").GetJoinNode()})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		w.follows(t, id, s.shelf, time.Minute)
		if m, looks := c.Metrics(), s.looks.Load(); m.Batches < 30 || looks > 1+bucketCount/bucketsRead {
			t.Errorf("%d entries, the inventory was read %d times", m.Batches, looks)
		}
	})
}

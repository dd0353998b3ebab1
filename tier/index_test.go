package tier

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/paging"
)

// The index against a Go map: inserts, finds and removals of blocks of all
// numbers of parts, in names that agree in most bytes.
func TestIndexAgainstMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 1))
	x := newIndex()
	type key struct {
		ns   uint32
		name paging.BlockName
	}
	model := map[key]blockID{}
	parts := func(k key) int { return int(k.ns)%paging.MaxParts + 1 }
	for range 200_000 {
		var k key
		k.ns = rng.Uint32N(5) * 21
		binary.LittleEndian.PutUint32(k.name[28:], rng.Uint32N(5000))
		id := x.find(k.ns, &k.name)
		if id != model[k] {
			t.Fatalf("found %d, want %d", id, model[k])
		}
		if id == 0 {
			id = x.insert(k.ns, &k.name, parts(k))
			model[k] = id
			for i := range x.pages(x.at(id), parts(k)) {
				p := &x.pages(x.at(id), parts(k))[i]
				if *p != (page{}) {
					t.Fatalf("a new page record holds %+v", *p)
				}
				p.sum = uint64(id)
			}
		} else if rng.IntN(2) == 0 {
			for _, p := range x.pages(x.at(id), parts(k)) {
				if p.sum != uint64(id) {
					t.Fatalf("block %d has the page records of block %d", id, p.sum)
				}
			}
			x.unlink(id)
			x.remove(id, parts(k))
			delete(model, k)
		}
		if x.live != len(model) {
			t.Fatalf("%d blocks, want %d", x.live, len(model))
		}
	}
	seen := 0
	x.each(func(id blockID, b *block) {
		seen++
		if model[key{b.ns, b.name}] != id {
			t.Errorf("block %d is not in the model", id)
		}
	})
	if seen != len(model) {
		t.Errorf("walked over %d blocks, want %d", seen, len(model))
	}
}

func TestDirtyQueueIsBounded(t *testing.T) {
	var q dirtyQueue
	gone := map[blockID]bool{}
	for id := blockID(1); id < 100_000; id++ {
		q.sweep(func(e dirtyEntry) bool { return gone[e.id] })
		q.push(dirtyEntry{id: id})
		q.live++
		if id%10 != 0 { // nine of ten go before they are written
			gone[id] = true
			q.live--
		}
		if q.len() > 2*q.live+sweepAt+1 {
			t.Fatalf("%d entries for %d blocks", q.len(), q.live)
		}
	}
	last := blockID(0)
	for q.len() > 0 {
		if e := q.pop(); e.id <= last {
			t.Fatalf("%d after %d", e.id, last)
		} else {
			last = e.id
		}
	}
}

func TestMetaRoundTrip(t *testing.T) {
	for _, b := range []block{{}, {used: 1<<32 - 1, position: 7, hits: 3, priority: 100}, {used: 5, position: 1 << 30, hits: 255, priority: 1}} {
		var got block
		got.unpackMeta(packMeta(&b))
		want := block{used: b.used, position: min(b.position, metaPositionMax), hits: min(b.hits, metaHitsMax), priority: b.priority}
		if got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
}

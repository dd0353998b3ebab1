package directory

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// Sizes of a history.
const (
	linearOwners  = 4
	linearReaders = 3
	linearKeys    = 24
)

// holdings is what each owner claims of one block.
type holdings [linearOwners]paging.PartSet

// access is one operation on one block: an owner sets what it claims, or
// somebody reads what all claim.
type access struct {
	key   int
	write bool
	owner int
	parts paging.PartSet
}

var holdingsModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		byKey := make([][]porcupine.Operation, linearKeys)
		for _, op := range history {
			key := op.Input.(access).key
			byKey[key] = append(byKey[key], op)
		}
		return byKey
	},
	Init: func() any { return holdings{} },
	Step: func(state, input, output any) (bool, any) {
		h, a := state.(holdings), input.(access)
		if !a.write {
			return output.(holdings) == h, h
		}
		h[a.owner] = a.parts
		return true, h
	},
}

// violations counts the blocks whose part of a history is not linearizable.
func violations(history []porcupine.Operation) int {
	n := 0
	for _, part := range holdingsModel.Partition(history) {
		if !porcupine.CheckOperations(holdingsModel, part) {
			n++
		}
	}
	return n
}

// recorder collects a history. Its clock orders what happens at one instant of
// fake time too.
type recorder struct {
	w     *network
	seed  uint64
	until int // so many operations

	mu    sync.Mutex
	clock int64
	ops   []porcupine.Operation

	troubles [4]int // by kind; of disturb alone
}

func (r *recorder) tick() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock++
	return r.clock
}

func (r *recorder) done() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ops) >= r.until
}

// add notes operations that ran together and have ended now.
func (r *recorder) add(client int, call int64, accesses []access, outputs []holdings) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock++
	for i, a := range accesses {
		op := porcupine.Operation{ClientId: client, Input: a, Call: call, Return: r.clock}
		if outputs != nil {
			op.Output = outputs[i]
		}
		r.ops = append(r.ops, op)
	}
}

func linearKey(i int) placement.BlockKey { return spreadKey(1000 + i) }

// anyNode is a node that is up, chosen at random.
func (r *recorder) anyNode(random *rand.Rand) *Directory {
	up := r.w.upNodes()
	if len(up) == 0 {
		return nil
	}
	return up[random.IntN(len(up))].dir
}

// settle proposes a command, at ever other nodes, until its fate is known.
func (r *recorder) settle(random *rand.Rand, c *kvtierv1.DirectoryCommand) Result {
	for {
		d := r.anyNode(random)
		if d != nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			res, err := d.Propose(ctx, c)
			cancel()
			if err == nil {
				return res
			}
			if !errors.Is(err, paging.ErrUnavailable) && !errors.Is(err, paging.ErrClosed) {
				panic(err)
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// own is an owner: it claims and releases, sends batches that were answered long
// ago once more, and now and then starts anew and sends a batch of its old life.
func (r *recorder) own(t *testing.T, i int) {
	random := rand.New(rand.NewPCG(r.seed, uint64(100+i)))
	o := &owner{id: nodeID(60 + i), incarnation: 1}
	if res := r.settle(random, join(o.id, 1, "owner")); res != OK {
		t.Errorf("join: %v", res)
		return
	}
	var before *kvtierv1.DirectoryCommand // the last batch but one
	var last *kvtierv1.DirectoryCommand
	for !r.done() {
		time.Sleep(time.Duration(random.IntN(12)) * time.Millisecond)
		if random.IntN(400) == 0 {
			o.incarnation, o.sequence = o.incarnation+1, 0
			if res := r.settle(random, join(o.id, o.incarnation, "owner")); res != OK {
				t.Errorf("start %d: %v", o.incarnation, res)
			}
			if last != nil {
				if res := r.settle(random, last); res != Stale {
					t.Errorf("a batch of an older start: %v, want %v", res, Stale)
				}
			}
			before, last = nil, nil
			continue
		}
		if before != nil && random.IntN(10) == 0 {
			if res := r.settle(random, before); res != OK {
				t.Errorf("a batch that was applied, once more: %v, want %v", res, OK)
			}
			continue
		}
		var accesses []access
		var changes []byte
		for range 1 + random.IntN(3) {
			a := access{key: random.IntN(linearKeys), write: true, owner: i, parts: paging.PartSet(random.Uint64N(4))}
			accesses = append(accesses, a)
			changes = AppendChange(changes, linearKey(a.key), a.parts)
		}
		if len(accesses) > 1 && accesses[0].key == accesses[len(accesses)-1].key {
			continue // within a batch a block is named once
		}
		if len(accesses) > 2 && (accesses[1].key == accesses[0].key || accesses[1].key == accesses[2].key) {
			continue
		}
		c := claimBatch(o, o.sequence+1, changes)
		call := r.tick()
		if res := r.settle(random, c); res != OK {
			t.Errorf("batch %d: %v", o.sequence+1, res)
			return
		}
		r.add(i, call, accesses, nil)
		o.sequence++
		before, last = last, c
	}
}

// read asks whoever believes that it leads.
func (r *recorder) read(i int) {
	random := rand.New(rand.NewPCG(r.seed, uint64(200+i)))
	for !r.done() {
		time.Sleep(time.Duration(random.IntN(10)) * time.Millisecond)
		d := r.anyNode(random)
		if d == nil {
			continue
		}
		accesses := []access{{key: random.IntN(linearKeys)}}
		outputs := make([]holdings, 1)
		call := r.tick()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err := d.ReadLatest(ctx, func(s *State) {
			outputs[0] = holdings{}
			for _, h := range s.Locate(linearKey(accesses[0].key), nil) {
				outputs[0][int(h.Node[0])-60] = h.Parts
			}
		})
		cancel()
		if err == nil {
			r.add(linearOwners+i, call, accesses, outputs)
		}
	}
}

// disturb kills leaders, cuts links and hangs disks, one trouble at a time.
func (r *recorder) disturb(t *testing.T) {
	random := rand.New(rand.NewPCG(r.seed, 300))
	pause := func(least int) { time.Sleep(time.Duration(least+random.IntN(400)) * time.Millisecond) }
	for round := random.IntN(len(r.troubles)); !r.done(); round++ {
		pause(200)
		victim := r.victim(random)
		var others []placement.NodeID
		for i := range 3 {
			if id := nodeID(i + 1); id != victim {
				others = append(others, id)
			}
		}
		kind := round % len(r.troubles)
		r.troubles[kind]++
		switch kind {
		case 0:
			r.w.kill(t, victim)
			pause(300)
			r.w.start(t, victim, false)
		case 1: // alone
			for _, id := range others {
				r.w.setCut(victim, id, true)
			}
			pause(500)
			for _, id := range others {
				r.w.setCut(victim, id, false)
			}
		case 2: // from one
			r.w.setCut(victim, others[0], true)
			pause(500)
			r.w.setCut(victim, others[0], false)
		case 3:
			r.w.disk(victim).setHang(true)
			pause(3000)
			r.w.disk(victim).setHang(false)
		}
	}
}

// victim is the leader, mostly.
func (r *recorder) victim(random *rand.Rand) placement.NodeID {
	for _, n := range r.w.upNodes() {
		if random.IntN(4) > 0 && n.dir.Status().Role == "leader" {
			return n.id
		}
	}
	return nodeID(1 + random.IntN(3))
}

func (w *network) disk(id placement.NodeID) *testDisk {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[id].disk
}

// linearHistory runs a troubled cluster until a history of so many operations
// was made.
func linearHistory(t *testing.T, operations int) (history []porcupine.Operation) {
	seed := testSeed(t)
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		lost := rand.New(rand.NewPCG(seed, 400))
		var mu sync.Mutex
		w.mu.Lock()
		w.lose = func() bool {
			mu.Lock()
			defer mu.Unlock()
			return lost.IntN(20) == 0
		}
		w.mu.Unlock()
		r := &recorder{w: w, seed: seed, until: operations}
		var clients sync.WaitGroup
		for i := range linearOwners {
			clients.Go(func() { r.own(t, i) })
		}
		for i := range linearReaders {
			clients.Go(func() { r.read(i) })
		}
		r.disturb(t)
		clients.Wait()
		history = r.ops
		t.Logf("%d kills, %d nodes cut off, %d links cut, %d disks hung", r.troubles[0], r.troubles[1], r.troubles[2], r.troubles[3])
	})
	return history
}

// Claims, releases and linearizable reads behave as if they came one after
// another, while leaders are killed, links are cut, disks hang and answers are
// lost.
func TestLinearizable(t *testing.T) {
	history := linearHistory(t, linearOps)
	reads := 0
	for _, op := range history {
		if !op.Input.(access).write {
			reads++
		}
	}
	t.Logf("%d operations, %d of them reads", len(history), reads)
	if reads < len(history)/10 || reads > len(history)*9/10 {
		t.Errorf("%d reads of %d operations: the history says little", reads, len(history))
	}
	if n := violations(history); n != 0 {
		t.Errorf("%d of %d blocks are not linearizable", n, linearKeys)
	}
}

// The checker finds what it is there to find.
func TestViolationsAreFound(t *testing.T) {
	set := func(call, ret int64, parts paging.PartSet) porcupine.Operation {
		return porcupine.Operation{Input: access{write: true, parts: parts}, Call: call, Return: ret}
	}
	get := func(call, ret int64, parts paging.PartSet) porcupine.Operation {
		return porcupine.Operation{Input: access{}, Output: holdings{parts}, Call: call, Return: ret}
	}
	for want, history := range [][]porcupine.Operation{
		{set(1, 2, 1), get(3, 4, 1), set(5, 9, 2), get(6, 7, 1), get(8, 10, 2)},
		{set(1, 2, 1), set(3, 4, 2), get(5, 6, 1)}, // an older state
	} {
		if got := violations(history); got != want {
			t.Errorf("%d violations, want %d in %s", got, want, fmt.Sprint(history))
		}
	}
}

package tier_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/nvme"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// Many callers at once, over far more than RAM and the disk hold: nobody ever
// sees a wrong byte, and in the end everything adds up.
func TestConcurrentUse(t *testing.T) {
	seed := tiertest.Seed(t)
	for name, ns := range layouts() {
		t.Run(name, func(t *testing.T) {
			d, err := nvme.Open(nvme.Config{Dir: t.TempDir(), BudgetBytes: 2 << 20, SegmentBytes: 256 << 10})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { d.Close() })
			k := open(t, ns, 2<<20, tier.Config{Durable: d, FlushAfter: 10 * time.Millisecond})
			var wg sync.WaitGroup
			for g := range 8 {
				wg.Go(func() {
					u := user{kit: k, rng: rand.New(rand.NewPCG(seed, uint64(g)))}
					for range tiertest.Rounds(60) {
						u.step()
					}
				})
			}
			stop := make(chan struct{})
			var checking sync.WaitGroup
			checking.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						k.Tick()
						k.Metrics()
						k.Blocks(tier.BlockQuery{Limit: 10})
					}
				}
			})
			wg.Wait()
			close(stop)
			checking.Wait()
		})
	}
}

// user is one of the callers of TestConcurrentUse.
type user struct {
	*kit
	rng *rand.Rand
}

func (u *user) step() {
	first := 0
	if u.rng.IntN(4) == 0 {
		first = u.rng.IntN(30)
	}
	names := chain(u.rng.IntN(8), first, 1+u.rng.IntN(30))
	ctx, cancel := context.WithTimeout(u.t.Context(), time.Duration(u.rng.IntN(50))*time.Millisecond)
	defer cancel()
	switch u.rng.IntN(10) {
	case 0, 1, 2:
		u.write(ctx, names, first)
	case 3:
		if _, err := u.Drop(u.id, names[:1]); err != nil {
			u.t.Error(err)
		}
	case 4:
		p, err := u.Promote(tier.PromoteRequest{Namespace: u.id, Names: names, First: first, Deadline: time.Now().Add(time.Second)})
		if err != nil {
			u.t.Error(err)
			return
		}
		p.Next(ctx)
		p.Cancel()
	case 5:
		if _, err := u.Demote(u.id, names, tier.RAM); err != nil {
			u.t.Error(err)
		}
	default:
		hold, err := u.Fetch(ctx, tier.FetchRequest{Namespace: u.id, Names: names, First: first, Mode: tier.Mode(u.rng.IntN(2))})
		if err != nil {
			u.t.Error(err)
			return
		}
		u.verify(hold, names)
		if u.verify(hold, names); !hold.Release() {
			u.t.Error("a slot was reused while it was held")
		}
	}
}

func (u *user) write(ctx context.Context, names []paging.BlockName, first int) {
	a, out, _, err := u.Reserve(ctx, tier.ReserveRequest{Namespace: u.id, Names: names, First: first, Deadline: time.Now().Add(time.Minute)})
	if err != nil {
		u.t.Error(err)
		return
	}
	if a == nil {
		return
	}
	defer a.Abort()
	var rows []tier.CommitRow
	for i, o := range out {
		if o == tier.Granted && u.rng.IntN(8) > 0 {
			rows = append(rows, u.row(a, i, names[i], u.ns.Layout.AllParts()))
		}
	}
	if _, err := a.Commit(ctx, rows, tier.CommitOptions{Durable: u.rng.IntN(3) == 0}); err != nil {
		u.t.Error(err)
	}
}

// hungDisk is a disk whose reads never come back, and that says so.
type hungDisk struct {
	*tiertest.Faulty
	hang chan struct{}
}

func (d *hungDisk) Load(ctx context.Context, _ tier.Page, _ tier.Ref, _ []byte) error {
	<-ctx.Done()
	return tier.NotSettled(errors.Join(ctx.Err(), paging.ErrExpired), d.hang)
}

// Close is bounded even if the disk never answers; what it may still write to is
// never given to anybody.
func TestCloseWhileTheDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := &hungDisk{Faulty: &tiertest.Faulty{Durable: tiertest.NewMap(tier.NVMe, 4<<20)}, hang: make(chan struct{})}
		arena := openRAM(t, 1<<20, ram.Config{})
		k := &kit{t: t, ns: plain(pageBytes), ram: arena, leaky: true}
		k.start(tier.Config{Arena: arena, Durable: disk})
		k.toDisk(chain(1, 0, 20))
		var wg sync.WaitGroup
		wg.Go(func() {
			hold := k.fetch(within(t, time.Hour), tier.FetchRequest{Names: chain(1, 0, 20)})
			if hold.Usable != 0 || hold.Short[0].Reason != tier.Stopping {
				t.Errorf("fetch while stopping: usable %d, %+v", hold.Usable, hold.Short)
			}
			hold.Release()
		})
		synctest.Wait()
		began := time.Now()
		k.Close(within(t, 3*time.Second)) // an error: the fetch above still holds
		if d := time.Since(began); d != 3*time.Second {
			t.Errorf("closed after %v", d)
		}
		wg.Wait()
		if got := arena.Usage().Pages; got != 8 {
			t.Errorf("%d slots are kept from use, want those of the 8 loads that hang", got)
		}
	})
}

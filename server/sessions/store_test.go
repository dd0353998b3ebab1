package sessions

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/paging"
)

func names(salt byte, from, to int) (out []paging.BlockName) {
	for i := from; i < to; i++ {
		out = append(out, paging.BlockName{salt, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	return out
}

func testStore(t *testing.T, fs vfs.FS) *Store {
	t.Helper()
	s, err := OpenStore("names", fs)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Whatever is put in whatever order, what is read is what was put last, over restarts,
// and a gap is refused.
func TestStoreKeepsNames(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	fs := vfs.NewMem()
	s := testStore(t, fs)
	type key struct {
		session string
		epoch   uint64
	}
	want := map[key][]paging.BlockName{}
	for step := range 400 {
		k := key{fmt.Sprintf("t/s%d", rng.IntN(3)), 1 + rng.Uint64N(2)}
		kept := want[k]
		first := max(0, len(kept)-rng.IntN(40))
		if rng.IntN(10) == 0 {
			first = rng.IntN(len(kept) + 1)
		}
		add := names(byte(step), first, first+1+rng.IntN([]int{3, 300, 2500}[rng.IntN(3)]))
		if len(kept) > 8000 {
			first, add = 0, add[:1]
		}
		if err := s.Put(k.session, k.epoch, uint64(len(kept)+1), add); !errors.Is(err, paging.ErrNotFound) {
			t.Fatalf("a gap: %v", err)
		}
		if err := s.Put(k.session, k.epoch, uint64(first), add); err != nil {
			t.Fatal(err)
		}
		want[k] = append(slices.Clone(kept[:first]), add...)
		if rng.IntN(20) == 0 {
			to := rng.IntN(len(want[k]) + 1)
			if err := s.Truncate(k.session, k.epoch, uint64(to)); err != nil {
				t.Fatal(err)
			}
			if want[k] = want[k][:to]; to == 0 {
				delete(want, k)
			}
		}
		if rng.IntN(50) == 0 {
			if err := s.Drop(k.session, 2); err != nil {
				t.Fatal(err)
			}
			delete(want, key{k.session, 1})
		}
		if rng.IntN(20) == 0 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = testStore(t, fs)
		}
		for k, kept := range want {
			if got, err := s.Names(k.session, k.epoch); err != nil || !slices.Equal(got, kept) {
				t.Fatalf("step %d: %v: %d names, want %d, %v", step, k, len(got), len(kept), err)
			}
		}
	}
	seen := 0
	if err := s.Each(func(session string, epoch uint64) {
		if _, ok := want[key{session, epoch}]; !ok {
			t.Errorf("%s of epoch %d is kept", session, epoch)
		}
		seen++
	}); err != nil || seen != len(want) {
		t.Errorf("%d of %d, %v", seen, len(want), err)
	}
	if err := s.Drop("t/s0", math.MaxUint64); err != nil {
		t.Fatal(err)
	}
	if epochs, err := s.Epochs("t/s0"); err != nil || len(epochs) != 0 {
		t.Errorf("%v, %v", epochs, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// Of names of several epochs those are found that prove most.
func TestBestNames(t *testing.T) {
	s := testStore(t, vfs.NewMem())
	defer s.Close()
	c := paging.NewSessionChain()
	end := c.Append(names(1, 0, 2000), 2000)
	for epoch, kept := range [][]paging.BlockName{names(1, 0, 1500), names(1, 0, 2100), names(2, 0, 2000)} {
		if err := s.Put("t/s", uint64(epoch+1), 0, kept); err != nil {
			t.Fatal(err)
		}
	}
	if got, proven, err := s.best("t/s", end); err != nil || proven != 2000 || len(got) != 2000 {
		t.Errorf("%d names prove %d, %v", len(got), proven, err)
	}
	if err := s.Put("t/s", 2, 1024, names(7, 1024, 1030)); err != nil {
		t.Fatal(err)
	}
	if _, proven, err := s.best("t/s", end); err != nil || proven != 1024 {
		t.Errorf("%d proven, %v", proven, err)
	}
}

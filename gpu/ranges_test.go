package gpu

import (
	"math/rand/v2"
	"testing"
)

type piece struct {
	at Addr
	n  int64
}

func (p piece) Addr() Addr  { return p.at }
func (p piece) Size() int64 { return p.n }

// Random insertions, deletions and searches in a small address space, against a map of bytes.
func TestRangesAgainstBytes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var ranges Ranges[piece]
	owner := map[Addr]piece{}
	for range 20000 {
		p := piece{Addr(r.IntN(200)), int64(1 + r.IntN(20))}
		switch r.IntN(3) {
		case 0:
			free := true
			for i := range Addr(p.n) {
				_, taken := owner[p.at+i]
				free = free && !taken
			}
			if ranges.Insert(p) != free {
				t.Fatalf("insert %v into %v: want %v", p, ranges, free)
			}
			for i := range Addr(p.n) {
				if free {
					owner[p.at+i] = p
				}
			}
		case 1:
			ranges.Delete(p.at)
			if o, ok := owner[p.at]; ok && o.at == p.at {
				for i := range Addr(o.n) {
					delete(owner, o.at+i)
				}
			}
		default:
			want, ok := owner[p.at]
			ok = ok && p.at+Addr(p.n) <= want.at+Addr(want.n)
			if got, found := ranges.Find(p.at, p.n); found != ok || ok && got != want {
				t.Fatalf("find %v in %v: %v %v, want %v %v", p, ranges, got, found, want, ok)
			}
		}
	}
	if _, ok := ranges.Find(5, -1); ok {
		t.Error("found a negative size")
	}
}

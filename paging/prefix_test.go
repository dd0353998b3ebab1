package paging

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestUsablePrefix replays the scripts of testdata/prefix:
//
//	layout                   one part a line: name, then every | last=N, per-page=N, ranks=N+N
//	usable [ranks=N+N]       one part a line: name, then a character for each block: x present, . missing
//
// The answer shows for each part the pages that a reader of the usable prefix
// needs (x), those it does not (.), and where it has no page (a space).
func TestUsablePrefix(t *testing.T) {
	datadriven.Walk(t, "testdata/prefix", func(t *testing.T, path string) {
		var l *Layout
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "layout":
				l = parseLayout(d)
				return fmt.Sprintf("%d parts, prefixes of whole %d blocks\n", len(l.Parts), l.step(l.AllParts()))
			case "usable":
				return usable(t, d, l)
			}
			d.Fatalf(t, "unknown command")
			return ""
		})
	})
}

func parseLayout(d *datadriven.TestData) *Layout {
	l := &Layout{}
	for _, line := range strings.Split(d.Input, "\n") {
		fields := strings.Fields(line)
		p := Part{Name: fields[0], PageBytes: 4096, BlocksPerPage: 1}
		for _, f := range fields[1:] {
			name, value, _ := strings.Cut(f, "=")
			switch name {
			case "last":
				p.LastBlocks = number(value)
			case "per-page":
				p.BlocksPerPage = number(value)
			case "ranks":
				p.Ranks = numbers(value)
			}
		}
		l.Parts = append(l.Parts, p)
	}
	return l
}

func number(s string) uint32 {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		panic(err)
	}
	return uint32(n)
}

func numbers(s string) (all []uint32) {
	for _, f := range strings.Split(s, "+") {
		all = append(all, number(f))
	}
	return all
}

func usable(t *testing.T, d *datadriven.TestData, l *Layout) string {
	parts := l.AllParts()
	if d.HasArg("ranks") {
		var s string
		d.ScanArgs(t, "ranks", &s)
		parts = l.PartsOfRanks(numbers(s))
	}
	rows := map[string]string{}
	n := 0
	for _, line := range strings.Split(d.Input, "\n") {
		fields := strings.Fields(line)
		if len(fields) > 1 {
			rows[fields[0]] = fields[1]
			n = max(n, len(fields[1]))
		}
	}
	looked := 0
	got := l.UsablePrefix(n, parts, func(block int) PartSet {
		looked = block + 1
		var set PartSet
		for i := range l.Parts {
			if row := rows[l.Parts[i].Name]; block < len(row) && row[block] == 'x' {
				set = set.With(i)
			}
		}
		return set
	})
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d blocks, looked at %d\n", got, n, looked)
	for i := range l.Parts {
		if !parts.Has(i) {
			continue
		}
		var row strings.Builder
		for block := range got {
			switch {
			case !l.PagesAt(block, parts).Has(i):
				row.WriteByte(' ')
			case l.Needed(got, block, parts).Has(i):
				row.WriteByte('x')
			default:
				row.WriteByte('.')
			}
		}
		b.WriteString(strings.TrimRight(fmt.Sprintf("%-8s %s", l.Parts[i].Name, row.String()), " ") + "\n")
	}
	return b.String()
}

// naiveNeeded is the definition: the page of part p at block covers the blocks up
// to it, and is needed if it covers one of the last n blocks of the prefix.
func naiveNeeded(p *Part, usable, block int) bool {
	per := int(p.BlocksPerPage)
	if block >= usable || (block+1)%per != 0 {
		return false
	}
	for b := block - per + 1; b <= block; b++ {
		if p.LastBlocks == 0 || b >= usable-int(p.LastBlocks) {
			return true
		}
	}
	return false
}

func naiveUsable(l *Layout, n int, parts PartSet, have []PartSet) int {
	for usable := n; usable > 0; usable-- {
		ok := parts != 0
		for i := range l.Parts {
			if !parts.Has(i) {
				continue
			}
			if usable%int(l.Parts[i].BlocksPerPage) != 0 {
				ok = false
			}
			for b := 0; b < usable && ok; b++ {
				ok = !naiveNeeded(&l.Parts[i], usable, b) || have[b].Has(i)
			}
		}
		if ok {
			return usable
		}
	}
	return 0
}

func TestUsablePrefixAgainstDefinition(t *testing.T) {
	for _, seed := range seeds(t, 3000) {
		r := rand.New(rand.NewPCG(seed, 7))
		l := &Layout{}
		for range 1 + r.IntN(4) {
			l.Parts = append(l.Parts, Part{
				BlocksPerPage: []uint32{1, 1, 1, 2, 3, 4}[r.IntN(6)],
				LastBlocks:    []uint32{0, 0, 1, 2, 5, 100}[r.IntN(6)],
			})
		}
		parts := PartSet(r.Uint64()) & l.AllParts()
		n := r.IntN(40)
		have := make([]PartSet, n)
		for b := range have {
			have[b] = PartSet(r.Uint64() | r.Uint64() | r.Uint64() | r.Uint64())
		}
		got := l.UsablePrefix(n, parts, func(b int) PartSet { return have[b] })
		if want := naiveUsable(l, n, parts, have); got != want {
			t.Fatalf("seed %d: %d usable, want %d: parts %b of %+v, have %b", seed, got, want, parts, l.Parts, have)
		}
		for b := range n {
			for i := range l.Parts {
				want := parts.Has(i) && naiveNeeded(&l.Parts[i], got, b)
				if l.Needed(got, b, parts).Has(i) != want {
					t.Fatalf("seed %d: part %+v at block %d of %d: needed %v, want %v", seed, l.Parts[i], b, got, !want, want)
				}
			}
		}
		if l.Needed(got, -1, parts) != 0 || l.Needed(got, got, parts) != 0 {
			t.Fatalf("seed %d: pages outside of the prefix are needed", seed)
		}
	}
}

func TestUsablePrefixAllocatesNothing(t *testing.T) {
	for name, l := range prefixLayouts() {
		have := make([]PartSet, 4096)
		for i := range have {
			have[i] = ^PartSet(0)
		}
		got := 0
		allocs := testing.AllocsPerRun(10, func() {
			got = l.UsablePrefix(len(have), l.AllParts(), func(b int) PartSet { return have[b] })
		})
		if allocs != 0 || got != len(have) {
			t.Errorf("%s: %v allocations, %d usable", name, allocs, got)
		}
	}
}

func prefixLayouts() map[string]*Layout {
	shards := make([]Part, 8)
	for i := range shards {
		shards[i] = Part{BlocksPerPage: 1, Ranks: []uint32{uint32(i)}}
	}
	return map[string]*Layout{
		"full":   {Parts: []Part{{BlocksPerPage: 1}}},
		"hybrid": {Parts: []Part{{BlocksPerPage: 1}, {BlocksPerPage: 1, LastBlocks: 128}, {BlocksPerPage: 4, LastBlocks: 1}}},
		"tp8":    {Parts: shards},
	}
}

func BenchmarkUsablePrefix(b *testing.B) {
	for name, l := range prefixLayouts() {
		for _, n := range []int{64, 4096, MaxCallBlocks} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				have := make([]PartSet, n)
				for i := range have {
					have[i] = ^PartSet(0)
				}
				b.ReportAllocs()
				for b.Loop() {
					if got := l.UsablePrefix(n, l.AllParts(), func(i int) PartSet { return have[i] }); got != n {
						b.Fatal(got)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/block")
			})
		}
	}
}

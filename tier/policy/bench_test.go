package policy

import "testing"

// BenchmarkHit is one offer of a resident block, in a tier of 100,000.
func BenchmarkHit(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			const n = 100_000
			p := newPolicy(b, name, n)
			for id := range ID(n) {
				p.Insert(id, Access{Key: uint64(id), Weight: 1, Position: int32(id % 50), Length: 50})
			}
			id := ID(0)
			b.ReportAllocs()
			for b.Loop() {
				id = (id + 7919) % n
				p.Hit(id, Access{Position: int32(id % 50), Length: 50})
			}
		})
	}
}

// BenchmarkTurnover is an Insert with the Victim and the Evict that it causes.
func BenchmarkTurnover(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			const n = 100_000
			p := newPolicy(b, name, n)
			key := uint64(0)
			insert := func(id ID) {
				p.Insert(id, Access{Key: key, Weight: 1, Position: int32(49 - key%50), Length: 50})
				key++
			}
			for id := range ID(n) {
				insert(id)
			}
			b.ReportAllocs()
			for b.Loop() {
				id, ok := p.Victim(0, nil)
				if !ok {
					b.Fatal("no victim")
				}
				p.Evict(id)
				insert(id)
			}
		})
	}
}

// BenchmarkReplay is an offer of the conversation trace in a tier of 5,859 blocks.
func BenchmarkReplay(b *testing.B) {
	tr := loadTrace(b, conversation)
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			offers := int64(0)
			for b.Loop() {
				r, err := Replay(name, 5859, tr)
				if err != nil {
					b.Fatal(err)
				}
				offers += r.Blocks
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(offers), "ns/offer")
		})
	}
}

func BenchmarkDensity(b *testing.B) {
	var of [classes]learned
	for c := range of {
		for a := range ages {
			of[c].hits[a], of[c].survived[a] = float64((c*a)%17), float64((c*a)%1009)
		}
	}
	var d density
	b.ReportAllocs()
	for b.Loop() {
		d.compute(&of, 2)
	}
}

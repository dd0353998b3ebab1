//go:build linux

package shm

import (
	"testing"
)

// What the daemon pays before an extent is of use: 64 MiB, populated.
func BenchmarkCreateAndPopulate(b *testing.B) {
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		m, err := CreateExtent("kvtier-bench", size, Options{NUMANode: -1})
		if err != nil {
			b.Fatal(err)
		}
		if err := m.Populate(b.Context()); err != nil {
			b.Fatal(err)
		}
		m.Close()
	}
}

// What it pays when an extent changes its tenant.
func BenchmarkZero(b *testing.B) {
	const size = 64 << 20
	m, err := CreateExtent("kvtier-bench", size, Options{NUMANode: -1})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	Zero(m.Bytes())
	b.SetBytes(size)
	for b.Loop() {
		Zero(m.Bytes())
	}
}

// What a reader pays for each page after it has read it.
func BenchmarkGenerationLoad(b *testing.B) {
	const size = 64 << 20
	m, err := CreateExtent("kvtier-bench", size, Options{NUMANode: -1})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	g := Of(m.Bytes())
	b.ReportAllocs()
	off := uint64(0)
	for b.Loop() {
		g.Load(off)
		off = (off + 256<<10) % size
	}
}

// One extent handed off and mapped.
func BenchmarkHandOff(b *testing.B) {
	const size = 1 << 20
	m, err := CreateExtent("kvtier-bench", size, Options{NUMANode: -1})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	daemon, client := pair(b)
	for b.Loop() {
		if err := daemon.SendExtents(b.Context(), []Extent{{ID: 1, Kind: KindRAM, Bytes: size, FD: m.FD()}}); err != nil {
			b.Fatal(err)
		}
		extents, err := client.RecvExtents(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		r, err := extents[0].Map()
		if err != nil {
			b.Fatal(err)
		}
		r.Close()
		f, _, err := daemon.recv(b.Context())
		if err != nil || daemon.acked(f, 0) != nil {
			b.Fatal(err)
		}
	}
}

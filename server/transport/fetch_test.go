package transport

import (
	"testing"
)

// on runs a test over pipes in memory and over TCP on this machine.
func on(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Run("memory", func(t *testing.T) { test(t, newCluster(t, newMemory())) })
	t.Run("tcp", func(t *testing.T) { test(t, newCluster(t, nil)) })
}

func TestPagesArrive(t *testing.T) {
	on(t, func(t *testing.T, c *cluster) {
		a, b := c.add(1, nil), c.add(2, nil)
		var pages []WantedPage
		for i, bytes := range []int{1, 4096, 65535, 65536, 65537, 256 << 10, 1<<20 + 1, 2 << 20, 9 << 20} {
			for part := range 3 {
				a.src.put(nameOf(i), part, bytes+part, part == 1)
				pages = append(pages, want(i, part, bytes+part, a))
			}
		}
		tr := newTray(t, pages...)
		fetch(t, b, tr)
		tr.allGood()
	})
}

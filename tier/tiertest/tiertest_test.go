package tiertest_test

import (
	"testing"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/tiertest"
)

// TestMap runs the suite on the map, behind a wrapper without faults.
func TestMap(t *testing.T) {
	var last *tiertest.Map
	tiertest.Run(t, tiertest.Subject{
		Open: func(t *testing.T, budget int64, namespaces ...*paging.Namespace) tier.Tier {
			last = tiertest.NewMap(tier.NVMe, budget)
			for _, ns := range namespaces {
				if err := last.PutNamespace(ns); err != nil {
					t.Fatal(err)
				}
			}
			if err := last.Recover(t.Context(), nil, nil); err != nil {
				t.Fatal(err)
			}
			return &tiertest.Faulty{Durable: last}
		},
		Reopen: func(*testing.T) tier.Durable {
			last = last.Reopen()
			return &tiertest.Faulty{Durable: last}
		},
	})
}

package server_test

import (
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/servertest"
)

// A resident prefix is leased and released with a fixed number of allocations,
// however long it is, and without moving a byte of it.
func TestHitPathAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("counts only without the race detector")
	}
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := paging.NamespaceID(e.register(4096, 1))
	names := blockNames(0, 64)
	e.put(ns[:], names)
	caller := rpc.Caller{Tenant: rpc.DefaultTenant, Role: rpc.RoleEngine, Local: true}
	att, _, err := n.Server.Node().Attach(t.Context(), caller, &rpc.Hello{StagingBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer att.Detach()
	before := n.Metrics().Hierarchy
	allocs := func(blocks int) float64 {
		r := rpc.FetchRequest{Namespace: ns, Names: names[:blocks], Timeout: time.Second}
		var res rpc.FetchResult
		var lost []uint64
		return testing.AllocsPerRun(500, func() {
			res.Reset()
			if done, err := att.FetchResident(&r, &res); !done || err != nil || res.Usable != blocks {
				t.Fatal(done, err, res.Usable)
			}
			lost = att.Release([]uint64{res.Lease}, nil, lost[:0])
		})
	}
	if one, many := allocs(1), allocs(64); many > one || many > 10 {
		t.Errorf("%v allocations for 64 blocks, %v for one", many, one)
	}
	after := n.Metrics().Hierarchy
	if after.LoadedBytes != before.LoadedBytes || after.CommittedBytes != before.CommittedBytes {
		t.Error("a hit moved bytes")
	}
}

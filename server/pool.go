package server

import (
	"fmt"
	"os"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// HBM is the arena on a device that a node hands out: what package tier wants of
// it, and the descriptors of its memory.
type HBM interface {
	tier.Device
	// Pool describes what engines map.
	Pool() tier.Pool
	// Extents and Tethered are as for RAM. An extent comes as two descriptors: the
	// table of its generations, then its memory.
	Extents(tenant string) []shm.Extent
	Tethered(tenant string, change int)
	// NewWorking makes memory that an engine writes, inside the budget:
	// paging.ErrNoSpace at once.
	NewWorking(bytes int64) (tier.Shared, error)
	// NewRegion takes memory that an engine exported; f is borrowed.
	NewRegion(f *os.File, bytes int64) (tier.Shared, error)
}

// poolArena describes the device pool in the answer to hello.
func poolArenaOf(p tier.Pool) rpc.Arena {
	a := rpc.Arena{ID: poolArena, Tier: uint8(tier.HBM), Device: p.Driver, SlotAlign: paging.UnitBytes,
		ExtentBytes: uint64(p.ExtentBytes), Places: uint32(p.Places), DeviceName: p.Name}
	if p.UUID != ([16]byte{}) {
		a.DeviceUUID = p.UUID[:]
	}
	return a
}

// extentsOf lists all that is to be handed over to an attachment.
func (n *node) extentsOf(a *attachment) []shm.Extent {
	all := append(n.ram.Extents(a.caller.Tenant), a.stagingExtents()...)
	if a.pool {
		all = append(all, n.hbm.Extents(a.caller.Tenant)...)
	}
	return all
}

// countTether tells the arenas whose memory this attachment may map.
func (a *attachment) countTether(change int) {
	a.node.ram.Tethered(a.caller.Tenant, change)
	if a.pool {
		a.node.hbm.Tethered(a.caller.Tenant, change)
	}
}

// checkWanted refuses a tier whose memory the engine has not got.
func (a *attachment) checkWanted(wanted uint8) error {
	switch {
	case tier.Kind(wanted) != tier.HBM:
		return nil
	case a.node.hbm == nil:
		return fmt.Errorf("wanted tier hbm: this node has none (hbm): %w", paging.ErrInvalid)
	case !a.pool:
		return fmt.Errorf("wanted tier hbm: attach with device_pool to get its memory: %w", paging.ErrInvalid)
	}
	return nil
}

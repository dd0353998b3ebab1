package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// growWithin bounds the wait for a RAM tier: a machine that has not backed the
// memory yet needs one to two seconds per GiB.
const growWithin = 60 * time.Second

// awaitGrown waits until the RAM tier has all the memory that pages may use: a
// node is ready with its first extent, and evicts before it has the others.
func awaitGrown(ctx context.Context, socket string) error {
	admin, err := client.OpenAdmin(client.Config{Socket: socket})
	if err != nil {
		return err
	}
	defer admin.Close() //nolint:errcheck // only asked
	ctx, cancel := context.WithTimeout(ctx, growWithin)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		tiers, err := admin.Tiers(ctx)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(tiers, func(t client.TierStatus) bool { return t.State == "growing" }) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the RAM tier is still growing after %v: %w", growWithin, paging.ErrUnavailable)
		}
	}
}

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// settleWithin bounds the wait for the directory of a new cluster to have all its
// voters: each takes the leader about a second.
const settleWithin = 30 * time.Second

// status asks one node how the cluster is. A node that is alone is an error.
func (f *fleet) status(ctx context.Context, node int) (*client.Status, error) {
	admin, err := client.OpenAdmin(client.Config{Socket: SocketIn(f.nodes[node].cfg.Dir)})
	if err != nil {
		return nil, err
	}
	defer admin.Close() //nolint:errcheck // only asked
	s, err := admin.Status(ctx)
	if err != nil {
		return nil, err
	}
	if s.Cluster == nil {
		return nil, fmt.Errorf("node %d is of no cluster: %w", node+1, paging.ErrInvalid)
	}
	return s, nil
}

// leader is the node that leads the directory, as it says itself.
func (f *fleet) leader(ctx context.Context) (leader int, err error) {
	err = poll(ctx, func() (bool, error) {
		for i := range f.nodes {
			s, err := f.status(ctx, i)
			if err != nil {
				return false, err
			}
			if s.Cluster.Leader == s.Node {
				leader = i
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		return 0, fmt.Errorf("find the leader: %w", err)
	}
	return leader, nil
}

// settle waits until every node is seen by the leader and, of three and more, one
// may be lost: three are voters.
func (f *fleet) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	leader, err := f.leader(ctx)
	if err != nil {
		return err
	}
	voters := 1
	if len(f.nodes) >= 3 {
		voters = 3
	}
	err = poll(ctx, func() (bool, error) {
		s, err := f.status(ctx, leader)
		if err != nil {
			return false, err
		}
		c := s.Cluster
		return int(c.NodesSeen) == len(f.nodes) && int(c.Replicas) == len(f.nodes) && int(c.Voters) >= voters, nil
	})
	if err != nil {
		return fmt.Errorf("the cluster has not come together: %w", err)
	}
	return nil
}

// poll asks again and again until the answer is yes.
func poll(ctx context.Context, ask func() (bool, error)) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		yes, err := ask()
		if yes || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// Outage is what a node that was killed with SIGKILL cost the cluster.
type Outage struct {
	Node   string `json:"node"`
	Leader bool   `json:"leader"` // of the directory
	// OwnershipMS is the time from the kill until a block that was stored on one node
	// afterwards was seen on another: ownership is written again. Of two nodes none
	// is left to see it before the killed one is back.
	OwnershipMS float64 `json:"ownership_ms"`
	ReadyMS     float64 `json:"ready_ms"` // from its start to ready
	// FoundMS is the time from its start until blocks that it alone has were fetched
	// from another node.
	FoundMS float64 `json:"found_ms"`
}

// killed says which node is to be killed.
type killed int

const (
	killLeader killed = iota + 1
	killOther
)

// killPoints are the requests at which a node is killed.
func (r *clusterRun) killPoints() map[int]killed {
	if !r.cfg.kills {
		return nil
	}
	return map[int]killed{r.cfg.requests / 3: killLeader, r.cfg.requests * 2 / 3: killOther}
}

// outage is one that is prepared.
type outage struct {
	victim int
	leader bool
	own    []paging.BlockName // that the victim alone has
}

// Bounds of an outage.
const (
	ownBlocks     = 8
	recoverWithin = 30 * time.Second
	findWithin    = 10 * time.Second // twice what gossip and a client may take; later is never
	lookEvery     = 5 * time.Millisecond
)

// prepare chooses the victim and stores blocks on it that it alone has, which the
// others know of.
func (r *clusterRun) prepare(ctx context.Context, k killed) (*outage, error) {
	ctx, cancel := context.WithTimeout(ctx, recoverWithin)
	defer cancel()
	leader, err := r.fleet.leader(ctx)
	if err != nil {
		return nil, err
	}
	o := &outage{victim: leader, leader: true}
	if k == killOther {
		o.victim, o.leader = r.other(leader), false
	}
	if o.own, err = r.plant(ctx, o.victim, ownBlocks, true); err != nil {
		return nil, err
	}
	if err := r.countLoaded(ctx, o.victim); err != nil {
		return nil, err
	}
	return o, r.see(ctx, (o.victim+1)%len(r.engines), o.own)
}

// other is a node beside the leader, one that was not killed yet if there is one.
func (r *clusterRun) other(leader int) int {
	for step := 1; step < len(r.engines); step++ {
		i := (leader + step) % len(r.engines)
		if !slices.ContainsFunc(r.outages, func(o Outage) bool { return o.Node == nodeName(i) }) {
			return i
		}
	}
	return (leader + 1) % len(r.engines)
}

// endure kills the victim, which has fallen, and brings it back.
func (r *clusterRun) endure(ctx context.Context, o *outage) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWithin)
	defer cancel()
	n, e := r.fleet.nodes[o.victim], r.engines[o.victim]
	report := Outage{Node: nodeName(o.victim), Leader: o.leader}
	writer, reader := (o.victim+1)%len(r.engines), (o.victim+2)%len(r.engines)
	start := time.Now()
	var again time.Time
	err := n.crash(ctx, func() (err error) {
		if reader != o.victim {
			err = r.ownership(ctx, writer, reader)
			report.OwnershipMS = sinceMS(start)
		}
		again = time.Now()
		return err
	})
	if err != nil {
		return err
	}
	report.ReadyMS = sinceMS(again)
	if err := ready(ctx, e, r.namespace()); err != nil {
		return err
	}
	if err := r.find(ctx, writer, o.own); err != nil {
		r.lostDurable += int64(len(o.own))
		r.tally.note("%v", err)
	}
	report.FoundMS = sinceMS(again)
	if reader == o.victim {
		if err := r.ownership(ctx, writer, reader); err != nil {
			return err
		}
		report.OwnershipMS = sinceMS(start)
	}
	r.outages = append(r.outages, report)
	n.recovered()
	return nil
}

func sinceMS(since time.Time) float64 { return float64(time.Since(since).Microseconds()) / 1e3 }

// ownership waits until what one node stores now is seen on another.
func (r *clusterRun) ownership(ctx context.Context, writer, reader int) error {
	names, err := r.plant(ctx, writer, 1, false)
	if err != nil {
		return err
	}
	return r.see(ctx, reader, names)
}

// firstProbe numbers the blocks outside of the trace.
const firstProbe = 1 << 62

// plant stores a chain of new blocks on a node.
func (r *clusterRun) plant(ctx context.Context, node, count int, durable bool) ([]paging.BlockName, error) {
	e := r.engines[node]
	names := make([]paging.BlockName, count)
	for i := range names {
		r.probes++
		names[i] = TraceBlock(firstProbe + r.probes)
	}
	outcomes, err := e.client.WriteBlocks(ctx, client.ReserveRequest{Namespace: e.ns, Names: names, Timeout: reserveTime}, client.CommitOptions{Durable: durable},
		func(row, part int, dst []byte) error {
			e.ledger.willCommit(names[row])
			e.content.Fill(dst, e.page(names[row], part))
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("store on node %d: %w", node+1, err)
	}
	for _, o := range outcomes {
		if o != client.OutcomeCommitted {
			return nil, fmt.Errorf("store on node %d: %v: %w", node+1, o, paging.ErrNoSpace)
		}
	}
	return names, nil
}

// see waits until a node knows where the blocks are.
func (r *clusterRun) see(ctx context.Context, node int, names []paging.BlockName) error {
	e := r.engines[node]
	err := poll(ctx, func() (bool, error) {
		p, err := e.client.Lookup(ctx, e.ns, names, 0)
		return p.Usable == len(names), err
	})
	if err != nil {
		return fmt.Errorf("node %d does not learn of a block of another: %w", node+1, err)
	}
	return nil
}

// find waits until a node has fetched the blocks, whose bytes are checked.
func (r *clusterRun) find(ctx context.Context, node int, names []paging.BlockName) error {
	ctx, cancel := context.WithTimeout(ctx, findWithin)
	defer cancel()
	e := r.engines[node]
	err := poll(ctx, func() (bool, error) {
		lease, err := e.client.Fetch(ctx, client.FetchRequest{Namespace: e.ns, Names: names, Timeout: fetchTime})
		if err != nil {
			return false, err
		}
		e.check(lease, names) // a wrong page is counted
		return lease.Usable == len(names), lease.Release(ctx)
	})
	if err != nil {
		return fmt.Errorf("node %d does not find the blocks of another: %w", node+1, err)
	}
	return nil
}

package directory

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// leadEvery is how often a leader proves that it can commit, moves the clock of
// the state machine and looks after its configuration.
const leadEvery = time.Second

// lead does what only the leader does. One goroutine on every node, so there are
// never two at work on one node; what it does is safe on a node that has just
// lost the lead, as Raft refuses it.
func (d *Directory) lead() {
	tick := time.NewTicker(leadEvery)
	defer tick.Stop()
	for {
		select {
		case <-d.ctx.Done():
			return
		case <-tick.C:
		}
		r := d.now.Load()
		if d.Stalled() != "" || d.Err() != nil || r.raft.State() != raft.Leader {
			continue
		}
		if d.probe(r) {
			d.reconfigure(r)
		}
	}
}

// probe commits a tick. A leader that cannot within StallAfter cuts itself off:
// it may have lost its disk in a way that no single call shows.
func (d *Directory) probe(r *replica) bool {
	ctx, cancel := context.WithTimeout(d.ctx, d.cfg.StallAfter)
	defer cancel()
	_, err := d.Propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_Tick{Tick: &kvtierv1.Tick{}}})
	if err != nil && d.ctx.Err() == nil && ctx.Err() != nil && r.raft.State() == raft.Leader {
		d.cutOff(fmt.Sprintf("stalled disk: no commit within %v although this node leads", d.cfg.StallAfter))
	}
	return err == nil
}

// reconfigure makes at most one change of the configuration.
func (d *Directory) reconfigure(r *replica) {
	f := r.raft.GetConfiguration()
	if f.Error() != nil {
		return
	}
	var replicas []placement.Replica
	for _, s := range f.Configuration().Servers {
		id, err := nodeOf(s.ID)
		if err != nil {
			d.log.Error("directory configuration names a replica that is no node", "id", string(s.ID))
			return
		}
		replicas = append(replicas, placement.Replica{ID: id, Voter: s.Suffrage == raft.Voter})
	}
	change, needed := placement.NextChange(replicas, d.cfg.Peers.Members(), d.cfg.ID, d.cfg.ReplaceAfter)
	if !needed {
		return
	}
	if err := d.make(r, change, f.Index()); err != nil {
		d.log.Warn("directory configuration not changed", "change", change.Kind.String(), "node", change.Node.Short(), "err", err)
		return
	}
	d.log.Info("directory configuration changed", "change", change.Kind.String(), "node", change.Node.Short(), "why", change.Why)
}

// make does a change if the configuration is still the one it was decided on.
func (d *Directory) make(r *replica, c placement.Change, index uint64) error {
	id := serverID(c.Node)
	at := raft.ServerAddress(id)
	switch c.Kind {
	case placement.AddReplica:
		return r.raft.AddNonvoter(id, at, index, d.cfg.StallAfter).Error()
	case placement.Promote:
		return r.raft.AddVoter(id, at, index, d.cfg.StallAfter).Error()
	case placement.Demote:
		return r.raft.DemoteVoter(id, index, d.cfg.StallAfter).Error()
	case placement.RemoveReplica:
		return r.raft.RemoveServer(id, index, d.cfg.StallAfter).Error()
	}
	return fmt.Errorf("directory: no change of kind %d", c.Kind)
}

package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// Times of what is looked after.
const (
	tendEvery      = time.Second
	shareEvery     = 30 * time.Second
	proposeWithin  = 5 * time.Second
	forgetNodesIn  = 24 * time.Hour
	announceEvery  = 6 * time.Hour
	announceAgain  = 10 * time.Second // after one that did not succeed
	lookEvery      = time.Minute      // for namespaces that nobody announces
	dropNamespaces = 24 * time.Hour   // not announced by anybody
	dropShards     = 16               // of 256 in one entry, so that no Apply is long
	maxAnnounced   = 1024             // namespaces that wait to be announced
)

// announcer tells the directory of namespaces. A node that holds one says so again
// and again; the leader removes those that nobody speaks of.
type announcer struct {
	fresh chan *paging.Namespace
	next  time.Time // when all are announced again

	looked time.Time // at whether the directory knows all
}

// again has all announced within a while.
func (a *announcer) again(now time.Time, in time.Duration) {
	if next := now.Add(in); next.Before(a.next) {
		a.next = next
	}
}

// Announce tells the cluster of a namespace, soon. It does not block; what finds no
// room is told with all others.
func (n *Node) Announce(ns *paging.Namespace) {
	select {
	case n.names.fresh <- ns:
	default:
	}
}

// tend looks after what is due by time.
func (n *Node) tend() {
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case ns := <-n.names.fresh:
			if !n.announce(ns) {
				n.names.again(time.Now(), announceAgain)
			}
		case now := <-tick.C:
			if !now.Before(n.names.next) || now.Sub(n.names.looked) >= lookEvery && n.unannounced() {
				n.names.next = now.Add(announceEvery)
				if !n.announceAll() {
					n.names.again(time.Now(), announceAgain)
				}
			}
			n.shareClaims(now)
			n.release()
			if leader, ok := n.replica().Leader(); ok && leader == n.cfg.ID {
				n.lead(now)
			}
		}
	}
}

// shareClaims has the claims of this node compared, and with that its share worked out
// anew, while the directory is nearly full: who came first has too many, and who comes
// last found no room.
func (n *Node) shareClaims(now time.Time) {
	var claims, budget int64
	n.replica().Read(func(s *directory.State) { claims, budget = s.Claims(), s.MaxClaims() })
	if claims*20 >= budget*19 && now.Sub(n.shared) >= shareEvery {
		n.shared = now
		n.claimer.Load().Suspect()
	}
}

// release has the claims of this node go when it was emptied and has left, and come
// back when it takes part again.
func (n *Node) release() {
	var drained bool
	n.replica().Read(func(s *directory.State) { _, drained = s.NodeWithdrawn(n.cfg.ID) })
	if n.drained.Swap(drained) != drained {
		n.claimer.Load().Suspect()
	}
}

func (n *Node) propose(c *kvtierv1.DirectoryCommand) (directory.Result, error) {
	ctx, cancel := context.WithTimeout(n.ctx, proposeWithin)
	defer cancel()
	return n.replica().Propose(ctx, c)
}

func (n *Node) announce(ns *paging.Namespace) bool {
	r, err := n.propose(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_PutNamespace{
		PutNamespace: &kvtierv1.PutNamespace{Namespace: paging.EncodeNamespace(ns)}}})
	if err != nil || r != directory.OK {
		if n.ctx.Err() == nil && !errors.Is(err, paging.ErrUnavailable) {
			n.log.Warn("namespace is not announced", "namespace", ns.ID().Short(), "result", r.String(), "err", err)
		}
		return false
	}
	return true
}

// unannounced reports whether the directory does not know a namespace that is known
// here: it was removed, as by a clock that jumped.
func (n *Node) unannounced() (some bool) {
	n.names.looked = time.Now()
	all := n.tier.Load().Namespaces()
	n.replica().Read(func(s *directory.State) {
		for _, ns := range all {
			_, known := s.Namespace(ns.ID())
			some = some || !known
		}
	})
	return some
}

func (n *Node) announceAll() bool {
	for _, ns := range n.tier.Load().Namespaces() {
		if !n.announce(ns) {
			return false
		}
	}
	return true
}

// lead does what only the leader does about nodes and namespaces.
func (n *Node) lead(now time.Time) {
	var records []placement.NodeRecord
	var stale []paging.NamespaceID
	var before int64
	n.replica().Read(func(s *directory.State) {
		clock := s.NowMillis()
		for _, x := range s.Nodes() {
			records = append(records, placement.NodeRecord{
				ID: x.ID, Incarnation: x.Incarnation, Status: placement.NodeStatus(x.State),
				For: time.Duration(clock-x.SinceMillis) * time.Millisecond, Claims: x.Claims, Drained: x.Drained(),
			})
		}
		if now.Sub(n.looked) < lookEvery {
			return // there may be many
		}
		n.looked = now
		before = clock - dropNamespaces.Milliseconds()
		s.Namespaces(func(id paging.NamespaceID, _ []byte, put int64) {
			if put < before && len(stale) < maxAnnounced {
				stale = append(stale, id)
			}
		})
	})
	patience := placement.Patience{DownAfter: n.cfg.DownAfter, GraceTime: n.cfg.GraceTime, ForgetIn: forgetNodesIn}
	for _, t := range placement.NextTends(records, n.members.View().Members(now), n.cfg.ID, now.Sub(n.opened), patience) {
		if !n.do(t) {
			return
		}
	}
	for _, id := range stale {
		if _, err := n.propose(&kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_RemoveNamespace{
			RemoveNamespace: &kvtierv1.RemoveNamespace{NamespaceId: id[:], PutBeforeUnixMs: before}}}); err != nil {
			return
		}
	}
}

// do does one thing about a node; false if it could not be proposed.
func (n *Node) do(t placement.Tend) bool {
	id, inc := t.Node.ID, uint64(t.Node.Incarnation)
	state := func(s kvtierv1.NodeState) []*kvtierv1.DirectoryCommand {
		return []*kvtierv1.DirectoryCommand{{Command: &kvtierv1.DirectoryCommand_SetNodeState{
			SetNodeState: &kvtierv1.SetNodeState{Node: id[:], Incarnation: inc, State: s}}}}
	}
	var commands []*kvtierv1.DirectoryCommand
	switch t.Kind {
	case placement.MarkUp:
		commands = state(kvtierv1.NodeState_NODE_STATE_UP)
	case placement.MarkDown:
		commands = state(kvtierv1.NodeState_NODE_STATE_DOWN)
	case placement.MarkDeparted:
		commands = state(kvtierv1.NodeState_NODE_STATE_LEFT)
	case placement.DropClaims:
		for from := uint32(0); from < directory.Shards; from += dropShards {
			commands = append(commands, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_DropClaims{
				DropClaims: &kvtierv1.DropClaims{Node: id[:], Incarnation: inc, FromShard: from, ToShard: from + dropShards}}})
		}
	case placement.Forget:
		commands = []*kvtierv1.DirectoryCommand{{Command: &kvtierv1.DirectoryCommand_RemoveNode{RemoveNode: &kvtierv1.RemoveNode{Node: id[:]}}}}
	}
	for _, c := range commands {
		if _, err := n.propose(c); err != nil {
			return false
		}
	}
	n.log.Info("node record changed", "node", id.Short(), "what", t.Kind.String())
	return true
}

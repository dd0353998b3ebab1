package placement

import (
	"cmp"
	"fmt"
	"slices"
)

// PlanDrain plans how nodes are emptied: their sessions move, the most important
// first, and what nobody else holds is copied, hot blocks first. Nothing is placed on
// any of them, nor on a node that is not up. ErrNoTarget: no other node is up.
// ErrUnknownNode.
func PlanDrain(u *Usage, nodes []NodeID, o Options) (*Plan, error) {
	l, err := newLedger(u, o)
	if err != nil {
		return nil, err
	}
	drained := make([]bool, len(u.Nodes))
	for _, id := range nodes {
		i, known := l.index[id]
		if !known {
			return nil, fmt.Errorf("drain %s: %w", id.Short(), ErrUnknownNode)
		}
		drained[i] = true
		l.nodes[i].target = false
	}
	if !slices.ContainsFunc(l.nodes, func(e nodeEntry) bool { return e.target }) {
		return nil, fmt.Errorf("drain of %s: every node that is up would be drained, so nothing is left that could take %d sessions: %w",
			namesOf(l, drained), countAt(l, drained), ErrNoTarget)
	}
	d := drain{l: l, c: chooser{l: l}, plan: &Plan{}, drained: drained}
	d.sessions()
	for i := range u.Nodes {
		switch n := &u.Nodes[i]; {
		case drained[i] && !d.ended():
			d.sole(int32(i))
		case drained[i]:
			d.plan.More = d.plan.More || n.SoleHotBytes+n.SoleColdBytes > 0
		}
	}
	d.plan.expect(l)
	return d.plan, nil
}

func namesOf(l *ledger, in []bool) (s string) {
	for i, yes := range in {
		if yes && s != "" {
			s += ", "
		}
		if yes {
			s += l.name(int32(i))
		}
	}
	return s
}

func countAt(l *ledger, in []bool) (n int) {
	for _, at := range l.owner {
		if at >= 0 && in[at] {
			n++
		}
	}
	return n
}

type drain struct {
	l       *ledger
	c       chooser
	plan    *Plan
	drained []bool
}

// sessions places the sessions of the drained nodes. What does not fit is tried again
// as long as something else was placed: a run of blocks that it shares may be at the
// target then.
func (d *drain) sessions() {
	l := d.l
	var wait []int
	for i, at := range l.owner {
		if at >= 0 && d.drained[at] {
			wait = append(wait, i)
		}
	}
	slices.SortFunc(wait, func(a, b int) int { return byImportance(&l.usage.Sessions[a], &l.usage.Sessions[b]) })
	for placed := true; placed && len(wait) > 0; {
		placed = false
		d.c.full = 0
		l.newPass()
		var rest []int
		for _, i := range wait {
			if d.ended() || !d.place(i) {
				rest = append(rest, i)
			} else {
				placed = true
			}
		}
		wait = rest
	}
	if d.ended() {
		d.plan.More = len(wait) > 0
		return
	}
	for _, i := range wait {
		s := &l.usage.Sessions[i]
		bytes := s.Bytes.Sum() + l.sharedBytes(s)
		d.plan.Unplaced = append(d.plan.Unplaced, Unplaced{Session: s.ID, Node: s.Owner, Bytes: bytes,
			Why: "no node that is up has room for " + sizeText(bytes)})
	}
}

func byImportance(a, b *SessionUsage) int {
	switch {
	case a.Priority != b.Priority:
		return b.Priority - a.Priority
	case a.Idle != b.Idle:
		return cmp.Compare(a.Idle, b.Idle)
	}
	return cmp.Compare(a.ID, b.ID)
}

func (d *drain) ended() bool { return d.plan.ended(&d.l.opts) }

// ended reports whether a limit of the plan is reached.
func (p *Plan) ended(o *Options) bool {
	return o.MaxMoves > 0 && len(p.Moves) >= o.MaxMoves || o.MaxBytes > 0 && p.Bytes >= o.MaxBytes
}

func (d *drain) place(i int) bool {
	l := d.l
	x, ok := d.c.choose(i, true, func(float64) bool { return true })
	if !ok {
		return false
	}
	from := l.owner[i]
	s := &l.usage.Sessions[i]
	why := l.name(from) + " is drained; " + l.name(x.node) + " is " + loadText(l.nodes[x.node].load)
	if shared := s.Bytes.Sum() + l.sharedBytes(s) - x.lacks; shared > 0 {
		why += " and has " + sizeText(shared) + " of it"
	}
	l.move(i, x.node, x.lands)
	d.plan.add(l, i, from, x, why)
	return true
}

func (p *Plan) add(l *ledger, i int, from int32, x choice, why string) {
	s := &l.usage.Sessions[i]
	p.Bytes += x.lacks
	p.Moves = append(p.Moves, Move{Session: s.ID, From: l.nodes[from].usage.ID, To: l.nodes[x.node].usage.ID, Epoch: s.Epoch,
		Bytes: x.lacks, Lands: x.lands, Why: why})
}

// sole places what no other node holds.
func (d *drain) sole(from int32) {
	n := d.l.nodes[from].usage
	d.copySole(from, n.SoleHotBytes, true)
	if n.SoleColdBytes > 0 && d.l.opts.DropCold {
		d.plan.Drops = append(d.plan.Drops, SoleDrop{Node: n.ID, Bytes: n.SoleColdBytes,
			Why: sizeText(n.SoleColdBytes) + " that were not used lately are given up, as was asked"})
		return
	}
	d.copySole(from, n.SoleColdBytes, false)
}

// copySole spreads bytes over the nodes that have room, the least loaded first, each up
// to an equal part of what is left, so that one node does not get them all.
func (d *drain) copySole(from int32, bytes int64, hot bool) {
	l := d.l
	if bytes <= 0 {
		return
	}
	l.newPass()
	targets := make([]int32, 0, l.order.Len())
	for i := range l.nodes {
		if l.nodes[i].target && l.nodes[i].room() > 0 {
			targets = append(targets, int32(i))
		}
	}
	// Who has least room comes first: what does not fit there is for the others.
	slices.SortStableFunc(targets, func(a, b int32) int { return cmp.Compare(l.nodes[a].room(), l.nodes[b].room()) })
	for k, to := range targets {
		e := &l.nodes[to]
		part := min(e.room(), (bytes+int64(len(targets)-k)-1)/int64(len(targets)-k))
		lands := e.landSole(part, hot)
		part = lands.Sum()
		if part == 0 {
			continue
		}
		e.held, e.bytes = e.held.plus(lands), e.bytes+part
		bytes -= part
		d.plan.Bytes += part
		d.plan.Copies = append(d.plan.Copies, SoleCopy{From: l.nodes[from].usage.ID, To: e.usage.ID, Hot: hot, Bytes: part, Lands: lands,
			Why: l.name(from) + " is drained and nobody else holds them; " + l.name(to) + " takes its part"})
	}
	if bytes > 0 {
		kind := "cold"
		if hot {
			kind = "hot"
		}
		d.plan.Unplaced = append(d.plan.Unplaced, Unplaced{Node: l.nodes[from].usage.ID, Bytes: bytes,
			Why: "no node that is up has room for " + sizeText(bytes) + " of " + kind + " blocks that nobody else holds"})
	}
}

// landSole says where such blocks go: hot ones to RAM first, cold ones to disk first.
func (e *nodeEntry) landSole(bytes int64, hot bool) (lands TierBytes) {
	order := [...]Tier{NVMe, RAM}
	if hot {
		order = [...]Tier{RAM, NVMe}
	}
	for _, t := range order {
		lands[t] = min(bytes, max(0, e.limit[t]-e.held[t]))
		bytes -= lands[t]
	}
	return lands
}

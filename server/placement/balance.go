package placement

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// PlanRebalance plans moves from nodes that are above their share to nodes that are
// below theirs. A node's share is of what is held, in the part that its budgets are of
// all; of hot sessions likewise; of hit traffic, in the part that its bandwidth is of
// all. Nothing moves while no node is more than Options.Slack above.
//
// A plan is stable: when it was carried out, the next one is empty, and stays so while
// usage moves by less than a part of the slack.
func PlanRebalance(u *Usage, o Options) (*Plan, error) {
	l, err := newLedger(u, o)
	if err != nil {
		return nil, err
	}
	b := balance{l: l, c: chooser{l: l}, plan: &Plan{}, moved: make([]bool, len(u.Sessions))}
	for range maxPasses {
		if !b.pass() {
			break
		}
	}
	if b.again {
		if direct, after, ok := replay(u, o, b.plan); ok {
			b.plan, l = direct, after
		}
	}
	b.plan.expect(l)
	return b.plan, nil
}

// maxPasses bounds how often shares are taken anew: they change only by shared blocks
// that a plan copies.
const maxPasses = 32

type balance struct {
	l     *ledger
	c     chooser
	plan  *Plan
	moved []bool // sessions that the plan moves
	again bool   // some of them twice
}

// candidate is a session of a node that is above its share.
type candidate struct {
	session int
	size    int // of what the node is relieved of: the exponent of two
	idle    time.Duration
}

// pass moves sessions while nodes are above their share. It reports whether one moved.
func (b *balance) pass() (moved bool) {
	l := b.l
	l.newPass()
	over := make([]bool, len(l.nodes))
	any := false
	for i := range l.nodes {
		if e := &l.nodes[i]; e.target && e.load > l.opts.Slack {
			over[i], any = true, true
		}
	}
	if !any || l.order.Len() < 2 {
		return false
	}
	candidates := b.candidates(over)
	for _, x := range candidates {
		from := &l.nodes[l.owner[x.session]]
		if from.load <= l.opts.Slack/2 {
			continue
		}
		if b.plan.ended(&l.opts) {
			b.plan.More = true
			return false
		}
		moved = b.relieve(x.session) || moved
	}
	return moved
}

// candidates puts the sessions of nodes that are above their share in order: the
// large ones first, for small ones then fill what is left; of those that relieve
// about as much, the one first that has been idle longest and is noticed least.
func (b *balance) candidates(over []bool) []candidate {
	l := b.l
	var out []candidate
	for i, at := range l.owner {
		if at < 0 || !over[at] {
			continue
		}
		s, e := &l.usage.Sessions[i], &l.nodes[at]
		hot := e.hot
		if l.hot(s) {
			hot--
		}
		relief := e.load - l.loadWith(e, e.bytes-s.Bytes.Sum(), hot, e.traffic-s.HitBytesPerSecond)
		if relief <= 0 {
			continue
		}
		_, size := math.Frexp(relief)
		out = append(out, candidate{i, size, s.Idle})
	}
	slices.SortFunc(out, func(x, y candidate) int {
		switch {
		case x.size != y.size:
			return y.size - x.size
		case x.idle != y.idle:
			return cmp.Compare(y.idle, x.idle)
		}
		return cmp.Compare(l.usage.Sessions[x.session].ID, l.usage.Sessions[y.session].ID)
	})
	return out
}

// relieve moves a session from a node that is above its share if some node would not
// be above its own then, or at least no more than this one is afterwards.
func (b *balance) relieve(i int) bool {
	l := b.l
	from := l.owner[i]
	a, s := &l.nodes[from], &l.usage.Sessions[i]
	hot := a.hot
	if l.hot(s) {
		hot--
	}
	after := l.loadWith(a, a.bytes-s.Bytes.Sum(), hot, a.traffic-s.HitBytesPerSecond)
	// A small one needs a clearer reason: if the two were about equal afterwards, a
	// little change of usage would send it back.
	clear := max(0, l.opts.Slack/4*(1+max(0, after))-2*(a.load-after))
	most := max(l.opts.Slack/2, after-clear)
	x, ok := b.c.choose(i, false, func(load float64) bool { return load <= most && load < a.load })
	if !ok {
		return false
	}
	why := l.name(from) + " is " + loadText(a.load) + ", " + l.name(x.node) + " " + loadText(l.nodes[x.node].load)
	if s.Idle >= time.Second {
		why += "; idle for " + s.Idle.Truncate(time.Second).String()
	}
	l.move(i, x.node, x.lands)
	b.again = b.again || b.moved[i]
	b.moved[i] = true
	b.plan.add(l, i, from, x, why)
	return true
}

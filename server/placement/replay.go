package placement

// replay makes a plan in which a session that moves twice moves once, straight to where
// it ends, at the time of its last move. ok: each step still fits when those before it
// are done. If not, the plan with two moves is the right one: something else used the
// room that the first made.
func replay(u *Usage, o Options, p *Plan) (direct *Plan, l *ledger, ok bool) {
	l, err := newLedger(u, o)
	if err != nil {
		return nil, nil, false
	}
	byID := make(map[SessionID]int, len(p.Moves))
	last := make(map[SessionID]int, len(p.Moves))
	for k := range p.Moves {
		byID[p.Moves[k].Session] = -1
		last[p.Moves[k].Session] = k
	}
	for i := range u.Sessions {
		if _, moves := byID[u.Sessions[i].ID]; moves {
			byID[u.Sessions[i].ID] = i
		}
	}
	l.newPass()
	direct = &Plan{More: p.More}
	for k := range p.Moves {
		m := &p.Moves[k]
		i := byID[m.Session]
		from, to := l.owner[i], l.index[m.To]
		if last[m.Session] != k || from == to {
			continue // it moves on later, or came back to where it is
		}
		lacks := l.lacking(&u.Sessions[i], from, to)
		lands, fits := l.nodes[to].land(lacks)
		if !fits {
			return nil, nil, false
		}
		l.move(i, to, lands)
		direct.add(l, i, from, choice{node: to, lacks: lacks.Sum(), lands: lands}, m.Why)
	}
	return direct, l, true
}

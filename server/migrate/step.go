package migrate

import (
	"fmt"
	"time"
)

// Step takes an event and returns what is to be done. A machine that has ended does
// nothing.
func (m *Machine) Step(e Event) []Action {
	if m.state.Ended() {
		return nil
	}
	switch e.Kind {
	case Recorded:
		return m.recorded(e)
	case Refused:
		return m.refused(e)
	case Unsure:
		return nil // the record tells; meanwhile the clock proposes it again
	case Answered:
		if m.current(e) {
			return m.answered(e)
		}
	case Copied:
		if m.current(e) {
			return m.copied(e)
		}
	case Failed:
		if m.current(e) {
			return m.failed(e)
		}
	case TargetUnfit:
		// Also while a commit is under way: which of the two comes first in the log
		// decides.
		return m.abort("the target "+e.Text, e.Now)
	case Cancel:
		if m.state != Committing {
			return m.abort(e.Text, e.Now)
		}
	case Tick:
		return m.tick(e.Now)
	}
	return nil
}

// current reports whether an answer is to what is under way.
func (m *Machine) current(e Event) bool { return m.waiting && e.Number == m.number }

// recorded compares what the directory says with where the move is.
func (m *Machine) recorded(e Event) []Action {
	r := &e.Record
	switch {
	case r.Phase == Gone:
		return m.end(Superseded, "the session was closed")
	case r.Epoch < m.epoch:
		return nil // a replica that is behind
	case r.Epoch == m.epoch+1 && r.Owner == m.target && r.Phase != Gone && m.proposedCommit():
		m.thawed(e.Now)
		return m.end(Done, "")
	case r.Epoch > m.epoch || r.Owner != m.source:
		return m.end(Superseded, "another node took the session over")
	case r.Phase != Active && r.Move != m.id:
		return m.end(Superseded, "another move of the session is under way")
	}
	switch r.Phase {
	case Active:
		if m.state == Preparing {
			return nil // not yet
		}
		m.thawed(e.Now)
		return m.end(Aborted, "it was aborted")
	case Moving:
		if m.state == Preparing {
			return m.ask(Asking, e.Now)
		}
	case Frozen:
		if m.state == Freezing {
			m.frozenAt = e.Now
			return m.ask(Final, e.Now)
		}
	}
	return nil
}

// proposedCommit reports whether the directory can have taken a commit of this move:
// else a new owner took the session over, even if it is the target.
func (m *Machine) proposedCommit() bool {
	return m.state == Committing || m.state == Aborting && !m.frozenAt.IsZero() || m.state == Final || m.state == FinalCopy
}

func (m *Machine) thawed(now time.Time) {
	if !m.frozenAt.IsZero() {
		m.progress.Pause = now.Sub(m.frozenAt)
	}
}

func (m *Machine) refused(e Event) []Action {
	if m.state != Aborting && e.Proposal == proposals[m.state] {
		if m.state == Preparing {
			return m.end(Aborted, "refused: "+e.Text) // nothing was changed
		}
		return m.abort("refused: "+e.Text, e.Now)
	}
	return nil
}

// answered decides what comes after a word of the target.
func (m *Machine) answered(e Event) []Action {
	m.waiting = false
	p := &m.progress
	p.Left, p.Nowhere = e.Bytes, e.Nowhere
	if m.state == Final {
		switch {
		case e.Blocks == 0:
			return m.propose(Committing, e.Now)
		case m.expect(e.Bytes) > m.limits.MaxPause-e.Now.Sub(m.frozenAt):
			return m.abort(fmt.Sprintf("%d bytes are left and would take longer than appends may be held back", e.Bytes), e.Now)
		}
		return m.round(FinalCopy, e)
	}
	shrinks := p.Round < 2 || e.Bytes < m.lastLack-m.lastLack/8
	switch {
	case e.Blocks == 0 || m.speed > 0 && m.expect(e.Bytes) <= m.limits.PauseBytesIn:
		return m.propose(Freezing, e.Now)
	case p.Round >= m.limits.MaxRounds || !shrinks:
		// Appends come as fast as they are copied: another round would leave as much.
		if m.expect(e.Bytes) > m.limits.MaxPause/2 {
			return m.abort(fmt.Sprintf("%d bytes are left after %d rounds and do not become fewer", e.Bytes, p.Round), e.Now)
		}
		return m.propose(Freezing, e.Now)
	}
	return m.round(Copying, e)
}

func (m *Machine) round(s State, e Event) []Action {
	m.progress.Round++
	m.progress.Lacked += max(0, e.Bytes-m.pending) // what a failed round left was counted
	m.lastLack, m.pending = e.Bytes, e.Bytes
	return m.work(s, Copy, e.Now)
}

// expect is how long bytes take. Nothing is known before the first copy.
func (m *Machine) expect(bytes int64) time.Duration {
	if m.speed == 0 {
		return 0
	}
	return time.Duration(float64(bytes) / m.speed * float64(time.Second))
}

// asks is the state in which the target is asked, frozen or not.
func (m *Machine) asks() State {
	if m.frozenAt.IsZero() {
		return Asking
	}
	return Final
}

func (m *Machine) arrived(e Event) {
	m.progress.Sent += e.Bytes
	m.pending = max(0, m.pending-e.Bytes)
	if took := e.Now.Sub(m.begun); took > 0 && e.Bytes > 0 {
		m.speed = float64(e.Bytes) / took.Seconds()
	}
}

// copied asks again after each round: the target's own word, from its index, is what
// says that it has the session.
func (m *Machine) copied(e Event) []Action {
	m.arrived(e)
	m.pending = 0
	return m.ask(m.asks(), e.Now)
}

func (m *Machine) failed(e Event) []Action {
	if m.state == Copying || m.state == FinalCopy {
		m.arrived(e)
	}
	m.waiting = false
	m.failures++
	switch {
	case e.Failure == NoRoom:
		return m.abort("the target has no room", e.Now)
	case e.Failure == Incompatible:
		return m.abort("the target cannot hold pages of this layout", e.Now)
	case m.failures > m.limits.MaxFailures:
		return m.abort(fmt.Sprintf("copying failed %d times", m.failures), e.Now)
	case e.Failure == Unreadable:
		return m.ask(m.asks(), e.Now)
	}
	m.retryAt = e.Now.Add(m.limits.RetryAfter)
	return nil
}

// tick looks at the clock.
func (m *Machine) tick(now time.Time) []Action {
	committing := m.state == Committing || m.state == Aborting
	switch {
	case !committing && !now.Before(m.deadline):
		return m.abort("it took longer than it may", now)
	case !committing && !m.frozenAt.IsZero() && now.Sub(m.frozenAt) >= m.limits.MaxPause:
		return m.abort("appends were held back for longer than they may", now)
	case m.waiting && now.Sub(m.begun) >= m.within():
		return append([]Action{m.act(Stop)}, m.failed(Event{Now: now, Failure: Unreachable})...)
	case m.waiting || now.Before(m.retryAt):
		return nil
	}
	if _, proposes := proposals[m.state]; proposes {
		return m.propose(m.state, now)
	}
	return m.ask(m.asks(), now)
}

func (m *Machine) within() time.Duration {
	if m.state == Copying || m.state == FinalCopy {
		return m.limits.CopyWithin
	}
	return m.limits.AskWithin
}

package migrate

import (
	"time"

	"github.com/kvtier/kvtier/server/placement"
)

// State is where a move is.
type State uint8

// States. Those from Done on are ends.
const (
	idle State = iota // before the first action
	Preparing
	Asking // what the target lacks
	Copying
	Freezing
	Final     // asking what the target lacks, frozen
	FinalCopy // copying it
	Committing
	Aborting
	Done
	Aborted
	Superseded // another node owns the session by a takeover, or it was closed
)

var stateNames = [...]string{"idle", "preparing", "asking", "copying", "freezing", "final", "final copy", "committing", "aborting", "done", "aborted", "superseded"}

// String is the lower-case name.
func (s State) String() string { return stateNames[s] }

// Ended reports whether nothing comes after.
func (s State) Ended() bool { return s >= Done }

// Limits bound a move. The zero value has the defaults.
type Limits struct {
	// PauseBytesIn is the time in which what is left must be expected to be copied before
	// the session is frozen. 0: 20 ms.
	PauseBytesIn time.Duration
	// MaxPause is how long it stays frozen before the move is given up. 0: 1 s. It does not
	// bound the wait for the fate of a commit.
	MaxPause time.Duration
	// MaxRounds of copying before the freeze. 0: 16.
	MaxRounds int
	// MaxFailures of asking and copying. 0: 8.
	MaxFailures int
	// RetryAfter is how long a proposal may go without an effect, or the target be out of
	// reach, before it is tried again. 0: 250 ms.
	RetryAfter time.Duration
	// AskWithin and CopyWithin bound one Ask and one Copy without an answer. 0: 5 s; 5 min.
	AskWithin, CopyWithin time.Duration
	// Within is how long the move may take up to the commit. 0: 10 min.
	Within time.Duration
}

func orElse(d *time.Duration, v time.Duration) {
	if *d == 0 {
		*d = v
	}
}

func (l Limits) withDefaults() Limits {
	orElse(&l.PauseBytesIn, 20*time.Millisecond)
	orElse(&l.MaxPause, time.Second)
	orElse(&l.RetryAfter, 250*time.Millisecond)
	orElse(&l.AskWithin, 5*time.Second)
	orElse(&l.CopyWithin, 5*time.Minute)
	orElse(&l.Within, 10*time.Minute)
	if l.MaxRounds == 0 {
		l.MaxRounds = 16
	}
	if l.MaxFailures == 0 {
		l.MaxFailures = 8
	}
	return l
}

// Machine moves one session. Not safe for concurrent use. It is a value: a copy of it
// goes its own way.
type Machine struct {
	id     placement.MoveID
	source placement.NodeID
	target placement.NodeID
	epoch  placement.Epoch
	limits Limits

	state    State
	deadline time.Time
	retryAt  time.Time // of a proposal, or of an Ask after a failure
	begun    time.Time // the Ask or Copy under way
	frozenAt time.Time // zero: it is not
	number   int
	waiting  bool // an Ask or Copy is under way
	failures int
	lastLack int64 // that the last round began with
	pending  int64 // of it, what has not arrived
	speed    float64

	progress Progress
}

// Progress is what a move has done so far.
type Progress struct {
	State   State
	Round   int
	Lacked  int64 // bytes that the target lacked, each counted once, those that were appended meanwhile included
	Sent    int64 // bytes
	Left    int64 // bytes that it lacked at the last answer
	Nowhere int   // blocks that nobody has
	Pause   time.Duration
	Speed   float64 // bytes a second of the last copy; 0: not known
	Why     string  // of an end that is not Done
}

// Start begins a move of a session that is active at the source at the epoch.
func Start(id placement.MoveID, r Record, target placement.NodeID, l Limits, now time.Time) (Machine, []Action) {
	m := Machine{id: id, source: r.Owner, target: target, epoch: r.Epoch, limits: l.withDefaults()}
	m.deadline = now.Add(m.limits.Within)
	return m, m.propose(Preparing, now)
}

// Resume goes on with a move that the record tells of, after a restart of its owner.
// ok: there is one.
func Resume(r Record, self placement.NodeID, l Limits, now time.Time) (m Machine, actions []Action, ok bool) {
	if r.Owner != self || r.Phase != Moving && r.Phase != Frozen {
		return m, nil, false
	}
	m = Machine{id: r.Move, source: self, target: r.Target, epoch: r.Epoch, limits: l.withDefaults()}
	m.deadline = now.Add(m.limits.Within)
	if r.Phase == Frozen {
		m.frozenAt = now
		return m, m.ask(Final, now), true
	}
	return m, m.ask(Asking, now), true
}

// TakesOver reports whether a node is the one that is to take a session over whose owner
// is recorded as down: the target of the move that was under way. It has most of the
// session, and without it the session would stay as the move left it until somebody
// asks.
func TakesOver(r Record, self placement.NodeID, ownerDown bool) bool {
	return ownerDown && (r.Phase == Moving || r.Phase == Frozen) && r.Target == self && r.Owner != self
}

// Progress tells how far it is.
func (m *Machine) Progress() Progress {
	p := m.progress
	p.State, p.Speed = m.state, m.speed
	return p
}

// Move is the name of the move.
func (m *Machine) Move() placement.MoveID { return m.id }

func (m *Machine) act(k ActionKind) Action {
	return Action{Kind: k, Epoch: m.epoch, Move: m.id, Target: m.target}
}

// notify enters a state and tells those who watch.
func (m *Machine) notify(s State) Action {
	m.state = s
	a := m.act(Notify)
	a.State = s
	return a
}

var proposals = map[State]ActionKind{Preparing: Prepare, Freezing: Freeze, Committing: Commit, Aborting: Abort}

// propose enters a state whose end is a change of the record.
func (m *Machine) propose(s State, now time.Time) []Action {
	m.waiting = false
	m.retryAt = now.Add(m.limits.RetryAfter)
	if m.state == s { // again
		return []Action{m.act(proposals[s])}
	}
	return []Action{m.notify(s), m.act(proposals[s])}
}

func (m *Machine) ask(s State, now time.Time) []Action {
	return m.work(s, Ask, now)
}

func (m *Machine) work(s State, k ActionKind, now time.Time) (out []Action) {
	if m.state != s {
		out = append(out, m.notify(s))
	}
	m.number++
	m.waiting, m.begun = true, now
	a := m.act(k)
	a.Number = m.number
	return append(out, a)
}

// abort gives the move up. A commit that was proposed may still win: the record tells.
func (m *Machine) abort(why string, now time.Time) (out []Action) {
	if m.state == Aborting {
		return nil
	}
	m.progress.Why = why
	if m.waiting {
		out = append(out, m.act(Stop))
	}
	out = append(out, m.propose(Aborting, now)...)
	out[len(out)-1].Text = why
	return out
}

// end releases everything.
func (m *Machine) end(s State, why string) (out []Action) {
	if m.waiting {
		out = append(out, m.act(Stop))
	}
	m.waiting = false
	if s == Done {
		m.progress.Why = ""
	} else if m.progress.Why == "" {
		m.progress.Why = why
	}
	a := m.notify(s)
	a.Text = m.progress.Why
	return append(out, m.act(Release), a)
}

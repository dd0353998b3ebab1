package migrate

import (
	"time"

	"github.com/kvtier/kvtier/server/placement"
)

// Phase is what the directory says a session does.
type Phase uint8

// Phases.
const (
	Gone Phase = iota // it was closed, or is not known
	Active
	Moving
	Frozen
)

// Record is a session as the directory has it.
type Record struct {
	Phase  Phase
	Owner  placement.NodeID
	Epoch  placement.Epoch
	Move   placement.MoveID // while Moving or Frozen
	Target placement.NodeID // likewise
}

// EventKind is a kind of event.
type EventKind uint8

// Events.
const (
	Tick EventKind = iota
	// Recorded: the record of the session changed, or was read. Record.
	Recorded
	// Refused: a proposal was applied and changed nothing, for a reason that does not end
	// by itself. Proposal, Text.
	Refused
	// Unsure: what became of a proposal is not known. Proposal.
	Unsure
	// Answered: the target said what it lacks. Number, Bytes, Blocks, Nowhere.
	Answered
	// Copied: all that was to be copied has arrived and was verified. Number, Bytes.
	Copied
	// Failed: an Ask or a Copy did not end well. Number, Bytes that arrived, Failure.
	Failed
	// TargetUnfit: the target is down, drains or left. Text.
	TargetUnfit
	// Cancel: somebody wants the move to end. Text.
	Cancel
)

// Failure is why an Ask or a Copy failed.
type Failure uint8

// Failures.
const (
	// Unreachable: tried again.
	Unreachable Failure = iota
	// Unreadable: pages at the source could not be read or were found damaged. They are
	// dropped there, and asked about again: another node may have them.
	Unreadable
	// NoRoom at the target: the move ends.
	NoRoom
	// Incompatible: the target cannot hold pages of this layout: the move ends.
	Incompatible
)

// Event is what happened.
type Event struct {
	Kind     EventKind
	Now      time.Time
	Record   Record
	Proposal ActionKind
	Number   int   // of the Ask or Copy
	Blocks   int   // that the target lacks and somebody has
	Bytes    int64 // of them; or bytes that arrived
	Nowhere  int   // blocks that nobody has any more: the chain is short by them
	Failure  Failure
	Text     string
}

// ActionKind is a kind of action.
type ActionKind uint8

// Actions.
const (
	// Prepare, Freeze, Commit and Abort are proposed to the directory, at the epoch.
	Prepare ActionKind = iota + 1
	Freeze
	Commit
	Abort
	// Ask the target what it lacks of the chain as it is now; what nobody has is counted
	// apart. The answer is Answered, or Failed.
	Ask
	// Copy what the last Ask found lacking, the newest blocks last, pages on disk straight
	// from there. The target verifies them after the last copy and publishes each block
	// that is whole. The answer is Copied, or Failed.
	Copy
	// Stop what is being copied.
	Stop
	// Notify those who watch the session of the state of the move.
	Notify
	// Release what the move holds: leases at the source, what is set aside at the target.
	Release
)

var actionNames = [...]string{"none", "prepare", "freeze", "commit", "abort", "ask", "copy", "stop", "notify", "release"}

// String is the lower-case verb.
func (k ActionKind) String() string { return actionNames[k] }

// Action is what is to be done.
type Action struct {
	Kind   ActionKind
	Epoch  placement.Epoch  // under which it is proposed: the source's
	Move   placement.MoveID // likewise
	Target placement.NodeID
	Number int   // of an Ask or a Copy: to be handed back
	State  State // of Notify
	Text   string
}

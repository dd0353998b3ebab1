// Package migrate decides how one session moves from the node that owns it to
// another. Machine is a pure state machine: events in, actions out, time as a field
// of an event. It runs at the source; what the directory says is the truth, and a
// machine ends only by what a record says.
//
//	preparing ─► asking ⇄ copying ─► freezing ─► final ⇄ final copy ─► committing ─► done
//	     └───────────┴─────────┴──────────┴──────────┴──────────────────► aborting ─► aborted
//
// # Duties of whoever runs it
//
//  1. Do the actions in the order in which they are given. Each may be done again.
//  2. Hand in every change of the session's record, in the order of the log, with
//     Recorded; what became of a proposal: its success by the record as it is then, even if
//     that is what it was, else Refused or Unsure; what became of Ask and Copy; the states of both nodes; and a Tick at
//     least every Limits.RetryAfter.
//  3. After a restart call Resume for each record of this node that moves. A record that
//     moves while no machine of this run moves it (a prepare that was thought lost and came
//     late) is to be resumed and cancelled at once.
//  4. Events of an earlier action may arrive late: they carry its Number and are ignored.
//
// A session whose owner is down is not the machine's: TakesOver says who goes on.
//
// # What holds
//
// The epoch rises only in the directory, which takes a commit from the owner, at the
// epoch, for the frozen session of this move alone: so there is one owner, whatever a
// machine does. A machine proposes a commit only after the target, asked after the
// freeze, said that it lacks nothing that the source has. While the fate of a commit is
// not known the session stays frozen, as the directory has it; the commit is proposed
// again until a record tells. All waits have a bound, but for that one: it ends when a
// quorum answers.
package migrate

// Package sessions opens, grows, moves and forgets sessions: named, growing chains of
// blocks, each with one owner node at an epoch.
//
// The directory holds a small record of each session (package directory), which is
// changed only by commands that name owner, epoch and sequence: freeze, takeover and
// append are ordered by the log alone. The names of a session's blocks are not in it.
// They are kept by the owner and by one more node, in a Store, before the append that
// adds them is proposed, and are proved to be the session's by the running hash in the
// record. What is kept for an epoch is written by its owner only: a late action of an
// older epoch changes no byte of a newer one.
//
// A Manager is a node's part in that. It serves the engines of the node (Open, Append),
// answers any caller of the cluster (Get, List and so on, asking the owner where it must),
// runs the moves of the sessions that it owns (package migrate decides, Manager acts), and
// looks after what is due by time.
package sessions

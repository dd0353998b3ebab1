// Package client is how a program uses a node of kvtier.
//
// # Two ways to reach a node
//
// With Config.Socket the client attaches over the node's Unix socket: it holds
// one gRPC stream and one hand-off socket (the tether), maps the extents of its
// tenant read-only and its staging read-write, and reads and writes pages in
// place. With Config.Address the same API moves the bytes of pages in streams
// and keeps them in memory of this process.
//
// # Reading
//
// Fetch gives a Lease: the right to read a set of pages. Lease.Page opens a View
// of one page, which is read in place. The memory under a view is never reused
// while the node believes that the client is alive and has not answered a
// revocation; that belief can be wrong once (a process that is stopped for long
// and continued), so each slot has a generation, and View.Close, called after
// the last read, says ErrLost if it was raised. A lost page is a page that was
// not there: throw away what was computed from it. End each view with Close and
// each lease with Release or ReleaseAsync.
//
// # Writing
//
// Reserve gives an Attempt: memory for a leading part of the blocks asked for.
// Fill Attempt.Page for each row and part, then Commit. WriteBlocks does this in
// as many rounds as the staging needs.
//
// # Sessions
//
// OpenSession gives a Session, to which the engine appends the names of the blocks of a
// conversation as it commits them. Append never waits: what the node does not take at
// present is kept and sent later. Session.Events tells when it is handed over, and who
// owns it then; FetchRequest.Session names its blocks.
// See docs/sessions.md.
//
// # When the node is not there
//
// Every call ends: at its context's deadline, else at Config.CallTimeout. A node
// that is gone fails calls at once with ErrUnavailable, which is a cache miss,
// not a failure of the program. A node that hangs holds up the calls in flight
// for Config.StallTimeout at most; from then on calls fail at once, until it is
// heard again. The client attaches again by itself, within about two seconds of
// the node's return, and registers its namespaces again. Leases of the ended
// attachment give no new views; views that are open stay readable, because
// nobody writes the extents of a node that ended, and a Release is answered by
// the client itself.
//
// # Errors
//
// Errors are the sentinels of package paging, for errors.Is: ErrUnavailable (a
// miss; try later), ErrExpired (a deadline; is context.DeadlineExceeded too where
// that is the cause), ErrLost, ErrInvalid, ErrUnknownNamespace, ErrDenied,
// ErrIncompatible, ErrClosed after Close. What befalls one block of many is an
// outcome or a shortfall, not an error.
//
// # Concurrency
//
// A Client and a Lease may be used by any number of goroutines. Calls on the
// attachment stream do not wait for one another. A client runs one goroutine
// that keeps it attached, four for each attachment (three for each connection without one),
// and one for each Session while something of it waits to be sent.
package client

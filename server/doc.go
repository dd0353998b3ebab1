// Package server is a kvtier node: it gives engines memory to read and write KV
// pages in, and keeps the pages in the tiers that it was opened with.
//
// A Server is opened (which acquires everything), serves until its context ends,
// and is closed. What serves is one gRPC server on a unix socket and, if told, on
// TCP (package rpc); a hand-off socket that descriptors travel over; and HTTP for
// metrics and health.
//
// # What is held, and until when
//
// attachment: one engine process. Attached while its stream is held, then
// quarantined while its tether is open, then gone. Only then are its leases and
// its staging given back: by the end of the tether, or because the same client
// attached anew and said that it reads nothing any more. Never by time.
//
// lease: the right to read pinned slots. Its deadline makes it overdue: counted,
// still charged, asked back. It ends by Release, by the answer to that, or with
// the attachment.
//
// attempt: staging slots, and room for them in RAM. The deadline gives the room
// back; the staging only when the client commits or aborts, or with the
// attachment, so that a late write reaches nobody else's bytes.
//
// decision: what a scheduler's Fetch decided for its group. Its token holds the
// pins until every reader has adopted its parts, the scheduler drops it, ten
// minutes are over (nobody reads by a token alone), or the group ends.
//
// prefetch: a ticket; it ends with its deadline, its cancel or its attachment.
//
// # Who sees what
//
// The tenant of a caller comes from its user id or its token, never from a
// message. A namespace, attachment, lease, attempt, token or ticket of another
// tenant is unknown, in the words used for one that does not exist. Memory that
// is handed to a process holds pages of its tenant only.
//
// # Errors
//
// Sentinels of package paging. After the node began to stop: ErrUnavailable.
package server

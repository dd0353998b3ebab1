// Package transport moves pages between the nodes of a cluster: from the slot
// of one node's arena straight into a slot that another node set aside. It owns
// the peer port. It decides nothing about who holds what: the directory's claims
// come in with each call, and the owner of a page has the last word.
//
// # The port
//
// Mux owns the listener. A connection begins, after TLS where configured, with a
// hello: what it is for (raft, control or bulk), the versions that the dialer
// speaks, the cluster's label, who dials and whom it means to reach. The
// listener answers with a welcome or with a typed refusal: another cluster,
// another node, a version that is neither its own nor the one before, a
// certificate that does not name the dialer. Raft connections are then the
// directory's, by Mux.Accept and Mux.Dial. Whatever does not begin with a hello
// is closed, counted, and has cost a few dozen bytes of memory.
//
// # Pages
//
// Transport fetches pages and serves them. All frames have one header of 40
// bytes (frame.go) with a checksum of its own. Page bytes have connections of
// their own, so that no small question waits behind them.
//
//   - Bulk: the fetching node sends requests of up to 1,024 blocks and cancels, and
//     the source answers with frames of page bytes, of many requests in turn. A
//     frame of page bytes names the request, the page, the offset and the
//     checksum of the whole copy. Requests and cancels travel against the
//     stream of bytes, hence never behind them.
//   - Control: "do you have these", small calls of other parts of the node, doubts
//     about a copy, and the pings by which a peer is known to be alive.
//
// The checksum of a page is that of its 64 KiB chunks (paging.Checksum). It
// belongs to the source's copy, which the source has summed when it stored it:
// the source reads no byte for it, the receiver sums each chunk as it arrives
// and compares at the end, after the last copy. A mismatch is ErrCorrupt for
// that copy, nothing of it is used, and the next source starts at byte 0.
//
// # Bounds
//
// A fetching node asks for no more than PeerBytes of one peer and TotalBytes of
// all at a time, first come, first served; that is what bounds the bytes in
// flight. A source pins no more than ServeBytes, and reads pages from disk into
// LoadBytes of buffers that are no part of its arena, so that serving a cold
// page displaces no hot one. Each read and each write has a deadline: a peer
// that takes nothing for IOTimeout is cut, a source that is silent for
// StallAfter while it owes something is given up, left out of the choice, and
// taken back when a probe reaches it.
//
// # Goroutines
//
// Mux: one that accepts; one per connection, which begins with the handshake, at
// most MaxConns, of which at most 64 in their handshakes. Transport: one prober;
// loadWorkers that read from disk; a reader and a writer per connection; one per
// call and source while a Fetch asks several sources; one per call of
// Config.Answer, at most 64. None per page. Close joins them all.
package transport

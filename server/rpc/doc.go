// Package rpc is the gRPC face of a node: it authenticates callers, decodes
// messages, calls the node through the interfaces of node.go, and encodes what
// comes back. It decides nothing else.
//
// Who calls. A unix connection is known by its peer credentials (SO_PEERCRED),
// any connection by a bearer token; Accounts turns either into a Caller, whose
// tenant is the only one that the call sees. A tenant named in a message is not
// read.
//
// The attachment stream. One goroutine reads it and answers Fetch, Adopt,
// Release and Renew in place; a Fetch that needs I/O goes to a goroutine of its
// own, of which a stream has at most maxSlowFetches, so that later messages are
// not held up. The handler's goroutine sends the node's events. Sends are
// serialised by sendMu. All of them end when the handler returns.
//
// Ownership of bytes. Slices in requests given to the node are borrowed until
// it returns. Messages are encoded before Send returns, so that response
// buffers are used again afterwards.
package rpc

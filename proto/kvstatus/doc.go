// Package kvstatus is what both ends of the wire must agree on beside the
// messages: the one table of sentinel errors of package paging, gRPC status
// codes and error details; the keepalive times; the bounds of a message.
//
// A server turns an error into a status with Status (unary and streaming calls)
// or into a detail with Detail (messages on the attachment stream); a client
// turns both back with Err and FromDetail. The round trip keeps the sentinel
// (errors.Is), the text and the time after which trying again may help.
//
// Everything here is safe for concurrent use.
package kvstatus

package transport

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Reason says why a page did not come. Up to Cancelled the numbers are those of
// the wire enum Reason.
type Reason uint8

// Why a page did not come.
const (
	NoReason    Reason = 0
	NotFound    Reason = 1  // no source has it
	NoSpace     Reason = 3  // no slot could be set aside for it
	OverQuota   Reason = 4  // the same, by the tenant's quota
	Timeout     Reason = 5  // not in time
	Corrupt     Reason = 6  // it arrived and failed its checksum
	Identity    Reason = 7  // the source's copy was another page's
	IOError     Reason = 8  // the source's disk failed
	InFlight    Reason = 9  // the source is just getting it
	Stopping    Reason = 10 // the source or this node is stopping
	Cancelled   Reason = 11
	Unreachable Reason = 64 // no source answers
	Busy        Reason = 65 // the source has too much to do
	Denied      Reason = 66 // the source does not give it to this node
	Mismatch    Reason = 67 // the source has another length for it, or does not know its namespace
)

// String is the name used in metrics and tables.
func (r Reason) String() string {
	switch r {
	case NoReason:
		return "none"
	case NotFound:
		return "not_found"
	case NoSpace:
		return "no_space"
	case OverQuota:
		return "over_quota"
	case Timeout:
		return "timeout"
	case Corrupt:
		return "corrupt"
	case Identity:
		return "identity_mismatch"
	case IOError:
		return "io_error"
	case InFlight:
		return "in_flight"
	case Stopping:
		return "stopping"
	case Cancelled:
		return "cancelled"
	case Unreachable:
		return "unreachable"
	case Busy:
		return "busy"
	case Denied:
		return "denied"
	case Mismatch:
		return "mismatch"
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// sentinels maps reasons and the codes of replies to the errors that callers
// branch on. Several reasons may stand for one error; the first is its code.
var sentinels = []struct {
	reason Reason
	err    error
}{
	{NotFound, paging.ErrNotFound},
	{NoSpace, paging.ErrNoSpace},
	{OverQuota, paging.ErrOverQuota},
	{Timeout, paging.ErrExpired},
	{Identity, paging.ErrIdentity}, // before ErrCorrupt, which it is too
	{Corrupt, paging.ErrCorrupt},
	{IOError, paging.ErrIO},
	{Stopping, paging.ErrClosed},
	{Denied, paging.ErrDenied},
	{Mismatch, paging.ErrUnknownNamespace},
	{Mismatch, paging.ErrInvalid},
	{Mismatch, paging.ErrIncompatible},
	{Unreachable, paging.ErrUnavailable},
	{InFlight, paging.ErrUnavailable},
	{Busy, paging.ErrUnavailable},
	{Cancelled, context.Canceled},
}

// sentinel is the error that callers branch on for r.
func (r Reason) sentinel() error {
	for _, s := range sentinels {
		if s.reason == r {
			return s.err
		}
	}
	return paging.ErrUnavailable
}

// reasonOf is the reason for which something failed with err.
func reasonOf(err error) Reason {
	var p *PageError
	switch {
	case err == nil:
		return NoReason
	case errors.As(err, &p):
		return p.Reason
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	}
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return s.reason
		}
	}
	return Unreachable
}

// PageError says why a page did not come. It unwraps to the sentinel of its
// reason: Corrupt is paging.ErrCorrupt, NotFound paging.ErrNotFound, and so on.
type PageError struct {
	Reason Reason
	From   placement.NodeID // the source that was tried last; zero: none was
}

// Error implements error.
func (e *PageError) Error() string {
	if e.From == (placement.NodeID{}) {
		return "page did not come: " + e.Reason.String()
	}
	return fmt.Sprintf("page did not come from node %s: %s", e.From.Short(), e.Reason)
}

// Unwrap is the sentinel of the reason.
func (e *PageError) Unwrap() error { return e.Reason.sentinel() }

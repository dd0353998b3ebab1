package paging

import "errors"

// Sentinel errors. Callers branch on them with errors.Is; the text around them
// says what happened to what, and what to do.
var (
	// ErrNotFound: not stored, or not known.
	ErrNotFound = errors.New("not found")
	// ErrNoSpace: no room, and none could be made in time.
	ErrNoSpace = errors.New("no space")
	// ErrOverQuota: the tenant's quota is used up.
	ErrOverQuota = errors.New("over quota")
	// ErrCorrupt: bytes failed their checksum; that copy is not used.
	ErrCorrupt = errors.New("corrupt")
	// ErrIdentity: the stored bytes belong to another page. Is also ErrCorrupt.
	ErrIdentity = &identityError{}
	// ErrClosed: the object was closed.
	ErrClosed = errors.New("closed")
	// ErrExpired: a deadline passed.
	ErrExpired = errors.New("expired")
	// ErrUnknownNamespace: the namespace was not registered on this node.
	ErrUnknownNamespace = errors.New("unknown namespace")
	// ErrBadLayout: the layout cannot be accepted.
	ErrBadLayout = errors.New("bad layout")
	// ErrInvalid: an argument is wrong.
	ErrInvalid = errors.New("invalid argument")
	// ErrUnknownAttachment: the attachment is not known or has ended.
	ErrUnknownAttachment = errors.New("unknown attachment")
	// ErrDenied: the caller may not do this.
	ErrDenied = errors.New("denied")
	// ErrIncompatible: protocol or on-disk format versions do not meet.
	ErrIncompatible = errors.New("incompatible")
	// ErrUnavailable: cannot be served now; trying later may help.
	ErrUnavailable = errors.New("unavailable")
	// ErrLost: a slot was reused while it was read; what was read is not to be used.
	ErrLost = errors.New("lost")
	// ErrIO: the medium failed.
	ErrIO = errors.New("input/output error")
	// ErrFrozen: the session is being handed over; keep what is to be appended, and try
	// again.
	ErrFrozen = errors.New("session frozen")
	// ErrMoved: another node owns the session.
	ErrMoved = errors.New("session moved")
)

type identityError struct{}

func (*identityError) Error() string { return "identity mismatch" }

// Is makes every identity mismatch a corruption too.
func (*identityError) Is(target error) bool { return target == ErrCorrupt }

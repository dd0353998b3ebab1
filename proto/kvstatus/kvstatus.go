package kvstatus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

type row struct {
	err    error
	detail kvtierv1.ErrorCode
	code   codes.Code
}

// table maps each sentinel to its detail and status code. A more special error
// stands before the one it also is.
var table = []row{
	{paging.ErrIdentity, kvtierv1.ErrorCode_ERROR_CODE_IDENTITY_MISMATCH, codes.DataLoss},
	{paging.ErrCorrupt, kvtierv1.ErrorCode_ERROR_CODE_CORRUPT, codes.DataLoss},
	{paging.ErrNotFound, kvtierv1.ErrorCode_ERROR_CODE_NOT_FOUND, codes.NotFound},
	{paging.ErrNoSpace, kvtierv1.ErrorCode_ERROR_CODE_NO_SPACE, codes.ResourceExhausted},
	{paging.ErrOverQuota, kvtierv1.ErrorCode_ERROR_CODE_OVER_QUOTA, codes.ResourceExhausted},
	{paging.ErrClosed, kvtierv1.ErrorCode_ERROR_CODE_CLOSED, codes.Unavailable},
	{paging.ErrExpired, kvtierv1.ErrorCode_ERROR_CODE_EXPIRED, codes.DeadlineExceeded},
	{paging.ErrUnknownNamespace, kvtierv1.ErrorCode_ERROR_CODE_UNKNOWN_NAMESPACE, codes.FailedPrecondition},
	{paging.ErrBadLayout, kvtierv1.ErrorCode_ERROR_CODE_BAD_LAYOUT, codes.InvalidArgument},
	{paging.ErrInvalid, kvtierv1.ErrorCode_ERROR_CODE_INVALID, codes.InvalidArgument},
	{paging.ErrUnknownAttachment, kvtierv1.ErrorCode_ERROR_CODE_UNKNOWN_ATTACHMENT, codes.FailedPrecondition},
	{paging.ErrDenied, kvtierv1.ErrorCode_ERROR_CODE_DENIED, codes.PermissionDenied},
	{paging.ErrIncompatible, kvtierv1.ErrorCode_ERROR_CODE_INCOMPATIBLE, codes.FailedPrecondition},
	{paging.ErrUnavailable, kvtierv1.ErrorCode_ERROR_CODE_UNAVAILABLE, codes.Unavailable},
	{paging.ErrLost, kvtierv1.ErrorCode_ERROR_CODE_LOST, codes.Aborted},
	{paging.ErrIO, kvtierv1.ErrorCode_ERROR_CODE_IO, codes.Internal},
	{paging.ErrFrozen, kvtierv1.ErrorCode_ERROR_CODE_FROZEN, codes.Aborted},
	{paging.ErrMoved, kvtierv1.ErrorCode_ERROR_CODE_MOVED, codes.FailedPrecondition},
	{context.DeadlineExceeded, kvtierv1.ErrorCode_ERROR_CODE_EXPIRED, codes.DeadlineExceeded},
	{context.Canceled, kvtierv1.ErrorCode_ERROR_CODE_UNSPECIFIED, codes.Canceled},
}

// bare maps the status codes that gRPC itself makes, which carry no detail. The
// deadline is that of the caller's context, even where the other side's word of it comes
// before the context's own.
var bare = map[codes.Code]error{
	codes.Canceled:          context.Canceled,
	codes.DeadlineExceeded:  fmt.Errorf("%w (%w)", paging.ErrExpired, context.DeadlineExceeded),
	codes.InvalidArgument:   paging.ErrInvalid,
	codes.NotFound:          paging.ErrNotFound,
	codes.PermissionDenied:  paging.ErrDenied,
	codes.Unauthenticated:   paging.ErrDenied,
	codes.ResourceExhausted: paging.ErrNoSpace,
	codes.Unimplemented:     paging.ErrIncompatible,
	codes.DataLoss:          paging.ErrCorrupt,
	codes.Aborted:           paging.ErrLost,
}

// retryError carries the time after which trying again may help.
type retryError struct {
	err   error
	after time.Duration
}

func (e *retryError) Error() string { return e.err.Error() }
func (e *retryError) Unwrap() error { return e.err }

// WithRetry says that trying again may help after d. nil stays nil.
func WithRetry(err error, d time.Duration) error {
	if err == nil || d <= 0 {
		return err
	}
	return &retryError{err: err, after: d}
}

// RetryAfter is the time that WithRetry gave; 0 is unknown.
func RetryAfter(err error) time.Duration {
	if re, ok := errors.AsType[*retryError](err); ok {
		return re.after
	}
	return 0
}

// Detail turns err, which is not nil, into the detail that a stream message or
// a status carries.
func Detail(err error) *kvtierv1.ErrorDetail {
	d, _ := detail(err)
	return d
}

// Status turns err into the error that a gRPC handler returns. nil stays nil; an
// error that is a status already is returned as it is.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.Unknown {
		return err
	}
	d, code := detail(err)
	s, derr := status.New(code, d.GetMessage()).WithDetails(d)
	if derr != nil {
		return status.Error(code, d.GetMessage())
	}
	return s.Err()
}

func detail(err error) (*kvtierv1.ErrorDetail, codes.Code) {
	d := &kvtierv1.ErrorDetail{Message: err.Error()}
	if after := RetryAfter(err); after > 0 {
		d.RetryAfter = durationpb.New(after)
	}
	for _, r := range table {
		if errors.Is(err, r.err) {
			d.Code = r.detail
			return d, r.code
		}
	}
	return d, codes.Unknown
}

// remoteError is an error that another process reported.
type remoteError struct {
	text     string
	sentinel error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.sentinel }

// FromDetail turns a detail back into an error that is the sentinel it names.
// A code that this version does not know is paging.ErrIncompatible. nil is nil.
func FromDetail(d *kvtierv1.ErrorDetail) error {
	if d == nil {
		return nil
	}
	sentinel := paging.ErrIncompatible
	for _, r := range table {
		if r.detail == d.GetCode() {
			sentinel = r.err
			break
		}
	}
	return WithRetry(&remoteError{text: d.GetMessage(), sentinel: sentinel}, d.GetRetryAfter().AsDuration())
}

// Err turns the error of a gRPC call into one that is a sentinel of package
// paging, context.Canceled, or paging.ErrUnavailable for what says nothing
// better. nil stays nil; io.EOF and errors that are no status stay as they are.
func Err(err error) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, d := range s.Details() {
		if ed, ok := d.(*kvtierv1.ErrorDetail); ok {
			return FromDetail(ed)
		}
	}
	sentinel, known := bare[s.Code()]
	if !known {
		sentinel = paging.ErrUnavailable
	}
	return &remoteError{text: fmt.Sprintf("%s: %s", s.Code(), s.Message()), sentinel: sentinel}
}

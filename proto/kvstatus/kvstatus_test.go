package kvstatus

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

func TestRoundTripKeepsSentinelTextAndRetry(t *testing.T) {
	for _, r := range table {
		err := WithRetry(fmt.Errorf("fetch block 7: %w", r.err), 250*time.Millisecond)
		got := Err(Status(err))
		want := r.err
		if errors.Is(want, context.DeadlineExceeded) {
			want = paging.ErrExpired // one code for both
		}
		if !errors.Is(got, want) {
			t.Errorf("%v: came back as %v, which is not %v", err, got, want)
		}
		if got.Error() != err.Error() {
			t.Errorf("text %q became %q", err, got)
		}
		if d := RetryAfter(got); d != 250*time.Millisecond {
			t.Errorf("%v: retry after %v, want 250ms", r.err, d)
		}
		if back := FromDetail(Detail(err)); !errors.Is(back, want) {
			t.Errorf("detail of %v came back as %v", err, back)
		}
		if code := status.Code(Status(err)); code != r.code {
			t.Errorf("%v: code %v, want %v", r.err, code, r.code)
		}
	}
}

func TestSentinelsStayDistinct(t *testing.T) {
	got := Err(Status(fmt.Errorf("x: %w", paging.ErrCorrupt)))
	if errors.Is(got, paging.ErrIdentity) {
		t.Error("a corrupt page came back as an identity mismatch")
	}
	if got := Err(Status(fmt.Errorf("x: %w", paging.ErrIdentity))); !errors.Is(got, paging.ErrCorrupt) {
		t.Error("an identity mismatch is not a corruption any more")
	}
}

// Every exported sentinel of package paging must be in the table, and every code
// of the wire used: a new one is added to both.
func TestTableIsComplete(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../../paging/errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	sentinels := 0
	for name, obj := range file.Scope.Objects {
		if obj.Kind == ast.Var && ast.IsExported(name) {
			sentinels++
		}
	}
	ours := 0
	codesSeen := map[kvtierv1.ErrorCode]bool{}
	for _, r := range table {
		codesSeen[r.detail] = true
		if !errors.Is(r.err, context.Canceled) && !errors.Is(r.err, context.DeadlineExceeded) {
			ours++
		}
	}
	if ours != sentinels {
		t.Errorf("the table has %d sentinels, package paging %d", ours, sentinels)
	}
	for n, name := range kvtierv1.ErrorCode_name {
		if !codesSeen[kvtierv1.ErrorCode(n)] {
			t.Errorf("%s is in no row of the table", name)
		}
	}
}

func TestBareStatus(t *testing.T) {
	cases := map[codes.Code]error{
		codes.Unavailable:       paging.ErrUnavailable,
		codes.DeadlineExceeded:  paging.ErrExpired,
		codes.Canceled:          context.Canceled,
		codes.Unimplemented:     paging.ErrIncompatible,
		codes.ResourceExhausted: paging.ErrNoSpace,
		codes.Unknown:           paging.ErrUnavailable,
		codes.Unauthenticated:   paging.ErrDenied,
	}
	for code, want := range cases {
		if got := Err(status.Error(code, "said by grpc")); !errors.Is(got, want) {
			t.Errorf("%v: got %v, want %v", code, got, want)
		}
	}
	if !errors.Is(Err(status.Error(codes.DeadlineExceeded, "said by grpc")), context.DeadlineExceeded) {
		t.Error("the deadline of the caller is not context.DeadlineExceeded")
	}
	if Err(nil) != nil || Status(nil) != nil || FromDetail(nil) != nil || WithRetry(nil, time.Second) != nil {
		t.Error("nil became an error")
	}
	plain := errors.New("no status")
	if got := Err(plain); got != plain { //nolint:errorlint // identity is the point
		t.Errorf("an error that is no status became %v", got)
	}
}

func TestUnknownCodeIsIncompatible(t *testing.T) {
	if err := FromDetail(&kvtierv1.ErrorDetail{Code: 999, Message: "new"}); !errors.Is(err, paging.ErrIncompatible) {
		t.Errorf("got %v, want incompatible", err)
	}
}

func TestKeepaliveAgrees(t *testing.T) {
	if ServerEnforcement().MinTime >= ClientKeepalive().Time {
		t.Error("the server would cut off its own clients")
	}
}

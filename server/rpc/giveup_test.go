package rpc

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// lateAttachment answers when its caller has given up.
type lateAttachment struct {
	fakeAttachment
	giveUp  context.CancelFunc
	aborted []ID
}

func (a *lateAttachment) FetchResident(r *FetchRequest, res *FetchResult) (bool, error) {
	done, err := a.fakeAttachment.FetchResident(r, res)
	if done {
		a.giveUp()
	}
	return done, err
}

func (a *lateAttachment) Fetch(context.Context, *FetchRequest, *FetchResult) error {
	return errors.New("not reached")
}

func (a *lateAttachment) Reserve(_ context.Context, _ *ReserveRequest, res *ReserveResult) error {
	a.giveUp()
	res.Attempt = &ID{5}
	return nil
}

func (a *lateAttachment) Abort(attempt ID) error {
	a.aborted = append(a.aborted, attempt)
	return nil
}

type lateNode struct {
	Node
	att *lateAttachment
}

func (n *lateNode) Attachment(Caller, ID) (Attachment, error) { return n.att, nil }

// What was granted to a caller that gave up meanwhile is given back: nobody knows
// of it.
func TestAnswersThatNobodyWaitsFor(t *testing.T) {
	accounts := NewAccounts(nil, 0)
	ctx, cancel := context.WithCancel(call(accounts.local(1, 1), ""))
	att := &lateAttachment{fakeAttachment: fakeAttachment{leases: map[uint64]bool{}}, giveUp: cancel}
	p := newPagesService(&lateNode{att: att}, accounts, newCalls(1, nil))
	id := make([]byte, 16)
	_, err := p.Fetch(ctx, &kvtierv1.FetchRequest{Attachment: id, NamespaceId: make([]byte, 32), BlockNames: packedNames(2), Timeout: durationpb.New(time.Second)})
	if !errors.Is(err, context.Canceled) || len(att.leases) != 0 || len(att.released) != 1 {
		t.Errorf("fetch: %v, %d leases held, released %v", err, len(att.leases), att.released)
	}
	ctx, att.giveUp = context.WithCancel(call(accounts.local(1, 1), ""))
	_, err = p.Reserve(ctx, &kvtierv1.ReserveRequest{Attachment: id, NamespaceId: make([]byte, 32), BlockNames: packedNames(2)})
	if !errors.Is(err, context.Canceled) || len(att.aborted) != 1 || att.aborted[0] != (ID{5}) {
		t.Errorf("reserve: %v, aborted %v", err, att.aborted)
	}
	if _, err := p.Fetch(ctx, &kvtierv1.FetchRequest{Attachment: id}); !errors.Is(err, context.Canceled) {
		t.Errorf("a call that is over: %v", err)
	}
	expiredCtx, cancel := context.WithDeadline(call(accounts.local(1, 1), ""), time.Unix(1, 0))
	defer cancel()
	if _, err := p.Fetch(expiredCtx, &kvtierv1.FetchRequest{Attachment: id}); !errors.Is(err, paging.ErrExpired) {
		t.Errorf("a call whose deadline passed before it began: %v", err)
	}
}

package rpc

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/kvtier/kvtier/paging"
)

const (
	engineToken   = "engine-token-of-a"
	operatorToken = "operator-token-of-b"
	readToken     = "read-only-token-of-b"
)

func testAccounts() *Accounts {
	return NewAccounts([]Account{
		{Tenant: "a", UIDs: []uint32{1000}, Tokens: []Token{{engineToken, RoleEngine}}},
		{Tenant: "b", UIDs: []uint32{2000}, Tokens: []Token{{operatorToken, RoleOperator}, {readToken, RoleReadOnly}}},
	}, 500)
}

// call is the context of a call from this peer with this token.
func call(caller Caller, token string) context.Context {
	ctx := peer.NewContext(context.Background(), &peer.Peer{AuthInfo: peerInfo{caller: caller}})
	if token != "" {
		ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", token))
	}
	return ctx
}

func TestWhoMayCall(t *testing.T) {
	a := testAccounts()
	open := NewAccounts(nil, 500)
	for _, c := range []struct {
		name     string
		accounts *Accounts
		caller   Caller
		token    string
		tenant   string // of a data call; empty: refused
		admin    bool
	}{
		{"uid of a", a, a.local(1000, 1), "", "a", false},
		{"uid of nobody", a, a.local(3000, 1), "", "", false},
		{"root", a, a.local(0, 1), "", "", true},
		{"socket owner", a, a.local(500, 1), "", "", true},
		{"uid of a, token of b", a, a.local(1000, 1), "Bearer " + operatorToken, "b", true},
		{"tcp without token", a, a.remote(), "", "", false},
		{"tcp, engine", a, a.remote(), "Bearer " + engineToken, "a", false},
		{"tcp, operator", a, a.remote(), "Bearer " + operatorToken, "b", true},
		{"tcp, read-only", a, a.remote(), "Bearer " + readToken, "", true},
		{"wrong token", a, a.local(1000, 1), "Bearer " + engineToken + "x", "", false},
		{"no scheme", a, a.local(1000, 1), engineToken, "", false},
		{"open, unix", open, open.local(3000, 1), "", DefaultTenant, false},
		{"open, tcp", open, open.remote(), "", DefaultTenant, false},
		{"open, some token", open, open.remote(), "Bearer anything-at-all", DefaultTenant, false},
	} {
		ctx := call(c.caller, c.token)
		got, err := c.accounts.engine(ctx)
		switch {
		case c.tenant == "" && !errors.Is(err, paging.ErrDenied):
			t.Errorf("%s: data call as %q, %v, want it denied", c.name, got.Tenant, err)
		case c.tenant != "" && (err != nil || got.Tenant != c.tenant):
			t.Errorf("%s: data call as %q, %v, want %q", c.name, got.Tenant, err, c.tenant)
		}
		if err := c.accounts.admin(ctx, false); (err == nil) != c.admin {
			t.Errorf("%s: admin call: %v, want allowed %v", c.name, err, c.admin)
		}
	}
	if _, err := a.engine(context.Background()); !errors.Is(err, paging.ErrDenied) {
		t.Errorf("a call without a peer: %v, want it denied", err)
	}
}

func TestCallsInFlightAreBounded(t *testing.T) {
	c := newCalls(2, nil)
	for range 2 {
		if err := c.enter(); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.enter(); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("third of two calls: %v, want unavailable", err)
	}
	c.leave()
	if err := c.enter(); err != nil {
		t.Errorf("after one left: %v", err)
	}
	if got := c.refused.Load(); got != 1 {
		t.Errorf("refused %d, want 1", got)
	}
}

// Who did something, as the audit trail has it.
func TestCallerText(t *testing.T) {
	for want, c := range map[string]Caller{
		"uid 1000":                       {Local: true, UID: 1000, Admin: true, Tenant: DefaultTenant, Role: RoleEngine},
		"engine of tenant chat, uid 7":   {Local: true, UID: 7, Tenant: "chat", Role: RoleEngine},
		"operator of tenant chat, uid 7": {Local: true, UID: 7, Tenant: "chat", Role: RoleOperator, Admin: true},
		"operator of tenant chat":        {Tenant: "chat", Role: RoleOperator, Admin: true},
		"client on-call (operator)":      {Name: "on-call", Role: RoleOperator, Admin: true},
		"node gpu-7":                     {Node: "gpu-7"},
	} {
		if got := c.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

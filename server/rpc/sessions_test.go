package rpc

import (
	"context"
	"errors"
	"testing"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// fakeSessions notes for which tenant it was called.
type fakeSessions struct {
	Sessions
	tenant string
	called bool
}

// clusterNode is a node whose cluster has those sessions.
type clusterNode struct {
	Node
	sessions *fakeSessions
}

func (n clusterNode) Sessions() (Sessions, error) { return n.sessions, nil }

func note[A any](f *fakeSessions, tenant string) (*A, error) {
	f.tenant, f.called = tenant, true
	return nil, nil
}

func (f *fakeSessions) Open(_ context.Context, r *kvtierv1.OpenSessionRequest) (*kvtierv1.OpenSessionResponse, error) {
	return note[kvtierv1.OpenSessionResponse](f, r.GetTenant())
}

func (f *fakeSessions) Append(_ context.Context, r *kvtierv1.AppendSessionRequest) (*kvtierv1.AppendSessionResponse, error) {
	return note[kvtierv1.AppendSessionResponse](f, r.GetTenant())
}

func (f *fakeSessions) Get(_ context.Context, r *kvtierv1.GetSessionRequest) (*kvtierv1.GetSessionResponse, error) {
	return note[kvtierv1.GetSessionResponse](f, r.GetTenant())
}

func (f *fakeSessions) List(_ context.Context, r *kvtierv1.ListSessionsRequest) (*kvtierv1.ListSessionsResponse, error) {
	return note[kvtierv1.ListSessionsResponse](f, r.GetTenant())
}

func (f *fakeSessions) Share(_ context.Context, r *kvtierv1.ShareSessionRequest) (*kvtierv1.ShareSessionResponse, error) {
	return note[kvtierv1.ShareSessionResponse](f, r.GetTenant())
}

func (f *fakeSessions) Retain(_ context.Context, r *kvtierv1.RetainSessionRequest) (*kvtierv1.RetainSessionResponse, error) {
	return note[kvtierv1.RetainSessionResponse](f, r.GetTenant())
}

func (f *fakeSessions) CloseSession(_ context.Context, r *kvtierv1.CloseSessionRequest) (*kvtierv1.CloseSessionResponse, error) {
	return note[kvtierv1.CloseSessionResponse](f, r.GetTenant())
}

func (f *fakeSessions) CancelMigration(_ context.Context, r *kvtierv1.CancelMigrationRequest) (*kvtierv1.CancelMigrationResponse, error) {
	return note[kvtierv1.CancelMigrationResponse](f, r.GetTenant())
}

// Who may do what with whose sessions: engines with their tenant's, whatever they name;
// operators with those that they name; who only reads changes nothing.
func TestWhoseSessions(t *testing.T) {
	a := testAccounts()
	engine, operator, reader := call(a.remote(), "Bearer "+engineToken), call(a.remote(), "Bearer "+operatorToken), call(a.remote(), "Bearer "+readToken)
	root, nobody := call(a.local(0, 1), ""), call(a.remote(), "")
	node := call(Caller{Node: "n1"}, "")
	f := &fakeSessions{}
	s := &sessionsService{accounts: a, node: clusterNode{sessions: f}}
	reads := map[string]func(context.Context, string) error{
		"get": func(ctx context.Context, tenant string) error {
			_, err := s.GetSession(ctx, &kvtierv1.GetSessionRequest{Tenant: tenant})
			return err
		},
	}
	lists := map[string]func(context.Context, string) error{
		"list": func(ctx context.Context, tenant string) error {
			_, err := s.ListSessions(ctx, &kvtierv1.ListSessionsRequest{Tenant: tenant})
			return err
		},
	}
	writes := map[string]func(context.Context, string) error{
		"open": func(ctx context.Context, tenant string) error {
			_, err := s.OpenSession(ctx, &kvtierv1.OpenSessionRequest{Tenant: tenant})
			return err
		},
		"append": func(ctx context.Context, tenant string) error {
			_, err := s.AppendSession(ctx, &kvtierv1.AppendSessionRequest{Tenant: tenant})
			return err
		},
		"share": func(ctx context.Context, tenant string) error {
			_, err := s.ShareSession(ctx, &kvtierv1.ShareSessionRequest{Tenant: tenant})
			return err
		},
		"retain": func(ctx context.Context, tenant string) error {
			_, err := s.RetainSession(ctx, &kvtierv1.RetainSessionRequest{Tenant: tenant})
			return err
		},
		"close": func(ctx context.Context, tenant string) error {
			_, err := s.CloseSession(ctx, &kvtierv1.CloseSessionRequest{Tenant: tenant})
			return err
		},
		"cancel": func(ctx context.Context, tenant string) error {
			_, err := s.CancelMigration(ctx, &kvtierv1.CancelMigrationRequest{Tenant: tenant})
			return err
		},
	}
	const all = "(all)"
	for _, c := range []struct {
		name                 string
		ctx                  context.Context
		named                string
		reads, lists, writes string // tenant that is acted for; "": refused
		why                  error
	}{
		{"engine", engine, "", "a", "a", "a", nil},
		{"engine, names another", engine, "b", "a", "a", "a", nil},
		{"operator", operator, "", "b", all, "b", nil},
		{"operator, names another", operator, "a", "a", "a", "a", nil},
		{"reader", reader, "a", "a", "a", "", paging.ErrDenied},
		{"root of no tenant", root, "", "", all, "", paging.ErrInvalid},
		{"root, names one", root, "a", "a", "a", "a", nil},
		{"nobody", nobody, "a", "", "", "", paging.ErrDenied},
		{"node", node, "a", "", "", "", paging.ErrDenied},
	} {
		for _, group := range []struct {
			calls map[string]func(context.Context, string) error
			want  string
		}{{reads, c.reads}, {lists, c.lists}, {writes, c.writes}} {
			for verb, do := range group.calls {
				*f = fakeSessions{}
				err := do(c.ctx, c.named)
				got := f.tenant
				if f.called && got == "" {
					got = all
				}
				if got != group.want {
					t.Errorf("%s: %s acts for %q, want %q (%v)", c.name, verb, got, group.want, err)
				}
				if group.want == "" && !errors.Is(err, c.why) {
					t.Errorf("%s: %s: %v, want %v", c.name, verb, err, c.why)
				}
			}
		}
	}
}

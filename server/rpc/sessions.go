package rpc

import (
	"bytes"
	"context"
	"fmt"
	"math"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Sessions are the sessions of the node's cluster. The tenant in a request is whose
// they are, as authenticated; none, where that is allowed: of all. Methods are safe for
// concurrent use; errors are the sentinels of package paging.
type Sessions interface {
	Open(ctx context.Context, r *kvtierv1.OpenSessionRequest) (*kvtierv1.OpenSessionResponse, error)
	Append(ctx context.Context, r *kvtierv1.AppendSessionRequest) (*kvtierv1.AppendSessionResponse, error)
	Get(ctx context.Context, r *kvtierv1.GetSessionRequest) (*kvtierv1.GetSessionResponse, error)
	List(ctx context.Context, r *kvtierv1.ListSessionsRequest) (*kvtierv1.ListSessionsResponse, error)
	Share(ctx context.Context, r *kvtierv1.ShareSessionRequest) (*kvtierv1.ShareSessionResponse, error)
	Retain(ctx context.Context, r *kvtierv1.RetainSessionRequest) (*kvtierv1.RetainSessionResponse, error)
	CloseSession(ctx context.Context, r *kvtierv1.CloseSessionRequest) (*kvtierv1.CloseSessionResponse, error)
	CancelMigration(ctx context.Context, r *kvtierv1.CancelMigrationRequest) (*kvtierv1.CancelMigrationResponse, error)
	// Migrate and WatchSessions send until they have nothing more to say, or ctx ends.
	Migrate(ctx context.Context, r *kvtierv1.MigrateSessionRequest, send func(*kvtierv1.MigrateSessionResponse) error) error
	WatchSessions(ctx context.Context, r *kvtierv1.WatchSessionsRequest, send func(*kvtierv1.SessionEvent) error) error
	// Names returns names of a session and its namespace; to 0: up to its end.
	Names(ctx context.Context, tenant, session string, from, to uint64) (paging.NamespaceID, []paging.BlockName, error)
}

// sessionsService is the SessionsService.
type sessionsService struct {
	kvtierv1.UnimplementedSessionsServiceServer
	node     Node
	accounts *Accounts
}

// access is what a call does to sessions.
type access uint8

const (
	looks access = iota
	looksAtAll
	changes
)

// enter says whose sessions the caller means, and gives those of the node.
func (s *sessionsService) enter(ctx context.Context, asked *string, what access) (Sessions, error) {
	if err := expired(ctx); err != nil {
		return nil, err
	}
	c, err := s.accounts.caller(ctx)
	if err != nil {
		return nil, err
	}
	switch {
	case c.Admin && c.Role == RoleReadOnly && what == changes:
		return nil, fmt.Errorf("this changes a session: the caller's role is read-only: %w", paging.ErrDenied)
	case c.Admin && (*asked != "" || what == looksAtAll):
	case c.Tenant == "" && c.Admin:
		return nil, invalid("name the tenant whose session it is")
	case c.Tenant == "":
		return nil, fmt.Errorf("sessions: the caller is of no tenant and no operator: %w", paging.ErrDenied)
	default:
		*asked = c.Tenant // an engine's word for it is not read
	}
	return s.node.Sessions()
}

// OpenSession implements SessionsServiceServer.
func (s *sessionsService) OpenSession(ctx context.Context, m *kvtierv1.OpenSessionRequest) (*kvtierv1.OpenSessionResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, changes)
	if err != nil {
		return nil, err
	}
	watcher, err := optionalID("attachment", m.GetAttachment())
	if err != nil {
		return nil, err
	}
	if watcher == nil {
		return sessions.Open(ctx, m)
	}
	caller, err := s.accounts.caller(ctx)
	if err != nil {
		return nil, err
	}
	att, err := s.node.Attachment(caller, *watcher)
	if err != nil {
		return nil, err
	}
	if caller.Tenant != m.GetTenant() {
		return nil, invalid("the attachment is of tenant %q, the session of %q", caller.Tenant, m.GetTenant())
	}
	a, err := sessions.Open(ctx, m)
	if err == nil {
		err = att.WatchSession(m.GetSession())
	}
	return a, err
}

// AppendSession implements SessionsServiceServer.
func (s *sessionsService) AppendSession(ctx context.Context, m *kvtierv1.AppendSessionRequest) (*kvtierv1.AppendSessionResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, changes)
	if err != nil {
		return nil, err
	}
	return sessions.Append(ctx, m)
}

// GetSession implements SessionsServiceServer.
func (s *sessionsService) GetSession(ctx context.Context, m *kvtierv1.GetSessionRequest) (*kvtierv1.GetSessionResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, looks)
	if err != nil {
		return nil, err
	}
	return sessions.Get(ctx, m)
}

// ListSessions implements SessionsServiceServer.
func (s *sessionsService) ListSessions(ctx context.Context, m *kvtierv1.ListSessionsRequest) (*kvtierv1.ListSessionsResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, looksAtAll)
	if err != nil {
		return nil, err
	}
	return sessions.List(ctx, m)
}

// ShareSession implements SessionsServiceServer.
func (s *sessionsService) ShareSession(ctx context.Context, m *kvtierv1.ShareSessionRequest) (*kvtierv1.ShareSessionResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, changes)
	if err != nil {
		return nil, err
	}
	return sessions.Share(ctx, m)
}

// RetainSession implements SessionsServiceServer.
func (s *sessionsService) RetainSession(ctx context.Context, m *kvtierv1.RetainSessionRequest) (*kvtierv1.RetainSessionResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, changes)
	if err != nil {
		return nil, err
	}
	return sessions.Retain(ctx, m)
}

// CloseSession implements SessionsServiceServer.
func (s *sessionsService) CloseSession(ctx context.Context, m *kvtierv1.CloseSessionRequest) (*kvtierv1.CloseSessionResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, changes)
	if err != nil {
		return nil, err
	}
	return sessions.CloseSession(ctx, m)
}

// CancelMigration implements SessionsServiceServer.
func (s *sessionsService) CancelMigration(ctx context.Context, m *kvtierv1.CancelMigrationRequest) (*kvtierv1.CancelMigrationResponse, error) {
	sessions, err := s.enter(ctx, &m.Tenant, changes)
	if err != nil {
		return nil, err
	}
	return sessions.CancelMigration(ctx, m)
}

// MigrateSession implements SessionsServiceServer.
func (s *sessionsService) MigrateSession(m *kvtierv1.MigrateSessionRequest, stream grpc.ServerStreamingServer[kvtierv1.MigrateSessionResponse]) error {
	what := changes
	if m.GetDryRun() {
		what = looks
	}
	sessions, err := s.enter(stream.Context(), &m.Tenant, what)
	if err != nil {
		return err
	}
	return sessions.Migrate(stream.Context(), m, stream.Send)
}

// WatchSessions implements SessionsServiceServer.
func (s *sessionsService) WatchSessions(m *kvtierv1.WatchSessionsRequest, stream grpc.ServerStreamingServer[kvtierv1.WatchSessionsResponse]) error {
	what := looksAtAll
	if len(m.GetSessions()) > 0 { // they are one tenant's
		what = looks
	}
	sessions, err := s.enter(stream.Context(), &m.Tenant, what)
	if err != nil {
		return err
	}
	return sessions.WatchSessions(stream.Context(), m, func(e *kvtierv1.SessionEvent) error {
		return stream.Send(&kvtierv1.WatchSessionsResponse{Event: e})
	})
}

// chainFields are the fields of a request that a session range stands for.
type chainFields struct {
	namespace, names *[]byte
	first            *uint32 // nil: the request has none
}

// fill is fill for a unary call.
func (p *pagesService) fill(ctx context.Context, r *kvtierv1.SessionRange, f chainFields) error {
	if r == nil {
		return nil
	}
	c, err := p.caller(ctx)
	if err != nil {
		return err
	}
	return fill(ctx, p.node, c.Tenant, r, f)
}

// fill replaces a session range by the names of its blocks. It may wait for other nodes.
func fill(ctx context.Context, node Node, tenant string, r *kvtierv1.SessionRange, f chainFields) error {
	if r == nil {
		return nil
	}
	if len(*f.names) > 0 {
		return invalid("block_names and session_range: give one of them")
	}
	sessions, err := node.Sessions()
	if err != nil {
		return err
	}
	ns, names, err := sessions.Names(ctx, tenant, r.GetSession(), r.GetFromBlock(), r.GetToBlock())
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("session %q has no blocks from %d on: %w", r.GetSession(), r.GetFromBlock(), paging.ErrNotFound)
	}
	if given := *f.namespace; len(given) > 0 && !bytes.Equal(given, ns[:]) {
		return invalid("namespace_id: session %q is of namespace %s, not of this one", r.GetSession(), ns.Short())
	}
	*f.namespace = ns[:]
	for i := range names {
		*f.names = append(*f.names, names[i][:]...)
	}
	if f.first != nil {
		*f.first = uint32(min(r.GetFromBlock(), math.MaxUint32))
	}
	return nil
}

package server_test

import (
	"context"
	"errors"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// dialAs connects to a unix socket as another user: the kernel notes the
// effective user of the thread that connects.
func dialAs(uid int) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, path string) (net.Conn, error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			return nil, errno
		}
		defer func() {
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), 0, ^uintptr(0)); errno != 0 {
				panic(errno) // the thread must not live on as another user
			}
		}()
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
}

// On the unix socket a user is the tenant that the table says, and nobody else.
func TestTenantByUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be other users")
	}
	cfg := servertest.Config(t)
	cfg.Tenants = []server.Tenant{{Name: "a", UIDs: []uint32{61001}}, {Name: "b", UIDs: []uint32{61002}}}
	n := startNode(t, cfg)
	if err := os.Chmod(cfg.Socket, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(cfg.Socket[:len(cfg.Socket)-2], 0o755); err != nil {
		t.Fatal(err)
	}
	tenantOf := func(uid int) (string, error, error) {
		conn, err := grpc.NewClient("passthrough:///"+cfg.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dialAs(uid)))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, adminErr := kvtierv1.NewAdminServiceClient(conn).GetStatus(t.Context(), &kvtierv1.GetStatusRequest{})
		s, err := kvtierv1.NewPagesServiceClient(conn).Attach(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		hello := &kvtierv1.Hello{ProtocolVersion: 1, StagingBytes: 4096}
		if err := s.Send(&kvtierv1.AttachRequest{RequestId: 1, Message: &kvtierv1.AttachRequest_Hello{Hello: hello}}); err != nil {
			t.Fatal(err)
		}
		m, err := s.Recv()
		return m.GetWelcome().GetTenant(), kvstatus.Err(err), kvstatus.Err(adminErr)
	}
	for uid, want := range map[int]string{61001: "a", 61002: "b", 61003: "", 0: ""} {
		tenant, err, adminErr := tenantOf(uid)
		if tenant != want || (want == "") != errors.Is(err, paging.ErrDenied) {
			t.Errorf("uid %d is tenant %q, %v, want %q", uid, tenant, err, want)
		}
		if (uid == 0) != (adminErr == nil) {
			t.Errorf("uid %d asks the AdminService: %v", uid, adminErr)
		}
	}
	_ = n
}

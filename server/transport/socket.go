package transport

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// Network is where connections come from, for clusters in memory. Its methods
// may be called from many goroutines.
type Network interface {
	// Listen is net.Listen for TCP.
	Listen(ctx context.Context, address string) (net.Listener, error)
	// Dial connects to what Resolve said.
	Dial(ctx context.Context, address string) (net.Conn, error)
}

// congestion is the algorithm of every socket. What a machine has as its
// default is often bbr, which reaches two thirds of this on links inside a
// machine room, where nothing but the peers' own windows limits them.
const congestion = "cubic"

// tcp is the Network of a real node.
type tcp struct {
	open  bool         // addresses beyond this machine are allowed
	set   atomic.Int64 // sockets with the congestion control wanted
	unset atomic.Int64 // sockets where it is not permitted
}

// Listen implements Network.
func (n *tcp) Listen(ctx context.Context, address string) (net.Listener, error) {
	lc := net.ListenConfig{Control: n.control}
	return lc.Listen(ctx, "tcp", address)
}

// Dial implements Network.
func (n *tcp) Dial(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{Control: n.control}
	return d.DialContext(ctx, "tcp", address)
}

// control sees the address after names were resolved: that is the one to judge.
func (n *tcp) control(_, address string, c syscall.RawConn) error {
	if host, _, err := net.SplitHostPort(address); !n.open && (err != nil || !net.ParseIP(host).IsLoopback()) {
		return fmt.Errorf("%s is beyond this machine, and there is no TLS: %w", address, paging.ErrDenied)
	}
	return c.Control(func(fd uintptr) {
		// Not permitted for processes without CAP_NET_ADMIN unless the system lists
		// it as allowed; the socket works as well without.
		if unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion) == nil {
			n.set.Add(1)
		} else {
			n.unset.Add(1)
		}
	})
}

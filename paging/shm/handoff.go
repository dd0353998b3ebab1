//go:build linux

package shm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// maxSocketPath is the longest path of a hand-off socket: the kernel takes 107
// bytes, and the socket is made under a name that is one byte longer.
const maxSocketPath = 106

// Listener takes connections of the hand-off socket.
type Listener struct {
	listener *net.UnixListener
	path     string
	inode    uint64
}

// ListenHandoff makes the socket at path with the given permissions and group
// (-1: the group of the process); it is never reachable with others. A socket
// that nobody listens on is replaced. ErrUnavailable if somebody does, ErrInvalid
// if the path is too long or something else lies there, ErrIO.
func ListenHandoff(path string, mode fs.FileMode, gid int) (*Listener, error) {
	if path == "" || len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen on %q: %w: socket path of %d bytes, want 1 to %d", path, paging.ErrInvalid, len(path), maxSocketPath)
	}
	if err := replaceable(path); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	temporary := path + "~"
	_ = os.Remove(temporary) // left by a crash between the two names
	// The kernel takes the permissions of a socket from its descriptor: nobody
	// else can connect before they are set as wanted.
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		return errors.Join(raw.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }), err)
	}}
	made, err := config.Listen(context.Background(), "unixpacket", temporary) // does not block
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w: %w", path, paging.ErrIO, err)
	}
	listener := made.(*net.UnixListener)
	listener.SetUnlinkOnClose(false)
	l := &Listener{listener: listener, path: path}
	if err := l.publish(temporary, mode, gid); err != nil {
		_ = listener.Close()
		os.Remove(temporary)
		return nil, fmt.Errorf("listen on %s: %w: %w", path, paging.ErrIO, err)
	}
	return l, nil
}

// replaceable is nil if path is free or a socket without a listener.
func replaceable(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("%w: %w", paging.ErrIO, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%w: a file that is no socket lies there", paging.ErrInvalid)
	}
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err == nil {
		_ = conn.Close()
	}
	if err == nil || !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("%w: the socket is in use", paging.ErrUnavailable)
	}
	return nil
}

// publish sets permissions before the socket gets the name that clients know.
func (l *Listener) publish(temporary string, mode fs.FileMode, gid int) error {
	if err := os.Chmod(temporary, mode.Perm()); err != nil {
		return err
	}
	if gid >= 0 {
		if err := os.Lchown(temporary, -1, gid); err != nil {
			return err
		}
	}
	var st unix.Stat_t
	if err := unix.Lstat(temporary, &st); err != nil {
		return err
	}
	l.inode = st.Ino
	return os.Rename(temporary, l.path)
}

// Accept waits for a client. The tether that it returns belongs to the caller.
// ErrClosed after Close.
func (l *Listener) Accept() (*Tether, error) {
	conn, err := l.listener.AcceptUnix()
	if err != nil {
		return nil, ioError("accept on "+l.path, err)
	}
	t, err := newTether(conn)
	if err != nil {
		return nil, fmt.Errorf("accept on %s: %w: %w", l.path, paging.ErrIO, err)
	}
	return t, nil
}

// Close stops listening and removes the socket, unless another listener has put
// its own there. Tethers stay. Idempotent.
func (l *Listener) Close() error {
	var st unix.Stat_t
	if unix.Lstat(l.path, &st) == nil && st.Ino == l.inode {
		os.Remove(l.path)
	}
	if err := l.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// DialHandoff connects to the hand-off socket of a daemon. ErrUnavailable if
// nobody listens, ErrDenied if this process may not.
func DialHandoff(ctx context.Context, path string) (*Tether, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unixpacket", path)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("dial %s: %w: %w", path, paging.ErrDenied, err)
	default:
		return nil, fmt.Errorf("dial %s: %w: %w", path, paging.ErrUnavailable, err)
	}
	t, err := newTether(conn.(*net.UnixConn))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w: %w", path, paging.ErrIO, err)
	}
	return t, nil
}

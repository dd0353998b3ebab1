//go:build linux

package shm

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// pair is a listener and the two ends of a connection to it.
func pair(t testing.TB) (daemon, client *Tether) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fd.sock")
	l, err := ListenHandoff(path, 0o660, -1)
	mustNil(t, err)
	defer l.Close()
	client, err = DialHandoff(t.Context(), path)
	mustNil(t, err)
	daemon, err = l.Accept()
	mustNil(t, err)
	t.Cleanup(func() { client.Close(); daemon.Close() })
	return daemon, client
}

// rawPacket sends a packet as no honest peer would.
func rawPacket(t *testing.T, from *Tether, packet []byte, fds ...int) {
	t.Helper()
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := from.conn.WriteMsgUnix(packet, rights, nil); err != nil {
		t.Fatal(err)
	}
}

func TestHandOff(t *testing.T) {
	daemon, client := pair(t)
	for _, end := range []*Tether{daemon, client} {
		if got, want := end.Peer(), (Peer{PID: os.Getpid(), UID: os.Getuid(), GID: os.Getgid()}); got != want {
			t.Errorf("peer %+v, want %+v", got, want)
		}
	}
	id := AttachmentID{1, 2, 3, 15: 16}
	mustNil(t, client.SendHello(t.Context(), id))
	got, err := daemon.RecvHello(t.Context())
	if err != nil || got != id {
		t.Fatalf("hello %x, %v", got, err)
	}

	const size = 64 << 10
	memory := extent(t, size)
	staging, err := CreateStaging("kvtier-test-staging", size)
	mustNil(t, err)
	defer staging.Close()
	copy(memory.Bytes()[4096:], "a page")
	before := descriptorsOpen(t)
	mustNil(t, daemon.SendExtents(t.Context(), []Extent{
		{ID: 7, Kind: KindRAM, Bytes: size, FD: memory.FD()},
		{ID: 8, Kind: KindStaging, Bytes: size, FD: staging.FD()},
	}))
	extents, err := client.RecvExtents(t.Context())
	mustNil(t, err)
	if len(extents) != 2 || extents[0].ID != 7 || extents[1].ID != 8 || extents[0].Bytes != size {
		t.Fatalf("received %+v", extents)
	}
	for _, e := range extents {
		if flags, err := unix.FcntlInt(uintptr(e.FD), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %d: flags %#x, %v: want close-on-exec", e.FD, flags, err)
		}
	}
	r, err := extents[0].Map()
	mustNil(t, err)
	defer r.Close()
	w, err := extents[1].Map()
	mustNil(t, err)
	defer w.Close()
	copy(w.Bytes(), "filled")
	if string(r.Bytes()[4096:4102]) != "a page" || string(staging.Bytes()[:6]) != "filled" {
		t.Error("the mappings do not show the same memory")
	}
	if after := descriptorsOpen(t); after != before {
		t.Errorf("%d descriptors open after mapping, %d before", after, before)
	}
	client.Close()
	mustNil(t, daemon.Wait(t.Context(), nil))
	if len(daemon.unacked) != 0 {
		t.Errorf("%d hand-offs unacknowledged", len(daemon.unacked))
	}
	wantError(t, "send after the end", daemon.SendExtents(t.Context(), []Extent{{ID: 9, Kind: KindRAM, Bytes: size, FD: memory.FD()}}), paging.ErrClosed)
}

func TestHandOffOfManyExtents(t *testing.T) {
	daemon, client := pair(t)
	m := extent(t, 4096)
	const n = 3*MaxExtents + 5
	extents := make([]Extent, n)
	for i := range extents {
		extents[i] = Extent{ID: paging.ExtentID(i + 1), Kind: KindRAM, Bytes: 4096, FD: m.FD()}
	}
	before := descriptorsOpen(t)
	mustNil(t, daemon.SendExtents(t.Context(), extents))
	for got := 0; got < n; {
		some, err := client.RecvExtents(t.Context())
		mustNil(t, err)
		for _, e := range some {
			if got++; e.ID != paging.ExtentID(got) {
				t.Fatalf("extent %d at place %d", e.ID, got)
			}
			e.Discard()
		}
	}
	if after := descriptorsOpen(t); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
	client.Close()
	mustNil(t, daemon.Wait(t.Context(), nil))
}

// The tether ends when the last holder is gone, not with the process that
// attached.
func TestTetherEndsWithItsLastHolder(t *testing.T) {
	daemon, client := pair(t)
	raw, err := client.conn.SyscallConn()
	mustNil(t, err)
	var f *os.File
	mustNil(t, raw.Control(func(fd uintptr) { f = duplicate(t, int(fd)) }))
	child := start(t, "hold", f, 0)
	f.Close()
	client.Close()

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantError(t, "while a child holds the tether", daemon.Wait(ctx, nil), context.DeadlineExceeded)
	child.kill()
	mustNil(t, daemon.Wait(t.Context(), nil))
}

func TestTetherEndsWithAKilledClient(t *testing.T) {
	daemon, client := pair(t)
	raw, err := client.conn.SyscallConn()
	mustNil(t, err)
	var f *os.File
	mustNil(t, raw.Control(func(fd uintptr) { f = duplicate(t, int(fd)) }))
	child := start(t, "hold", f, 0)
	f.Close()
	client.Close()
	// Unread hand-offs make the end of the socket look like a reset.
	m := extent(t, 4096)
	mustNil(t, daemon.SendExtents(t.Context(), []Extent{{ID: 1, Kind: KindRAM, Bytes: 4096, FD: m.FD()}}))
	child.kill()
	mustNil(t, daemon.Wait(t.Context(), nil))
}

// What looks like an end and is none must not end a quarantine.
func TestFalseEnds(t *testing.T) {
	for what, pretend := range map[string]func(*Tether) error{
		"an empty packet":           func(c *Tether) error { _, err := c.conn.Write(nil); return err },
		"a shutdown of one way":     func(c *Tether) error { return c.conn.CloseWrite() },
		"a frame nobody asked for":  func(c *Tether) error { return c.send(context.Background(), &frame{kind: frameAck, seq: 1}, nil) },
		"a second hello":            func(c *Tether) error { return c.SendHello(context.Background(), AttachmentID{}) },
		"bytes that are no frame":   func(c *Tether) error { _, err := c.conn.Write([]byte("GET / HTTP/1.1\r\n")); return err },
		"a packet that is too long": func(c *Tether) error { _, err := c.conn.Write(make([]byte, 2*maxFrame)); return err },
		"an acknowledgement too low": func(c *Tether) error {
			return c.send(context.Background(), &frame{kind: frameAck, seq: 1, count: 2}, nil)
		},
	} {
		t.Run(what, func(t *testing.T) {
			daemon, client := pair(t)
			if strings.HasSuffix(what, "too low") {
				m := extent(t, 4096)
				e := Extent{ID: 1, Kind: KindRAM, Bytes: 4096, FD: m.FD()}
				mustNil(t, daemon.SendExtents(t.Context(), []Extent{e, e, e}))
			}
			mustNil(t, pretend(client))
			wantError(t, "the violation", daemon.Wait(t.Context(), nil), paging.ErrInvalid)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			wantError(t, "while the client lives", daemon.Wait(ctx, nil), context.DeadlineExceeded)
			if what != "a shutdown of one way" {
				flood(t, client)
			}
			client.Close()
			mustNil(t, daemon.Wait(t.Context(), nil))
		})
	}
}

// flood writes until the socket takes no more: after a violation nobody reads.
func flood(t *testing.T, c *Tether) {
	t.Helper()
	mustNil(t, c.conn.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
	for range 1 << 20 {
		if _, err := c.conn.Write(make([]byte, 512)); err != nil {
			wantError(t, "flood", err, os.ErrDeadlineExceeded)
			return
		}
	}
	t.Error("the daemon reads on after a violation")
}

// Whatever comes instead of extents is an error, and no descriptor is kept.
func TestReceiverKeepsNoDescriptor(t *testing.T) {
	m := extent(t, 4096)
	fd := m.FD()
	two := []Extent{{ID: 1, Kind: KindRAM, Bytes: 4096}, {ID: 2, Kind: KindRAM, Bytes: 4096}}
	good := appendFrame(nil, &frame{kind: frameExtents, seq: 1, extents: two})
	many := make([]int, 200)
	for i := range many {
		many[i] = fd
	}
	version := append([]byte(nil), good...)
	version[4] = 9
	kind := append([]byte(nil), good...)
	kind[24] = 77
	for _, c := range []struct {
		what   string
		packet []byte
		fds    []int
		want   error
	}{
		{"fewer descriptors", good, []int{fd}, paging.ErrInvalid},
		{"more descriptors", good, []int{fd, fd, fd}, paging.ErrInvalid},
		{"no descriptor", good, nil, paging.ErrInvalid},
		{"too many descriptors", good, many, paging.ErrInvalid},
		{"more than a frame can have", appendFrame(nil, &frames()[3]), many, paging.ErrInvalid},
		{"another version", version, []int{fd, fd}, paging.ErrIncompatible},
		{"an unknown kind of memory", kind, []int{fd, fd}, paging.ErrIncompatible},
		{"garbage", []byte("garbage"), []int{fd, fd}, paging.ErrInvalid},
		{"an empty packet", nil, []int{fd}, paging.ErrInvalid},
		{"a long packet", make([]byte, maxFrame+1), []int{fd, fd}, paging.ErrInvalid},
		{"a cut frame", good[:len(good)-1], []int{fd, fd}, paging.ErrInvalid},
		{"hello", appendFrame(nil, &frame{kind: frameHello}), []int{fd}, paging.ErrInvalid},
	} {
		daemon, client := pair(t)
		before := descriptorsOpen(t)
		rawPacket(t, daemon, c.packet, c.fds...)
		extents, err := client.RecvExtents(t.Context())
		wantError(t, c.what, err, c.want)
		if extents != nil {
			t.Errorf("%s: got %v", c.what, extents)
		}
		// The daemon must not keep what a client sends it either.
		rawPacket(t, client, appendFrame(nil, &frame{kind: frameHello}), fd, fd)
		_, err = daemon.RecvHello(t.Context())
		wantError(t, "hello with descriptors", err, paging.ErrInvalid)
		rawPacket(t, client, appendFrame(nil, &frame{kind: frameAck, seq: 1, count: 2}), fd)
		wantError(t, "acknowledgement with descriptors", daemon.Wait(t.Context(), nil), paging.ErrInvalid)
		if after := descriptorsOpen(t); after != before {
			t.Errorf("%s: %d descriptors open, %d before", c.what, after, before)
		}
	}
}

// A process at its limit of open files receives fewer descriptors than were
// sent: it must notice, and keep none.
func TestReceiverOutOfDescriptors(t *testing.T) {
	daemon, client := pair(t)
	m := extent(t, 4096)
	e := Extent{ID: 1, Kind: KindRAM, Bytes: 4096, FD: m.FD()}
	mustNil(t, daemon.SendExtents(t.Context(), []Extent{e, e, e, e}))
	var old unix.Rlimit
	mustNil(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	before := descriptorsOpen(t)
	next := int(duplicate(t, m.FD()).Fd()) // descriptors below it may be free: fill them
	var filler []int
	for {
		fd, err := unix.FcntlInt(uintptr(m.FD()), unix.F_DUPFD_CLOEXEC, 0)
		mustNil(t, err)
		filler = append(filler, fd)
		if fd > next {
			next = fd
			break
		}
	}
	mustNil(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next + 3), Max: old.Max}))
	_, err := client.RecvExtents(t.Context())
	mustNil(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old))
	wantError(t, "receive with room for two descriptors", err, paging.ErrInvalid)
	closeAll(filler)
	if after := descriptorsOpen(t); after != before+1 {
		t.Errorf("%d descriptors open, want %d", after, before+1)
	}
}

func TestUnacknowledgedHandOffsAreBounded(t *testing.T) {
	daemon, _ := pair(t)
	m := extent(t, 4096)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var err error
	for i := 0; i < 2*maxUnacked && err == nil; i++ {
		err = daemon.SendExtents(ctx, []Extent{{ID: 1, Kind: KindRAM, Bytes: 4096, FD: m.FD()}})
	}
	if !errors.Is(err, paging.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a client that reads nothing: %v", err)
	}
	if len(daemon.unacked) > maxUnacked {
		t.Errorf("%d hand-offs are remembered", len(daemon.unacked))
	}
}

func TestCallsEndWithTheirContext(t *testing.T) {
	daemon, client := pair(t)
	_, err := client.RecvExtents(canceled)
	wantError(t, "RecvExtents", err, context.Canceled)
	wantError(t, "Wait", daemon.Wait(canceled, nil), context.Canceled)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	_, err = daemon.RecvHello(ctx)
	wantError(t, "RecvHello", err, context.DeadlineExceeded)
	// What ended early left nothing behind.
	mustNil(t, client.SendHello(t.Context(), AttachmentID{1}))
	if id, err := daemon.RecvHello(t.Context()); err != nil || id[0] != 1 {
		t.Errorf("hello %x, %v", id, err)
	}
	daemon.Close()
	daemon.Close()
	wantError(t, "Wait after Close", daemon.Wait(t.Context(), nil), paging.ErrClosed)
	_, err = client.RecvExtents(t.Context())
	wantError(t, "RecvExtents after the daemon closed", err, paging.ErrClosed)
}

func TestListenHandoff(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "fd.sock")
	_, err := DialHandoff(t.Context(), path)
	wantError(t, "dial without a daemon", err, paging.ErrUnavailable)

	l, err := ListenHandoff(path, 0o660, os.Getgid())
	mustNil(t, err)
	info, err := os.Stat(path)
	mustNil(t, err)
	if info.Mode().Perm() != 0o660 {
		t.Errorf("permissions %v", info.Mode().Perm())
	}
	_, err = ListenHandoff(path, 0o660, -1)
	wantError(t, "a second listener", err, paging.ErrUnavailable)
	mustNil(t, l.Close())
	mustNil(t, l.Close())
	_, err = l.Accept()
	wantError(t, "Accept after Close", err, paging.ErrClosed)
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("Close left %v", entries)
	}

	// A socket that a crash left is replaced.
	dead, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	mustNil(t, err)
	dead.SetUnlinkOnClose(false)
	dead.Close()
	l, err = ListenHandoff(path, 0o600, -1)
	mustNil(t, err)
	defer l.Close()
	_, err = DialHandoff(canceled, path)
	wantError(t, "dial under an ended context", err, context.Canceled)

	mustNil(t, os.WriteFile(filepath.Join(dir, "file"), []byte("mine"), 0o600))
	_, err = ListenHandoff(filepath.Join(dir, "file"), 0o660, -1)
	wantError(t, "over a file", err, paging.ErrInvalid)
	if b, _ := os.ReadFile(filepath.Join(dir, "file")); string(b) != "mine" {
		t.Error("the file was touched")
	}
	_, err = ListenHandoff(filepath.Join(dir, strings.Repeat("x", 120)), 0o660, -1)
	wantError(t, "a long path", err, paging.ErrInvalid)
	_, err = ListenHandoff(filepath.Join(dir, "missing", "x"), 0o660, -1)
	wantError(t, "a missing directory", err, paging.ErrIO)
}

// A listener that was replaced by another one does not remove its socket.
func TestCloseKeepsTheSuccessor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fd.sock")
	old, err := ListenHandoff(path, 0o600, -1)
	mustNil(t, err)
	mustNil(t, os.Remove(path))
	successor, err := ListenHandoff(path, 0o600, -1)
	mustNil(t, err)
	defer successor.Close()
	mustNil(t, old.Close())
	c, err := DialHandoff(t.Context(), path)
	mustNil(t, err)
	c.Close()
}

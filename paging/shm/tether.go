//go:build linux

package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// maxUnacked is how many frames of extents may wait for their acknowledgement.
const maxUnacked = 256

// Peer says who is at the other end of a tether, as the kernel knows it from the
// time of the connection.
type Peer struct {
	PID      int
	UID, GID int
}

// Tether is one connection of the hand-off socket. One goroutine may receive
// (RecvHello, RecvExtents, Wait) while others send.
type Tether struct {
	conn *net.UnixConn
	peer Peer

	violated bool // the receiver: the peer broke the protocol, nothing more is read

	mu      sync.Mutex
	seq     uint32
	unacked []handoff
}

// handoff is a frame of extents whose acknowledgement is expected.
type handoff struct{ seq, count uint32 }

func newTether(conn *net.UnixConn) (*Tether, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, credErr); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return &Tether{conn: conn, peer: Peer{PID: int(cred.Pid), UID: int(cred.Uid), GID: int(cred.Gid)}}, nil
}

// Peer is who is at the other end.
func (t *Tether) Peer() Peer { return t.peer }

// Close closes this end. A client that closes its tether says that no process of
// its kind reads the memory any more. Idempotent; calls that wait return ErrClosed.
func (t *Tether) Close() error {
	if err := t.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// SendHello names the attachment; the first frame of a client.
func (t *Tether) SendHello(ctx context.Context, id AttachmentID) error {
	return t.send(ctx, &frame{kind: frameHello, attachment: id}, nil)
}

// RecvHello waits for the first frame of a client. ErrClosed if it went away,
// ErrInvalid or ErrIncompatible if it sent something else.
func (t *Tether) RecvHello(ctx context.Context) (AttachmentID, error) {
	f, fds, err := t.recv(ctx)
	if err != nil {
		return AttachmentID{}, err
	}
	if f.kind != frameHello || len(fds) > 0 {
		closeAll(fds)
		return AttachmentID{}, fmt.Errorf("%w: frame of kind %d with %d descriptors, want hello", paging.ErrInvalid, f.kind, len(fds))
	}
	return f.attachment, nil
}

// SendExtents hands extents to the client, which owns copies of the descriptors
// from then on. It does not wait until they are received: Wait sees that each
// descriptor arrived. It blocks while the client lets too many frames lie unread,
// until ctx ends. May be called from several goroutines.
func (t *Tether) SendExtents(ctx context.Context, extents []Extent) error {
	for len(extents) > 0 {
		n := min(len(extents), MaxExtents)
		if err := t.sendExtents(ctx, extents[:n]); err != nil {
			return err
		}
		extents = extents[n:]
	}
	return nil
}

func (t *Tether) sendExtents(ctx context.Context, extents []Extent) error {
	fds := make([]int, len(extents))
	for i, e := range extents {
		fds[i] = e.FD
	}
	f := frame{kind: frameExtents, extents: extents}
	t.mu.Lock()
	if len(t.unacked) >= maxUnacked {
		t.mu.Unlock()
		return fmt.Errorf("%w: the client acknowledged none of %d hand-offs", paging.ErrUnavailable, maxUnacked)
	}
	t.seq++
	f.seq = t.seq
	t.unacked = append(t.unacked, handoff{f.seq, uint32(len(fds))})
	t.mu.Unlock()
	err := t.send(ctx, &f, fds)
	if err != nil {
		t.expected(f.seq) // a packet is sent whole or not at all
	}
	return err
}

// expected takes a frame off the list of those unacknowledged and returns how
// many descriptors it had, 0 if it is not there.
func (t *Tether) expected(seq uint32) uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, h := range t.unacked {
		if h.seq == seq {
			t.unacked = append(t.unacked[:i], t.unacked[i+1:]...)
			return h.count
		}
	}
	return 0
}

// RecvExtents waits for extents, of which it returns the descriptors, each
// close-on-exec and owned by the caller (see Extent.Map), and acknowledges them.
// On an error every descriptor that came is closed. ErrClosed if the daemon went
// away. After another error than that of ctx the tether is of no use but to be
// held.
func (t *Tether) RecvExtents(ctx context.Context) ([]Extent, error) {
	f, fds, err := t.recv(ctx)
	if err != nil {
		return nil, err
	}
	if f.kind != frameExtents || len(fds) != len(f.extents) {
		closeAll(fds)
		return nil, fmt.Errorf("%w: frame of kind %d for %d extents came with %d descriptors", paging.ErrInvalid, f.kind, len(f.extents), len(fds))
	}
	if err := t.send(ctx, &frame{kind: frameAck, seq: f.seq, count: uint32(len(fds))}, nil); err != nil {
		closeAll(fds)
		return nil, err
	}
	for i := range f.extents {
		f.extents[i].FD = fds[i]
	}
	return f.extents, nil
}

// Wait returns nil when the last process that held the other end is gone. Until
// then it reads acknowledgements. ErrInvalid says, once, that the client broke
// the protocol: its process may live and read on, so call Wait again to wait for
// its end; nothing more is read then. received is given the regions that the
// client hands over, and owns their descriptors; nil: none may come.
func (t *Tether) Wait(ctx context.Context, received func(Extent)) error {
	for !t.violated {
		f, fds, err := t.recv(ctx)
		if err == nil && received != nil && f.regions(fds) {
			for i := range f.extents {
				f.extents[i].FD = fds[i]
				received(f.extents[i])
			}
			continue
		}
		closeAll(fds)
		switch {
		case errors.Is(err, paging.ErrClosed) && !errors.Is(err, net.ErrClosed):
			if t.hungUp() {
				return nil
			}
			err = fmt.Errorf("%w: the client shut the tether in one direction", paging.ErrInvalid)
		case err == nil:
			err = t.acked(f, len(fds))
		case !errors.Is(err, paging.ErrInvalid) && !errors.Is(err, paging.ErrIncompatible):
			return err
		}
		if err != nil {
			t.violated = true
			return err
		}
	}
	return t.waitHangup(ctx)
}

// regions tells whether a frame hands regions over.
func (f *frame) regions(fds []int) bool {
	if f.kind != frameExtents || len(fds) != len(f.extents) {
		return false
	}
	for i := range f.extents {
		if f.extents[i].Kind != KindRegion {
			return false
		}
	}
	return true
}

// SendRegion hands memory of this process to the daemon, which has copies of the
// descriptor from then on.
func (t *Tether) SendRegion(ctx context.Context, id paging.ExtentID, bytes int64, fd int) error {
	f := frame{kind: frameExtents, extents: []Extent{{ID: id, Kind: KindRegion, Bytes: bytes}}}
	return t.send(ctx, &f, []int{fd})
}

// acked judges a frame that came from the client after hello.
func (t *Tether) acked(f *frame, fds int) error {
	if f.kind != frameAck || fds > 0 {
		return fmt.Errorf("%w: frame of kind %d with %d descriptors on a tether", paging.ErrInvalid, f.kind, fds)
	}
	if want := t.expected(f.seq); want == 0 || f.count != want {
		return fmt.Errorf("%w: the client received %d descriptors of hand-off %d, want %d", paging.ErrInvalid, f.count, f.seq, want)
	}
	return nil
}

// hungUp tells whether the other end is closed altogether. A zero-length read
// alone would not tell: an empty packet and a shutdown of one direction look the
// same.
func (t *Tether) hungUp() bool {
	raw, err := t.conn.SyscallConn()
	if err != nil {
		return true
	}
	hup := false
	err = raw.Control(func(fd uintptr) { hup = pollHangup(int(fd)) })
	return hup || err != nil
}

func pollHangup(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	for {
		n, err := unix.Poll(p, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err != nil || n > 0 && p[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
	}
}

// waitHangup waits for the end without reading, so that a client that writes on
// and on fills its own buffer and blocks.
func (t *Tether) waitHangup(ctx context.Context) error {
	raw, err := t.conn.SyscallConn()
	if err == nil {
		err = withContext(ctx, t.conn.SetReadDeadline, func() error {
			return raw.Read(func(fd uintptr) bool { return pollHangup(int(fd)) })
		})
	}
	return ioError("wait for the end of the tether", err)
}

func (t *Tether) send(ctx context.Context, f *frame, fds []int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	packet := appendFrame(make([]byte, 0, maxFrame), f)
	return ioError("send on hand-off socket", withContext(ctx, t.conn.SetWriteDeadline, func() error {
		_, _, err := t.conn.WriteMsgUnix(packet, rights, nil)
		return err
	}))
}

// recv receives one frame. The descriptors that come with it belong to the
// caller; with an error there are none.
func (t *Tether) recv(ctx context.Context) (*frame, []int, error) {
	packet := make([]byte, maxFrame+1)
	control := make([]byte, unix.CmsgSpace(4*MaxExtents))
	var n, controlled, flags int
	err := ioError("receive on hand-off socket", withContext(ctx, t.conn.SetReadDeadline, func() (err error) {
		n, controlled, flags, _, err = t.conn.ReadMsgUnix(packet, control)
		return err
	}))
	if err != nil {
		return nil, nil, err
	}
	fds, err := descriptors(control[:controlled])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("%w: hand-off packet was cut (flags %#x, %d descriptors arrived)", paging.ErrInvalid, flags, len(fds))
	}
	var f *frame
	if err == nil {
		f, err = decodeFrame(packet[:n])
	}
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return f, fds, nil
}

// descriptors returns all descriptors of a control buffer, also with an error.
func descriptors(control []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("%w: control message: %w", paging.ErrInvalid, err)
	}
	var fds []int
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET || messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		got, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fds, fmt.Errorf("%w: control message: %w", paging.ErrInvalid, err)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// Map maps a received extent as its kind says and closes its descriptor, also
// on an error.
func (e *Extent) Map() (*Memory, error) {
	defer e.Discard()
	if e.Kind == KindStaging || e.Kind == KindWorking {
		return MapReadWrite(e.FD, e.Bytes)
	}
	return MapReadOnly(e.FD, e.Bytes)
}

// File is the descriptor of a received extent as a file, which owns it from now on.
func (e *Extent) File() *os.File {
	f := os.NewFile(uintptr(e.FD), "kvtier-extent")
	e.FD = -1
	return f
}

// Duplicate is a new descriptor of what f names, close-on-exec.
func Duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate a descriptor: %w: %w", paging.ErrIO, err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// Discard closes the descriptor of a received extent that is not wanted.
func (e *Extent) Discard() {
	if e.FD >= 0 {
		_ = unix.Close(e.FD)
		e.FD = -1
	}
}

// withContext runs a blocking call of a connection that ends with ctx. A call
// that succeeded is not made a failure by a context that ended meanwhile.
func withContext(ctx context.Context, setDeadline func(time.Time) error, call func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = setDeadline(time.Unix(1, 0)) // fails only if closed, and then the call ends too
		close(stopped)
	})
	err := call()
	if !stop() {
		<-stopped
		_ = setDeadline(time.Time{})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return ctx.Err()
		}
	}
	return err
}

// ioError names the sentinel of a failed call on the socket.
func ioError(what string, err error) error {
	switch {
	case err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, net.ErrClosed), errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return fmt.Errorf("%s: %w: %w", what, paging.ErrClosed, err)
	}
	return fmt.Errorf("%s: %w: %w", what, paging.ErrIO, err)
}

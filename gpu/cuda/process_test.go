//go:build linux && amd64 && !nocuda

package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/gpu"
)

// childRole makes this test binary an engine or an owner in a process of its own; its descriptors start at 3.
const childRole = "KVTIER_TEST_ROLE"

const poolBytes = 2 << 20

// start runs TestChild in another process. Its output goes to the pipe that is returned.
func start(t *testing.T, role string, files ...*os.File) (*exec.Cmd, io.Reader) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestChild$")
	cmd.Env = append(os.Environ(), childRole+"="+role, childLibrary+"="+stub.path)
	cmd.ExtraFiles = files
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// expect reads one line of a child.
func expect(t *testing.T, out io.Reader, want string) {
	t.Helper()
	var line string
	if _, err := fmt.Fscanln(out, &line); err != nil || line != want {
		t.Fatalf("the child says %q (%v), want %q", line, err, want)
	}
}

func TestChild(t *testing.T) {
	role := os.Getenv(childRole)
	if role == "" {
		return // only in a child
	}
	if err := child(role); err != nil {
		t.Fatal(err)
	}
}

func child(role string) error {
	d, err := Open(Config{Library: stub.path})
	if err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	if role == "owner" {
		return childOwner(d, s)
	}
	pool, err := d.Import(os.NewFile(3, "pool"), poolBytes, gpu.ReadOnly)
	if err != nil {
		return err
	}
	slots, err := d.Import(os.NewFile(4, "slots"), poolBytes, gpu.ReadWrite)
	if err != nil {
		return err
	}
	if role == "dying engine" { // begins to read and never signals
		err := errors.Join(s.Await(slots.Addr(), 1), gpu.Sync(context.Background(), s))
		fmt.Println("reading")
		<-time.After(time.Minute) // killed long before
		return err
	}
	got, err := deviceBytes(d, s, slots.Addr(), pool)
	if err != nil {
		return err
	}
	fmt.Println(strconv.Itoa(int(got[0])) + "x" + strconv.Itoa(bytes.Count(got, got[:1])))
	if err := errors.Join(s.Signal(slots.Addr()+8, 1), gpu.Sync(context.Background(), s)); err != nil {
		return err
	}
	return errors.Join(pool.Free(), slots.Free(), s.Close(), d.Close())
}

// deviceBytes reads the pool once the slot says that it is ready.
func deviceBytes(d gpu.Device, s gpu.Stream, ready gpu.Addr, pool gpu.Mem) ([]byte, error) {
	b, err := syscall.Mmap(-1, 0, poolBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, err
	}
	h, err := d.Register(b)
	if err != nil {
		return nil, err
	}
	if ready != 0 {
		err = s.Await(ready, 1)
	}
	err = errors.Join(err, s.Copy([]gpu.Copy{{Dst: h.Addr(), Src: pool.Addr(), Bytes: poolBytes}}), gpu.Sync(context.Background(), s), h.Free())
	return b, err
}

// childOwner makes a pool, sends it over socket 3 and waits to be killed.
func childOwner(d gpu.Device, s gpu.Stream) error {
	pool, err := d.Alloc(poolBytes, gpu.Pool)
	if err != nil {
		return err
	}
	if err := errors.Join(s.Fill(pool.Addr(), poolBytes, 0x33), gpu.Sync(context.Background(), s)); err != nil {
		return err
	}
	f, err := pool.Export()
	if err != nil {
		return err
	}
	if err := syscall.Sendmsg(3, []byte{1}, syscall.UnixRights(int(f.Fd())), nil, 0); err != nil {
		return err
	}
	fmt.Println("sent")
	<-time.After(time.Minute)
	return errors.New("not killed")
}

// owner is this process's side: a pool, slots, and the descriptors for an engine.
type owner struct {
	*Device
	s           gpu.Stream
	pool, slots gpu.Mem
	files       []*os.File
}

func newOwner(t *testing.T) *owner {
	t.Helper()
	o := &owner{Device: openStub(t)}
	var err error
	if o.s, err = o.NewStream(); err != nil {
		t.Fatal(err)
	}
	if o.pool, err = o.Alloc(poolBytes, gpu.Pool); err != nil {
		t.Fatal(err)
	}
	if o.slots, err = o.Alloc(poolBytes, gpu.Shared); err != nil {
		t.Fatal(err)
	}
	for _, m := range []gpu.Mem{o.pool, o.slots} {
		f, err := m.Export()
		if err != nil {
			t.Fatal(err)
		}
		o.files = append(o.files, f)
	}
	if err := errors.Join(o.s.Fill(o.slots.Addr(), poolBytes, 0), o.s.Fill(o.pool.Addr(), poolBytes, 0x11), gpu.Sync(t.Context(), o.s)); err != nil {
		t.Fatal(err)
	}
	return o
}

func (o *owner) end(t *testing.T) {
	t.Helper()
	if err := errors.Join(o.files[0].Close(), o.files[1].Close(), o.pool.Free(), o.slots.Free(), o.s.Close(), o.Close()); err != nil {
		t.Error(err)
	}
}

// Two engines read a page in place in processes of their own, and the owner's overwrite waits for the signal of each.
func TestEnginesReadInPlace(t *testing.T) {
	o := newOwner(t)
	for i := range 2 {
		v := byte(0x11 * (i + 1))
		if err := errors.Join(o.s.Fill(o.slots.Addr(), 16, 0), o.s.Fill(o.pool.Addr(), poolBytes, v), o.s.Signal(o.slots.Addr(), 1), gpu.Sync(t.Context(), o.s)); err != nil {
			t.Fatal(err)
		}
		// Queued before the engine has even started: only slot B holds it back.
		if err := errors.Join(o.s.Await(o.slots.Addr()+8, 1), o.s.Fill(o.pool.Addr(), poolBytes, 0xee)); err != nil {
			t.Fatal(err)
		}
		f, err := o.s.Record()
		if err != nil {
			t.Fatal(err)
		}
		if done, err := f.Done(); done || err != nil {
			t.Fatalf("overwritten before the engine has read: %v, %v", done, err)
		}
		cmd, out := start(t, "engine", o.files...)
		expect(t, out, fmt.Sprintf("%dx%d", v, poolBytes))
		if err := f.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, out); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	o.end(t)
}

// An engine is killed while it reads: its signal never comes, and the owner lets its own stream go by raising the slot.
func TestEngineKilledWhileReading(t *testing.T) {
	o := newOwner(t)
	cmd, out := start(t, "dying engine", o.files...)
	if err := errors.Join(o.s.Signal(o.slots.Addr(), 1), gpu.Sync(t.Context(), o.s)); err != nil {
		t.Fatal(err)
	}
	expect(t, out, "reading")
	if err := errors.Join(o.s.Await(o.slots.Addr()+8, 1), o.s.Fill(o.pool.Addr(), poolBytes, 0xee)); err != nil {
		t.Fatal(err)
	}
	f, err := o.s.Record()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the engine was to be killed")
	}
	if done, err := f.Done(); done || err != nil {
		t.Fatalf("reused without a signal: %v, %v", done, err)
	}
	if err := o.pool.Free(); !errors.Is(err, gpu.ErrBusy) {
		t.Errorf("free: %v", err)
	}
	release, err := o.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(release.Signal(o.slots.Addr()+8, 1), f.Wait(t.Context()), gpu.Sync(t.Context(), release), release.Close()); err != nil {
		t.Fatal(err)
	}
	o.end(t)
}

// The owner is killed with its pool mapped elsewhere: reads go on, and the descriptor can be mapped anew.
func TestOwnerKilled(t *testing.T) {
	d := openStub(t)
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	cmd, out := start(t, "owner", theirs)
	expect(t, out, "sent")
	oob := make([]byte, 64)
	_, n, _, _, err := syscall.Recvmsg(pair[0], make([]byte, 1), oob, 0)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:n])
	if err != nil {
		t.Fatal(err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "pool")
	pool, err := d.Import(f, poolBytes, gpu.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the owner was to be killed")
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	again, err := d.Import(f, poolBytes, gpu.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []gpu.Mem{pool, again} {
		if got, err := deviceBytes(d, s, 0, m); err != nil || bytes.Count(got, []byte{0x33}) != poolBytes {
			t.Errorf("after the owner's death: %#x, %v", got[0], err)
		}
	}
	if err := errors.Join(f.Close(), theirs.Close(), syscall.Close(pair[0]), pool.Free(), again.Free(), s.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}

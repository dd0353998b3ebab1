//go:build linux

package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// TestMain runs the tests, or, in a child process that a test has started, one
// of the children below.
func TestMain(m *testing.M) {
	if child := os.Getenv("KVTIER_SHM_CHILD"); child != "" {
		fmt.Println(children[child](3))
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test lets it go
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// children are what a child process does with the descriptor that it was given,
// and says on its first line.
var children = map[string]func(fd int) string{
	"hold":   func(int) string { return "holding" },
	"attack": attack,
}

// process is a child that lives until the test ends it.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	said  string
}

// start starts a child with one descriptor, as the given user if uid is not 0,
// and waits for its first line.
func start(t *testing.T, child string, fd *os.File, uid int) *process {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), "KVTIER_SHM_CHILD="+child)
	cmd.ExtraFiles = []*os.File{fd}
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 4096)
	n, err := stdout.Read(line)
	p := &process{cmd: cmd, stdin: stdin, said: strings.TrimSpace(string(line[:n]))}
	t.Cleanup(p.end)
	if err != nil {
		t.Fatalf("child %s: %v", child, err)
	}
	return p
}

func (p *process) end() {
	p.stdin.Close()
	_ = p.cmd.Wait()
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// duplicate is another descriptor for the same thing, for a child.
func duplicate(t *testing.T, fd int) *os.File {
	t.Helper()
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(n), "duplicate")
	t.Cleanup(func() { f.Close() })
	return f
}

// descriptorsOpen counts the open descriptors of this process.
func descriptorsOpen(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// attack tries whatever could write to an extent or make it smaller, and says
// what succeeded.
func attack(fd int) string {
	var did []string
	try := func(what string, err error) {
		if err == nil {
			did = append(did, what)
		}
	}
	assault := func(how string, fd int) {
		w, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		try(how+": map writable", err)
		if err == nil {
			defer unix.Munmap(w)
		}
		b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			did = append(did, how+": CANNOT map read-only: "+err.Error())
			return
		}
		defer unix.Munmap(b)
		try(how+": mprotect writable", unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE))
		try(how+": madvise remove", unix.Madvise(b, unix.MADV_REMOVE))
		_, err = unix.Pwrite(fd, []byte("x"), 0)
		try(how+": write", err)
		try(how+": shrink", unix.Ftruncate(fd, 4096))
		try(how+": grow", unix.Ftruncate(fd, 1<<30))
		try(how+": punch a hole", unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
		try(how+": zero a range", unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
		try(how+": add a seal", err)
	}
	assault("descriptor", fd)
	path := "/proc/self/fd/" + strconv.Itoa(fd)
	for _, flags := range []int{unix.O_RDWR, unix.O_RDWR | unix.O_TRUNC} {
		again, err := unix.Open(path, flags, 0)
		if err != nil {
			continue // refused already at the door
		}
		assault("re-opened", again)
		unix.Close(again)
	}
	if len(did) == 0 {
		return "nothing"
	}
	return strings.Join(did, ", ")
}

func mustNil(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: error %v, want %v", what, err, want)
	}
}

var canceled = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

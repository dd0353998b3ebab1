package bench

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// startDemo runs "kvtier demo" and returns it once its node listens, with the
// path of the node's socket.
func startDemo(t *testing.T, dir string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command(program(t), "demo", "--temp-dir", dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	socket := ""
	await(t, "the node of the demo listens", func() bool {
		found, err := filepath.Glob(filepath.Join(dir, "*", "kvtier.sock"))
		if err != nil || len(found) == 0 {
			return false
		}
		socket = found[0]
		return listens(socket)
	})
	return cmd, socket
}

func listens(socket string) bool {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// await looks for a condition of another process until it holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(time.Minute)
	for !holds() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("never: %s", what)
		}
	}
}

func TestDemoInterrupted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd, socket := startDemo(t, dir)
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("an interrupted demo ended with %v", err)
	}
	if listens(socket) {
		t.Error("its node lives on")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestDemoKilled kills the demo itself: the kernel ends its node.
func TestDemoKilled(t *testing.T) {
	t.Parallel()
	cmd, socket := startDemo(t, t.TempDir())
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("a killed demo ended well")
	}
	await(t, "the node ends with the demo", func() bool { return !listens(socket) })
}

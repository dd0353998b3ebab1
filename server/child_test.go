package server_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/server/servertest"
)

// childEnv makes this test binary an engine process: its value is what to do and
// the socket of the node.
const childEnv = "KVTIER_TEST_ENGINE"

func TestMain(m *testing.M) {
	if what := os.Getenv(childEnv); what != "" {
		if err := runChild(what); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const childPage = 64 << 10

// runNode serves a node with much RAM until its input ends.
func runNode(socket string) error {
	ctx, cancel := context.WithCancel(context.Background())
	cfg := server.Config{Socket: socket, HTTPListen: server.Off, RAMBytes: 256 << 20}
	s, err := server.Open(ctx, cfg, server.Options{Drivers: servertest.Drivers()})
	if err != nil {
		cancel()
		return err
	}
	go func() { // owner: this call; exits when the input ends
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return s.Serve(ctx)
}

// runChild attaches, does one thing, says "ready", and waits for a line before it
// checks what it holds.
func runChild(what string) error {
	mode, socket, _ := strings.Cut(what, " ")
	if mode == "node" {
		return runNode(socket)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Open(ctx, client.Config{Socket: socket, Engine: mode, StallTimeout: 5 * time.Second, MaxHold: time.Nanosecond})
	if err != nil {
		return err
	}
	defer c.Close()
	ns, err := c.RegisterNamespace(ctx, testNamespace(childPage, 1))
	if err != nil {
		return err
	}
	names := blockNames(0, 16)
	var lease *client.Lease
	var views []client.View
	switch mode {
	case "reading", "stopped":
		lease, err = c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: names, TTL: 100 * time.Millisecond})
		if err != nil {
			return err
		}
		for row := range lease.Rows {
			v, ok := lease.Page(row, 0)
			if !ok {
				return fmt.Errorf("row %d: %w", row, lease.Err())
			}
			views = append(views, v)
		}
	case "filling":
		a, err := c.Reserve(ctx, client.ReserveRequest{Namespace: ns, Names: blockNames(1000, 4)})
		if err != nil || a.Rows() != 4 {
			return fmt.Errorf("reserved %d rows: %w", a.Rows(), err)
		}
		fillPage(a.Page(0, 0), names[0], 0)
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	right, lost, wrong := 0, 0, 0
	for i, v := range views {
		same := bytes.Equal(v.Bytes(), wantPage(childPage, names[i], 0))
		switch err := v.Close(); {
		case errors.Is(err, paging.ErrLost):
			lost++
		case same && err == nil:
			right++
		default:
			wrong++
		}
	}
	fmt.Println("right", right, "lost", lost, "wrong", wrong)
	return nil
}

// child is an engine process.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (n testNode) child(t testing.TB, mode string) *child {
	t.Helper()
	return startChild(t, mode, n.Config.Socket)
}

func startChild(t testing.TB, mode, socket string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+mode+" "+socket)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line := c.line(t); line != "ready" {
		t.Fatalf("child %s says %q", mode, line)
	}
	return c
}

func (c *child) line(t testing.TB) string {
	t.Helper()
	s, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatalf("engine: %v", err)
	}
	return strings.TrimSpace(s)
}

func (c *child) signal(t testing.TB, s os.Signal) {
	t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// An engine that is killed while it reads, fills or has memory mapped leaves
// nothing behind within 2 s, and another one can do what it did.
func TestEngineKilled(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(childPage, 1)
	e.put(ns, blockNames(0, 16))
	base, maps := n.Metrics(), stagingMaps(t)
	for round := range rounds(t, 3) {
		for _, mode := range []string{"reading", "filling", "mapped"} {
			c := n.child(t, mode)
			held := n.Metrics()
			if mode == "reading" && held.Leases == 0 || mode == "filling" && held.Attempts == 0 || held.Attachments != 2 {
				t.Errorf("%s: %d leases, %d attempts, %d attachments before the kill", mode, held.Leases, held.Attempts, held.Attachments)
			}
			start := time.Now()
			c.signal(t, syscall.SIGKILL)
			eventually(t, mode+" leaves nothing", func() bool {
				m := n.Metrics()
				return m.Attachments == 1 && m.OrphanTethers == 0 && m.Leases == 0 && m.Attempts == 0 &&
					m.StagingBytes == base.StagingBytes && m.Hierarchy.LeasedBytes == 0 && m.Hierarchy.Attempts == 0
			})
			if d := time.Since(start); d > slack*2*time.Second {
				t.Errorf("round %d, %s: gone after %v", round, mode, d)
			}
		}
	}
	if got := stagingMaps(t); got != maps {
		t.Errorf("%d pieces of staging are mapped, before %d", got, maps)
	}
	if o := e.put(ns, blockNames(1000, 4)); !bytes.Equal(o, bytes.Repeat([]byte{committed}, 4)) {
		t.Errorf("the blocks that were being filled: %v", o)
	}
}

// stagingMaps counts the staging memory that this process has mapped.
func stagingMaps(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("kvtier-staging"))
}

// An engine that is stopped past its deadline under eviction pressure reads the
// right bytes when it goes on, or is told that they are lost.
func TestEngineStopped(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e := n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(childPage, 1)
	e.put(ns, blockNames(0, 16))
	c := n.child(t, "stopped")
	c.signal(t, syscall.SIGSTOP)
	eventually(t, "its lease is overdue", func() bool { return n.Metrics().OverdueLeases == 1 })
	fill(t, e, ns, childPage, 64<<20)
	if m := n.Metrics(); m.Leases != 1 || m.Hierarchy.EvictedBlocks == 0 {
		t.Errorf("%d leases, %d blocks evicted: want its lease kept under pressure", m.Leases, m.Hierarchy.EvictedBlocks)
	}
	c.signal(t, syscall.SIGCONT)
	fmt.Fprintln(c.in)
	if line := c.line(t); line != "right 16 lost 0 wrong 0" {
		t.Errorf("the engine says %q", line)
	}
	eventually(t, "its lease ends", func() bool { return n.Metrics().Leases == 0 })
}

// If a quarantine is ended although somebody still reads, the slots may be
// reused, and every reader of one that was finds its generation raised.
func TestReaderOfAReusedSlotFindsOut(t *testing.T) {
	n := startNode(t, servertest.Config(t))
	e, other := n.raw(t, "", &kvtierv1.Hello{}), n.raw(t, "", &kvtierv1.Hello{})
	ns := e.register(childPage, 1)
	names := blockNames(0, 16)
	e.put(ns, names)
	slots := e.slots(e.fetch(ns, names, time.Minute).GetSlots())
	e.at(slots[0])
	n.raw(t, "", &kvtierv1.Hello{PreviousAttachment: e.id}) // not true
	eventually(t, "the lease ends", func() bool { return n.Metrics().Leases == 0 })
	fill(t, other, ns, childPage, 64<<20)
	lost := 0
	for i, s := range slots {
		right := bytes.Equal(e.at(s), wantPage(childPage, names[i], 0))
		same := shm.Of(e.map1(uint32(s.Extent)).Bytes()).Load(s.Offset) == s.Generation
		if !same {
			lost++
		} else if !right {
			t.Errorf("page %d: other bytes under the same generation", i)
		}
	}
	if lost == 0 {
		t.Error("no slot was reused: the test shows nothing")
	}
}

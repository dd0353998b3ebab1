package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// testNet is a network of its own for each node: a namespace with one interface,
// whose other end is a port of a bridge in one more namespace. What happens there
// is seen by nobody else on this machine.
type testNet struct {
	prefix string
	t      testing.TB
}

// newTestNet makes the network of some nodes. nil, and why: it is not permitted here.
func newTestNet(t testing.TB, nodes int) (*testNet, error) {
	n := &testNet{prefix: fmt.Sprintf("kvt%d", os.Getpid()), t: t}
	if text, err := exec.Command("ip", "netns", "add", n.hub()).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w %s", err, text)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", n.hub()).Run() })
	n.ip(n.hub(), "link add br0 type bridge")
	n.ip(n.hub(), "link set br0 up")
	n.ip(n.hub(), "address add 10.77.0.254/24 dev br0")
	for i := range nodes {
		if text, err := exec.Command("ip", "netns", "add", n.space(i)).CombinedOutput(); err != nil {
			t.Fatalf("%v %s", err, text)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", n.space(i)).Run() })
		n.ip(n.hub(), "link add %s type veth peer name eth0 netns %s", n.port(i), n.space(i))
		n.ip(n.hub(), "link set %s master br0 up", n.port(i))
		n.ip(n.space(i), "link set lo up")
		n.ip(n.space(i), "link set eth0 up")
		n.ip(n.space(i), "address add %s/24 dev eth0", n.address(i))
	}
	return n, nil
}

func (n *testNet) hub() string            { return n.prefix + "hub" }
func (n *testNet) space(i int) string     { return fmt.Sprintf("%sn%d", n.prefix, i) }
func (n *testNet) port(i int) string      { return fmt.Sprintf("port%d", i) }
func (n *testNet) address(i int) string   { return fmt.Sprintf("10.77.0.%d", i+1) }
func (n *testNet) elsewhere(i int) string { return fmt.Sprintf("10.77.0.%d", i+101) }

// ip runs "ip" in a namespace.
func (n *testNet) ip(space, format string, args ...any) {
	n.t.Helper()
	n.run(space, "ip "+fmt.Sprintf(format, args...))
}

// tc runs "tc" where the bridge is: what a port sends is what its node receives.
func (n *testNet) tc(format string, args ...any) {
	n.t.Helper()
	n.run(n.hub(), "tc "+fmt.Sprintf(format, args...))
}

func (n *testNet) run(space, command string) {
	n.t.Helper()
	args := append([]string{"netns", "exec", space}, strings.Fields(command)...)
	if text, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.t.Fatalf("%s: %v %s", command, err, text)
	}
}

// program is a program that runs another in the namespace of a node, as the same
// process.
func (n *testNet) program(i int, program, dir string) string {
	return n.programIn(n.space(i), program, dir)
}

func (n *testNet) programIn(space, program, dir string) string {
	n.t.Helper()
	path := filepath.Join(dir, "in-"+space)
	text := fmt.Sprintf("#!/bin/sh\nexec ip netns exec %s %s \"$@\"\n", space, program)
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		n.t.Fatal(err)
	}
	return path
}

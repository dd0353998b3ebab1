package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"
)

// faultCluster is three daemons on addresses of their own under a load that never
// ends by itself.
type faultCluster struct {
	*clusterRun
	t    *testing.T
	net  *testNet // nil: not permitted, the nodes are on addresses of the loopback
	stop atomic.Bool
	load sync.WaitGroup
}

const faultNodes = 3

// loadEvery is the time between two requests of one node's engine.
const loadEvery = 20 * time.Millisecond

// startFaultCluster starts the nodes, and the load when they are one cluster.
// prepare may change where node i keeps its data.
func startFaultCluster(t *testing.T, prepare func(i int, dir string)) *faultCluster {
	t.Helper()
	trace, err := OpenTrace(ShortTrace)
	if err != nil {
		t.Fatal(err)
	}
	c := &faultCluster{t: t, clusterRun: &clusterRun{ledger: newLedger(), fleet: &fleet{}, cfg: &clusterConfig{
		trace: trace, requests: len(trace.Requests), blockBytes: 16 << 10, blockTokens: DefaultBlockTokens, nodes: faultNodes, seed: 1,
		node: NodeConfig{Program: program(t), RAM: 32 << 20, NVMe: 192 << 20, Args: []string{"--http-listen", "off", "--insecure"}},
	}}}
	if c.net, err = newTestNet(t, faultNodes); err != nil {
		t.Logf("no network namespaces here (%v): the nodes are on 127.0.0.x, and only processes fail", err)
	}
	dir := clusterTempDir(t)
	for i := range faultNodes {
		at := filepath.Join(dir, nodeName(i))
		if err := os.Mkdir(at, 0o700); err != nil {
			t.Fatal(err)
		}
		if prepare != nil {
			prepare(i, at)
		}
	}
	t.Cleanup(c.close)
	for i := range faultNodes {
		cfg := c.cfg.node
		cfg.Dir = filepath.Join(dir, nodeName(i))
		at := fmt.Sprintf("127.0.0.%d", i+11)
		if c.net != nil {
			at = c.net.address(i)
			cfg.Program = c.net.program(i, cfg.Program, dir)
		}
		cfg.Args = append(slices.Clone(cfg.Args), c.addresses(i, at)...)
		n, err := startNode(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		c.fleet.nodes = append(c.fleet.nodes, n)
	}
	if err := c.openEngines(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.fleet.settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.begin()
	return c
}

// Ports of the nodes, outside of the range that the system gives away.
const faultPeers, faultGossip = 27441, 27442

func (c *faultCluster) addresses(i int, at string) []string {
	args := []string{"--name", nodeName(i), "--peer-listen", fmt.Sprintf("%s:%d", at, faultPeers), "--gossip-listen", fmt.Sprintf("%s:%d", at, faultGossip)}
	if i == 0 {
		return append(args, "--bootstrap")
	}
	return append(args, "--join", c.fleet.nodes[0].daemon.Ready("peers"))
}

// begin plays requests of the trace on each node, in random order.
func (c *faultCluster) begin() {
	for i, e := range c.engines {
		c.load.Go(func() { // owner: the test; ends with close; one for each node
			random := rand.New(rand.NewPCG(c.cfg.seed, uint64(i)))
			tick := time.NewTicker(loadEvery)
			defer tick.Stop()
			for !c.stop.Load() {
				<-tick.C
				e.play(context.Background(), c.fleet.nodes[i], c.cfg.trace.chain(random.IntN(c.cfg.requests), c.cfg.blockTokens, 0))
			}
		})
	}
}

func (c *faultCluster) close() {
	c.stop.Store(true)
	c.load.Wait()
	c.closeEngines()
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	if err := c.fleet.close(ctx); err != nil {
		c.t.Errorf("stop: %v", err)
	}
}

// leader is the node that leads now.
func (c *faultCluster) leader() int {
	c.t.Helper()
	leader, err := c.fleet.leader(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	return leader
}

// fault is one thing that goes wrong and is mended again.
type fault struct {
	name    string
	short   bool // part of every run of the tests
	network bool // needs namespaces
	down    bool // a node is down meanwhile, and its requests are refused
	// do makes the fault and mends it. It tells how long ownership could not change,
	// and from the mending on how long until all is as before.
	do func(c *faultCluster) (resumed, mended time.Duration)
}

func faults() []fault {
	return []fault{
		{"SIGKILL of the leader", true, false, true, func(c *faultCluster) (resumed, mended time.Duration) { return c.kill(killLeader) }},
		{"SIGKILL of a follower", false, false, true, func(c *faultCluster) (resumed, mended time.Duration) { return c.kill(killOther) }},
		{"SIGSTOP of the leader for 10 s", false, false, true, (*faultCluster).freeze},
		{"link of the leader cut", true, true, false, func(c *faultCluster) (resumed, mended time.Duration) {
			port := c.net.port(c.leader())
			return c.apart(func() { c.net.ip(c.net.hub(), "link set %s down", port) }, func() { c.net.ip(c.net.hub(), "link set %s up", port) })
		}},
		{"the leader hears nothing", true, true, false, func(c *faultCluster) (resumed, mended time.Duration) {
			port := c.net.port(c.leader())
			return c.apart(func() { c.net.tc("qdisc add dev %s root blackhole", port) }, func() { c.net.tc("qdisc del dev %s root", port) })
		}},
		{"link of the leader at 20 Mbit/s", false, true, false, func(c *faultCluster) (resumed, mended time.Duration) {
			port := c.net.port(c.leader())
			return c.apart(func() { c.net.tc("qdisc add dev %s root tbf rate 20mbit burst 64kb latency 200ms", port) }, func() { c.net.tc("qdisc del dev %s root", port) })
		}},
		{"restart with another address", false, true, true, (*faultCluster).move},
		{"random bytes into every port", true, true, false, (*faultCluster).noise},
		{"a node of another cluster joins", false, true, false, (*faultCluster).stranger},
	}
}

// check fails the test, but lets the load end first.
func (c *faultCluster) check(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func ms(f float64) time.Duration { return time.Duration(f * float64(time.Millisecond)) }

func (c *faultCluster) kill(k killed) (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), k)
	c.check(err)
	c.fleet.nodes[o.victim].fall()
	c.check(c.endure(c.t.Context(), o))
	last := c.outages[len(c.outages)-1]
	return ms(last.OwnershipMS), ms(last.FoundMS)
}

// others tells how long ownership does not change beside the victim.
func (c *faultCluster) others(victim int) time.Duration {
	start := time.Now()
	ctx, cancel := context.WithTimeout(c.t.Context(), recoverWithin)
	defer cancel()
	c.check(c.ownership(ctx, (victim+1)%faultNodes, (victim+2)%faultNodes))
	return time.Since(start)
}

// back tells how long it takes until others find what the victim has, and what it
// stores now.
func (c *faultCluster) back(victim int, o *outage) time.Duration {
	start := time.Now()
	ctx, cancel := context.WithTimeout(c.t.Context(), recoverWithin)
	defer cancel()
	c.check(c.find(ctx, (victim+1)%faultNodes, o.own))
	c.check(c.ownership(ctx, victim, (victim+2)%faultNodes))
	return time.Since(start)
}

// pause lets a fault last.
func (c *faultCluster) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.t.Context().Done():
	}
}

const (
	stoppedFor = 10 * time.Second
	apartFor   = 3 * time.Second
)

func (c *faultCluster) freeze() (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killLeader)
	c.check(err)
	n := c.fleet.nodes[o.victim]
	n.fall()
	start, pid := time.Now(), n.daemon.PID()
	c.check(syscall.Kill(pid, syscall.SIGSTOP))
	resumed = c.others(o.victim)
	c.pause(stoppedFor - time.Since(start))
	c.check(syscall.Kill(pid, syscall.SIGCONT))
	again := time.Now()
	c.check(ready(c.t.Context(), c.engines[o.victim], c.namespace()))
	c.back(o.victim, o)
	n.recovered()
	return resumed, time.Since(again)
}

// apart breaks the link of the leader. Nobody is down: no request may be refused.
func (c *faultCluster) apart(cut, heal func()) (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killLeader)
	c.check(err)
	cut()
	resumed = c.others(o.victim)
	c.pause(apartFor)
	heal()
	return resumed, c.back(o.victim, o)
}

// move restarts a follower under an address that nobody knows.
func (c *faultCluster) move() (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killOther)
	c.check(err)
	v := o.victim
	n := c.fleet.nodes[v]
	n.fall()
	n.cfg.Args = append(n.cfg.Args, c.addresses(v, c.net.elsewhere(v))[:6]...)
	start := time.Now()
	c.check(n.crash(c.t.Context(), func() error {
		c.net.ip(c.net.space(v), "address del %s/24 dev eth0", c.net.address(v))
		c.net.ip(c.net.space(v), "address add %s/24 dev eth0", c.net.elsewhere(v))
		return nil
	}))
	c.check(ready(c.t.Context(), c.engines[v], c.namespace()))
	c.back(v, o)
	n.recovered()
	return 0, time.Since(start)
}

// noise sends random bytes to every port that other nodes use.
func (c *faultCluster) noise() (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killLeader)
	c.check(err)
	for _, n := range c.fleet.nodes {
		for _, what := range []string{"peers", "gossip"} {
			host, port, _ := strings.Cut(n.daemon.Ready(what), ":")
			script := filepath.Join(n.cfg.Dir, "noise")
			text := fmt.Sprintf("for i in 1 2 3 4 5 6 7 8; do head -c 20000 /dev/urandom >/dev/tcp/%s/%s; head -c 1000 /dev/urandom >/dev/udp/%s/%s; done 2>/dev/null\ntrue\n", host, port, host, port)
			c.check(os.WriteFile(script, []byte(text), 0o600))
			c.net.run(c.net.hub(), "bash "+script)
		}
	}
	return c.others(o.victim), c.back(o.victim, o)
}

// stranger starts a node of another cluster that is told to join this one.
func (c *faultCluster) stranger() (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killLeader)
	c.check(err)
	cfg := c.cfg.node
	cfg.Dir = clusterTempDir(c.t)
	cfg.Program = c.net.programIn(c.net.hub(), program(c.t), cfg.Dir)
	cfg.Args = append(slices.Clone(cfg.Args), "--name", "stranger",
		"--peer-listen", fmt.Sprintf("10.77.0.254:%d", faultPeers), "--gossip-listen", fmt.Sprintf("10.77.0.254:%d", faultGossip))
	for _, args := range [][]string{{"--bootstrap"}, {"--join", c.fleet.nodes[0].daemon.Ready("peers")}} {
		again := cfg
		again.Args = append(slices.Clone(cfg.Args), args...)
		d, err := StartDaemon(c.t.Context(), again)
		c.check(err)
		c.pause(apartFor)
		s, err := c.fleet.status(c.t.Context(), o.victim)
		c.check(err)
		if s.Cluster.Nodes != faultNodes || s.Cluster.NodesSeen != faultNodes {
			c.t.Errorf("a node of another cluster is seen: %+v", s.Cluster)
		}
		c.check(d.Kill())
	}
	return c.others(o.victim), c.back(o.victim, o)
}

// TestFaultsOfRealNodes makes each fault happen to daemons in network namespaces
// under load: no request fails that was not asked of a node that is down, no page is
// wrong, and all is as before within a bound. All of them run in make torture.
func TestFaultsOfRealNodes(t *testing.T) {
	startFaultCluster(t, nil).run(faults())
}

// run makes the faults, one after the other, and prints what each cost.
func (c *faultCluster) run(all []fault) {
	t := c.t
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "fault\trequests\tunavailable\tfailed\twrong pages\townership resumed\tall as before")
	for _, f := range all {
		if f.network && c.net == nil || !f.short && os.Getenv("KVTIER_TORTURE") == "" {
			continue
		}
		served, unavailable, failed, wrong := c.tally.served.Load(), c.tally.unavailable.Load(), c.tally.failed.Load(), c.tally.wrong.Load()
		resumed, mended := f.do(c)
		if err := c.fleet.settle(t.Context()); err != nil {
			t.Fatalf("after %s: %v", f.name, err)
		}
		unavailable, failed, wrong = c.tally.unavailable.Load()-unavailable, c.tally.failed.Load()-failed, c.tally.wrong.Load()-wrong
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%.2f s\t%.2f s\n", f.name, c.tally.served.Load()-served, unavailable, failed, wrong, resumed.Seconds(), mended.Seconds())
		if failed != 0 || wrong != 0 || c.lostDurable != 0 {
			t.Errorf("%s: %d requests failed, %d pages wrong, %d durable blocks lost: %v", f.name, failed, wrong, c.lostDurable, c.tally.errors())
		}
		if !f.down && unavailable != 0 {
			t.Errorf("%s: %d requests were refused although no node was down", f.name, unavailable)
		}
	}
	w.Flush()
	t.Logf("\n%s", &table)
}

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// stopWithin bounds the graceful stop at the end of a workload.
const stopWithin = 40 * time.Second

// node is the daemon under test together with what the clients of a workload
// must know to judge an error: whether it was down meanwhile. Safe for
// concurrent use.
type node struct {
	cfg NodeConfig

	mu     sync.Mutex
	daemon *Daemon
	down   bool
	outage int           // number of outages so far
	up     chan struct{} // closed while the node is up
	worst  time.Duration // longest outage, kill to ready
}

func startNode(ctx context.Context, cfg NodeConfig) (*node, error) {
	d, err := StartDaemon(ctx, cfg)
	if err != nil {
		return nil, err
	}
	n := &node{cfg: cfg, daemon: d, up: make(chan struct{})}
	close(n.up)
	return n, nil
}

// mark is a moment that wasDown compares with.
type mark struct {
	outage int
	down   bool
}

func (n *node) mark() mark {
	n.mu.Lock()
	defer n.mu.Unlock()
	return mark{n.outage, n.down}
}

// wasDown reports whether the node was down at any time since m.
func (n *node) wasDown(m mark) bool {
	now := n.mark()
	return m.down || now.down || now.outage != m.outage
}

// awaitUp waits until the node is up.
func (n *node) awaitUp(ctx context.Context) error {
	n.mu.Lock()
	up := n.up
	n.mu.Unlock()
	select {
	case <-up:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fall begins an outage: from now on nobody is to ask the node. The caller goes
// on with crash and recovered.
func (n *node) fall() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down, n.outage, n.up = true, n.outage+1, make(chan struct{})
}

// crash kills the process, calls between while it is down, and starts it again.
// When it returns without error the process is ready, but the node counts as
// down until recovered is called: clients have to find it again.
func (n *node) crash(ctx context.Context, between func() error) error {
	n.mu.Lock()
	d := n.daemon
	n.mu.Unlock()
	start := time.Now()
	if err := d.Kill(); err != nil {
		return fmt.Errorf("kill the node: %w", err)
	}
	if between != nil {
		if err := between(); err != nil {
			return err
		}
	}
	again, err := StartDaemon(ctx, n.cfg)
	if err != nil {
		return fmt.Errorf("start the node again: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.daemon, n.worst = again, max(n.worst, time.Since(start))
	return nil
}

// recovered ends an outage.
func (n *node) recovered() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		n.down = false
		close(n.up)
	}
}

// close stops the process, by force if ctx has ended.
func (n *node) close(ctx context.Context) error {
	n.mu.Lock()
	d := n.daemon
	n.mu.Unlock()
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), d.Kill())
	}
	ctx, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	return d.Stop(ctx)
}

// loadedCounter counts the bytes of pages that a node read from its disk.
const loadedCounter = "kvtier_tier_loaded_bytes_total"

// sumOfCounters asks the node on socket for its counters and adds up those named.
func sumOfCounters(ctx context.Context, socket string, names ...string) (int64, error) {
	admin, err := client.OpenAdmin(client.Config{Socket: socket})
	if err != nil {
		return 0, err
	}
	defer admin.Close() //nolint:errcheck // only asked
	status, err := admin.Status(ctx)
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, name := range names {
		n, ok := status.Counters[name]
		if !ok {
			return 0, fmt.Errorf("the node has no counter %s: %w", name, paging.ErrNotFound)
		}
		sum += int64(n)
	}
	return sum, nil
}

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
)

// fleet is daemons on this machine: the nodes of one cluster, or as many that know
// nothing of each other. Not safe for concurrent use; its nodes are.
type fleet struct {
	nodes []*node
}

// startFleet starts nodes in directories of their own under dir; the first one of a
// cluster is there before the others join it. cfg.Dir is set for each.
func startFleet(ctx context.Context, cfg NodeConfig, dir string, size int, alone bool) (_ *fleet, err error) {
	f := &fleet{}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close(ctx))
		}
	}()
	first := ""
	for i := range size {
		c := cfg
		c.Dir = filepath.Join(dir, nodeName(i))
		if err := os.Mkdir(c.Dir, 0o700); err != nil {
			return nil, fmt.Errorf("directory of a node: %w", err)
		}
		c.Args = slices.Clone(cfg.Args)
		if !alone {
			c.Args = append(c.Args, memberArgs(i, first)...)
		}
		n, err := startNode(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("node %d: %w", i+1, err)
		}
		f.nodes = append(f.nodes, n)
		if alone {
			continue
		}
		at := n.daemon.Ready("peers")
		// Its ports stay over restarts, as those of a service do.
		n.cfg.Args = append(n.cfg.Args, "--peer-listen", at, "--gossip-listen", n.daemon.Ready("gossip"))
		if i == 0 {
			first = at
		}
	}
	return f, nil
}

// nodeName is the name of node i for people.
func nodeName(i int) string { return fmt.Sprintf("n%d", i+1) }

// memberArgs makes node i one of a cluster whose first node is at first.
func memberArgs(i int, first string) []string {
	args := []string{"--name", nodeName(i), "--peer-listen", "127.0.0.1:0", "--gossip-listen", "127.0.0.1:0"}
	if i == 0 {
		return append(args, "--bootstrap")
	}
	return append(args, "--join", first)
}

// close stops all nodes at once, by force if ctx has ended.
func (f *fleet) close(ctx context.Context) error {
	errs := make([]error, len(f.nodes))
	var all sync.WaitGroup
	for i, n := range f.nodes {
		all.Go(func() { errs[i] = n.close(ctx) }) // owner: close; ends with the process
	}
	all.Wait()
	return errors.Join(errs...)
}

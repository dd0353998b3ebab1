package directory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Peers is what the directory needs of the rest of the node: connections and
// what gossip knows. Its methods are safe for concurrent use.
type Peers interface {
	// Accept returns the next connection of another replica. It ends with an
	// error when ctx does.
	Accept(ctx context.Context) (net.Conn, error)
	// Dial connects to the replica of a node, wherever it is now.
	Dial(ctx context.Context, node placement.NodeID) (net.Conn, error)
	// Forward gives a command to another node's Propose and returns its answer.
	Forward(ctx context.Context, leader placement.NodeID, command []byte) (Result, error)
	// Members are the nodes that gossip sees at present, this one included.
	Members() []placement.Member
}

// Config of a Directory. Zero values mean the documented default.
type Config struct {
	ID        placement.NodeID
	Dir       string // log and snapshots; created if it does not exist
	Peers     Peers
	Bootstrap bool  // this node is the first voter of a new cluster, if Dir is empty
	MaxClaims int64 // claim budget; 0: 16 M (about 800 MiB)

	// Memory keeps what else is kept in Dir, for clusters inside one process. nil: Dir.
	Memory *Memory
	// Clock tells the time of the commands that this node commits. nil: time.Now.
	Clock func() time.Time

	// Heartbeat is the time without a heartbeat after which a follower stands for
	// election, and the election timeout. 0: 250 ms: a dead leader is replaced in
	// about twice that.
	Heartbeat time.Duration
	// StallAfter is the time after which a call of the log store, or a commit, that
	// has not ended makes a leader step aside. 0: 2 s.
	StallAfter time.Duration
	// ReplaceAfter is the time a voter must be out of sight before another node
	// takes its vote. 0: 10 s.
	ReplaceAfter time.Duration

	Logger *slog.Logger // state changes only; nil: none

	openStores func(dir string) (*stores, error) // for tests
}

// DefaultMaxClaims is the claim budget where none is configured: about 800 MiB.
const DefaultMaxClaims = 16 << 20

func (c Config) withDefaults() (Config, error) {
	var problems []error
	if c.ID == (placement.NodeID{}) {
		problems = append(problems, errors.New("no ID"))
	}
	if c.Dir == "" && c.Memory == nil {
		problems = append(problems, errors.New("no Dir"))
	}
	if c.Peers == nil {
		problems = append(problems, errors.New("no Peers"))
	}
	if c.MaxClaims < 0 || c.Heartbeat < 0 || c.StallAfter < 0 || c.ReplaceAfter < 0 {
		problems = append(problems, errors.New("a bound or time is negative"))
	}
	if len(problems) > 0 {
		return c, fmt.Errorf("directory: %w: %w", paging.ErrInvalid, errors.Join(problems...))
	}
	if c.MaxClaims == 0 {
		c.MaxClaims = DefaultMaxClaims
	}
	if c.Heartbeat == 0 {
		c.Heartbeat = 250 * time.Millisecond
	}
	if c.StallAfter == 0 {
		c.StallAfter = 2 * time.Second
	}
	if c.ReplaceAfter == 0 {
		c.ReplaceAfter = 10 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.openStores == nil && c.Memory != nil {
		c.openStores = func(string) (*stores, error) { return c.Memory.stores(), nil }
	}
	if c.openStores == nil {
		c.openStores = openStores
	}
	return c, nil
}

// stores are where Raft keeps its log, its term and its snapshots.
type stores struct {
	log       raft.LogStore
	stable    raft.StableStore
	snapshots raft.SnapshotStore
	close     func() error
}

// retainedSnapshots is the number of snapshots kept: the last, and the one
// before it in case the last cannot be read.
const retainedSnapshots = 2

func openStores(dir string) (*stores, error) {
	if err := os.MkdirAll(filepath.Join(dir, "log"), 0o700); err != nil {
		return nil, fmt.Errorf("directory log: %w", err)
	}
	// The log does not close the store of its metadata, which is locked: a replica
	// that is restarted in one process would wait for it for ever.
	meta := &metadb.BoltMetaDB{}
	at := filepath.Join(dir, "log")
	log, err := wal.Open(at, wal.WithMetaStore(meta), wal.WithSegmentFiler(openSegments(at)))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("directory log in %s: %w", dir, err), meta.Close())
	}
	done := func() error { return errors.Join(log.Close(), meta.Close()) }
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(dir, retainedSnapshots, hclog.NewNullLogger())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("directory snapshots in %s: %w", dir, err), done())
	}
	return &stores{log: log, stable: log, snapshots: snapshots, close: done}, nil
}

// Raft's own limits. BatchApplyCh is worth 14 times as many entries a second.
// RPCs are not pipelined: with an unbuffered pipeline a follower that refuses one
// append can stay behind until the leader restarts (hashicorp/raft#612), and
// batches of entries make up for it.
const (
	maxAppendEntries = 512
	rpcsInFlight     = 1
	rpcTimeout       = 5 * time.Second
	connPool         = 2
	trailingLogs     = 4096
	snapshotEntries  = 16384
	snapshotEvery    = 30 * time.Second
	// A follower learns that an entry is committed with the next message, which an
	// idle leader sends after one to two of these: a claim is seen everywhere within
	// about 45 ms.
	commitTimeout = 20 * time.Millisecond
)

func (c *Config) raft() *raft.Config {
	rc := raft.DefaultConfig()
	rc.LocalID = serverID(c.ID)
	rc.HeartbeatTimeout = c.Heartbeat
	rc.ElectionTimeout = c.Heartbeat
	rc.LeaderLeaseTimeout = c.Heartbeat * 4 / 5
	rc.CommitTimeout = commitTimeout
	rc.MaxAppendEntries = maxAppendEntries
	rc.BatchApplyCh = true
	rc.ShutdownOnRemove = false
	rc.TrailingLogs = trailingLogs
	rc.SnapshotThreshold = snapshotEntries
	rc.SnapshotInterval = snapshotEvery
	rc.NoLegacyTelemetry = true
	rc.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Error, Output: logWriter{c.Logger}, DisableTime: true})
	return rc
}

// logWriter turns Raft's lines into records.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(line []byte) (int, error) {
	w.log.Warn("raft", "line", string(line))
	return len(line), nil
}

func serverID(id placement.NodeID) raft.ServerID { return raft.ServerID(id.String()) }

func nodeOf(id raft.ServerID) (placement.NodeID, error) { return placement.ParseNodeID(string(id)) }

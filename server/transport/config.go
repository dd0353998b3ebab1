package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Config of a Transport. Zero values mean the documented default.
type Config struct {
	Mux    *Mux
	Source Source
	// Answer answers the Calls of other nodes. Its errors travel as their
	// sentinels. nil: calls are refused. It runs on a goroutine of its own, at
	// most 64 at a time; ctx ends with the caller's patience.
	Answer func(ctx context.Context, from placement.NodeID, method uint8, argument []byte) ([]byte, error)

	PeerBytes  int64 // asked of one peer and not yet arrived. 0: 64 MiB
	TotalBytes int64 // asked of all peers and not yet arrived. 0: 256 MiB
	ServeBytes int64 // pinned here for others. 0: 256 MiB
	LoadBytes  int64 // buffers for pages that others get from disk. 0: 32 MiB; one page if that is longer
	BulkConns  int   // connections for page bytes per peer. 0: 1

	// IOTimeout is the time in which the other side must take a write of up to
	// 1 MiB, or finish a frame that it began. 0: 5 s.
	IOTimeout time.Duration
	// StallAfter is the time after which a peer that owes something and sends
	// nothing is given up. 0: 1.2 s, so that a broken peer is out of the choice
	// in 2 s.
	StallAfter time.Duration
	// IdleAfter is the time after which a connection that nothing uses is closed.
	// 0: 1 minute.
	IdleAfter time.Duration

	Logger *slog.Logger // state changes only; nil: none
}

// Bounds that are not configured.
const (
	loadWorkers   = 4               // reads from disk at a time: what a disk needs to be busy
	maxOpenLots   = 64              // requests of a bulk connection that have not ended
	maxCalls      = 64              // of other nodes at a time
	maxServeTime  = 2 * time.Minute // of one request
	maxPeers      = 256
	maxProbes     = 4 // at a time
	forgetPeer    = 5 * time.Minute
	maxOwners     = 64 // of one page that are considered
	maxFetchPages = paging.MaxCallPages
)

func (c Config) withDefaults() (Config, error) {
	var problems []error
	if c.Mux == nil {
		problems = append(problems, errors.New("Mux is nil"))
	}
	if c.Source == nil {
		problems = append(problems, errors.New("Source is nil"))
	}
	if c.PeerBytes < 0 || c.TotalBytes < 0 || c.ServeBytes < 0 || c.LoadBytes < 0 || c.BulkConns < 0 ||
		c.IOTimeout < 0 || c.StallAfter < 0 || c.IdleAfter < 0 {
		problems = append(problems, errors.New("a bound or time is negative"))
	}
	if len(problems) > 0 {
		return c, fmt.Errorf("transport: %w: %w", paging.ErrInvalid, errors.Join(problems...))
	}
	orDefault(&c.PeerBytes, 64<<20)
	orDefault(&c.TotalBytes, 256<<20)
	orDefault(&c.ServeBytes, 256<<20)
	orDefault(&c.LoadBytes, 32<<20)
	orDefault(&c.BulkConns, 1)
	orDefault(&c.IOTimeout, 5*time.Second)
	orDefault(&c.StallAfter, 1200*time.Millisecond)
	orDefault(&c.IdleAfter, time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Times that follow from StallAfter.

// beatEvery is how often a source that has nothing to send says that it lives.
func (c *Config) beatEvery() time.Duration { return c.StallAfter / 4 }

// pingEvery is how often a peer is asked whether it lives.
func (c *Config) pingEvery() time.Duration { return c.StallAfter / 3 }

// lookEvery is how often the prober looks.
func (c *Config) lookEvery() time.Duration { return c.StallAfter / 6 }

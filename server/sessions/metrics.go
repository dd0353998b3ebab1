package sessions

import (
	"sync/atomic"
	"time"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/migrate"
)

// Metrics is what a Manager has, and what it has counted since its start.
type Metrics struct {
	Known int // sessions in the directory
	Owned int // of them those of this node

	Appends        int64 // that were applied; those that added nothing are not counted
	AppendedBlocks int64
	TakenOver      int64 // from owners that were down
	LostBlocks     int64 // that had no name any more when a session was taken over

	// Moves of sessions of this node, by how they ended.
	MovesDone, MovesAborted, MovesSuperseded int64
	Moving                                   int           // that run, or wait for their turn
	MovedBytes                               int64         // sent by moves that ended
	Paused                                   time.Duration // that moves which were done refused appends for, in all
}

// counts are the counters of a Manager.
type counts struct {
	appends, appendedBlocks, takenOver, lostBlocks atomic.Int64
}

// Metrics reads the counters.
func (m *Manager) Metrics() Metrics {
	out := Metrics{
		Appends: m.counts.appends.Load(), AppendedBlocks: m.counts.appendedBlocks.Load(),
		TakenOver: m.counts.takenOver.Load(), LostBlocks: m.counts.lostBlocks.Load(),
	}
	m.moves.mu.Lock()
	e := m.moves.endings
	out.Moving = len(m.moves.running)
	m.moves.mu.Unlock()
	out.MovesDone, out.MovesAborted, out.MovesSuperseded, out.MovedBytes, out.Paused = e.done, e.aborted, e.superseded, e.bytes, e.paused
	if m.ready() != nil {
		return out
	}
	for shard := range directory.Shards { // one at a time: the replica is not held up
		m.directory().Read(func(s *directory.State) {
			out.Known = s.Sessions()
			s.SessionShard(shard, func(x *directory.Session) bool {
				if ownerOf(x) == m.cfg.Self {
					out.Owned++
				}
				return true
			})
		})
	}
	return out
}

// endings count how moves ended.
type endings struct {
	done, aborted, superseded, bytes int64
	paused                           time.Duration
}

func (e *endings) count(p *kvtierv1.MoveProgress) {
	switch p.GetState() {
	case migrate.Done.String():
		e.done++
		e.paused += p.GetPause().AsDuration()
	case migrate.Aborted.String():
		e.aborted++
	case migrate.Superseded.String():
		e.superseded++
	}
	e.bytes += int64(p.GetSentBytes())
}

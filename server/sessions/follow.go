package sessions

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/migrate"
	"github.com/kvtier/kvtier/server/placement"
)

// Times of what is looked after.
const (
	lookEvery      = 250 * time.Millisecond
	expireEvery    = 10 * time.Second
	sweepEvery     = 30 * time.Second
	sweepGrace     = time.Minute // names that were written so lately may be ahead of the record
	takeOverWithin = 10 * time.Second
	maxExpire      = 1024 // sessions in one command
	repairStep     = 64   // sessions whose second node is chosen anew in one go
	touchEvery     = time.Minute
)

// follow acts on each change of a session.
func (m *Manager) follow() {
	m.changed(nil, true, true)
	feed := m.directory().SessionFeed()
	for {
		names, all, err := feed.Next(m.ctx)
		if err != nil {
			return
		}
		m.changed(names, all, false)
	}
}

func (m *Manager) changed(names []string, all, start bool) {
	if all {
		names = names[:0]
		for shard := range directory.Shards {
			m.directory().Read(func(s *directory.State) {
				s.SessionShard(shard, func(x *directory.Session) bool {
					if x.GetState() != kvtierv1.SessionState_SESSION_STATE_ACTIVE && (ownerOf(x) == m.cfg.Self || targetOf(x) == m.cfg.Self) {
						names = append(names, x.GetSession())
					}
					return true
				})
			})
		}
		m.moves.recordedAll()
	}
	if all {
		names = append(names, m.noted()...)
	}
	for _, full := range names {
		m.changedOne(full, start)
	}
	m.noteChanged(names, all)
}

// noted are the sessions of which something is remembered here.
func (m *Manager) noted() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	names = slices.AppendSeq(names, maps.Keys(m.mu.incoming))
	names = slices.AppendSeq(names, maps.Keys(m.mu.outgoing))
	names = slices.AppendSeq(names, maps.Keys(m.mu.ahead))
	return slices.AppendSeq(names, maps.Keys(m.mu.live))
}

func targetOf(x *directory.Session) (id placement.NodeID) {
	copy(id[:], x.GetTarget())
	return id
}

func (m *Manager) changedOne(full string, start bool) {
	var x *directory.Session
	m.directory().Read(func(s *directory.State) { x, _ = s.Session(full) })
	moving := x != nil && x.GetState() != kvtierv1.SessionState_SESSION_STATE_ACTIVE
	m.mu.Lock()
	if a, ok := m.mu.ahead[full]; ok && (x == nil || x.GetEpoch() >= a.record.GetEpoch()) {
		delete(m.mu.ahead, full)
	}
	_, came := m.mu.incoming[full]
	if moving && targetOf(x) == m.cfg.Self {
		m.mu.incoming[full] = struct{}{}
	} else {
		delete(m.mu.incoming, full)
	}
	mine := x != nil && ownerOf(x) == m.cfg.Self
	if _, noted := m.mu.outgoing[full]; mine && moving && !noted {
		m.mu.outgoing[full] = time.Now()
	} else if !mine || !moving {
		delete(m.mu.outgoing, full)
	}
	m.mu.Unlock()
	if !mine {
		m.forget(full)
	}
	if came && mine {
		m.arrived(x)
	}
	if running := m.moves.recorded(full); start && mine && moving && !running {
		m.resume(x, true)
	}
}

// strayAfter is how long a session may be moving with nobody who drives it: for less, the
// replica may be behind a move that has ended.
const strayAfter = time.Second

// endStrays ends the moves that nobody drives.
func (m *Manager) endStrays(now time.Time) {
	m.mu.Lock()
	names := slices.Collect(maps.Keys(m.mu.outgoing))
	m.mu.Unlock()
	for _, full := range names {
		driven := m.moves.drives(full)
		m.mu.Lock()
		since, still := m.mu.outgoing[full]
		if still && driven {
			m.mu.outgoing[full] = now
		}
		m.mu.Unlock()
		if x := m.record(full); still && !driven && x != nil && now.Sub(since) >= strayAfter {
			m.resume(x, false)
		}
	}
}

// arrived has the blocks of a session that moved here kept as it says.
func (m *Manager) arrived(x *directory.Session) {
	names, err := m.cfg.Store.Names(x.GetSession(), x.GetEpoch())
	if err == nil {
		m.retain(x, names)
	}
}

// look does what is due by time.
func (m *Manager) look() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	begun := time.Now()
	expired, swept := begun, begun
	for {
		select {
		case <-m.ctx.Done():
			return
		case now := <-tick.C:
			m.takeOverIncoming()
			m.endStrays(now)
			if now.Sub(expired) >= expireEvery {
				expired = now
				m.shrinkLive()
				m.forgetAhead(now)
				if leader, ok := m.directory().Leader(); ok && leader == m.cfg.Self {
					m.expire()
				}
			}
			if now.Sub(swept) >= sweepEvery {
				swept = now
				m.sweep(now, begun)
				m.repair()
			}
		}
	}
}

func (m *Manager) forgetAhead(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for full, a := range m.mu.ahead {
		if now.Sub(a.at) > aheadAtMost {
			delete(m.mu.ahead, full)
		}
	}
}

// takeOverIncoming takes over sessions that were moving here from a node that is down:
// most of each is here.
func (m *Manager) takeOverIncoming() {
	m.mu.Lock()
	var names []string
	for full := range m.mu.incoming {
		names = append(names, full)
	}
	m.mu.Unlock()
	for _, full := range names {
		x := m.record(full)
		if x == nil || !migrate.TakesOver(toRecord(x), m.cfg.Self, !m.serves(ownerOf(x))) {
			continue
		}
		ctx, cancel := context.WithTimeout(m.ctx, takeOverWithin)
		if _, err := m.takeOver(ctx, x, nil); err != nil {
			m.log.Warn("a session that moved here from a node that is down is not taken over", "session", full, "err", err)
		}
		cancel()
	}
}

// expire has the directory forget the sessions whose time is over.
func (m *Manager) expire() {
	c := &kvtierv1.ExpireSessions{}
	for shard := range directory.Shards {
		m.directory().Read(func(s *directory.State) {
			now := s.NowMillis()
			s.SessionShard(shard, func(x *directory.Session) bool {
				ttl := x.GetRetention().GetTtlMs()
				if ttl > 0 && x.GetState() == kvtierv1.SessionState_SESSION_STATE_ACTIVE && now-x.GetUsedUnixMs() > int64(min(ttl, math.MaxInt64)) {
					c.Sessions, c.UsedUnixMs = append(c.Sessions, x.GetSession()), append(c.UsedUnixMs, x.GetUsedUnixMs())
				}
				return len(c.GetSessions()) < maxExpire
			})
		})
		if len(c.GetSessions()) >= maxExpire {
			break
		}
	}
	if len(c.GetSessions()) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(m.ctx, askWithin)
	defer cancel()
	if _, err := m.directory().Propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_ExpireSessions{ExpireSessions: c}}); err != nil && m.ctx.Err() == nil {
		m.log.Warn("sessions whose time is over are not forgotten yet", "sessions", len(c.GetSessions()), "err", err)
	}
}

// wrote notes that names of a session were written ahead of its record.
func (m *Manager) wrote(full string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.written[full] = time.Now()
}

// sweep forgets the names that nobody needs of this node.
func (m *Manager) sweep(now, begun time.Time) {
	m.mu.Lock()
	for full, at := range m.mu.written {
		if now.Sub(at) > sweepGrace {
			delete(m.mu.written, full)
		}
	}
	m.mu.Unlock()
	if now.Sub(begun) < sweepGrace {
		return // the replica may be far behind
	}
	drop := map[string]uint64{}
	err := m.cfg.Store.Each(func(full string, epoch uint64) {
		m.mu.Lock()
		_, fresh := m.mu.written[full]
		m.mu.Unlock()
		if fresh {
			return
		}
		x := m.record(full)
		switch {
		case x == nil:
			drop[full] = math.MaxUint64
		case m.keeps(x):
			if end := x.GetChain().GetBlocks(); epoch < x.GetEpoch() && (end == 0 || m.cfg.Store.has(full, x.GetEpoch(), end-1)) {
				drop[full] = x.GetEpoch()
			}
		case m.keptElsewhere(x):
			drop[full] = math.MaxUint64
		}
	})
	for full, before := range drop {
		err = errors.Join(err, m.cfg.Store.Drop(full, before))
	}
	if err != nil {
		m.log.Warn("names of sessions that nobody needs are not forgotten", "err", err)
	}
}

// keeps reports whether this node is one of those that keep a session's names.
func (m *Manager) keeps(x *directory.Session) bool {
	var second placement.NodeID
	copy(second[:], x.GetSecond())
	return ownerOf(x) == m.cfg.Self || second == m.cfg.Self || targetOf(x) == m.cfg.Self
}

// keptElsewhere reports whether two others keep the names of a session, so that those of
// a former owner are not needed.
func (m *Manager) keptElsewhere(x *directory.Session) bool {
	var second placement.NodeID
	return x.GetChain().GetBlocks() == 0 || copy(second[:], x.GetSecond()) > 0 && m.serves(second) && m.serves(ownerOf(x))
}

// repair has the names of this node's sessions kept by another node where the one that
// did is gone.
func (m *Manager) repair() {
	var all []string
	for shard := range directory.Shards {
		m.directory().Read(func(s *directory.State) {
			s.SessionShard(shard, func(x *directory.Session) bool {
				var second placement.NodeID
				copy(second[:], x.GetSecond())
				rec, ok := s.Node(second)
				gone := !ok || rec.State == kvtierv1.NodeState_NODE_STATE_DOWN || rec.State == kvtierv1.NodeState_NODE_STATE_LEFT
				if ownerOf(x) == m.cfg.Self && x.GetState() == kvtierv1.SessionState_SESSION_STATE_ACTIVE && x.GetChain().GetBlocks() > 0 && gone {
					all = append(all, x.GetSession())
				}
				return len(all) < repairStep
			})
		})
	}
	for _, full := range all {
		if m.chooseSecond(full, placement.NodeID{}) == (placement.NodeID{}) {
			return // there is no other node
		}
		ctx, cancel := context.WithTimeout(m.ctx, askWithin)
		err := m.again(ctx, full)
		cancel()
		if err != nil && !errors.Is(err, paging.ErrMoved) && !errors.Is(err, paging.ErrNotFound) && m.ctx.Err() == nil {
			m.log.Warn("the names of a session are kept by its owner alone", "session", full, "err", err)
		}
	}
}

// again appends nothing: the session counts as used, and its names are kept by the
// second node.
func (m *Manager) again(ctx context.Context, full string) error {
	_, l, release, err := m.own(ctx, full)
	if err != nil {
		return err
	}
	defer release()
	if err := m.settle(ctx, full, l); err != nil {
		return err
	}
	if err := m.keep(ctx, l, full, l.chain.End().Blocks); err != nil {
		return err
	}
	l.proposes(secondBytes(l))
	return m.settle(ctx, full, l)
}

// touch has a session that was hit count as used, now and then.
func (m *Manager) touch(x *directory.Session) {
	var idle time.Duration
	m.directory().Read(func(s *directory.State) { idle = millis(uint64(max(0, s.NowMillis()-x.GetUsedUnixMs()))) })
	if idle < min(touchEvery, millis(x.GetRetention().GetTtlMs())/4) {
		return
	}
	select {
	case m.touches <- struct{}{}:
	default:
		return // the next hit does it
	}
	full := x.GetSession()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx.Err() != nil {
		<-m.touches
		return
	}
	m.loops.Go(func() { // owner: the Manager; exits within askWithin; bound: maxTouches
		defer func() { <-m.touches }()
		ctx, cancel := context.WithTimeout(m.ctx, askWithin)
		defer cancel()
		_ = m.again(ctx, full) // the next hit tries again
	})
}

const maxTouches = 16

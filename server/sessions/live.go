package sessions

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
)

// hold locks what is in memory of a session of this node. release ends that.
func (m *Manager) hold(ctx context.Context, full string) (l *live, release func(), err error) {
	for {
		m.mu.Lock()
		if l = m.mu.live[full]; l == nil {
			l = &live{lock: make(chan struct{}, 1)}
			m.mu.live[full] = l
		}
		l.used = time.Now()
		m.mu.Unlock()
		select {
		case l.lock <- struct{}{}:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("session %q is in use: %w: %w", full, paging.ErrExpired, ctx.Err())
		}
		m.mu.Lock()
		same := m.mu.live[full] == l // else it was forgotten meanwhile
		m.mu.Unlock()
		if same {
			break
		}
		<-l.lock
	}
	return l, func() {
		m.mu.Lock()
		l.used, l.size = time.Now(), 0
		if l.chain != nil {
			l.size = int(l.chain.End().Blocks)
		}
		m.mu.Unlock()
		<-l.lock
	}, nil
}

// forget drops what is in memory of a session, unless somebody uses it just now.
func (m *Manager) forget(full string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.mu.live[full]
	if l == nil {
		return
	}
	select {
	case l.lock <- struct{}{}:
		delete(m.mu.live, full)
		<-l.lock
	default: // its user looks at the record, or the directory refuses what it does
	}
}

// load makes l what the record says, which this node owns. Requires l.lock. ErrLost: the
// names are nowhere any more.
func (m *Manager) load(ctx context.Context, l *live, x *directory.Session) error {
	if l.chain != nil && l.epoch == x.GetEpoch() && l.sequence >= x.GetSequence() {
		return nil
	}
	full, end := x.GetSession(), endOf(x.GetChain())
	kept, err := m.cfg.Store.Names(full, x.GetEpoch())
	if err != nil {
		return err
	}
	if paging.ProveSession(kept, end) < end.Blocks {
		var silent placement.NodeID
		if kept, silent, err = m.find(ctx, x); err != nil {
			return err
		}
		if uint64(len(kept)) < end.Blocks && silent != (placement.NodeID{}) {
			return m.mayHave(x, silent)
		}
		if uint64(len(kept)) < end.Blocks {
			_, name := splitName(full)
			return fmt.Errorf("the names of %d of %d blocks of session %q are lost with the nodes that kept them: open it again with the chain as its engine has it, or close it: %w",
				end.Blocks-uint64(len(kept)), end.Blocks, name, paging.ErrLost)
		}
		if err := m.cfg.Store.Put(full, x.GetEpoch(), 0, kept); err != nil {
			return err
		}
	}
	l.chain, l.epoch, l.sequence = paging.NewSessionChain(), x.GetEpoch(), x.GetSequence()
	l.unsure, l.second, l.kept, l.applied = nil, placement.NodeID{}, 0, end
	if at := l.chain.Append(kept[:end.Blocks], end.Tokens); at.Hash != end.Hash {
		l.chain = nil
		return fmt.Errorf("names of session %q: %w", full, paging.ErrCorrupt)
	}
	if more := kept[end.Blocks:]; len(more) > 0 && x.GetState() != kvtierv1.SessionState_SESSION_STATE_FROZEN {
		// They were proposed by this node, which then failed: they may have been applied,
		// or be yet, so they come next whatever else does.
		tokens, err := m.tokensOf(x, len(more))
		if err != nil {
			return err
		}
		l.chain.Append(more, tokens)
		l.proposes(nil)
	}
	return nil
}

// tokensOf is the tokens of so many more blocks of a session.
func (m *Manager) tokensOf(x *directory.Session, blocks int) (uint64, error) {
	ns, err := m.layout(namespaceOf(x))
	if err != nil {
		return 0, err
	}
	return uint64(blocks) * uint64(ns.Layout.BlockTokens), nil
}

// find returns the names of a session, as many as can be proved, from this node, those
// that are recorded to keep them, and any other: a former owner has them too. silent is a
// node that serves and did not answer, if not all were found: it may have the rest.
func (m *Manager) find(ctx context.Context, x *directory.Session) (names []paging.BlockName, silent placement.NodeID, err error) {
	end := endOf(x.GetChain())
	found, proven, err := m.cfg.Store.best(x.GetSession(), end)
	if err != nil {
		return nil, silent, err
	}
	asked := map[placement.NodeID]bool{m.cfg.Self: true, {}: true}
	for _, id := range m.keepers(x) {
		if proven == end.Blocks {
			break
		}
		if asked[id] || !m.serves(id) {
			continue
		}
		asked[id] = true
		more, err := m.fetchNames(ctx, id, x.GetSession(), 0, end.Blocks)
		if err != nil && !errors.Is(err, paging.ErrNotFound) {
			silent = id
			continue // another may have them
		}
		if n := paging.ProveSession(more, end); n > proven {
			found, proven = more[:n], n
		}
	}
	return found[:proven], silent, nil
}

// keepers are all nodes, those first that are recorded to keep the names of a session.
func (m *Manager) keepers(x *directory.Session) (ids []placement.NodeID) {
	for _, b := range [][]byte{x.GetOwner(), x.GetSecond(), x.GetTarget()} {
		var id placement.NodeID
		copy(id[:], b)
		ids = append(ids, id)
	}
	m.directory().Read(func(s *directory.State) {
		for _, n := range s.Nodes() {
			ids = append(ids, n.ID)
		}
	})
	return ids
}

// mayHave says that a node may have names which were found nowhere else.
func (m *Manager) mayHave(x *directory.Session, silent placement.NodeID) error {
	rec, _ := m.node(silent)
	_, name := splitName(x.GetSession())
	return fmt.Errorf("the names of blocks of session %q are to be had from node %s alone, if at all, and it does not answer: try again: %w", name, rec.Name, paging.ErrUnavailable)
}

// namesStep is how many names are sent in one call between nodes.
const namesStep = 16 << 10

// fetchNames asks another node for names of a session.
func (m *Manager) fetchNames(ctx context.Context, from placement.NodeID, full string, first, to uint64) (out []paging.BlockName, err error) {
	for first < to {
		ctx, cancel := context.WithTimeout(ctx, askWithin)
		var a kvtierv1.SessionNames
		err := m.call(ctx, from, methodNames, &kvtierv1.SessionNamesQuery{Session: full, FromBlock: first, ToBlock: min(to, first+namesStep)}, &a)
		cancel()
		if err != nil {
			return nil, err
		}
		some, err := unpackNames(a.GetBlockNames())
		if err != nil {
			return nil, err
		}
		if len(some) == 0 {
			return out, nil
		}
		out, first = append(out, some...), first+uint64(len(some))
	}
	return out, nil
}

// sendNames has another node keep names of a session from position first on.
func (m *Manager) sendNames(ctx context.Context, to placement.NodeID, full string, epoch, first uint64, names []paging.BlockName) error {
	for len(names) > 0 {
		n := min(len(names), namesStep)
		q := &kvtierv1.SessionNames{Session: full, Epoch: epoch, FirstBlock: first, BlockNames: packNames(names[:n])}
		if err := m.call(ctx, to, methodKeepNames, q, nil); err != nil {
			return err
		}
		first, names = first+uint64(n), names[n:]
	}
	return nil
}

// chooseSecond is the node that is to keep the names of a session beside this one: as
// long as it serves, the one that does already. The zero id: there is no other node.
func (m *Manager) chooseSecond(full string, now placement.NodeID) placement.NodeID {
	var nodes []directory.Node
	m.directory().Read(func(s *directory.State) { nodes = s.Nodes() })
	best, bestScore := placement.NodeID{}, uint64(0)
	for _, n := range nodes {
		if n.ID == m.cfg.Self || n.State != kvtierv1.NodeState_NODE_STATE_UP || !m.cluster.Reachable(n.ID) {
			continue
		}
		if n.ID == now {
			return now
		}
		h := fnv.New64a()
		_, _ = h.Write(n.ID[:])
		_, _ = h.Write([]byte(full))
		if score := h.Sum64(); best == (placement.NodeID{}) || score > bestScore {
			best, bestScore = n.ID, score
		}
	}
	return best
}

// keep writes the names of l from position first on to disk here and at the second
// node. That the second does not have them is no error: then nobody is named.
func (m *Manager) keep(ctx context.Context, l *live, full string, first uint64) error {
	end := l.chain.End()
	second := m.chooseSecond(full, l.second)
	if second != l.second {
		l.second, l.kept = second, 0
	}
	sent := make(chan error, 1)
	if second == (placement.NodeID{}) {
		sent <- nil
	} else {
		from := min(first, l.kept)
		names, err := l.chain.Names(from, end.Blocks)
		if err != nil {
			return err
		}
		names = slices.Clone(names)
		go func() { // owner: this call, which waits for it; exits within secondWithin
			ctx, cancel := context.WithTimeout(ctx, secondWithin)
			defer cancel()
			err := m.sendNames(ctx, second, full, l.epoch, from, names)
			if errors.Is(err, paging.ErrNotFound) && from > 0 { // it has not those before
				var all []paging.BlockName
				if all, err = l.chain.Names(0, end.Blocks); err == nil {
					err = m.sendNames(ctx, second, full, l.epoch, 0, all)
				}
			}
			sent <- err
		}()
	}
	names, err := l.chain.Names(first, end.Blocks)
	if err == nil {
		err = m.cfg.Store.Put(full, l.epoch, first, names)
	}
	if e := <-sent; e != nil {
		m.log.Warn("the second node does not keep the names of a session", "session", full, "node", second.Short(), "err", e)
		l.second, l.kept = placement.NodeID{}, 0
	} else {
		l.kept = end.Blocks
	}
	return err
}

// shrinkLive forgets the sessions in memory that were not used for longest, until the
// rest fits.
func (m *Manager) shrinkLive() {
	type entry struct {
		full string
		used time.Time
		size int
	}
	var all []entry
	total := 0
	m.mu.Lock()
	for full, l := range m.mu.live {
		all = append(all, entry{full, l.used, l.size})
		total += l.size + 1
	}
	m.mu.Unlock()
	if total <= maxLiveNames {
		return
	}
	slices.SortFunc(all, func(a, b entry) int { return cmp.Or(a.used.Compare(b.used), cmp.Compare(a.full, b.full)) })
	for _, e := range all {
		if total <= maxLiveNames/2 {
			return
		}
		m.forget(e.full)
		total -= e.size + 1
	}
}

// own returns the record of a session that this node owns, and l made so.
func (m *Manager) own(ctx context.Context, full string) (x *directory.Session, l *live, release func(), err error) {
	l, release, err = m.hold(ctx, full)
	if err != nil {
		return nil, nil, nil, err
	}
	x = m.record(full)
	mine := false
	switch {
	case x == nil:
		err = m.absent(full)
	case !bytes.Equal(x.GetOwner(), m.cfg.Self[:]):
		err = m.moved(x)
	default:
		mine = true
		err = m.load(ctx, l, x)
	}
	if err != nil {
		l.chain = nil
		release()
		if !mine {
			m.forget(full)
		}
		return nil, nil, nil, err
	}
	return x, l, release, nil
}

package sessions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/tier"
)

// Append says which blocks of a session come next; the tenant in r is whose it is. It
// returns once a quorum has it. Errors: paging.ErrFrozen and paging.ErrUnavailable (the
// engine keeps what it has, and tries again), paging.ErrMoved, paging.ErrNotFound,
// paging.ErrInvalid if the chain is another one or has a gap, paging.ErrLost.
func (m *Manager) Append(ctx context.Context, r *kvtierv1.AppendSessionRequest) (*kvtierv1.AppendSessionResponse, error) {
	full, names, err := m.named(r.GetTenant(), r.GetSession(), r.GetBlockNames())
	if err != nil {
		return nil, err
	}
	x, l, release, err := m.own(ctx, full)
	if err != nil {
		return nil, err
	}
	defer release()
	if r.GetEpoch() != 0 && r.GetEpoch() != l.epoch {
		return nil, m.moved(x)
	}
	if err := m.settle(ctx, full, l); err != nil {
		return nil, err
	}
	had := l.chain.End().Blocks
	fresh, err := overlap(l.chain, r.GetFirstBlock(), names)
	if err != nil {
		return nil, fmt.Errorf("session %q: %w", r.GetSession(), err)
	}
	if len(fresh) > 0 {
		if x.GetState() == kvtierv1.SessionState_SESSION_STATE_FROZEN {
			return nil, fmt.Errorf("session %q is being handed over: %w", r.GetSession(), paging.ErrFrozen)
		}
		tokens, err := m.tokensOf(x, len(fresh))
		if err != nil {
			return nil, err
		}
		l.chain.Append(fresh, tokens)
		if err := m.keep(ctx, l, full, had); err != nil {
			l.chain = nil // what is in memory is more than what is kept
			return nil, err
		}
		l.proposes(secondBytes(l))
		if err := m.settle(ctx, full, l); err != nil {
			return nil, err
		}
		m.counts.appends.Add(1)
		m.counts.appendedBlocks.Add(int64(len(fresh)))
		m.retain(x, fresh)
	}
	end := l.chain.End()
	return &kvtierv1.AppendSessionResponse{Blocks: end.Blocks, Tokens: end.Tokens, Epoch: l.epoch}, nil
}

// proposes notes what is to be proposed next: the chain as it is.
func (l *live) proposes(second []byte) {
	l.unsure = &kvtierv1.AppendSession{Sequence: l.sequence + 1, Chain: chainOf(l.chain.End()), Second: second}
	l.request = make([]byte, 16)
	_, _ = rand.Read(l.request) // never fails
}

func secondBytes(l *live) []byte {
	if l.kept == 0 || l.kept < l.chain.End().Blocks {
		return nil
	}
	return slices.Clone(l.second[:])
}

// named is the full name of a session and the names of blocks of a call.
func (m *Manager) named(tenant, session string, packed []byte) (full string, names []paging.BlockName, err error) {
	if err := m.ready(); err != nil {
		return "", nil, err
	}
	if full, err = fullName(tenant, session); err != nil {
		return "", nil, err
	}
	names, err = unpackNames(packed)
	return full, names, err
}

// overlap compares names from position first on with those of the chain and returns
// what comes after it.
func overlap(c *paging.SessionChain, first uint64, names []paging.BlockName) ([]paging.BlockName, error) {
	end := c.End().Blocks
	if first > end {
		return nil, fmt.Errorf("blocks from %d on, but it has %d: append from there: %w", first, end, paging.ErrInvalid)
	}
	known, err := c.Names(first, min(end, first+uint64(len(names))))
	if err != nil {
		return nil, err
	}
	for i := range known {
		if known[i] != names[i] {
			at := first + uint64(i)
			return nil, fmt.Errorf("block %d is %s, not %s: it is another conversation from there on: share the session up to %d blocks under another name, or close it first: %w",
				at, known[i].Short(), names[i].Short(), at, paging.ErrInvalid)
		}
	}
	return names[len(known):], nil
}

// settle proposes the append of which it is not known whether it was applied, if there
// is one, until that is known. Requires l.lock.
func (m *Manager) settle(ctx context.Context, full string, l *live) error {
	for l.unsure != nil {
		r, err := m.proposeAs(ctx, full, m.cfg.Self, l.epoch, l.request, &kvtierv1.SessionCommand{Change: &kvtierv1.SessionCommand_Append{Append: l.unsure}})
		switch {
		case err == nil:
			l.sequence, l.unsure, l.applied = l.unsure.GetSequence(), nil, l.chain.End()
			return nil
		case r == directory.Frozen:
			return errors.Join(err, m.takeBack(full, l))
		case r == directory.Invalid && errors.Is(err, paging.ErrUnavailable):
			return err // not known: it is proposed again before anything else
		case r == directory.Stale || r == directory.Gap:
			// Another sequence than was thought: by a process before this one.
			sequence := l.sequence
			x, waitErr := m.await(ctx, full, func(x *directory.Session) bool {
				return x == nil || x.GetEpoch() != l.epoch || x.GetSequence() > sequence
			})
			l.chain, l.unsure = nil, nil
			if waitErr != nil {
				return errors.Join(err, waitErr)
			}
			if x == nil || ownerOf(x) != m.cfg.Self || x.GetEpoch() != l.epoch {
				return err
			}
			if err := m.load(ctx, l, x); err != nil {
				return err
			}
		default:
			l.chain, l.unsure = nil, nil
			return err
		}
	}
	return nil
}

// takeBack forgets an append that was refused, here: what the second node has of it is
// replaced by the next one. Requires l.lock.
func (m *Manager) takeBack(full string, l *live) (err error) {
	l.unsure, l.kept = nil, min(l.kept, l.applied.Blocks)
	if l.chain, err = l.chain.Fork(l.applied.Blocks, l.applied.Tokens); err == nil {
		err = m.cfg.Store.Truncate(full, l.epoch, l.applied.Blocks)
	}
	if err != nil {
		l.chain = nil
	}
	return err
}

// retain has the blocks of a session kept as it says, where they are here.
func (m *Manager) retain(x *directory.Session, names []paging.BlockName) {
	r := x.GetRetention()
	if r.GetPriority() == 0 && r.GetTtlMs() == 0 {
		return
	}
	for step := range slices.Chunk(names, retainStep) {
		// A namespace that is gone from here has no blocks here.
		_, _ = m.tier.Retain(namespaceOf(x), step, retentionOf(r))
	}
}

const retainStep = 4096

func retentionOf(r *kvtierv1.RetainSession) tier.Retention {
	return tier.Retention{Priority: uint8(r.GetPriority()), TTL: millis(r.GetTtlMs()), RefreshOnHit: r.GetRefresh()}
}

package sessions

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// info is a session for those who ask.
func (m *Manager) info(x *directory.Session) *kvtierv1.SessionInfo {
	tenant, name := splitName(x.GetSession())
	_, parent := splitName(x.GetParent())
	i := &kvtierv1.SessionInfo{
		Session: name, Tenant: tenant, NamespaceId: x.GetNamespaceId(), Owner: x.GetOwner(), Epoch: x.GetEpoch(), State: x.GetState(), Target: x.GetTarget(),
		Blocks: x.GetChain().GetBlocks(), Tokens: x.GetChain().GetTokens(), Retention: fromRetain(x.GetRetention()),
		Opened: timestamppb.New(time.UnixMilli(x.GetOpenedUnixMs())), Parent: parent, Moves: x.GetMoves(),
	}
	if ns, err := m.layout(namespaceOf(x)); err == nil {
		i.Model = ns.Layout.Model
	}
	nameOf := func(s *directory.State, b []byte) (rec directory.Node) {
		var id placement.NodeID
		if copy(id[:], b) == len(id) {
			if rec, _ = s.Node(id); rec.Name == "" {
				rec.Name = id.Short()
			}
		}
		return rec
	}
	m.directory().Read(func(s *directory.State) {
		owner := nameOf(s, x.GetOwner())
		i.OwnerName, i.OwnerAddress = owner.Name, owner.RPCAddress
		i.OwnerUp = owner.State == kvtierv1.NodeState_NODE_STATE_UP || owner.State == kvtierv1.NodeState_NODE_STATE_DRAINING
		i.TargetName, i.SecondName = nameOf(s, x.GetTarget()).Name, nameOf(s, x.GetSecond()).Name
		i.Idle = durationpb.New(millis(uint64(max(0, s.NowMillis()-x.GetUsedUnixMs()))))
	})
	return i
}

// Get tells of one session.
func (m *Manager) Get(ctx context.Context, r *kvtierv1.GetSessionRequest) (*kvtierv1.GetSessionResponse, error) {
	full, _, err := m.named(r.GetTenant(), r.GetSession(), nil)
	if err != nil {
		return nil, err
	}
	x := m.lookup(ctx, full)
	if x == nil {
		return nil, m.absent(full)
	}
	if owner := ownerOf(x); owner != m.cfg.Self && m.cluster.Reachable(owner) && (r.GetPlacement() || r.GetUsage()) {
		a := &kvtierv1.GetSessionResponse{}
		if err := m.ask(ctx, owner, full, &kvtierv1.SessionCall{Call: &kvtierv1.SessionCall_Get{Get: r}}, a); err == nil {
			return a, nil
		}
		// It does not answer: what is known without it is told.
	}
	out := &kvtierv1.GetSessionResponse{Session: m.info(x)}
	if r.GetToBlock() == 0 && !r.GetPlacement() && !r.GetUsage() {
		return out, nil
	}
	names, err := m.namesOf(ctx, x)
	if err != nil {
		return nil, err
	}
	if to := r.GetToBlock(); to > 0 {
		from := r.GetFromBlock()
		if to = min(to, uint64(len(names))); from > to || to-from > maxCallNames {
			return nil, fmt.Errorf("names of blocks %d to %d of %d of session %q: %w", from, to, len(names), r.GetSession(), paging.ErrInvalid)
		}
		out.BlockNames = packNames(names[from:to])
	}
	if r.GetUsage() && ownerOf(x) == m.cfg.Self {
		u := m.usage(namespaceOf(x), names)
		out.Session.AtOwner, out.Session.AbsentBlocks = u.GetTiers(), u.GetAbsentBlocks()
	}
	if r.GetPlacement() {
		out.Runs = m.runs(x, names)
	}
	return out, nil
}

// namesOf returns all names of a session, from this node or, if it keeps none, from
// those who do.
func (m *Manager) namesOf(ctx context.Context, x *directory.Session) ([]paging.BlockName, error) {
	if ownerOf(x) == m.cfg.Self {
		_, l, release, err := m.own(ctx, x.GetSession())
		if err != nil {
			return nil, err
		}
		defer release()
		names, err := l.chain.Names(0, l.chain.End().Blocks)
		return slices.Clone(names), err
	}
	names, _, err := m.find(ctx, x)
	if err == nil && uint64(len(names)) < x.GetChain().GetBlocks() {
		err = fmt.Errorf("%d of %d block names of session %q can be had at present: %w", len(names), x.GetChain().GetBlocks(), x.GetSession(), paging.ErrUnavailable)
	}
	return names, err
}

// Names returns names from to to (0: the end) of a session, and its namespace. A
// session that this node owns counts as used by that. Errors: paging.ErrNotFound,
// paging.ErrInvalid, paging.ErrUnavailable.
func (m *Manager) Names(ctx context.Context, tenant, session string, from, to uint64) (ns paging.NamespaceID, names []paging.BlockName, err error) {
	full, _, err := m.named(tenant, session, nil)
	if err != nil {
		return ns, nil, err
	}
	x := m.lookup(ctx, full)
	if x == nil {
		return ns, nil, m.absent(full)
	}
	if names, err = m.namesOf(ctx, x); err != nil {
		return ns, nil, err
	}
	if to == 0 {
		to = uint64(len(names))
	}
	if from > to || to > uint64(len(names)) || to-from > maxCallNames {
		return ns, nil, fmt.Errorf("blocks %d to %d of session %q, which has %d; a call names at most %d: %w", from, to, session, len(names), maxCallNames, paging.ErrInvalid)
	}
	if ownerOf(x) == m.cfg.Self && x.GetRetention().GetRefresh() {
		m.touch(x) //nolint:contextcheck // it goes on behind the call
	}
	return namespaceOf(x), names[from:to], nil
}

// usageStep is how many blocks the tiers are asked for in one go of their lock.
const usageStep = 4096

// held calls f with what this node has of blocks, in order.
func (m *Manager) held(ns paging.NamespaceID, names []paging.BlockName, f func(i int, parts paging.PartSet, kind tier.Kind)) {
	first := 0
	for step := range slices.Chunk(names, usageStep) {
		parts, kinds, err := m.tier.Held(ns, step, 0)
		for i := range step {
			if err != nil { // the namespace is not known here: nothing is
				f(first+i, 0, tier.None)
			} else {
				f(first+i, parts[i], kinds[i])
			}
		}
		first += len(step)
	}
}

// usage tells in which tiers blocks are here.
func (m *Manager) usage(ns paging.NamespaceID, names []paging.BlockName) *kvtierv1.SessionUsage {
	u := &kvtierv1.SessionUsage{}
	layout, err := m.layout(ns)
	if err != nil {
		u.AbsentBlocks = uint64(len(names))
		return u
	}
	amounts := map[tier.Kind]*kvtierv1.TierAmount{}
	m.held(ns, names, func(_ int, parts paging.PartSet, kind tier.Kind) {
		if kind == tier.None {
			u.AbsentBlocks++
			return
		}
		a := amounts[kind]
		if a == nil {
			a = &kvtierv1.TierAmount{Tier: kvtierv1.Tier(kind)}
			amounts[kind] = a
		}
		a.Blocks++
		a.Bytes += layout.Layout.BytesOf(parts)
	})
	for _, kind := range []tier.Kind{tier.HBM, tier.RAM, tier.NVMe} {
		if a := amounts[kind]; a != nil {
			u.Tiers = append(u.Tiers, a)
		}
	}
	return u
}

// runs tells where the blocks of a session are, over the cluster.
func (m *Manager) runs(x *directory.Session, names []paging.BlockName) (out []*kvtierv1.SessionRun) {
	ns := namespaceOf(x)
	nodes := map[placement.NodeID]string{}
	m.directory().Read(func(s *directory.State) {
		for _, n := range s.Nodes() {
			nodes[n.ID] = n.Name
		}
	})
	here := make([]tier.Kind, len(names))
	m.held(ns, names, func(i int, _ paging.PartSet, kind tier.Kind) { here[i] = kind })
	var places []string
	m.cluster.Holders(ns, names, func(i int, holders []directory.Holder) {
		places = places[:0]
		if here[i] != tier.None {
			places = append(places, nodes[m.cfg.Self]+" "+strings.ToUpper(here[i].String()))
		}
		for _, h := range holders {
			if h.Node != m.cfg.Self {
				places = append(places, nodes[h.Node])
			}
		}
		slices.Sort(places)
		if n := len(out); n > 0 && slices.Equal(out[n-1].GetPlaces(), places) {
			out[n-1].Blocks++
			return
		}
		out = append(out, &kvtierv1.SessionRun{FirstBlock: uint64(i), Blocks: 1, Places: slices.Clone(places)})
	})
	return out
}

const (
	defaultList = 100
	maxList     = 1000
)

// List lists sessions in order of tenant and name. An empty tenant means all.
func (m *Manager) List(ctx context.Context, r *kvtierv1.ListSessionsRequest) (*kvtierv1.ListSessionsResponse, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	limit := int(r.GetPageSize())
	if limit == 0 {
		limit = defaultList
	}
	if limit > maxList {
		return nil, fmt.Errorf("%d sessions in one answer, want at most %d: %w", limit, maxList, paging.ErrInvalid)
	}
	var owner *placement.NodeID
	if r.GetNode() != "" {
		id, err := m.FindNode(r.GetNode())
		if err != nil {
			return nil, err
		}
		owner = &id
	}
	var found []*directory.Session
	for shard := range directory.Shards {
		m.directory().Read(func(s *directory.State) {
			before := s.NowMillis() - r.GetIdle().AsDuration().Milliseconds()
			s.SessionShard(shard, func(x *directory.Session) bool {
				if x.GetSession() > r.GetPageToken() && (r.GetTenant() == "" || directory.TenantOf(x.GetSession()) == r.GetTenant()) &&
					(owner == nil || ownerOf(x) == *owner) && (r.GetState() == 0 || x.GetState() == r.GetState()) && (r.GetIdle() == nil || x.GetUsedUnixMs() <= before) {
					found = append(found, x)
				}
				return true
			})
		})
		if len(found) > 4*(limit+1) {
			found = firstSessions(found, limit+1)
		}
	}
	found = firstSessions(found, limit+1)
	out := &kvtierv1.ListSessionsResponse{}
	if len(found) > limit {
		found = found[:limit]
		out.NextPageToken = found[limit-1].GetSession()
	}
	full := make([]string, len(found))
	for i, x := range found {
		out.Sessions = append(out.Sessions, m.info(x))
		full[i] = x.GetSession()
	}
	if r.GetUsage() {
		usage, err := m.SessionUsage(ctx, full)
		if err != nil {
			return nil, err
		}
		for i := range found {
			if u := usage[full[i]]; u != nil {
				out.Sessions[i].AtOwner, out.Sessions[i].AbsentBlocks = u.GetTiers(), u.GetAbsentBlocks()
			}
		}
	}
	return out, nil
}

func firstSessions(found []*directory.Session, limit int) []*directory.Session {
	slices.SortFunc(found, func(a, b *directory.Session) int { return strings.Compare(a.GetSession(), b.GetSession()) })
	return found[:min(limit, len(found))]
}

// FindNode finds a node by its name, or by at least 4 hex digits of its id.
// Errors: paging.ErrNotFound, paging.ErrInvalid if several are meant.
func (m *Manager) FindNode(name string) (placement.NodeID, error) {
	if err := m.ready(); err != nil {
		return placement.NodeID{}, err
	}
	var found []directory.Node
	var known []string
	m.directory().Read(func(s *directory.State) {
		for _, n := range s.Nodes() {
			known = append(known, n.Name)
			if n.Name == name || len(name) >= 4 && strings.HasPrefix(hex.EncodeToString(n.ID[:]), strings.ToLower(name)) {
				found = append(found, n)
			}
		}
	})
	switch len(found) {
	case 0:
		return placement.NodeID{}, fmt.Errorf("node %q is not in the cluster, which has %s: %w", name, strings.Join(known, ", "), paging.ErrNotFound)
	case 1:
		return found[0].ID, nil
	}
	return placement.NodeID{}, fmt.Errorf("%d nodes are meant by %q: give more digits of the id (kvtier nodes): %w", len(found), name, paging.ErrInvalid)
}

// SessionUsage asks the owners in which tiers the blocks of sessions are. Sessions whose
// owner does not answer are left out.
func (m *Manager) SessionUsage(ctx context.Context, sessions []string) (map[string]*kvtierv1.SessionUsage, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	by := map[placement.NodeID][]string{}
	for _, full := range sessions {
		if x := m.record(full); x != nil {
			by[ownerOf(x)] = append(by[ownerOf(x)], full)
		}
	}
	out := map[string]*kvtierv1.SessionUsage{}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	for owner, all := range by {
		if owner == m.cfg.Self {
			for _, full := range all {
				if u := m.usageHere(ctx, full); u != nil {
					out[full] = u
				}
			}
			continue
		}
		for step := range slices.Chunk(all, maxList) {
			var a kvtierv1.SessionUsages
			if err := m.call(ctx, owner, methodUsage, &kvtierv1.SessionUsageQuery{Sessions: step}, &a); err != nil || len(a.GetSessions()) != len(step) {
				break
			}
			for i, u := range a.GetSessions() {
				if u.GetKnown() {
					out[step[i]] = u
				}
			}
		}
	}
	return out, nil
}

func (m *Manager) usageHere(ctx context.Context, full string) *kvtierv1.SessionUsage {
	x := m.record(full)
	if x == nil || !bytes.Equal(x.GetOwner(), m.cfg.Self[:]) {
		return nil
	}
	names, err := m.namesOf(ctx, x)
	if err != nil {
		return nil
	}
	u := m.usage(namespaceOf(x), names)
	u.Known = true
	return u
}

func (m *Manager) answerUsage(ctx context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	var q kvtierv1.SessionUsageQuery
	if err := unmarshal(argument, &q); err != nil {
		return nil, err
	}
	if len(q.GetSessions()) > maxList {
		return nil, fmt.Errorf("%d sessions: %w", len(q.GetSessions()), paging.ErrInvalid)
	}
	a := &kvtierv1.SessionUsages{}
	for _, full := range q.GetSessions() {
		u := m.usageHere(ctx, full)
		if u == nil {
			u = &kvtierv1.SessionUsage{}
		}
		a.Sessions = append(a.Sessions, u)
	}
	return marshal(a)
}

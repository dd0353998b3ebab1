package server

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Calls of other nodes.
const (
	methodHistory   = cluster.MethodFree + iota // HistoryQuery, HistoryAnswer
	methodTiers                                 // nothing, ListTiersResponse
	methodInstances                             // nothing, JSON of instances
	methodNames                                 // namespace and event hashes, names
)

// answers are the calls of other nodes that this one answers.
func (n *node) answers() map[uint8]cluster.Answer {
	all := map[uint8]cluster.Answer{methodHistory: n.answerHistory, methodTiers: n.answerTiers, methodInstances: n.answerInstances, methodNames: n.answerNames}
	maps.Copy(all, n.sessions.Answers())
	maps.Copy(all, n.plans.Answers())
	return all
}

func (n *node) answerTiers(context.Context, placement.NodeID, []byte) ([]byte, error) {
	m := n.metrics()
	return proto.Marshal(&kvtierv1.ListTiersResponse{Tiers: n.tierStatus(&m)})
}

func (n *node) answerHistory(_ context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	var q kvtierv1.HistoryQuery
	if err := proto.Unmarshal(argument, &q); err != nil {
		return nil, fmt.Errorf("history: %w: %w", paging.ErrInvalid, err)
	}
	ns, names, err := namedBlocks(q.GetNamespaceId(), q.GetBlockNames())
	if err != nil {
		return nil, err
	}
	a, err := n.history(ns, names)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(a)
}

// history is what became of blocks on this node.
func (n *node) history(ns paging.NamespaceID, names []paging.BlockName) (*kvtierv1.HistoryAnswer, error) {
	gone, complete, err := n.hier.History(ns, names)
	if err != nil {
		return nil, err
	}
	a := &kvtierv1.HistoryAnswer{}
	if complete {
		a.Since = timestamppb.New(n.started)
	}
	for _, g := range gone {
		h := &kvtierv1.BlockHistory{Cause: kvtierv1.GoneCause(g.Cause)}
		if g.Cause != tier.StillUnknown {
			h.At = timestamppb.New(g.At)
		}
		a.Blocks = append(a.Blocks, h)
	}
	return a, nil
}

// maxExplained bounds the blocks of an Explain.
const maxExplained = 4096

// namedBlocks reads a namespace id and packed names.
func namedBlocks(id, packed []byte) (ns paging.NamespaceID, names []paging.BlockName, err error) {
	if len(id) != len(ns) {
		return ns, nil, wrongRequest("namespace_id has %d bytes, want 32", len(id))
	}
	if len(packed) == 0 || len(packed)%len(paging.BlockName{}) != 0 || len(packed)/len(paging.BlockName{}) > maxExplained {
		return ns, nil, wrongRequest("block_names has %d bytes, want 32 for each of 1 to %d blocks", len(packed), maxExplained)
	}
	for at := 0; at < len(packed); at += len(paging.BlockName{}) {
		names = append(names, paging.BlockName(packed[at:]))
	}
	return paging.NamespaceID(id), names, nil
}

// Explain tells of blocks why they are hits, or are not.
func (s *admin) Explain(ctx context.Context, m *kvtierv1.ExplainRequest) (*kvtierv1.ExplainResponse, error) {
	n := s.node
	id := m.GetNamespaceId()
	if len(id) == 0 && len(m.GetBlockNames()) >= len(paging.BlockName{}) {
		found, err := n.namespaceOf(paging.BlockName(m.GetBlockNames()))
		if err != nil {
			return nil, err
		}
		id = found[:]
	}
	packed := m.GetBlockNames()
	if len(m.GetTokens()) > 0 {
		var err error
		if packed, err = n.namesOfTokens(id, m.GetTokens()); err != nil {
			return nil, err
		}
	}
	ns, names, err := namedBlocks(id, packed)
	if err != nil {
		return nil, err
	}
	known, err := n.knownNamespace(ns)
	if err != nil {
		return nil, err
	}
	x := explanation{node: n, id: ns, ns: known, names: names, nodes: map[placement.NodeID]string{}}
	x.look(ctx)
	out := &kvtierv1.ExplainResponse{NamespaceId: ns[:], Tenant: known.Tenant, Model: known.Layout.Model}
	out.UsableBlocks = uint32(known.Layout.UsablePrefix(len(names), known.Layout.AllParts(), func(i int) paging.PartSet { return x.reachable[i] }))
	for i := range names {
		b := x.explain(i)
		b.Name = names[i][:]
		out.Blocks = append(out.Blocks, b)
	}
	return out, nil
}

// namespaceOf finds the namespace that has a block: here, else by the claims of the
// cluster.
func (n *node) namespaceOf(name paging.BlockName) (id paging.NamespaceID, err error) {
	all := n.namespaces()
	for id := range all {
		if held, _, err := n.hier.Held(id, []paging.BlockName{name}, 0); err == nil && held[0] != 0 {
			return id, nil
		}
	}
	for id := range all {
		if n.isClaimed(id, name) {
			return id, nil
		}
	}
	return id, fmt.Errorf("block %s: no namespace has it: name the namespace it should be in to learn more: %w", name.Short(), paging.ErrNotFound)
}

func (n *node) isClaimed(id paging.NamespaceID, name paging.BlockName) (claimed bool) {
	if n.cluster != nil {
		n.cluster.Holders(id, []paging.BlockName{name}, func(_ int, holders []directory.Holder) { claimed = len(holders) > 0 })
	}
	return claimed
}

// namespaces are those that are known here or to the cluster.
func (n *node) namespaces() map[paging.NamespaceID]*paging.Namespace {
	out := map[paging.NamespaceID]*paging.Namespace{}
	for _, ns := range n.hier.Namespaces() {
		out[ns.ID()] = ns
	}
	if n.cluster == nil {
		return out
	}
	encoded := map[paging.NamespaceID][]byte{}
	n.cluster.Directory().Read(func(s *directory.State) {
		s.Namespaces(func(id paging.NamespaceID, b []byte, _ int64) { encoded[id] = slices.Clone(b) })
	})
	for id, b := range encoded {
		if ns, err := paging.DecodeNamespace(b); err == nil && out[id] == nil {
			out[id] = ns
		}
	}
	return out
}

// namesOfTokens makes block names of tokens by the hash algorithm of a namespace.
func (n *node) namesOfTokens(id, tokens []byte) ([]byte, error) {
	if len(id) != len(paging.NamespaceID{}) {
		return nil, wrongRequest("tokens without a namespace_id: which hash algorithm makes names of them?")
	}
	if len(tokens)%4 != 0 || len(tokens)/4 > maxExplained*1024 {
		return nil, wrongRequest("tokens has %d bytes, want 4 for each token", len(tokens))
	}
	ns, err := n.knownNamespace(paging.NamespaceID(id))
	if err != nil {
		return nil, err
	}
	list := make([]uint32, len(tokens)/4)
	for i := range list {
		list[i] = binary.LittleEndian.Uint32(tokens[4*i:])
	}
	names, err := paging.NamesOfTokens(&ns.Layout, list)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, wrongRequest("%d tokens make no whole block of %d", len(list), ns.Layout.BlockTokens)
	}
	var packed []byte
	for i := range names[:min(len(names), maxExplained)] {
		packed = append(packed, names[i][:]...)
	}
	return packed, nil
}

// explanation is what is known of some blocks.
type explanation struct {
	node  *node
	id    paging.NamespaceID
	ns    *paging.Namespace
	names []paging.BlockName

	here      []paging.PartSet
	tiers     []tier.Kind
	reachable []paging.PartSet            // on nodes that can be reached, this one included
	holders   [][]string                  // by block, names of nodes that have something of it
	claims    [][]directory.Holder        // by block
	stale     []string                    // by block: a node that claims it and has it no longer
	out       []string                    // by block: a node that claims it and cannot be reached
	gone      []*kvtierv1.BlockHistory    // by block: the latest end anywhere
	goneFrom  []string                    // by block: where
	since     time.Time                   // every node knows what left since then
	complete  bool                        // every node answered, and knows all since its start
	nodes     map[placement.NodeID]string // names
}

func (x *explanation) nameOf(id placement.NodeID) string {
	name, ok := x.nodes[id]
	if !ok {
		name = id.Short()
		if info, known := x.node.cluster.Members().View().Find(id); known && info.Name != "" {
			name = info.Name
		}
		x.nodes[id] = name
	}
	return name
}

// look asks this node, the directory and the other nodes.
func (x *explanation) look(ctx context.Context) {
	n, count := x.node, len(x.names)
	x.here, x.tiers = make([]paging.PartSet, count), make([]tier.Kind, count)
	if held, tiers, err := n.hier.Held(x.id, x.names, 0); err == nil {
		x.here, x.tiers = held, tiers
	}
	x.reachable = slices.Clone(x.here)
	x.holders, x.claims = make([][]string, count), make([][]directory.Holder, count)
	x.stale, x.out = make([]string, count), make([]string, count)
	x.gone, x.goneFrom = make([]*kvtierv1.BlockHistory, count), make([]string, count)
	self := n.self()
	for i := range x.here {
		if x.here[i] != 0 {
			x.holders[i] = append(x.holders[i], self.Name)
		}
	}
	x.complete = true
	if a, err := n.history(x.id, x.names); err == nil {
		x.remember(self.Name, a)
	}
	if n.cluster != nil {
		x.lookElsewhere(ctx)
	}
}

func (x *explanation) lookElsewhere(ctx context.Context) {
	n := x.node
	n.cluster.Holders(x.id, x.names, func(i int, holders []directory.Holder) { x.claims[i] = slices.Clone(holders) })
	said := map[placement.NodeID]*nodeParts{}
	for _, p := range n.askHolders(ctx, x.id, x.names, n.claimed(x.id, x.names)) {
		said[p.info.ID] = p
	}
	for i, holders := range x.claims {
		for _, h := range holders {
			switch p := said[h.Node]; {
			case h.Node == placement.NodeID(n.identity.node):
			case p == nil:
				x.out[i] = x.nameOf(h.Node)
				x.holders[i] = append(x.holders[i], "("+x.nameOf(h.Node)+")")
			case p.parts[i] == 0:
				x.stale[i] = x.nameOf(h.Node)
			default:
				x.reachable[i] |= p.parts[i]
				x.holders[i] = append(x.holders[i], x.nameOf(h.Node))
			}
		}
	}
	x.askHistory(ctx)
}

// askHistory asks every other node what became of the blocks.
func (x *explanation) askHistory(ctx context.Context) {
	n := x.node
	var packed []byte
	for i := range x.names {
		packed = append(packed, x.names[i][:]...)
	}
	argument, err := proto.Marshal(&kvtierv1.HistoryQuery{NamespaceId: x.id[:], BlockNames: packed})
	if err != nil {
		x.complete = false
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	var others []placement.NodeInfo
	for _, info := range n.cluster.Members().View().Nodes {
		if info.ID != placement.NodeID(n.identity.node) {
			others = append(others, info)
		}
	}
	answers := make([]*kvtierv1.HistoryAnswer, len(others))
	var asked sync.WaitGroup
	for k, info := range others {
		asked.Go(func() { // owner: this call; exits with ctx; bound: the nodes of a cluster
			b, err := n.cluster.Call(ctx, info.ID, methodHistory, argument)
			var a kvtierv1.HistoryAnswer
			if err == nil && proto.Unmarshal(b, &a) == nil && len(a.GetBlocks()) == len(x.names) {
				answers[k] = &a
			}
		})
	}
	asked.Wait()
	for k, a := range answers {
		if a == nil {
			x.complete = false // it is away, or does not know the namespace, which it may have forgotten
			continue
		}
		x.remember(x.nameOf(others[k].ID), a)
	}
}

// remember enters what a node says became of the blocks.
func (x *explanation) remember(name string, a *kvtierv1.HistoryAnswer) {
	if a.GetSince() == nil {
		x.complete = false
	} else if t := a.GetSince().AsTime(); t.After(x.since) {
		x.since = t
	}
	for i, b := range a.GetBlocks() {
		if b.GetCause() == kvtierv1.GoneCause_GONE_CAUSE_UNSPECIFIED {
			continue
		}
		if x.gone[i] == nil || b.GetAt().AsTime().After(x.gone[i].GetAt().AsTime()) {
			x.gone[i], x.goneFrom[i] = b, name
		}
	}
}

// explain says why block i is a hit, or is not.
func (x *explanation) explain(i int) *kvtierv1.BlockExplanation {
	at := x.ns.Layout.PagesAt(i, x.ns.Layout.AllParts())
	b := &kvtierv1.BlockExplanation{Nodes: x.holders[i]}
	say := func(v kvtierv1.Verdict, format string, args ...any) *kvtierv1.BlockExplanation {
		b.Verdict, b.Text = v, fmt.Sprintf(format, args...)
		return b
	}
	switch {
	case x.here[i].Contains(at) && x.here[i] != 0 && x.tiers[i] == tier.NVMe:
		return say(kvtierv1.Verdict_VERDICT_HIT_DISK, "it is on this node's disk")
	case x.here[i].Contains(at) && x.here[i] != 0:
		return say(kvtierv1.Verdict_VERDICT_HIT_HERE, "it is in this node's %v", x.tiers[i])
	case x.reachable[i].Contains(at) && x.reachable[i] != 0:
		return say(kvtierv1.Verdict_VERDICT_HIT_REMOTE, "it is on %s", strings.Join(x.holders[i], " and "))
	case x.reachable[i] != 0:
		return say(kvtierv1.Verdict_VERDICT_PART_MISSING, "of its parts, %s is missing", x.partNames(at&^x.reachable[i]))
	case x.out[i] != "":
		return say(kvtierv1.Verdict_VERDICT_OWNER_UNREACHABLE, "%s has it and cannot be reached", x.out[i])
	case x.stale[i] != "":
		return say(kvtierv1.Verdict_VERDICT_CLAIM_OUTDATED, "%s claims it and has it no longer: its claims are being compared", x.stale[i])
	}
	return x.explainAbsent(i, say)
}

func (x *explanation) explainAbsent(i int, say func(kvtierv1.Verdict, string, ...any) *kvtierv1.BlockExplanation) *kvtierv1.BlockExplanation {
	if g := x.gone[i]; g != nil {
		when := g.GetAt().AsTime().UTC().Format(time.RFC3339)
		switch g.GetCause() {
		case kvtierv1.GoneCause_GONE_CAUSE_DROPPED:
			return say(kvtierv1.Verdict_VERDICT_DROPPED, "%s dropped it at %s", x.goneFrom[i], when)
		case kvtierv1.GoneCause_GONE_CAUSE_UNFINISHED:
			return say(kvtierv1.Verdict_VERDICT_PART_MISSING, "%s dropped it at %s: not all its parts came in time", x.goneFrom[i], when)
		default:
			return say(kvtierv1.Verdict_VERDICT_EVICTED, "%s evicted it at %s", x.goneFrom[i], when)
		}
	}
	for id, other := range x.node.namespaces() {
		if id == x.id || !x.node.stored(id, x.names[i]) {
			continue
		}
		if other.Tenant != x.ns.Tenant {
			return say(kvtierv1.Verdict_VERDICT_OTHER_TENANT, "tenant %s has a block of this name: tenants share nothing", other.Tenant)
		}
		differs := paging.DiffLayouts(&x.ns.Layout, &other.Layout)
		if differs == "" {
			differs = "the cache salt"
		}
		return say(kvtierv1.Verdict_VERDICT_LAYOUT_DIFFERS, "it is stored in namespace %s, which differs: %s", id.Short(), differs)
	}
	if x.complete {
		return say(kvtierv1.Verdict_VERDICT_NEVER_STORED, "no node has stored it since %s", x.since.UTC().Format(time.RFC3339))
	}
	return say(kvtierv1.Verdict_VERDICT_UNKNOWN, "no node has it; what became of it is not known to all nodes any more")
}

// stored reports whether a block is here, or claimed by somebody.
func (n *node) stored(id paging.NamespaceID, name paging.BlockName) bool {
	held, _, err := n.hier.Held(id, []paging.BlockName{name}, 0)
	return err == nil && held[0] != 0 || n.isClaimed(id, name)
}

func (x *explanation) partNames(parts paging.PartSet) string {
	var names []string
	for i := range x.ns.Layout.Parts {
		if parts.Has(i) {
			names = append(names, x.ns.Layout.Parts[i].Name)
		}
	}
	return strings.Join(names, ", ")
}

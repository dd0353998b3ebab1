package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// MaxPushBlocks bounds the blocks of one Push; Lacks cuts what it is given.
const MaxPushBlocks = 8192

// Block is what this node has of a block that is to be elsewhere too.
type Block struct {
	Name     paging.BlockName
	Parts    paging.PartSet
	Position uint32 // in its chain
}

// Lacks asks another node which parts of these blocks it lacks, and sets lacks[i] to
// them; it learns of the namespace by that. Errors: paging.ErrUnavailable, that of ctx,
// or why the node cannot hold such pages (paging.ErrBadLayout among them as
// paging.ErrInvalid).
func (n *Node) Lacks(ctx context.Context, node placement.NodeID, ns *paging.Namespace, blocks []Block, lacks []paging.PartSet) error {
	encoded := paging.EncodeNamespace(ns)
	for first := 0; first < len(blocks); first += MaxPushBlocks {
		step := blocks[first:min(first+MaxPushBlocks, len(blocks))]
		q := &kvtierv1.BlockQuery{Namespace: encoded, BlockNames: make([]byte, 0, 32*len(step)), Parts: make([]byte, 0, 8*len(step))}
		for i := range step {
			q.BlockNames = append(q.BlockNames, step[i].Name[:]...)
			q.Parts = binary.LittleEndian.AppendUint64(q.Parts, uint64(step[i].Parts))
		}
		var a kvtierv1.BlockLacks
		if err := n.question(ctx, node, methodLacks, q, &a); err != nil {
			return fmt.Errorf("ask node %s what it lacks: %w", node.Short(), err)
		}
		if len(a.GetParts()) != 8*len(step) {
			return fmt.Errorf("node %s answers of %d blocks with %d bytes: %w", node.Short(), len(step), len(a.GetParts()), paging.ErrIncompatible)
		}
		for i := range step {
			lacks[first+i] = paging.PartSet(binary.LittleEndian.Uint64(a.GetParts()[8*i:])) & step[i].Parts
		}
	}
	return nil
}

// Push has another node copy some parts of at most MaxPushBlocks blocks of this node to
// itself, into its RAM or onto its device, and returns the bytes that arrived there and
// were verified, and for each block why it is not there (tier.NoReason: it is). Blocks
// that have not all these parts are not asked for. It takes until ctx ends at most. Errors as of Lacks.
func (n *Node) Push(ctx context.Context, node placement.NodeID, ns *paging.Namespace, blocks []Block, parts paging.PartSet, wanted tier.Kind) (bytes int64, why []tier.Reason, err error) {
	q := &kvtierv1.PullBlocks{Namespace: paging.EncodeNamespace(ns), Parts: uint64(parts), Tier: kvtierv1.Tier(wanted)}
	for i := range blocks {
		q.BlockNames = append(q.BlockNames, blocks[i].Name[:]...)
		q.Positions = binary.LittleEndian.AppendUint32(q.Positions, blocks[i].Position)
	}
	var a kvtierv1.PulledBlocks
	if err := n.question(ctx, node, methodPull, q, &a); err != nil {
		return 0, nil, fmt.Errorf("copy %d blocks to node %s: %w", len(blocks), node.Short(), err)
	}
	if len(a.GetReasons()) != len(blocks) {
		return 0, nil, fmt.Errorf("node %s answers of %d blocks with %d reasons: %w", node.Short(), len(blocks), len(a.GetReasons()), paging.ErrIncompatible)
	}
	why = make([]tier.Reason, len(blocks))
	for i, r := range a.GetReasons() {
		why[i] = tier.Reason(r)
	}
	return int64(a.GetBytes()), why, nil
}

func (n *Node) question(ctx context.Context, node placement.NodeID, method uint8, q, a proto.Message) error {
	b, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	if b, err = n.pages.Call(ctx, node, method, b); err != nil {
		return err
	}
	if err := proto.Unmarshal(b, a); err != nil {
		return fmt.Errorf("%w: %w", paging.ErrIncompatible, err)
	}
	return nil
}

// receiver is what this node needs to be a target: the namespace, known here.
func (n *Node) receiver(encoded, packed []byte) (*tier.Hierarchy, *paging.Namespace, paging.NamespaceID, []paging.BlockName, error) {
	h := n.tier.Load()
	if h == nil {
		return nil, nil, paging.NamespaceID{}, nil, fmt.Errorf("this node is starting: %w", paging.ErrUnavailable)
	}
	if len(packed)%32 != 0 || len(packed) > 32*MaxPushBlocks {
		return nil, nil, paging.NamespaceID{}, nil, fmt.Errorf("names of %d bytes: %w", len(packed), paging.ErrInvalid)
	}
	ns, err := paging.DecodeNamespace(encoded)
	if err != nil {
		return nil, nil, paging.NamespaceID{}, nil, err
	}
	id, err := h.RegisterNamespace(ns)
	if errors.Is(err, paging.ErrBadLayout) {
		return nil, nil, id, nil, fmt.Errorf("%w: %w", paging.ErrIncompatible, err) // the wire knows no such error
	} else if err != nil {
		return nil, nil, id, nil, err
	}
	names := make([]paging.BlockName, len(packed)/32)
	for i := range names {
		copy(names[i][:], packed[32*i:])
	}
	return h, ns, id, names, nil
}

func (n *Node) answerLacks(argument []byte) ([]byte, error) {
	var q kvtierv1.BlockQuery
	if err := proto.Unmarshal(argument, &q); err != nil {
		return nil, fmt.Errorf("question about blocks: %w: %w", paging.ErrInvalid, err)
	}
	h, _, id, names, err := n.receiver(q.GetNamespace(), q.GetBlockNames())
	if err != nil {
		return nil, err
	}
	if len(q.GetParts()) != 8*len(names) {
		return nil, fmt.Errorf("%d bytes of parts for %d blocks: %w", len(q.GetParts()), len(names), paging.ErrInvalid)
	}
	held, _, err := h.Held(id, names, 0)
	if err != nil {
		return nil, err
	}
	a := &kvtierv1.BlockLacks{Parts: make([]byte, 0, 8*len(names))}
	for i := range names {
		asker := paging.PartSet(binary.LittleEndian.Uint64(q.GetParts()[8*i:]))
		a.Parts = binary.LittleEndian.AppendUint64(a.Parts, uint64(asker&^held[i]))
	}
	return proto.Marshal(a)
}

func (n *Node) answerPull(ctx context.Context, from placement.NodeID, argument []byte) ([]byte, error) {
	var q kvtierv1.PullBlocks
	if err := proto.Unmarshal(argument, &q); err != nil {
		return nil, fmt.Errorf("blocks to copy: %w: %w", paging.ErrInvalid, err)
	}
	h, ns, id, names, err := n.receiver(q.GetNamespace(), q.GetBlockNames())
	if err != nil {
		return nil, err
	}
	wanted := tier.Kind(q.GetTier())
	if len(names) == 0 || len(q.GetPositions()) != 4*len(names) {
		return nil, fmt.Errorf("%d bytes of positions for %d blocks: %w", len(q.GetPositions()), len(names), paging.ErrInvalid)
	}
	at := make([]uint32, len(names))
	for i := range at {
		at[i] = binary.LittleEndian.Uint32(q.GetPositions()[4*i:])
	}
	if !n.Reachable(from) {
		return nil, fmt.Errorf("this node does not reach node %s yet, which has the blocks: %w", from.Short(), paging.ErrUnavailable)
	}
	parts := paging.PartSet(q.GetParts())
	before, _, err := h.Held(id, names, parts)
	if err != nil {
		return nil, err
	}
	// What the asker has may be too new for the directory to tell of it.
	forget := n.expected.add(id, names, directory.Holder{Node: from, Parts: parts})
	defer forget()
	hold, err := h.Fetch(ctx, tier.FetchRequest{Namespace: id, Names: names, Parts: parts, Mode: tier.ModeSet, Wanted: wanted, At: at, Moved: true})
	if err != nil {
		return nil, err
	}
	defer hold.Release()
	a := &kvtierv1.PulledBlocks{Reasons: make([]byte, len(names))}
	for _, s := range hold.Short {
		for i := s.Block; i < s.Block+s.Count; i++ {
			a.Reasons[i] = uint8(s.Reason)
		}
	}
	for i, r := range a.GetReasons() {
		if r == 0 {
			a.Bytes += ns.Layout.BytesOf(ns.Layout.PagesAt(int(at[i]), parts) &^ before[i])
		}
	}
	return proto.Marshal(a)
}

// expectations are holders that told of themselves what the directory may not know yet.
// Each lasts as long as a call of another node, of which there is a bounded number.
type expectations struct {
	mu      sync.RWMutex
	holders map[placement.BlockKey][]directory.Holder
}

// add has blocks expected at a holder until forget is called.
func (e *expectations) add(ns paging.NamespaceID, names []paging.BlockName, h directory.Holder) (forget func()) {
	keys := make([]placement.BlockKey, len(names))
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.holders == nil {
		e.holders = map[placement.BlockKey][]directory.Holder{}
	}
	for i := range names {
		keys[i] = ClaimKey(ns, names[i])
		e.holders[keys[i]] = append(e.holders[keys[i]], h)
	}
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, k := range keys {
			rest := e.holders[k]
			if i := slices.Index(rest, h); i >= 0 {
				rest = slices.Delete(slices.Clone(rest), i, i+1)
			}
			if len(rest) == 0 {
				delete(e.holders, k)
			} else {
				e.holders[k] = rest
			}
		}
	}
}

// with appends those who are expected to hold a block to those who claim it, first. It
// changes nothing of holders.
func (e *expectations) with(k placement.BlockKey, holders []directory.Holder) []directory.Holder {
	e.mu.RLock()
	defer e.mu.RUnlock()
	more := e.holders[k]
	if len(more) == 0 {
		return holders
	}
	out := slices.Clone(more)
	for _, h := range holders {
		if !slices.ContainsFunc(more, func(m directory.Holder) bool { return m.Node == h.Node && m.Parts.Contains(h.Parts) }) {
			out = append(out, h)
		}
	}
	return out
}

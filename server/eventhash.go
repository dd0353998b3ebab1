package server

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/tier"
)

// Routers know blocks by the 64-bit hashes of the engines' KV events. The name of a
// block holds that hash where the engine's digest has 32 bytes: a node finds the names
// among those of the blocks that it has.

// eventHash is the hash by which the events of an engine name a block; false: its
// names do not hold it.
func eventHash(l *paging.Layout, name *paging.BlockName) (uint64, bool) {
	switch l.HashAlgorithm {
	case paging.HashVLLMSHA256:
		return paging.VLLMEventHash(name[:]), true
	case paging.HashSGLang:
		return uint64(paging.SGLangEventHash(*name)), true
	}
	return 0, false
}

// namesHere finds the names of blocks of this node by their event hashes; the zero
// name where it has none.
func (n *node) namesHere(id paging.NamespaceID, l *paging.Layout, hashes []uint64) []paging.BlockName {
	names := make([]paging.BlockName, len(hashes))
	at := make(map[uint64]int, len(hashes))
	for i, h := range hashes {
		at[h] = i
	}
	n.hier.HeldBlocks(func(b tier.HeldBlock) {
		if b.ID.Namespace != id {
			return
		}
		if h, ok := eventHash(l, &b.ID.Name); ok {
			if i, wanted := at[h]; wanted {
				names[i] = b.ID.Name
			}
		}
	})
	return names
}

// answerNames tells another node the names of blocks: a namespace id and hashes of 8
// bytes each come in, names go out.
func (n *node) answerNames(_ context.Context, _ placement.NodeID, argument []byte) ([]byte, error) {
	var id paging.NamespaceID
	if len(argument) < len(id) || (len(argument)-len(id))%8 != 0 || (len(argument)-len(id))/8 > maxQueryNames {
		return nil, fmt.Errorf("question of %d bytes: %w", len(argument), paging.ErrInvalid)
	}
	copy(id[:], argument)
	ns, ok := n.hier.Namespace(id)
	if !ok {
		return nil, paging.ErrUnknownNamespace
	}
	hashes := make([]uint64, (len(argument)-len(id))/8)
	for i := range hashes {
		hashes[i] = binary.LittleEndian.Uint64(argument[len(id)+8*i:])
	}
	var out []byte
	for _, name := range n.namesHere(id, &ns.Layout, hashes) {
		out = append(out, name[:]...)
	}
	return out, nil
}

// namesOfHashes finds names by event hashes on all nodes, up to the first that nobody
// has.
func (n *node) namesOfHashes(ctx context.Context, id paging.NamespaceID, ns *paging.Namespace, hashes []uint64) []paging.BlockName {
	names := n.namesHere(id, &ns.Layout, hashes)
	if n.cluster != nil {
		n.namesElsewhere(ctx, id, hashes, names)
	}
	for i, name := range names {
		if name == (paging.BlockName{}) {
			return names[:i]
		}
	}
	return names
}

func (n *node) namesElsewhere(ctx context.Context, id paging.NamespaceID, hashes []uint64, names []paging.BlockName) {
	argument := append([]byte(nil), id[:]...)
	for _, h := range hashes {
		argument = binary.LittleEndian.AppendUint64(argument, h)
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, info := range n.cluster.Members().View().Nodes {
		if info.ID == placement.NodeID(n.identity.node) || !n.cluster.Reachable(info.ID) {
			continue
		}
		asked.Go(func() { // owner: this call; exits with ctx; bound: the nodes of a cluster
			b, err := n.cluster.Call(ctx, info.ID, methodNames, argument)
			if err != nil || len(b) != len(hashes)*len(paging.BlockName{}) {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			for i := range names {
				if names[i] == (paging.BlockName{}) {
					copy(names[i][:], b[i*len(names[i]):])
				}
			}
		})
	}
	asked.Wait()
}

package bench

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/tier/policy"
)

// maxErrors bounds the error texts that a report carries.
const maxErrors = 5

// tally counts what the clients of a run saw. Safe for concurrent use.
type tally struct {
	served, unavailable, failed    atomic.Int64
	blocks, tokens                 atomic.Int64
	hitBlocks, hitTokens           atomic.Int64
	hitTier                        [5]atomic.Int64 // by client.Tier
	wrong, lost, phantom, corrupt  atomic.Int64
	committed, durable, refused    atomic.Int64
	inPlace, staged, read, written atomic.Int64 // bytes
	fetch, commit                  Latency
	decoded, wrongDecodes          atomic.Int64 // requests decoded with attention in place

	mu     sync.Mutex
	first  []string
	relErr float64 // the worst of the decodes
}

// worst keeps the greatest error of a decode; NaN counts as more than any.
func (t *tally) worst(rel float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !(rel <= t.relErr) {
		t.relErr = rel
	}
}

// note keeps the text of an error, if there is room.
func (t *tally) note(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.first) < maxErrors {
		t.first = append(t.first, fmt.Sprintf(format, args...))
	}
}

func (t *tally) errors() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.first...)
}

// report is what the clients saw; best is what a cache without limit would hit, loaded
// the bytes that the nodes read from disk.
func (t *tally) report(requests int64, best policy.Result, loaded int64) *ReplayReport {
	return &ReplayReport{
		Requests:       requests,
		ServedRequests: t.served.Load(), UnavailableRequests: t.unavailable.Load(), FailedRequests: t.failed.Load(),
		Blocks: t.blocks.Load(), HitBlocks: t.hitBlocks.Load(),
		Hit: policy.Rate(t.hitBlocks.Load(), t.blocks.Load()), BestHit: best.HitRate(),
		TokenHit: policy.Rate(t.hitTokens.Load(), t.tokens.Load()), BestTokenHit: best.TokenHitRate(),
		HitByTier: HitByTier{
			HBM: t.hitTier[client.TierHBM].Load(), RAM: t.hitTier[client.TierRAM].Load(),
			NVMe: t.hitTier[client.TierNVMe].Load(), Remote: t.hitTier[client.TierRemote].Load(),
		},
		WrongPages: t.wrong.Load(), LostPages: t.lost.Load(), PhantomBlocks: t.phantom.Load(), CorruptPages: t.corrupt.Load(),
		DurableBlocks: t.durable.Load(), CommittedBlocks: t.committed.Load(), RefusedBlocks: t.refused.Load(),
		FetchUS: t.fetch.Quantiles(), CommitUS: t.commit.Quantiles(),
		BytesByPath: BytesByPath{
			InPlace: t.inPlace.Load(), Staged: t.staged.Load(), StreamRead: t.read.Load(), StreamSent: t.written.Load(),
			NVMeRead: loaded,
		},
		DecodedRequests: t.decoded.Load(), WrongDecodes: t.wrongDecodes.Load(), DecodeRelErr: t.relErr,
		FirstErrors: t.errors(),
	}
}

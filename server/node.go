package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/cluster"
	"github.com/kvtier/kvtier/server/plans"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/sessions"
	"github.com/kvtier/kvtier/server/trust"
	"github.com/kvtier/kvtier/tier"
)

// sweepEvery is the pace of the sweeper: what is due by time is done at most so
// much later.
const sweepEvery = 250 * time.Millisecond

// node is what the services call: it implements rpc.Node.
type node struct {
	// Immutable.
	cfg        Config
	log        *slog.Logger
	identity   identity
	version    string
	started    time.Time
	hier       *tier.Hierarchy
	ram        RAM
	nvme       tier.Durable      // nil: none
	hbm        HBM               // nil: none
	peers      *latePeers        // nil: the node is alone
	cluster    *cluster.Node     // nil: the node is alone
	sessions   *sessions.Manager // nil: the node is alone
	plans      *plans.Runner     // likewise
	names      *sessions.Store   // of the blocks of sessions; likewise
	ctx        context.Context   // ends when the node closes
	cancel     context.CancelFunc
	intake     context.Context // ends when the node begins to stop
	endIntake  context.CancelFunc
	workers    sync.WaitGroup
	trust      *trust.Source // of certificates; nil: none is configured
	rpcMetrics func() rpc.Metrics
	accounts   *rpc.Accounts

	stopping     atomic.Bool
	leaseIDs     atomic.Uint64
	stagingCount atomic.Uint32
	prefetching  atomic.Int64 // bytes that prefetches bring up
	counters     counters
	attachments  attachments
	groups       groups
	instances    instances
	prefill      prefillRates
}

// nextLease numbers leases from a random start, so that an id of an earlier run
// of the node names none of this one.
func (n *node) nextLease() uint64 {
	for {
		if id := n.leaseIDs.Add(1); id != 0 {
			return id
		}
	}
}

func randomLease() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	return binary.LittleEndian.Uint64(b[:])
}

// namespace finds a namespace of this tenant. Those of others are unknown to it,
// in the same words.
func (n *node) namespace(tenant string, id paging.NamespaceID) (*paging.Layout, error) {
	ns, ok := n.hier.Namespace(id)
	if !ok || ns.Tenant != tenant {
		return nil, fmt.Errorf("namespace %s: register it first: %w", id.Short(), paging.ErrUnknownNamespace)
	}
	return &ns.Layout, nil
}

// RegisterNamespace implements rpc.Node.
func (n *node) RegisterNamespace(ctx context.Context, c rpc.Caller, r *rpc.RegisterRequest) (rpc.RegisterResult, error) {
	if n.stopping.Load() {
		return rpc.RegisterResult{}, errStopping
	}
	var att *attachment
	if r.Attachment != nil {
		var err error
		if att, err = n.attachments.find(c, *r.Attachment); err != nil {
			return rpc.RegisterResult{}, err
		}
	}
	ns := r.Namespace
	ns.Tenant = c.Tenant
	id, err := n.hier.RegisterNamespace(&ns)
	if err != nil {
		return rpc.RegisterResult{}, err
	}
	if n.cluster != nil {
		n.cluster.Announce(&ns)
	}
	n.prefill.state(id, r.PrefillRate)
	res := rpc.RegisterResult{ID: id}
	if att != nil {
		res.StagingExtent, res.StagingBytes, err = att.ensureStaging(ctx, largestPage(&ns.Layout, att.ranks))
	}
	return res, err
}

// prefillRates is how fast engines say that they compute, by namespace.
type prefillRates struct {
	mu    sync.Mutex
	rates map[paging.NamespaceID]float64
}

// maxPrefillRates bounds the namespaces of which a rate is known: the others give no
// advice.
const maxPrefillRates = 4096

// state notes tokens a second; 0 says nothing.
func (p *prefillRates) state(id paging.NamespaceID, rate float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rates == nil {
		p.rates = map[paging.NamespaceID]float64{}
	}
	if _, known := p.rates[id]; rate > 0 && (known || len(p.rates) < maxPrefillRates) {
		p.rates[id] = rate
	}
}

func (p *prefillRates) rate(id paging.NamespaceID) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rates[id]
}

// largestPage is the length of the longest page that a writer of these ranks brings.
func largestPage(l *paging.Layout, ranks []uint32) int64 {
	parts := l.PartsOfRanks(ranks)
	var most uint64
	for i := range l.Parts {
		if parts.Has(i) {
			most = max(most, l.Parts[i].PageBytes)
		}
	}
	return int64(most)
}

// Keep implements rpc.Node.
func (n *node) Keep(ctx context.Context, c rpc.Caller, r *rpc.KeepRequest) ([]byte, error) {
	if n.stopping.Load() {
		return nil, errStopping
	}
	if _, err := n.namespace(c.Tenant, r.Namespace); err != nil {
		return nil, err
	}
	var items []tier.ItemOutcome
	var err error
	switch r.Verb {
	case rpc.VerbRetain:
		items, err = n.hier.Retain(r.Namespace, r.Names, tier.Retention{Priority: r.Retention.Priority, TTL: r.Retention.TTL, RefreshOnHit: r.Retention.RefreshOnHit})
	case rpc.VerbDemote:
		items, err = n.hier.Demote(r.Namespace, r.Names, tier.Kind(r.From))
	case rpc.VerbDrop:
		items, err = n.hier.Drop(r.Namespace, r.Names)
	case rpc.VerbPin:
		items, err = n.hier.Pin(r.Namespace, r.Names, r.TTL)
	default:
		return nil, fmt.Errorf("verb %d: %w", r.Verb, paging.ErrInvalid)
	}
	if err != nil {
		return nil, err
	}
	out := make([]byte, len(items))
	for i, o := range items {
		out[i] = byte(o)
	}
	return out, nil
}

// arenas are those whose slots this node hands out.
func (n *node) arenas() []rpc.Arena {
	all := []rpc.Arena{
		{ID: ramArena, Tier: uint8(tier.RAM), Device: "host", SlotAlign: paging.UnitBytes},
		{ID: stagingArena, Tier: uint8(tier.None), Device: "host", SlotAlign: paging.UnitBytes},
	}
	if n.hbm != nil {
		pool := poolArenaOf(n.hbm.Pool())
		all = append(all, pool, rpc.Arena{ID: workingArena, Tier: uint8(tier.None), Device: pool.Device, SlotAlign: paging.UnitBytes, DeviceUUID: pool.DeviceUUID, DeviceName: pool.DeviceName})
	}
	return all
}

// sweep does what is due by time until the node closes. Owner: the node; exits
// with its context; one.
func (n *node) sweep() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case now := <-tick.C:
			n.sweepOnce(now)
		}
	}
}

func (n *node) sweepOnce(now time.Time) {
	for _, a := range n.attachments.all() {
		a.sweep(now)
	}
	for _, g := range n.groups.all() {
		n.counters.tokensExpired.Add(uint64(g.sweep(now)))
	}
	n.hier.Tick()
}

// extentsAdded is told by the arena when a tenant got memory.
func (n *node) extentsAdded(tenant string) {
	for _, a := range n.attachments.all() {
		if a.caller.Tenant == tenant {
			a.extentsAdded()
		}
	}
}

// States of a node.
const (
	stateReady    = "ready"
	stateDegraded = "degraded"
	stateStopping = "stopping"
)

// state is how the node is, in a word.
func (n *node) state() string {
	switch {
	case n.stopping.Load():
		return stateStopping
	case len(n.problems()) > 0:
		return stateDegraded
	}
	return stateReady
}

// problems says what is not well and what to do, a line each.
func (n *node) problems() []string {
	var out []string
	for _, t := range n.tiers() {
		if u := t.Usage(); u.State == tier.Bypass {
			out = append(out, fmt.Sprintf("tier %v takes no pages: %s", t.Kind(), u.Reason))
		}
	}
	if n.trust != nil {
		out = append(out, certificateProblems(n.trust.State(), time.Now())...)
	}
	out = append(out, n.clusterProblems()...)
	for _, a := range n.attachments.all() {
		if d := a.orphanFor(time.Now()); d >= orphanAfter {
			out = append(out, fmt.Sprintf("process %d (%s) has kept its hand-off socket for %v without a stream: its pages stay; end it", a.caller.PID, a.engine, d.Round(time.Second)))
		}
	}
	return out
}

// orphanAfter is the time after which a tether without a stream is a problem.
const orphanAfter = time.Minute

// tiers lists the node's tiers, fastest first.
func (n *node) tiers() []tier.Tier {
	var all []tier.Tier
	if n.hbm != nil {
		all = append(all, n.hbm)
	}
	all = append(all, n.ram)
	if n.nvme != nil {
		all = append(all, n.nvme)
	}
	return all
}

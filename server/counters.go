package server

import (
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/server/trust"
	"github.com/kvtier/kvtier/tier"
)

// counters count events since the start.
type counters struct {
	leasesOverdue, leasesLost       atomic.Uint64
	attemptsExpired, tokensExpired  atomic.Uint64
	tethersRefused                  atomic.Uint64
	readPageBytes, writtenPageBytes atomic.Uint64
	corruptUploads                  atomic.Uint64
}

// Metrics is the state of a node and what it has counted since its start.
type Metrics struct {
	Uptime         time.Duration
	Attachments    int   // whose stream is held
	OrphanTethers  int   // tethers open without a stream
	Leases         int   // held, overdue ones included
	OverdueLeases  int   // past their deadline
	LeasedBytes    int64 // of the pages of all leases, counted once per lease
	Attempts       int   // write attempts open
	StagingBytes   int64
	AdoptTokens    int
	Prefetches     int    // tickets running
	LeasesOverdue  uint64 // leases that became overdue
	LeasesLost     uint64 // leases whose slots were reused
	AttemptsLate   uint64 // attempts that expired
	TokensExpired  uint64 // adopt tokens that nobody wanted in time
	TethersRefused uint64
	// Bytes streamed to and from clients that are not co-located.
	ReadPageBytes, WrittenPageBytes uint64
	CorruptUploads                  uint64 // pages that did not match their sender's checksum

	RPC       rpc.Metrics
	TLS       trust.State // zero: no certificate is configured
	Hierarchy tier.Metrics
	RAM       tier.Usage
	NVMe      *tier.Usage // nil: no such tier
	HBM       *tier.Usage // nil: no such tier
	NVMeIO    tier.IO     // zero: no such tier, or it does not tell
	Cluster   ClusterMetrics
}

// metered is a tier that tells what it does on its medium.
type metered interface{ IO() tier.IO }

func (n *node) metrics() Metrics {
	c := &n.counters
	m := Metrics{
		Uptime:        time.Since(n.started),
		LeasesOverdue: c.leasesOverdue.Load(), LeasesLost: c.leasesLost.Load(),
		AttemptsLate: c.attemptsExpired.Load(), TokensExpired: c.tokensExpired.Load(),
		TethersRefused: c.tethersRefused.Load(),
		ReadPageBytes:  c.readPageBytes.Load(), WrittenPageBytes: c.writtenPageBytes.Load(),
		CorruptUploads: c.corruptUploads.Load(),
		RPC:            n.rpcMetrics(), Hierarchy: n.hier.Metrics(), RAM: n.ram.Usage(),
	}
	if n.trust != nil {
		m.TLS = n.trust.State()
	}
	if n.hbm != nil {
		u := n.hbm.Usage()
		m.HBM = &u
	}
	if n.nvme != nil {
		u := n.nvme.Usage()
		m.NVMe = &u
		if disk, ok := n.nvme.(metered); ok {
			m.NVMeIO = disk.IO()
		}
	}
	for _, a := range n.attachments.all() {
		a.addTo(&m)
	}
	for _, g := range n.groups.all() {
		m.AdoptTokens += g.tokens()
	}
	m.Cluster = n.clusterMetrics()
	return m
}

// addTo adds an attachment's share.
func (a *attachment) addTo(m *Metrics) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state == attached:
		m.Attachments++
	case a.tethers > 0:
		m.OrphanTethers++
	}
	m.Leases += len(a.leases.held)
	m.OverdueLeases += a.leases.overdue
	m.LeasedBytes += a.leases.bytes
	m.Attempts += len(a.attempts)
	m.StagingBytes += a.staging.bytes
	m.Prefetches += len(a.prefetches)
}

package tier

import "time"

// Metrics counts what a Hierarchy did since Open, and says what it holds. These
// hold at every moment:
//
//	RequestedBlocks = DeviceHitBlocks + RAMHitBlocks + DiskHitBlocks + RemoteHitBlocks + MissedBlocks
//	RequestedTokens = DeviceHitTokens + RAMHitTokens + DiskHitTokens + RemoteHitTokens + MissedTokens
//	PrefetchBlocks  = PrefetchUseful + PrefetchLate + PrefetchWasted + those that a prefetch holds
//
// No byte is copied, read or summed for a RAM hit: BytesCopied is what commits
// copied, LoadedBytes what disk hits and prefetches read.
type Metrics struct {
	// Reads, counted at the end of each Fetch.
	Lookups           int64 // calls
	Fetches           int64 // calls
	RequestedBlocks   int64 // blocks named by Fetch
	DeviceHitBlocks   int64 // granted on the device without a copy, or brought to RAM from there
	RAMHitBlocks      int64 // granted without I/O, or copied from RAM to the device
	DiskHitBlocks     int64 // granted after a page was loaded
	RemoteHitBlocks   int64 // granted after a page came from another node
	MissedBlocks      int64 // not granted
	MovedBlocks       int64 // brought here, or found here, because they move to this node; in no other count
	RequestedTokens   int64 // tokens of the blocks above
	DeviceHitTokens   int64
	RAMHitTokens      int64
	DiskHitTokens     int64
	RemoteHitTokens   int64
	MissedTokens      int64
	Shortfalls        [reasonsCount]int64 // blocks not granted, by Reason
	LoadWaits         int64               // times that a Fetch waited for loads
	LoadWaitTime      time.Duration       // for which they waited
	CleanWaits        int64               // times that a Fetch or Reserve waited for blocks to be written down
	CleanWaitTime     time.Duration       // for which they waited
	LoadedPages       int64               // pages
	LoadedBytes       int64               // bytes of pages
	RemotePages       int64               // pages that came from other nodes
	RemoteBytes       int64               // bytes of those
	RemoteFailedPages int64               // pages that other nodes were asked for and did not come
	ServedPages       int64               // pages that others asked this node for and it has
	ServedAbsentPages int64               // pages that others asked this node for and it has not
	CorruptPages      int64               // loads that failed their checksum
	IdentityPages     int64               // loads that found another page's bytes
	LoadErrors        int64               // loads that failed otherwise
	DroppedCopies     int64               // disk copies dropped after a failed load, pages

	// Writes.
	Reserves         int64 // calls
	ReservedBlocks   int64 // blocks granted
	ExpiredAttempts  int64 // attempts that reached their deadline
	CommittedBlocks  int64 // blocks
	CommittedPages   int64 // pages
	CommittedBytes   int64 // bytes of pages: copied once, from staging to RAM
	DuplicateBlocks  int64 // blocks committed again with the same bytes
	DivergentBlocks  int64 // blocks committed again with other bytes
	NotDurableBlocks int64 // blocks that a durable commit could not bring to disk
	IncompleteBlocks int64 // blocks dropped because parts did not come in time

	// Between the tiers.
	FilledPages         int64 // copied from RAM to the device
	FilledBytes         int64 // bytes of pages
	LoweredPages        int64 // copied from the device to RAM
	LoweredBytes        int64 // bytes of pages
	GatherErrors        int64 // rows of commits that could not be read on the device
	DeviceEvictedBlocks int64 // copies that left the device for others
	DeviceEvictedBytes  int64 // bytes of their slots
	StoredBlocks        int64 // blocks written to disk
	StoredPages         int64 // pages
	StoredBytes         int64 // bytes of pages
	StoreErrors         int64 // batches that failed, but for room and bypass
	Bypasses            int64 // batches refused because the disk is bypassed
	DiskFullBatches     int64 // batches for which no room could be made
	EvictedBlocks       int64 // blocks that left RAM for others
	EvictedBytes        int64 // bytes of their slots
	EvictedUncopied     int64 // of these, blocks with a page that was nowhere else
	DiskEvictedBlocks   int64 // blocks that left the disk for others
	DiskEvictedBytes    int64 // bytes of their slots
	DroppedBlocks       int64 // blocks dropped by request
	Prefetches          int64 // calls
	PrefetchBlocks      int64 // blocks that prefetches began to bring up
	PrefetchUseful      int64 // of these, used while the prefetch held them
	PrefetchLate        int64 // of these, wanted by a Fetch before they were there
	PrefetchWasted      int64 // of these, not used before the deadline, the cancel or a drop

	// Now.
	Blocks         int64 // blocks in the index
	IndexBytes     int64 // memory of the index, policies not included
	Namespaces     int64
	Holds          int64 // not released
	Attempts       int64 // open
	DeviceBytes    int64 // slots on the device
	DeviceBlocks   int64 // blocks with a copy on the device
	DeviceInFlight int64 // slots on the device that are being filled
	QueueMoves     int64 // pages that wait for the device
	RAMLimitBytes  int64 // what pages may take
	LeasedBytes    int64 // slots in RAM that somebody uses
	DirtyBytes     int64 // slots in RAM that have to be written down before they can go
	CleanBytes     int64 // slots in RAM that can be evicted
	InFlightBytes  int64 // slots in RAM set aside or being loaded
	PinnedBytes    int64 // slots of blocks held by Pin
	ForeseenBytes  int64 // slots of blocks held by prefetches
	DiskBytes      int64 // slots on disk
	RAMBlocks      int64 // blocks with a page in RAM, those brought up and never granted not included
	DiskBlocks     int64 // blocks with a page on disk
	QueueBlocks    int64 // blocks that wait to be written down
	QueueLoads     int64 // pages that wait to be loaded
	Bypassed       bool  // the disk takes nothing at present
	RAMPolicy      string
	DiskPolicy     string
	IncompleteOpen int64 // blocks that wait for parts
}

func (m *Metrics) addTokens(blockTokens int64, requested int, tiers []Kind) {
	m.RequestedTokens += blockTokens * int64(requested)
	m.MissedTokens += blockTokens * int64(requested-len(tiers))
	for _, k := range tiers {
		switch k {
		case HBM:
			m.DeviceHitTokens += blockTokens
		case RAM:
			m.RAMHitTokens += blockTokens
		case NVMe:
			m.DiskHitTokens += blockTokens
		case Remote:
			m.RemoteHitTokens += blockTokens
		default:
			m.MissedTokens += blockTokens
		}
	}
}

// Metrics is a consistent snapshot.
func (h *Hierarchy) Metrics() Metrics {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.mu.metrics
	m.Blocks = int64(h.mu.index.live)
	m.IndexBytes = h.mu.index.bytes()
	m.Namespaces = int64(len(h.mu.byID))
	m.Attempts = int64(len(h.mu.attempts))
	m.RAMLimitBytes = h.mu.ramBytes
	m.DeviceBlocks = int64(len(h.mu.device.of))
	m.QueueMoves = int64(h.mu.device.moves.len())
	for _, t := range h.mu.tenantList {
		m.DeviceBytes += t.device
		m.DeviceInFlight += t.deviceAside
		m.LeasedBytes += t.ram[leased]
		m.DirtyBytes += t.ram[dirty]
		m.CleanBytes += t.ram[clean]
		m.InFlightBytes += t.aside
		m.PinnedBytes += t.pinned
		m.ForeseenBytes += t.foreseen
		m.DiskBytes += t.disk
		m.RAMBlocks += int64(t.ramOrder.Len())
		m.DiskBlocks += int64(t.diskOrder.Len())
		m.QueueBlocks += int64(t.dirtyq.live)
	}
	m.QueueBlocks += int64(h.mu.urgent.live)
	m.QueueLoads = int64(h.mu.loads.waiting)
	m.Bypassed = h.mu.bypass
	m.RAMPolicy = h.cfg.RAMPolicy
	if h.cfg.Durable != nil {
		m.DiskPolicy = h.cfg.DiskPolicy
	}
	m.IncompleteOpen = int64(len(h.mu.incomplete))
	return m
}

// TenantUsage is what a tenant uses of each tier.
type TenantUsage struct {
	Tenant      string
	RAMBytes    int64 // slots, those set aside included
	DiskBytes   int64 // slots
	DeviceBytes int64 // slots, those being filled included
	Quota       Quota
}

// Tenants lists the tenants that have a namespace, in the order in which they
// came.
func (h *Hierarchy) Tenants() []TenantUsage {
	h.mu.Lock()
	defer h.mu.Unlock()
	us := make([]TenantUsage, 0, len(h.mu.tenantList))
	for _, t := range h.mu.tenantList {
		us = append(us, TenantUsage{Tenant: t.name, RAMBytes: t.ram[leased] + t.ram[dirty] + t.ram[clean] + t.aside,
			DiskBytes: t.disk, DeviceBytes: t.device + t.deviceAside, Quota: t.quota})
	}
	return us
}

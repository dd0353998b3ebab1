package server

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// value is one exported number: a counter if its name ends in _total, else a
// gauge.
type value struct {
	name string // after "kvtier_"
	help string
	read func(m *Metrics) float64
}

func (v *value) kind() prometheus.ValueType {
	if strings.HasSuffix(v.name, "_total") {
		return prometheus.CounterValue
	}
	return prometheus.GaugeValue
}

// number makes a float of any count.
func number[T int | int64 | uint64](n T) float64 { return float64(n) }

// values are the numbers without labels, exported and shown by status.
var values = []value{
	{"node_uptime_seconds", "Time since the start.", func(m *Metrics) float64 { return m.Uptime.Seconds() }},
	{"server_attachments", "Engines whose attachment stream is held.", func(m *Metrics) float64 { return number(m.Attachments) }},
	{"server_orphan_tethers", "Processes that keep their hand-off socket without a stream.", func(m *Metrics) float64 { return number(m.OrphanTethers) }},
	{"server_leases", "Leases held.", func(m *Metrics) float64 { return number(m.Leases) }},
	{"server_overdue_leases", "Leases held past their deadline.", func(m *Metrics) float64 { return number(m.OverdueLeases) }},
	{"server_leased_bytes", "Bytes of the pages of all leases, counted once per lease.", func(m *Metrics) float64 { return number(m.LeasedBytes) }},
	{"server_attempts", "Write attempts open.", func(m *Metrics) float64 { return number(m.Attempts) }},
	{"server_staging_bytes", "Staging memory of all attachments.", func(m *Metrics) float64 { return number(m.StagingBytes) }},
	{"server_adopt_tokens", "Decisions of groups that not everybody has adopted.", func(m *Metrics) float64 { return number(m.AdoptTokens) }},
	{"server_prefetches", "Prefetches whose time is not over.", func(m *Metrics) float64 { return number(m.Prefetches) }},
	{"server_leases_overdue_total", "Leases that passed their deadline.", func(m *Metrics) float64 { return number(m.LeasesOverdue) }},
	{"server_leases_lost_total", "Leases whose slots were reused while they were held.", func(m *Metrics) float64 { return number(m.LeasesLost) }},
	{"server_attempts_expired_total", "Write attempts that passed their deadline.", func(m *Metrics) float64 { return number(m.AttemptsLate) }},
	{"server_adopt_tokens_expired_total", "Adopt tokens that nobody wanted in time.", func(m *Metrics) float64 { return number(m.TokensExpired) }},
	{"server_tethers_refused_total", "Hand-off connections refused.", func(m *Metrics) float64 { return number(m.TethersRefused) }},
	{"server_read_page_bytes_total", "Bytes streamed to clients that are not co-located.", func(m *Metrics) float64 { return number(m.ReadPageBytes) }},
	{"server_written_page_bytes_total", "Bytes streamed from clients that are not co-located.", func(m *Metrics) float64 { return number(m.WrittenPageBytes) }},
	{"server_corrupt_uploads_total", "Streamed pages that did not match their sender's checksum.", func(m *Metrics) float64 { return number(m.CorruptUploads) }},
	{"rpc_calls_in_flight", "Calls running, attachment streams apart.", func(m *Metrics) float64 { return number(m.RPC.InFlight) }},
	{"rpc_calls_refused_total", "Calls refused because too many were running.", func(m *Metrics) float64 { return number(m.RPC.Refused) }},
	{"rpc_peers_refused_total", "TLS connections refused: no TLS, or a certificate that is not accepted.", func(m *Metrics) float64 { return number(m.RPC.RefusedPeers) }},
	{"tls_certificate_expiry_timestamp_seconds", "Unix time at which the certificate expires; 0: there is none.", func(m *Metrics) float64 { return expiry(m.TLS.NotAfter) }},
	{"tls_reloads_total", "Times that new certificate files were taken.", func(m *Metrics) float64 { return number(m.TLS.Reloads) }},
	{"tls_reload_failures_total", "Times that new certificate files were no good: the old ones stay in use.", func(m *Metrics) float64 { return number(m.TLS.Failures) }},

	{"tier_lookups_total", "Lookups.", func(m *Metrics) float64 { return number(m.Hierarchy.Lookups) }},
	{"tier_fetches_total", "Fetches.", func(m *Metrics) float64 { return number(m.Hierarchy.Fetches) }},
	{"tier_requested_blocks_total", "Blocks named by fetches: hits and misses.", func(m *Metrics) float64 { return number(m.Hierarchy.RequestedBlocks) }},
	{"tier_missed_blocks_total", "Blocks not granted.", func(m *Metrics) float64 { return number(m.Hierarchy.MissedBlocks) }},
	{"tier_moved_blocks_total", "Blocks brought here because they move to this node; in no other count.", func(m *Metrics) float64 { return number(m.Hierarchy.MovedBlocks) }},
	{"tier_requested_tokens_total", "Tokens of the blocks named by fetches.", func(m *Metrics) float64 { return number(m.Hierarchy.RequestedTokens) }},
	{"tier_missed_tokens_total", "Tokens of the blocks not granted.", func(m *Metrics) float64 { return number(m.Hierarchy.MissedTokens) }},
	{"tier_load_waits_total", "Times that a fetch waited for the disk.", func(m *Metrics) float64 { return number(m.Hierarchy.LoadWaits) }},
	{"tier_clean_waits_total", "Times that a fetch or reserve waited for pages to be written down.", func(m *Metrics) float64 { return number(m.Hierarchy.CleanWaits) }},
	{"tier_load_wait_seconds_total", "Time that fetches waited for the disk: engines stood still meanwhile.", func(m *Metrics) float64 { return m.Hierarchy.LoadWaitTime.Seconds() }},
	{"tier_clean_wait_seconds_total", "Time that fetches and reserves waited for pages to be written down.", func(m *Metrics) float64 { return m.Hierarchy.CleanWaitTime.Seconds() }},
	{"tier_loaded_pages_total", "Pages loaded from disk.", func(m *Metrics) float64 { return number(m.Hierarchy.LoadedPages) }},
	{"tier_loaded_bytes_total", "Bytes of pages loaded from disk.", func(m *Metrics) float64 { return number(m.Hierarchy.LoadedBytes) }},
	{"tier_filled_pages_total", "Pages copied from RAM to the device.", func(m *Metrics) float64 { return number(m.Hierarchy.FilledPages) }},
	{"tier_filled_bytes_total", "Bytes of pages copied from RAM to the device.", func(m *Metrics) float64 { return number(m.Hierarchy.FilledBytes) }},
	{"tier_lowered_pages_total", "Pages copied from the device to RAM.", func(m *Metrics) float64 { return number(m.Hierarchy.LoweredPages) }},
	{"tier_lowered_bytes_total", "Bytes of pages copied from the device to RAM.", func(m *Metrics) float64 { return number(m.Hierarchy.LoweredBytes) }},
	{"tier_gather_errors_total", "Rows of commits that could not be read on the device.", func(m *Metrics) float64 { return number(m.Hierarchy.GatherErrors) }},
	{"tier_queue_moves", "Pages that wait for the device.", func(m *Metrics) float64 { return number(m.Hierarchy.QueueMoves) }},
	{"tier_corrupt_pages_total", "Loads that failed their checksum.", func(m *Metrics) float64 { return number(m.Hierarchy.CorruptPages) }},
	{"tier_identity_mismatch_pages_total", "Loads that found another page's bytes.", func(m *Metrics) float64 { return number(m.Hierarchy.IdentityPages) }},
	{"tier_load_errors_total", "Loads that failed otherwise.", func(m *Metrics) float64 { return number(m.Hierarchy.LoadErrors) }},
	{"tier_reserved_blocks_total", "Blocks for which room was set aside.", func(m *Metrics) float64 { return number(m.Hierarchy.ReservedBlocks) }},
	{"tier_committed_blocks_total", "Blocks committed.", func(m *Metrics) float64 { return number(m.Hierarchy.CommittedBlocks) }},
	{"tier_committed_pages_total", "Pages committed.", func(m *Metrics) float64 { return number(m.Hierarchy.CommittedPages) }},
	{"tier_committed_bytes_total", "Bytes of pages committed: copied once, from staging to RAM.", func(m *Metrics) float64 { return number(m.Hierarchy.CommittedBytes) }},
	{"tier_duplicate_blocks_total", "Blocks committed again with the same bytes.", func(m *Metrics) float64 { return number(m.Hierarchy.DuplicateBlocks) }},
	{"tier_divergent_blocks_total", "Blocks committed again with other bytes.", func(m *Metrics) float64 { return number(m.Hierarchy.DivergentBlocks) }},
	{"tier_not_durable_blocks_total", "Durable commits that the disk did not take.", func(m *Metrics) float64 { return number(m.Hierarchy.NotDurableBlocks) }},
	{"tier_incomplete_blocks_total", "Blocks dropped because parts did not come in time.", func(m *Metrics) float64 { return number(m.Hierarchy.IncompleteBlocks) }},
	{"tier_stored_pages_total", "Pages written to disk.", func(m *Metrics) float64 { return number(m.Hierarchy.StoredPages) }},
	{"tier_stored_bytes_total", "Bytes of pages written to disk.", func(m *Metrics) float64 { return number(m.Hierarchy.StoredBytes) }},
	{"tier_store_errors_total", "Batches that the disk did not take, for another reason than room.", func(m *Metrics) float64 { return number(m.Hierarchy.StoreErrors) }},
	{"tier_disk_full_batches_total", "Batches for which no room could be made on disk.", func(m *Metrics) float64 { return number(m.Hierarchy.DiskFullBatches) }},
	{"tier_evicted_uncopied_blocks_total", "Blocks evicted from RAM with a page that was nowhere else.", func(m *Metrics) float64 { return number(m.Hierarchy.EvictedUncopied) }},
	{"tier_dropped_blocks_total", "Blocks dropped by request.", func(m *Metrics) float64 { return number(m.Hierarchy.DroppedBlocks) }},
	{"tier_prefetches_total", "Prefetches.", func(m *Metrics) float64 { return number(m.Hierarchy.Prefetches) }},
	{"tier_prefetch_blocks_total", "Blocks admitted to a prefetch.", func(m *Metrics) float64 { return number(m.Hierarchy.PrefetchBlocks) }},
	{"tier_prefetch_useful_blocks_total", "Blocks used while a prefetch held them.", func(m *Metrics) float64 { return number(m.Hierarchy.PrefetchUseful) }},
	{"tier_prefetch_late_blocks_total", "Blocks wanted before their prefetch had loaded them.", func(m *Metrics) float64 { return number(m.Hierarchy.PrefetchLate) }},
	{"tier_prefetch_wasted_blocks_total", "Blocks prefetched and not used in time.", func(m *Metrics) float64 { return number(m.Hierarchy.PrefetchWasted) }},
	{"tier_index_blocks", "Blocks in the index.", func(m *Metrics) float64 { return number(m.Hierarchy.Blocks) }},
	{"tier_index_bytes", "Memory of the index.", func(m *Metrics) float64 { return number(m.Hierarchy.IndexBytes) }},
	{"tier_namespaces", "Namespaces registered.", func(m *Metrics) float64 { return number(m.Hierarchy.Namespaces) }},
	{"tier_leased_bytes", "Slots in RAM that somebody uses.", func(m *Metrics) float64 { return number(m.Hierarchy.LeasedBytes) }},
	{"tier_dirty_bytes", "Slots in RAM that have to be written down before they can go.", func(m *Metrics) float64 { return number(m.Hierarchy.DirtyBytes) }},
	{"tier_clean_bytes", "Slots in RAM that can be evicted.", func(m *Metrics) float64 { return number(m.Hierarchy.CleanBytes) }},
	{"tier_in_flight_bytes", "Slots in RAM set aside or being loaded.", func(m *Metrics) float64 { return number(m.Hierarchy.InFlightBytes) }},
	{"tier_pinned_bytes", "Slots of pinned blocks.", func(m *Metrics) float64 { return number(m.Hierarchy.PinnedBytes) }},
	{"tier_queue_blocks", "Blocks that wait to be written down.", func(m *Metrics) float64 { return number(m.Hierarchy.QueueBlocks) }},
	{"tier_queue_loads", "Pages that wait to be loaded.", func(m *Metrics) float64 { return number(m.Hierarchy.QueueLoads) }},

	{"nvme_reads_total", "Reads of pages.", func(m *Metrics) float64 { return number(m.NVMeIO.Reads) }},
	{"nvme_read_bytes_total", "Bytes of pages read.", func(m *Metrics) float64 { return number(m.NVMeIO.ReadBytes) }},
	{"nvme_read_seconds_total", "Time that reads took, waiting for their turn included.", func(m *Metrics) float64 { return m.NVMeIO.ReadTime.Seconds() }},
	{"nvme_writes_total", "Writes of pages; one may hold several.", func(m *Metrics) float64 { return number(m.NVMeIO.Writes) }},
	{"nvme_written_bytes_total", "Bytes written: pages, index, space that is written ahead.", func(m *Metrics) float64 { return number(m.NVMeIO.WrittenBytes) }},
	{"nvme_write_seconds_total", "Time that writes took, waiting for their turn included.", func(m *Metrics) float64 { return m.NVMeIO.WriteTime.Seconds() }},
	{"nvme_commits_total", "Groups of records made durable.", func(m *Metrics) float64 { return number(m.NVMeIO.Commits) }},
	{"nvme_commit_seconds_total", "Time that groups took: syncs and their records.", func(m *Metrics) float64 { return m.NVMeIO.CommitTime.Seconds() }},
	{"nvme_reads_in_flight", "Reads that wait or run.", func(m *Metrics) float64 { return number(m.NVMeIO.ReadsRunning) }},
	{"nvme_writes_in_flight", "Writes that run.", func(m *Metrics) float64 { return number(m.NVMeIO.WritesRunning) }},
	{"nvme_hung_reads", "Reads that do not answer.", func(m *Metrics) float64 { return number(m.NVMeIO.HungReads) }},
	{"nvme_hung_writes", "Writes that do not answer.", func(m *Metrics) float64 { return number(m.NVMeIO.HungWrites) }},
	{"nvme_read_errors_total", "Reads that failed.", func(m *Metrics) float64 { return number(m.NVMeIO.ReadErrors) }},
	{"nvme_write_errors_total", "Writes, syncs and commits that failed.", func(m *Metrics) float64 { return number(m.NVMeIO.WriteErrors) }},
	{"nvme_segments", "Segment files.", func(m *Metrics) float64 { return number(m.NVMeIO.Segments) }},

	{"tier_remote_pages_total", "Pages that came from other nodes.", func(m *Metrics) float64 { return number(m.Hierarchy.RemotePages) }},
	{"tier_remote_bytes_total", "Bytes of pages that came from other nodes.", func(m *Metrics) float64 { return number(m.Hierarchy.RemoteBytes) }},
	{"tier_remote_failed_pages_total", "Pages that other nodes were asked for and did not come.", func(m *Metrics) float64 { return number(m.Hierarchy.RemoteFailedPages) }},
	{"tier_served_pages_total", "Pages that other nodes asked for and this one has.", func(m *Metrics) float64 { return number(m.Hierarchy.ServedPages) }},
	{"tier_served_absent_pages_total", "Pages that other nodes asked for and this one has not.", func(m *Metrics) float64 { return number(m.Hierarchy.ServedAbsentPages) }},

	{"cluster_nodes_seen", "Nodes that answer gossip, this one included; 0: the node is alone.", func(m *Metrics) float64 { return number(m.Cluster.NodesSeen) }},
	{"cluster_peers_out", "Nodes that are left out of reads because they failed lately.", func(m *Metrics) float64 { return number(m.Cluster.Pages.PeersOut) }},
	{"directory_leader", "1 if this node leads the directory.", func(m *Metrics) float64 { return truth(m.Cluster.Leads) }},
	{"directory_leader_known", "1 if a leader is known.", func(m *Metrics) float64 { return truth(m.Cluster.Directory.HasLeader) }},
	{"directory_stalled", "1 if this replica is cut off because its disk hangs.", func(m *Metrics) float64 { return truth(m.Cluster.Directory.Stalled != "") }},
	{"directory_applied_total", "Entries of the log that this replica applied.", func(m *Metrics) float64 { return number(m.Cluster.Directory.Applied) }},
	{"directory_behind_entries", "Entries of the log here that are not applied.", func(m *Metrics) float64 { return number(m.Cluster.Directory.Behind) }},
	{"directory_claims", "Claims in the directory.", func(m *Metrics) float64 { return number(m.Cluster.DirectoryClaims) }},
	{"claims_pending", "Changes of this node that are not claimed yet.", func(m *Metrics) float64 { return number(m.Cluster.Claims.Pending) }},
	{"claims_batches_total", "Batches of claims that were applied.", func(m *Metrics) float64 { return number(m.Cluster.Claims.Batches) }},
	{"claims_changes_total", "Changes in those batches.", func(m *Metrics) float64 { return number(m.Cluster.Claims.Changes) }},
	{"claims_refused_batches_total", "Batches of which some claims found no room in the directory.", func(m *Metrics) float64 { return number(m.Cluster.Claims.Full) }},
	{"claims_unclaimed_blocks", "Blocks of this node that others do not know of, because the directory has no room for them.", func(m *Metrics) float64 { return number(m.Cluster.Unclaimed) }},
	{"claims_gaps_total", "Batches that were refused because others were missing.", func(m *Metrics) float64 { return number(m.Cluster.Claims.Gaps) }},
	{"claims_compares_total", "Comparisons of claims with the inventory.", func(m *Metrics) float64 { return number(m.Cluster.Claims.Compares) }},
	{"claims_repaired_buckets_total", "Buckets of claims that differed from the inventory.", func(m *Metrics) float64 { return number(m.Cluster.Claims.RepairedBuckets) }},
	{"sessions", "Sessions in the directory.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.Known) }},
	{"sessions_owned", "Sessions that this node owns.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.Owned) }},
	{"sessions_appends_total", "Appends to sessions of this node.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.Appends) }},
	{"sessions_appended_blocks_total", "Blocks appended to them.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.AppendedBlocks) }},
	{"sessions_takeovers_total", "Sessions taken over from nodes that were down.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.TakenOver) }},
	{"sessions_lost_blocks_total", "Blocks whose names were lost when a session was taken over.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.LostBlocks) }},
	{"sessions_moving", "Moves of sessions of this node that run or wait for their turn.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.Moving) }},
	{"sessions_move_bytes_total", "Bytes of pages that moves of sessions of this node sent.", func(m *Metrics) float64 { return number(m.Cluster.Sessions.MovedBytes) }},
	{"sessions_move_pause_seconds_total", "Time that appends were refused by moves that were done.", func(m *Metrics) float64 { return m.Cluster.Sessions.Paused.Seconds() }},
	{"transport_received_pages_total", "Pages received and verified.", func(m *Metrics) float64 { return number(m.Cluster.Pages.PagesReceived) }},
	{"transport_received_bytes_total", "Bytes of pages received and verified.", func(m *Metrics) float64 { return number(m.Cluster.Pages.BytesReceived) }},
	{"transport_corrupt_pages_total", "Copies that failed their checksum and were not used.", func(m *Metrics) float64 { return number(m.Cluster.Pages.PagesCorrupt) }},
	{"transport_fell_through_total", "Times that a page did not come from a source and went to the next.", func(m *Metrics) float64 { return number(m.Cluster.Pages.FellThrough) }},
	{"transport_in_flight_bytes", "Bytes asked of peers and not arrived.", func(m *Metrics) float64 { return number(m.Cluster.Pages.InFlightBytes) }},
	{"transport_peer_failures_total", "Times that a peer was left out.", func(m *Metrics) float64 { return number(m.Cluster.Pages.PeerFailures) }},
	{"transport_sent_pages_total", "Pages sent whole.", func(m *Metrics) float64 { return number(m.Cluster.Pages.PagesSent) }},
	{"transport_sent_bytes_total", "Bytes of pages sent.", func(m *Metrics) float64 { return number(m.Cluster.Pages.BytesSent) }},
	{"transport_loaded_bytes_total", "Bytes read from disk for other nodes.", func(m *Metrics) float64 { return number(m.Cluster.Pages.BytesLoaded) }},
	{"transport_doubts_total", "Copies sent from here that failed their checksum where they arrived.", func(m *Metrics) float64 { return number(m.Cluster.Pages.Doubts) }},
	{"transport_violations_total", "Connections ended because of a frame that may not be.", func(m *Metrics) float64 { return number(m.Cluster.Pages.Violations) }},
	{"transport_timeouts_total", "Connections cut because the other side was slow or silent.", func(m *Metrics) float64 { return number(m.Cluster.Pages.Timeouts) }},
	{"transport_cuts_total", "Connections that ended in the middle of a frame.", func(m *Metrics) float64 { return number(m.Cluster.Pages.Cuts) }},
	{"peer_port_connections", "Connections of other nodes.", func(m *Metrics) float64 { return number(m.Cluster.Port.Conns) }},
	{"peer_port_dial_failures_total", "Connections to other nodes that could not be made.", func(m *Metrics) float64 { return number(m.Cluster.Port.DialsFailed) }},
}

// truth is a flag as a metric.
func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// counterValues are the numbers by their Prometheus names.
func counterValues(m *Metrics) map[string]float64 {
	out := make(map[string]float64, len(values))
	for i := range values {
		out["kvtier_"+values[i].name] = values[i].read(m)
	}
	return out
}

// exporter is the only Prometheus collector of a node. It reads Metrics once per
// scrape, so that the identities between numbers hold in each.
type exporter struct{ node *node }

var (
	valueDescs = func() []*prometheus.Desc {
		out := make([]*prometheus.Desc, len(values))
		for i, v := range values {
			out[i] = prometheus.NewDesc("kvtier_"+v.name, v.help, nil, nil)
		}
		return out
	}()
	hitBlocksDesc     = prometheus.NewDesc("kvtier_tier_hit_blocks_total", "Blocks granted, by the tier that they came from.", []string{"tier"}, nil)
	hitTokensDesc     = prometheus.NewDesc("kvtier_tier_hit_tokens_total", "Tokens of the blocks granted, by the tier that they came from.", []string{"tier"}, nil)
	evictedBlocksDesc = prometheus.NewDesc("kvtier_tier_evicted_blocks_total", "Blocks that left a tier for others.", []string{"tier"}, nil)
	shortfallDesc     = prometheus.NewDesc("kvtier_tier_shortfall_blocks_total", "Blocks not granted, by reason.", []string{"reason"}, nil)
	usageDesc         = prometheus.NewDesc("kvtier_tier_bytes", "Bytes of a tier: budget, held, used, page, in_flight, dead.", []string{"tier", "what"}, nil)
	readyDesc         = prometheus.NewDesc("kvtier_tier_ready", "1 if the tier stores pages, 0 if it is bypassed or closed.", []string{"tier"}, nil)
	tenantDesc        = prometheus.NewDesc("kvtier_tenant_bytes", "Slots that a tenant's pages take of a tier.", []string{"tenant", "tier"}, nil)
	movesDesc         = prometheus.NewDesc("kvtier_sessions_moves_total", "Moves of sessions of this node that ended, by outcome.", []string{"outcome"}, nil)
	portRefusedDesc   = prometheus.NewDesc("kvtier_peer_port_refused_total", "Connections of others that were refused, by reason.", []string{"reason"}, nil)
	callsDesc         = prometheus.NewDesc("kvtier_rpc_call_seconds", "Time that calls took, by method.", []string{"method"}, nil)
	errorsDesc        = prometheus.NewDesc("kvtier_rpc_errors_total", "Calls that failed, by method.", []string{"method"}, nil)
	infoDesc          = prometheus.NewDesc("kvtier_node_info", "1, with the version of the program.", []string{"version"}, nil)
)

// Describe implements prometheus.Collector.
func (e *exporter) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range valueDescs {
		ch <- d
	}
	for _, d := range []*prometheus.Desc{
		hitBlocksDesc, hitTokensDesc, evictedBlocksDesc, shortfallDesc, usageDesc, readyDesc, tenantDesc, movesDesc, portRefusedDesc, callsDesc, errorsDesc, infoDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (e *exporter) Collect(ch chan<- prometheus.Metric) {
	m := e.node.metrics()
	for i := range values {
		ch <- prometheus.MustNewConstMetric(valueDescs[i], values[i].kind(), values[i].read(&m))
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(infoDesc, 1, e.node.version)
	h := &m.Hierarchy
	counter(hitBlocksDesc, h.RAMHitBlocks, "ram")
	counter(hitTokensDesc, h.RAMHitTokens, "ram")
	counter(evictedBlocksDesc, h.EvictedBlocks, "ram")
	collectUsage(gauge, "ram", &m.RAM)
	if m.HBM != nil {
		counter(hitBlocksDesc, h.DeviceHitBlocks, "hbm")
		counter(hitTokensDesc, h.DeviceHitTokens, "hbm")
		counter(evictedBlocksDesc, h.DeviceEvictedBlocks, "hbm")
		collectUsage(gauge, "hbm", m.HBM)
	}
	if m.NVMe != nil {
		counter(hitBlocksDesc, h.DiskHitBlocks, "nvme")
		counter(hitTokensDesc, h.DiskHitTokens, "nvme")
		counter(evictedBlocksDesc, h.DiskEvictedBlocks, "nvme")
		collectUsage(gauge, "nvme", m.NVMe)
	}
	if m.Cluster.NodesSeen > 0 {
		counter(hitBlocksDesc, h.RemoteHitBlocks, "remote")
		counter(hitTokensDesc, h.RemoteHitTokens, "remote")
		x := &m.Cluster.Sessions
		counter(movesDesc, x.MovesDone, "done")
		counter(movesDesc, x.MovesAborted, "aborted")
		counter(movesDesc, x.MovesSuperseded, "superseded")
		for reason, n := range m.Cluster.Port.Refused {
			counter(portRefusedDesc, n, reason)
		}
	}
	for r, n := range h.Shortfalls {
		if reason := tier.Reason(r); reason != tier.NoReason {
			counter(shortfallDesc, n, reason.String())
		}
	}
	for _, t := range e.node.hier.Tenants() {
		gauge(tenantDesc, float64(t.RAMBytes), t.Tenant, "ram")
		gauge(tenantDesc, float64(t.DiskBytes), t.Tenant, "nvme")
		if m.HBM != nil {
			gauge(tenantDesc, float64(t.DeviceBytes), t.Tenant, "hbm")
		}
	}
	collectCalls(ch, m.RPC.Calls)
}

func collectUsage(gauge func(d *prometheus.Desc, v float64, labels ...string), name string, u *tier.Usage) {
	for _, b := range [...]struct {
		what  string
		bytes int64
	}{
		{"budget", u.BudgetBytes}, {"held", u.HeldBytes}, {"used", u.UsedBytes},
		{"page", u.PageBytes}, {"in_flight", u.InFlightBytes}, {"dead", u.DeadBytes},
	} {
		gauge(usageDesc, float64(b.bytes), name, b.what)
	}
	ready := 0.0
	if u.State == tier.Ready {
		ready = 1
	}
	gauge(readyDesc, ready, name)
}

func collectCalls(ch chan<- prometheus.Metric, calls []rpc.CallMetrics) {
	for i := range calls {
		c := &calls[i]
		buckets := make(map[float64]uint64, rpc.LatencyBuckets-1)
		sum := uint64(0)
		for b := range rpc.LatencyBuckets - 1 {
			sum += c.Latency[b]
			buckets[float64(uint64(1)<<b)*1e-6] = sum
		}
		count := sum + c.Latency[rpc.LatencyBuckets-1]
		ch <- prometheus.MustNewConstHistogram(callsDesc, count, c.Seconds, buckets, c.Name)
		ch <- prometheus.MustNewConstMetric(errorsDesc, prometheus.CounterValue, float64(c.Errors), c.Name)
	}
}

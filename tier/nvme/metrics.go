package nvme

import (
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/tier"
)

// Metrics are counts since Open.
type Metrics struct {
	StoredBytes     int64 // page lengths made durable
	WrittenBytes    int64 // written to segments for pages, whole units
	PrewrittenBytes int64 // zeros written to new segments
	IndexBytes      int64 // written by the index: log, tables, manifest
	ReadBytes       int64 // page lengths loaded
	Writes          int64 // writes to segments; one may hold several pages
	Reads           int64
	Groups          int64 // commits to the index
	GroupPages      int64 // pages in them
	SegmentSyncs    int64
	IndexSyncs      int64

	WriteTime  Latency // of a write to a segment, waiting for its turn included
	CommitTime Latency // of a group: syncs and commit to the index
	ReadTime   Latency // of a load without its verification, waiting included

	ReadErrors      int64
	WriteErrors     int64 // segments, syncs and index
	GrowErrors      int64 // segments that could not be added
	Corrupt         int64 // pages that failed their checksum, Identity included
	Identity        int64 // pages that held another page's bytes
	IndexCorrupt    int64 // damaged blocks that the index reported
	AbandonedReads  int64 // loads that left a read behind
	HungReads       int64 // gauge: reads that do not answer
	HungWrites      int64 // gauge
	ReadsRunning    int64 // gauge: loads that wait or read
	WritesRunning   int64 // gauge
	Uncommitted     int64 // gauge: writes done whose pages wait for the committer
	WritesHeld      int64 // writes that waited for reads
	UnalignedReads  int64 // pages that went through a buffer
	UnalignedWrites int64
	Bypasses        int64 // times that the tier went into bypass

	SegmentsAdded   int64
	SegmentsRemoved int64
	RecordsDropped  int64 // by Recover: damaged, foreign, of a missing segment
	Recovered       int64 // pages found by Recover
}

// WriteAmplification is the bytes written per page byte, without the zeros that
// were written ahead once. 0 if nothing was stored.
func (m Metrics) WriteAmplification() float64 {
	if m.StoredBytes == 0 {
		return 0
	}
	return float64(m.WrittenBytes+m.IndexBytes) / float64(m.StoredBytes)
}

// IO is what tiers of any kind tell of their medium.
func (t *Tier) IO() tier.IO {
	m := t.Metrics()
	t.mu.Lock()
	segments := int64(len(t.segments))
	t.mu.Unlock()
	return tier.IO{
		Reads: m.ReadTime.Count, Writes: m.WriteTime.Count, Commits: m.CommitTime.Count,
		ReadBytes: m.ReadBytes, WrittenBytes: m.WrittenBytes + m.PrewrittenBytes + m.IndexBytes,
		ReadTime: m.ReadTime.Sum, WriteTime: m.WriteTime.Sum, CommitTime: m.CommitTime.Sum,
		ReadsRunning: m.ReadsRunning, WritesRunning: m.WritesRunning, HungReads: m.HungReads, HungWrites: m.HungWrites,
		ReadErrors: m.ReadErrors, WriteErrors: m.WriteErrors, Segments: segments,
	}
}

// LatencyBounds are the upper bounds of the classes of a Latency; the last
// class is open.
var LatencyBounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond,
	20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second,
}

// Latency is a histogram.
type Latency struct {
	Count  int64
	Sum    time.Duration
	Counts [len(LatencyBounds) + 1]int64
}

type latency struct {
	sum    atomic.Int64
	counts [len(LatencyBounds) + 1]atomic.Int64
}

func (l *latency) observe(d time.Duration) {
	i := 0
	for i < len(LatencyBounds) && d > LatencyBounds[i] {
		i++
	}
	l.counts[i].Add(1)
	l.sum.Add(int64(d))
}

func (l *latency) load() Latency {
	out := Latency{Sum: time.Duration(l.sum.Load())}
	for i := range l.counts {
		out.Counts[i] = l.counts[i].Load()
		out.Count += out.Counts[i]
	}
	return out
}

type counters struct {
	storedBytes, writeBytes, prewritten, indexBytes, readBytes  atomic.Int64
	writes, reads, groups, groupPages, segmentSyncs, indexSyncs atomic.Int64
	readErrors, writeErrors, growErrors                         atomic.Int64
	corrupt, identity, indexCorrupt                             atomic.Int64
	readsLeft, hungReads, hungWrites, bypasses                  atomic.Int64
	segmentsAdded, segmentsRemoved, recordsDropped, recovered   atomic.Int64
	writeTime, commitTime, readTime                             latency
}

// Metrics returns the counts. It may be called at any time, also after Close.
func (t *Tier) Metrics() Metrics {
	c := &t.counters
	t.pace.mu.Lock()
	held, reading, writing := t.pace.held, t.pace.reads, t.pace.writes
	t.pace.mu.Unlock()
	t.queue.mu.Lock()
	uncommitted := len(t.queue.runs)
	t.queue.mu.Unlock()
	return Metrics{
		StoredBytes: c.storedBytes.Load(), WrittenBytes: c.writeBytes.Load(), PrewrittenBytes: c.prewritten.Load(),
		IndexBytes: c.indexBytes.Load(), ReadBytes: c.readBytes.Load(),
		Writes: c.writes.Load(), Reads: c.reads.Load(), Groups: c.groups.Load(), GroupPages: c.groupPages.Load(),
		SegmentSyncs: c.segmentSyncs.Load(), IndexSyncs: c.indexSyncs.Load(),
		WriteTime: c.writeTime.load(), CommitTime: c.commitTime.load(), ReadTime: c.readTime.load(),
		ReadErrors: c.readErrors.Load(), WriteErrors: c.writeErrors.Load(), GrowErrors: c.growErrors.Load(),
		Corrupt: c.corrupt.Load(), Identity: c.identity.Load(), IndexCorrupt: c.indexCorrupt.Load(),
		AbandonedReads: c.readsLeft.Load(), HungReads: c.hungReads.Load(), HungWrites: c.hungWrites.Load(),
		ReadsRunning: int64(reading), WritesRunning: int64(writing), Uncommitted: int64(uncommitted),
		WritesHeld: held, UnalignedReads: t.bounces.reads.Load(), UnalignedWrites: t.bounces.writes.Load(),
		Bypasses: c.bypasses.Load(), SegmentsAdded: c.segmentsAdded.Load(), SegmentsRemoved: c.segmentsRemoved.Load(),
		RecordsDropped: c.recordsDropped.Load(), Recovered: c.recovered.Load(),
	}
}

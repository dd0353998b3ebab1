package transport

import "sync/atomic"

// counters are what Metrics is made of.
type counters struct {
	fetches       atomic.Int64
	pagesReceived atomic.Int64
	bytesReceived atomic.Int64
	pagesCorrupt  atomic.Int64
	pagesJoined   atomic.Int64
	fellThrough   atomic.Int64
	outcomes      [256]atomic.Int64 // pages by Reason
	peerFailures  atomic.Int64

	pagesSent    atomic.Int64
	bytesSent    atomic.Int64
	pagesMissing atomic.Int64
	pagesLoaded  atomic.Int64
	bytesLoaded  atomic.Int64
	loadsFailed  atomic.Int64
	doubts       atomic.Int64
	owed         atomic.Int64 // page bytes of requests that have not ended

	violations atomic.Int64
	timeouts   atomic.Int64
	cuts       atomic.Int64
}

func (c *counters) settled(why Reason) { c.outcomes[why].Add(1) }

// loaded counts a page read from disk for another node.
func (c *counters) loaded(bytes int64, err error) {
	if err != nil {
		c.loadsFailed.Add(1)
		return
	}
	c.pagesLoaded.Add(1)
	c.bytesLoaded.Add(bytes)
}

// ended counts why a connection ended, if it was not closed in good order.
func (c *counters) ended(err error) {
	switch {
	case err == nil:
	case isProtocol(err):
		c.violations.Add(1)
	case isTimeout(err):
		c.timeouts.Add(1)
	case isCut(err):
		c.cuts.Add(1)
	}
}

// Metrics counts what a Transport did.
type Metrics struct {
	// Fetching.
	Fetches       int64            // calls
	PagesReceived int64            // verified
	BytesReceived int64            // of them
	PagesCorrupt  int64            // copies that failed their checksum and were not used
	PagesJoined   int64            // that another Fetch was bringing already
	FellThrough   int64            // times that a page did not come from a source and went to the next
	PagesFailed   map[string]int64 // pages that came from no source, by Reason
	InFlightBytes int64            // asked of peers and not arrived
	PeerFailures  int64            // times that a peer was left out
	PeersOut      int64            // peers left out now

	// Serving.
	PagesSent     int64 // whole
	BytesSent     int64 // of pages, whole or not
	PagesMissing  int64 // asked for and not there, or not readable
	PagesLoaded   int64 // read from disk for others
	BytesLoaded   int64
	LoadsFailed   int64
	Doubts        int64 // copies sent from here that failed their checksum where they arrived
	OwedBytes     int64 // of requests that have not ended
	PinnedBytes   int64 // of requests that have been opened
	BufferedBytes int64 // memory of the buffers for pages from disk

	// Connections, both ways.
	Violations int64 // ended because of a frame that may not be
	Timeouts   int64 // cut by a deadline: slow, silent, or idle for long
	Cuts       int64 // ended in the middle of a frame
}

// Metrics is a snapshot.
func (t *Transport) Metrics() Metrics {
	c := &t.metrics
	m := Metrics{
		Fetches: c.fetches.Load(), PagesReceived: c.pagesReceived.Load(), BytesReceived: c.bytesReceived.Load(),
		PagesCorrupt: c.pagesCorrupt.Load(), PagesJoined: c.pagesJoined.Load(), FellThrough: c.fellThrough.Load(),
		PagesFailed: map[string]int64{}, InFlightBytes: t.inflight.inUse(), PeerFailures: c.peerFailures.Load(),
		PagesSent: c.pagesSent.Load(), BytesSent: c.bytesSent.Load(), PagesMissing: c.pagesMissing.Load(),
		PagesLoaded: c.pagesLoaded.Load(), BytesLoaded: c.bytesLoaded.Load(), LoadsFailed: c.loadsFailed.Load(),
		Doubts: c.doubts.Load(), OwedBytes: c.owed.Load(), PinnedBytes: t.serving.inUse(), BufferedBytes: t.loads.heldBytes(),
		Violations: c.violations.Load(), Timeouts: c.timeouts.Load(), Cuts: c.cuts.Load(),
	}
	for _, s := range sentinels {
		m.PagesFailed[s.reason.String()] = c.outcomes[s.reason].Load()
	}
	for _, p := range t.peers() {
		if p.out() {
			m.PeersOut++
		}
	}
	return m
}

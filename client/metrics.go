package client

import (
	"slices"
	"sync/atomic"
)

// counts is what a client counts, over all its attachments.
type counts struct {
	fetches, pages, streamed, committed atomic.Int64
	revoked, renewed, lost, corrupt     atomic.Int64
	attached, stalls, unavailable       atomic.Int64
}

// Metrics is a snapshot of what a client has done and holds.
type Metrics struct {
	Fetches       int64 // Fetch calls that reached a node
	Pages         int64 // page references granted, or pages received, by Fetch
	StreamedBytes int64 // bytes of pages received and sent in streams
	CommittedRows int64 // rows that Commit decided
	Revoked       int64 // leases that the node asked back
	Renewed       int64 // renewals made by the client itself
	Lost          int64 // views whose slot was reused while they were open
	Corrupt       int64 // streamed pages with a wrong checksum
	Attached      int64 // attachments after the first try
	Stalls        int64 // times that the node fell silent
	Unavailable   int64 // calls that failed at once because no node was there
	Leases        int64 // held now, not counting streamed ones
	Views         int64 // open now, of those
	MappedBytes   int64 // mapped now, of the current attachment
	PrivateBytes  int64 // of streamed leases and attempts now
}

// Metrics returns a snapshot. It may be called after Close.
func (c *Client) Metrics() Metrics {
	m := Metrics{
		Fetches: c.counts.fetches.Load(), Pages: c.counts.pages.Load(), StreamedBytes: c.counts.streamed.Load(),
		CommittedRows: c.counts.committed.Load(), Revoked: c.counts.revoked.Load(), Renewed: c.counts.renewed.Load(),
		Lost: c.counts.lost.Load(), Corrupt: c.counts.corrupt.Load(), Attached: c.counts.attached.Load(),
		Stalls: c.counts.stalls.Load(), Unavailable: c.counts.unavailable.Load(),
		PrivateBytes: c.private.Load() + c.staged.Load(),
	}
	c.mu.Lock()
	links := slices.Clone(c.past)
	c.mu.Unlock()
	if l := c.link.Load(); l != nil && l.extents != nil {
		m.MappedBytes = l.extents.mappedBytes()
		links = append(links, l)
	}
	for _, l := range links {
		_, views := l.held()
		m.Views += views
		l.mu.Lock()
		m.Leases += int64(len(l.leases))
		l.mu.Unlock()
	}
	return m
}

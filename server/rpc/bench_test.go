package rpc

import (
	"slices"
	"testing"
	"time"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// BenchmarkStream compares a fetch of 64 blocks with an empty call on the same
// stream, alternating; release goes one-way outside the timed region.
func BenchmarkStream(b *testing.B) {
	_, c := serveFake(b)
	s := attachFake(b, c)
	names := packedNames(64)
	var empty, fetch []time.Duration
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		send(b, s, 1, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Renew{Renew: &kvtierv1.RenewRequest{}}})
		recv(b, s)
		empty = append(empty, time.Since(start))
		m := fetchMessage(names, 0)
		start = time.Now()
		send(b, s, 2, m)
		lease := recv(b, s).GetFetch().GetLeaseId()
		fetch = append(fetch, time.Since(start))
		send(b, s, 0, &kvtierv1.AttachRequest{Message: &kvtierv1.AttachRequest_Release{Release: &kvtierv1.ReleaseRequest{LeaseIds: []uint64{lease}}}})
	}
	b.ReportMetric(float64(median(empty).Nanoseconds())/1e3, "empty-us")
	b.ReportMetric(float64(median(fetch).Nanoseconds())/1e3, "fetch-us")
	b.ReportMetric(float64(median(fetch))/float64(median(empty)), "ratio")
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

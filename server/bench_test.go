package server_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/server/servertest"
)

// BenchmarkFetch64 compares a fetch of 64 resident blocks from a node in another
// process with an empty call of the same kind, alternating; each time another prefix; releases go one-way
// outside the timed region.
func BenchmarkFetch64(b *testing.B) {
	for name, unary := range map[string]bool{"stream": false, "unary": true} {
		b.Run(name, func(b *testing.B) { benchmarkFetch(b, unary) })
	}
}

func benchmarkFetch(b *testing.B, unary bool) {
	cfg := servertest.Config(b)
	startChild(b, "node", cfg.Socket)
	c, err := client.Open(b.Context(), client.Config{Socket: cfg.Socket, UnaryCalls: unary, StallTimeout: 5 * time.Second})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	ns, err := c.RegisterNamespace(b.Context(), testNamespace(4096, 1))
	if err != nil {
		b.Fatal(err)
	}
	names := blockNames(0, 10240)
	for at := 0; at < len(names); at += 64 {
		for _, o := range write(b, c, ns, names[at:at+64]) {
			if o != client.OutcomeCommitted {
				b.Fatal(o)
			}
		}
	}
	var empty, fetch []time.Duration
	at := 0
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		if err := c.Renew(b.Context(), 0); err != nil {
			b.Fatal(err)
		}
		empty = append(empty, time.Since(start))
		req := client.FetchRequest{Namespace: ns, Names: names[at : at+64]}
		start = time.Now()
		l, err := c.Fetch(b.Context(), req)
		fetch = append(fetch, time.Since(start))
		if err != nil || l.Usable != 64 {
			b.Fatal(err)
		}
		l.ReleaseAsync()
		at = (at + 64) % len(names)
	}
	mid := func(d []time.Duration) time.Duration { slices.Sort(d); return d[len(d)/2] }
	e, f := mid(empty), mid(fetch)
	b.ReportMetric(float64(e.Nanoseconds())/1e3, "empty-us")
	b.ReportMetric(float64(f.Nanoseconds())/1e3, "fetch-us")
	b.ReportMetric(float64(f)/float64(e), "ratio")
}

package bench

import (
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// maxLatency is the longest time a Latency tells apart; longer ones count as it.
const maxLatency = 10 * time.Minute

// Latency collects times. The zero value is ready. Safe for concurrent use.
type Latency struct {
	mu   sync.Mutex
	hist *hdrhistogram.Histogram // nanoseconds, three significant digits
}

// Add records d.
func (l *Latency) Add(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hist == nil {
		l.hist = hdrhistogram.New(1, int64(maxLatency), 3)
	}
	// The bounds of the histogram make an error impossible.
	_ = l.hist.RecordValue(int64(min(max(d, 1), maxLatency)))
}

// Count is the number of recorded times.
func (l *Latency) Count() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hist == nil {
		return 0
	}
	return l.hist.TotalCount()
}

// Quantiles are all zero if nothing was recorded.
func (l *Latency) Quantiles() Quantiles {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hist == nil {
		return Quantiles{}
	}
	at := func(q float64) float64 { return float64(l.hist.ValueAtQuantile(q)) / 1e3 }
	return Quantiles{P50: at(50), P95: at(95), P99: at(99), Max: float64(l.hist.Max()) / 1e3}
}

// Reset forgets what was recorded.
func (l *Latency) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hist = nil
}

package bench

import (
	"math"
	"sync"
	"testing"
	"time"
)

func TestLatencyQuantiles(t *testing.T) {
	var l Latency
	if q := l.Quantiles(); q != (Quantiles{}) {
		t.Errorf("nothing recorded: %v", q)
	}
	for i := 1; i <= 1000; i++ {
		l.Add(time.Duration(i) * time.Microsecond)
	}
	q := l.Quantiles()
	for _, c := range []struct{ got, want float64 }{{q.P50, 500}, {q.P95, 950}, {q.P99, 990}, {q.Max, 1000}} {
		if math.Abs(c.got-c.want)/c.want > .002 {
			t.Errorf("got %v, want %v in %v", c.got, c.want, q)
		}
	}
}

func TestLatencyBounds(t *testing.T) {
	var l Latency
	l.Add(-time.Second)
	l.Add(time.Hour)
	if q := l.Quantiles(); l.Count() != 2 || q.Max < float64(maxLatency.Microseconds())*.99 {
		t.Errorf("count %d, %v", l.Count(), q)
	}
	l.Reset()
	if l.Count() != 0 {
		t.Errorf("count %d after Reset", l.Count())
	}
}

func TestLatencyIsSafe(t *testing.T) {
	var l Latency
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 1000 {
				l.Add(time.Duration(i))
				l.Quantiles()
			}
		})
	}
	wg.Wait()
	if l.Count() != 4000 {
		t.Errorf("count %d, want 4000", l.Count())
	}
}

package cluster

import (
	"context"
	"sync"
	"time"
)

// Pace holds a rate of bytes that are copied to other nodes: a bucket that is empty at
// the start, so that no burst goes above the rate, however short the run. nil: no limit.
// Safe for concurrent use.
type Pace struct {
	bytesPerSecond float64
	mu             sync.Mutex
	next           time.Time // when the bytes so far have gone
}

// catchUp is for how long a rate that was not reached is made up for.
const catchUp = time.Second

// NewPace returns a Pace of so many bytes a second; nil for 0 and less.
func NewPace(bytesPerSecond int64) *Pace {
	if bytesPerSecond <= 0 {
		return nil
	}
	return &Pace{bytesPerSecond: float64(bytesPerSecond)}
}

// Step is how many bytes go at once: a tenth of a second's, at most most.
func (p *Pace) Step(most int64) int64 {
	if p == nil {
		return most
	}
	return max(1, min(most, int64(p.bytesPerSecond/10)))
}

// Wait waits until so many bytes may have gone, those of earlier calls before them. The
// error is that of ctx.
func (p *Pace) Wait(ctx context.Context, bytes int64) error {
	if p == nil || bytes <= 0 {
		return ctx.Err()
	}
	p.mu.Lock()
	if first := time.Now().Add(-catchUp); p.next.IsZero() {
		p.next = time.Now()
	} else if p.next.Before(first) {
		p.next = first
	}
	p.next = p.next.Add(time.Duration(float64(bytes) / p.bytesPerSecond * float64(time.Second)))
	at := p.next
	p.mu.Unlock()
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

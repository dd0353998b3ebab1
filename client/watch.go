package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// restTicks without a call put the watch to rest: an idle engine costs nothing.
const restTicks = 128

// minRenew bounds the pace of renewals where the node grants very short leases.
const minRenew = 50 * time.Millisecond

// watch is the clock of a link: while calls are made it ticks, detects a silent
// node and fails calls whose deadline passed; at rest it only wakes to renew
// leases. A timer per call would cost more than the call.
func (l *link) watch() {
	interval := l.client.cfg.StallTimeout / (stallTicks + 1)
	st := stall{interval: interval}
	timer := time.NewTimer(l.sleep(time.Now(), interval))
	defer timer.Stop()
	idle, begun := 0, uint64(0)
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.nudge:
		case <-timer.C:
		}
		now := time.Now()
		if b := l.begun.Load(); b != begun || l.inFlight() > 0 {
			begun, idle = b, 0
		} else {
			idle++
		}
		l.tick(&st, now)
		wait := interval
		if idle >= restTicks && !st.open {
			l.resting.Store(true)
			if l.begun.Load() == begun {
				st.pause()
				wait = time.Hour
			} else {
				l.resting.Store(false)
			}
		}
		timer.Reset(l.sleep(now, wait))
	}
}

func (l *link) inFlight() int {
	n := int(l.asked.Load())
	if l.mux != nil {
		n += l.mux.waiting()
	}
	return n
}

func (l *link) tick(st *stall, now time.Time) {
	switch st.tick(now, l.inFlight(), l.heard.Load()) {
	case ping:
		l.ping()
	case trip:
		l.open()
	case mend:
		l.mend()
	}
	if st.open && l.mux == nil {
		l.ping() // a stream needs one ping only: it is answered when the node is back
	}
	if l.mux != nil {
		l.mux.sweep(now)
		l.renewLeases(now)
	}
}

// called notes the begin of a call and wakes a resting watch.
func (l *link) called() {
	l.begun.Add(1)
	if l.resting.Load() && l.resting.CompareAndSwap(true, false) {
		l.wake()
	}
}

// ping asks the node for a sign of life, unless it is being asked already.
func (l *link) ping() {
	if l.mux != nil {
		l.mux.post(func(o *outbox) { o.pings = 1 })
		return
	}
	if !l.pinging.CompareAndSwap(false, true) {
		return
	}
	l.routines.Go(func() { // owner: link; exits with its answer or ctx; bound: 1
		defer l.pinging.Store(false)
		ctx, cancel := context.WithTimeout(l.ctx, l.client.cfg.CallTimeout)
		defer cancel()
		if _, err := l.pages.Renew(ctx, &kvtierv1.RenewRequest{}, grpc.WaitForReady(true)); answered(err) {
			l.heard.Add(1)
		}
	})
}

// open opens the breaker: what waits fails, what comes fails at once.
func (l *link) open() {
	err := fmt.Errorf("node silent for %v: %w", l.client.cfg.StallTimeout, paging.ErrUnavailable)
	l.silent.Store(true)
	l.client.counts.stalls.Add(1)
	l.client.log.Warn("node does not answer: calls fail until it is heard again")
	l.mu.Lock()
	trip := l.trip
	l.mu.Unlock()
	trip(err)
	if l.mux != nil {
		l.mux.failAll(err, false)
	}
}

func (l *link) mend() {
	l.mu.Lock()
	l.tripped, l.trip = context.WithCancelCause(l.ctx)
	l.mu.Unlock()
	l.silent.Store(false)
	l.client.stir()
	l.client.log.Info("node answers again")
}

// sleep shortens wait to the next renewal and notes when the watch wakes, so
// that register nudges it for a lease that is due earlier.
func (l *link) sleep(now time.Time, wait time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.renewDue.IsZero() {
		wait = min(wait, max(l.renewDue.Sub(now), 0))
	}
	l.wakeAt = now.Add(wait)
	return wait
}

// renewLeases extends the leases that are half way to their deadline, one
// message per time to live. Beyond MaxHold a lease is left to its deadline.
func (l *link) renewLeases(now time.Time) {
	l.mu.Lock()
	if l.renewDue.IsZero() || now.Before(l.renewDue) {
		l.mu.Unlock()
		return
	}
	l.renewDue = time.Time{}
	due := map[time.Duration][]uint64{}
	for id, lease := range l.leases {
		if lease.renewAt.After(lease.heldUntil) || lease.state.Load()&stateEnded != 0 {
			continue
		}
		if !lease.renewAt.After(now) {
			due[lease.TTL] = append(due[lease.TTL], id)
			lease.renewAt = now.Add(max(lease.TTL/2, minRenew))
		}
		if l.renewDue.IsZero() || lease.renewAt.Before(l.renewDue) {
			l.renewDue = lease.renewAt
		}
	}
	l.mu.Unlock()
	for ttl, ids := range due {
		l.client.counts.renewed.Add(int64(len(ids)))
		l.mux.post(func(o *outbox) { o.renewals = append(o.renewals, renewal{ttl, ids}) })
	}
}

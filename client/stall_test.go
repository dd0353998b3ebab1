package client

import (
	"testing"
	"testing/synctest"
	"time"
)

const testInterval = 8 * time.Millisecond

// run feeds punctual ticks until the breaker says something, at most n.
func (s *stall) run(now *time.Time, n, asked int, heard uint64) verdict {
	for range n {
		*now = now.Add(s.interval)
		if v := s.tick(*now, asked, heard); v != calm {
			return v
		}
	}
	return calm
}

func TestStallPingsThenTripsThenMends(t *testing.T) {
	s, now := stall{interval: testInterval}, time.Unix(1, 0)
	s.tick(now, 0, 7)
	s.tick(now.Add(testInterval), 0, 7)
	now = now.Add(testInterval)
	start := now
	if v := s.run(&now, 10, 1, 7); v != ping {
		t.Fatalf("first %v, want a ping", v)
	}
	if v := s.run(&now, 10, 1, 7); v != trip {
		t.Fatalf("then %v, want a trip", v)
	}
	if d := now.Sub(start); d > 48*time.Millisecond {
		t.Errorf("a silent node held calls up for %v", d)
	}
	if v := s.run(&now, 100, 0, 7); v != calm || !s.open {
		t.Errorf("while silent: %v, open %v", v, s.open)
	}
	if v := s.run(&now, 1, 0, 8); v != mend || s.open {
		t.Errorf("when heard again: %v, open %v", v, s.open)
	}
	if v := s.run(&now, 100, 0, 8); v != calm {
		t.Errorf("with nothing asked: %v", v)
	}
}

func TestStallTakesAnyAnswerAsLife(t *testing.T) {
	s, now := stall{interval: testInterval}, time.Unix(1, 0)
	for heard := range uint64(1000) {
		if v := s.run(&now, stallTicks-2, 1, heard); v == trip {
			t.Fatal("tripped although the node spoke every few ticks")
		}
	}
}

// A process that does not run cannot tell whether the node does.
func TestStallIgnoresLateTicks(t *testing.T) {
	s, now := stall{interval: testInterval}, time.Unix(1, 0)
	s.tick(now, 1, 1)
	for range 1000 {
		now = now.Add(3 * testInterval)
		if v := s.tick(now, 1, 1); v != calm {
			t.Fatalf("%v after late ticks only", v)
		}
	}
	if v := s.run(&now, 10, 1, 1); v != ping {
		t.Errorf("%v after punctual ticks, want a ping", v)
	}
}

func TestStallForgetsAtRest(t *testing.T) {
	s, now := stall{interval: testInterval}, time.Unix(1, 0)
	s.tick(now, 1, 1)
	s.run(&now, stallTicks-2, 1, 1)
	s.pause()
	now = now.Add(time.Hour)
	s.tick(now, 1, 1)
	if v := s.run(&now, stallTicks-2, 1, 1); v == trip {
		t.Error("silence before the rest was counted")
	}
}

// The decision driven by a timer, as watch drives it: the first call after the
// node fell silent waits 50 ms at most.
func TestStallBoundInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := stall{interval: defaultStallTimeout / (stallTicks + 1)}
		timer := time.NewTicker(s.interval)
		defer timer.Stop()
		s.tick(time.Now(), 0, 1)
		time.Sleep(s.interval + 1) // the worst moment: right after a tick
		s.tick(time.Now(), 0, 1)
		asked := time.Now()
		for s.tick(<-timer.C, 1, 1) != trip {
		}
		if d := time.Since(asked); d > 50*time.Millisecond {
			t.Errorf("a silent node held a call up for %v", d)
		}
	})
}

package bench

import (
	"reflect"
	"testing"
)

// Ten nodes with random routes reach what one cache of their size would; without
// a directory they reach what one of them would.
func TestSimulatedDirectory(t *testing.T) {
	trace, err := OpenTrace(FullTrace)
	if err != nil {
		t.Fatal(err)
	}
	cfg := SimulateConfig{Trace: trace, Policy: "lru_rev", Capacity: 5859, BlockTokens: DefaultBlockTokens, Nodes: 10, Route: RouteRandom, Seed: 1}
	if raceEnabled {
		cfg.Trace = &Trace{Name: trace.Name, Requests: trace.Requests[:4000]}
	}
	with, err := Simulate(cfg)
	if err != nil || with.Err() != nil {
		t.Fatal(err, with.Err())
	}
	again, err := Simulate(cfg)
	if err != nil || !reflect.DeepEqual(with, again) {
		t.Errorf("the same seed gives another result: %+v, %+v", with, again)
	}
	cfg.NoDirectory = true
	without, err := Simulate(cfg)
	if err != nil || without.Err() != nil {
		t.Fatal(err, without.Err())
	}
	if raceEnabled {
		if with.Hit < 2*without.Hit {
			t.Errorf("hit rate %v with a directory, %v without", with.Hit, without.Hit)
		}
		return
	}
	if with.Hit < .35 || without.Hit < .09 || without.Hit > .11 {
		t.Errorf("hit rate %v with a directory, want at least .35; %v without, want about .1", with.Hit, without.Hit)
	}
}

package client

import "testing"

func TestSpareIsReusedWithinItsBound(t *testing.T) {
	s := spare{limit: 1000}
	page := s.take(400, 400)
	s.give([]private{{data: page}, {}}, 0)
	if s.bytes != 400 {
		t.Fatalf("%d bytes kept of 400", s.bytes)
	}
	again := s.take(400, 400)
	if &again[0] != &page[0] || s.bytes != 0 {
		t.Errorf("other memory, %d bytes kept", s.bytes)
	}
	s.give([]private{{data: again}, {data: make([]byte, 300)}, {data: make([]byte, 500)}}, 0)
	if s.bytes > 1000 || s.bytes < 500 {
		t.Errorf("%d bytes kept, the bound is 1000", s.bytes)
	}
	if other := s.take(200, 900); len(other) != 200 || s.bytes > 100 {
		t.Errorf("%d bytes kept beside 900 of leases", s.bytes)
	}
	s.give([]private{{data: make([]byte, 10)}}, 1000)
	if s.bytes != 0 || len(s.free) != 0 {
		t.Errorf("%d bytes kept beside leases that take all", s.bytes)
	}
}

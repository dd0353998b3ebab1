package client

import "sync"

// spare is the memory of pages that were streamed and released, for the next ones:
// fresh memory has to be cleared, and touched by the kernel, before anything is
// received into it. The zero value is ready. With the leases that hold pages it
// stays within Config.PrivateBytes.
type spare struct {
	limit int64 // Config.PrivateBytes

	mu    sync.Mutex
	free  map[uint64][][]byte // by length
	bytes int64               // of free
}

// take is memory of n bytes with any content; leased is what leases hold or will,
// this page included.
func (s *spare) take(n uint64, leased int64) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if free := s.free[n]; len(free) > 0 {
		page := free[len(free)-1]
		free[len(free)-1] = nil
		s.free[n] = free[:len(free)-1]
		s.bytes -= int64(n)
		return page
	}
	s.trimLocked(s.limit - leased)
	return make([]byte, n)
}

// give takes the pages of a lease that nobody reads any more; leased is what other
// leases hold.
func (s *spare) give(pages []private, leased int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free == nil {
		s.free = map[uint64][][]byte{}
	}
	for _, p := range pages {
		if n := uint64(len(p.data)); n > 0 {
			s.free[n] = append(s.free[n], p.data)
			s.bytes += int64(n)
		}
	}
	s.trimLocked(s.limit - leased)
}

// trimLocked leaves the rest to the collector until no more than most bytes are kept.
func (s *spare) trimLocked(most int64) {
	for n, free := range s.free {
		for s.bytes > most && len(free) > 0 {
			free[len(free)-1] = nil
			free = free[:len(free)-1]
			s.bytes -= int64(n)
		}
		if s.free[n] = free; len(free) == 0 {
			delete(s.free, n)
		}
	}
}

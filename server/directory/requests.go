package directory

type requestID [16]byte

func toRequestID(b []byte) (id requestID, ok bool) {
	return id, copy(id[:], b) == len(id) && len(b) == len(id)
}

// requestLog remembers the last maxRequests request ids and what they did, so
// that a command retried after an unknown fate applies once.
type requestLog struct {
	results map[requestID]Result
	ring    []requestID // oldest at next once it is full
	next    int
}

func (l *requestLog) add(id requestID, r Result) {
	if len(l.ring) < maxRequests {
		l.ring = append(l.ring, id)
	} else {
		delete(l.results, l.ring[l.next])
		l.ring[l.next] = id
		l.next = (l.next + 1) % maxRequests
	}
	l.results[id] = r
}

// each visits the requests, oldest first.
func (l *requestLog) each(f func(requestID, Result)) {
	for i := range l.ring {
		id := l.ring[(l.next+i)%len(l.ring)]
		f(id, l.results[id])
	}
}

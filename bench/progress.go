package bench

import "sync"

// Progress is told how many of how many steps of a workload are done, by one
// goroutine at a time. nil: nobody is.
type Progress func(done, total int64)

// stepper returns a function that counts one step at each call. It is safe for
// concurrent use.
func stepper(p Progress, total int64) func() {
	var mu sync.Mutex
	var done int64
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if done++; p != nil {
			p(done, total)
		}
	}
}

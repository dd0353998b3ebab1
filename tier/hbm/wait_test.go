package hbm

import (
	"runtime"
	"time"
)

var tick = time.NewTicker(time.Millisecond)

// wait lets the goroutines of an arena run: they touch real memory, which fake
// time cannot wait for.
func wait() { runtime.Gosched(); <-tick.C }

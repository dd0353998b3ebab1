package placement

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestCopies replays scripts. "choose bytes=N" has a line per copy, such as
// "7 distance=1ms queued=1000000 speed=1000000000 out", and answers the order in
// which the copies are tried. "health" has a line per event, "fail", "reach"
// or "serve", at a time.
func TestCopies(t *testing.T) {
	datadriven.RunTest(t, "testdata/copies", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "choose":
			return chooseScript(t, d)
		case "health":
			return healthScript(t, d)
		}
		return "no such command\n"
	})
}

func chooseScript(t *testing.T, d *datadriven.TestData) string {
	var bytes int64
	d.ScanArgs(t, "bytes", &bytes)
	var copies []Copy
	for line := range strings.Lines(d.Input) {
		var c Copy
		for i, word := range strings.Fields(line) {
			var err error
			name, value, _ := strings.Cut(word, "=")
			switch {
			case i == 0:
				_, err = fmt.Sscan(word, &c.Node[0])
			case name == "distance":
				c.Distance, err = time.ParseDuration(value)
			case name == "queued":
				_, err = fmt.Sscan(value, &c.QueuedBytes)
			case name == "speed":
				_, err = fmt.Sscan(value, &c.BytesPerSecond)
			case name == "out":
				c.Out = true
			}
			if err != nil {
				d.Fatalf(t, "%q: %v", line, err)
			}
		}
		copies = append(copies, c)
	}
	var out strings.Builder
	for {
		i, ok := ChooseCopy(copies, bytes)
		if !ok {
			return out.String() + "none\n"
		}
		fmt.Fprintf(&out, "%d\n", copies[i].Node[0])
		copies[i].Out = true
	}
}

func healthScript(t *testing.T, d *datadriven.TestData) string {
	start := time.Unix(1000, 0)
	var h Health
	var out strings.Builder
	for line := range strings.Lines(d.Input) {
		f := strings.Fields(line)
		at, err := time.ParseDuration(f[1])
		if err != nil {
			d.Fatalf(t, "%q: %v", line, err)
		}
		now := start.Add(at)
		switch f[0] {
		case "fail":
			h = h.Failed(now)
		case "reach":
			h = h.Reached()
		case "serve":
			h = h.Served()
		}
		fmt.Fprintf(&out, "out %v, due %v", h.Out(), h.Due(now))
		if !h.ProbeAt.IsZero() {
			fmt.Fprintf(&out, ", probe at %v", h.ProbeAt.Sub(start))
		}
		out.WriteString("\n")
	}
	return out.String()
}

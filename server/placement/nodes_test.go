package placement

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestNodes replays scripts: a line per record of the directory, as "3 down 61s
// claims 5", followed by what gossip says of the node: "seen" (default), "gone 12s",
// "left", or "unseen": gossip never heard of it; "drained": an operator emptied it. Node 1 leads and has looked for as
// long as the command says, an hour if it does not; a node is down after 5 s, its
// claims go after 1 min, its record after 24 h.
func TestNodes(t *testing.T) {
	patience := Patience{DownAfter: 5 * time.Second, GraceTime: time.Minute, ForgetIn: 24 * time.Hour}
	statuses := map[string]NodeStatus{"up": Up, "down": Down, "draining": Draining, "left": Departed}
	datadriven.RunTest(t, "testdata/nodes", func(t *testing.T, d *datadriven.TestData) string {
		watched := "1h"
		d.MaybeScanArgs(t, "watched", &watched)
		duration := func(s string) time.Duration {
			v, err := time.ParseDuration(s)
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			return v
		}
		var records []NodeRecord
		var members []Member
		for line := range strings.Lines(d.Input) {
			f := strings.Fields(line)
			n, err := strconv.Atoi(f[0])
			if err != nil || statuses[f[1]] == 0 {
				d.Fatalf(t, "%q: %v", line, err)
			}
			r := NodeRecord{ID: NodeID{byte(n)}, Incarnation: 1, Status: statuses[f[1]], For: duration(f[2])}
			m, heard := Member{ID: r.ID, Seen: true}, true
			for i := 3; i < len(f); i++ {
				switch f[i] {
				case "drained":
					r.Drained = true
				case "claims":
					i++
					if r.Claims, err = strconv.ParseInt(f[i], 10, 64); err != nil {
						d.Fatalf(t, "%v", err)
					}
				case "gone":
					i++
					m.Seen, m.Gone = false, duration(f[i])
				case "left":
					m.Seen, m.Left = false, true
				case "unseen":
					heard = false
				}
			}
			records = append(records, r)
			if heard {
				members = append(members, m)
			}
		}
		var out strings.Builder
		for _, x := range NextTends(records, members, NodeID{1}, duration(watched), patience) {
			fmt.Fprintf(&out, "%d: %v\n", x.Node.ID[0], x.Kind)
		}
		if out.Len() == 0 {
			return "nothing\n"
		}
		return out.String()
	})
}
